"""The size of the traces of each operation, by `jax.eval_shape` of the arrays that a rule starts with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax

from ..._compiler.graph import TraceGraph
from ..._executor.executor import ETraceGraphExecutor
from ..._executor.slots import Slot
from ..._rules.d_rtrl import D_RTRL
from ..._rules.es_d_rtrl import ES_D_RTRL
from ..._rules.rule import TraceRule, Values


@dataclass(frozen=True)
class Sizes:
    """The bytes that D_RTRL and ES_D_RTRL store for one site, and the shapes of the traces of its weights."""

    d_rtrl: int
    es_d_rtrl: int
    shapes: dict[tuple[str, int], tuple[int, ...]]  # by weight and group


def trace_sizes(graph: TraceGraph) -> dict[int, Sizes]:
    """Return the sizes of the traces of every site that has some, by the index of the site."""
    slots, traces = _start(D_RTRL(), graph)
    _, averages = _start(ES_D_RTRL(), graph)
    found = {}
    for site in (r.site.index for r in graph.hidden_param_op_relations):
        own = [slot for slot in slots if slot.relation.site.index == site]
        shapes = {(slot.name, slot.group.index): traces[slot.key].shape for slot in own}
        found[site] = Sizes(_bytes(traces, site), _bytes(averages, site), shapes)
    return found


def _start(rule: TraceRule, graph: TraceGraph) -> tuple[list[Slot], Values]:
    """Return the slots of a rule's traces, and the shapes of the arrays that it starts with."""
    executor = ETraceGraphExecutor(rule.seen(graph, windows=False))
    return executor.slots, jax.eval_shape(lambda: rule.start(executor))


def _bytes(arrays: Values, site: int) -> int:
    """Return the bytes of the arrays of one site, whose names begin with its index."""
    own = [a for name, a in arrays.items() if name.startswith(f"{site}:")]
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in own)
