"""Progress of a run: a bar in a terminal, with a curve for streams; elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Self

import jax
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from .._report.tables import show_bytes
from .curves import draw_text, lines_of
from .result import COUNTS, FitResult, Row

LINE_EVERY = 10.0  # seconds between lines, without a terminal
CURVE_EVERY = 1.0  # seconds between drawings of the live curve
BAR = 12 + 1 + 7 + 4  # characters of the bar, the slash, the time, and the gaps between


class _BarWithCurve(Progress):
    """A progress bar with a drawing above it."""

    drawing: Text | None = None

    def get_renderables(self) -> Iterator[RenderableType]:
        if self.drawing is not None:
            yield self.drawing
        yield self.make_tasks_table(self.tasks)


class _Shown:
    """A console, with a bar if it is a terminal."""

    def __init__(self, total: int | None, enabled: bool, now: str, *, stderr: bool = False) -> None:
        self.console = Console(quiet=not enabled, highlight=False, stderr=stderr)
        self._bar: _BarWithCurve | None = None
        if enabled and self.console.is_terminal:
            shown = TextColumn("{task.fields[now]}"), TimeRemainingColumn()
            columns = BarColumn(bar_width=12), MofNCompleteColumn(), *shown
            self._bar = _BarWithCurve(*columns, console=self.console, transient=True)
            self._task = self._bar.add_task("", total=total, now=now)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.stop()


class Watch(_Shown):
    """Shows loss, metrics, time steps per second, memory and, for streams, the curve of the loss."""

    def __init__(self, total: int | None, enabled: bool, stream: FitResult | None = None) -> None:
        super().__init__(total, enabled, "compiling ...")
        self._stream, self._last_curve = stream, 0.0
        self._times: deque[tuple[float, int]] = deque(maxlen=50)
        self._warm = False
        self._last_line = time.monotonic()
        self._total = total

    def begins(self, steps: int, sequences: int | None) -> None:
        """Print the shape of the first batch, which shows whether time is the first axis."""
        if not self._warm:
            self.say(
                f"batches of {f'{sequences} sequences, ' if sequences else ''}{steps} steps; compiling ..."
            )

    def trained(self, row: Row, steps: int, seconds: float) -> None:
        """Show the scores of a batch of this many time steps."""
        if self._warm:  # the first batch compiles
            self._times.append((seconds, steps))
        self._warm = True
        if self._bar:
            self._bar.update(self._task, completed=row["batch"], now=self._status(row))
            if self._stream is not None and time.monotonic() - self._last_curve >= CURVE_EVERY:
                self._last_curve = time.monotonic()
                if lines := lines_of({"": self._stream}, "loss"):
                    self._bar.drawing = draw_text(lines, "loss")
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
        """Return scores, speed and memory, as many as fit next to the bar."""
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
    """A bar over tasks, done one after the other; without a terminal, lines now and then."""

    def __init__(self, labels: Sequence[str], enabled: bool) -> None:
        super().__init__(len(labels), enabled, "", stderr=True)
        self.labels = labels

    def __iter__(self) -> Iterator[str]:
        last = time.monotonic()
        for done, label in enumerate(self.labels):
            if self._bar:
                self._bar.update(self._task, completed=done, now=label)
            elif time.monotonic() - last > LINE_EVERY:
                last = time.monotonic()
                self.console.print(f"{done}/{len(self.labels)}  {label}", markup=False)
            yield label


class StepBar(_Shown):
    """A bar over the steps of a sequence; called with the steps done and in all."""

    def __init__(self) -> None:
        super().__init__(None, True, "steps")

    def __call__(self, done: int, total: int) -> None:
        if self._bar:
            self._bar.start()  # in a compiled function, the first call may come after the context has ended
            self._bar.update(self._task, completed=int(done), total=int(total))
            if done >= total:
                self._bar.stop()


def show_scores(row: Row) -> str:
    """Return loss and metrics in a few digits."""
    return "  ".join(f"{k} {v:.4g}" for k, v in row.items() if k not in (*COUNTS, "seconds"))


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
