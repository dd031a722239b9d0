"""Readouts with memory: layers that read others, and that only outputs read, without a weight between."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .dataflow import Flow, solve
from .groups import HiddenGroup
from .primitives import PRODUCTS
from .program import Node, Var
from .slices import behind

if TYPE_CHECKING:
    from .graph import ETraceGraph


def find_readouts(graph: ETraceGraph) -> set[int]:
    """The groups, by number, whose states are those of output units, such as the state of a leaky readout.

    The loss reaches such a unit at once, without a weight that another signal could stand in for, and no
    other state: its own trace and the back-propagated signal give its exact gradient.
    """
    return {g.index for g in graph.hidden_groups if _is_readout(graph, g)}


def _is_readout(graph: ETraceGraph, group: HiddenGroup) -> bool:
    info, program = graph.module_info, graph.module_info.program
    new, own = set(group.hidden_outvars), {*group.hidden_invars, *group.hidden_outvars}
    others = {v for g in graph.hidden_groups if g is not group for v in (*g.hidden_invars, *g.hidden_outvars)}
    carried = {a for e in info.carried for a in e.outvars if isinstance(a, Var)} - new
    after = set(solve(Flow[bool](), program, ((v, True) for v in own))[0])
    at_once = behind(program, info.out_atoms, stops=new)
    reads = not others.isdisjoint(behind(program, new))
    if not reads or not after.isdisjoint(carried) or new.isdisjoint(at_once):
        return False
    if not at_once.isdisjoint(group.hidden_invars):  # an output reads what the state was
        return False
    on_the_way = after & behind(program, [*info.out_atoms, *new])
    params = {v for e in info.params for v in e.invars}

    def is_product(node: Node) -> bool:
        weighs = node.primitive in PRODUCTS and not params.isdisjoint(behind(program, node.inputs))
        return bool(node.sites) or weighs

    return not any(is_product(n) for n in program.nodes if not on_the_way.isdisjoint(n.outputs))
