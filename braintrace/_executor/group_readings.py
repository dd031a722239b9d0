"""Readings of a group: the variables through which outputs and other groups read it, such as spikes.

A reading is computed unit by unit from the new states. Broadcast signals and filters of traces apply there,
and its derivative (the slope of a spike) is element-wise.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._compiler.caching import cached
from .._compiler.graph import TraceGraph
from .._compiler.groups import HiddenGroup
from .._compiler.links import numbered
from .._compiler.positions import positions_of
from .._compiler.primitives import FLAT
from .._compiler.program import Var
from .._compiler.reach import Reach
from .._compiler.slices import behind, computed_from, values_of
from .jacobian import states_of, without
from .trace_math import States


@cached
def find_readings(graph: TraceGraph) -> dict[int, list[Var]]:
    """The readings of each group: the last variables on each path that are computed unit by unit."""
    return {g.index: _readings(graph, g) for g in graph.hidden_groups}


def _readings(graph: TraceGraph, group: HiddenGroup) -> list[Var]:
    info, program = graph.module_info, graph.module_info.program
    came = positions_of(program).sources({h.outvar: Reach.at(h.positions) for h in group.hidden}, {})
    own = numbered(group.varshape)

    def is_of_unit(v: Var) -> bool:
        reach = came.get(v)
        if reach is None or reach.shape != own.shape:
            return False
        return bool(np.all(reach.lowest == own) and np.all(reach.highest == own))

    mine = set(group.hidden_outvars)
    others = graph.other_outvars(group)
    states = [
        a
        for e in info.entries
        for v, a in zip(e.invars, e.outvars, strict=True)
        if a is not v and a not in mine
    ]
    ends = [*info.out_atoms, *others, *states]
    matters = behind(program, ends)
    # arrays with an axis of states count as readings themselves
    by_unit = {v for v in came if is_of_unit(v)} | {h.outvar for h in group.hidden}
    found: list[Var] = []
    for v in sorted(by_unit, key=lambda v: v.index):
        if v not in matters or v in computed_from(program, found) - set(found):
            continue
        readers = [program.nodes[i] for i in program.readers.get(v, [])]
        passed_on = [o for node in readers if node.primitive not in FLAT for o in node.outputs]
        beyond = any(o in matters and o not in by_unit for o in passed_on)
        if beyond or any(v is a for a in ends):
            found.append(v)
    return found


def slopes(graph: TraceGraph, env: Mapping[Var, Array]) -> dict[int, list[States]]:
    """The element-wise derivative of each reading of each group in each state."""
    result: dict[int, list[States]] = {}
    for group in graph.hidden_groups:
        varies = computed_from(graph.module_info.program, group.hidden_outvars)
        readings = find_readings(graph)[group.index]
        result[group.index] = [_slope(graph, env, group, varies, v) for v in readings]
    return result


def _slope(
    graph: TraceGraph, env: Mapping[Var, Array], group: HiddenGroup, varies: set[Var], reading: Var
) -> States:
    def function(new: list[Array]) -> list[Array]:
        known = without(env, varies, dict(zip(group.hidden_outvars, new, strict=True)))
        return values_of(graph.module_info.program, [reading], known)

    (out,), pull = jax.vjp(function, [env[v] for v in group.hidden_outvars])
    (dh,) = pull([jnp.ones_like(out)])
    return [p for h, d in zip(group.hidden, dh, strict=True) for p in states_of(h, d)]
