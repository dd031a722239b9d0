"""Learning curves of runs, and pictures of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .._types import PyTree
from .canvas import Drawing, scale, ticks
from .result import COUNTS, FitResult

COLORS = (
    *("#2563eb", "#e4572e", "#0d9488", "#a855f7", "#ca8a04", "#64748b"),
    *("#db2777", "#65a30d", "#0891b2", "#92400e", "#4338ca", "#dc2626"),
)
POINTS = 300  # the most points of a line
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520, 300, 56, 16, 34, 40
Runs = Mapping[str, FitResult]
Area = tuple[float, float, float, float]  # left, top, width and height of a panel


@dataclass(frozen=True)
class Line:
    """One curve: the evaluations of a run or, without evaluations, its batches."""

    name: str
    number: int  # of the run
    x: PyTree
    y: PyTree
    raw: tuple[Any, Any] | None = None  # the batches, drawn behind the curve

    @property
    def color(self) -> str:
        return COLORS[self.number % len(COLORS)]


def names_of(runs: Runs) -> list[str]:
    """Return the metrics of the runs, the loss first."""
    rows = [row for run in runs.values() for row in (run.history[:1] + run.evaluations[:1])]
    return list(dict.fromkeys(k for row in rows for k in row if k not in (*COUNTS, "seconds")))


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
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_curves(runs, names_of(runs), targets or {}).save(path)


def draw_curves(runs: Runs, metrics: Sequence[str], targets: Mapping[str, float]) -> Drawing:
    """Draw a panel for each metric, one below the other."""
    drawing = Drawing(f"{', '.join(metrics)} against batches", WIDTH, HEIGHT * len(metrics))
    for i, metric in enumerate(metrics):
        title, lines = metric.replace("_", " "), lines_of(runs, metric)
        draw_panel(drawing, (0, i * HEIGHT, WIDTH, HEIGHT), lines, title, "batch", targets.get(metric))
    return drawing


def draw_panel(
    drawing: Drawing, area: Area, lines: list[Line], title: str, below: str, target: float | None = None
) -> None:
    """Draw curves with axes, names and the target."""
    x0, top, width, height = area
    left, right, bottom = x0 + LEFT, x0 + width - RIGHT, top + height - BOTTOM
    drawn = [pair for line in lines for pair in ((line.x, line.y), line.raw) if pair is not None]
    wide = max([1.0, *(float(x.max()) for x, _ in drawn)])
    ys = np.concatenate([*(y for _, y in drawn), [] if target is None else [target]])
    ys = ys[np.isfinite(ys)] if np.isfinite(ys).any() else np.zeros(1)
    marks = ticks(float(ys.min()), float(ys.max()))
    px = scale(left, right, 0, wide)
    py = scale(bottom, top + TOP, min(float(ys.min()), marks[0]), max(float(ys.max()), marks[-1]))
    across = lambda y: [(left, py(y)), (right, py(y))]
    drawing.text(left, top + 18, title, size=14, bold=True)
    for mark in marks:
        drawing.line(across(mark), opacity=0.15)
        drawing.text(left - 8, py(mark) + 4, f"{mark:g}", anchor="end")
    for mark in ticks(0, wide):
        drawing.text(px(mark), bottom + 17, f"{mark:g}", anchor="middle")
    drawing.text((left + right) / 2, bottom + 34, below, anchor="middle")
    if target is not None:
        drawing.line(across(target), opacity=0.55, dashed=True)
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
            drawing.line([(at - 22, top + 14), (at - 6, top + 14)], line.color, 3)
            drawing.text(at, top + 18, line.name)
            at -= 34


def smooth(x: PyTree, y: PyTree) -> tuple[PyTree, PyTree]:
    """Return moving averages over a twentieth of the batches."""
    if len(x) < 20:
        return x, y
    width = max(2, len(x) // 20)
    mean = np.convolve(y, np.ones(width) / width, mode="valid")
    return _thin(x[width - 1 :], mean)


def _thin(x: PyTree, y: PyTree) -> tuple[PyTree, PyTree]:
    keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), POINTS)).astype(int))
    return x[keep], y[keep]
