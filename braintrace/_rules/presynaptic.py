"""Rules that keep averages of what comes in and of what goes out, without any Jacobian of the recurrence.

    x'[t] = leak x'[t-1] + x[t]        f'[t] = out f'[t-1] + J[t]        p[t] = sum_{s<t} before^(t-s) J[s]
    gradient = sum_t g[t] (after x'[t] f'[t] + ahead x[t] p[t])

OTTT has `x'` and `J` alone; OTPE's approximation has both averages; S-TLLR adds the last product, in which an
input meets what went out before it. A bias is a weight on a constant input of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from .._compiler.exactness import RuleKind
from .._executor.executor import Local
from .._executor.recursion import Recursion
from .._executor.slots import Slot, add_up, promoted, states
from .._executor.window import Signals
from .es_d_rtrl import factor_of, input_of
from .rule import Gradients, TraceRule, Values, add_to, kind_of
from .signal import PROPAGATED, Signal


@dataclass(frozen=True)
class Presynaptic(TraceRule):
    """Averages of inputs (decay `leak`) and of what goes out (decay `out`), as above.

    Where the recursion has readings of a group, `J` is that of what is read; elsewhere `out` is zero.
    """

    leak: float
    out: float = 0.0
    before: float = 0.0
    after: float = 1.0
    ahead: float = 0.0
    recursion: Recursion | None = None
    signal: Signal = PROPAGATED
    called: str = "OTTT"
    dtype: Any = None

    def kind(self, windows: bool) -> RuleKind:
        averages = (self.leak, self.out)
        return RuleKind(self.called, averages=averages, windows=windows, **{**kind_of(self), "filter": None})

    def init(self, slots: Sequence[Slot], local: Local) -> Values:
        values: Values = {}
        for slot in slots:
            key, weight = _key(slot), local.weights[slot.relation.site.index][slot.name]
            now, J = input_of(slot, local), jnp.stack(_instant(slot, local))
            if now is None:
                real = jnp.finfo(J.dtype).dtype
                values[f"{key}:x"] = jnp.zeros(slot.group.varshape[:1], real)  # of each sample
            else:
                kept = self.dtype or promoted(now, weight)[0].dtype
                values[f"{key}:x"] = jnp.zeros(now.shape, kept)
            for name in self._kept:
                values[f"{key}:{name}->{slot.group.index}"] = jnp.zeros(J.shape, self.dtype or J.dtype)
        return values

    @property
    def _kept(self) -> str:
        return "fjp" if self.ahead else "f"

    def update(self, slots: Sequence[Slot], values: Values, local: Local) -> Values:
        result: Values = {}
        for slot in slots:
            key, J = _key(slot), jnp.stack(_instant(slot, local))
            f, j, p = (f"{key}:{name}->{slot.group.index}" for name in "fjp")
            now, old = input_of(slot, local), values[f"{key}:x"]
            now = jnp.ones_like(old) if now is None else now
            result[f"{key}:x"] = add_up(promoted(self.leak * old, now)).astype(old.dtype)
            out = self.out if slot.group.filtered else 0.0
            result[f] = add_up(promoted(out * values[f], J)).astype(values[f].dtype)
            if self.ahead:
                result[p] = self.before * (values[p] + values[j])
                result[j] = J.astype(values[j].dtype)
        return result

    def gradient(self, slots: Sequence[Slot], values: Values, signals: Signals, local: Local) -> Gradients:
        grads: Gradients = {}
        for slot in slots:
            key, site, g = _key(slot), slot.relation.site.index, signals[slot.group.index]
            inputs, weight = local.inputs[site], local.weights[site][slot.name]
            average, f = values[f"{key}:x"], values[f"{key}:f->{slot.group.index}"]
            weighed = g * self.after
            if slot.layout.x is None:
                shape = (1, *average.shape, *[1] * (g.ndim - 1 - average.ndim))
                weighed = weighed * average.reshape(shape).astype(g.dtype)
            dy = slot.to_y(slot.pair(states(weighed, 0), states(f, 0)))
            factor = None if slot.layout.x is None else factor_of(slot, average, inputs)
            add_to(grads, slot, slot.from_cotangent(factor, dy, inputs, weight))
            if self.ahead:
                p = values[f"{key}:p->{slot.group.index}"]
                dy = slot.to_y(slot.pair(states(g * self.ahead, 0), states(p, 0)))
                add_to(grads, slot, slot.from_cotangent(slot.factor(inputs), dy, inputs, weight))
        return grads

    def reset(self, slots: Sequence[Slot], values: Values, keep: Any) -> Values:
        result: Values = {}
        for slot in slots:
            key = _key(slot)
            x = values[f"{key}:x"]
            gone = slot.layout.x is None
            result[f"{key}:x"] = jnp.where(keep, x, 0) if gone else slot.where_input(keep, x)
            for name in self._kept:
                at = f"{key}:{name}->{slot.group.index}"
                result[at] = slot.where_instant(keep, values[at])
        return result


def _instant(slot: Slot, local: Local) -> Any:
    return local.J[slot.relation.site.index, slot.group.index]


def _key(slot: Slot) -> str:
    return f"{slot.relation.site.index}:{'.'.join(slot.relation.weight_path)}:{slot.name}"
