"""The states of a learner itself: traces, and the counter of steps."""

from __future__ import annotations

from typing import Any

import brainstate
import numpy as np

from .. import _compat


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

    def __eq__(self, other: Any) -> Any:
        if isinstance(other, brainstate.State):  # as in `state in states`
            return self is other
        return self.value == other

    def __int__(self) -> int:
        return int(self.value)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.asarray(self.value, *args, **kwargs)


def is_unchanged(before: Any, after: Any) -> bool:
    """Whether a counter is known to be what it was."""
    return before is after or (not any(map(_compat.is_tracer, (before, after))) and bool(before == after))
