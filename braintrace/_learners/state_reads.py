"""Hidden states that a user's function reads before it calls the learner, while it is being traced.

In `etrace_grad` the traces before the step give their gradient. In a loop of the user's own they are
constants, and that part of the gradient is missing: the call of the learner warns of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import brainstate
import jax

from .. import _compat

Tracing = weakref.ref[Any]  # to JAX's trace: an `id` may be that of a later one


class StateReads:
    """Which states were read in the function that is being traced, before the learner's first call."""

    def __init__(self) -> None:
        self._noted: dict[str, Tracing] = {}  # and in which tracing
        self._watched: dict[str, int] = {}
        self._called_in: Tracing | None = None
        self._paused = False
        self._assigned: dict[str, list[weakref.ref[Any]]] = {}  # the tracers that each was last given

    def watch(self, states: Mapping[str, brainstate.State]) -> None:
        """Note what is read of these states from now on."""
        for name, state in states.items():
            if self._watched.get(name) != id(state):
                self._watched[name] = id(state)
                state.register_hook("read", self._reader(name))
                state.register_hook("write_after", self._writer(name))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing for a while."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def before_call(self, states: Mapping[str, brainstate.State]) -> list[str]:
        """The states that were read in the tracing that a call belongs to."""
        with self.paused():
            now = {name: _tracing(state.value) for name, state in states.items()}
        found = [name for name, tracing in now.items() if tracing and self._noted.get(name) == tracing]
        self._noted.clear()
        self._called_in = next(filter(None, now.values()), None)
        return found

    def has_assigned(self, name: str, tracers: list[Any]) -> bool:
        """Whether a state was last given these tracers."""
        given = self._assigned.get(name, [])
        return len(given) == len(tracers) and all(r() is t for r, t in zip(given, tracers, strict=True))

    def _reader(self, name: str) -> Any:
        def read(context: Any) -> None:
            tracing = None if self._paused else _tracing(context.value)
            if tracing and tracing != self._called_in:  # after a call, what is read is the call's own
                self._noted[name] = tracing

        return read

    def _writer(self, name: str) -> Any:
        def written(context: Any) -> None:
            tracers = filter(_compat.is_tracer, jax.tree.leaves(context.value))
            self._assigned[name] = list(map(weakref.ref, tracers))
            if not self._paused:
                self._noted.pop(name, None)

        return written


def _tracing(value: Any) -> Tracing | None:
    """The tracing that a value belongs to; None: it is known."""
    tracers = filter(_compat.is_tracer, jax.tree.leaves(value))
    return next((weakref.ref(_compat.trace_of(a)) for a in tracers), None)
