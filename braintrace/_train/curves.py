"""Learning curves of runs, and files with pictures of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .result import COUNTS, FitResult

COLORS = (
    *("#2563eb", "#e4572e", "#0d9488", "#a855f7", "#ca8a04", "#64748b"),
    *("#db2777", "#65a30d", "#0891b2", "#92400e", "#4338ca", "#dc2626"),
)
POINTS = 300  # of a line, at most
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
    """Write the curves of runs, side by side; the format is that of the file's name."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    targets = targets or {}
    if path.suffix == ".svg":
        from .svg import draw_svg, stack

        panels = [draw_svg(lines_of(runs, m), m, targets.get(m)) for m in names_of(runs)]
        path.write_text(stack(panels), encoding="utf-8")
        return
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"To write {path.name} install matplotlib (`pip install 'braintrace[plot]'`), or write an .svg."
        ) from error
    names = names_of(runs)
    figure = Figure(figsize=(5.2 * len(names), 3.6), layout="constrained")
    for axes, metric in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for line in lines_of(runs, metric):
            if line.raw:
                axes.plot(*line.raw, color=line.color, alpha=0.25, linewidth=0.8)
            axes.plot(line.x, line.y, color=line.color, label=line.name or None)
        if metric in targets:
            axes.axhline(targets[metric], color="0.5", linestyle="--", linewidth=1, label="target")
        axes.set(xlabel="batch", title=metric)
        axes.spines[["top", "right"]].set_visible(False)
        if any(runs) or metric in targets:
            axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


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
