"""What a training run leaves behind: its curves, its final metrics, and a log of them as JSON lines."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, float]
COUNTS = ("batch", "epoch")  # what the other columns are measured against


@dataclass(repr=False)
class FitResult:
    """The history of a run: a row for each batch, and one for each evaluation."""

    history: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)
    interrupted: bool = False
    reached: bool = False  # whether `stop_when` ended it
    checkpoint: Path | None = None  # the newest one
    compile_seconds: float = 0.0  # of the first batch: compiling, mostly

    def __repr__(self) -> str:
        scores = "".join(f", {k} {v:.4g}" for k, v in self.metrics.items())
        return f"<FitResult: {self.batches} batches{scores}{', interrupted' * self.interrupted}>"

    @property
    def batches(self) -> int:
        """How many batches were learned from."""
        return int(self.history[-1]["batch"]) if self.history else 0

    @property
    def metrics(self) -> Row:
        """The last evaluation; without one, the means over the last tenth of the batches (100 at most)."""
        if self.evaluations:
            rows = self.evaluations[-1:]
        else:
            rows = self.history[-max(1, min(100, len(self.history) // 10)) :]
        names = [k for k in (rows[0] if rows else ()) if k not in (*COUNTS, "seconds")]
        return {k: float(np.mean([r[k] for r in rows])) for k in names}

    def curve(self, name: str = "loss", *, evaluation: bool = False) -> tuple[Any, Any]:
        """Batch numbers and the values of one metric, of training or of the evaluations."""
        rows = [r for r in (self.evaluations if evaluation else self.history) if name in r]
        return np.array([r["batch"] for r in rows], int), np.array([r[name] for r in rows])

    def plot(self, path: str | Path) -> None:
        """Write the learning curves as a picture: PNG, PDF and so on with matplotlib, SVG without."""
        from .curves import save_curves

        save_curves({"": self}, path)


def to_columns(rows: list[Row]) -> dict[str, Any]:
    """Rows as one array for each name; what a row lacks is NaN."""
    names = dict.fromkeys(k for row in rows for k in row)
    return {k: np.array([row.get(k, math.nan) for row in rows], np.float64) for k in names}


def to_rows(columns: dict[str, Any]) -> list[Row]:
    """The rows that `to_columns` was given; a NaN is what a row lacks."""
    if not columns:
        return []
    arrays = {k: np.asarray(v) for k, v in columns.items()}
    number = len(next(iter(arrays.values())))
    return [_row({k: float(a[i]) for k, a in arrays.items() if not np.isnan(a[i])}) for i in range(number)]


def _row(values: Row) -> Row:
    return {**{k: int(values[k]) for k in COUNTS}, **{k: v for k, v in values.items() if k not in COUNTS}}


class Log:
    """Rows as JSON lines in a file, each written at once; with no file, nothing is written."""

    def __init__(self, path: str | Path | None, last_batch: int) -> None:
        self._file = None
        if path is None:
            return
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _lines(path) if last_batch and line["batch"] <= last_batch]
        fresh = path.with_name(path.name + ".new")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in kept))
        fresh.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, row: Row) -> None:
        if self._file is not None:
            values = {k: v if math.isfinite(v) else None for k, v in row.items()}
            self._file.write(json.dumps({"kind": kind, **values}) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log; the last may have been cut off."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found
