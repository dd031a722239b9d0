"""Progress of a run: a bar in a terminal, with a curve for streams; elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Self

import jax
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from .._report.tables import show_bytes
from .curves import draw_text, lines_of
from .result import FitResult, Row, scores_of

LINE_EVERY = 10.0  # seconds between lines, without a terminal
CURVE_EVERY = 1.0  # seconds between drawings of the live curve


class Bar(Progress):
    """A bar if the console is a terminal, with a drawing above it; else lines, at least ten seconds apart."""

    drawing: Text | None = None

    def __init__(self, total: int | None, enabled: bool, now: str, *, stderr: bool = False) -> None:
        console = Console(quiet=not enabled, highlight=False, stderr=stderr)
        text = TextColumn(
            "{task.fields[now]}", table_column=Column(ratio=1, no_wrap=True)
        )  # cut, if too long
        columns = BarColumn(12), MofNCompleteColumn(), text, TimeRemainingColumn()
        self.shown = enabled and console.is_terminal
        super().__init__(*columns, console=console, transient=True, expand=True, disable=not self.shown)
        self._task = self.add_task("", total=total, now=now)
        self._last_line = time.monotonic()

    def get_renderables(self) -> Iterator[RenderableType]:
        if self.drawing is not None:
            yield self.drawing
        yield self.make_tasks_table(self.tasks)

    def move(self, done: int, now: str, line: str) -> None:
        """Move the bar and write `now` next to it; or print a line, if the last one is long ago."""
        if self.shown:
            self.update(self._task, completed=done, now=now)
        elif time.monotonic() - self._last_line > LINE_EVERY:
            self.say(line)

    def say(self, text: str) -> None:
        self._last_line = time.monotonic()
        self.console.print(text, markup=False, soft_wrap=True)


class Watch:
    """Shows loss, metrics, time steps per second, memory and, for streams, the curve of the loss."""

    def __init__(self, total: int | None, enabled: bool, stream: FitResult | None = None) -> None:
        self._bar = Bar(total, enabled, "compiling ...")
        self._total, self._stream, self._last_curve = total, stream, 0.0
        self._times: deque[tuple[float, int]] = deque(maxlen=50)
        self._warm = False
        self.say = self._bar.say

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def begins(self, steps: int, sequences: int | None) -> None:
        """Print the shape of the first batch, which shows whether time is the first axis."""
        if not self._warm:
            size = f"{sequences} sequences, " if sequences else ""
            self.say(f"batches of {size}{steps} steps; compiling ...")

    def trained(self, row: Row, steps: int, seconds: float) -> None:
        """Show the scores of a batch of this many time steps."""
        if self._warm:  # the first batch compiles
            self._times.append((seconds, steps))
        self._warm = True
        status = "  ".join([*_show_scores(row), *self._speed()])
        self._bar.move(int(row["batch"]), status, f"{self._place(row)}  {status}")
        if self._bar.shown and self._stream and time.monotonic() - self._last_curve >= CURVE_EVERY:
            self._last_curve = time.monotonic()
            if lines := lines_of({"": self._stream}, "loss"):
                self._bar.drawing = draw_text(lines, "loss")

    def evaluated(self, row: Row) -> None:
        scores = "  ".join([*_show_scores(row), *self._speed()])
        self.say(f"{self._place(row)}  evaluation: {scores}")

    def _place(self, row: Row) -> str:
        of = f"/{self._total}" if self._total else ""
        return f"batch {row['batch']:>{len(str(self._total or 99999))}}{of}"

    def _speed(self) -> list[str]:
        if not self._times:
            return []
        rate = sum(n for _, n in self._times) / max(sum(t for t, _ in self._times), 1e-9)
        return [f"{rate:,.0f} steps/s", show_bytes(memory())]


class StepBar(Bar):
    """A bar over the steps of a sequence; called with the steps done and in all."""

    def __init__(self) -> None:
        super().__init__(None, True, "steps")

    def __call__(self, done: int, total: int) -> None:
        self.start()  # in a compiled function, the first call may come after the context has ended
        self.update(self._task, completed=int(done), total=int(total))
        if done >= total:
            self.stop()


def _show_scores(row: Row) -> list[str]:
    """Return loss and metrics in a few digits."""
    return [f"{name} {value:.4g}" for name, value in scores_of(row).items()]


def memory() -> int:
    """Return the peak memory in bytes, of the accelerator or, on a CPU, of the process."""
    stats: dict[str, int] = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
