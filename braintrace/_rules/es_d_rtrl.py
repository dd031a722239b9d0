"""ES-D-RTRL (pp-prop): the trace as a product of an input average and a state average.

    x'[t] = a x'[t-1] + x[t]                  f'[t] = b D[t] f'[t-1] + (1 - b) J[t]
    gradient = sum_t x'[t] (g[t] f'[t]) / (1 - b^(t+1))

Memory grows with the number of units, not of weights. A bias is a weight on a constant input of one.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from .._compiler.exactness import RuleKind
from .._executor.executor import Local
from .._executor.partial_sums import plus
from .._executor.pull_back import is_inexact
from .._executor.sharding import Sharding, Spec
from .._executor.slots import Slot
from .._executor.trace_math import Jacobian, States, add_up, filtered, promoted, states, times
from .._executor.trace_recursion import Recursion
from .._executor.weight_gradients import TIME
from .._executor.window import Record, Signals, unroll
from .._ops.axis_labels import Labels
from .._types import Array, Options, PyTree
from .rule import Flags, Gradients, Shapes, TraceRule, Values, add_all, add_to, kind_of
from .signal import PROPAGATED, Signal


@dataclass(frozen=True)
class ES_D_RTRL(TraceRule):
    """Running averages of inputs (decay `inp`) and of state Jacobians (decay `out`) in place of traces.

    Args:
        decay_or_rank: Decay of both averages, in [0, 1), or an integer rank `r` for `(r - 1) / (r + 1)`; or a
            pair (inputs, states) of them.
        trace_dtype: Type that the averages are stored in; by default the type they are computed in.
        recursion: Replaces the local Jacobians in the update of the averages.
        signal: The learning signal.
        called: Name in reports.
    """

    decay_or_rank: Any = field(default=0.9, compare=False)
    trace_dtype: Any = None
    recursion: Recursion | None = None
    signal: Signal = PROPAGATED
    called: str = "ES_D_RTRL"
    inp: float = field(init=False, repr=False)
    out: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        given = self.decay_or_rank
        pair = given if isinstance(given, tuple | list) else (given, given)
        if len(pair) != 2:
            raise ValueError(f"`decay_or_rank` is one value or a pair (inputs, states), not {given}.")
        for name, value in zip(("inp", "out"), pair, strict=True):
            object.__setattr__(self, name, as_decay(value))

    def kind(self, windows: bool) -> RuleKind:
        return RuleKind(self.called, averages=(self.inp, self.out), windows=windows, **kind_of(self))

    @property
    def several_windows_per_pass(self) -> bool:
        return True

    def init(self, slots: Sequence[Slot], local: Local) -> Values:
        values: Values = {}
        for slot in slots:
            values[_count_key(slot)] = jnp.zeros(slot.group.varshape[:1], jnp.int32)  # for each sample
            weight = local.weights[slot.relation.site.index][slot.name]
            now, J = input_of(slot, local), jnp.stack(_instant(slot, local))
            if now is not None:  # not in the type of an input of few bits: an average needs more
                kept = self.trace_dtype or promoted(now, weight)[0].dtype
                values[_input_key(slot)] = jnp.zeros(now.shape, kept)
            values[_state_key(slot)] = jnp.zeros(J.shape, self.trace_dtype or J.dtype)
        return values

    def trace_specs(self, slots: Sequence[Slot], at: Sharding, shapes: Shapes) -> dict[str, Spec]:
        found: dict[str, Spec] = {}
        for slot in slots:
            found[_count_key(slot)] = at.of_group(slot.group)[:1]
            found[_state_key(slot)] = at.of_instant(slot)
            if _input_key(slot) in shapes:
                found[_input_key(slot)] = at.of_input(slot, shapes[_input_key(slot)].shape)
        return found

    def update(self, slots: Sequence[Slot], values: Values, local: Local) -> Values:
        result: Values = {}
        for slot in slots:
            result[_count_key(slot)] = values[_count_key(slot)] + 1
            now = input_of(slot, local)
            if now is not None:
                result[_input_key(slot)] = self._input(values[_input_key(slot)], now)
            key, D, J = _state_key(slot), local.D[slot.group.index], _instant(slot, local)
            result[key] = jnp.stack(self._state(slot, states(values[key], 0), D, J))
        return result

    def _input(self, old: Any, now: Any) -> Any:
        """The average of inputs after a step."""
        return add_up(promoted(self.inp * old, now)).astype(old.dtype)

    def _state(self, slot: Slot, f: States, D: Jacobian | None, J: States) -> list[Any]:
        """The averages of state Jacobians after a step."""
        new = [(1 - self.out) * j for j in J]
        if D is not None:
            decayed = [self.out * slot.pair(row, f, by=times) for row in D]
            new = [add_up(promoted(*pair)) for pair in zip(new, decayed, strict=True)]
        return [j.astype(old.dtype) for j, old in zip(new, f, strict=True)]

    def gradient(self, slots: Sequence[Slot], values: Values, signals: Signals, local: Local) -> Gradients:
        return self._products(slots, _split(slots, values), signals, local)

    def _products(
        self, slots: Sequence[Slot], averages: Options, signals: Signals, local: Local, over: Labels = ()
    ) -> Gradients:
        """The gradients from the rule's arrays, as `_split` returns them, summed over leading axes (time)."""
        grads: Gradients = {}
        lead = len(over)
        for slot in slots:
            site, signal = slot.relation.site.index, signals[slot.group.index]
            inputs, weight = local.inputs[site], local.weights[site][slot.name]
            signal = signal * self._scale(slot, averages[_count_key(slot)], signal.dtype, signal.ndim)
            f, g = averages[_state_key(slot)], states(signal, lead)
            dy = slot.to_y(slot.pair(g, f, lead, by=times), lead)
            factor = factor_of(slot, averages.get(_input_key(slot)), inputs, over)
            add_to(grads, slot, slot.from_cotangent(factor, dy, inputs, weight, over))
        return grads

    def _scale(self, slot: Slot, count: Any, dtype: Any, ndim: int) -> Any:
        """The factor that removes the start-up bias after `count` steps, for signals with `ndim` axes."""
        real = jnp.finfo(dtype).dtype
        # before the first step the averages are zero, so that any finite factor will do
        steps = jnp.maximum(count, 1).astype(real)
        scale = 1 / (1 - jnp.asarray(self.out, real) ** steps)
        if slot.layout.x is None:
            scale = scale * (1 - jnp.asarray(self.inp, real) ** steps) / (1 - self.inp)
        lead = count.ndim - len(slot.group.varshape[:1])  # an axis of time, then one of states
        shape = (*count.shape[:lead], 1, *count.shape[lead:])
        return scale.reshape(*shape, *[1] * (ndim - len(shape))).astype(dtype)

    def reset(self, slots: Sequence[Slot], values: Values, keep: Flags) -> Values:
        result: Values = {}
        for slot in slots:
            count = values[_count_key(slot)]
            result[_count_key(slot)] = jnp.where(keep, count, jnp.zeros_like(count))
            result[_state_key(slot)] = slot.where_instant(keep, values[_state_key(slot)])
            if slot.layout.x is not None:
                result[_input_key(slot)] = slot.where_input(keep, values[_input_key(slot)])
        return result

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
        """The averages step by step, which is cheap; all the products of the two at once."""
        record = record.cut_at_resets()
        each, after = self._averages(slots, values, record)
        parts = [] if record.signals is None else [(each, record.signals)]
        if record.old_signals is not None:  # of the averages before each step
            before = lambda start, each: jnp.concatenate([start[None], each[:-1]])
            start = {k: v for k, v in _split(slots, values).items() if k in each}
            parts.append((jax.tree.map(before, start, each), record.old_signals))
        grads: Gradients = {}
        for averages, signals in parts:
            for key, dw in self._products(slots, averages, signals, record.local, (TIME,)).items():
                grads[key] = plus(grads.get(key), dw)
        return after, add_all(total, grads)

    def _averages(self, slots: Sequence[Slot], values: Values, record: Record) -> tuple[Options, Values]:
        """The rule's arrays after every step, as `_split` returns them, and all after the last one."""
        local, start = record.local, _split(slots, values)
        by_state, by_input = {_state_key(t): t for t in slots}, {_input_key(t): t for t in slots}
        inputs: Options = {k: input_of(t, local, (TIME,)) for k, t in by_input.items() if k in values}
        each: Options = _counts(slots, values, record)
        if jax.default_backend() != "cpu" and record.keep is None:  # fewer and larger operations
            each.update({k: filtered(self.inp, values[k], v) for k, v in inputs.items()})
            inputs = {}
        after = {k: v[-1].astype(values[k].dtype) for k, v in each.items()}
        instants = {k: _instant(t, local) for k, t in by_state.items()}

        def body(carry: PyTree, step: PyTree) -> tuple[PyTree, PyTree]:
            (x, f), (now, D, J, keep) = carry, step
            if keep is not None:
                x = {k: by_input[k].where_input(keep, v) for k, v in x.items()}
            x = {k: self._input(x[k], v) for k, v in now.items()}
            new = x, {k: self._state(t, f[k], D[t.group.index], J[k]) for k, t in by_state.items()}
            return new, new

        first = {k: values[k] for k in inputs}, {k: start[k] for k in by_state}
        steps = (inputs, local.D, instants, record.keep)
        (last, end), (x, f) = jax.lax.scan(body, first, steps, record.length, unroll=unroll())
        return {**each, **x, **f}, {**after, **last, **{k: jnp.stack(v) for k, v in end.items()}}


def _split(slots: Sequence[Slot], values: Values) -> Options:
    """The rule's arrays, with a list of states in place of each axis of states."""
    return {**values, **{k: states(values[k], 0) for k in map(_state_key, slots)}}


def _counts(slots: Sequence[Slot], values: Values, record: Record) -> Values:
    """The number of steps that each sample has taken, after every step."""
    start = {k: values[k] for k in map(_count_key, slots)}
    if record.keep is None:
        number = jnp.arange(1, record.length + 1, dtype=jnp.int32)
        return {k: v[None] + number.reshape(-1, *[1] * v.ndim) for k, v in start.items()}

    def body(counts: Values, keep: Any) -> Any:
        counts = {k: jnp.where(keep, v, jnp.zeros_like(v)) + 1 for k, v in counts.items()}
        return counts, counts

    return jax.lax.scan(body, start, record.keep)[1]  # type: ignore[no-any-return]


def _instant(slot: Slot, local: Local) -> States:
    return local.J[slot.relation.site.index, slot.group.index]


def _count_key(slot: Slot) -> str:
    return f"steps->{slot.group.index}"


def _state_key(slot: Slot) -> str:
    return f"{slot.relation.site.index}:{'.'.join(slot.relation.weight_path)}:f->{slot.group.index}"


def _input_key(slot: Slot) -> str:
    return f"{slot.relation.site.index}:{'.'.join(slot.relation.weight_path)}:{slot.name}:x"


def as_decay(decay_or_rank: Any) -> float:
    """A decay in (0, 1), or the decay `(r - 1) / (r + 1)` of an integer rank `r`."""
    if isinstance(decay_or_rank, numbers.Integral) and not isinstance(decay_or_rank, bool):
        if decay_or_rank < 1:
            raise ValueError(f"A rank must be at least 1, not {decay_or_rank}.")
        return (int(decay_or_rank) - 1) / (int(decay_or_rank) + 1)
    if isinstance(decay_or_rank, str):
        raise TypeError(f"A decay is a number, not the text {decay_or_rank!r}.")
    decay = float(decay_or_rank)
    if not 0 <= decay < 1:
        raise ValueError(
            f"A decay must be at least 0 and less than 1, not {decay_or_rank}; an integer is a rank instead."
        )
    return decay


def input_of(slot: Slot, local: Local, over: Labels = ()) -> Array | None:
    """The averaged array, with leading axes `over`: the op's input if it is inexact, else the factor."""
    if slot.layout.x is None:
        return None
    inputs = local.inputs[slot.relation.site.index]
    found = (inputs[0],) if is_inexact(inputs[0]) else slot.factor(inputs, over)
    assert found is not None
    return found[0]


def factor_of(
    slot: Slot, average: Array | None, inputs: Sequence[Array], over: Labels = ()
) -> tuple[Array, Labels] | None:
    """The factor of the op for an average of `input_of`, with its labels; None if it has none."""
    if average is None:
        return None
    if is_inexact(inputs[0]):
        return slot.factor([average, *inputs[1:]], over)
    factor = slot.factor(inputs, over)
    assert factor is not None
    return average, factor[1]
