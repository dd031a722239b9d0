"""The result of a training run: its history, a log of it as JSON lines, and the errors that end a run."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .._types import ArrayLike, NumPyArray

Row = dict[str, float]
COUNTS = ("batch", "epoch", "step")  # integer columns; `step` for streams only


def scores_of(row: Row) -> Row:
    """Return the loss and the metrics of a row."""
    return {k: v for k, v in row.items() if k not in (*COUNTS, "seconds")}


@dataclass(repr=False)
class FitResult:
    """The history of a run: a row for each batch, and one for each evaluation."""

    history: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)
    interrupted: bool = False
    reached: bool = False  # whether `stop_when` ended it
    checkpoint: Path | None = None  # the newest one
    compile_seconds: float = 0.0  # seconds of the first batch, mostly compilation

    def __repr__(self) -> str:
        scores = "".join(f", {k} {v:.4g}" for k, v in self.metrics.items())
        return f"<FitResult: {self.batches} batches{scores}{', interrupted' * self.interrupted}>"

    @property
    def batches(self) -> int:
        """The number of batches that were learned from."""
        return int(self.history[-1]["batch"]) if self.history else 0

    @property
    def steps_per_second(self) -> float:
        """Time steps of a stream per second of training, without the first block, which compiles."""
        first, *_, last = [*self.history[:1], *self.history[-1:]] or [{}, {}]
        seconds, steps = (last.get(k, 0) - first.get(k, 0) for k in ("seconds", "step"))
        return steps / seconds if seconds else math.nan

    @property
    def metrics(self) -> Row:
        """The last evaluation; without one, the means over the last tenth of the batches (100 at most)."""
        if self.evaluations:
            rows = self.evaluations[-1:]
        else:
            rows = self.history[-max(1, min(100, len(self.history) // 10)) :]
        return {k: float(np.mean([r[k] for r in rows])) for k in scores_of(rows[0] if rows else {})}

    @property
    def about_checkpoint(self) -> str:
        """The newest checkpoint, as a sentence without a full stop."""
        where = self.checkpoint
        return "There is no checkpoint" if where is None else f"The last good checkpoint is {where}"

    def curve(self, name: str = "loss", *, evaluation: bool = False) -> tuple[NumPyArray, NumPyArray]:
        """Return batch numbers and the values of one metric, of training or of the evaluations."""
        rows = [r for r in (self.evaluations if evaluation else self.history) if name in r]
        return np.array([r["batch"] for r in rows], int), np.array([r[name] for r in rows])

    def plot(self, path: str | Path) -> None:
        """Write the learning curves as a picture: PNG, PDF and so on with matplotlib, SVG without."""
        from .curves import save_curves

        save_curves({"": self}, path)


def to_columns(rows: list[Row]) -> dict[str, NumPyArray]:
    """Return rows as one array for each name, with NaN for missing values."""
    names = dict.fromkeys(k for row in rows for k in row)
    return {k: np.array([row.get(k, math.nan) for row in rows], np.float64) for k in names}


def to_rows(columns: dict[str, ArrayLike]) -> list[Row]:
    """Return the rows that were given to `to_columns`; NaN means a missing value."""
    if not columns:
        return []
    arrays = {k: np.asarray(v) for k, v in columns.items()}
    number = len(next(iter(arrays.values())))
    convert = {k: int if k in COUNTS else float for k in arrays}
    return [{k: convert[k](a[i]) for k, a in arrays.items() if not np.isnan(a[i])} for i in range(number)]


class Log:
    """A file of JSON lines, one for each row, flushed at once; without a path nothing is written."""

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


def _lines(path: Path) -> list[Row]:
    """Return the complete lines of a log; the last may be cut off."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


class DivergedError(ArithmeticError):
    """A loss or a gradient is not finite; the parameters are left as they were before it."""

    def __init__(
        self,
        batch: int,
        epoch: int,
        step: int,
        parameters: list[str],
        loss: float,
        result: FitResult,
        cause: str = "",
    ) -> None:
        self.batch, self.epoch, self.step, self.parameters = batch, epoch, step, parameters
        self.loss, self.result, self.checkpoint = loss, result, result.checkpoint
        if parameters:
            shown = ", ".join(f"`{p}`" for p in parameters[:3])
            more = f" and {len(parameters) - 3} more" if len(parameters) > 3 else ""
            what = f"The gradient of {shown}{more} is not finite"
        else:
            what = f"The loss is {loss}"
        advice = "Try a lower learning rate or `optax.chain(optax.clip_by_global_norm(1.0), optimizer)`."
        super().__init__(
            f"{what} at batch {batch} (epoch {epoch}), step {step} of the sequence (loss {loss:g}). "
            f"The parameters are left as they were before that update. {result.about_checkpoint}. "
            f"{cause or advice}"
        )


class LostProcessError(RuntimeError):
    """Another process of the run is gone. Continue with `resume=True` on the remaining devices.

    JAX may end a process that waits for a lost one before this error can be raised.
    """


# messages of gloo, NCCL and JAX's coordination service when a process does not answer
_LOST = re.compile(r"gloo|nccl|heartbeat|connection|coordination service|unavailable|deadline", re.IGNORECASE)


def lost_process(error: Exception, processes: int, result: FitResult) -> LostProcessError | None:
    """Return the error to raise for one of communication; None for any other error."""
    if processes == 1 or not _LOST.search(str(error)):
        return None
    return LostProcessError(
        f"Another of the {processes} processes of this run is gone ({str(error).splitlines()[0]}). "
        f"{result.about_checkpoint}. Start all of them again with `resume=True` (`--resume`), on as many "
        "devices as are left."
    )
