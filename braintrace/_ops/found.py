"""Marked versions of JAX's own primitives, with axis labels derived from their parameters.

`MARKED[primitive](operands, at, params)` applies the marked version, with operand `at` as the weight. It
returns None if the axis labels cannot be derived. `mark_elements` is for element-wise weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from string import ascii_letters
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._compat import Primitive, primitives
from .._types import Array, DTypeLike, Options
from .axis_labels import Term
from .convolution import Window, conv_p
from .elementwise import element_wise_p
from .primitive import ETPPrimitive, register_primitive

# (contracting axes of each operand, batch axes of each operand)
DotDimensions = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
# for each indexed axis: the column of the index array, and the size of the axis
Sizes = tuple[tuple[int, int], ...]


def _bind(op: ETPPrimitive, *operands: Array, **options: object) -> Array:
    y: Array = op.bind(*operands, names=("weight",), levels=(), found=True, **options)
    return y


def mark_elements(weight: Array, axes: Sequence[int | None], shape: Sequence[int]) -> Array:
    """Broadcast a weight to `shape`, marked; `axes` are its axes there (None for an axis of length one)."""
    weight = jnp.squeeze(weight, [i for i, a in enumerate(axes) if a is None])
    kept = tuple(a for a in axes if a is not None)
    return _bind(element_wise_p, weight, axes=kept, shape=tuple(shape))


def _dot(x: Array, weight: Array, *, letters: str, at: int, **params: object) -> Array:
    y: Array = primitives.dot_general_p.bind(*((x, weight) if at else (weight, x)), **params)
    return y


dot_general_p = register_primitive("etp_dot_general", _dot, lambda letters, **_: {"weight": Term(letters)})


def dot_letters(dimension_numbers: DotDimensions, ndims: tuple[int, int], at: int) -> str:
    """The einsum equation `x,weight->y` of a `dot_general` whose operand `at` is the weight.

    >>> dot_letters((((1,), (0,)), ((), ())), (2, 2), at=1)
    'ba,ac->bc'
    """
    (lc, rc), (lb, rb) = dimension_numbers
    fresh = iter(ascii_letters)
    left, right = dict[int, str](), dict[int, str]()
    for a, b in (*zip(lb, rb, strict=True), *zip(lc, rc, strict=True)):
        left[a] = right[b] = next(fresh)
    free = [[i for i in range(n) if i not in own] for n, own in zip(ndims, (left, right), strict=True)]
    left.update((i, next(fresh)) for i in free[0])
    right.update((i, next(fresh)) for i in free[1])
    y = [*(left[i] for i in (*lb, *free[0])), *(right[i] for i in free[1])]
    sides = ["".join(own[i] for i in range(n)) for n, own in zip(ndims, (left, right), strict=True)]
    return f"{sides[1 - at]},{sides[at]}->{''.join(y)}"


def _mark_dot(operands: Sequence[Array], at: int, params: Options) -> Array | None:
    ndims = jnp.ndim(operands[0]), jnp.ndim(operands[1])
    letters = dot_letters(params["dimension_numbers"], ndims, at)
    return _bind(dot_general_p, operands[1 - at], operands[at], letters=letters, at=at, **params)


def _mark_conv(operands: Sequence[Array], at: int, params: Options) -> Array | None:
    x, kernel = operands
    specs = params["dimension_numbers"]
    if at != 1 or not 3 <= kernel.ndim <= 5:
        return None
    window = Window(
        kernel=tuple(kernel.shape[i] for i in specs.rhs_spec[2:]),
        strides=tuple(params["window_strides"]),
        padding=tuple(params["padding"]),
        lhs_dilation=tuple(params["lhs_dilation"]),
        rhs_dilation=tuple(params["rhs_dilation"]),
        feature_groups=params["feature_group_count"],
        batch_groups=params["batch_group_count"],
        batched=True,
        specs=specs,
        precision=params["precision"],
        preferred=params["preferred_element_type"],
    )
    return _bind(conv_p, x, kernel, window=window)


def _gather(
    indices: Array, weight: Array, *, letters: str, sizes: Sizes, dtype: DTypeLike, **params: Any
) -> Array:
    return lax.gather(weight, indices, **params)


def _gather_terms(
    letters: str, sizes: Sizes, dtype: DTypeLike, mode: lax.GatherScatterMode, **_: object
) -> dict[str, Term]:
    def places(indices: Array) -> Array:
        """One-hot encoding of the looked-up entries of the weight, with an axis for each index."""
        found = jnp.ones(indices.shape[:-1] + (1,) * len(sizes), dtype)
        for i, (column, size) in enumerate(sizes):
            at = indices[..., column]
            if mode is lax.GatherScatterMode.CLIP:
                at = jnp.clip(at, 0, size - 1)
            others = [indices.ndim - 1 + j for j in range(len(sizes)) if j != i]
            found = found * jnp.expand_dims(jax.nn.one_hot(at, size, dtype=dtype), others)
        return found

    return {"weight": Term(letters, x=places)}


gather_p = register_primitive("etp_gather", _gather, _gather_terms)


def _mark_gather(operands: Sequence[Array], at: int, params: Options) -> Array | None:
    """Mark a gather that takes, along each axis of the weight, one entry at an index or all entries."""
    weight, indices = operands
    numbers, taken = params["dimension_numbers"], params["slice_sizes"]
    clipped = params["mode"] is lax.GatherScatterMode.CLIP  # clipped to 0 where the axis is taken whole
    columns = {
        a: i for i, a in enumerate(numbers.start_index_map) if not (clipped and taken[a] == weight.shape[a])
    }
    sizes = [1 if a in columns else n for a, n in enumerate(weight.shape)]
    if at != 0 or numbers.operand_batching_dims or sizes != list(taken):
        return None
    fresh = iter(ascii_letters)
    w = [next(fresh) for _ in range(weight.ndim)]
    kept = [a for a in range(weight.ndim) if a not in numbers.collapsed_slice_dims]
    batch = [next(fresh) for _ in range(indices.ndim - 1)]
    # an axis that is looked up and kept gets a label of its own in y, because its length there is one
    offset = iter([next(fresh) if a in columns else w[a] for a in kept])
    others, num_out = iter(batch), len(batch) + len(kept)
    y = [next(offset if i in numbers.offset_dims else others) for i in range(num_out)]
    x = [*batch, *(w[a] for a in columns)]
    return _bind(
        gather_p,
        indices,
        weight,
        letters=f"{''.join(x)},{''.join(w)}->{''.join(y)}",
        sizes=tuple((i, weight.shape[a]) for a, i in columns.items()),
        dtype=weight.dtype,
        **params,
    )


def _mark_slice(operands: Sequence[Array], at: int, params: Options) -> Array | None:
    """Mark a dynamic slice as a gather with one index."""
    weight, *starts = operands
    taken = params["slice_sizes"]
    cut = tuple(a for a in range(weight.ndim) if taken[a] != weight.shape[a])
    if at != 0 or not cut:
        return None
    numbers = lax.GatherDimensionNumbers(tuple(range(weight.ndim)), (), cut)
    options = {"dimension_numbers": numbers, "slice_sizes": tuple(taken), "mode": lax.GatherScatterMode.CLIP}
    return _mark_gather((weight, jnp.stack([starts[a] for a in cut])), at, options)


MARKED: dict[Primitive, Callable[[Sequence[Array], int, Options], Array | None]] = {
    primitives.dot_general_p: _mark_dot,
    primitives.conv_general_dilated_p: _mark_conv,
    primitives.gather_p: _mark_gather,
    primitives.dynamic_slice_p: _mark_slice,
}
