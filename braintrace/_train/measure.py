"""Rules side by side on one's own model and data: how good their gradients are, and what they cost.

Each rule starts from the same states and random keys, and takes the gradient of the same losses over the same
sequences; the exact one is that of BPTT. A program is compiled once, which is timed apart, and then run a
few times. What a rule cannot do becomes a row that says so.
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
from .._diagnostics.verdict import Exactness
from .._executor.executor import is_inexact
from .._executor.memory import device_memory
from .._learners.gradient_check import trace_afresh
from .._learners.learner import Learner
from .._learners.model_calls import called_with
from .._learners.online import learner_of
from .._lines import raising_line
from .._online.request import check_chunk_size
from .._online.sequence import Sequence
from .._report.check import Gradients, compare_gradients, flatten, round_off, zeros
from .._report.plan import bytes_of
from .._report.tables import show_bytes
from .._rules import BPTT
from .candidates import YARDSTICK, Candidate, ladder, read_rules
from .comparison import Agreement, Compared, Comparison
from .data import Batches, read, size_of
from .engine import with_aux
from .errors import DivergedError
from .progress import Stages
from .training import fit

RUNS, SECONDS = 5, 1.0  # of each program: so many runs, unless they take so long
RTRL_BYTES = 1 << 25  # more than that is not tried unless asked for
LEARNING_RATE, CLIP = 5e-3, 1.0


@dataclass(frozen=True)
class Training:
    """How the learning curves are made."""

    updates: int
    optimizer: Any
    batches: Batches | None = None  # None: the data themselves, again and again


@dataclass(frozen=True)
class Case:
    """A rule on a model: what is compiled and run."""

    program: Callable[..., Any]
    given: tuple[Any, ...]  # the arguments of the program
    gradients: Callable[[Any], Gradients]  # of what it returns: the gradient of each parameter
    traces: Any
    exactness: Exactness
    train: Callable[[Training], tuple[list[float], bool]]  # losses, and whether it diverged
    weights: Any


def compare(
    model: brainstate.nn.Module,
    xs: Any,
    ys: Any,
    step_fn: Callable[..., Any],
    rules: Any = None,
    *,
    train: Any = None,
    mask: Any = None,
    chunk_size: int | None = None,
    batched: bool = True,
    seed: int = 0,
    memory_budget: int | None = None,
    progress: bool = True,
) -> Comparison:
    """Compare learning rules on a model and data; the model is left as it is.

    `xs` and `ys` have time first, then (unless `batched=False`) the batch. `step_fn(learner, x, y)` calls the
    learner once and returns the loss of the step, or a pair of it and anything else; without `ys` (None) it
    is `step_fn(learner, x)`. `rules` are names ('d_rtrl'), classes, values of `braintrace.rules`, pairs of
    one of these and options (`('d_rtrl', {'window': 5})`), or a dictionary of them by label; by default from
    cheap to exact, with `RTRL` where it is small. `train` is a number of updates, or a dictionary:
    `updates`, `optimizer` (of optax, or a name), `learning_rate`, and `batches` as `fit` takes them (the data
    themselves by default).

    Time and memory are those of `etrace_grad` over the sequence, which takes as many steps at once as memory
    allows; `chunk_size` says how many, of rules without windows. A rule whose traces take more than
    `memory_budget` bytes is not tried.

    >>> import braintrace, jax.numpy as jnp
    >>> loss = lambda net, x, y: jnp.mean((net(x) - y) ** 2)
    >>> xs, ys = jnp.ones((6, 2, 3)), jnp.zeros((6, 2, 4))
    >>> found = compare(braintrace.nn.GRUCell(3, 4), xs, ys, loss, ["d_rtrl", "rtrl"], progress=False)
    >>> [row.rule for row in found.rows], found.row("RTRL").exact
    (['BPTT', 'D_RTRL', 'RTRL'], True)
    """
    check_chunk_size(chunk_size)
    sequence = Sequence.check((xs,) if ys is None else (xs, ys), mask)
    if not callable(step_fn):
        raise TypeError(
            "`step_fn(learner, x, y)` is a function that calls the learner and returns the loss of a step, "
            f"not {step_fn!r}."
        )
    try:
        inspect.signature(step_fn).bind(model, *sequence.arrays)
    except TypeError as error:
        raise TypeError(
            f"`step_fn` is called as step_fn(learner, {'x' if ys is None else 'x, y'}): each rule has a "
            f"learner of its own ({error})."
        ) from error
    subject = OfModel(model, step_fn, sequence, chunk_size, batched, seed)
    return run(subject, rules, train, memory_budget, progress)


def compare_functions(
    net: Learner,
    loss: Callable[..., Any],
    params: Any,
    carry: Any,
    *sequences: Any,
    rules: Any = None,
    train: Any = None,
    mask: Any = None,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    progress: bool = True,
) -> Comparison:
    """Compare rules by the gradients of `net.grad(loss, params, carry, traces, *sequences)`."""
    check_chunk_size(chunk_size)
    if not callable(loss):
        raise TypeError(f"`loss(y, *slices)` is a function that returns the loss of a step, not {loss!r}.")
    sequence = Sequence.check(sequences, mask)
    subject = OfFunctions(net, loss, params, carry, sequence, chunk_size)
    return run(subject, rules, train, memory_budget, progress)


def run(
    subject: OfModel | OfFunctions, rules: Any, train: Any, memory_budget: int | None, progress: bool
) -> Comparison:
    """Measure rule after rule, BPTT first."""
    budget = device_memory() if memory_budget is None else memory_budget
    training = read_training(train)
    if rules is None:
        small = lambda candidate: _is_small(subject, candidate, min(budget, RTRL_BYTES))
        asked = ladder(subject.sequence.length, small)
    else:
        asked = read_rules(rules)
    first = next((c for c in asked if c.is_bptt), YARDSTICK)
    rows: list[Compared] = []
    truth: Gradients = {}
    with Stages([first, *(c for c in asked if c is not first)], progress) as stages:
        for candidate in stages:
            try:
                row, found = _measure(subject, candidate, truth, training, budget)
            except Exception as error:
                if not rows:
                    raise
                row = Compared(candidate.label, why=_first_line(error))
            else:
                truth = truth or found
            rows.append(row)
    device = jax.devices()[0].device_kind
    return Comparison(
        subject.sequence.length, device, rows, training.updates if training else None, zeros(truth)
    )


def _measure(
    subject: OfModel | OfFunctions,
    candidate: Candidate,
    truth: Gradients,
    training: Training | None,
    budget: int,
) -> tuple[Compared, Gradients]:
    needed = subject.trace_bytes(candidate)
    if needed > budget:
        raise MemoryError(f"its traces take {show_bytes(needed)}, more than {show_bytes(budget)}")
    began = time.perf_counter()
    with subject.opened(candidate) as case:
        program: Any = jax.jit(case.program).lower(*case.given).compile()
        compiled = time.perf_counter()
        grads = jax.block_until_ready(program(*case.given))
        seconds = _best_time(lambda: program(*case.given))
        found = case.gradients(grads)
        if not all(np.isfinite(flatten(g)).all() for g in found.values()):
            raise FloatingPointError("its gradient is not finite")
        tolerance = round_off([case.weights, case.traces])
        check = compare_gradients(
            found, {**found, **truth}, case.exactness, subject.sequence.length, tolerance
        )
        losses, diverged = case.train(training) if training else (None, False)
    row = Compared(
        candidate.label,
        is_bptt=candidate.is_bptt,
        exact=check.equal,
        gradient=_agreement(check),
        parameters={show_path(p.path): _agreement(p) for p in check.parameters},
        step_seconds=seconds / subject.sequence.length,
        compile_seconds=compiled - began,
        trace_bytes=bytes_of(jax.tree.leaves(case.traces)),
        activation_bytes=int(program.memory_analysis().temp_size_in_bytes),
        losses=losses,
        diverged=diverged,
    )
    return row, found


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


def _is_small(subject: OfModel | OfFunctions, candidate: Candidate, most: int) -> bool:
    try:
        return subject.trace_bytes(candidate) <= most
    except Exception:  # its row would say why; nobody asked for it
        return False


def _first_line(error: Exception) -> str:
    words = str(error).strip().splitlines()
    line = raising_line(error)
    name = "" if not line and words else f"{type(error).__name__}: "
    return f"{name}{words[0] if words else 'it failed'}{f' ({line})' if line else ''}"


# -- a model of brainstate -----------------------------------------------------------------------------


@dataclass(eq=False)
class OfModel:
    """A module, the loss of its steps, and data."""

    model: brainstate.nn.Module
    step_fn: Callable[..., Any]
    sequence: Sequence
    chunk_size: int | None
    batched: bool
    seed: int
    _known: Learner | None = None  # of BPTT: the traces of others are sized by it

    def trace_bytes(self, candidate: Candidate) -> int:
        with self._fresh():
            if self._known is None:
                args, kwargs = self._arguments(YARDSTICK.learner(self.model))
                self._known = learner_of(self.model, args, BPTT(), kwargs=kwargs)[0]
            return bytes_of(self._known.with_rule(*candidate.value()).trace_shapes.values())

    @contextmanager
    def opened(self, candidate: Candidate) -> Iterator[Case]:
        with self._fresh() as kept:
            learner = candidate.learner(self.model)
            args, kwargs = self._arguments(learner)
            learner.compile_graph(*args, **kwargs)
            learner.reset_model(**self._size)
            in_windows = learner.steps_at_once(self.chunk_size) is not None
            chunk_size = None if in_windows or candidate.is_bptt else self.chunk_size

            def gradient(*arrays: Any) -> Any:
                learner.init_etrace_state()
                options = {"mask": self.sequence.mask, "chunk_size": chunk_size, "has_aux": True}
                return learner.etrace_grad(
                    *arrays, step_fn=self._step(learner), keep_traces=False, **options
                )[0]

            pure, values = trace_afresh(gradient, learner, self.sequence)
            kept.extend((st, st.value) for st in pure.states)
            yield Case(
                lambda values, arrays: pure(values, *arrays)[0],
                (values, self.sequence.arrays),
                lambda grads: {tuple(map(str, k)): v for k, v in grads.items()},
                {k: st.value for k, st in learner.traces.items()},
                learner.report.exactness,
                lambda training: self._train(learner, training, chunk_size),
                [st.value for st in learner.param_states.values()],
            )

    def _step(self, learner: Any) -> Callable[..., Any]:
        return lambda *slices: with_aux(self.step_fn(learner, *slices))

    def _arguments(self, learner: Any) -> tuple[Any, Any]:
        return called_with(learner, self._step(learner), jax.tree.map(lambda a: a[0], self.sequence.arrays))

    def _train(self, learner: Any, training: Training, chunk_size: int | None) -> tuple[list[float], bool]:
        step, (xs, *ys) = self._step(learner), self.sequence.arrays
        own = [(xs, ys[0] if ys else None, self.sequence.mask)]
        try:
            result = fit(
                learner,
                own if training.batches is None else training.batches,
                step if ys else (lambda x, _: step(x)),
                training.optimizer,
                epochs=training.updates,
                max_batches=training.updates,
                chunk_size=chunk_size,
                batched=self.batched,
                progress=False,
            )
        except DivergedError as error:
            return [float(v) for v in error.result.curve()[1]], True
        if result.interrupted:
            raise KeyboardInterrupt
        return [float(v) for v in result.curve()[1]], False

    @property
    def _size(self) -> dict[str, int]:
        return {"batch_size": size_of(self.sequence.arrays[0])} if self.batched else {}

    @contextmanager
    def _fresh(self) -> Iterator[list[tuple[brainstate.State, Any]]]:
        """States as they are at the start of a sequence, and random keys, the same each time.

        What is added to the list is restored as well.
        """
        nodes = [(node, dict(vars(node))) for node in (self.model, *self.model.nodes().values())]
        kept = [(st, st.value) for st in self.model.states().values()]
        with brainstate.random.seed_context(self.seed), brainstate.environ.context(fit=True):
            try:
                brainstate.nn.init_all_states(self.model, **self._size)
                yield kept
            finally:
                for state, value in reversed(kept):  # what was first seen is what it was
                    state.value = value
                for node, attributes in nodes:
                    vars(node).clear()
                    vars(node).update(attributes)


# -- pure functions ------------------------------------------------------------------------------------


@dataclass(eq=False)
class OfFunctions:
    """A step function with its parameters and carry, a loss, and data."""

    net: Learner
    loss: Callable[..., Any]
    params: Any
    carry: Any
    sequence: Sequence
    chunk_size: int | None

    def _net(self, candidate: Candidate) -> Learner:
        return self.net.with_rule(*candidate.value())

    def trace_bytes(self, candidate: Candidate) -> int:
        return bytes_of(self._net(candidate).trace_shapes.values())

    @contextmanager
    def opened(self, candidate: Candidate) -> Iterator[Case]:
        net = self._net(candidate)
        trees = net.function.params, net.function.carry
        leaves = [tree.leaves(value) for tree, value in zip(trees, (self.params, self.carry), strict=True)]
        inexact = [i for i, leaf in enumerate(leaves[0]) if is_inexact(leaf)]
        chunk_size = None if candidate.is_bptt else self.chunk_size

        def gradient(params: Any, carry: Any, arrays: Any, mask: Any, key: Any = None) -> tuple[Any, Any]:
            params, carry = trees[0].rebuild(params), trees[1].rebuild(carry)
            grads, _, (losses, _) = net.grad(
                self._loss,
                params,
                carry,
                net.init(params, carry, key=key),
                *arrays,
                mask=mask,
                chunk_size=chunk_size,
                has_aux=True,
            )
            return jax.tree.leaves(grads), losses

        yield Case(
            lambda *given: gradient(*given)[0],
            (*leaves, self.sequence.arrays, self.sequence.mask),
            lambda grads: dict(zip([trees[0].paths[i] for i in inexact], grads, strict=True)),
            net.init(self.params, self.carry),
            net.report.exactness,
            lambda training: self._train(gradient, leaves, inexact, training),
            [leaves[0][i] for i in inexact],
        )

    def _loss(self, y: Any, *slices: Any) -> tuple[Any, Any]:
        return with_aux(self.loss(y, *slices))

    def _train(
        self, gradient: Any, leaves: Any, inexact: list[int], training: Training
    ) -> tuple[list[float], bool]:
        weights = [leaves[0][i] for i in inexact]
        state = training.optimizer.init(weights)

        @jax.jit
        def update(weights: Any, state: Any, arrays: Any, mask: Any, key: Any) -> Any:
            params = list(leaves[0])
            for i, w in zip(inexact, weights, strict=True):
                params[i] = w
            grads, losses = gradient(params, leaves[1], arrays, mask, key)
            moves, state = training.optimizer.update(list(map(jnp.conj, grads)), state, weights)
            weights = [(w + d).astype(w.dtype) for w, d in zip(weights, moves, strict=True)]
            return weights, state, (losses * mask).sum() / mask.sum()

        found: list[float] = []
        for key, (arrays, mask) in enumerate(self._batches(training)):
            weights, state, loss = update(weights, state, arrays, mask, key)
            if not math.isfinite(loss):
                return found, True
            found.append(float(loss))
        return found, False

    def _batches(self, training: Training) -> Iterator[tuple[Any, Any]]:
        if training.batches is None:
            yield from repeat((self.sequence.arrays, self.sequence.mask), training.updates)
            return
        every = (b for epoch in range(training.updates) for b in read(training.batches, epoch))
        for xs, ys, mask in islice(every, training.updates):
            yield (xs, *([] if ys is None else [ys])), jnp.asarray(mask)


# -- training ------------------------------------------------------------------------------------------


def read_training(train: Any) -> Training | None:
    """What `train=` asks for."""
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
    try:
        import optax
    except ImportError as error:
        raise ImportError("Learning curves need optax: pip install 'braintrace[train]'.") from error
    chosen = given.get("optimizer", "adam")
    if isinstance(chosen, str):
        make = getattr(optax, chosen, None)
        if make is None:
            raise ValueError(f"optax has no optimiser {chosen!r}; adam, adamw, sgd, rmsprop are some.")
        rate = given.get("learning_rate", LEARNING_RATE)
        chosen = optax.chain(optax.clip_by_global_norm(CLIP), make(rate))
    elif "learning_rate" in given:
        raise ValueError("Give the learning rate to the optimiser itself, or name the optimiser.")
    batches = given.get("batches")
    if isinstance(batches, Iterator):  # each rule learns from the same
        batches = list(islice(batches, updates))
    return Training(updates, chosen, batches)
