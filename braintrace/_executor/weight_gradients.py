"""Weight gradients of a whole sequence as one product, from cotangents of the outputs of ops:

    dL/dw = sum_t x[t] dy[t]

as an einsum with the axis labels of the op, for every site whose weights depend on parameters alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._compiler.find_relations import SiteWeights
from .._compiler.module_info import ModuleInfo
from .._compiler.program import Site
from .._compiler.provenance import provenance
from .._ops.axis_labels import Labels, Layout, align
from .._types import DTypeLike
from .effective_weights import OfWeights, Weighted, effective_weights, known_params
from .partial_sums import PARTS, DeviceSplit
from .pull_back import pull_back
from .trace_math import promoted

TIME, ROWS = "time", "rows"


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


def product(
    operands: Sequence[tuple[Array, Labels]], want: Labels, parts: DeviceSplit | None = None
) -> Array:
    """An einsum of arrays with axis labels, summed over the axes that are not in `want`.

    With `parts`, per-device partial sums of it, along the first axis.
    """
    if parts is not None:
        operands, want = [parts.of(*pair) for pair in operands], (PARTS, *want)
    arrays = promoted(*(array for array, _ in operands))
    have = tuple(a for a in want if any(a in labels for _, labels in operands))
    pairs = [(array, labels) for array, (_, labels) in zip(arrays, operands, strict=True)]
    return align(_einsum(pairs, have), have, want)


def floating_factor(layout: Layout, inputs: Sequence[Array], dtype: DTypeLike) -> tuple[Array, Labels] | None:
    """The factor `x` of an op as floating numbers, also if it is boolean (spikes); None if it is one."""
    found = layout.factor(inputs)
    if found is None or jnp.issubdtype(found[0].dtype, jnp.inexact):
        return found
    return found[0].astype(dtype), found[1]


def factor_over_time(
    layout: Layout, inputs: Sequence[Array], dtype: DTypeLike
) -> tuple[Array, Labels] | None:
    """`floating_factor` at all steps."""
    if layout.x is None:
        return None
    labels: list[Labels] = []  # labels are not arrays, so that `vmap` cannot return them

    def one(inputs: list[Array]) -> Array:
        x, have = floating_factor(layout, inputs, dtype)  # type: ignore[misc]
        labels.append(have)
        return x

    return jax.vmap(one)(list(inputs)), (TIME, *labels[0])


def merge_leading_axes(
    x: Array, have: Labels, dy: Array, y: Labels, w: Labels
) -> tuple[Array, Labels, Array, Labels]:
    """Merge leading axes that both operands have and `w` lacks, because XLA would transpose both operands."""
    pairs = itertools.takewhile(lambda p: p[0] == p[1] and p[0] not in w, zip(have, y, strict=False))
    n = sum(1 for _ in pairs)
    if n < 2:
        return x, have, dy, y
    one = ("+".join(have[:n]),)
    x, dy = (a.reshape(-1, *a.shape[n:]) for a in (x, dy))
    return x, one + have[n:], dy, one + y[n:]


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


def pull_weights(
    info: ModuleInfo,
    params: list[Array],
    consts: list[Array],
    of: Sequence[OfWeights],
    keys: Sequence[tuple[int, str]],
) -> Callable[[list[Array]], list[Array | None]]:
    """The pull-back from gradients of effective weights, by (site, name), to those of the parameters.

    `of` are the relations or weighted sites with these keys.
    """
    layouts = {(w.site.index, name): layout for w in of for name, layout in w.layouts.items()}

    def weights(params: list[Array]) -> list[Array]:
        effective = effective_weights(info.program, known_params(info, params, consts), of)
        return [effective[i][name] for i, name in keys]

    values, pull = pull_back(weights, params)

    def back(terms: list[Array]) -> list[Array | None]:
        pairs = zip(keys, terms, values, strict=True)
        return pull([as_weight(layouts[k], d, v) for k, d, v in pairs])[0]  # type: ignore[no-any-return]

    return back
