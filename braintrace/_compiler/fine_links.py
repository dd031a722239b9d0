"""Finer links at a higher cost: positions of a convolution, and products with masked (zero) weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._compat import primitives
from .links import Array, Axes, Linked, Pairs, Shape, dot_axes
from .zeros import Zeros

_MOST = 2**22  # pairs; above this, all elements are linked


def fine_links(node: Any, zeros: Zeros) -> Linked | None:
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


def _masked_dot(shapes: list[Shape], dimension_numbers: Any, nonzero: list[Array | None]) -> Linked | None:
    if all(z is None for z in nonzero):
        return None
    linked = dot_axes(shapes, dimension_numbers)
    size: dict[int, int] = {}
    for (_, _, link), shape in zip(linked, shapes, strict=True):
        assert isinstance(link, Axes)
        size.update(zip(link.inp, shape, strict=True))
    if math.prod(size.values()) > _MOST:
        return None
    axes_of = list(size)
    grid = dict(zip(axes_of, np.indices(list(size.values())).reshape(len(axes_of), -1), strict=True))
    axes = [link.inp for _, _, link in linked if isinstance(link, Axes)]
    ok = np.ones(math.prod(size.values()), bool)
    for z, own in zip(nonzero, axes, strict=True):
        if z is not None:
            ok &= z[tuple(grid[a] for a in own)]
    out = next(link.out for _, _, link in linked if isinstance(link, Axes))
    flat = lambda own: np.ravel_multi_index([grid[a][ok] for a in own], [size[a] for a in own])
    return [(i, 0, Pairs(flat(own), flat(out))) for i, own in enumerate(axes)]


def fine_conv(params: dict[str, Any], ins: Sequence[Any], outs: Sequence[Any]) -> Linked | None:
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
    ok, where = np.ones(n.shape, bool), []
    dims = [params[name] for name in ("window_strides", "rhs_dilation", "lhs_dilation", "padding")]
    for p, d, length, s, rhs, lhs, (low, _) in zip(
        at, offsets, (x[a] for a in spec.lhs_spec[2:]), *dims, strict=True
    ):
        q = p * s + d * rhs - low
        ok &= (q >= 0) & (q % lhs == 0) & (q // lhs < length)
        where.append(q // lhs)
    channel = o // (features // groups) * k[spec.rhs_spec[1]] + i
    of_x = _flat(x, spec.lhs_spec, [n, channel, *where], ok)
    of_k = _flat(k, spec.rhs_spec, [o, i, *offsets], ok)
    of_y = _flat(out, spec.out_spec, [n, o, *at], ok)
    return [(0, 0, Pairs(of_x, of_y)), (1, 0, Pairs(of_k, of_y))]


def _flat(shape: Shape, spec: Sequence[int], indices: Sequence[Array], ok: Array) -> Array:
    """Element numbers from indices in the axis order of a convolution spec."""
    by_axis = dict(zip(spec, indices, strict=True))
    return np.ravel_multi_index([by_axis[a][ok] for a in range(len(shape))], shape)
