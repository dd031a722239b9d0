"""D-RTRL: a trace of every weight, advanced by the diagonal of the recurrence.

trace[t] = D[t] trace[t-1] + J[t] x[t]        gradient = sum_t <g[t], trace[t]>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._executor.executor import Local
from .._executor.traces import Trace, promoted
from .chunk import Record, chunk_gradient, chunk_traces, propagated
from .rule import Gradients, Signals, Values, add_to


@dataclass(frozen=True)
class DRule:
    """Traces of every weight; `dtype` is what they are stored in (None: what they are computed in)."""

    dtype: Any = None

    def init(self, traces: Sequence[Trace], local: Local) -> Values:
        values = {}
        for trace in traces:
            _, factor, J = local.at(trace)
            weight = local.weights[trace.relation.site.index][trace.name]
            now = trace.instant(factor, J, weight)
            values[trace.key] = jnp.zeros(now.shape, self.dtype or now.dtype)
        return values

    def update(self, traces: Sequence[Trace], values: Values, local: Local) -> Values:
        result = {}
        # where a loop takes two steps at a time, XLA would fuse their updates and read the traces once more
        values = jax.lax.optimization_barrier(values)
        for trace in traces:
            D, factor, J = local.at(trace)
            weight = local.weights[trace.relation.site.index][trace.name]
            now = trace.instant(factor, J, weight)
            old = values[trace.key]
            if D is not None:
                now = sum(promoted(trace.decay(D, old), now))
            result[trace.key] = now.astype(old.dtype)
        return result

    def gradient(self, traces: Sequence[Trace], values: Values, signals: Signals, local: Local) -> Gradients:
        grads: Gradients = {}
        for trace in traces:
            inputs = local.inputs[trace.relation.site.index]
            g = trace.lift(signals[trace.group.index], inputs, 1)
            add_to(grads, trace, trace.contract(g, values[trace.key]))
        return grads

    def chunk(
        self, traces: Sequence[Trace], values: Values, record: Record, *, fresh: bool, keep: bool
    ) -> tuple[Values, Gradients]:
        before = None if fresh else values
        signals = {k: propagated(record, k) for k in record.signals}
        grads = chunk_gradient(traces, before, record, signals)
        after = chunk_traces(traces, before, record, values) if keep else values
        return after, grads
