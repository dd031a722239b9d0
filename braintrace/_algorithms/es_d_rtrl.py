"""ES-D-RTRL (pp-prop): the trace as a product of an input average and a state average.

    x'[t] = a x'[t-1] + x[t]                  f'[t] = b D[t] f'[t-1] + (1 - b) J[t]
    gradient = sum_t x'[t] (g[t] f'[t]) / (1 - b^(t+1))

Memory grows with the number of units, not of weights. A bias is a weight on a constant input of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._executor.executor import Local, is_inexact
from .._executor.traces import Trace, promoted
from .chunk import TIME, Record, factors
from .rule import Gradients, Signals, Values, add_to

_COUNT = "steps"


@dataclass(frozen=True)
class ESRule:
    """Averages of inputs (decay `inp`) and of state Jacobians (decay `out`)."""

    inp: float
    out: float
    dtype: Any = None

    def init(self, traces: Sequence[Trace], local: Local) -> Values:
        values: Values = {_COUNT: jnp.zeros((), jnp.int32)}
        for trace in traces:
            for key, now in (
                (_input_key(trace), _input(trace, local)),
                (_state_key(trace), _instant(trace, local)),
            ):
                if now is not None:
                    values[key] = jnp.zeros(now.shape, self.dtype or now.dtype)
        return values

    def update(self, traces: Sequence[Trace], values: Values, local: Local) -> Values:
        result: Values = {_COUNT: values[_COUNT] + 1}
        for trace in traces:
            now = _input(trace, local)
            key = _input_key(trace)
            if now is not None and key not in result:
                old = values[key]
                result[key] = (self.inp * old.astype(now.dtype) + now).astype(old.dtype)
            key = _state_key(trace)
            if key not in result:
                old, J = values[key], _instant(trace, local)
                new = (1 - self.out) * J
                D = local.D[trace.group.index]
                if D is not None:
                    D, f = promoted(trace.to_site(D, 2), old)
                    new = sum(promoted(new, self.out * jnp.sum(D * f[None], axis=1)))
                result[key] = new.astype(old.dtype)
        return result

    def gradient(self, traces: Sequence[Trace], values: Values, signals: Signals, local: Local) -> Gradients:
        grads: Gradients = {}
        for trace in traces:
            site = trace.relation.site.index
            inputs, weight = local.inputs[site], local.weights[site][trace.name]
            dy = self._cotangent(trace, values, signals)
            factor = None if trace.layout.x is None else _factor(trace, values[_input_key(trace)], inputs)
            add_to(grads, trace, trace.from_cotangent(factor, dy, inputs, weight))
        return grads

    def _cotangent(self, trace: Trace, values: Values, signals: Signals) -> Any:
        """`g f'` as a cotangent of `y`, with the bias of the start taken out."""
        g, f = promoted(trace.to_site(signals[trace.group.index], 1), values[_state_key(trace)])
        real = jnp.finfo(g.dtype).dtype
        # before the first step the averages are zero, and so is what they say
        steps = jnp.maximum(values[_COUNT], 1).astype(real)
        scale = 1 / (1 - jnp.asarray(self.out, real) ** steps)
        if trace.layout.x is None:
            scale = scale * (1 - jnp.asarray(self.inp, real) ** steps) / (1 - self.inp)
        return trace.to_y(jnp.sum(g * f, axis=0)) * scale.astype(g.dtype)

    def chunk(
        self, traces: Sequence[Trace], values: Values, record: Record, *, fresh: bool, keep: bool
    ) -> tuple[Values, Gradients]:
        """The averages step by step, which is cheap; all the products with inputs at once."""

        def averages(values: Values) -> Values:
            return {_input_key(t): values[_input_key(t)] for t in traces if t.layout.x is not None}

        def cotangents(values: Values, signals: Signals | None) -> Any:
            return None if signals is None else {t.key: self._cotangent(t, values, signals) for t in traces}

        def body(values: Values, step: Any) -> Any:
            local, signals, old = record.one(step)
            before = (averages(values), cotangents(values, old)) if old is not None else None
            values = self.update(traces, values, local)
            return values, (before, (averages(values), cotangents(values, signals)))

        after, parts = jax.lax.scan(body, values, record.steps)
        grads: Gradients = {}
        for part in parts:
            if part is None:
                continue
            average, dy = part
            for trace in traces:
                site = trace.relation.site.index
                inputs, weight = record.local.inputs[site], record.local.weights[site][trace.name]
                factor = None
                if trace.layout.x is not None:
                    factor = _factors(trace, average[_input_key(trace)], inputs)
                add_to(grads, trace, trace.from_cotangent(factor, dy[trace.key], inputs, weight, TIME))
        return after, grads


def _instant(trace: Trace, local: Local) -> Any:
    return local.J[trace.relation.site.index, trace.group.index]


def _state_key(trace: Trace) -> str:
    return f"{trace.relation.site.index}:{'.'.join(trace.relation.weight_path)}:f->{trace.group.index}"


def _input_key(trace: Trace) -> str:
    return f"{trace.relation.site.index}:{'.'.join(trace.relation.weight_path)}:{trace.name}:x"


def _input(trace: Trace, local: Local) -> Any | None:
    """What is averaged: the op's input, where its factor is linear in it; else the factor itself."""
    if trace.layout.x is None:
        return None
    x = local.inputs[trace.relation.site.index][0]
    if is_inexact(x):
        return x
    factor = trace.factor(local.inputs[trace.relation.site.index])
    assert factor is not None
    return factor[0]


def _factor(trace: Trace, average: Any, inputs: Sequence[Any]) -> Any:
    if is_inexact(inputs[0]):
        return trace.factor([average, *inputs[1:]])
    factor = trace.factor(inputs)
    assert factor is not None
    return average, factor[1]


def _factors(trace: Trace, averages: Any, inputs: Sequence[Any]) -> Any:
    """`_factor` at every step."""
    if is_inexact(inputs[0]):
        return factors(trace, [averages, *inputs[1:]])
    found = factors(trace, inputs)
    assert found is not None
    return averages, found[1]
