"""Numpy versions of the primitives that move elements (slice, gather, pad, ...).

JAX would compile a program for each of them, which takes a thousand times longer than the copy itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.lax import GatherDimensionNumbers, ScatterDimensionNumbers

from .. import _compat
from .._compat import Primitive, primitives
from .._types import NumPyArray, Options
from .._types import Shape as Shape

Array = NumPyArray


def copy(
    primitive: Primitive, params: Options, operands: Sequence[Array], out: Shape, fill: int = 0
) -> Array:
    """Apply one of `COPIES`; a gather reads `fill` outside its operand."""
    first = operands[0]
    match primitive:
        case primitives.slice_p:
            steps = params["strides"] or (1,) * first.ndim
            cut = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
            return first[tuple(slice(*s) for s in cut)]
        case primitives.rev_p:
            return np.flip(first, params["dimensions"])
        case primitives.concatenate_p:
            return np.concatenate(operands, axis=params["dimension"])
        case _compat.stack_p:
            return np.stack(operands, axis=params["axis"])
        case _compat.tile_p:
            return np.tile(first, params["reps"])
        case primitives.pad_p:
            return _pad(first, operands[1], params["padding_config"])
        case primitives.gather_p:
            at = gathered(params, first.shape, operands[1], out)
            return np.where(at < 0, fill, first.ravel()[at])
        case primitives.dynamic_slice_p:
            return first[_window(first.shape, params["slice_sizes"], operands[1:])]
        case primitives.dynamic_update_slice_p:
            result = np.array(first)
            result[_window(first.shape, operands[1].shape, operands[2:])] = operands[1]
            return result
    raise AssertionError(primitive)


def _window(shape: Shape, sizes: Sequence[int], starts: Sequence[Array]) -> tuple[slice, ...]:
    """The slices of a window; as in JAX, one that does not fit is moved inside the array."""
    first = [int(np.clip(s, 0, n - k)) for s, n, k in zip(starts, shape, sizes, strict=True)]
    return tuple(slice(s, s + k) for s, k in zip(first, sizes, strict=True))


def _pad(x: Array, value: Array, config: Sequence[tuple[int, int, int]]) -> Array:
    for axis, (low, high, interior) in enumerate(config):
        n = x.shape[axis]
        at = low + np.arange(n) * (interior + 1)
        size = low + high + n + max(n - 1, 0) * interior
        inside = (at >= 0) & (at < size)
        padded = np.full((*x.shape[:axis], size, *x.shape[axis + 1 :]), value, x.dtype)
        padded[(slice(None),) * axis + (at[inside],)] = x.compress(inside, axis)
        x = padded
    return x


def as_gather(d: GatherDimensionNumbers | ScatterDimensionNumbers) -> GatherDimensionNumbers:
    """The dimension numbers of the gather whose transpose a scatter is; those of a gather as they are."""
    if isinstance(d, GatherDimensionNumbers):
        return d
    return GatherDimensionNumbers(
        offset_dims=tuple(d.update_window_dims),
        collapsed_slice_dims=tuple(d.inserted_window_dims),
        start_index_map=tuple(d.scatter_dims_to_operand_dims),
        operand_batching_dims=tuple(d.operand_batching_dims),
        start_indices_batching_dims=tuple(d.scatter_indices_batching_dims),
    )


def window_axes(d: GatherDimensionNumbers, num_axes: int) -> list[int]:
    """The axes of the operand of a gather, among `num_axes`, that its output has, too."""
    return [a for a in range(num_axes) if a not in (*d.collapsed_slice_dims, *d.operand_batching_dims)]


def gathered(params: Options, operand: Shape, indices: Array, out: Shape) -> Array:
    """The element of the operand that each element of a gather is a copy of, or of a scatter is added to.

    `out` is the shape of the gather's output or of the scatter's updates; -1 stands for no element.
    """
    d = as_gather(params["dimension_numbers"])
    window, places = window_axes(d, len(operand)), np.indices(out)
    sizes = dict(zip(window, (out[a] for a in d.offset_dims), strict=True))
    batch = tuple(places[a] for a in range(len(out)) if a not in d.offset_dims)
    address = np.zeros((len(operand), *out), np.int64)
    inside = np.ones(out, bool)
    for k, axis in enumerate(d.start_index_map):
        start, last = indices[(*batch, k)].astype(np.int64), operand[axis] - sizes.get(axis, 1)
        if params["mode"] == jax.lax.GatherScatterMode.CLIP:
            start = np.clip(start, 0, last)
        inside &= (start >= 0) & (start <= last)
        address[axis] = start
    for axis, b in zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True):
        address[axis] = batch[b]
    for axis, a in zip(window, d.offset_dims, strict=True):
        address[axis] += places[a]
    strides = np.cumprod([1, *operand[:0:-1]])[::-1] if operand else np.zeros(0, np.int64)
    return np.where(inside, np.tensordot(strides, address, 1), -1)
