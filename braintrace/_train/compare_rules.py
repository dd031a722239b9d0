"""Measure the gradients of learning rules and their costs, on a model and data.

Each rule starts from the same parameters, carry and random keys, and takes the gradient of the same losses
over the same sequences; the exact one is that of BPTT. A program is compiled once, which is timed separately,
and then run a few times. A rule that fails becomes a row with the reason.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler.step import show_path
from .._executor.memory import device_memory
from .._executor.pull_back import is_inexact
from .._lines import raising_line
from .._online.sequence import Sequence
from .._report import check as checks
from .._report.check import Gradients, compare_gradients, round_off
from .._report.plan import bytes_of
from .._report.tables import show_bytes
from .._types import Array, Function, Key, Leaves, Option, Options, PyTree
from .batches import Batches, read
from .comparison import Agreement, Compared, Comparison
from .engine import with_aux
from .optimizers import optimizer_by_name
from .progress_bar import Bar

if TYPE_CHECKING:
    import optax

    from .._learners.learner import Learner
    from .._learners.rule_choice import RuleChoice

RUNS, SECONDS = 5, 1.0  # a program runs RUNS times, unless that takes longer than SECONDS
LEARNING_RATE, CLIP = 5e-3, 1.0


Gradient = Callable[..., tuple[Leaves, Leaves, Array]]  # gradients, the carry after, and losses
Train = int | Options | None  # the argument `train` of `compare`


@dataclass(frozen=True)
class Training:
    """How the learning curves are made."""

    updates: int
    optimizer: optax.GradientTransformation
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
    arguments: Callable[[PyTree, PyTree], tuple[PyTree, ...]]  # of `grad`, from those of a batch

    @property
    def leaves(self) -> tuple[list[Array], list[Array]]:
        """The leaves of parameters and carry: arguments of a compiled function."""
        function = self.learner.function
        return function.params.leaves(self.params), function.carry.leaves(self.carry)

    def gradient(self, learner: Learner, chunk_size: int | None) -> Gradient:
        """Return a function from leaves and data to gradients, the carry after, and losses."""
        params_tree, carry_tree = learner.function.params, learner.function.carry
        takes_target = "target" in learner.rule.signal.takes

        def gradient(
            params: Leaves, carry: Leaves, arrays: PyTree, mask: Array, key: Key | int | None = None
        ) -> tuple[Leaves, Leaves, Array]:
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

    def batches(self, training: Training) -> Iterator[tuple[PyTree, Array]]:
        """Yield the arguments of `grad` and the mask of each update."""
        if training.batches is None:
            yield from repeat((self.sequence.arrays, self.sequence.mask), training.updates)
            return
        every = (b for epoch in range(training.updates) for b in read(training.batches, epoch))
        for xs, ys, mask, _ in islice(every, training.updates):
            yield self.arguments(xs, ys), jnp.asarray(mask)


def compare_rules(
    problem: Problem,
    choose: Callable[[Learner, int, int, Options], list[RuleChoice]],
    train: Train,
    *,
    memory_budget: int | None = None,
    progress: bool = True,
    **options: Option,
) -> Comparison:
    """Measure the rules that `choose` returns; the first is BPTT, which gives the exact gradient."""
    training = read_training(train)
    budget = device_memory() if memory_budget is None else memory_budget
    choices = choose(problem.learner, problem.sequence.length, budget, options)
    rows: list[Compared] = []
    truth: Gradients = {}
    with Bar(len(choices), progress, "", stderr=True) as bar:
        for done, choice in enumerate(choices):
            bar.move(done, choice.label, f"{done}/{len(choices)}  {choice.label}")
            try:
                row, found = _measure(problem, choice, truth, training, budget)
            except Exception as error:
                if not rows:
                    raise
                row = Compared(choice.label, why=_first_line(error))
            else:
                truth = truth or found
            rows.append(row)
    device = jax.devices()[0].device_kind
    updates = training.updates if training else None
    return Comparison(problem.sequence.length, device, rows, updates, checks.zeros(truth))


def _measure(
    problem: Problem, choice: RuleChoice, truth: Gradients, training: Training | None, budget: int
) -> tuple[Compared, Gradients]:
    learner = choice.on(problem.learner)
    needed = bytes_of(learner.trace_shapes.values())
    if needed > budget:
        raise MemoryError(f"its traces take {show_bytes(needed)}, more than {show_bytes(budget)}")
    began = time.perf_counter()
    gradient = problem.gradient(learner, None if choice.is_bptt else problem.chunk_size)
    given = (*problem.leaves, problem.sequence.arrays, problem.sequence.mask)
    program: Any = jax.jit(lambda *given: gradient(*given)[0]).lower(*given).compile()
    compiled = time.perf_counter()
    found = learner.function.by_parameter(jax.block_until_ready(program(*given)))
    times: list[float] = []
    while not times or (len(times) < RUNS and sum(times) < SECONDS):
        start = time.perf_counter()
        jax.block_until_ready(program(*given))
        times.append(time.perf_counter() - start)
    if not all(np.isfinite(checks.flatten(g)).all() for g in found.values()):
        raise FloatingPointError("its gradient is not finite")
    tolerance = round_off([found, learner.trace_shapes])
    length, exactness = problem.sequence.length, learner.report.exactness
    check = compare_gradients(found, {**found, **truth}, exactness, length, tolerance)
    losses, diverged = _train(problem, gradient, training) if training else (None, False)
    row = Compared(
        choice.label,
        is_bptt=choice.is_bptt,
        exact=check.equal,
        gradient=_agreement(check),
        parameters={show_path(p.path): _agreement(p) for p in check.parameters},
        step_seconds=min(times) / length,
        compile_seconds=compiled - began,
        trace_bytes=needed,
        activation_bytes=int(program.memory_analysis().temp_size_in_bytes),
        losses=losses,
        diverged=diverged,
    )
    return row, found


def _train(problem: Problem, gradient: Gradient, training: Training) -> tuple[list[float], bool]:
    """Train one rule; return the loss of each update, and whether it diverged."""
    params, start = problem.leaves
    positions = [i for i, leaf in enumerate(params) if is_inexact(leaf)]
    untraced, optimizer = problem.learner.function.untraced, training.optimizer
    weights, carry = [params[i] for i in positions], start
    state = optimizer.init(weights)

    @jax.jit
    def update(
        weights: Leaves, carry: Leaves, state: PyTree, arrays: PyTree, mask: Array, key: int
    ) -> tuple[Leaves, Leaves, PyTree, Array]:
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


def _agreement(check: checks.GradientCheck | checks.ParameterCheck) -> Agreement:
    finite = lambda value: value if math.isfinite(value) else None
    return Agreement(check.cosine, finite(check.norm_ratio), finite(check.relative_error))


def _first_line(error: Exception) -> str:
    words = str(error).strip().splitlines()
    line = raising_line(error)
    name = "" if not line and words else f"{type(error).__name__}: "
    return f"{name}{words[0] if words else 'it failed'}{f' ({line})' if line else ''}"


def read_training(train: Train) -> Training | None:
    """Return the training that the argument `train` of `compare` asks for."""
    if train is None:
        return None
    given: Options = dict(train) if isinstance(train, Mapping) else {"updates": train}
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
