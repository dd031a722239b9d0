"""Readouts with memory: states that only outputs read, without a weight in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .caching import cached
from .groups import HiddenGroup
from .module_info import Hidden
from .primitives import PRODUCTS
from .program import Var, read_program, zeros
from .slices import behind, computed_from, values_of

if TYPE_CHECKING:
    from .graph import ETraceGraph


@cached
def find_readouts(graph: ETraceGraph) -> set[int]:
    """The indices of the groups that are output units, such as a leaky readout.

    The loss reads such a unit directly, and no other state depends on it. So its own trace and the
    back-propagated signal give its exact gradient, whatever signal a rule uses for other groups.
    """
    return {g.index for g in graph.hidden_groups if _is_readout(graph, g)}


def decay_of(graph: ETraceGraph, readout: Hidden) -> float | None:
    """The decay of a leaky readout; None if it depends on parameters."""
    program, old = graph.module_info.program, readout.invar

    def decay(*values: Any) -> Any:
        known = {**program.consts, **dict(zip(program.inputs, values, strict=True))}

        def new(value: Any) -> Any:
            return values_of(program, [readout.outvar], {**known, old: value})[0]

        return jax.jvp(new, (known[old],), (jnp.ones_like(known[old]),))[1].ravel()[0]

    inputs = [zeros(v) for v in program.inputs]
    made = read_program(jax.make_jaxpr(decay)(*inputs))
    return float(decay(*inputs)) if behind(made, made.outputs).isdisjoint(made.inputs) else None


def _is_readout(graph: ETraceGraph, group: HiddenGroup) -> bool:
    info, program = graph.module_info, graph.module_info.program
    new, own = set(group.hidden_outvars), {*group.hidden_invars, *group.hidden_outvars}
    others = {v for g in graph.hidden_groups if g is not group for v in (*g.hidden_invars, *g.hidden_outvars)}
    carried = {a for e in info.carried for a in e.outvars if isinstance(a, Var)} - new
    after = computed_from(program, own)
    at_once = behind(program, info.out_atoms, stops=new)
    reads = not others.isdisjoint(behind(program, new))
    if not reads or not after.isdisjoint(carried) or new.isdisjoint(at_once):
        return False
    if not at_once.isdisjoint(group.hidden_invars):  # an output reads the old state
        return False
    params = set(info.param_invars)
    on_the_way = after & behind(program, [*info.out_atoms, *new])
    ways = [n for n in program.nodes if not on_the_way.isdisjoint(n.outputs)]
    products = [
        n for n in ways if n.primitive in PRODUCTS and not params.isdisjoint(behind(program, n.inputs))
    ]
    return not products and not any(n.sites for n in ways)
