"""Numpy versions of the primitives that move elements (slice, gather, pad, ...).

JAX would compile a program for each of them, which takes a thousand times longer than the copy itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

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


def gathered(params: Options, operand: Shape, indices: Array, out: Shape) -> Array:
    """The element of the operand that each element of a gather is a copy of; -1 if none."""
    d = params["dimension_numbers"]
    return _addresses(
        operand,
        indices,
        out,
        d.offset_dims,
        d.collapsed_slice_dims,
        d.start_index_map,
        d.operand_batching_dims,
        d.start_indices_batching_dims,
        params["slice_sizes"],
        params["mode"],
    )


def scattered(params: Options, operand: Shape, indices: Array, updates: Shape) -> Array:
    """The element of the operand that each update of a scatter is written to; -1 if none."""
    d = params["dimension_numbers"]
    window = iter(updates[a] for a in d.update_window_dims)
    single = (*d.inserted_window_dims, *d.operand_batching_dims)
    return _addresses(
        operand,
        indices,
        updates,
        d.update_window_dims,
        d.inserted_window_dims,
        d.scatter_dims_to_operand_dims,
        d.operand_batching_dims,
        d.scatter_indices_batching_dims,
        [1 if axis in single else next(window) for axis in range(len(operand))],
        params["mode"],
    )


def _addresses(
    operand: Shape,
    indices: Array,
    out: Shape,
    window: Sequence[int],
    collapsed: Sequence[int],
    indexed: Sequence[int],
    batching: Sequence[int],
    indices_batching: Sequence[int],
    sizes: Sequence[int],
    mode: jax.lax.GatherScatterMode,
) -> Array:
    places = np.indices(out)
    batch = tuple(places[a] for a in range(len(out)) if a not in window)
    address = np.zeros((len(operand), *out), np.int64)
    inside = np.ones(out, bool)
    for k, axis in enumerate(indexed):
        start, last = indices[(*batch, k)].astype(np.int64), operand[axis] - sizes[axis]
        if mode == jax.lax.GatherScatterMode.CLIP:
            start = np.clip(start, 0, last)
        inside &= (start >= 0) & (start <= last)
        address[axis] = start
    for axis, b in zip(batching, indices_batching, strict=True):
        address[axis] = batch[b]
    rest = [axis for axis in range(len(operand)) if axis not in collapsed and axis not in batching]
    for axis, a in zip(rest, window, strict=True):
        address[axis] += places[a]
    strides = np.cumprod([1, *operand[:0:-1]])[::-1] if operand else np.zeros(0, np.int64)
    return np.where(inside, np.tensordot(strides, address, 1), -1)
