"""Whether a user's step assigns states beside the learner, which traces cannot know of."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import brainstate
import jax

from .. import _compat
from .._compiler.diagnostics import warn_user


@dataclass
class Watch:
    """The values of hidden states and traces as they were last seen, while a user's step runs."""

    states: Mapping[str, brainstate.State]
    traces: Sequence[brainstate.State]
    about: Any = None  # the model
    assigned: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.settle()

    def settle(self) -> None:
        """What is there now is as it should be."""
        self._seen = self._look()

    def compare(self) -> None:
        """Note the states that someone assigned since; not where the traces were set as well."""
        (states, traces), (now, traces_now) = self._seen, self._look()
        if not any(map(operator.is_not, traces, traces_now)):
            self.assigned += [name for name in states if any(map(_differ, states[name], now[name]))]

    def _look(self) -> tuple[dict[str, list[Any]], list[Any]]:
        # the traces behind brainstate's back: to read one in a step counts as the user's doing
        traces = [vars(st)["_value"] for st in self.traces]
        return {k: jax.tree.leaves(st.value) for k, st in self.states.items()}, traces

    def around(self, step_fn: Callable[..., Any]) -> Callable[..., Any]:
        """The same function; it warns if it assigns a state by itself."""

        @functools.wraps(step_fn)
        def step(*slices: Any) -> Any:
            self.assigned.clear()
            self.settle()
            try:
                out = step_fn(*slices)
                self.compare()
            finally:
                self._seen = {}, []  # no value of a step that is being traced outlives it
            if self.assigned:
                names = ", ".join(f"`{name}`" for name in dict.fromkeys(self.assigned))
                warn_user(
                    f"`step_fn` assigns {names}, beside the model's own step: the traces do not know of it, "
                    "so the gradient goes on as if it had not been done. Do it in the model's `update`; or, "
                    "to begin a new episode, set the traces back as well (`learner.reset_state()`).",
                    about=self.about,
                )
            return out

        return step


def _differ(a: Any, b: Any) -> bool:
    """Whether two values are not one object, though both are of the same trace."""
    return a is not b and _compat.trace_of(a) is _compat.trace_of(b)
