"""How training is going: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Self

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .._report.tables import show_bytes
from .result import COUNTS, Row

LINE_EVERY = 10.0  # seconds between lines, where there is no terminal
BAR = 12 + 1 + 7 + 4  # characters of a bar, the slash and the time, and of the gaps between


class _Shown:
    """A console, with a bar where it is a terminal."""

    def __init__(self, total: int | None, enabled: bool, now: str, *, stderr: bool = False) -> None:
        self.console = Console(quiet=not enabled, highlight=False, stderr=stderr)
        self._bar: Progress | None = None
        if enabled and self.console.is_terminal:
            shown = TextColumn("{task.fields[now]}"), TimeRemainingColumn()
            columns = BarColumn(bar_width=12), MofNCompleteColumn(), *shown
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._task = self._bar.add_task("", total=total, now=now)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.stop()


class Watch(_Shown):
    """Shows loss, metrics, time steps per second and memory while a run goes on."""

    def __init__(self, total: int | None, enabled: bool) -> None:
        super().__init__(total, enabled, "compiling ...")
        self._times: deque[tuple[float, int]] = deque(maxlen=50)
        self._warm = False
        self._last_line = time.monotonic()
        self._total = total

    def begins(self, steps: int, sequences: int | None) -> None:
        """Before the first batch, so that data whose first axis is not time are noticed."""
        if not self._warm:
            self.say(
                f"batches of {f'{sequences} sequences, ' if sequences else ''}{steps} steps; compiling ..."
            )

    def trained(self, row: Row, steps: int, seconds: float) -> None:
        """After a batch of `steps` time steps."""
        if self._warm:  # the first batch compiles
            self._times.append((seconds, steps))
        self._warm = True
        if self._bar:
            self._bar.update(self._task, completed=row["batch"], now=self._status(row))
        elif time.monotonic() - self._last_line > LINE_EVERY:
            self.say(f"{self._place(row)}  {self._status(row)}")

    def evaluated(self, row: Row) -> None:
        self.say(f"{self._place(row)}  evaluation: {show_scores(row)}  {self._speed()}".rstrip())

    def say(self, text: str) -> None:
        self._last_line = time.monotonic()
        self.console.print(text, markup=False, soft_wrap=True)

    def _place(self, row: Row) -> str:
        of = f"/{self._total}" if self._total else ""
        return f"batch {row['batch']:>{len(str(self._total or 99999))}}{of}"

    def _status(self, row: Row) -> str:
        """As many scores, the speed and the memory as there is room for beside the bar."""
        parts = [*show_scores(row).split("  "), *self._speed().split("  ")]
        room = self.console.width - BAR - 2 * len(str(self._total)) if self._bar else len("  ".join(parts))
        while len("  ".join(parts)) > room and len(parts) > 1:
            parts.pop()
        return "  ".join(parts).rstrip()

    def _speed(self) -> str:
        if not self._times:
            return ""
        rate = sum(n for _, n in self._times) / max(sum(t for t, _ in self._times), 1e-9)
        return f"{rate:,.0f} steps/s  {show_bytes(memory())}"


class Stages(_Shown):
    """A bar over things to be done one after the other, each with a `label`; lines where that is long."""

    def __init__(self, things: Sequence[Any], enabled: bool) -> None:
        super().__init__(len(things), enabled, "", stderr=True)
        self.things = things

    def __iter__(self) -> Iterator[Any]:
        last = time.monotonic()
        for done, thing in enumerate(self.things):
            if self._bar:
                self._bar.update(self._task, completed=done, now=thing.label)
            elif time.monotonic() - last > LINE_EVERY:
                last = time.monotonic()
                self.console.print(f"{done}/{len(self.things)}  {thing.label}", markup=False)
            yield thing


def show_scores(row: Row) -> str:
    """Loss and metrics, in a few digits."""
    return "  ".join(f"{k} {v:.4g}" for k, v in row.items() if k not in (*COUNTS, "seconds"))


def memory() -> int:
    """The most bytes that the accelerator has held so far, or on a CPU the process."""
    stats: dict[str, Any] = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
