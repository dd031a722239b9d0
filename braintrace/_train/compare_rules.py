"""Compare learning rules on a model and data: how good their gradients are, and what they cost.

Each rule starts from the same parameters, carry and random keys, and takes the gradient of the same losses
over the same sequences; the exact one is that of BPTT. A program is compiled once, which is timed apart, and
then run a few times. A rule that fails becomes a row with the reason.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._compiler.step import show_path
from .._executor.memory import device_memory
from .._executor.pull_back import is_inexact
from .._learners.learner import Learner
from .._learners.learners import D_RTRL, ES_D_RTRL, RTRL
from .._learners.online import learner_of
from .._learners.rule_choice import RuleChoice, read_rules
from .._lines import raising_line
from .._online.request import check_chunk_size, split_loss
from .._online.sequence import NeverCalledError, Sequence
from .._report.check import Gradients, compare_gradients, flatten, round_off, zeros
from .._report.plan import bytes_of
from .._report.tables import show_bytes
from .._types import Array, ArrayLike, Function, PyTree
from .batches import Batches, read, size_of
from .comparison import Agreement, Compared, Comparison
from .engine import sequence_of, with_aux
from .optimizers import optimizer_by_name
from .progress_bar import Stages

RUNS, SECONDS = 5, 1.0  # a program runs RUNS times, unless that takes longer than SECONDS
RTRL_BYTES = 1 << 25  # the largest traces of RTRL for which it is tried by default
LEARNING_RATE, CLIP = 5e-3, 1.0


@dataclass(frozen=True)
class Training:
    """How the learning curves are made."""

    updates: int
    optimizer: Any
    batches: Batches | None = None  # by default the data of the comparison, repeated


@dataclass(frozen=True, eq=False)
class Problem:
    """A step function with its parameters and carry, a loss, and data."""

    learner: Learner
    loss: Function
    params: PyTree
    carry: PyTree
    sequence: Sequence  # its arrays are the arguments of `grad` after the traces
    chunk_size: int | None
    arguments: Callable[[Any, Any], tuple[Any, ...]]  # of `grad`, from the xs and ys of a training batch

    @property
    def leaves(self) -> tuple[list[Any], list[Any]]:
        """The leaves of parameters and carry: arguments of a compiled function."""
        return self.learner.function.params.leaves(self.params), self.learner.function.carry.leaves(
            self.carry
        )

    @property
    def weights(self) -> list[int]:
        """The positions of inexact arrays among the leaves of the parameters."""
        return [i for i, leaf in enumerate(self.leaves[0]) if is_inexact(leaf)]

    def gradient(self, learner: Learner, chunk_size: int | None) -> Callable[..., tuple[Any, Any, Any]]:
        """Return a function from leaves and data to gradients, the carry after, and losses."""
        params_tree, carry_tree = learner.function.params, learner.function.carry
        takes_target = "target" in learner.rule.signal.takes

        def gradient(
            params: PyTree, carry: PyTree, arrays: PyTree, mask: Array, key: Any = None
        ) -> tuple[PyTree, PyTree, PyTree]:
            params, carry = params_tree.rebuild(params), carry_tree.rebuild(carry)
            traces = learner.init(params, carry, key=key)
            signal = {"target": jax.tree.leaves(arrays)[-1]} if takes_target else {}
            grads, (carry, _), (losses, _) = learner.grad(
                lambda y, *slices: (with_aux(self.loss(y, *slices))[0], ()),
                params,
                carry,
                traces,
                *arrays,
                mask=mask,
                chunk_size=chunk_size,
                has_aux=True,
                **signal,
            )
            return jax.tree.leaves(grads), carry_tree.leaves(carry), losses

        return gradient

    def batches(self, training: Training) -> Iterator[tuple[Any, Any]]:
        """Yield the arguments of `grad` and the mask of each update."""
        if training.batches is None:
            yield from repeat((self.sequence.arrays, self.sequence.mask), training.updates)
            return
        every = (b for epoch in range(training.updates) for b in read(training.batches, epoch))
        for xs, ys, mask, _ in islice(every, training.updates):
            yield self.arguments(xs, ys), jnp.asarray(mask)


def compare(
    model: brainstate.nn.Module,
    xs: PyTree,
    ys: PyTree,
    step_fn: Function,
    rules: Any = None,
    *,
    train: Any = None,
    mask: ArrayLike | None = None,
    chunk_size: int | None = None,
    batched: bool = True,
    seed: int = 0,
    memory_budget: int | None = None,
    progress: bool = True,
) -> Comparison:
    """Compare learning rules on a model and data; the model is left as it is.

    Args:
        model: A module of brainstate.
        xs: Inputs, time first, then (unless `batched=False`) the batch.
        ys: Targets of all steps, or None.
        step_fn: `step_fn(net, x, y)` calls `net` once, as it would a learner, and returns the loss of the
            step, or a pair of the loss and auxiliary values; without `ys` it is `step_fn(net, x)`.
        rules: Names ('d_rtrl'), classes, values of `braintrace.rules`, pairs of one of these and options
            (`('d_rtrl', {'window': 5})`), or a dictionary of them by label. By default from cheap to exact,
            with `RTRL` if it is small.
        train: A number of updates to train each rule for, or a dictionary of `updates`, `optimizer` (of
            Optax, or a name), `learning_rate`, and `batches` as `fit` takes them (`xs` and `ys` by default).
        mask: Weights of the losses, shape (time,), or (time, batch) with a loss for each sample.
        chunk_size: Steps per backward pass, which changes speed and memory only; by default as many as
            memory allows.
        batched: Whether arrays have a batch axis after time.
        seed: The seed of initial states and of random numbers of the model.
        memory_budget: Bytes of traces above which a rule is not tried; by default the device's memory.
        progress: Whether to show a progress bar.

    Returns:
        A table of the rules, with a recommendation.

    Example:
        >>> import braintrace, jax.numpy as jnp
        >>> loss = lambda net, x, y: jnp.mean((net(x) - y) ** 2)
        >>> xs, ys = jnp.ones((6, 2, 3)), jnp.zeros((6, 2, 4))
        >>> found = compare(braintrace.nn.GRUCell(3, 4), xs, ys, loss, ["d_rtrl", "rtrl"], progress=False)
        >>> [row.rule for row in found.rows], found.row("RTRL").exact
        (['BPTT', 'D_RTRL', 'RTRL'], True)
    """
    check_chunk_size(chunk_size)
    sequence = Sequence.check((xs,), mask) if ys is None else sequence_of(xs, ys, mask)
    with _initialised(model, {"batch_size": size_of(xs)} if batched else {}, seed):
        learner, params, carry = _with_loss(model, step_fn, sequence)
    arguments = lambda xs, ys: (xs if ys is None else (xs, ys),)
    sequence = Sequence.check(arguments(*sequence.arrays, *[None] * (ys is None)), sequence.mask)
    problem = Problem(learner, lambda loss: loss, params, carry, sequence, chunk_size, arguments)
    return _compare(problem, rules, train, memory_budget, progress)


def _with_loss(
    model: brainstate.nn.Module, step_fn: Function, sequence: Sequence
) -> tuple[Learner, PyTree, PyTree]:
    """A learner whose step is `step_fn`, with the loss as its output; its parameters and carry."""
    if not callable(step_fn):
        raise TypeError(
            "`step_fn(learner, x, y)` is a function that calls the learner and returns the loss of a step, "
            f"not {step_fn!r}."
        )
    try:
        inspect.signature(step_fn).bind(model, *sequence.arrays)
    except TypeError as error:
        names = ", ".join("xy"[: len(sequence.arrays)])
        raise TypeError(f"`step_fn` is called as step_fn(learner, {names}) ({error}).") from error
    calls: list[None] = []
    wrong: list[Exception] = []

    def called(*args: PyTree, **kwargs: Any) -> PyTree:
        calls.append(None)
        return model(*args, **kwargs)

    def loss_of(*slices: PyTree) -> PyTree:
        found = with_aux(step_fn(called, *slices))
        try:
            return split_loss(found, True, samples=sequence.mask.shape[1:])[0]
        except (TypeError, ValueError) as error:  # not an error of the model, as which it would be reported
            wrong.append(error)
            return jnp.zeros(())

    slices = jax.tree.map(lambda a: a[0], sequence.arrays)
    found = learner_of(model, slices, function=loss_of)
    if wrong or not calls:
        raise wrong[0] if wrong else NeverCalledError
    return found


def compare_learner(
    learner: Learner,
    loss: Function,
    params: PyTree,
    carry: PyTree,
    *sequences: PyTree,
    rules: Any = None,
    train: Any = None,
    mask: ArrayLike | None = None,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    progress: bool = True,
) -> Comparison:
    """Compare rules by the gradients of `learner.grad(loss, params, carry, traces, *sequences)`."""
    check_chunk_size(chunk_size)
    if not callable(loss):
        raise TypeError(f"`loss(y, *slices)` is a function that returns the loss of a step, not {loss!r}.")
    sequence = Sequence.check(sequences, mask)
    arguments = lambda xs, ys: (xs,) if ys is None else (xs, ys)
    problem = Problem(learner, loss, params, carry, sequence, chunk_size, arguments)
    return _compare(problem, rules, train, memory_budget, progress)


@contextmanager
def _initialised(model: brainstate.nn.Module, size: dict[str, int], seed: int) -> Iterator[None]:
    """Initialise the states of a model as for training, and restore all of them afterwards."""
    nodes = [(node, dict(vars(node))) for node in (model, *model.nodes().values())]
    before = [(st, st.value) for st in model.states().values()]
    with brainstate.random.seed_context(seed), brainstate.environ.context(fit=True):
        try:
            brainstate.nn.init_all_states(model, **size)
            yield
        finally:
            for state, value in before:
                state.value = value
            for node, attributes in nodes:  # initialisation may replace states by new ones
                vars(node).clear()
                vars(node).update(attributes)


def _compare(
    problem: Problem, rules: Any, train: Any, memory_budget: int | None, progress: bool
) -> Comparison:
    """Measure rule after rule, BPTT first."""
    budget = device_memory() if memory_budget is None else memory_budget
    training = read_training(train)
    if rules is None:
        small = lambda candidate: _is_small(problem, candidate, min(budget, RTRL_BYTES))
        asked = _ladder(problem.sequence.length, small)
    else:
        asked = read_rules(rules)
    first = next((c for c in asked if c.is_bptt), RuleChoice.of("bptt"))
    rows: list[Compared] = []
    truth: Gradients = {}
    with Stages([first, *(c for c in asked if c is not first)], progress) as stages:
        for candidate in stages:
            try:
                row, found = _measure(problem, candidate, truth, training, budget)
            except Exception as error:
                if not rows:
                    raise
                row = Compared(candidate.label, why=_first_line(error))
            else:
                truth = truth or found
            rows.append(row)
    device = jax.devices()[0].device_kind
    return Comparison(
        problem.sequence.length, device, rows, training.updates if training else None, zeros(truth)
    )


def _ladder(length: int, fits: Callable[[RuleChoice], bool]) -> list[RuleChoice]:
    """Return rules from cheap to exact, for sequences of this length."""
    windows = [k for k in (1, 5, 10) if k < length]  # one window over the sequence would be BPTT
    given: list[Any] = [ES_D_RTRL, D_RTRL, *((D_RTRL, {"window": k}) for k in windows)]
    given += [(D_RTRL, {"window": 5, "rank": 4})] if length > 5 else [(D_RTRL, {"rank": 4})]
    whole = RuleChoice.of(RTRL)
    return [*map(RuleChoice.of, given), *([whole] if fits(whole) else [])]


def _measure(
    problem: Problem, candidate: RuleChoice, truth: Gradients, training: Training | None, budget: int
) -> tuple[Compared, Gradients]:
    learner = candidate.on(problem.learner)
    needed = bytes_of(learner.trace_shapes.values())
    if needed > budget:
        raise MemoryError(f"its traces take {show_bytes(needed)}, more than {show_bytes(budget)}")
    began = time.perf_counter()
    gradient = problem.gradient(learner, None if candidate.is_bptt else problem.chunk_size)
    given = (*problem.leaves, problem.sequence.arrays, problem.sequence.mask)
    program: Any = jax.jit(lambda *given: gradient(*given)[0]).lower(*given).compile()
    compiled = time.perf_counter()
    found = learner.function.by_parameter(jax.block_until_ready(program(*given)))
    seconds = _best_time(lambda: program(*given))
    if not all(np.isfinite(flatten(g)).all() for g in found.values()):
        raise FloatingPointError("its gradient is not finite")
    tolerance = round_off([found, learner.trace_shapes])
    length, exactness = problem.sequence.length, learner.report.exactness
    check = compare_gradients(found, {**found, **truth}, exactness, length, tolerance)
    losses, diverged = _train(problem, gradient, training) if training else (None, False)
    row = Compared(
        candidate.label,
        is_bptt=candidate.is_bptt,
        exact=check.equal,
        gradient=_agreement(check),
        parameters={show_path(p.path): _agreement(p) for p in check.parameters},
        step_seconds=seconds / length,
        compile_seconds=compiled - began,
        trace_bytes=needed,
        activation_bytes=int(program.memory_analysis().temp_size_in_bytes),
        losses=losses,
        diverged=diverged,
    )
    return row, found


def _train(problem: Problem, gradient: Any, training: Training) -> tuple[list[float], bool]:
    """Train one rule; return the loss of each update, and whether it diverged."""
    (params, start), positions = problem.leaves, problem.weights
    untraced, optimizer = problem.learner.function.untraced, training.optimizer
    weights, carry = [params[i] for i in positions], start
    state = optimizer.init(weights)

    @jax.jit
    def update(weights: PyTree, carry: PyTree, state: Any, arrays: PyTree, mask: Array, key: Any) -> PyTree:
        now = list(params)
        for i, w in zip(positions, weights, strict=True):
            now[i] = w
        grads, carry, losses = gradient(now, carry, arrays, mask, key)
        moves, state = optimizer.update(list(map(jnp.conj, grads)), state, weights)
        weights = [(w + d).astype(w.dtype) for w, d in zip(weights, moves, strict=True)]
        # random keys and running statistics are carried on from sequence to sequence
        carry = [a if kept else b for a, b, kept in zip(carry, start, untraced, strict=True)]
        counted = jnp.where(mask != 0, losses, jnp.zeros_like(losses)) * mask
        return weights, carry, state, counted.sum() / mask.sum()

    found: list[float] = []
    for key, (arrays, mask) in enumerate(problem.batches(training)):
        weights, carry, state, loss = update(weights, carry, state, arrays, mask, key)
        if not math.isfinite(loss):
            return found, True
        found.append(float(loss))
    return found, False


def _agreement(check: Any) -> Agreement:
    finite = lambda value: value if math.isfinite(value) else None
    return Agreement(check.cosine, finite(check.norm_ratio), finite(check.relative_error))


def _best_time(function: Callable[[], Any]) -> float:
    times: list[float] = []
    while not times or (len(times) < RUNS and sum(times) < SECONDS):
        began = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - began)
    return min(times)


def _is_small(problem: Problem, candidate: RuleChoice, most: int) -> bool:
    try:
        return bytes_of(candidate.on(problem.learner).trace_shapes.values()) <= most
    except Exception:  # a rule that cannot be used is not tried unless asked for
        return False


def _first_line(error: Exception) -> str:
    words = str(error).strip().splitlines()
    line = raising_line(error)
    name = "" if not line and words else f"{type(error).__name__}: "
    return f"{name}{words[0] if words else 'it failed'}{f' ({line})' if line else ''}"


def read_training(train: Any) -> Training | None:
    """Return the training that the argument `train` of `compare` asks for."""
    if train is None:
        return None
    given = dict(train) if isinstance(train, Mapping) else {"updates": train}
    known = ("updates", "optimizer", "learning_rate", "batches")
    odd = [k for k in given if k not in known]
    updates = given.get("updates")
    if odd or isinstance(updates, bool) or not isinstance(updates, int) or updates < 1:
        raise ValueError(
            "`train` is a number of updates, at least 1, or a dictionary of "
            f"{', '.join(map(repr, known))}, not {train!r}."
        )
    chosen = given.get("optimizer", "adam")
    if isinstance(chosen, str):
        chosen = optimizer_by_name(chosen, given.get("learning_rate", LEARNING_RATE), CLIP)
    elif "learning_rate" in given:
        raise ValueError("Give the learning rate to the optimiser itself, or name the optimiser.")
    batches = given.get("batches")
    if isinstance(batches, Iterator):  # each rule learns from the same
        batches = list(islice(batches, updates))
    return Training(updates, chosen, batches)
