"""Reduce groups to the states that need traces: those with memory.

If the old value of a state is read by marked ops only, as the output of an LSTM or the last spikes of a
recurrent layer are, the state has no memory along the paths that traces cover. It is a function of the other
states and of the ops of the same step, so that its derivative within the step gives the same gradient as a
trace of its own. This saves half of the memory of a group of two states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .graph import TraceGraph
from .groups import HiddenGroup
from .leaky_readouts import with_filters
from .module_info import Hidden
from .positions import Positions, positions_of
from .program import Var
from .reach import Reach
from .reachability import Reachability, find_reachability


def remembering(graph: TraceGraph) -> TraceGraph:
    """The graph with groups reduced to the states with memory, and no traces for groups without any.

    A group that mixes positions is unchanged if one of its states has memory: a trace then keeps only the
    diagonal of a derivative that the step has in full.
    """
    positions, flows = positions_of(graph.module_info.program), find_reachability(graph)
    changed = {g: _reduced(graph, g, positions, flows) for g in graph.hidden_groups}
    relations = []
    for r in graph.hidden_param_op_relations:
        fed = [(new, m) for g, m in r.feeds if (new := changed[g]) is not None]
        if fed:
            groups, maps = map(list, zip(*fed, strict=True))
            relations.append(replace(r, hidden_groups=groups, position_maps=maps))
    return graph._replace(
        hidden_groups=type(graph.hidden_groups)(changed[g] or g for g in graph.hidden_groups),
        hidden_param_op_relations=type(graph.hidden_param_op_relations)(relations),
    )


def remembered(graph: TraceGraph) -> dict[int, HiddenGroup]:
    """For each group, by index, the states that have traces, including filters."""
    return {g.index: g for g in remembering(with_filters(graph)).hidden_groups}


def _reduced(
    graph: TraceGraph, group: HiddenGroup, positions: Positions, flows: Reachability
) -> HiddenGroup | None:
    """A group without the states that have no memory; None if none of them has."""
    maps = [m for r in graph.hidden_param_op_relations for g, m in r.feeds if g is group]
    read = {c.old for c in flows.of(flows.group_bits(group.index)) if flows.is_read_old(c)}
    kept = [h.invar in read or _remembers(graph, group, h, positions) for h in group.hidden]
    if not any(kept):
        return None
    if all(kept) or not group.is_local or not all(m.complete for m in maps):
        return group
    pairs = [(h, r) for h, r, k in zip(group.hidden, group.within, kept, strict=True) if k]
    return replace(group, hidden=tuple(h for h, _ in pairs), within=tuple(r for _, r in pairs))


def _remembers(graph: TraceGraph, group: HiddenGroup, hidden: Hidden, positions: Positions) -> bool:
    """Whether states read the old value other than through marked ops, or another group reads the new one."""
    new = [h.outvar for h in graph.module_info.hidden]
    others = graph.other_outvars(group)
    shared = any(h is not hidden and h.outvar is hidden.outvar for h in group.hidden)
    return shared or _reaches(positions, hidden.invar, new) or _reaches(positions, hidden.outvar, others)


def _reaches(positions: Positions, var: Var, ends: Sequence[Var]) -> bool:
    came = positions.sources({var: Reach.identity(var.aval.shape)}, {})
    return any(v in came for v in ends)
