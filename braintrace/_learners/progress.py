"""How far a long sequence is, and states that stay consistent when it is interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import brainstate

Report = Callable[[int, int], None]  # steps done, steps in all


@contextmanager
def unchanged_on_error(states: Sequence[brainstate.State]) -> Iterator[None]:
    """If the body fails or is interrupted, give the states the values they had before it."""
    before = [(state, state.value) for state in states]
    try:
        yield
    except BaseException:
        for state, value in before:
            state.value = value
        raise


@contextmanager
def reporting(progress: bool | Report) -> Iterator[Report | None]:
    """The function that the option `progress` asks for; True is a bar in the terminal."""
    if not isinstance(progress, bool) and not callable(progress):
        raise TypeError(f"`progress` is True, False or a function of two numbers, not {progress!r}.")
    if progress is not True:
        yield progress or None
        return
    from .._train.progress_bar import StepBar  # rich takes long to import

    with StepBar() as bar:
        yield bar
