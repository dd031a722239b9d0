"""Links: which elements of a primitive's inputs affect which elements of its outputs.

There are three kinds, all exact and cheap in numpy: a reshape, shared axes (element-wise operations,
reductions, broadcasts, transposes, products) and pairs of element numbers (slices, gathers, padding,
windows). Every other primitive links all elements. A link can be followed in both directions. `fine_links`
resolve the positions of a convolution and products with masked (zero) weights, at a higher cost.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _compat
from .._compat import Primitive, primitives
from .._ops.found import DotDimensions, dot_letters
from .._types import Aval, Options
from . import primitives as tables
from .constants import Zeros
from .copies import Array as Array
from .copies import Shape as Shape
from .copies import as_gather, copy, gathered, window_axes
from .program import Node


@dataclass(frozen=True)
class Same:
    """Element `k` in row-major order is linked to element `k`: a reshape."""


@dataclass(frozen=True)
class Axes:
    """Axes with the same number share an index; an element is linked to all elements along the others."""

    inp: tuple[int, ...]
    out: tuple[int, ...]

    def moves(self, *, back: bool) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """From one end to the other: the axes to reduce, the order of those left, and where to add axes."""
        have, want = (self.out, self.inp) if back else (self.inp, self.out)
        kept = [a for a in have if a in want]
        return (
            tuple(i for i, a in enumerate(have) if a not in want),
            tuple(kept.index(a) for a in want if a in kept),
            tuple(i for i, a in enumerate(want) if a not in kept),
        )


@dataclass(frozen=True, eq=False)
class Pairs:
    """Element `inp[k]` of the input is linked to element `out[k]` of the output."""

    inp: Array
    out: Array


Link = Same | Axes | Pairs
Linked = list[tuple[int, int, Link]]  # (input, output, link)
Known = Callable[[int], Array | None]  # the value of an integer input, if it does not depend on data


def links(
    primitive: Primitive, params: Options, ins: Sequence[Aval], outs: Sequence[Aval], known: Known
) -> Linked | None:
    """The links of one primitive, from the shapes and types of its inputs and outputs.

    None if the primitive is unknown, or the indices that it takes are.
    """
    shapes, out = [tuple(a.shape) for a in ins], tuple(outs[0].shape) if outs else ()
    if primitive is _compat.optimization_barrier_p:
        return [(i, i, Same()) for i in range(len(ins))]
    if primitive in tables.ELEMENT_WISE:
        return [(i, 0, _broadcast(s, out)) for i, s in enumerate(shapes)]
    if tables.is_reshape(primitive, params):
        return [(0, 0, Same())]
    if primitive is primitives.transpose_p:
        return [(0, 0, Axes(tuple(range(len(out))), tuple(params["permutation"])))]
    if primitive is primitives.broadcast_in_dim_p:
        return [(0, 0, _in_dim(shapes[0], out, params["broadcast_dimensions"]))]
    if primitive in tables.REDUCTIONS:
        axes = tuple(range(len(shapes[0])))
        return [(0, 0, Axes(axes, tuple(a for a in axes if a not in params["axes"])))]
    if primitive is primitives.dot_general_p:
        *operands, product = _dot_axes(shapes, params["dimension_numbers"])
        return [(i, 0, Axes(own, product)) for i, own in enumerate(operands)]
    if primitive in tables.CUMULATIVE:
        return [(0, 0, _mixed_along(len(out), [params["axis"]]))]
    if primitive is primitives.sort_p:
        link = _mixed_along(len(out), [params["dimension"]])
        return [(i, j, link) for i in range(len(ins)) for j in range(len(outs))]
    if primitive in tables.ALONG_AN_AXIS:  # `top_k` has its axis among the parameters from 0.10 on
        last: int = params.get("reduction_dimension", len(out) - 1)
        axis: int = params.get("axis", last)
        return [(0, 0, _mixed_along(len(out), [axis % len(out)]))]  # from the end, where it is negative
    if primitive is primitives.fft_p:
        n = len(params["fft_lengths"])
        return [(0, 0, _mixed_along(len(out), range(len(out) - n, len(out))))]
    if primitive in tables.ON_MATRICES:
        lead = max(map(len, shapes)) - 2
        return all_with_all(shapes, [tuple(o.shape) for o in outs], lead)
    if primitive is _compat.split_p:
        cuts = np.cumsum(params["sizes"])[:-1]
        return _parts(np.split(numbered(shapes[0]), cuts, axis=params["axis"]))
    if primitive is _compat.unstack_p:
        return _parts(np.moveaxis(numbered(shapes[0]), params["axis"], 0))
    if primitive in tables.WINDOWS:
        link = _windows(shapes[0], out, params)
        return [(i, j, link) for i, s in enumerate(shapes) for j in range(len(outs)) if s == shapes[0] != ()]
    if primitive is primitives.conv_general_dilated_p:
        return _conv(shapes, out, params)
    if primitive in tables.COPIES:
        return _copies(primitive, params, ins, out, known)
    if primitive in tables.SCATTERS:
        return _scatter(params, ins, out, known)
    return None


def all_with_all(ins: Sequence[Shape], outs: Sequence[Shape], lead: int = 0) -> Linked:
    """Link all elements that have the same indices along the first `lead` axes."""
    return [
        (i, j, Axes(tuple(range(len(s))), (*range(lead), *range(len(s), len(s) + len(o) - lead))))
        for i, s in enumerate(ins)
        for j, o in enumerate(outs)
    ]


def _broadcast(shape: Shape, out: Shape) -> Link:
    if shape == out:
        return Same()
    return _in_dim(shape, out, tuple(range(len(out) - len(shape), len(out))))


def _in_dim(shape: Shape, out: Shape, dims: Sequence[int]) -> Link:
    fresh = itertools.count(len(out))
    inp = tuple(d if n == out[d] else next(fresh) for n, d in zip(shape, dims, strict=True))
    return Axes(inp, tuple(range(len(out))))


def _mixed_along(ndim: int, axes: Sequence[int] | range) -> Link:
    return Axes(tuple(range(ndim)), tuple(a + ndim if a in axes else a for a in range(ndim)))


def _dot_axes(shapes: list[Shape], dimension_numbers: DotDimensions) -> list[tuple[int, ...]]:
    """The axes of the operands and of the result of a product, numbered by its einsum equation."""
    labels = dot_letters(dimension_numbers, (len(shapes[0]), len(shapes[1])), at=1)
    return [tuple(map(ord, part)) for part in labels.replace("->", ",").split(",")]


def _conv(shapes: list[Shape], out: Shape, params: Options) -> Linked:
    spec = params["dimension_numbers"]
    n = len(out)
    axes = list(range(n, 2 * n))
    if params["batch_group_count"] == 1:
        axes[spec.out_spec[0]] = spec.lhs_spec[0]
    ((_, _, kernel),) = all_with_all(shapes[1:2], [out])
    return [(0, 0, Axes(tuple(range(n)), tuple(axes))), (1, 0, kernel)]


def numbered(shape: Shape, start: int = 0) -> Array:
    """The number of each element, in row-major order."""
    return np.arange(start, start + math.prod(shape), dtype=np.int32).reshape(shape)


def _parts(parts: Iterable[Array]) -> Linked:
    return [(0, j, Pairs(p.ravel(), np.arange(p.size))) for j, p in enumerate(parts)]


def _copies(
    primitive: Primitive, params: Options, ins: Sequence[Aval], out: Shape, known: Known
) -> Linked | None:
    """Copy element numbers instead of data, to find the source of each element of the output."""
    num_data = tables.INDICES[primitive].start if primitive in tables.INDICES else len(ins)
    shapes = [tuple(a.shape) for a in ins]
    indices = [v for i in range(num_data, len(ins)) if (v := known(i)) is not None]
    if num_data + len(indices) < len(ins):
        return _somewhere(primitive, params, shapes, out)
    starts = [0, *itertools.accumulate(map(math.prod, shapes[:num_data]))]
    data = list(map(numbered, shapes[:num_data], starts))
    numbers = copy(primitive, params, [*data, *indices], out, fill=-1).ravel()
    found: Linked = []
    for i, (start, end) in enumerate(itertools.pairwise(starts)):
        hit = np.flatnonzero((numbers >= start) & (numbers < end))
        found.append((i, 0, Pairs(numbers[hit] - start, hit)))
    return found


def _scatter(params: Options, ins: Sequence[Aval], out: Shape, known: Known) -> Linked | None:
    """Updates are added to, or replace, the elements at the indices."""
    indices, updates = known(1), tuple(ins[2].shape)
    if indices is None:
        turned = {a: b for b, a in _indexed(params, out, updates).items()}
        return [(0, 0, Same()), (2, 0, _whole_axes(updates, out, turned))]
    put = gathered(params, out, indices, updates).ravel()
    hit = np.flatnonzero(put >= 0)
    update = params["update_jaxpr"]
    kept: Link = Same()
    if update is None or update.outvars[0] is update.invars[1]:  # the old value is lost
        left = np.setdiff1d(np.arange(math.prod(out)), put[hit])
        kept = Pairs(left, left)
    return [(0, 0, kept), (2, 0, Pairs(hit, put[hit]))]


def _somewhere(primitive: Primitive, params: Options, shapes: list[Shape], out: Shape) -> Linked:
    """Copies with unknown indices: only along axes that are copied as a whole, the index is preserved."""
    if primitive is primitives.dynamic_slice_p:
        return [(0, 0, _whole_axes(shapes[0], out, {a: a for a in range(len(out))}))]
    if primitive is primitives.dynamic_update_slice_p:
        return [(0, 0, Same()), (1, 0, _whole_axes(shapes[1], out, {a: a for a in range(len(out))}))]
    return [(0, 0, _whole_axes(shapes[0], out, _indexed(params, shapes[0], out)))]


def _indexed(params: Options, operand: Shape, out: Shape) -> dict[int, int]:
    """The axis of a gather's output (of a scatter's updates) for each axis of the operand that it has."""
    d = as_gather(params["dimension_numbers"])
    batch = [a for a in range(len(out)) if a not in d.offset_dims]
    kept = (batch[a] for a in d.start_indices_batching_dims)
    pairs = dict(zip(window_axes(d, len(operand)), d.offset_dims, strict=True))
    return pairs | dict(zip(d.operand_batching_dims, kept, strict=True))


def _whole_axes(inp: Shape, out: Shape, pairs: dict[int, int]) -> Link:
    """Link the paired axes of equal size by index, and all elements along the others."""
    n = len(inp)
    same = {b: a for a, b in pairs.items() if inp[a] == out[b]}
    return Axes(tuple(range(n)), tuple(same.get(b, n + b) for b in range(len(out))))


def _windows(shape: Shape, out: Shape, params: Options) -> Link:
    """Link each element to the windows that contain it."""
    ones = (1,) * len(shape)
    window = params["window_dimensions"]
    base, dilation = (params.get(f"{name}_dilation") or ones for name in ("base", "window"))
    grid = list(np.indices((*window, *out)).reshape(2 * len(shape), -1))
    offsets, places = grid[: len(shape)], grid[len(shape) :]
    at, ok = _read_at(places, offsets, shape, params["window_strides"], dilation, base, params["padding"])
    reached = np.ravel_multi_index([p[ok] for p in places], out)
    return Pairs(np.ravel_multi_index([a[ok] for a in at], shape), reached)


def _read_at(
    places: Sequence[Array], offsets: Sequence[Array], shape: Sequence[int], *dims: Sequence[Any]
) -> tuple[list[Array], Array]:
    """The indices that windows at `places` read at `offsets`, and which of them are inside an array.

    `dims` are, for each axis, strides, dilations of the window and of the array, and padding.
    """
    found, ok = [], np.ones(np.shape(places[0]), bool)
    for p, o, n, stride, dilation, base, (low, _) in zip(places, offsets, shape, *dims, strict=True):
        at = p * stride + o * dilation - low
        ok &= (at >= 0) & (at % base == 0) & (at // base < n)
        found.append(at // base)
    return found, ok


_MOST = 2**22  # pairs; above this, all elements are linked


def fine_links(node: Node, zeros: Zeros) -> Linked | None:
    """The fine links of a convolution or a product; None if there are none."""
    ins, outs = [a.aval for a in node.inputs], [v.aval for v in node.outputs]
    if node.primitive is primitives.conv_general_dilated_p:
        return fine_conv(node.params, ins, outs)
    if node.primitive is primitives.mul_p:
        return _masked([zeros(a) for a in node.inputs], [tuple(a.shape) for a in ins], tuple(outs[0].shape))
    if node.primitive is primitives.dot_general_p:
        known = [zeros(a) for a in node.inputs]
        return _masked_dot([tuple(a.shape) for a in ins], node.params["dimension_numbers"], known)
    return None


def _masked(nonzero: Sequence[Array | None], shapes: Sequence[Shape], out: Shape) -> Linked | None:
    """Link an operand of a product only where the other is nonzero; one operand may be a scalar."""
    if all(z is None for z in nonzero):
        return None
    everything = np.arange(math.prod(out))
    found: Linked = []
    for i, (other, shape) in enumerate(zip(reversed(nonzero), shapes, strict=True)):
        at = everything if other is None else np.flatnonzero(np.broadcast_to(other, out))
        own = np.broadcast_to(np.arange(math.prod(shape)).reshape(shape), out).ravel()
        found.append((i, 0, Pairs(own[at], at)))
    return found


def _masked_dot(
    shapes: list[Shape], dimension_numbers: DotDimensions, nonzero: list[Array | None]
) -> Linked | None:
    if all(z is None for z in nonzero):
        return None
    *operands, product = _dot_axes(shapes, dimension_numbers)
    size: dict[int, int] = {}
    for own, shape in zip(operands, shapes, strict=True):
        size.update(zip(own, shape, strict=True))
    if math.prod(size.values()) > _MOST:
        return None
    grid = dict(zip(size, np.indices(list(size.values())).reshape(len(size), -1), strict=True))
    ok = np.ones(math.prod(size.values()), bool)
    for z, own in zip(nonzero, operands, strict=True):
        if z is not None:
            ok &= z[tuple(grid[a] for a in own)]
    flat = lambda own: np.ravel_multi_index([grid[a][ok] for a in own], [size[a] for a in own])
    return [(i, 0, Pairs(flat(own), flat(product))) for i, own in enumerate(operands)]


def fine_conv(params: Options, ins: Sequence[Aval], outs: Sequence[Aval]) -> Linked | None:
    """The links of a convolution element by element; None if there are too many, or grouped batches."""
    x, k, out = (tuple(a.shape) for a in (*ins, *outs))
    spec = params["dimension_numbers"]
    groups = params["feature_group_count"]
    batch, features = out[spec.out_spec[0]], k[spec.rhs_spec[0]]
    window = [k[a] for a in spec.rhs_spec[2:]]
    places = [out[a] for a in spec.out_spec[2:]]
    size = (batch, features, k[spec.rhs_spec[1]], *window, *places)
    if params["batch_group_count"] != 1 or math.prod(size) > _MOST:
        return None
    n, o, i, *rest = np.indices(size).reshape(len(size), -1)
    offsets, at = rest[: len(window)], rest[len(window) :]
    dims = [params[name] for name in ("window_strides", "rhs_dilation", "lhs_dilation", "padding")]
    where, ok = _read_at(at, offsets, [x[a] for a in spec.lhs_spec[2:]], *dims)
    channel = o // (features // groups) * k[spec.rhs_spec[1]] + i
    of_x = _flat(x, spec.lhs_spec, [n, channel, *where], ok)
    of_k = _flat(k, spec.rhs_spec, [o, i, *offsets], ok)
    of_y = _flat(out, spec.out_spec, [n, o, *at], ok)
    return [(0, 0, Pairs(of_x, of_y)), (1, 0, Pairs(of_k, of_y))]


def _flat(shape: Shape, spec: Sequence[int], indices: Sequence[Array], ok: Array) -> Array:
    """Element numbers from indices in the axis order of a convolution spec."""
    by_axis = dict(zip(spec, indices, strict=True))
    return np.ravel_multi_index([by_axis[a][ok] for a in range(len(shape))], shape)
