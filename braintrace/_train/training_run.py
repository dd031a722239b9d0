"""A training run: where it is, what is due after each batch, and how it ends."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._learners.vjp import ETraceVjpAlgorithm
from .._lines import warn_user
from .batches import Batch, Batches, not_finite, read, size_of, steps_of
from .checkpoint import Checkpoints, collect, restore
from .engine import Engine, sequence_of
from .failures import DivergedError
from .progress_bar import Watch
from .result import FitResult, Log, Row, to_columns, to_rows


@dataclass(frozen=True)
class Schedule:
    """When a run ends, evaluates and saves; None: without end, and after each epoch."""

    epochs: int | None
    max_batches: int | None
    eval_every: int | None
    checkpoint_every: int
    stop_when: Callable[[Row], bool] | None

    def total(self, batches: Batches) -> int | None:
        """How many batches there will be, where that is known."""
        each = len(batches) if isinstance(batches, Sized) else None
        known = [self.max_batches, each * self.epochs if each and self.epochs else None]
        return min((n for n in known if n is not None), default=None)


class Run:
    """Where a run is, and what it does with each batch."""

    def __init__(
        self,
        engine: Engine,
        batches: Batches,
        eval_batches: Batches | None,
        schedule: Schedule,
        checkpoints: Checkpoints | None,
    ) -> None:
        self.engine, self.batches, self.eval_batches = engine, batches, eval_batches
        self.schedule, self.checkpoints = schedule, checkpoints
        self.epoch = self.index = self.batch = 0  # index: within the epoch; batch: of all
        self.seconds = 0.0
        self.result = FitResult()
        self.log = Log(None, 0)
        self.watch = Watch(None, False)
        self.interrupt = Interrupt(print)
        self._trained = (0, 0)  # epoch and index after the last batch that was learned from
        self._trained_size: int | None = None  # the number of its sequences
        self._left: Iterator[Batch] | None = None  # what is left of the epoch

    # -- beginning ---------------------------------------------------------------------------------

    def start(self, resume: bool) -> None:
        """Go to where the newest checkpoint was made, if there is one."""
        if self.checkpoints is None:
            if resume:
                raise ValueError("To resume, say where the checkpoints are: `checkpoint_dir=...`.")
            return
        if (latest := self.checkpoints.latest) is None:
            return
        where = self.checkpoints.path(latest)
        if not resume:
            raise FileExistsError(
                f"{where.parent} holds checkpoints of an earlier run. To continue that run pass "
                "`resume=True`; to start afresh choose another `checkpoint_dir` or remove this one."
            )
        latest, arrays, notes = self.checkpoints.load_newest(self._go_to)
        where = self.checkpoints.path(latest)
        self.result = FitResult(
            to_rows(arrays.pop("history", {})), to_rows(arrays.pop("evaluations", {})), checkpoint=where
        )
        self.result.reached = notes["reached"] and self.schedule.stop_when is not None
        restore(self.engine, arrays, where)
        self._compare(notes.get("settings", {}), where)

    def _go_to(self, number: int, notes: dict[str, Any]) -> dict[str, Any]:
        """Go to the batch after which a checkpoint was made; the arrays that are to have its values."""
        assert self.checkpoints is not None
        where = self.checkpoints.path(number)
        if notes["learner"] != type(self.engine.learner).__name__:
            raise ValueError(
                f"The checkpoint {where} was made with {notes['learner']}, and this learner is "
                f"{type(self.engine.learner).__name__}. Resume with the same rule, or start afresh elsewhere."
            )
        self.epoch, self.index, self.batch = notes["epoch"], notes["index"], number
        self._trained, self.seconds = (self.epoch, self.index), notes["seconds"]
        self._left = read(self.batches, self.epoch)
        first = last = next(self._left, None)
        for _ in range(self.index - 1):
            last = next(self._left, None)
        if first is None or last is None:
            raise ValueError(
                f"The checkpoint {where} was made after batch {self.index} of epoch {self.epoch}, but "
                "`batches` now gives fewer in that epoch."
            )
        first, last = self.engine.place(first), self.engine.place(last)
        if (size := self._size(last)) != notes["batch_size"]:
            warn_user(
                f"The checkpoint {where} was made with batches of {notes['batch_size']} sequences, and "
                f"`batches` now gives {size}. The run goes on with these, after as many batches as before; "
                "for the run that it would have been, give batches of the same size."
            )
        self.engine.prepare(first)
        return collect(self.engine)

    def _compare(self, before: dict[str, Any], where: Path) -> None:
        """Say what is not as it was when the checkpoint was made."""
        now = self._settings
        changed = [
            f"{name} was {before[name]} and is {now[name]}"
            for name in now
            if name in before and before[name] != now[name]
        ]
        if changed:
            warn_user(
                f"The run goes on from {where} with other settings than it was made with: "
                f"{'; '.join(changed)}. For the run that it would have been, give the same."
            )

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The settings that change what is learned, as values of JSON."""
        engine, learner = self.engine, self.engine.learner
        found: dict[str, Any] = {
            "`update_every`": engine.update_every or "sequence",
            "`reset`": engine.reset,
        }
        if engine.in_windows:
            found["the window (`chunk_size`)"] = engine.chunk_size
        if isinstance(learner, ETraceVjpAlgorithm):
            found["`window`"] = learner.window if learner.vjp_method == "multi-step" else "a single step"
            found["`rank`"] = getattr(learner.rule, "rank", 0)
        return found

    def _size(self, batch: Batch) -> int | None:
        return size_of(batch[0]) if self.engine.batched else None

    # -- going on ----------------------------------------------------------------------------------

    def go(self) -> None:
        """Train until something ends the run."""
        before = self.batch
        while not self._is_over():
            self._left = read(self.batches, self.epoch) if self._left is None else self._left
            batch = next(self._left, None)
            if batch is not None:
                self._train(batch)
            elif self.index == 0:
                raise ValueError(f"`batches` gave no batch in epoch {self.epoch}.")
            else:
                if self.schedule.eval_every is None:
                    self._evaluate()
                self.epoch, self.index, self._left = self.epoch + 1, 0, None
        if not self.result.interrupted:
            self._evaluate()
            if self.batch == before:
                self.watch.say(
                    f"Nothing was left to do: the run has had its {before} batches already. "
                    "Ask for more to go on."
                )
        self._save()

    def _is_over(self) -> bool:
        epochs, batches = self.schedule.epochs, self.schedule.max_batches
        layout, asked = self.engine.layout, self.interrupt.asked
        self.result.interrupted = asked if layout is None else layout.any_asks(asked)
        return (
            self.result.interrupted
            or self.result.reached
            or (epochs is not None and self.epoch >= epochs)
            or (batches is not None and self.batch >= batches)
        )

    def _train(self, batch: Batch) -> None:
        began = time.perf_counter()
        batch = self.engine.place(batch)
        self.watch.begins(steps_of(batch[0]), self._size(batch))
        found = self.engine.train(batch)
        passed = time.perf_counter() - began
        if not self.result.history:
            self.result.compile_seconds = passed
        self.seconds += passed
        self.batch, self.index = self.batch + 1, self.index + 1
        self._trained, self._trained_size = (self.epoch, self.index), self._size(batch)
        losses, bad = found.pop("losses"), found.pop("bad")
        row = self._row(found)
        self._stop_if_diverged(losses, bad, batch)
        self.result.history.append(row)
        self.log.write("train", row)
        self.watch.trained(row, steps_of(batch[0]), passed)
        schedule = self.schedule
        if schedule.eval_every is not None and self.batch % schedule.eval_every == 0:
            self._evaluate()
        if self.eval_batches is None and schedule.stop_when is not None:
            self.result.reached = bool(schedule.stop_when(row))
        if self.batch % schedule.checkpoint_every == 0:
            self._save()

    def _row(self, scores: dict[str, Any]) -> Row:
        first = {"batch": self.batch, "epoch": self.epoch, "loss": float(scores.pop("loss"))}
        return {**first, **{k: float(v) for k, v in scores.items()}, "seconds": self.seconds}

    def _stop_if_diverged(self, losses: Any, bad: Any, batch: Batch) -> None:
        steps = np.flatnonzero(bad.any(1) | ~np.isfinite(losses))
        if not len(steps):
            return
        names = np.array(list(self.engine.named_parameters()))
        lost = np.flatnonzero(~np.isfinite(losses))
        step = int(lost[0]) if len(lost) else int(steps[0])
        parameters = [str(n) for n in names[bad[steps[0]]]]
        saved = self.result.checkpoint
        cause = not_finite(*sequence_of(*batch).arrays)
        raise DivergedError(
            self.batch, self.epoch, step, parameters, float(losses[step]), saved, self.result, cause
        )

    def _evaluate(self) -> None:
        """Average over the evaluation batches, unless that was done for this batch."""
        done = self.result.evaluations
        if self.eval_batches is None or (done and done[-1]["batch"] == self.batch) or not self.batch:
            return
        scores: list[Any] = []
        sizes: list[float] = []
        for batch in map(self.engine.place, read(self.eval_batches, 0)):
            scores.append(self.engine.evaluate(batch))
            ragged = jnp.ndim(batch[2]) > 1
            sizes.append(float(jnp.sum(batch[2])) if ragged else self._size(batch) or 1)
        if not scores:
            raise ValueError("`eval_batches` gave no batch; an iterator can be read only once.")
        row = self._row(jax.tree.map(lambda *s: np.average(s, weights=sizes), *scores))
        done.append(row)
        self.log.write("eval", row)
        self.watch.evaluated(row)
        if self.schedule.stop_when is not None:
            self.result.reached = bool(self.schedule.stop_when(row))

    def _save(self) -> None:
        """Write a checkpoint, unless there is one of this batch."""
        if self.checkpoints is None or not self.batch or self.checkpoints.latest == self.batch:
            return
        arrays = collect(self.engine)
        for name in ("history", "evaluations"):
            if rows := getattr(self.result, name):
                arrays[name] = to_columns(rows)
        epoch, index = self._trained
        notes = {
            "learner": type(self.engine.learner).__name__,
            "epoch": epoch,
            "index": index,
            "batch_size": self._trained_size,
            "seconds": self.seconds,
            "reached": self.result.reached,
            "settings": self._settings,
        }
        self.result.checkpoint = self.checkpoints.save(self.batch, arrays, notes)


class Interrupt:
    """Turns the first Ctrl-C or SIGTERM into a wish to stop, so that a batch is never left half done.

    SIGTERM is how a cluster says that time is up. JAX takes it away from a process that is one of several,
    and does nothing by itself.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked = False
        self._say = say
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._ask) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._say("Stopping after this batch; press Ctrl-C again to stop at once.")

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
