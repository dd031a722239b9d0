"""Warnings of changes to states and weights between calls, which the traces do not contain."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import brainstate
import jax
import numpy as np

from .. import _compat
from .._compiler.step import show_path
from .._executor.executor import masks_of_weights
from .._frontends.modules import by_path
from .._lines import warn_user
from .._online.sequence import is_traced
from .._types import Array, Leaves, PyTree
from .model_states import hidden_of

if TYPE_CHECKING:
    from .stateful import ETraceAlgorithm

Hidden = Mapping[str, brainstate.State]  # hidden states by name
Tracing = weakref.ref[object]  # to JAX's trace: an `id` may be that of a later one


class Guards:
    """The three observers of a learner: of states set, of states read, and of changing weights."""

    def __init__(self, model: brainstate.nn.Module) -> None:
        self.reads = StateReads(model)
        self.weights = WeightChanges(model)
        self._changes: StateChanges | None = None

    def before_call(self, learner: ETraceAlgorithm, *, keep: bool) -> None:
        """Warn if a hidden state was set since the last call and the traces were not.

        `keep`: the traces are used after the call.
        """
        compiled = learner._cache.known
        if compiled is not None and learner.traces and not learner._is_tracing:
            hidden = hidden_of(compiled)
            self.reads.watch(hidden)
            self._changes = self._changes or StateChanges(learner)
            self._changes.before_call(hidden, self.reads, keep=keep)

    def after_call(self) -> None:
        """Record the hidden states after a call that has written the step counter before them."""
        if self._changes is not None:
            self._changes.after_call()


class StateChanges:
    """The hidden states after the learner's last step or reset, compared at its next call.

    A function that continues from its states and traces reads the guard, which is a state too. So the guard
    is an input of that function, and `brainstate` reads it at each call, compiled or not. A function that
    resets the learner first does not read it.
    """

    def __init__(self, learner: ETraceAlgorithm) -> None:
        self._learner = weakref.ref(learner)
        self._guard = brainstate.State(np.zeros((), bool))
        self._guard.stack_level = learner.steps.stack_level  # as if it were the learner's own
        self._guard.register_hook("read", self._on_guard)
        learner.steps.register_hook("write_after", self._on_step)
        self._hidden: Hidden = {}
        self._looked: dict[str, Leaves] = {}  # the leaves at the last look
        self._left: dict[str, Leaves] = {}  # the leaves after the learner's last step or reset

    def before_call(self, hidden: Hidden, reads: StateReads, *, keep: bool) -> None:
        """Warn if a state was set and the traces were not; `keep`: traces are used after the call."""
        self._hidden = hidden
        learner = self._learner()
        if learner is None or any(map(_compat.is_tracer, map(_raw, learner.traces.values()))):
            return  # the function that is being traced has set the traces
        if keep or not learner._is_fresh():
            # in a function that is being traced, a state that was only read is another tracer
            traced = {k: list(filter(_compat.is_tracer, v)) for k, v in self._now().items()}
            self._warn(k for k, v in traced.items() if v and reads.has_assigned(k, v))
        _ = self._guard.value

    def after_call(self) -> None:
        """Record the states as the learner leaves them."""
        now = self._now()
        if not is_traced(now):
            self._left = self._looked = now

    def _now(self) -> dict[str, Leaves]:
        return {name: jax.tree.leaves(_raw(state)) for name, state in self._hidden.items()}

    def _on_guard(self, context: brainstate.HookContext) -> None:
        now, learner = self._now(), self._learner()
        if not is_traced([context.value, now]):
            if learner is not None and not learner._is_fresh():
                self._warn(k for k, v in now.items() if any(map(_differ, self._left.get(k, v), v)))
            self._looked = now

    def _on_step(self, context: brainstate.HookContext) -> None:
        now = self._now()
        if not is_traced([context.value, now]):
            # a state that is as before may be written after the counter is: unknown
            ids = lambda leaves: list(map(id, leaves))
            self._left = {k: v for k, v in now.items() if ids(v) != ids(self._looked.get(k, []))}
            self._looked = now

    def _warn(self, names: Iterable[str]) -> None:
        learner, shown = self._learner(), ", ".join(f"`{name}`" for name in names)
        if shown and learner is not None:
            warn_user(
                f"{shown} was set since the last call of the learner (by a reset of the model, a call of the "
                "model itself or another learner), and the traces were not: the gradient goes on as if it "
                "had not been done. To begin a new sequence, call `learner.reset_state()`, which resets "
                "both; what is part of every step belongs in the model's `update`; after an evaluation, "
                "reset the learner or put the states back.",
                about=learner.model,
            )


class StateReads:
    """The states that a function reads before it calls the learner, while it is being traced.

    In `etrace_grad` the traces before the step give their gradient. In a loop of the user's own they are
    constants, and that part of the gradient is missing: the call of the learner warns of it.
    """

    def __init__(self, model: brainstate.nn.Module) -> None:
        self._model = model
        self._noted: dict[str, Tracing] = {}  # and in which tracing
        self._watched: dict[str, int] = {}
        self._called_in: Tracing | None = None
        self._paused = False
        self._assigned: dict[str, list[weakref.ref[Array]]] = {}  # the tracers that each was last given

    def watch(self, states: Hidden) -> None:
        """Note reads of these states from now on."""
        for name, state in states.items():
            if self._watched.get(name) != id(state):
                self._watched[name] = id(state)
                state.register_hook("read", self._reader(name))
                state.register_hook("write_after", self._writer(name))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing inside of this context."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def before_call(self, states: Hidden, *, is_tracing: bool) -> None:
        """Warn of the states that were read in the tracing that a call belongs to.

        `is_tracing`: it is the learner that traces, which includes them.
        """
        with self.paused():
            now = {name: _tracing(state.value) for name, state in states.items()}
        read = [f"`{name}`" for name, tracing in now.items() if tracing and self._noted.get(name) == tracing]
        self._noted.clear()
        self._called_in = next(filter(None, now.values()), None)
        if read and not is_tracing:
            warn_user(
                f"{', '.join(read)} is read before the learner is called. If the "
                "loss depends on it, the gradient misses the influence of parameters on it in earlier steps. "
                "`learner.etrace_grad` includes it; or read the state in the model and return it.",
                about=self._model,
            )

    def has_assigned(self, name: str, tracers: Leaves) -> bool:
        """Whether a state was last given these tracers."""
        given = self._assigned.get(name, [])
        return len(given) == len(tracers) and all(r() is t for r, t in zip(given, tracers, strict=True))

    def _reader(self, name: str) -> Callable[[brainstate.HookContext], None]:
        def read(context: brainstate.HookContext) -> None:
            tracing = None if self._paused else _tracing(context.value)
            if tracing and tracing != self._called_in:  # after a call, reads are of the call's results
                self._noted[name] = tracing

        return read

    def _writer(self, name: str) -> Callable[[brainstate.HookContext], None]:
        def written(context: brainstate.HookContext) -> None:
            tracers = filter(_compat.is_tracer, jax.tree.leaves(context.value))
            self._assigned[name] = list(map(weakref.ref, tracers))
            if not self._paused:
                self._noted.pop(name, None)

        return written


class WeightChanges:
    """The constants and states that weights are computed from, at the last call since a reset.

    A trace belongs to the weight as the op sees it, so it is wrong once these change.
    """

    def __init__(self, model: brainstate.nn.Module) -> None:
        self._model = model
        self._consts: Leaves | None = None
        self._masks: Leaves | None = None

    def compare_consts(self, now: Leaves) -> None:
        """Warn if a weight is computed from another constant than at the last call, or may be."""
        before, self._consts = self._consts, None if is_traced(now) else now
        if is_traced(now) or (before is not None and not _are_same(before, now)):
            how = "may change" if is_traced(now) else "has changed"
            self._warn("something that the model closes over", how, "as an argument of the model")

    def compare_masks(self, learner: ETraceAlgorithm) -> None:
        """Warn if a state that a weight is computed from has changed since the last call."""
        if learner.rule.back_through_time:
            return
        found, masks = by_path(learner.model), masks_of_weights(learner.executor)
        states: Hidden = {show_path(e.path): found.get(e.path, e.state) for e in masks}
        now = [leaf for st in states.values() for leaf in jax.tree.leaves(st.value)]
        if is_traced(now):
            return  # an input of a compiled function: its last value is unknown
        before, self._masks = self._masks, now
        if before and not _are_same(before, now):
            names = ", ".join(f"`{name}`" for name in states)
            self._warn(f"the state {names}", "has changed", "written by the step")

    def _warn(self, what: str, how: str, instead: str) -> None:
        warn_user(
            f"A weight, or the gain of a leaky readout, is made of {what}, which {how} from step to step. A "
            "trace is of the weight as the op sees it and goes back to the parameter with the last value, so "
            "that the gradient is wrong if that changes. Apply it to the input or the output of the op "
            "instead of the weight, or set the traces back when it changes (`learner.reset_state()`); "
            f"{instead}, it leaves the weight without a trace.",
            about=self._model,
        )


def _raw(state: brainstate.State) -> PyTree:
    return vars(state)["_value"]  # a read of `state.value` would make it an input of what is being traced


def _tracing(value: PyTree) -> Tracing | None:
    """The tracing that a value belongs to, or None for concrete values."""
    tracers = filter(_compat.is_tracer, jax.tree.leaves(value))
    return next((weakref.ref(_compat.trace_of(a)) for a in tracers), None)


def _differ(a: PyTree, b: PyTree) -> bool:
    """Whether two arrays of one shape are not equal; with another shape, a state has other traces as well."""
    if a is b or np.shape(a) != np.shape(b) or not getattr(b, "is_fully_addressable", True):
        return False
    return not np.array_equal(a, b, equal_nan=True)


def _are_same(before: Leaves, now: Leaves) -> bool:
    pairs = zip(before, now, strict=False)
    return len(before) == len(now) and all(a is b or np.array_equal(a, b, equal_nan=True) for a, b in pairs)
