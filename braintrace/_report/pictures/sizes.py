"""The memory of the traces of each marked op, from the shapes of the arrays that a rule starts with.

Nothing is computed or allocated: the start is traced with abstract values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import jax

from ..._compiler.graph import ETraceGraph
from ..._executor.executor import ETraceGraphExecutor
from ..._rules import D_RTRL, ES_D_RTRL


@dataclass
class Sizes:
    """The bytes that each rule keeps for one site, and the shapes of the traces of its weights."""

    d_rtrl: int = 0
    es_d_rtrl: int = 0
    shapes: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)  # by weight and group


def trace_sizes(graph: ETraceGraph) -> dict[int, Sizes]:
    """The sizes of the traces of every site that has some, by the number of the site."""
    sizes = {r.site.index: Sizes() for r in graph.hidden_param_op_relations}
    for rule, total in ((D_RTRL(), "d_rtrl"), (ES_D_RTRL(), "es_d_rtrl")):
        executor = ETraceGraphExecutor(rule.seen(graph, windows=False))
        start = jax.eval_shape(lambda rule=rule, executor=executor: rule.start(executor))
        for key, array in start.items():
            site = key.partition(":")[0]  # counts of steps are not of a site
            if site.isdigit():
                size = math.prod(array.shape) * array.dtype.itemsize
                setattr(sizes[int(site)], total, getattr(sizes[int(site)], total) + size)
        for slot in executor.slots:
            if slot.key in start:
                shapes = sizes[slot.relation.site.index].shapes
                shapes[slot.name, slot.group.index] = start[slot.key].shape
    return sizes
