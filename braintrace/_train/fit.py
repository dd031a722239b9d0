"""`fit`: train a learner on batches of sequences or on a stream, with checkpoints; and its options."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, TypeVar, Unpack

from .._online.request import WindowSize
from .._types import Array, Function, Mesh, PyTree
from .batches import Batches
from .engine import Engine
from .result import FitResult, Row
from .sharding import Layout
from .stream import Stream
from .training_run import Run

if TYPE_CHECKING:
    import optax

    from .._learners.stateful import ETraceAlgorithm

F = TypeVar("F", bound=Callable[..., object])
Metric = Callable[[PyTree, PyTree, Array], Array]


class FitOptions(TypedDict, total=False):
    """The options of `fit`, which its docstring describes; without a default in `USUAL` they are None."""

    epochs: int | None
    max_batches: int | None
    max_steps: int | None
    update_every: int | Literal["sequence"] | None
    metrics: Mapping[str, Metric] | None
    window: WindowSize | None
    rank: int | None
    basis: str | None
    across: str | None
    chunk_size: int | None
    reset: bool
    batched: bool
    eval_batches: Batches | None
    eval_every: int | None
    stop_when: Callable[[Row], bool] | None
    checkpoint_dir: str | Path | None
    checkpoint_every: int
    resume: bool
    metrics_file: str | Path | None
    progress: bool
    mesh: Mesh | None


USUAL: FitOptions = {
    "reset": True,
    "batched": True,
    "checkpoint_every": 100,
    "resume": False,
    "progress": True,
}
POSITIVE = ("epochs", "max_batches", "max_steps", "eval_every", "checkpoint_every")


def with_options(function: F) -> F:
    """Show each option and its default in the signature of a function, in place of `**options`."""
    own = inspect.signature(function)
    first = [p for p in own.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=USUAL.get(name), annotation=kind.__forward_arg__)
        for name, kind in FitOptions.__annotations__.items()
    ]
    function.__signature__ = own.replace(parameters=[*first, *options])  # type: ignore[attr-defined]
    return function


@with_options
def fit(
    learner: ETraceAlgorithm,
    batches: Batches | Stream,
    step_fn: Function,
    optimizer: optax.GradientTransformation,
    **options: Unpack[FitOptions],
) -> FitResult:
    """Train a learner with an optimiser of Optax, and return the history of the run.

    Ctrl-C or SIGTERM ends the run after the current batch, with a checkpoint.

    Args:
        learner: A learner, such as `braintrace.D_RTRL(model)`.
        batches: `(xs, ys)`, `(xs, ys, mask)` or `(xs, ys, mask, reset)`, time first, then the batch: an
            iterable of them, or a function of the epoch that returns one; or a `braintrace.Stream`. A mask
            weighs the losses of steps, or of steps and samples. Flags `reset` reset samples before a step.
        step_fn: Calls the learner once on `step_fn(x, y)`, and returns the loss of the step (one for each
            sample with a mask of samples), or a pair of the loss and auxiliary values.
        optimizer: An optimiser of Optax, or `braintrace.obgd`.
        epochs: How often `batches` is read. Default 1.
        max_batches: The largest number of batches, or of blocks of a stream.
        max_steps: The number of time steps of a stream to learn from. By default to its end.
        update_every: 'sequence' (default), or the number of steps between updates (default 1 for streams).
        metrics: Functions `metric(aux, ys, mask)` of auxiliary values, stacked over time. Without them, a
            dictionary of numbers that `step_fn` returns is averaged over the steps.
        window: Back-propagate through windows of this many steps. By default as the learner was made.
        rank: Rank of a correction to the diagonal traces. By default as the learner was made.
        basis: How the basis of that correction is found, 'balanced' or 'pushed'.
        across: 'layers' keeps the influence on the layers above a weight.
        chunk_size: Steps per backward pass, which changes speed and memory only. For learners in the style
            of 0.2.x, made with `vjp_method='multi-step'` and no `window`, it is the window.
        reset: Whether states and traces are reset before each batch. Streams are reset by flags only.
        batched: Whether arrays have a batch axis after time.
        eval_batches: Batches to evaluate on. Streams are evaluated by running averages without them.
        eval_every: Batches between evaluations. By default one after each epoch, and at the end.
        stop_when: Ends the run when it returns True for the scores of an evaluation or else of a batch.
        checkpoint_dir: The folder of checkpoints, of which the last three are kept.
        checkpoint_every: Batches between checkpoints. Default 100.
        resume: Whether to continue from the newest checkpoint, bit for bit, on any number of devices.
        metrics_file: A file to which scores are written as JSON lines.
        progress: Whether to show loss, metrics, speed and memory.
        mesh: A mesh of `jax.make_mesh`. Batches are sharded along its first axis, columns of weights along
            an axis 'model'. Each of several processes passes its own samples, or global arrays.

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
    if not hasattr(type(learner), "compile_graph"):
        raise TypeError(
            f"`fit` trains a learner, such as `braintrace.D_RTRL(model)` or `braintrace.BPTT(model)`, not "
            f"{type(learner)}."
        )
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(f"`optimizer` is one of optax, such as `optax.adam(1e-3)`, not {optimizer!r}.")
    given = complete(options, stream=isinstance(batches, Stream))
    rule = given["window"], given["rank"], given["basis"], given["across"]
    if rule != (None,) * 4:
        learner.take_windows(*rule)
    layout = None if given["mesh"] is None else Layout.of(given["mesh"])
    with contextlib.nullcontext() if layout is None else layout.set():
        return Run(Engine(learner, step_fn, optimizer, given, layout), batches, given).go()


def complete(options: FitOptions, *, stream: bool) -> FitOptions:
    """Return all options, with their defaults for sequences or for a stream, after a check."""
    for name in options.keys() - FitOptions.__annotations__.keys():
        raise TypeError(f"fit() got an unexpected keyword argument {name!r}")
    found: FitOptions = {**dict.fromkeys(FitOptions.__annotations__), **USUAL, **options}  # type: ignore[typeddict-item]
    if found["update_every"] is None:
        found["update_every"] = 1 if stream else "sequence"
    every = found["update_every"]
    if every != "sequence" and not (isinstance(every, int) and every >= 1):
        raise ValueError(f"`update_every` is 'sequence' or a number of steps, not {every!r}.")
    given: Mapping[str, object] = found
    if any(isinstance(n, int) and n < 1 for n in map(given.get, POSITIVE)):
        raise ValueError(f"`{'`, `'.join(POSITIVE[:-1])}` and `{POSITIVE[-1]}` are at least 1.")
    if not stream and found["max_steps"] is not None:
        raise ValueError("`max_steps` is for a `braintrace.Stream`; for sequences pass `max_batches`.")
    if stream and found["epochs"] is not None:
        raise ValueError("A stream has no epochs; pass `max_steps`.")
    if stream and every == "sequence":
        raise ValueError("A stream has no end after which to update; `update_every` is a number of steps.")
    found["reset"] = found["reset"] and not stream
    return found
