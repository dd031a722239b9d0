"""Call a learner's model, or another function, where a user's step calls the learner."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import brainstate
import jax

from .._online.data import MultiStepData, SingleStepData
from .._online.sequence import NeverCalledError
from .calling import split_call
from .progress import unchanged_on_error

if TYPE_CHECKING:
    from .stateful import ETraceAlgorithm


@contextmanager
def calling(learner: ETraceAlgorithm, function: Callable[..., Any]) -> Iterator[None]:
    """Have `learner(...)` call another function."""
    object.__setattr__(learner, "update", function)
    try:
        yield
    finally:
        object.__delattr__(learner, "update")


def calling_model(learner: ETraceAlgorithm) -> AbstractContextManager[None]:
    """Have `learner(...)` call its model, without traces."""

    def update(*args: Any, **kwargs: Any) -> Any:
        _, args, kwargs = split_call(learner, args, kwargs)
        return call_model(learner.model, *args, **kwargs)

    return calling(learner, update)


def called_with(learner: ETraceAlgorithm, step_fn: Callable[..., Any], slices: Any) -> tuple[Any, Any]:
    """The arguments that `step_fn(*slices)` calls the learner with; no state is changed."""
    seen: list[Any] = []

    def stop(*args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs))
        raise _CalledError

    states = list(learner.states().values())
    seeded, stopped = brainstate.random.seed_context(0), contextlib.suppress(_CalledError)
    with calling(learner, stop), seeded, stopped, unchanged_on_error(states):
        step_fn(*slices)
    if not seen:
        raise NeverCalledError
    args, kwargs = seen[0]
    return args, kwargs


class _CalledError(Exception):
    """The learner was called."""


def call_model(model: brainstate.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a model with the arguments of a learner: those of one step, or of a window of steps."""
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_data)

    def step(*slices: Any) -> Any:
        now = iter(slices)
        one = [next(now) if isinstance(a, MultiStepData) else a.data if is_data(a) else a for a in leaves]
        args, kwargs = jax.tree.unflatten(tree, one)
        return model(*args, **kwargs)

    windows = [a.data for a in leaves if isinstance(a, MultiStepData)]
    return brainstate.transform.for_loop(step, *windows) if windows else step()


def is_data(arg: Any) -> bool:
    """Whether an argument is `SingleStepData` or `MultiStepData`."""
    return isinstance(arg, SingleStepData)
