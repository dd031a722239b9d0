"""The functional learner of a `brainstate` module, to compare rules on it and to plan its training.

`compare` and `plan` read the states of the module into pytrees, and leave the module as it is.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import brainstate
import jax
import jax.numpy as jnp

from .._frontends.modules import Mark, read_module, read_states
from .._online.request import WindowSize, check_chunk_size, split_loss
from .._online.sequence import NeverCalledError, Sequence
from .._report.plan import Layout, Plan
from .._rules.d_rtrl import D_RTRL
from .._train.batches import size_of
from .._train.compare_rules import Problem, Train, compare_rules
from .._train.comparison import Comparison
from .._train.engine import sequence_of, with_aux
from .._types import ArrayLike, Function, Mesh, Model, Option, Options, PyTree, RuleLike
from . import pickling
from .compiled_step import CompiledStep
from .learner import Learner
from .online import make_learner
from .rule_choice import PLANNED, Rules, rules_to_compare
from .stateful import ETraceAlgorithm

Functional = tuple[Learner, PyTree, PyTree]  # with its parameters and carry


def learner_of(
    model: Model,
    args: Iterable[PyTree],
    rule: RuleLike = None,
    *,
    kwargs: Options | None = None,
    mark: Mark = "ops",
    window: WindowSize | None = None,
    function: Callable[..., PyTree] | None = None,
) -> Functional:
    """A `Learner` of a `brainstate` module, with its parameters and carry: dictionaries of values by path.

    `args` are the arguments of one step; the learner's `x` is the only one, or a tuple of several. Called in
    place of the model, `function` may add a loss to it. States are read, and none is changed.
    """
    step = read_module(model, tuple(args), kwargs, function)
    params, carry = read_states(step)
    return make_learner(step, carry, rule, mark, window), params, carry


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
        **options: `window`, `rank`, `basis` and `across` add `D_RTRL` with these options. `memory_budget` is
            the bytes of traces above which a rule is not tried, by default the device's memory.
            `progress=False` shows no progress bar.

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
    return compare_rules(problem, partial(rules_to_compare, rules), train, **options)


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


def plan(
    model: Model,
    x0: PyTree,
    batch_size: int | None = None,
    length: int = 100,
    *,
    rules: Rules = PLANNED,
    chunk_sizes: Iterable[int] | None = None,
    memory_budget: int | None = None,
    mesh: Mesh | None = None,
    **options: Option,
) -> Plan:
    """Estimate the memory and operations of each rule on a sequence; the model is not changed.

    Args:
        model: A module of brainstate.
        x0: The input of one step, or a tuple of several; each an array or a `jax.ShapeDtypeStruct`.
        batch_size: Take the states as `init_all_states(model, batch_size=batch_size)` would make them.
            Default the states as they are.
        length: The number of steps of the sequence. Default 100.
        rules: Rules, as `braintrace.compare` takes them. Default D_RTRL, ES_D_RTRL, RTRL and BPTT.
        chunk_sizes: Steps per backward pass. Default 1, about the square root of the length, and all steps.
        memory_budget: The bytes that the recommendation may use on each device. Default the memory of the
            device, or half of the machine's, which the devices of a CPU share.
        mesh: A mesh of devices; all bytes are then those of one of them. The first axis of states and of `x0`
            is sharded over the first axis of the mesh; the last axis of states and parameters over 'model',
            or else the second axis. Parameters that are on a mesh stay as they are.
        **options: `window`, `rank`, `basis` and `across` add a row for D_RTRL with these options.

    Returns:
        A `Plan`: a row for each rule and chunk size, and a recommendation.

    >>> import braintrace, jax, jax.numpy as jnp
    >>> x0 = jax.ShapeDtypeStruct((16, 3), jnp.float32)
    >>> cell = braintrace.nn.GRUCell(3, 8)
    >>> costs = plan(cell, x0, batch_size=16, length=20, rules=["D_RTRL"], chunk_sizes=[20])
    >>> costs.row("D_RTRL").trace_bytes  # two products of 11 inputs and a bias, for each sample and unit
    12288
    """
    if isinstance(model, ETraceAlgorithm):
        raise TypeError("`plan` takes the model, not a learner of it: `plan(learner.model, ...)`.")
    is_struct = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    struct = lambda a: a if is_struct(a) else jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a))
    args = jax.tree.map(struct, x0 if isinstance(x0, tuple) else (x0,))
    twin = _abstract_copy(model, batch_size)
    if mesh is not None:  # parameters that are on it keep the sharding that they have
        states, of_param = twin.states(), Layout.of(mesh).of_param
        for path, state in model.states(brainstate.ParamState).items():
            states[path].value = jax.tree.map(of_param, state.value)
    function = read_module(twin, args)
    learner = Learner(CompiledStep(function, D_RTRL(), "ops", None), function.carry.like)
    with warnings.catch_warnings(action="ignore"):
        _ = learner.graph
    given = {"rules": rules, "chunk_sizes": chunk_sizes, "memory_budget": memory_budget, **options}
    return replace(learner.plan(length, mesh=mesh, **given), batch_size=batch_size)


def _abstract_copy(model: Model, batch_size: int | None) -> Model:
    """Copy a model, with shapes in place of values."""
    memo: dict[int, object] = {}
    for state in model.states().values():
        memo[id(state)] = pickling.copy_state(state)
        memo.update({id(leaf): leaf for leaf in jax.tree.leaves(state.value)})
    twin = copy.deepcopy(model, memo)
    key = brainstate.random.DEFAULT.value

    def init() -> PyTree:
        if batch_size is not None:
            brainstate.nn.init_all_states(twin, batch_size=batch_size)
        return {path: state.value for path, state in twin.states().items()}

    try:
        shapes = jax.eval_shape(init)
    finally:
        brainstate.random.DEFAULT.value = key
    for path, state in twin.states().items():
        state.value = shapes[path]
    return twin
