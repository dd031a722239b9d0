"""What the traces of a site cost, read off index letters; nothing is computed or allocated.

D_RTRL      states that remember x (letters of y and w)       a trace of every weight
ES_D_RTRL   the input, and states x (positions of y)          two averages
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._compiler.groups import HiddenGroup
from ..._compiler.relation import HiddenParamOpRelation, PositionMap
from ..._ops.letters import Layout

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """The bytes that each rule keeps for one site, and the shapes of the traces of its weights."""

    d_rtrl: int
    es_d_rtrl: int
    shapes: dict[tuple[str, int], Shape]  # by weight and group


def trace_sizes(relation: HiddenParamOpRelation, remembered: Mapping[int, HiddenGroup]) -> Sizes:
    """What a relation's traces cost; `remembered` are the states of each group that have traces."""
    site = relation.site
    y = jnp.dtype(site.output.aval.dtype)
    inputs = [
        jax.ShapeDtypeStruct((*site.loops, *a.aval.shape), a.aval.dtype)
        for a in site.inputs[: site.num_inputs]
    ]
    d_rtrl = es_d_rtrl = 0
    shapes: dict[tuple[str, int], Shape] = {}
    weights = _effective(relation)
    for name, layout in relation.layouts.items():
        factor = None
        if layout.x is not None:
            factor = jax.eval_shape(lambda *a, layout=layout: layout.factor(a)[0], *inputs)
        for group, positions in zip(relation.hidden_groups, relation.position_maps, strict=True):
            shape = (
                remembered[group.index].num_state,
                *_shape(relation, layout, weights[name], inputs, group, positions),
            )
            shapes[name, group.index] = shape
            d_rtrl += _count(shape) * _promoted(_of_jacobian(y, group), factor).itemsize
        if factor is not None:
            average = inputs[0] if _is_inexact(inputs[0].dtype) else factor
            kept = average.dtype if _is_inexact(average.dtype) else y
            es_d_rtrl += _count(average.shape) * jnp.dtype(kept).itemsize
    for group, positions in zip(relation.hidden_groups, relation.position_maps, strict=True):
        where = group.varshape if positions.on_hidden else site.shape
        es_d_rtrl += group.num_state * _count(where) * _of_jacobian(y, group).itemsize
    return Sizes(d_rtrl, es_d_rtrl, shapes)


def _effective(relation: HiddenParamOpRelation) -> dict[str, Any]:
    """The weights that the op sees, with an axis in front for each loop that slices them."""
    site = relation.site
    given = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in site.weights.values()]
    effective = jax.eval_shape(lambda *w: site.primitive.effective(w, site.params), *given)
    result = {}
    for name, layout in relation.layouts.items():
        front = [n for n, has in zip(site.loops, layout.weight, strict=False) if has]
        w = effective[name]
        result[name] = jax.ShapeDtypeStruct((*front, *w.shape), w.dtype)
    return result


def _shape(
    relation: HiddenParamOpRelation,
    layout: Layout,
    weight: Any,
    inputs: list[Any],
    group: HiddenGroup,
    positions: PositionMap,
) -> Shape:
    site = relation.site
    w = jax.eval_shape(layout.view_w, weight).shape
    y: Shape = site.shape
    if layout.y_is_viewed:
        struct = jax.ShapeDtypeStruct(site.shape, site.output.aval.dtype)
        y = jax.eval_shape(lambda q, *a: layout.view_y(q, a), struct, *inputs).shape
    lead = []
    if positions.on_hidden:
        hidden = _count(group.varshape)
        lead = [hidden // _count(site.shape) if _is_plain_broadcast(site.shape, group, positions) else hidden]
    for axis, (letter, n) in enumerate(zip(layout.y, y, strict=True)):
        same = not positions.on_hidden and not layout.y_is_viewed and _is_constant(positions.map, axis)
        if letter not in layout.w and not same:
            lead.append(n)
    return (*lead, *w)


def _is_constant(places: Any, axis: int) -> bool:
    return bool(np.all(places == places.take([0], axis)))


def _is_plain_broadcast(shape: Shape, group: HiddenGroup, positions: PositionMap) -> bool:
    hidden = group.varshape
    numbers = np.arange(_count(shape)).reshape(shape)
    for axes in itertools.combinations(range(len(hidden)), len(shape)):
        expanded = [1] * len(hidden)
        for n, a in zip(shape, axes, strict=True):
            expanded[a] = n
        fits = all(n in (1, hidden[a]) for n, a in zip(shape, axes, strict=True))
        if fits and np.array_equal(np.broadcast_to(numbers.reshape(expanded), hidden), positions.map):
            return True
    return False


def _count(shape: Shape) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _is_inexact(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _of_jacobian(y: Any, group: HiddenGroup) -> Any:
    """The type of `dh/dy`: that of `y`, made complex where the states are."""
    if not jnp.issubdtype(group.dtype, jnp.complexfloating):
        return y
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(y, group.dtype)


def _promoted(y: Any, factor: Any) -> Any:
    if factor is None or not _is_inexact(factor.dtype):
        return jnp.dtype(y)
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(y, factor.dtype)
