"""The states of a learner itself: its traces, found by parameter, and the counter of steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import brainstate
import numpy as np

from .. import _compat
from .._compiler.step import show_path
from .._types import Array, DTypeLike, NumPyArray, Path, Value

if TYPE_CHECKING:
    from .stateful import ETraceAlgorithm


class EligibilityTrace(brainstate.ShortTermState):
    """A state that holds an eligibility trace."""


class StepCounter(brainstate.ShortTermState):
    """A number of steps, `value`; of each sample, where a learner is mapped over many.

    >>> import jax.numpy as jnp
    >>> count = StepCounter(jnp.array(3))
    >>> bool(count == 3), int(count), int(count.value)
    (True, 3, 3)
    """

    __hash__ = brainstate.State.__hash__

    def __eq__(self, other: object) -> Value:
        # as in `state in states`
        return self is other if isinstance(other, brainstate.State) else self.value == other

    def __int__(self) -> int:
        return int(self.value)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NumPyArray:
        return np.asarray(self.value, dtype)


def is_unchanged(before: Array, after: Array) -> bool:
    """Whether a counter is known to have its old value."""
    return before is after or (not any(map(_compat.is_tracer, (before, after))) and int(before) == int(after))


def traces_of(learner: ETraceAlgorithm, weight: brainstate.State | Path | str) -> dict[str, Array]:
    """The traces of one parameter, given as its state or its path.

    Axes along which a trace is uniform, and columns of the weight that reach no state with memory (an LSTM's
    output gate), are left out.
    """
    if isinstance(weight, brainstate.State):
        found = [e.path for e in learner.graph.module_info.params if e.state is weight]
        if not found:
            raise ValueError("The weight is not a parameter that the compiled model uses.")
        (path,) = found
    else:
        path = tuple(weight) if isinstance(weight, tuple | list) else tuple(str(weight).split("."))
    prefix = lambda slot: f"{slot.relation.site.index}:{'.'.join(slot.relation.weight_path)}:"
    belongs = lambda key, slot: key == slot.key or key.startswith(prefix(slot))
    chosen = {
        key: st.value
        for key, st in learner.etrace_states.items()
        if any(belongs(key, t) for t in learner.executor.slots if path in t.relation.param_paths)
    }
    if not chosen:
        known = f"; known: {', '.join(map(show_path, learner.report.etrace_weights))}"
        reasons = {p: f": {why}" for p, why in learner.report.excluded_weights.items()}
        raise ValueError(f"The parameter `{show_path(path)}` has no trace{reasons.get(path, known)}.")
    return chosen
