"""D-RTRL step by step on a GPU, where reading and writing large traces takes most of the time.

Each trace is read once in a step and written once in several: `_executor/pending_steps.py`. Gradients are
those of `D_RTRL` to round-off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax.numpy as jnp

from .._executor.executor import ETraceGraphExecutor, Local
from .._executor.memory import on_gpu
from .._executor.pending_steps import PENDING, Pending, bytes_on_device, fits
from .._executor.sharding import Sharding, Spec
from .._executor.slots import Slot
from .._executor.window import Record, Signals
from .d_rtrl import D_RTRL
from .rule import Flags, Gradients, Rule, Shapes, Values, add_to

COUNT = "pending steps"
_LARGE = 2**27  # bytes on a device; for smaller traces, kernel launches dominate the time of a step


@dataclass(frozen=True)
class Deferred(D_RTRL):
    """D-RTRL with pending steps for the traces that are large and fit."""

    def init(self, slots: Sequence[Slot], local: Local) -> Values:
        values = super().init(slots, local)
        at = local.sharding
        chosen = [t for t in slots if local.D[t.group.index] is not None and fits(t, values[t.key], at)]
        if sum(bytes_on_device(t, values[t.key], at) for t in chosen) < _LARGE:
            return values
        for slot in chosen:
            values.update(_named(slot, Pending.empty(values[slot.key])))
        return {**values, COUNT: jnp.zeros((), jnp.int32)}

    def update(self, slots: Sequence[Slot], values: Values, local: Local) -> Values:
        pending, others = _split(slots, values)
        result = super().update(others, values, local)
        if not pending:
            return result
        count = values[COUNT]
        due = count + 1 == PENDING
        for slot in pending:
            D, factor, J = local.at(slot)
            assert D is not None
            assert factor is not None
            steps = _of(slot, values).followed_by(slot, D, factor, J, count)
            result.update(_named(slot, steps) | {slot.key: steps.written(slot, due, local.sharding)})
        return {**result, COUNT: jnp.where(due, 0, count + 1)}

    def gradient(self, slots: Sequence[Slot], values: Values, signals: Signals, local: Local) -> Gradients:
        pending, others = _split(slots, values)
        grads = super().gradient(others, values, signals, local)
        for slot in pending:
            g = slot.lift_decay(signals[slot.group.index], local.inputs[slot.relation.site.index], 1)
            add_to(grads, slot, _of(slot, values).contract(slot, g, values[COUNT], local.sharding))
        return grads

    def reset(self, slots: Sequence[Slot], values: Values, keep: Flags) -> Values:
        pending, others = _split(slots, values)
        result = super().reset(others, values, keep)
        if not pending:
            return result
        count = values[COUNT]
        for slot in pending:  # the reset counts as a step, if there is none
            result.update(_named(slot, _of(slot, values).known(count).kept(slot, keep)))
        return {**result, COUNT: jnp.maximum(count, 1)}

    def chunk(
        self,
        slots: Sequence[Slot],
        values: Values,
        record: Record,
        total: Gradients,
        *,
        fresh: bool,
        keep: bool,
    ) -> tuple[Values, Gradients]:
        values = values if fresh else self._written(slots, values, record.local.sharding)
        after, total = super().chunk(slots, values, record, total, fresh=fresh, keep=keep)
        return {**values, **after}, total

    def up_to_date(self, executor: ETraceGraphExecutor, values: Values) -> Values:
        return self._written(executor.slots, values, executor.sharding)

    def _written(self, slots: Sequence[Slot], values: Values, at: Sharding | None) -> Values:
        pending, _ = _split(slots, values)
        if not pending:
            return values
        is_due = values[COUNT] > 0
        found = dict(values)
        for slot in pending:
            found[slot.key] = _of(slot, values).written(slot, is_due, at)
        return {**found, COUNT: jnp.zeros_like(values[COUNT])}

    def trace_specs(self, slots: Sequence[Slot], at: Sharding, shapes: Shapes) -> dict[str, Spec]:
        found = super().trace_specs(slots, at, shapes)
        for slot in _split(slots, shapes)[0]:
            names, specs = _names(slot), _of(slot, shapes).specs(slot, at)
            found.update({names[field]: spec for field, spec in specs.items()})
        return found


def deferred(rule: Rule, executor: ETraceGraphExecutor) -> Rule:
    """`Deferred` in place of `D_RTRL` on a GPU, if it is linear and outputs read no old states."""
    if type(rule) is not D_RTRL or rule.bound is not None or rule.correction is not None:
        return rule
    if not on_gpu() or executor.reads_old_states:
        return rule
    return Deferred(**{f.name: getattr(rule, f.name) for f in fields(rule)})


def is_pending(name: str) -> bool:
    """Whether an array of a rule holds pending steps, and has no meaning where traces are up to date."""
    return name.startswith("pending ")


def _split(slots: Sequence[Slot], values: Mapping[str, Any]) -> tuple[list[Slot], list[Slot]]:
    """The slots with pending steps, and the others."""
    pending = [t for t in slots if f"pending P {t.key}" in values]
    return pending, [t for t in slots if t not in pending]


def _names(slot: Slot) -> dict[str, str]:
    """The names of the arrays of a `Pending` among those of the rule."""
    return {"trace": slot.key, **{a: f"pending {a} {slot.key}" for a in ("P", "d", "x")}}


def _of(slot: Slot, values: Mapping[str, Any]) -> Pending:
    return Pending(**{field: values[name] for field, name in _names(slot).items()})


def _named(slot: Slot, pending: Pending) -> dict[str, Any]:
    return {name: getattr(pending, field) for field, name in _names(slot).items()}
