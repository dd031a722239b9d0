"""Traces that are filtered inputs, because the local Jacobians are the same for all outputs of an op.

    trace[b, i, o] = f[b, i]        f <- D f + J x        if D[b, o] and J[b, o] do not vary along o

The compiler proves it for leaky integrators, for spiking neurons with one decay whose reset carries no
derivative, and for leaky readouts. Such a trace lacks the axis `o`, and the gradient is a product of the
signal and the filtered input.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from .._compiler.graph import TraceGraph
from .._compiler.positions import positions_of
from .._compiler.program import Var, read_program, struct
from .._compiler.uniform_axes import UniformAxes
from .._ops.axis_labels import Labels
from .executor import ETraceGraphExecutor, Leaves
from .slots import Slot


def with_filtered_inputs(graph: TraceGraph) -> TraceGraph:
    """The graph with relations that name the axis labels along which their traces are uniform."""
    found = _find_uniform(graph)
    if not found:
        return graph
    relations = graph.hidden_param_op_relations
    return graph._replace(
        hidden_param_op_relations=type(relations)(
            replace(r, uniform=found.get(r.site.index, {})) for r in relations
        )
    )


def _find_uniform(graph: TraceGraph) -> dict[int, dict[tuple[str, int], Labels]]:
    """By site, the uniform labels of the trace of each of its weights for each group it feeds."""
    executor, info = ETraceGraphExecutor(graph), graph.module_info
    slots = [t for t in executor.slots if _candidates(t)]
    if not slots:
        return {}
    parts = [info.fixed_invars, info.arg_invars, list(info.program.consts), [e.invars for e in info.carried]]

    def jacobians(params: Leaves, args: Leaves, consts: Leaves, rest: list[Leaves]) -> list[Any]:
        local = executor.local(params, args, consts, rest, None)
        return [local.at(t)[::2] for t in slots]

    closed, shapes = jax.make_jaxpr(jacobians, return_shape=True)(*jax.tree.map(struct, parts))
    program = read_program(closed, marks=False)
    var_of = dict(zip(program.inputs, jax.tree.leaves(parts), strict=True))
    constants = positions_of(info.program).constants

    def value(var: Var) -> Any:
        own = var_of[var]
        return constants(own) if own in info.program.consts else None

    axes = UniformAxes(program, value)
    each = jax.tree.unflatten(jax.tree.structure(shapes), program.outputs)
    found: dict[int, dict[tuple[str, int], Labels]] = {}
    for slot, (D, J) in zip(slots, each, strict=True):
        same = {slot.y[a - 1] for a in axes(J) if a >= 1}
        if D is not None:
            same &= {slot.at[a - 2] for a in axes(D) if a >= 2}
        uniform = tuple(a for a in _candidates(slot) if a in same)
        if uniform:
            found.setdefault(slot.relation.site.index, {})[slot.name, slot.group.index] = uniform
    return found


def _candidates(slot: Slot) -> Labels:
    """The axes of the weight that are axes of the op's output, and not of its factor."""
    have = slot.layout.x or ()
    return tuple(a for a in slot.layout.w if a in slot.at and a not in have)
