"""`fit`: train a learner on batches of sequences or on a stream, with checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .._online.request import WindowSize
from .._types import Function, Mesh
from .batches import Batches
from .checkpoint import Checkpoints
from .engine import Engine, Metric
from .result import FitResult, Row
from .sharding import Layout
from .stream import Stream
from .training_run import Run, Schedule

if TYPE_CHECKING:
    import optax

    from .._learners.stateful import ETraceAlgorithm


def fit(
    learner: ETraceAlgorithm,
    batches: Batches | Stream,
    step_fn: Function,
    optimizer: optax.GradientTransformation,
    *,
    epochs: int | None = None,
    max_batches: int | None = None,
    max_steps: int | None = None,
    update_every: int | Literal["sequence"] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    window: WindowSize | None = None,
    rank: int | None = None,
    basis: str | None = None,
    across: str | None = None,
    chunk_size: int | None = None,
    reset: bool = True,
    batched: bool = True,
    eval_batches: Batches | None = None,
    eval_every: int | None = None,
    stop_when: Callable[[Row], bool] | None = None,
    checkpoint_dir: str | Path | None = None,
    checkpoint_every: int = 100,
    resume: bool = False,
    metrics_file: str | Path | None = None,
    progress: bool = True,
    mesh: Mesh | None = None,
) -> FitResult:
    """Train a learner with an optimiser of Optax, and return the history of the run.

    Ctrl-C or SIGTERM ends the run after the current batch, with a checkpoint.

    Args:
        learner: A learner, such as `braintrace.D_RTRL(model)`.
        batches: An iterable of `(xs, ys)`, `(xs, ys, mask)` or `(xs, ys, mask, reset)`, time first, then
            (unless `batched=False`) the batch; or a function of the epoch that returns one; or a
            `braintrace.Stream`. A mask weighs the losses, shape (time,), or (time, batch) if `step_fn`
            returns a loss for each sample; where it is zero, targets need not be finite. Reset flags,
            booleans of shape (time, batch), reset samples before a step.
        step_fn: `step_fn(x, y)` calls the learner once and returns the loss of the step, or a pair of the
            loss and auxiliary values.
        optimizer: An optimiser of Optax, or `braintrace.obgd`.
        epochs: How often `batches` is read. Default 1.
        max_batches: The largest number of batches, or of blocks of a stream.
        max_steps: The number of time steps of a stream to learn from; without it, a stream is read to its
            end or until the run is interrupted.
        update_every: 'sequence' for one update per sequence (default), or the number of steps between
            updates (default 1 for streams).
        metrics: Functions `metric(aux, ys, mask)` of auxiliary values, stacked over time. Without them, a
            dictionary of numbers that `step_fn` returns is averaged over the steps.
        window: Back-propagate through windows of this many steps, with traces for earlier ones, or up to
            the last update. By default as the learner was made.
        rank: Rank of a correction to the diagonal traces. By default as the learner was made.
        basis: How the basis of that correction is found, 'balanced' or 'pushed'.
        across: 'layers' keeps the influence on the layers above a weight.
        chunk_size: Steps per backward pass, which changes speed and memory only. (For learners in the style
            of 0.2.x, made with `vjp_method='multi-step'` and no `window`, it is the window.)
        reset: Whether states and traces are reset before each batch. Streams are reset by flags only.
        batched: Whether arrays have a batch axis after time.
        eval_batches: Batches to evaluate on. Without them, streams are evaluated by running averages of the
            loss and metrics before each update.
        eval_every: Batches between evaluations; by default one after each epoch, and at the end.
        stop_when: A function of the scores of an evaluation, or without evaluations of a batch, that ends the
            run when it returns True.
        checkpoint_dir: The folder of checkpoints, of which the last three are kept.
        checkpoint_every: Batches between checkpoints. Default 100.
        resume: Whether to continue from the newest checkpoint, bit for bit, or on another number of devices.
        metrics_file: A file to which scores are written as JSON lines.
        progress: Whether to show loss, metrics, speed and memory.
        mesh: A mesh of `jax.make_mesh`. Batches are sharded along its first axis, and along an axis 'model'
            the columns of weights that it divides; parameters that are on the mesh already stay as they are.
            If the mesh has devices of several processes, each calls `fit` with its own sequences of a batch,
            or with global arrays; the first one shows and logs.

    Returns:
        The history of scores, a row per batch and per evaluation.

    Raises:
        DivergedError: A loss or gradient is not finite. Parameters are left as they were before.
        LostProcessError: Another process of the run is gone.
        ValueError: A stream ended before `max_steps`, or arrays have wrong shapes.

    Example:
        >>> import brainstate, braintrace, jax.numpy as jnp, optax
        >>> learner = braintrace.D_RTRL(braintrace.nn.GRUCell(3, 4))
        >>> data = [(jnp.ones((5, 2, 3)), jnp.zeros((5, 2, 4)))] * 20
        >>> loss = lambda x, y: jnp.mean((learner(x) - y) ** 2)
        >>> result = braintrace.fit(learner, data, loss, optax.adam(0.1), progress=False)
        >>> result.history[-1]["loss"] < result.history[0]["loss"]
        True
    """
    streams = isinstance(batches, Stream)
    if update_every is None:
        update_every = 1 if streams else "sequence"
    _check(learner, optimizer, update_every, [epochs, max_batches, max_steps, eval_every, checkpoint_every])
    if not streams and max_steps is not None:
        raise ValueError("`max_steps` is for a `braintrace.Stream`; for sequences pass `max_batches`.")
    if streams and epochs is not None:
        raise ValueError("A stream has no epochs; pass `max_steps`.")
    if streams and update_every == "sequence":
        raise ValueError("A stream has no end after which to update; `update_every` is a number of steps.")
    if any(option is not None for option in (window, rank, basis, across)):
        learner.take_windows(window, rank, basis, across)
    layout = None if mesh is None else Layout.of(mesh)
    with contextlib.nullcontext() if layout is None else layout.set():
        engine = Engine(
            learner,
            step_fn,
            optimizer,
            None if update_every == "sequence" else update_every,
            chunk_size,
            dict(metrics or {}),
            reset and not streams,
            batched,
            layout,
        )
        if epochs is None and not streams and (max_batches is None or isinstance(batches, Iterator)):
            epochs = 1
        schedule = Schedule(epochs, max_batches, max_steps, eval_every, checkpoint_every, stop_when)
        checkpoints = Checkpoints(checkpoint_dir) if checkpoint_dir is not None else None
        run = Run(engine, batches, eval_batches, schedule, checkpoints)
        return run.go(resume=resume, metrics_file=metrics_file, progress=progress)


def _check(learner: object, optimizer: object, update_every: int | str, limits: list[int | None]) -> None:
    if not hasattr(type(learner), "compile_graph"):
        raise TypeError(
            f"`fit` trains a learner, such as `braintrace.D_RTRL(model)` or `braintrace.BPTT(model)`, not "
            f"{type(learner)}."
        )
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(f"`optimizer` is one of optax, such as `optax.adam(1e-3)`, not {optimizer!r}.")
    if update_every != "sequence" and not (isinstance(update_every, int) and update_every >= 1):
        raise ValueError(f"`update_every` is 'sequence' or a number of steps, not {update_every!r}.")
    if any(n is not None and n < 1 for n in limits):
        raise ValueError(
            "`epochs`, `max_batches`, `max_steps`, `eval_every` and `checkpoint_every` are at least 1."
        )
