"""What a learning rule is: a frozen value with pure functions over a dictionary of arrays.

Whatever a rule keeps, it answers four questions, and steps, windows and chunks are written once for all
rules: what is kept at the start, how it advances over a window of steps, what gradient it makes of a signal
at the window's start, and what is left of it when some samples begin anew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._compiler.errors import NotSupportedError
from .._compiler.exactness import RuleKind
from .._compiler.graph import ETraceGraph
from .._executor.executor import ETraceGraphExecutor, Leaves, Local
from .._executor.sharding import Sharding, Spec, plus
from .._executor.slots import Slot
from .._executor.trace_recursion import Leak, Recursion
from .._executor.window import Record, Signals, Window
from .layers import Layers
from .rank import Rank
from .signal import PROPAGATED, Signal

Values = dict[str, Any]  # the arrays that a rule keeps, by stable names
Gradients = dict[tuple[int, str], Any]  # of each effective weight, by site and name


class Rule(ABC):
    """A learning rule."""

    back_through_time: ClassVar[bool] = False  # it keeps nothing: a gradient goes through all that it spans
    signal: Signal = PROPAGATED  # what meets the traces of a step
    recursion: Recursion | None = None  # how traces advance; None: by the local Jacobians
    any_window: ClassVar[bool] = True  # how many steps go together changes no number

    @abstractmethod
    def start(self, executor: ETraceGraphExecutor) -> Values:
        """The arrays at the start; called with abstract values, for shapes and types."""

    def lasting(self, executor: ETraceGraphExecutor) -> Values:
        """The arrays that a reset does not set back, at their start: those of the signal."""
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
        """The gradients of the parameters, of signals at the carried states before a window.

        Each as such or, where a batch is spread over devices, as these have it (`PartialSums`).
        """

    @abstractmethod
    def forget(self, executor: ETraceGraphExecutor, values: Values, rows: Any) -> Values:
        """The arrays with nothing left of the samples that `rows`, a boolean for each, has True for."""

    @property
    def one_pass(self) -> bool:
        """Whether the windows of a sequence can be one backward pass, by `over_windows`."""
        return False

    @property
    def projection(self) -> Rank | None:
        """The projection of the cotangents that cross a window's start; None if none crosses."""
        return None

    def spread(self, executor: ETraceGraphExecutor, shapes: Values) -> dict[str, Spec]:
        """How what it keeps, of these shapes, is spread over devices, as `executor.spread` has it.

        What is not named, XLA lays out.
        """
        return {}

    def seen(self, graph: ETraceGraph, windows: bool) -> ETraceGraph:
        """The graph with the states that it keeps traces of; `windows` is as in `kind`."""
        return graph

    @property
    def windows(self) -> bool:
        """Whether signals are taken at the start of a window, along all paths."""
        return True

    def kind(self, windows: bool) -> RuleKind:
        """What it is, for the verdict on exactness; `windows`: signals are taken at the start of windows."""
        return RuleKind("a rule of one's own", known=False)

    @property
    def turns(self) -> int:
        """How many steps of a loop go together."""
        return 1

    def fuses(self, values: Values) -> bool:
        """Whether a chunk of one step is faster than a step by itself."""
        return False


class TraceRule(Rule):
    """A rule over the traces of weights: what it keeps of them, how that advances, and its gradient.

    A rule of one's own is a frozen dataclass with `init`, `update` and `gradient`; `reset` for episodes in
    a batch.
    """

    any_window: ClassVar[bool] = False

    @property
    def beside(self) -> Rank | Layers | None:
        """What is kept beside the traces of what these leave out; None: nothing."""
        return None

    @property
    def windows(self) -> bool:
        return self.beside is not None

    @abstractmethod
    def init(self, slots: Sequence[Slot], local: Local) -> Values:
        """The arrays at the start; `local` has abstract values, for shapes and types."""

    @abstractmethod
    def update(self, slots: Sequence[Slot], values: Values, local: Local) -> Values:
        """Advance one step."""

    @abstractmethod
    def gradient(self, slots: Sequence[Slot], values: Values, signals: Signals, local: Local) -> Gradients:
        """The gradient of the step's loss, from the traces after the step."""

    def gradient_apart(
        self, slots: Sequence[Slot], values: Values, signals: Signals, local: Local
    ) -> Gradients:
        """The same, each as the devices have it that share a batch (`PartialSums`), where it can be."""
        return self.gradient(slots, values, signals, local)

    def reset(self, slots: Sequence[Slot], values: Values, keep: Any) -> Values:
        """The arrays with nothing left of the samples that `keep`, (batch,), has False for."""
        raise NotSupportedError(
            f"The rule {type(self).__name__} does not say how samples of a batch begin anew: give it a "
            "method `reset(slots, values, keep)`, or reset all of them (`learner.reset_state()`)."
        )

    def spread_traces(self, slots: Sequence[Slot], at: Sharding, shapes: Values) -> dict[str, Spec]:
        """How its arrays are spread over devices; those that are no traces by their labels, XLA lays out."""
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

        `fresh`: the traces are known to be zero. Unless `keep`, the traces are not wanted any more.
        """
        from .chunk import step_by_step

        values, grads = step_by_step(self, slots, values, record)
        return values, add_all(total, grads)

    def through(self, slots: Sequence[Slot], values: Values, record: Record) -> Values:
        """The traces after the steps in `record`."""

        def body(values: Values, step: Any) -> Any:
            local, _, _, keep = record.one(step)
            values = values if keep is None else self.reset(slots, values, keep)
            return self.update(slots, values, local), None

        return jax.lax.scan(body, values, record.steps)[0]

    def course(self, slots: Sequence[Slot], record: Record) -> dict[str, tuple[Any, Any]]:
        """`P` and `d` of each trace that goes as `P trace + sum_t x[t] d[t]` over the steps in `record`.

        `P` is (S, S, *at), `d` (S, time, *y).
        """
        return {}

    # -- as any rule -------------------------------------------------------------------------------

    def start(self, executor: ETraceGraphExecutor) -> Values:
        values = self.init(executor.slots, executor.example_local())
        return values if self.beside is None else {**values, **self.beside.start(executor)}

    def spread(self, executor: ETraceGraphExecutor, shapes: Values) -> dict[str, Spec]:
        at = executor.spread
        assert at is not None
        found = self.spread_traces(executor.slots, at, shapes)
        return found if self.beside is None else {**found, **self.beside.spread(executor)}

    def lasting(self, executor: ETraceGraphExecutor) -> Values:
        found = super().lasting(executor)
        return found if self.projection is None else {**found, **self.projection.lasting(executor)}

    def begin(self, executor: ETraceGraphExecutor, values: Values, *, fresh: bool) -> Values:
        return values if self.projection is None else self.projection.begin(executor, values, fresh=fresh)

    def advance(self, executor: ETraceGraphExecutor, values: Values, window: Window) -> Values:
        after = self._all_advanced(executor, values, None, window)[0]
        if self.projection is None:
            return after
        crossing: Any = self.projection.crossing(executor, values)
        state = crossing.entered(crossing.start, None if window.keep is None else window.keep[0])
        state = crossing.along(state, window.as_if_begun)
        return {**after, **self.projection.observed(executor, values, state, None, 1)}

    def _all_advanced(
        self, executor: ETraceGraphExecutor, values: Values, signals: Leaves | None, window: Window
    ) -> tuple[Values, dict[int, Any], Any]:
        """The arrays after a window, but for those that choose a projection.

        Also returns the gradients of signals at the window's start that come with them, and the rows of the
        projection, pulled back to the window's start.
        """
        if self.beside is None:
            return self._advanced(executor, values, window), {}, None
        if window.keep is not None:  # samples that are reset at its start have no past
            values = self.forget(executor, values, ~window.keep[0])
            window = window.as_if_begun
        after = self._advanced(executor, values, window)
        if not isinstance(self.beside, Rank):
            return {**after, **self.beside.advance(executor, values, after, window)}, {}, None
        course = lambda slots: self.course(slots, window.record)
        more, known, pulled = self.beside.advance(executor, values, after, window, course, signals)
        return {**values, **after, **more}, known, pulled

    def _advanced(self, executor: ETraceGraphExecutor, values: Values, window: Window) -> Values:
        if window.length == 1:
            values = values if window.keep is None else self.reset(executor.slots, values, window.keep[0])
            return self.update(executor.slots, values, window.first)
        return self.through(executor.slots, values, window.record)

    def past(self, executor: ETraceGraphExecutor, values: Values, signals: Leaves, window: Window) -> Leaves:
        at_groups = executor.widened(executor.at_groups(signals))
        grads = self.gradient_apart(executor.slots, values, at_groups, window.inputs_of_first)
        found = executor.to_parameters(window.params, window.first_consts, grads)
        if self.beside is None:
            return found
        more = self.beside.past(executor, values, signals)
        return [plus(a, more.get(i)) for i, a in enumerate(found)]

    def over_windows(
        self,
        executor: ETraceGraphExecutor,
        values: Values,
        signals: Leaves,
        window: Window,
        size: int,
        crossed: tuple[Any, Any],
        *,
        fresh: bool,
        keep: bool,
    ) -> tuple[Leaves, Values]:
        """Past gradients of consecutive windows, and the arrays after the last, from one backward pass.

        `window` holds the steps of all windows, which have `size` steps each but for a shorter first one.
        `signals` are cotangents of the carried leaves before each step that no earlier window receives:
        zero inside a window. At the first step they are whole. `crossed` is the state of the projection's
        crossing after the last window, and the sum of what it read.
        """
        first = [None if s is None else s[0] for s in signals]
        windows = -(-window.length // size)
        if keep and not fresh and windows == 1 and self.projection is not None:  # one pass over all arrays
            after, known, pulled = self._all_advanced(executor, values, first, window)
            found = self.past(executor, values, first, window)
            found = [known.get(i, a) for i, a in enumerate(found)]
            return found, {**after, **self.projection.observed(executor, values, *crossed, 1, pulled)}
        at_groups = jax.vmap(lambda s: executor.widened(executor.at_groups(s)))(signals)
        record = replace(window.record, old_signals=at_groups)
        zeros = executor.no_gradients(record.local.weights)
        after, grads = self.chunk(
            executor.slots, values, record, zeros, fresh=fresh, keep=keep and self.projection is None
        )
        found = executor.to_parameters(window.params, window.first_consts, grads)
        if self.projection is None:
            return found, after
        if not fresh:
            more = self.projection.past(executor, values, first)
            found = [plus(a, more.get(i)) for i, a in enumerate(found)]
        advance = lambda values, one: self._all_advanced(executor, values, None, one)[0]
        after = window.in_windows(size, advance, values) if keep else values
        return found, {**after, **self.projection.observed(executor, values, *crossed, windows)}

    def forget(self, executor: ETraceGraphExecutor, values: Values, rows: Any) -> Values:
        kept = {**values, **self.reset(executor.slots, values, ~rows)}
        return kept if self.beside is None else {**kept, **self.beside.forget(executor, values, rows)}


def kind_of(rule: Rule) -> dict[str, Any]:
    """What a verdict has to know of a rule's signal and of how its traces advance."""
    recursion = rule.recursion or Recursion()
    leak = recursion.decay.value if isinstance(recursion.decay, Leak) else None
    signal = {"signal": rule.signal.words, "broadcast": rule.signal.is_broadcast}
    return {**signal, "leak": leak, "filter": recursion.kappa}


def add_to(grads: Gradients, slot: Slot, value: Any) -> None:
    """Add what one trace gives to the gradient of its effective weight."""
    key = (slot.relation.site.index, slot.name)
    grads[key] = plus(grads.get(key), value)


def add_all(total: Gradients, grads: Gradients) -> Gradients:
    """The gradients, added to those so far, in the types of these."""
    return {
        k: v + (grads[k] if jnp.iscomplexobj(v) else grads[k].real).astype(v.dtype) if k in grads else v
        for k, v in total.items()
    }
