"""Detects hidden states that were set by something else than the learner since its last step or reset."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import brainstate
import jax
import numpy as np

from .. import _compat
from .._lines import warn_user

if TYPE_CHECKING:
    from .state_reads import StateReads
    from .stateful import ETraceAlgorithm


class StateChanges:
    """The hidden states as a learner left them, compared where it goes on from them.

    A function that goes on from the states and traces that it is given reads the guard, a state. So the guard
    is an input of that function, and `brainstate` reads it at each call, compiled or not. A function that
    resets the learner first does not read it.
    """

    def __init__(self, learner: ETraceAlgorithm) -> None:
        self._learner = weakref.ref(learner)
        self._guard = brainstate.State(np.zeros((), bool))
        self._guard.stack_level = learner.steps.stack_level  # as if it were the learner's own
        self._guard.register_hook("read", self._on_guard)
        learner.steps.register_hook("write_after", self._on_step)
        self._hidden: dict[str, brainstate.State] = {}
        self._looked: dict[str, list[Any]] = {}  # the leaves at the last look
        self._left: dict[str, list[Any]] = {}  # the leaves after the learner's last step or reset

    def watch(self, hidden: dict[str, brainstate.State]) -> None:
        """Follow these states from now on."""
        self._hidden = hidden

    def before_call(self, reads: StateReads, *, keep: bool) -> None:
        """Warn if a state was set and the traces were not; `keep`: traces are wanted after the call."""
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
        if not any(map(_compat.is_tracer, jax.tree.leaves(now))):
            self._left = self._looked = now

    def _now(self) -> dict[str, list[Any]]:
        return {name: jax.tree.leaves(_raw(state)) for name, state in self._hidden.items()}

    def _on_guard(self, context: Any) -> None:
        now, learner = self._now(), self._learner()
        if not any(map(_compat.is_tracer, jax.tree.leaves([context.value, now]))):
            if learner is not None and not learner._is_fresh():
                self._warn(k for k, v in now.items() if any(map(_differ, self._left.get(k, v), v)))
            self._looked = now

    def _on_step(self, context: Any) -> None:
        now = self._now()
        if not any(map(_compat.is_tracer, jax.tree.leaves([context.value, now]))):
            # a state that is as before may be written after the counter is: unknown
            self._left = {k: v for k, v in now.items() if _ids(v) != _ids(self._looked.get(k, []))}
            self._looked = now

    def _warn(self, names: Any) -> None:
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


def _raw(state: brainstate.State) -> Any:
    return vars(state)["_value"]  # a read of `state.value` would make it an input of what is being traced


def _ids(leaves: list[Any]) -> list[int]:
    return list(map(id, leaves))


def _differ(a: Any, b: Any) -> bool:
    """Whether two arrays of one shape are not equal; with another shape, a state has other traces as well."""
    if a is b or np.shape(a) != np.shape(b) or not getattr(b, "is_fully_addressable", True):
        return False
    return not np.array_equal(a, b, equal_nan=True)
