"""Delay lines: states that store past values of units along one axis.

In a ring buffer, or an array that is shifted by one entry at every step, each entry along that axis is one
more state of the same units. The line and the state written to it are one group, so that gradients through
later reads are exact. The number of traces grows by the length of the line.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .._compat import primitives
from .copies import Array
from .module_info import Hidden, hidden_arrays
from .positions import Positions, positions_of
from .primitives import COPIES, LAYOUT, named
from .program import Atom, Node, Program, Var
from .reach import Reach
from .reachability import find_reachability
from .slices import on_the_way

if TYPE_CHECKING:
    from .graph import TraceGraph

LONGEST = 16  # entries: longer lines would take too much memory by default
_MOVES = COPIES | LAYOUT | named("copy optimization_barrier scatter select_n split")


def delay_lines(graph: TraceGraph) -> list[Hidden]:
    """The delay lines through which parameters affect later losses, if a trace would cover that."""
    flows = find_reachability(graph)
    arrays = {h.invar: h for e in graph.module_info.entries if not e.is_param for h in hidden_arrays(e)}
    arrays.update({h.invar: h for h in graph.module_info.hidden})  # including parts of packed arrays
    found = []
    for c in flows.carried:
        line = arrays[c.old]
        stops = {d.new for d in flows.carried if d is not c}
        stays = c.new in on_the_way(flows.program, [c.old], [c.new], stops)  # not through marked ops alone
        if line.axis is not None or len(line.varshape) < 2 or not stays:
            continue
        if not _only_moves(flows.program, [c.old], [c.new], stops):
            continue
        axis = _axis_of(graph, line)
        if axis is not None and c.bit & flows.live and flows.is_seen(c) and flows.behind([c.new]):
            found.append(replace(line, axis=axis))
    return found


def _only_moves(
    program: Program, old: Sequence[Var], new: Sequence[Atom], stops: Container[Var] = ()
) -> bool:
    """Whether old values are only moved, not changed, on all paths to the new ones."""
    way = on_the_way(program, old, new, stops)

    def moves(node: Node) -> bool:
        if node.primitive is not primitives.cond_p:
            return node.primitive in _MOVES
        ins = [i for i, a in enumerate(node.inputs[1:]) if isinstance(a, Var) and (a in way or a in old)]
        outs = [j for j, v in enumerate(node.outputs) if v in way]
        return all(
            _only_moves(p, [p.inputs[i] for i in ins], [p.outputs[j] for j in outs]) for p in node.inner
        )

    return all(moves(node) for node in program.nodes if not way.isdisjoint(node.outputs))


def _axis_of(graph: TraceGraph, line: Hidden) -> int | None:
    """The axis along which values are moved; None if there is none, or if it is too long."""
    positions = positions_of(graph.module_info.program)
    shape = tuple(line.invar.aval.shape)
    stops = {h.outvar for h in graph.module_info.hidden if h.outvar is not line.outvar}
    if _is_local(positions, line, line.positions, stops):
        return None
    for axis, size in enumerate(shape):
        if 1 < size <= LONGEST and _is_local(positions, line, replace(line, axis=axis).positions, stops):
            return axis
    return None


def _is_local(positions: Positions, line: Hidden, places: Array, stops: set[Var]) -> bool:
    """Whether old values keep their position, and each written value has exactly one."""
    reached, sites = positions.reaches({line.outvar: Reach.at(places)}, lambda v: v in stops)
    old = reached.get(line.invar)
    stays = old is None or old.stays_at(places)
    written = [*(reached[v] for v in stops if v in reached), *sites.values()]
    return stays and all(r.width <= 1 for r in written)
