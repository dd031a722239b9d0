"""`fit`: train a learner on batches of sequences, watch it, save it, and go on where it stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from .._learners.base import ETraceAlgorithm
from .batches import Batches
from .checkpoint import Checkpoints
from .engine import Engine, Metric
from .failures import telling_of_lost
from .progress_bar import Watch
from .result import FitResult, Log, Row
from .sharding import Layout
from .training_run import Interrupt, Run, Schedule


def fit(
    learner: ETraceAlgorithm,
    batches: Batches,
    step_fn: Callable[..., Any],
    optimizer: Any,
    *,
    epochs: int | None = None,
    max_batches: int | None = None,
    update_every: int | Literal["sequence"] = "sequence",
    metrics: Mapping[str, Metric] | None = None,
    window: int | None = None,
    rank: int | None = None,
    chunk_size: int | None = None,
    reset: bool = True,
    batched: bool = True,
    eval_batches: Batches | None = None,
    eval_every: int | None = None,
    stop_when: Callable[[Row], bool] | None = None,
    checkpoint_dir: str | Path | None = None,
    checkpoint_every: int = 100,
    keep: int = 3,
    resume: bool = False,
    metrics_file: str | Path | None = None,
    progress: bool = True,
    mesh: Any = None,
) -> FitResult:
    """Train a learner with an optimiser of optax, and return the history of the run.

    `batches` are `(xs, ys)` or `(xs, ys, mask)`, time first, then (unless `batched=False`) the batch: an
    iterable, read once in each of `epochs` (1 by default), or a function of the epoch's number that returns
    one. `max_batches` stops sooner. `step_fn(x, y)` calls the learner once and returns the loss of the step,
    or a pair of the loss and anything else; `metrics` are functions of that, stacked over time, of `ys` and
    of the mask. Without `metrics`, a dictionary of numbers beside the loss is averaged over the steps.

    A mask has a weight for each step, or for each step and sample, shape (time, batch); then `step_fn`
    returns a loss for each sample. Where it is zero, targets need not be finite. Labels per sequence are
    repeated over time, `np.broadcast_to(labels, (time, batch))`, with a mask of the steps that count.

    Weights change after every sequence, every `update_every` steps, or with 1 every step. `reset=False`
    carries states and traces on from batch to batch. With `window`, gradients go back through windows of so
    many steps along all paths, or up to where the weights change, and traces stand for what came before; with
    `rank`, in so many directions beside the diagonal (None: as the learner was made). Of a multi-step learner
    `chunk_size` is the window of a `step_fn` that takes several steps.

    `eval_batches` are evaluated every `eval_every` batches (None: after each epoch) and at the end;
    `stop_when(scores)` of an evaluation, or else of a batch, ends the run. Checkpoints go to
    `checkpoint_dir` every `checkpoint_every` batches, of which the last `keep` stay; with `resume` the run
    goes on from the newest, bit for bit, or on another number of devices. Ctrl-C or SIGTERM ends the run
    after the current batch and saves. A loss or gradient that is not finite raises `DivergedError`.

    With a `mesh` of `jax.make_mesh`, batches are spread over the devices along its first axis, and along an
    axis 'model' the columns of weights that it divides; parameters that lie on the mesh already stay as they
    are. States, traces and the optimiser follow. Where the mesh has devices of several processes, each of
    them calls `fit` and gives its own sequences of a batch, or global arrays; the first one shows and logs.
    `LostProcessError` says that another one is gone.

    >>> import brainstate, braintrace, jax.numpy as jnp, optax
    >>> learner = braintrace.D_RTRL(braintrace.nn.GRUCell(3, 4))
    >>> data = [(jnp.ones((5, 2, 3)), jnp.zeros((5, 2, 4)))] * 20
    >>> loss = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    >>> result = braintrace.fit(learner, data, loss, optax.adam(0.1), progress=False)
    >>> result.history[-1]["loss"] < result.history[0]["loss"]
    True
    """
    _check(learner, optimizer, update_every, epochs, max_batches, eval_every, checkpoint_every)
    if window is not None or rank is not None:
        learner.take_windows(window, rank)
    every = None if update_every == "sequence" else update_every
    layout = None if mesh is None else Layout.of(mesh)
    speaks = layout is None or layout.speaks
    on_mesh = contextlib.nullcontext if layout is None else layout.set
    with on_mesh():
        engine = Engine(
            learner, step_fn, optimizer, every, chunk_size, dict(metrics or {}), reset, batched, layout
        )
    if epochs is None and (max_batches is None or isinstance(batches, Iterator)):
        epochs = 1
    schedule = Schedule(epochs, max_batches, eval_every, checkpoint_every, stop_when)
    checkpoints = Checkpoints(checkpoint_dir, keep) if checkpoint_dir is not None else None
    run = Run(engine, batches, eval_batches, schedule, checkpoints)
    try:
        with on_mesh(), telling_of_lost(layout.processes if layout else 1, checkpoints):
            run.start(resume)
            run.log = Log(metrics_file if speaks else None, run.batch)
            watch = Watch(schedule.total(batches), progress and speaks)
            with watch as run.watch, Interrupt(run.watch.say) as run.interrupt:
                run.go()
    finally:
        run.log.close()
        if checkpoints is not None:
            checkpoints.close()
    return run.result


def _check(learner: Any, optimizer: Any, update_every: Any, *counts: int | None) -> None:
    if not isinstance(learner, ETraceAlgorithm):
        raise TypeError(
            f"`fit` trains a learner, such as `braintrace.D_RTRL(model)` or `braintrace.BPTT(model)`, not "
            f"{type(learner)}."
        )
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(f"`optimizer` is one of optax, such as `optax.adam(1e-3)`, not {optimizer!r}.")
    if update_every != "sequence" and not (isinstance(update_every, int) and update_every >= 1):
        raise ValueError(f"`update_every` is 'sequence' or a number of steps, not {update_every!r}.")
    if any(n is not None and n < 1 for n in counts):
        raise ValueError(
            "`epochs`, `max_batches`, `eval_every` and `checkpoint_every` are at least 1, where given."
        )
