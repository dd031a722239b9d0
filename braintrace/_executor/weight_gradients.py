"""Weight gradients of a whole sequence as one product, from cotangents of the outputs of ops:

    dL/dw = sum_t x[t] dy[t]

as an einsum with the axis labels of the op, for every site whose weights depend on parameters alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._compiler.find_relations import SiteWeights
from .._compiler.module_info import ModuleInfo
from .._compiler.program import Site
from .._compiler.provenance import provenance
from .._ops.axis_labels import Labels, Layout, align
from .trace_math import promoted

TIME, ROWS, PARTS = "time", "rows", "parts"


@dataclass(frozen=True, eq=False)
class Weighted:
    """A site whose weights depend on parameters alone."""

    site: Site
    varying: tuple[str, ...]  # the weights that a loop around it slices
    layouts: dict[str, Layout]


def find_weighted(info: ModuleInfo, traced: Sequence[Site]) -> list[Weighted]:
    """The sites whose weight gradients follow from axis labels; those of user-defined ops only if traced."""
    origin = provenance(info.program, info.param_invars)
    found = []
    for site in info.program.sites:
        weights = SiteWeights(info, site, origin)
        plain = weights.changed_by() is None
        known = site.primitive.is_known or any(s is site for s in traced)
        # the labels of an op with index inputs depend on them: unknown in a branch not taken
        told = "cond" not in site.context or site.num_inputs < 2
        if weights.paths and plain and known and told:
            found.append(Weighted(site, weights.varying, site.layouts(weights.varying, weights.paths)))
    return found


@dataclass(frozen=True)
class Parts:
    """A batch axis split over devices, so that sums over it are per-device partial sums."""

    label: str
    ways: int

    def of(self, array: Array, labels: Labels) -> tuple[Array, Labels]:
        """Split the batch axis of an array; returns it with its labels."""
        if self.label not in labels:
            return array, labels
        at = labels.index(self.label)
        return self.split(array, at), (*labels[:at], PARTS, *labels[at:])

    def split(self, array: Array, axis: int) -> Array:
        """Split an axis into (parts, entries of each part)."""
        return array.reshape(*array.shape[:axis], self.ways, -1, *array.shape[axis + 1 :])


def row_axis(ndim: int) -> int:
    """The position of the row axis among the axes of a weight: before the last, for one matrix product."""
    return max(ndim - 1, 0)


def in_front(ndim: int) -> int:
    """The row axis in front: products over time are one for each row, those with the rows a single one."""
    return 0


def with_rows(labels: Labels, axis: Callable[[int], int] = row_axis) -> Labels:
    at = axis(len(labels))
    return (*labels[:at], ROWS, *labels[at:])


def over_time(layout: Layout, inputs: Sequence[Array], dy: Array, want: Labels) -> Array:
    """`sum_t x[t] dy[t]` with the axes `want`; `inputs` are (time, ...).

    `dy` is (time, *y) or, if `want` has rows, (rows, time, *y).
    """
    has_rows = ROWS in want
    *rest, last = factors_over_time(layout, inputs, dy, rows=has_rows)
    if has_rows and all(want.index(ROWS) < want.index(a) for a in layout.w):
        # one product per row: otherwise XLA transposes the result of a single one, which is much larger
        rest = [(jnp.broadcast_to(x, (dy.shape[0], *x.shape)), (ROWS, *have)) for x, have in rest]
    return product([*rest, last], want)


def factors_over_time(
    layout: Layout, inputs: Sequence[Array], dy: Array, *, rows: bool
) -> list[tuple[Array, Labels]]:
    """`x` (left out if it is one) and `dy` of all steps, with their axis labels."""
    view = jax.vmap(layout.view_y)
    view = jax.vmap(view, (0, None)) if rows else view
    dy, y = view(dy, list(inputs)), (*((ROWS,) if rows else ()), TIME, *layout.y)
    factor = factor_over_time(layout, inputs, dy.dtype)
    return [*([] if factor is None else [factor]), (dy, y)]


def product(operands: Sequence[tuple[Array, Labels]], want: Labels) -> Array:
    """An einsum of arrays with axis labels, summed over the axes that are not in `want`."""
    arrays = promoted(*(array for array, _ in operands))
    have = tuple(a for a in want if any(a in labels for _, labels in operands))
    pairs = [(array, labels) for array, (_, labels) in zip(arrays, operands, strict=True)]
    return align(_einsum(pairs, have), have, want)


def factor_over_time(layout: Layout, inputs: Sequence[Array], dtype: Any) -> tuple[Array, Labels] | None:
    """The factor `x` of an op at all steps, in `dtype` if it is not inexact, with its labels; None if one."""
    if layout.x is None:
        return None
    labels: list[Labels] = []  # labels are not arrays, so that `vmap` cannot return them

    def one(inputs: list[Array]) -> Array:
        x, have = layout.factor(inputs)  # type: ignore[misc]
        labels.append(have)
        return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(dtype)  # type: ignore[no-any-return]

    return jax.vmap(one)(list(inputs)), (TIME, *labels[0])


def _einsum(operands: Sequence[tuple[Array, Labels]], out: Labels) -> Array:
    number = {a: i for i, a in enumerate(dict.fromkeys(a for _, have in operands for a in have))}
    args: list[Any] = []
    for array, have in operands:
        args += [array, [number[a] for a in have]]
    return jnp.einsum(*args, [number[a] for a in out])


def as_weight(layout: Layout, dw: Array, weight: Array) -> Array:
    """Reshape a gradient with the axis labels of the weight to the effective weight."""
    struct = jax.ShapeDtypeStruct(weight.shape, weight.dtype)
    dw = dw if jnp.iscomplexobj(weight) else dw.real
    dw = jnp.broadcast_to(dw, jax.eval_shape(layout.view_w, struct).shape)
    return jax.linear_transpose(layout.view_w, struct)(dw.astype(weight.dtype))[0]  # type: ignore[no-any-return]
