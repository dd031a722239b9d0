"""Rules that keep running averages of inputs and instant terms, without any Jacobian of the recurrence.

    x'[t] = leak x'[t-1] + x[t]                    p[t] = sum_{s<t} before^(t-s) J[s]
    gradient = sum_t g[t] (after x'[t] J[t] + ahead x[t] p[t])

OTTT has the first product alone. S-TLLR adds the second, of an input and the outputs before it. If another
group reads a group, OTPE's approximation takes `sum_{s<=t} out^(t-s) x'[s]` for `x'`, and for `J` its mean
with these weights. A bias is a weight on a constant input of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._compiler.exactness import RuleKind
from .._executor.executor import Local
from .._executor.sharding import Sharding, Spec
from .._executor.slots import Slot
from .._executor.trace_math import add_up, promoted, states
from .._executor.trace_recursion import Recursion
from .._executor.window import Signals
from .._types import DTypeLike
from .es_d_rtrl import factor_of, input_of
from .rule import Flags, Gradients, Shapes, TraceRule, Values, add_to, kind_of
from .signal import PROPAGATED, Signal


@dataclass(frozen=True)
class Presynaptic(TraceRule):
    """Averages of inputs (decay `leak`) and of both sides one layer on (decay `out`), as above.

    Where the recursion has readings of a group, `J` is that of the readings; elsewhere `out` is zero.
    """

    leak: float
    out: float = 0.0
    before: float = 0.0
    after: float = 1.0
    ahead: float = 0.0
    recursion: Recursion | None = None
    signal: Signal = PROPAGATED
    called: str = "OTTT"
    trace_dtype: DTypeLike | None = None

    def kind(self, windows: bool) -> RuleKind:
        averages = (self.leak, self.out)
        return RuleKind(self.called, averages=averages, windows=windows, **{**kind_of(self), "filter": None})

    def init(self, slots: Sequence[Slot], local: Local) -> Values:
        values: Values = {}
        for slot in slots:
            key, weight = _key(slot), local.weights[slot.relation.site.index][slot.name]
            now, J = input_of(slot, local), _instant(slot, local)
            if now is None:
                real = jnp.finfo(J.dtype).dtype
                values[f"{key}:x"] = jnp.zeros(slot.group.varshape[:1], real)  # of each sample
            else:
                kept = self.trace_dtype or promoted(now, weight)[0].dtype
                values[f"{key}:x"] = jnp.zeros(now.shape, kept)
            if self.out:
                values[f"{key}:z"] = jnp.zeros_like(values[f"{key}:x"])
                values[_weight(slot)] = jnp.zeros(slot.group.varshape[:1], jnp.finfo(J.dtype).dtype)
            for name in self._kept:
                values[f"{key}:{name}->{slot.group.index}"] = jnp.zeros(J.shape, self.trace_dtype or J.dtype)
        return values

    def trace_specs(self, slots: Sequence[Slot], at: Sharding, shapes: Shapes) -> dict[str, Spec]:
        found: dict[str, Spec] = {}
        for slot in slots:
            key, samples = _key(slot), at.of_group(slot.group)[:1]
            for name in ("x", "z") if self.out else ("x",):
                shape, gone = shapes[f"{key}:{name}"].shape, slot.layout.x is None
                found[f"{key}:{name}"] = samples if gone else at.of_input(slot, shape)
            if self.out:
                found[_weight(slot)] = samples
            for name in self._kept:
                found[f"{key}:{name}->{slot.group.index}"] = at.of_instant(slot)
        return found

    @property
    def _kept(self) -> str:
        return "fjp" if self.ahead else "f"

    def update(self, slots: Sequence[Slot], values: Values, local: Local) -> Values:
        result: Values = {}
        for slot in slots:
            key, J = _key(slot), _instant(slot, local)
            f, j, p = (f"{key}:{name}->{slot.group.index}" for name in "fjp")
            now, old = input_of(slot, local), values[f"{key}:x"]
            now = jnp.ones_like(old) if now is None else now
            result[f"{key}:x"] = add_up(promoted(self.leak * old, now)).astype(old.dtype)
            if self.out:
                z, weight = values[f"{key}:z"], values[_weight(slot)]
                result[f"{key}:z"] = add_up(promoted(self.out * z, result[f"{key}:x"])).astype(z.dtype)
                result[_weight(slot)] = self.out * weight + 1
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
            inputs, w = local.inputs[site], local.weights[site][slot.name]
            average, f = values[f"{key}:x"], values[f"{key}:f->{slot.group.index}"]
            weighed = g * self.after
            if self.out and slot.group.filtered:
                average, weight = values[f"{key}:z"], values[_weight(slot)]
                f = f / _per_sample(jnp.where(weight == 0, jnp.ones_like(weight), weight), f)
            if slot.layout.x is None:
                weighed = weighed * _per_sample(average, g)
            dy = slot.to_y(slot.pair(states(weighed, 0), states(f, 0)))
            factor = None if slot.layout.x is None else factor_of(slot, average, inputs)
            add_to(grads, slot, slot.from_cotangent(factor, dy, inputs, w))
            if self.ahead:
                p = values[f"{key}:p->{slot.group.index}"]
                dy = slot.to_y(slot.pair(states(g * self.ahead, 0), states(p, 0)))
                add_to(grads, slot, slot.from_cotangent(slot.factor(inputs), dy, inputs, w))
        return grads

    def reset(self, slots: Sequence[Slot], values: Values, keep: Flags) -> Values:
        result: Values = {}
        for slot in slots:
            key = _key(slot)
            for name in ("x", "z") if self.out else ("x",):
                x, gone = values[f"{key}:{name}"], slot.layout.x is None
                result[f"{key}:{name}"] = jnp.where(keep, x, 0) if gone else slot.where_input(keep, x)
            if self.out:
                result[_weight(slot)] = jnp.where(keep, values[_weight(slot)], 0)
            for name in self._kept:
                at = f"{key}:{name}->{slot.group.index}"
                result[at] = slot.where_instant(keep, values[at])
        return result


def _instant(slot: Slot, local: Local) -> Float[Array, "state ..."]:
    return jnp.stack(local.J[slot.relation.site.index, slot.group.index])


def _weight(slot: Slot) -> str:
    """The sum of the weights of an average, of each sample."""
    return f"weight->{slot.group.index}"


def _per_sample(of_samples: Array, states: Float[Array, "state ..."]) -> Float[Array, "1 ..."]:
    """One factor for each sample, to multiply states with."""
    more = [1] * (states.ndim - 1 - of_samples.ndim)
    return of_samples.reshape(1, *of_samples.shape, *more).astype(states.dtype)


def _key(slot: Slot) -> str:
    return f"{slot.relation.site.index}:{'.'.join(slot.relation.weight_path)}:{slot.name}"
