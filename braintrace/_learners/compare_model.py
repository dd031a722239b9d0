"""Compare learning rules on a model: `compare` of modules, and the same of functional learners."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import brainstate
import jax
import jax.numpy as jnp

from .._executor.memory import device_memory
from .._online.request import check_chunk_size, split_loss
from .._online.sequence import NeverCalledError, Sequence
from .._report.plan import bytes_of
from .._train.batches import size_of
from .._train.compare_rules import Problem, Train, compare_rules
from .._train.comparison import Comparison
from .._train.engine import sequence_of, with_aux
from .._types import ArrayLike, Function, Option, PyTree, RuleLike
from .learner import Learner
from .online import learner_of
from .rule_choice import RuleChoice, Rules, add_d_rtrl, read_rules

Functional = tuple[Learner, PyTree, PyTree]  # with its parameters and carry
RTRL_BYTES = 1 << 25  # the largest traces of RTRL for which it is tried by default


def compare(
    model: brainstate.nn.Module,
    xs: PyTree,
    ys: PyTree,
    step_fn: Function,
    rules: Rules | None = None,
    *,
    train: Train = None,
    mask: ArrayLike | None = None,
    chunk_size: int | None = None,
    batched: bool = True,
    seed: int = 0,
    memory_budget: int | None = None,
    progress: bool = True,
    **options: Option,
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
        **options: `window`, `rank`, `basis` and `across` add `D_RTRL` with these options.

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
    return _compare(problem, rules, train, memory_budget, progress, **options)


def _with_loss(model: brainstate.nn.Module, step_fn: Function, sequence: Sequence) -> Functional:
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

    def called(*args: PyTree, **kwargs: PyTree) -> PyTree:
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
    functional: Functional,
    loss: Function,
    sequences: tuple[PyTree, ...],
    *,
    rules: Rules | None = None,
    train: Train = None,
    mask: ArrayLike | None = None,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    progress: bool = True,
    **options: Option,
) -> Comparison:
    """Compare rules by the gradients of `learner.grad(loss, params, carry, traces, *sequences)`."""
    check_chunk_size(chunk_size)
    if not callable(loss):
        raise TypeError(f"`loss(y, *slices)` is a function that returns the loss of a step, not {loss!r}.")
    sequence = Sequence.check(sequences, mask)
    arguments = lambda xs, ys: (xs,) if ys is None else (xs, ys)
    learner, params, carry = functional
    problem = Problem(learner, loss, params, carry, sequence, chunk_size, arguments)
    return _compare(problem, rules, train, memory_budget, progress, **options)


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
    problem: Problem, rules: Rules | None, train: Train, most: int | None, bar: bool, **options: Option
) -> Comparison:
    """Compare these rules or, if None, rules from cheap to exact; BPTT comes first."""
    budget = device_memory() if most is None else most
    choices = default_rules(problem, min(budget, RTRL_BYTES)) if rules is None else read_rules(rules)
    choices = add_d_rtrl(choices, options)
    first = next((c for c in choices if c.is_bptt), RuleChoice.of("bptt"))
    ordered = [first, *(c for c in choices if c is not first)]
    return compare_rules(problem, ordered, train, budget, bar)


def default_rules(problem: Problem, most: int) -> list[RuleChoice]:
    """Rules from cheap to exact; RTRL only if its traces take at most this many bytes."""
    length = problem.sequence.length
    windows = [k for k in (1, 5, 10) if k < length]  # one window over the sequence would be BPTT
    given: list[RuleLike] = ["es_d_rtrl", "d_rtrl", *(("d_rtrl", {"window": k}) for k in windows)]
    given.append(("d_rtrl", {"window": 5, "rank": 4} if length > 5 else {"rank": 4}))
    try:
        if bytes_of(RuleChoice.of("rtrl").on(problem.learner).trace_shapes.values()) <= most:
            given.append("rtrl")
    except Exception:  # a rule that cannot be used is not tried unless asked for
        pass
    return list(map(RuleChoice.of, given))
