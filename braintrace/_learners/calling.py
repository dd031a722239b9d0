"""One call of a learner: read the states, take a step or a window, write the states.

In evaluations and for BPTT, `calling` makes a learner call its model, or another function, instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Literal

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp

from .._frontends.modules import states_of
from .._online.arguments import MultiStepData, SingleStepData, one_step, time_axes
from .._online.request import WindowSize, check_window
from .._online.sequence import NeverCalledError
from .._rules.rule import Rule, TraceRule, Values
from .._types import Array, Function, Options, PyTree
from .compiled_step import CompiledStep
from .model_states import hidden_of, leaves_of

if TYPE_CHECKING:
    from .stateful import ETraceAlgorithm

VjpMethod = Literal["single-step", "multi-step"]


def read_method(rule: Rule, vjp_method: VjpMethod | None, window: WindowSize | None) -> VjpMethod:
    """Whether a learner with these options takes single steps, or windows."""
    if vjp_method not in ("single-step", "multi-step", None):
        raise ValueError(f"`vjp_method` is 'single-step' or 'multi-step', not {vjp_method!r}.")
    check_window(window)
    uses_windows = window is not None or (not rule.any_window and rule.always_windows)
    if uses_windows and vjp_method == "single-step" and (window or isinstance(rule, TraceRule)):
        raise ValueError(
            f"{'The low-rank correction is' if window is None else f'Windows of {window} steps are'} "
            "back-propagated through: leave `vjp_method` out, or pass 'multi-step'."
        )
    return vjp_method or ("multi-step" if uses_windows else "single-step")


def call(learner: ETraceAlgorithm, args: tuple[PyTree, ...], kwargs: Options) -> PyTree:
    """Advance the model and its traces; see `ETraceAlgorithm.update`."""
    if learner.rule.back_through_time:
        return _call_without_traces(learner, args, kwargs)
    given, args, kwargs = split_call(learner, args, kwargs)
    guards = learner._guards
    with guards.reads.paused():
        guards.before_call(learner, keep=True)
        one = one_step(args, kwargs)
        _use_compiled(learner, *one)
        compiled, consts = learner._cache.with_constants(*one)
        data, stepped = time_axes(args, kwargs)
        hidden = hidden_of(compiled) if learner.traces else {}
        guards.reads.before_call(hidden, is_tracing=learner._is_tracing)
        lengths = {a.shape[0] for a, s in zip(data, stepped, strict=True) if s}
        if len(lengths) > 1:
            raise ValueError(f"The arrays of a window differ in their number of steps: {sorted(lengths)}.")
        if lengths and not compiled.uses_windows:
            raise ValueError(
                "This learner takes one step at a time (`vjp_method='single-step'`): pass the array of one "
                "step. `MultiStepData` is for `vjp_method='multi-step'`."
            )
        leaves = leaves_of(compiled)
        compiled.shard_like(leaves, learner._inputs_of(compiled))
        guards.weights.compare_consts(compiled.rule_step.executor.consts_of_weights(consts))
        guards.weights.compare_masks(learner)
        window = tuple(stepped) if lengths else None
        signal = _signal(learner, given)
        outs, leaves, traces = compiled(leaves, learner._values(), data, signal, consts, window)
        _write(learner, compiled, leaves, traces, *lengths or {1})
        return jax.tree.unflatten(compiled.info.out_tree, outs)


def _use_compiled(learner: ETraceAlgorithm, args: tuple[PyTree, ...], kwargs: Options) -> None:
    """Use the step that was compiled for these arguments and the current states."""
    if learner._cache.select(args, kwargs, fresh=learner._is_fresh()):
        learner.init_etrace_state()


def _call_without_traces(learner: ETraceAlgorithm, args: tuple[PyTree, ...], kwargs: Options) -> PyTree:
    """Advance the model itself, for BPTT; a rematerialised cell stays one."""
    _use_compiled(learner, *one_step(args, kwargs))
    data = jax.tree.leaves((args, kwargs), is_leaf=is_data)
    windows = jax.tree.leaves([a for a in data if isinstance(a, MultiStepData)])
    learner.steps.value = learner.steps.value + (windows[0].shape[0] if windows else 1)
    return call_model(learner.model, *args, **kwargs)


def split_call(
    learner: ETraceAlgorithm, args: tuple[PyTree, ...], kwargs: Options
) -> tuple[Options, tuple[PyTree, ...], Options]:
    """The arguments of a call for the rule's signal, and those for the model."""
    signal = learner.rule.signal
    names = {*signal.takes, *signal.spellings}
    given = signal.named({k: v for k, v in kwargs.items() if k in names})
    compiled_for = max((len(a) for a, _ in learner._cache.examples.values()), default=len(args))
    if signal.comes_last and not given and len(args) == compiled_for + 1:
        args, given[signal.takes[0]] = args[:-1], args[-1]
    return given, args, {k: v for k, v in kwargs.items() if k not in names}


def _signal(learner: ETraceAlgorithm, given: Values) -> Values:
    """The inputs of the rule's signal, of this call or else for all calls."""
    found = {}
    for name in learner.rule.signal.takes:
        value = given.get(name, learner.standing.get(name))
        if value is None:
            raise ValueError(
                f"{type(learner).__name__} takes its signal from the call: `learner(x, {name}=...)`, or set "
                f"`learner.{name}` for all calls."
            )
        found[name] = jax.tree.map(jnp.asarray, value() if callable(value) else u.get_mantissa(value))
    return found


def _write(
    learner: ETraceAlgorithm, compiled: CompiledStep, leaves: list[Array], traces: Values, steps: int
) -> None:
    """Store the new values of the carried states, of the traces and the counter."""
    items = iter(leaves)
    states = states_of(compiled.function).values()
    for entry, state in zip(compiled.info.entries, states, strict=True):
        new = [next(items) for _ in entry.invars]
        if not entry.is_fixed:
            state.value = jax.tree.unflatten(entry.of.tree, new)
    learner._store(traces)
    learner.steps.value = learner.steps.value + steps


@contextmanager
def unchanged_on_error(states: Sequence[brainstate.State]) -> Iterator[None]:
    """If the body fails or is interrupted, give the states the values they had before it."""
    before = [(state, state.value) for state in states]
    try:
        yield
    except BaseException:
        for state, value in before:
            state.value = value
        raise


@contextmanager
def calling(learner: ETraceAlgorithm, function: Function) -> Iterator[None]:
    """Have `learner(...)` call another function."""
    object.__setattr__(learner, "update", function)
    try:
        yield
    finally:
        object.__delattr__(learner, "update")


def calling_model(learner: ETraceAlgorithm) -> AbstractContextManager[None]:
    """Have `learner(...)` call its model, without traces."""

    def update(*args: PyTree, **kwargs: PyTree) -> PyTree:
        _, args, kwargs = split_call(learner, args, kwargs)
        return call_model(learner.model, *args, **kwargs)

    return calling(learner, update)


def called_with(learner: ETraceAlgorithm, step_fn: Function, slices: PyTree) -> tuple[PyTree, PyTree]:
    """The arguments that `step_fn(*slices)` calls the learner with; no state is changed."""
    seen: list[tuple[tuple[PyTree, ...], Options]] = []

    def stop(*args: PyTree, **kwargs: PyTree) -> None:
        seen.append((args, kwargs))
        raise _CalledError

    states = list(learner.states().values())
    seeded, stopped = brainstate.random.seed_context(0), contextlib.suppress(_CalledError)
    with calling(learner, stop), seeded, stopped, unchanged_on_error(states):
        step_fn(*slices)
    if not seen:
        raise NeverCalledError
    args, kwargs = seen[0]
    return args, kwargs


class _CalledError(Exception):
    """The learner was called."""


def call_model(model: brainstate.nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
    """Call a model with the arguments of a learner: those of one step, or of a window of steps."""
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_data)

    def step(*slices: PyTree) -> PyTree:
        now = iter(slices)
        one = [next(now) if isinstance(a, MultiStepData) else a.data if is_data(a) else a for a in leaves]
        args, kwargs = jax.tree.unflatten(tree, one)
        return model(*args, **kwargs)

    windows = [a.data for a in leaves if isinstance(a, MultiStepData)]
    return brainstate.transform.for_loop(step, *windows) if windows else step()


def is_data(arg: object) -> bool:
    """Whether an argument is `SingleStepData` or `MultiStepData`."""
    return isinstance(arg, SingleStepData)
