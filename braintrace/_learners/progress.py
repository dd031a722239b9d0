"""How far a long sequence is, and states that stay consistent when it is interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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


def read_progress(progress: bool | Report) -> Report | None:
    """The function that the option `progress` asks for."""
    if not isinstance(progress, bool) and not callable(progress):
        raise TypeError(f"`progress` is True, False or a function of two numbers, not {progress!r}.")
    return Bar() if progress is True else progress or None


class Bar:
    """A progress bar in the terminal; it appears with the first report."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        if self._bar is None:
            columns = TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self._bar = Progress(*columns)
            self._bar.start()
            self._task = self._bar.add_task("steps", total=int(total))
        self._bar.update(self._task, completed=int(done))
        if done >= total:
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
