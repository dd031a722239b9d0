"""D-RTRL: a trace of every weight, advanced by the diagonal of the recurrence.

trace[t] = D[t] trace[t-1] + J[t] x[t]        gradient = sum_t <g[t], trace[t]>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._compat import row_major
from .._compiler.exactness import RuleKind
from .._executor.executor import Local
from .._executor.fused import bytes_on_gpu, fits, on_one_gpu, step
from .._executor.slots import Slot, add_up, promoted
from .._executor.window import Record, Signals
from .chunk import backward, chunk_gradient, chunk_traces, step_by_step
from .rank import Rank
from .rule import Gradients, TraceRule, Values, add_all, add_to

_LARGE = 2**27  # bytes: below, what counts on a GPU is how many kernels a step launches


@dataclass(frozen=True)
class D_RTRL(TraceRule):
    """Traces of every weight; `dtype` is what they are stored in (None: what they are computed in).

    With `rank`, what they leave out is kept in so many directions, one basis for each sample; `samples` is
    the axis of the states along which samples lie ('auto': it is found; None: all is one sample), and `power`
    the number of steps that turn the directions to what is strong.
    """

    dtype: Any = None
    rank: int = 0
    samples: int | str | None = "auto"
    power: int = 0
    follows_chains: ClassVar[bool] = True  # a trace of a state is the chain rule on those of others

    def __post_init__(self) -> None:
        for name, meant in (
            ("rank", "directions (0: the diagonal alone)"),
            ("power", "steps (0: the directions as they are pushed)"),
        ):
            given = getattr(self, name)
            if not isinstance(given, int | np.integer) or isinstance(given, bool) or given < 0:
                raise ValueError(f"`{name}` is a number of {meant}, not {given!r}.")
        is_axis = isinstance(self.samples, int) and not isinstance(self.samples, bool) and self.samples >= 0
        if not (is_axis or self.samples in ("auto", None)):
            raise ValueError(f"`samples` is 'auto', an axis of the states or None, not {self.samples!r}.")

    @property
    def beside(self) -> Rank | None:
        return Rank(self.rank, self.samples, self.dtype, self.power) if self.rank else None

    def kind(self, windows: bool) -> RuleKind:
        return RuleKind("D_RTRL", windows=windows, rank=self.rank, samples=self.samples)

    def fuses(self, values: Values) -> bool:
        """Whether the kernel is faster, which makes one pass over each trace: if they are large."""
        return bytes_on_gpu(values.values()) >= _LARGE

    def init(self, slots: Sequence[Slot], local: Local) -> Values:
        values = {}
        for slot in slots:
            _, factor, J = local.at(slot)
            weight = local.weights[slot.relation.site.index][slot.name]
            now = slot.instant(factor, J, weight)
            values[slot.key] = jnp.zeros(now.shape, self.dtype or now.dtype)
        return values

    def update(self, slots: Sequence[Slot], values: Values, local: Local) -> Values:
        result = {}
        for slot in slots:
            D, factor, J = _apart(*local.at(slot))
            old = values[slot.key]
            if (
                len(old) > 1
                and D is not None
                and fits(slot, old, local.spread)
                and self.fuses({slot.key: old})
            ):
                assert factor is not None
                none = jnp.zeros(old.shape[-2:], jnp.float32)
                nothing = jnp.zeros_like(D[0])
                result[slot.key], _ = step(slot, old, D, factor, J, nothing, none, local.spread)
                continue
            weight = local.weights[slot.relation.site.index][slot.name]
            now = slot.instant(factor, J, weight)
            if D is not None:
                now = add_up(promoted(slot.decay(D, old, slot.group.coupled), now))
            result[slot.key] = now.astype(old.dtype)
        return result

    def gradient(self, slots: Sequence[Slot], values: Values, signals: Signals, local: Local) -> Gradients:
        grads: Gradients = {}
        for slot in slots:
            site = slot.relation.site.index
            g = slot.lift(signals[slot.group.index], local.inputs[site], 1)
            g, _ = jax.lax.optimization_barrier((g, local.weights[site][slot.name]))  # as in `_apart`
            add_to(grads, slot, slot.contract(g, values[slot.key]))
        return grads

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
        record = record.begun_anew()
        if record.length == 1 and keep and record.old_signals is None:
            return self._one_step(slots, values, replace(record, keep=None), total)
        before = None if fresh else values
        found = {k: backward(record, k, products=keep) for k in record.local.D}
        grads = chunk_gradient(slots, before, record, found)
        after = chunk_traces(slots, before, record, found, values) if keep else values
        return after, add_all(total, grads)

    def through(self, slots: Sequence[Slot], values: Values, record: Record) -> Values:
        record = record.begun_anew()
        found = {k: backward(record, k, products=True) for k in record.local.D}
        return chunk_traces(slots, values, record, found, values)

    def reset(self, slots: Sequence[Slot], values: Values, keep: Any) -> Values:
        return {t.key: t.where(keep, values[t.key]) for t in slots}

    def _one_step(
        self, slots: Sequence[Slot], values: Values, record: Record, total: Gradients
    ) -> tuple[Values, Gradients]:
        """A chunk of one step: a single pass over each trace."""
        fused = [
            t
            for t in slots
            if record.local.D[t.group.index] is not None
            and total[t.relation.site.index, t.name].dtype == jnp.float32
            and fits(t, values[t.key], record.local.spread)
        ]
        others = [t for t in slots if t not in fused]
        after = dict(values)
        if others:
            mine = {t.key: values[t.key] for t in others}
            found, grads = step_by_step(self, others, mine, record)
            after.update(found)
            total = add_all(total, grads)
        local, signals, _, _ = record.one(jax.tree.map(lambda a: a[0], record.steps))
        for slot in fused:
            D, factor, J = local.at(slot)
            assert factor is not None
            key = (slot.relation.site.index, slot.name)
            g = slot.lift(signals[slot.group.index], local.inputs[key[0]], 1)
            after[slot.key], dw = step(slot, values[slot.key], D, factor, J, g, total[key], local.spread)
            total = {**total, key: dw}
        return after, total


def _apart(D: Any, factor: Any, J: Any) -> tuple[Any, Any, Any]:
    """The same, shared with no other trace: else XLA makes one loop of several, and copies all but one.

    On a GPU it would also transpose a whole sequence before a loop over it, were the inputs not kept as
    they are.
    """
    if D is None or factor is None:
        return D, factor, J
    D, x, J = jax.lax.optimization_barrier((D, factor[0], J))
    return D, (row_major(x) if on_one_gpu(x) else x, factor[1]), J
