"""A training run: its position in the data, evaluations and checkpoints, and how it ends."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sized
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from .._lines import warn_user
from .._types import Options, PyTree
from .batches import Batch, Batches, not_finite, read, size_of, steps_of
from .checkpoint import Arrays, Checkpoints, Notes, collect, restore
from .engine import Engine, Scores, sequence_of
from .progress_bar import Watch
from .result import DivergedError, FitResult, Log, Row, lost_process, scores_of, to_columns, to_rows
from .stream import Averages, Stream

if TYPE_CHECKING:
    from .fit import FitOptions


class Run:
    """A run: its position in the data, its results, and the steps taken for each batch."""

    def __init__(self, engine: Engine, batches: Batches | Stream, options: FitOptions) -> None:
        self.engine, self.batches, self.options = engine, batches, options
        self.stream = batches if isinstance(batches, Stream) else None
        self.eval_batches, self.stop_when = options["eval_batches"], options["stop_when"]
        self.epochs, self.max_batches = options["epochs"], options["max_batches"]
        self.max_steps, self.eval_every = options["max_steps"], options["eval_every"]
        if self.stream is None and (self.max_batches is None or isinstance(batches, Iterator)):
            self.epochs = self.epochs or 1
        folder = options["checkpoint_dir"]
        self.checkpoints = None if folder is None else Checkpoints(folder)
        self.epoch = self.index = self.batch = self.step = 0  # index: within the epoch; batch: of all epochs
        self.seconds = 0.0
        self.averages = Averages(self.stream.average, {}, {}) if self.stream else None
        self.result = FitResult()
        self.log = Log(None, 0)
        self.watch = Watch(None, False)
        self.interrupt = threading.Event()
        self._trained: Notes = {}  # epoch and index after the last batch that was learned from, and its size
        self._left: Iterator[Batch] | None = None  # the remaining batches of the epoch

    def go(self) -> FitResult:
        """Train until something ends the run, from the newest checkpoint on if `resume` is set."""
        layout, checkpoints = self.engine.layout, self.checkpoints
        processes = 1 if layout is None else layout.processes
        shows = processes == 1 or jax.process_index() == 0
        try:
            self._start(self.options["resume"])
            self.log = Log(self.options["metrics_file"] if shows else None, self.batch)
            live = self.result if self.stream is not None else None
            watch = Watch(self._total(), shows and self.options["progress"], live)
            with watch as self.watch, interruptible(self.watch.say) as self.interrupt:
                self._train_all()
        except jax.errors.JaxRuntimeError as error:
            if lost := lost_process(error, processes, self.result):
                raise lost from error
            raise
        finally:
            self.log.close()
            if checkpoints is not None:
                checkpoints.close()
        return self.result

    # -- start and resume --------------------------------------------------------------------------

    def _start(self, resume: bool) -> None:
        """Continue from the newest checkpoint, if there is one."""
        if self.checkpoints is None:
            if resume:
                raise ValueError("To resume, give the folder of the checkpoints: `checkpoint_dir=...`.")
            return
        if (latest := self.checkpoints.latest) is None:
            return
        where = self.checkpoints.path(latest)
        if not resume:
            raise FileExistsError(
                f"{where.parent} holds checkpoints of an earlier run. To continue that run pass "
                "`resume=True`; to start a new one choose another `checkpoint_dir` or remove this one."
            )
        latest, arrays, notes = self.checkpoints.load_newest(self._go_to)
        where = self.checkpoints.path(latest)
        history, evaluations = (to_rows(arrays.pop(name, {})) for name in ("history", "evaluations"))
        self.result = FitResult(history, evaluations, checkpoint=where)
        self.result.reached = notes["reached"] and self.stop_when is not None
        restore(self.engine, arrays, where)
        self._warn_of_changes(notes.get("settings", {}), where)

    def _go_to(self, number: int, notes: Notes) -> Arrays:
        """Go to the batch after which a checkpoint was made; return the arrays to be restored."""
        assert self.checkpoints is not None
        where = self.checkpoints.path(number)
        if notes["learner"] != type(self.engine.learner).__name__:
            raise ValueError(
                f"The checkpoint {where} was made with {notes['learner']}, and this learner is "
                f"{type(self.engine.learner).__name__}. Resume with the same rule, or start a new run."
            )
        self.epoch, self.index, self.batch = notes["epoch"], notes["index"], number
        self.seconds = notes["seconds"]
        if self.stream is not None:
            self.step, averages = notes["step"], notes["averages"]
            self.averages = Averages(self.stream.average, averages["totals"], averages["weights"])
        self._left = self._read()
        first = last = next(self._left, None)
        if self.stream is None:
            for _ in range(self.index - 1):
                last = next(self._left, None)
        elif first is not None:
            self._left = itertools.chain([first], self._left)
        else:  # nothing is left to learn, and states have shapes only by a batch
            first = last = next(self.stream.read(0, 1, self.engine.batched), None)
        if first is None or last is None:
            raise ValueError(
                f"The checkpoint {where} was made after batch {self.index} of epoch {self.epoch}, but "
                "`batches` now gives fewer in that epoch."
            )
        first, last = self.engine.place(first), self.engine.place(last)
        if (size := self._size(last)) != notes["batch_size"]:
            warn_user(
                f"The checkpoint {where} was made with batches of {notes['batch_size']} sequences, and "
                f"`batches` now gives {size}. The run continues with these, after as many batches as before; "
                "to reproduce the run without a stop, give batches of the same size."
            )
        self.engine.prepare(first)
        return collect(self.engine)

    def _warn_of_changes(self, before: Options, where: Path) -> None:
        """Warn of settings that differ from those of the checkpoint."""
        was = {name: (before.get(name, now), now) for name, now in self._settings.items()}
        changed = [f"{name} was {old} and is {now}" for name, (old, now) in was.items() if old != now]
        if changed:
            warn_user(
                f"The run continues from {where} with other settings than before: {'; '.join(changed)}. To "
                "reproduce the run without a stop, give the same."
            )

    @cached_property
    def _settings(self) -> Options:
        """The settings that change numbers, as values of JSON."""
        engine, learner = self.engine, self.engine.learner
        found: Options = {"`update_every`": engine.update_every or "sequence", "`reset`": engine.reset}
        if engine.uses_windows:
            found["the window (`chunk_size`)"] = engine.chunk_size
        found["`window`"] = learner.window if learner.vjp_method == "multi-step" else "a single step"
        return found | {f"`{k}`": getattr(learner.rule, k, None) for k in ("rank", "basis", "across")}

    def _size(self, batch: Batch) -> int | None:
        return size_of(batch.xs) if self.engine.batched else None

    # -- batch after batch -------------------------------------------------------------------------

    def _train_all(self) -> None:
        """Train on batch after batch until something ends the run."""
        before = self.batch
        while not self._is_over():
            self._left = self._read() if self._left is None else self._left
            batch = next(self._left, None)
            if batch is not None:
                self._train(batch)
            elif self.stream is not None:
                self._end_stream()
                break
            elif self.index == 0:
                raise ValueError(f"`batches` gave no batch in epoch {self.epoch}.")
            else:
                if self.eval_every is None:
                    self._evaluate()
                self.epoch, self.index, self._left = self.epoch + 1, 0, None
        if not self.result.interrupted:
            self._evaluate()
            if self.batch == before:
                self.watch.say(
                    f"Nothing was left to do: the run has had its {before} batches already. "
                    "Ask for more to continue it."
                )
        self._save()

    def _read(self) -> Iterator[Batch]:
        if self.stream is not None:
            return self.stream.read(self.step, self.max_steps, self.engine.batched)
        return read(self.batches, self.epoch, self.engine.batched)  # type: ignore[arg-type]

    def _end_stream(self) -> None:
        """Raise an error, after a checkpoint, if a stream ended before `max_steps`."""
        most = self.max_steps
        if self.batch and (most is None or self.step >= most):
            return
        self._save()
        before = f", before `max_steps={most}`" if most else ""
        raise ValueError(f"The stream ended after {self.step} steps{before}. {self.result.about_checkpoint}.")

    def _is_over(self) -> bool:
        layout, asked = self.engine.layout, self.interrupt.is_set()
        self.result.interrupted = asked if layout is None else layout.any_asks(asked)
        limits = (self.epoch, self.epochs), (self.batch, self.max_batches), (self.step, self.max_steps)
        done = any(most is not None and now >= most for now, most in limits)
        return done or self.result.interrupted or self.result.reached

    def _total(self) -> int | None:
        """Return the number of batches, if it is known."""
        each = len(self.batches) if isinstance(self.batches, Sized) else None
        known = [self.max_batches, each * self.epochs if each and self.epochs else None]
        if self.stream is not None and self.stream.block and self.max_steps:
            known.append(-(-self.max_steps // self.stream.block))
        return min((n for n in known if n is not None), default=None)

    def _train(self, batch: Batch) -> None:
        began = time.perf_counter()
        batch = self.engine.place(batch)
        self.watch.begins(steps_of(batch.xs), self._size(batch))
        found = self.engine.train(batch)
        passed = time.perf_counter() - began
        if not self.result.history:
            self.result.compile_seconds = passed
        self.seconds += passed
        self.batch, self.index, steps = self.batch + 1, self.index + 1, steps_of(batch.xs)
        self.step += steps
        self._trained = {"epoch": self.epoch, "index": self.index, "batch_size": self._size(batch)}
        losses, bad, weight = (found.pop(k, None) for k in ("losses", "bad", "weight"))
        row = self._row(found)
        self._stop_if_diverged(losses, bad, batch)
        self.result.history.append(row)
        self.log.write("train", row)
        if self.averages is not None:
            self.averages.add(scores_of(row), float(weight), steps)
        self.watch.trained(row, steps, passed)
        if self.eval_every is not None and self.batch % self.eval_every == 0:
            self._evaluate()
        if not self._evaluates and self.stop_when is not None:
            self.result.reached = bool(self.stop_when(row))
        if self.batch % self.options["checkpoint_every"] == 0:
            self._save()

    def _row(self, scores: Scores) -> Row:
        row: Row = {"batch": self.batch, "epoch": self.epoch, **({"step": self.step} if self.stream else {})}
        row |= {"loss": float(scores.pop("loss")), **{k: float(v) for k, v in scores.items()}}
        return {**row, "seconds": self.seconds}

    def _stop_if_diverged(self, losses: PyTree, bad: PyTree, batch: Batch) -> None:
        if bad is None:
            return
        lost = ~np.isfinite(losses)
        steps = np.flatnonzero(bad.any(1) | lost)
        if not len(steps):
            return
        step = int((*np.flatnonzero(lost), *steps)[0])
        names = list(itertools.compress(self.engine.named_parameters(), bad[steps[0]]))
        cause = not_finite(*sequence_of(*batch[:3]).arrays)
        where = self.batch, self.epoch, step
        raise DivergedError(*where, names, float(losses[step]), self.result, cause)

    @property
    def _evaluates(self) -> bool:
        return self.eval_batches is not None or self.stream is not None

    def _evaluate(self) -> None:
        """Evaluate, once per batch: on the evaluation batches, or by the running averages of a stream."""
        done = self.result.evaluations
        if not self._evaluates or (done and done[-1]["batch"] == self.batch) or not self.batch:
            return
        if self.eval_batches is not None:
            scores = self._scores_of(self.eval_batches)
        else:
            scores = self.averages.values if self.averages else {}
        if not scores:
            return
        row = self._row(scores)
        done.append(row)
        self.log.write("eval", row)
        self.watch.evaluated(row)
        if self.stop_when is not None:
            self.result.reached = bool(self.stop_when(row))

    def _scores_of(self, batches: Batches) -> Scores:
        """Return the scores of all batches, weighted by the number of sequences or of steps that count."""
        scores: list[Scores] = []
        sizes: list[float] = []
        for batch in map(self.engine.place, read(batches, 0, self.engine.batched)):
            scores.append(self.engine.evaluate(batch))
            ragged = jnp.ndim(batch.mask) > 1
            sizes.append(float(jnp.sum(batch.mask)) if ragged else self._size(batch) or 1)
        if not scores:
            raise ValueError("`eval_batches` gave no batch; an iterator can be read only once.")
        found: Scores = jax.tree.map(lambda *s: np.average(s, weights=sizes), *scores)
        return found

    def _save(self) -> None:
        """Write a checkpoint, unless this batch has one."""
        if self.checkpoints is None or not self.batch or self.checkpoints.latest == self.batch:
            return
        arrays = collect(self.engine)
        for name in ("history", "evaluations"):
            if rows := getattr(self.result, name):
                arrays[name] = to_columns(rows)
        notes = {
            "learner": type(self.engine.learner).__name__,
            **self._trained,
            "seconds": self.seconds,
            "reached": self.result.reached,
            "settings": self._settings,
        }
        if self.averages is not None:
            averages = {"totals": self.averages.totals, "weights": self.averages.weights}
            notes |= {"step": self.step, "averages": averages}
        self.result.checkpoint = self.checkpoints.save(self.batch, arrays, notes)


@contextlib.contextmanager
def interruptible(say: Callable[[str], None]) -> Iterator[threading.Event]:
    """Turn the first Ctrl-C or SIGTERM into an event, which asks the run to stop after the current batch.

    A cluster sends SIGTERM when time is up; the handler of JAX, in a run of several processes, ignores it.
    """
    asked = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        say("Stopping after this batch; press Ctrl-C again to stop at once.")

    signals = (signal.SIGINT, signal.SIGTERM)
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, ask) for number in signals if in_main_thread}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
