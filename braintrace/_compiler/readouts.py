"""Readouts with memory: layers that read others, and that only outputs read, without a weight between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .caching import cached
from .dataflow import Flow, solve
from .evaluation import View, evaluate
from .groups import HiddenGroup
from .module_info import Hidden
from .primitives import PRODUCTS
from .program import Var, read_program
from .slices import behind, plain_site

if TYPE_CHECKING:
    from .graph import ETraceGraph


@cached
def find_readouts(graph: ETraceGraph) -> set[int]:
    """The groups, by number, whose states are those of output units, such as the state of a leaky readout.

    The loss reaches such a unit at once, without a weight that another signal could stand in for, and no
    other state: its own trace and the back-propagated signal give its exact gradient.
    """
    return {g.index for g in graph.hidden_groups if _is_readout(graph, g)}


def decay_of(graph: ETraceGraph, readout: Hidden) -> float | None:
    """The decay of a leaky readout; None if that is no constant, but made of parameters."""
    program, old = graph.module_info.program, readout.invar

    def decay(*values: Any) -> Any:
        known = {**program.consts, **dict(zip(program.inputs, values, strict=True))}

        def new(value: Any) -> Any:
            view = View(known={**known, old: value}, at_site=lambda site, world: plain_site)
            return evaluate(program, [(readout.outvar, None)], view)[0]

        return jax.jvp(new, (known[old],), (jnp.ones_like(known[old]),))[1].ravel()[0]

    zeros = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in program.inputs]
    made = read_program(jax.make_jaxpr(decay)(*zeros))
    return float(decay(*zeros)) if behind(made, made.outputs).isdisjoint(made.inputs) else None


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
    params = {v for e in info.params for v in e.invars}
    on_the_way = after & behind(program, [*info.out_atoms, *new])
    ways = [n for n in program.nodes if not on_the_way.isdisjoint(n.outputs)]
    products = [
        n for n in ways if n.primitive in PRODUCTS and not params.isdisjoint(behind(program, n.inputs))
    ]
    return not products and not any(n.sites for n in ways)
