"""ES-D-RTRL (pp-prop): the trace as a product of an input average and a state average.

    x'[t] = a x'[t-1] + x[t]                  f'[t] = b D[t] f'[t-1] + (1 - b) J[t]
    gradient = sum_t x'[t] (g[t] f'[t]) / (1 - b^(t+1))

Memory grows with the number of units, not of weights. A bias is a weight on a constant input of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._executor.executor import Local, is_inexact
from .._executor.traces import Trace, promoted, sum_states
from .chunk import TIME, Record, factors, unroll
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
        return result | self._states(traces, values, local)

    def _states(self, traces: Sequence[Trace], values: Values, local: Local) -> Values:
        """The averages of state Jacobians after a step."""
        result: Values = {}
        for trace in traces:
            key = _state_key(trace)
            if key not in result:
                old, J = values[key], _instant(trace, local)
                new = (1 - self.out) * J
                D = local.D[trace.group.index]
                if D is not None:
                    D, f = promoted(trace.to_site(D, 2), old)
                    new = sum(promoted(new, self.out * sum_states(D * f[None], 1)))
                result[key] = new.astype(old.dtype)
        return result

    def gradient(self, traces: Sequence[Trace], values: Values, signals: Signals, local: Local) -> Gradients:
        grads: Gradients = {}
        for trace in traces:
            site = trace.relation.site.index
            inputs, weight = local.inputs[site], local.weights[site][trace.name]
            dy = _cotangent(trace, values[_state_key(trace)], signals[trace.group.index])
            dy = dy * self._scale(trace, values[_COUNT], dy.dtype)
            factor = None if trace.layout.x is None else _factor(trace, values[_input_key(trace)], inputs)
            add_to(grads, trace, trace.from_cotangent(factor, dy, inputs, weight))
        return grads

    def _scale(self, trace: Trace, count: Any, dtype: Any) -> Any:
        """What takes the bias of the start out, after `count` steps."""
        real = jnp.finfo(dtype).dtype
        # before the first step the averages are zero, and so is what they say
        steps = jnp.maximum(count, 1).astype(real)
        scale = 1 / (1 - jnp.asarray(self.out, real) ** steps)
        if trace.layout.x is None:
            scale = scale * (1 - jnp.asarray(self.inp, real) ** steps) / (1 - self.inp)
        return scale.astype(dtype)

    def chunk(
        self, traces: Sequence[Trace], values: Values, record: Record, *, fresh: bool, keep: bool
    ) -> tuple[Values, Gradients]:
        """The averages of Jacobians step by step, which is cheap; all the products with inputs at once."""
        averages = self._averages if jax.default_backend() == "cpu" else self._averages_in_blocks
        each = averages(traces, values, record)
        parts = [(each, record.signals)]
        if record.old_signals is not None:  # of the averages before each step
            old = {k: jnp.concatenate([values[k][None], v[:-1]]) for k, v in each.items()}
            parts.append((old, record.old_signals))
        grads: Gradients = {}
        for average, signals in parts:
            for trace in traces:
                site = trace.relation.site.index
                inputs, weight = record.local.inputs[site], record.local.weights[site][trace.name]
                f, g = average[_state_key(trace)], signals[trace.group.index]
                dy = jax.vmap(partial(_cotangent, trace))(f, g)
                scale = self._scale(trace, average[_COUNT], dy.dtype)
                dy = dy * scale.reshape(-1, *[1] * (dy.ndim - 1))
                factor = None
                if trace.layout.x is not None:
                    factor = _factors(trace, average[_input_key(trace)], inputs)
                add_to(grads, trace, trace.from_cotangent(factor, dy, inputs, weight, TIME))
        return {k: v[-1].astype(values[k].dtype) for k, v in each.items()}, grads

    def _averages(self, traces: Sequence[Trace], values: Values, record: Record) -> Values:
        """All averages after every step."""

        def body(values: Values, step: Any) -> Any:
            values = self.update(traces, values, record.one(step)[0])
            return values, values

        return jax.lax.scan(body, values, record.steps)[1]  # type: ignore[no-any-return]

    def _averages_in_blocks(self, traces: Sequence[Trace], values: Values, record: Record) -> Values:
        """The same with fewer and larger operations, for a GPU."""
        each: Values = {_COUNT: values[_COUNT] + jnp.arange(1, record.length + 1, dtype=values[_COUNT].dtype)}
        for trace in traces:
            key = _input_key(trace)
            if trace.layout.x is not None and key not in each:
                each[key] = filtered(self.inp, values[key], _inputs(trace, record.local))

        def body(values: Values, step: Any) -> Any:
            values = self._states(traces, values, record.one(step)[0])
            return values, values

        states = {k: values[k] for k in map(_state_key, traces)}
        each |= jax.lax.scan(body, states, record.steps, unroll=unroll())[1]
        return each


_BLOCK = 64


def filtered(decay: float, start: Any, x: Any) -> Any:
    """`y[t] = decay y[t-1] + x[t]` with `y[-1] = start`: a product with powers of `decay`, block by block."""
    length, block = x.shape[0], min(x.shape[0], _BLOCK)
    start, x = promoted(start, x)
    count = -(-length // block)
    padded = jnp.pad(x.reshape(length, -1), ((0, count * block - length), (0, 0))).reshape(count, block, -1)
    lags = np.arange(block)[:, None] - np.arange(block)
    powers = jnp.asarray(np.where(lags >= 0, float(decay) ** np.maximum(lags, 0), 0), x.dtype)
    # a product for each block: contracted with all blocks at once, XLA transposes them first
    own = jnp.matmul(jnp.broadcast_to(powers, (count, block, block)), padded, precision="highest")
    rise = jnp.asarray(float(decay) ** np.arange(1, block + 1), x.dtype)[:, None]

    def body(before: Any, own: Any) -> Any:
        y = own + rise * before[None]
        return y[-1], y

    first = start.reshape(-1)
    _, y = jax.lax.scan(body, first, own) if count > 1 else body(first, own[0])
    return y.reshape(count * block, *x.shape[1:])[:length]


def _cotangent(trace: Trace, f: Any, g: Any) -> Any:
    """`g f'` as a cotangent of `y`."""
    g, f = promoted(trace.to_site(g, 1), f)
    return trace.to_y(sum_states(g * f, 0))


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


def _inputs(trace: Trace, local: Local) -> Any:
    """`_input` at every step."""
    inputs = local.inputs[trace.relation.site.index]
    found = (inputs[0],) if is_inexact(inputs[0]) else factors(trace, inputs)
    assert found is not None
    return found[0]


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
