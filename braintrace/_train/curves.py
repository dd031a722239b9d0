"""Learning curves of runs, and files with pictures of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .drawing import Drawing, scale, ticks
from .result import COUNTS, FitResult

COLORS = (
    *("#2563eb", "#e4572e", "#0d9488", "#a855f7", "#ca8a04", "#64748b"),
    *("#db2777", "#65a30d", "#0891b2", "#92400e", "#4338ca", "#dc2626"),
)
POINTS = 300  # of a line, at most
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520, 300, 56, 16, 34, 40
Runs = Mapping[str, FitResult]


@dataclass(frozen=True)
class Line:
    """One curve: of a run's evaluations where it has some, of its batches otherwise."""

    name: str
    number: int  # of the run
    x: Any
    y: Any
    raw: tuple[Any, Any] | None = None  # the batches themselves, behind a smoothed curve

    @property
    def color(self) -> str:
        return COLORS[self.number % len(COLORS)]


def names_of(runs: Runs) -> list[str]:
    """The metrics that the runs have, the loss first."""
    rows = [row for run in runs.values() for row in (run.history[:1] + run.evaluations[:1])]
    return list(dict.fromkeys(k for row in rows for k in row if k not in (*COUNTS, "seconds")))


def lines_of(runs: Runs, metric: str) -> list[Line]:
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
    """Write the curves of runs, one metric below the other; the format is that of the file's name."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_curves(runs, names_of(runs), targets or {}).save(path)


def draw_curves(runs: Runs, metrics: Sequence[str], targets: Mapping[str, float]) -> Drawing:
    """A panel for each metric, one below the other."""
    drawing = Drawing(f"{', '.join(metrics)} against batches", WIDTH, HEIGHT * len(metrics))
    for i, metric in enumerate(metrics):
        _panel(drawing, i * HEIGHT, lines_of(runs, metric), metric.replace("_", " "), targets.get(metric))
    return drawing


def _panel(drawing: Drawing, top: float, lines: list[Line], title: str, target: float | None) -> None:
    """Draw one metric, with its legend and the target."""
    wide = max(1.0, *(float(line.x.max()) for line in lines))
    drawn = [v for line in lines for v in (line.y, line.raw[1] if line.raw else line.y)]
    ys = np.concatenate([*drawn, [] if target is None else [target], np.zeros(0)])
    ys = ys[np.isfinite(ys)] if np.isfinite(ys).any() else np.zeros(1)
    marks = ticks(float(ys.min()), float(ys.max()))
    px = scale(LEFT, WIDTH - RIGHT, 0, wide)
    py = scale(top + HEIGHT - BOTTOM, top + TOP, min(ys.min(), marks[0]), max(ys.max(), marks[-1]))
    across = lambda y: [(LEFT, py(y)), (WIDTH - RIGHT, py(y))]
    drawing.text(LEFT, top + 18, title, size=14, bold=True)
    for mark in marks:
        drawing.line(across(mark), opacity=0.15)
        drawing.text(LEFT - 8, py(mark) + 4, f"{mark:g}", anchor="end")
    for mark in ticks(0, wide):
        drawing.text(px(mark), top + HEIGHT - BOTTOM + 17, f"{mark:g}", anchor="middle")
    drawing.text((LEFT + WIDTH - RIGHT) / 2, top + HEIGHT - 6, "batch", anchor="middle")
    if target is not None:
        drawing.line(across(target), opacity=0.55, dashed=True)
        drawing.text(LEFT + 4, py(target) + 13, f"target {target:g}")
    points = lambda x, y: [(px(a), py(b)) for a, b in zip(x, y, strict=True) if np.isfinite(b)]
    for line in lines:
        if line.raw:
            drawing.line(points(*line.raw), line.color, 1, opacity=0.22)
    at = WIDTH - RIGHT
    for line in reversed(lines):
        drawing.line(points(line.x, line.y), line.color, 2.2)
        if len(line.x) <= 40:
            for x, y in zip(line.x, line.y, strict=True):
                if np.isfinite(y):
                    title = f"{line.name} batch {x:g}: {y:.4g}"
                    drawing.circle(px(x), py(y), 1.9, line.color, title=title)
        if line.name:
            at -= 7 * len(line.name)
            drawing.line([(at - 22, top + 14), (at - 6, top + 14)], line.color, 3)
            drawing.text(at, top + 18, line.name)
            at -= 34


def smooth(x: Any, y: Any) -> tuple[Any, Any]:
    """Means over a twentieth of the batches."""
    if len(x) < 20:
        return x, y
    width = max(2, len(x) // 20)
    mean = np.convolve(y, np.ones(width) / width, mode="valid")
    return _thin(x[width - 1 :], mean)


def _thin(x: Any, y: Any) -> tuple[Any, Any]:
    keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), POINTS)).astype(int))
    return x[keep], y[keep]
