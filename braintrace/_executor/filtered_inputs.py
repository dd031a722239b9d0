"""Traces that are filtered inputs, because the local Jacobians are the same for all outputs of an op.

    trace[b, i, o] = f[b, i]        f <- D f + J x        if D[b, o] and J[b, o] do not vary along o

The compiler proves it for leaky integrators, for spiking neurons with one decay whose reset carries no
derivative, and for leaky readouts. Such a trace lacks the axis `o`, and the gradient is a product of the
signal and the filtered input. `with_columns` leaves out columns of a weight that reach no state with memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from .._compiler.graph import TraceGraph
from .._compiler.positions import positions_of
from .._compiler.program import Var, read_program, struct
from .._compiler.reach import Reach
from .._compiler.uniform_axes import UniformAxes
from .._ops.axis_labels import Labels
from .._types import Leaves
from .executor import ETraceGraphExecutor
from .slots import Slot, find_slots


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


def with_columns(graph: TraceGraph) -> TraceGraph:
    """The graph with relations that name the columns of their weights that reach a group.

    Those of an LSTM's output gate reach no state with memory.
    """
    relations, positions = graph.hidden_param_op_relations, positions_of(graph.module_info.program)
    sites = {}
    for group in graph.hidden_groups:
        others = set(graph.other_outvars(group))
        starts = {h.outvar: Reach.at(h.positions) for h in group.hidden}
        sites[group.index] = positions.reaches(starts, others.__contains__)[1]
    found: dict[int, dict[tuple[str, int], tuple[int, int]]] = {}
    for slot in find_slots(relations):
        site, layout, label = slot.relation.site.index, slot.layout, next(reversed(slot.layout.w), None)
        reach = sites[slot.group.index].get(site)
        if slot.positions.on_hidden or layout.y_is_viewed or slot.uniform or reach is None:
            continue
        if label in layout.y and label not in (layout.x or ()) and not reach.is_empty:
            reaching = np.moveaxis(reach.highest >= 0, layout.y.index(label), -1)
            columns = np.flatnonzero(reaching.any(tuple(range(reaching.ndim - 1))))
            start, stop = int(columns[0]), int(columns[-1]) + 1
            if stop - start < reaching.shape[-1]:
                found.setdefault(site, {})[slot.name, slot.group.index] = start, stop
    if not found:
        return graph
    each = (replace(r, columns=found.get(r.site.index, {})) for r in relations)
    return graph._replace(hidden_param_op_relations=type(relations)(each))


def _find_uniform(graph: TraceGraph) -> dict[int, dict[tuple[str, int], Labels]]:
    """By site, the uniform labels of the trace of each of its weights for each group it feeds."""
    executor, info = ETraceGraphExecutor(graph), graph.module_info
    slots = [t for t in executor.slots if _candidates(t)]
    if not slots:
        return {}
    parts = [info.fixed_invars, info.arg_invars, list(info.program.consts), [e.invars for e in info.carried]]

    def jacobians(params: Leaves, args: Leaves, consts: Leaves, carried: list[Leaves]) -> list[Any]:
        local = executor.local(params, args, consts, carried, None)
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
