"""Learning rules: frozen values with pure functions over a dictionary of arrays, the rule's state.

Steps, windows and chunks are written once for all rules, in terms of four methods of `Rule`. A `TraceRule`
implements these by functions of its traces alone, which a user's own rule defines:

| `Rule` | `TraceRule` | returns |
|---|---|---|
| `start` | `init` | the initial arrays |
| `advance` | `update` | the arrays after a window of steps; after one step |
| `past` | `gradient` | the gradient for a signal at the window's start; at the traces |
| `forget` | `reset` | the arrays with some samples reset |

The other methods have defaults. Sequences: `begin`, `any_window`, `several_windows_per_pass`, `correction`,
`always_windows`, and of traces `chunk`, `joins_within_step`,
`affine_terms`. Arrays that a reset keeps, random streams, and traces
to read: `lasting`, `seeded`, `up_to_date`. Devices:
`specs`, `trace_specs`. The graph and the report: `seen`, `kind`.

Terms of all rules:

- *site*: one use of a marked operation in a step; *relation*: a site and the groups that it feeds;
- *effective weight*: the array that the operation multiplies by, computed from parameters;
- *group*: hidden states that are coupled unit by unit;
- *slot*: one weight of a site and one group, which have one trace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from .._compiler.errors import NotSupportedError
from .._compiler.exactness import RuleKind
from .._compiler.graph import TraceGraph
from .._executor.executor import ETraceGraphExecutor, Local, sites_with_traces
from .._executor.partial_sums import plus
from .._executor.pending_matrices import COUNT
from .._executor.sharding import Sharding, Spec
from .._executor.slots import Slot
from .._executor.trace_recursion import Leak, Recursion
from .._executor.window import BackwardPass, Record, Signals, Window
from .._types import Aval, Leaves
from .._types import Values as Values
from .layers import Layers
from .rank import Rank
from .signal import PROPAGATED, Signal

Gradients = dict[tuple[int, str], Any]  # of each effective weight, by site and name
Shapes = Mapping[str, Aval]  # the shapes and types of arrays, by stable names
Flags = Bool[Array, " samples"]  # one for each sample of the batch


class Rule(ABC):
    """A learning rule."""

    back_through_time: ClassVar[bool] = False  # BPTT: no traces, and one backward pass over the sequence
    signal: Signal = PROPAGATED  # the learning signal dL/dh that is contracted with the traces
    recursion: Recursion | None = None  # replaces the local Jacobians in the update of the traces
    any_window: ClassVar[bool] = True  # whether the gradient does not depend on the window size

    @abstractmethod
    def start(self, executor: ETraceGraphExecutor) -> Values:
        """The arrays at the start; called with abstract values, for shapes and types."""

    def lasting(self, executor: ETraceGraphExecutor) -> Values:
        """The initial values of the arrays that a reset keeps, such as those of the signal."""
        return self.signal.start(executor)

    def seeded(self, values: Values, key: Any) -> Values:
        """The arrays at the start of another random stream; the same for a rule that draws nothing."""
        return values

    def begin(self, executor: ETraceGraphExecutor, values: Values, *, fresh: bool) -> Values:
        """The arrays at the start of a sequence, where a rule may adapt; `fresh`: its traces are zero."""
        return values

    @abstractmethod
    def advance(self, executor: ETraceGraphExecutor, values: Values, window: Window) -> Values:
        """The arrays after a window of steps."""

    @abstractmethod
    def past(self, executor: ETraceGraphExecutor, values: Values, signals: Leaves, window: Window) -> Leaves:
        """The gradients of the parameters through the carried states before a window, for signals there.

        Each is an array, or per-device partial sums (`PartialSums`) if the batch is sharded.
        """

    def over_windows(
        self, executor: ETraceGraphExecutor, values: Values, passed: BackwardPass
    ) -> tuple[Leaves, Values]:
        """The gradients of a backward pass over windows, and the arrays after them.

        There is a single window unless `several_windows_per_pass`.
        """
        past = self.past(executor, values, passed.first, passed.window)
        return list(map(plus, passed.within(), past)), self.advance(executor, values, passed.window)

    @abstractmethod
    def forget(self, executor: ETraceGraphExecutor, values: Values, is_reset: Flags) -> Values:
        """The arrays with the samples reset that `is_reset`, a boolean for each sample, flags."""

    @property
    def several_windows_per_pass(self) -> bool:
        """Whether several windows can be one backward pass, as for a `TraceRule` linear in the steps."""
        return False

    @property
    def correction(self) -> Rank | Layers | None:
        """The correction for paths that the traces truncate, by cotangents that cross a window's start."""
        return None

    def specs(self, executor: ETraceGraphExecutor, shapes: Shapes) -> dict[str, Spec]:
        """The partition specs of the rule's arrays, of these shapes, given `executor.sharding`.

        XLA chooses the sharding of arrays without a spec.
        """
        return {}

    def seen(self, graph: TraceGraph, windows: bool) -> TraceGraph:
        """The graph that the rule runs on, perhaps with additional filter states; `windows` as in `kind`."""
        return graph

    @property
    def always_windows(self) -> bool:
        """Whether signals are taken at the start of a window, along all paths."""
        return True

    def kind(self, windows: bool) -> RuleKind:
        """The properties that the exactness report needs; `windows`: signals are taken at window starts."""
        return RuleKind("a rule of one's own", known=False)

    def up_to_date(self, executor: ETraceGraphExecutor, values: Values) -> Values:
        """The arrays with all traces of the present step, if the rule does not write them at each step."""
        return values

    def with_room(self, executor: ETraceGraphExecutor, values: Values, length: int | None) -> Values:
        """The arrays with room for one more pending window of this length; with none pending if None."""
        return values


class TraceRule(Rule):
    """A rule that stores traces of weights.

    A custom rule is a frozen dataclass with the methods `init`, `update` and `gradient`, and `reset` if
    samples of a batch are reset one by one.
    """

    any_window: ClassVar[bool] = False

    @property
    def always_windows(self) -> bool:
        return self.correction is not None

    @abstractmethod
    def init(self, slots: Sequence[Slot], local: Local) -> Values:
        """The arrays at the start; `local` has abstract values, for shapes and types."""

    @abstractmethod
    def update(self, slots: Sequence[Slot], values: Values, local: Local) -> Values:
        """Advance one step."""

    @abstractmethod
    def gradient(self, slots: Sequence[Slot], values: Values, signals: Signals, local: Local) -> Gradients:
        """The gradient of the step's loss, from the traces after the step.

        Each is an array, or per-device partial sums (`PartialSums`) if the batch is sharded.
        """

    def reset(self, slots: Sequence[Slot], values: Values, keep: Flags) -> Values:
        """The arrays with the samples reset for which `keep`, (batch,), is False."""
        raise NotSupportedError(
            f"The rule {type(self).__name__} cannot reset single samples of a batch. Add a method "
            "`reset(slots, values, keep)` to it, or reset all samples (`learner.reset_state()`)."
        )

    def trace_specs(self, slots: Sequence[Slot], at: Sharding, shapes: Shapes) -> dict[str, Spec]:
        """The partition specs of traces, by axis label; XLA chooses the sharding of other arrays."""
        by_labels = {t.key: at.of_trace(t) for t in slots if t.key in shapes}
        return {k: spec for k, spec in by_labels.items() if len(spec) == len(shapes[k].shape)}

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
        """The traces after the steps in `record`, and their gradients, added to `total`.

        With `fresh`, the traces are zero before the chunk; without `keep`, they are not used after it.
        Without a loss, the record has no signals, and there are no gradients.
        """
        from .chunk import step_by_step

        values, grads = step_by_step(self, slots, values, record)
        return values, add_all(total, grads)

    def joins_within_step(self, length: int) -> bool:
        """Whether `chunk` adds the gradients through `Record.dys`, for a chunk of this length."""
        return False

    def affine_terms(self, slots: Sequence[Slot], record: Record) -> dict[str, tuple[Any, Any]]:
        """`P` and `d` of each trace that the steps in `record` advance to `P trace + sum_t x[t] d[t]`.

        `P` is (S, S, *at), `d` is (S, time, *y). Traces without such a form are left out.
        """
        return {}

    # -- the interface of `Rule` -------------------------------------------------------------------

    def start(self, executor: ETraceGraphExecutor) -> Values:
        values = self.init(executor.slots, executor.example_local())
        return values if self.correction is None else {**values, **self.correction.start(executor, values)}

    def specs(self, executor: ETraceGraphExecutor, shapes: Shapes) -> dict[str, Spec]:
        at = executor.sharding
        assert at is not None
        found = self.trace_specs(executor.slots, at, shapes)
        return found if self.correction is None else {**found, **self.correction.specs(executor, shapes)}

    def lasting(self, executor: ETraceGraphExecutor) -> Values:
        found = super().lasting(executor)
        return found if self.correction is None else {**found, **self.correction.lasting(executor)}

    def begin(self, executor: ETraceGraphExecutor, values: Values, *, fresh: bool) -> Values:
        return values if self.correction is None else self.correction.renewed(values, fresh=fresh)

    def with_room(self, executor: ETraceGraphExecutor, values: Values, length: int | None) -> Values:
        return values if self.correction is None else self.correction.written(executor, values, length)

    def up_to_date(self, executor: ETraceGraphExecutor, values: Values) -> Values:
        return self.with_room(executor, values, None)

    def advance(self, executor: ETraceGraphExecutor, values: Values, window: Window) -> Values:
        values = self._reset_at_start(executor, values, window)
        after = self._advance_traces(executor, values, window)
        return self._corrected(executor, values, after, BackwardPass(window, window.length))

    def _corrected(
        self, executor: ETraceGraphExecutor, values: Values, after: Values, passed: BackwardPass
    ) -> Values:
        """The arrays after windows, given the traces then."""
        if self.correction is None:
            return after
        more = self.correction.over_windows(executor, values, passed, self.affine_terms)
        return {**values, **after, **more}

    def _reset_at_start(self, executor: ETraceGraphExecutor, values: Values, window: Window) -> Values:
        """Reset the samples that are reset at the first step, whose corrections have no past."""
        if self.correction is None or window.keep is None:
            return values
        return self.forget(executor, values, ~window.keep[0])

    def _advance_traces(self, executor: ETraceGraphExecutor, values: Values, window: Window) -> Values:
        if window.length == 1:
            values = values if window.keep is None else self.reset(executor.slots, values, window.keep[0])
            return self.update(executor.slots, values, window.first)
        return self.chunk(executor.slots, values, window.record, {}, fresh=False, keep=True)[0]

    def past(self, executor: ETraceGraphExecutor, values: Values, signals: Leaves, window: Window) -> Leaves:
        at_groups = executor.widened(executor.at_groups(signals))
        grads = self.gradient(executor.slots, values, at_groups, window.inputs_of_first)
        found = executor.to_parameters(window.params, window.first_consts, grads)
        if self.correction is None:
            return found
        more = self.correction.past(executor, values, signals)
        whole = self.correction.past_with_traces(executor, values, signals, window)
        return [whole.get(i, plus(a, more.get(i))) for i, a in enumerate(found)]

    def over_windows(
        self, executor: ETraceGraphExecutor, values: Values, passed: BackwardPass
    ) -> tuple[Leaves, Values]:
        window = passed.window
        values = self._reset_at_start(executor, values, window)
        if passed.is_single:
            inside, after = passed.within(), values
            past = [None] * len(inside) if passed.fresh else self.past(executor, values, passed.first, window)
            if COUNT in values and executor.sharding is None:
                # pending steps are updated after they are read, or XLA would copy them
                values, past = jax.lax.optimization_barrier((values, past))
            if passed.keep:
                after = self._advance_traces(executor, values, window)
        else:
            inside, past, after = self._over_several(executor, values, passed)
        after = self._corrected(executor, values, after, passed)
        return list(map(plus, inside, past)), after

    def _over_several(
        self, executor: ETraceGraphExecutor, values: Values, passed: BackwardPass
    ) -> tuple[Leaves, Leaves, Values]:
        """The gradients inside several windows and through the traces at their starts, and the new traces."""
        window = passed.window
        shared: dict[int, Array] = {}
        if self.joins_within_step(window.length) and executor.sharding is None:
            shared = {
                s.index: passed.dys[s.index] for s in sites_with_traces(executor) if s.index in passed.dys
            }
        # `signals` are `λ - u` at the starts of windows (in_windows.py): signals on the states *before*
        # these steps, and zero inside windows, whose own losses the backward pass has handled. With them
        # as `old_signals` only, `chunk` contracts them with the traces there, and advances the traces.
        at_groups = jax.vmap(lambda s: executor.widened(executor.at_groups(s)))(passed.signals)
        record = replace(window.record, old_signals=at_groups, dys=shared)
        zeros = executor.no_gradients(record.local.weights)
        flags = {"fresh": passed.fresh, "keep": passed.keep}
        after, grads = self.chunk(executor.slots, values, record, zeros, **flags)
        past = executor.to_parameters(window.params, window.first_consts, grads)
        if not passed.fresh and self.correction is not None:
            more = self.correction.past(executor, values, passed.first)
            past = [plus(a, more.get(i)) for i, a in enumerate(past)]
        return passed.within(shared), past, after

    def forget(self, executor: ETraceGraphExecutor, values: Values, is_reset: Flags) -> Values:
        kept = {**values, **self.reset(executor.slots, values, ~is_reset)}
        if self.correction is None:
            return kept
        return {**kept, **self.correction.forget(executor, values, is_reset)}


def kind_of(rule: Rule) -> dict[str, Any]:
    """The fields of `RuleKind` that describe a rule's signal and trace recursion."""
    recursion = rule.recursion or Recursion()
    leak = recursion.decay.value if isinstance(recursion.decay, Leak) else None
    signal = {"signal": rule.signal.words, "broadcast": rule.signal.is_broadcast}
    return {**signal, "leak": leak, "filter": recursion.kappa}


def add_to(grads: Gradients, slot: Slot, value: Any) -> None:
    """Add the gradient from one trace to that of its effective weight."""
    key = (slot.relation.site.index, slot.name)
    grads[key] = plus(grads.get(key), value)


def add_all(total: Gradients, grads: Gradients) -> Gradients:
    """Add gradients to the totals, in the types of the totals."""
    return {
        k: v + (grads[k] if jnp.iscomplexobj(v) else grads[k].real).astype(v.dtype) if k in grads else v
        for k, v in total.items()
    }
