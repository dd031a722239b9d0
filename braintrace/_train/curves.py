"""Learning curves of runs, as pictures and in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from .._types import NumPyArray
from .canvas import Area, Drawing, draw_axes, scale, ticks
from .result import FitResult, scores_of

COLORS = (
    *("#2563eb", "#e4572e", "#0d9488", "#a855f7", "#ca8a04", "#64748b"),
    *("#db2777", "#65a30d", "#0891b2", "#92400e", "#4338ca", "#dc2626"),
)
TERMINAL_COLORS = ("blue", "red", "green", "magenta", "yellow", "white")
POINTS = 300  # the most points of a line
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520, 300, 56, 16, 34, 40
Runs = Mapping[str, FitResult]


@dataclass(frozen=True)
class Line:
    """One curve: the evaluations of a run or, without evaluations, its batches."""

    name: str
    number: int  # of the run
    x: NumPyArray
    y: NumPyArray
    raw: tuple[NumPyArray, NumPyArray] | None = None  # the batches, drawn behind the curve

    @property
    def color(self) -> str:
        return COLORS[self.number % len(COLORS)]


def names_of(runs: Runs) -> list[str]:
    """Return the metrics of the runs, the loss first."""
    rows = [row for run in runs.values() for row in (run.history[:1] + run.evaluations[:1])]
    return list(dict.fromkeys(k for row in rows for k in scores_of(row)))


def lines_of(runs: Runs, metric: str) -> list[Line]:
    """Return the curve of a metric for each run."""
    found = []
    for i, (name, run) in enumerate(runs.items()):
        x, y = run.curve(metric, evaluation=True)
        raw = run.curve(metric)
        if len(x) < 2:
            x, y = smooth(*raw)
        if len(x):
            found.append(Line(name, i, x, y, _thin(*raw) if len(raw[0]) > 1 else None))
    return found


def save_curves(runs: Runs, path: str | Path, targets: Mapping[str, float] | None = None) -> None:
    """Write a picture of learning curves, one panel per metric.

    Args:
        runs: Results of `fit`, by name.
        path: The file; its suffix is the format: SVG, or with matplotlib PNG, PDF and so on.
        targets: Values to mark, by metric.
    """
    draw_curves(runs, names_of(runs), targets or {}).save(path)


def draw_curves(runs: Runs, metrics: Sequence[str], targets: Mapping[str, float]) -> Drawing:
    """Draw a panel for each metric, one below the other."""
    drawing = Drawing(f"{', '.join(metrics)} against batches", WIDTH, HEIGHT * len(metrics))
    for i, metric in enumerate(metrics):
        title, lines = metric.replace("_", " "), lines_of(runs, metric)
        area = (0, i * HEIGHT, WIDTH, (i + 1) * HEIGHT)
        draw_panel(drawing, area, lines, title, "batch", targets.get(metric))
    return drawing


def draw_panel(
    drawing: Drawing, area: Area, lines: list[Line], title: str, below: str, target: float | None = None
) -> None:
    """Draw curves with axes, names and the target."""
    left, right, bottom = area[0] + LEFT, area[2] - RIGHT, area[3] - BOTTOM
    drawn = [pair for line in lines for pair in ((line.x, line.y), line.raw) if pair is not None]
    wide = max([1.0, *(float(x.max()) for x, _ in drawn)])
    ys = np.concatenate([*(y for _, y in drawn), [] if target is None else [target]])
    ys = ys[np.isfinite(ys)] if np.isfinite(ys).any() else np.zeros(1)
    marks = ticks(float(ys.min()), float(ys.max()))
    px = scale(left, right, 0, wide)
    py = scale(bottom, area[1] + TOP, min(float(ys.min()), marks[0]), max(float(ys.max()), marks[-1]))
    places = {px(mark): f"{mark:g}" for mark in ticks(0, wide)}
    levels = {py(mark): f"{mark:g}" for mark in marks}
    draw_axes(drawing, (left, area[1] + TOP, right, bottom), title, below, places, levels)
    if target is not None:
        drawing.line([(left, py(target)), (right, py(target))], opacity=0.55, dashed=True)
        drawing.text(left + 4, py(target) + 13, f"target {target:g}")
    points = lambda x, y: [(px(a), py(b)) for a, b in zip(x, y, strict=True) if np.isfinite(b)]
    for line in lines:
        if line.raw:
            drawing.line(points(*line.raw), line.color, 1, opacity=0.22)
    at = right
    for line in reversed(lines):
        drawing.line(points(line.x, line.y), line.color, 2)
        for x, y in zip(line.x, line.y, strict=True) if len(line.x) <= 40 else ():
            if np.isfinite(y):
                drawing.circle(px(x), py(y), 1.9, line.color, title=f"{line.name} batch {x:g}: {y:.4g}")
        if line.name:
            at -= 7 * len(line.name)
            drawing.line([(at - 22, area[1] + 14), (at - 6, area[1] + 14)], line.color, 3)
            drawing.text(at, area[1] + 18, line.name)
            at -= 34


def smooth(x: NumPyArray, y: NumPyArray) -> tuple[NumPyArray, NumPyArray]:
    """Return moving averages over a twentieth of the batches."""
    if len(x) < 20:
        return x, y
    width = max(2, len(x) // 20)
    mean = np.convolve(y, np.ones(width) / width, mode="valid")
    return _thin(x[width - 1 :], mean)


def _thin(x: NumPyArray, y: NumPyArray) -> tuple[NumPyArray, NumPyArray]:
    keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), POINTS)).astype(int))
    return x[keep], y[keep]


def show_curves(runs: Runs, metric: str = "loss") -> None:
    """Print curves of one metric of several runs.

    Args:
        runs: Results of `fit`, by name.
        metric: The name of the metric. Default the loss.
    """
    if lines := lines_of(runs, metric):
        Console(highlight=False).print(draw_text(lines, metric))


def draw_text(lines: list[Line], title: str, width: int = 64, height: int = 10) -> Text:
    """Draw curves with Braille dots, two across and four down in a character.

    >>> print(draw_text([Line("a", 0, np.arange(3), np.arange(3.0))], "loss", width=4, height=2))
    loss  ── a
        2 ┤⠀⠀⡠⠊
        0 ┤⡠⠊⠀⠀
          └────
          0  2
    """
    xs = np.concatenate([line.x for line in lines])
    ys = np.concatenate([line.y for line in lines])
    low, high, wide = float(np.nanmin(ys)), float(np.nanmax(ys)), max(float(xs.max()), 1)
    dots = np.zeros((height, 4, width, 2), int)
    owner = np.full((height, width), -1)
    rows = np.arange(4 * height)[:, None]
    for line in lines:
        y = np.interp(np.linspace(0, wide, 2 * width), line.x, line.y, left=np.nan)
        row = np.round((4 * height - 1) * (1 - (y - low) / ((high - low) or 1)))
        before = np.append(np.nan, row[:-1])
        before = np.where(np.isfinite(before), before, row)
        # a steep curve has no gaps: a column goes from its row to the row next to that of the column before
        drawn = (rows >= np.minimum(row, before + 1)) & (rows <= np.maximum(row, before - 1))
        drawn = drawn.reshape(dots.shape)
        dots |= drawn
        owner[drawn.any((1, 3))] = line.number
    bits = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
    cells = np.einsum("hiwj,ij->hw", dots, bits)
    text = Text(title, style="bold")
    for line in lines:
        text.append("  ──", style=_terminal_color(line.number))
        text.append(f" {line.name}", style="not bold")
    for r in range(height):
        label = f"{high:.3g}" if r == 0 else f"{low:.3g}" if r == height - 1 else ""
        text.append(f"\n{label:>5} ┤", style="not bold dim")
        for c in range(width):
            style = _terminal_color(owner[r, c]) if owner[r, c] >= 0 else ""
            text.append(chr(0x2800 + int(cells[r, c])), style=f"not bold {style}".strip())
    text.append(f"\n      └{'─' * width}", style="not bold dim")
    text.append(f"\n      {'0':<{width // 2}}{f'{wide:g}':>{width - width // 2}}", style="not bold dim")
    return text


def _terminal_color(number: int) -> str:
    return TERMINAL_COLORS[number % len(TERMINAL_COLORS)]
