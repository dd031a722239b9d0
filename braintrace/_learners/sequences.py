"""Drive a learner of a `brainstate` model over sequences, by a user's function of one step.

The function is traced with the states that it touches. Their values are read, a pure function runs over the
sequence, and the new values are written. Programs are cached by the jaxpr of the user's step, so that a
second call compiles nothing, even with another function of the same jaxpr.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import brainstate
import jax
import jax.numpy as jnp

from .. import _meshes
from .._compiler.step import show_path
from .._diagnostics.step_warnings import warn_of_paths
from .._executor.pull_back import is_inexact
from .._frontends.pure import Pure, cut, traced_with
from .._online.data import MultiStepData
from .._online.drive import Drive
from .._online.request import Request
from .._online.sequence import NeverCalledError, Sequence, is_traced
from .._online.user_step import UserStep
from .._types import Array, Function, PyTree
from .calling import called_with, is_data
from .model_states import by_path, hidden_of, initial_states, leaves_of, strengthen
from .not_compiled import NotCompiledError
from .progress import unchanged_on_error
from .trace_states import is_unchanged

if TYPE_CHECKING:
    from .stateful import ETraceAlgorithm

K = TypeVar("K", bound=Hashable)
Weights = Mapping[Hashable, brainstate.State]


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A user's step, traced with the states that it touches."""

    pure: Pure
    step: UserStep
    first: dict[int, int]  # of each state, by its identity: its first leaf

    @staticmethod
    def of(learner: ETraceAlgorithm, function: Function, arrays: PyTree) -> TracedStep:
        """Trace `function` on one step of the arrays."""
        slices = jax.tree.map(_meshes.slice_of, arrays)
        strengthen(learner.model)
        pure = traced_with(learner.states().values(), partial(Pure.trace, function), *slices)
        first: dict[int, int] = {}
        names: list[str] = []
        paths = {id(st): p for p, st in learner.states().items()}
        for state, tree in zip(pure.states, pure.trees, strict=True):
            first[id(state)] = len(names)
            path = paths.get(id(state))
            name = show_path(map(str, path)).removeprefix("model.") if path else ""
            names += [name or f"a {type(state).__name__} outside of the model"] * tree.num_leaves
        traces = {k: first[id(st)] for k, st in learner.traces.items() if id(st) in first}
        if learner.traces and not traces:  # nor does it, if it calls another learner
            raise NeverCalledError
        found = by_path(learner.model)
        carried: list[int | None] = []
        for e in learner.graph.module_info.carried:
            at = first.get(id(found.get(e.path, e.state)))
            carried += [None if at is None else at + n for n in range(len(e.invars))]
        return TracedStep(pure, UserStep.read(pure.closed, names, traces, carried), first)

    def leaves_of(self, states: Mapping[K, brainstate.State]) -> dict[K, list[int]]:
        """The leaves of each state, if the step touches it."""
        trees = {id(st): t for st, t in zip(self.pure.states, self.pure.trees, strict=True)}
        return {
            k: [self.first[id(st)] + n for n in range(trees[id(st)].num_leaves)]
            for k, st in states.items()
            if id(st) in self.first
        }

    def assign(self, leaves: list[Array]) -> None:
        self.pure.assign(cut(leaves, self.pure.trees))


@dataclass(frozen=True, eq=False)
class Task:
    """The gradient over a sequence that a learner was asked for."""

    learner: ETraceAlgorithm
    request: Request
    step_fn: Function
    weights: Weights
    keep: bool  # the traces are used afterwards


def check_weights(learner: ETraceAlgorithm, weights: PyTree) -> Weights:
    """The weights whose gradient is asked for, after a check that they are parameters."""
    if not isinstance(weights, Mapping):
        raise TypeError(
            "`weights` is a dictionary of states, such as `model.states(brainstate.ParamState)`, not "
            f"{type(weights).__name__}."
        )
    if not weights:
        raise ValueError("There is no weight to take the gradient of: `weights` is empty.")
    hidden = hidden_of(learner._cache.now).values()
    carried = [k for k, st in weights.items() if any(st is h for h in hidden)]
    if carried:
        raise ValueError(f"`weights` has hidden states, which are not parameters: {carried}.")
    return weights


def trace(learner: ETraceAlgorithm, function: Function, sequence: Sequence) -> TracedStep:
    """A user's step, traced on one step of the sequence."""
    before, learner._is_tracing = learner._is_tracing, True
    try:
        return TracedStep.of(learner, function, sequence.arrays)
    finally:
        learner._is_tracing = before


def run(task: Task, chunk_size: int | None) -> tuple[PyTree, PyTree, PyTree]:
    """The result of `gradient`; if it fails, states and traces are as before, or after the last report."""
    learner = task.learner
    before = learner.steps.value
    # with reports of progress, states are up to date after each part, and stay so
    kept = list(learner.states().values()) if task.request.sequence.progress is None else []
    with unchanged_on_error(kept):
        found = gradient(task, chunk_size)
        if is_unchanged(before, learner.steps.value):
            raise NeverCalledError
        if not task.keep:
            learner.init_etrace_state()
    return found


def gradient(task: Task, chunk_size: int | None) -> tuple[PyTree, PyTree, PyTree]:
    """The summed gradients, and the losses and other outputs of every step."""
    taken = task.learner.steps_at_once(chunk_size)
    if taken is None:
        return _steps(task, task.request.sequence, chunk_size)
    if taken == 1:  # `step_fn` need not call the learner with `MultiStepData`
        slices = jax.tree.map(lambda a: a[0], task.request.sequence.arrays)
        called = jax.tree.leaves(called_with(task.learner, task.step_fn, slices), is_leaf=is_data)
        if not any(isinstance(a, MultiStepData) for a in called):
            return _steps(task, task.request.sequence, 1)
    return _windows(task, taken)


def _windows(task: Task, size: int) -> tuple[PyTree, PyTree, PyTree]:
    """The gradient if `step_fn` takes windows of `size` steps; a shorter one takes the remainder."""
    if task.request.sequence.reset is not None:
        raise ValueError(
            f"With `chunk_size={size}`, this learner, which goes in windows, hands {size} steps at once "
            "to `step_fn`, and `reset` needs a `step_fn` of one step: leave `chunk_size` out; the "
            "learner's own `window` is the number of steps in a window."
        )
    found = []
    try:
        for sequence, length in _in_windows(task.request.sequence, size):
            parts = _steps(task, sequence, None, (length,))
            found.append((parts[0], parts[1:]))
    except NotCompiledError as e:
        raise ValueError(
            f"With `chunk_size={size}`, this learner, which goes in windows, hands {size} steps at once "
            "to `step_fn`, which calls it as with one: leave `chunk_size` out and give the learner its "
            "`window`, or wrap what `step_fn` is given in `MultiStepData` and return as many losses."
        ) from e
    grads = jax.tree.map(lambda *g: sum(g[1:], g[0]), *(g for g, _ in found))
    return grads, *_joined([outs for _, outs in found])


@_meshes.no_types()
def _steps(
    task: Task, sequence: Sequence, chunk_size: int | None, lead: tuple[int, ...] = ()
) -> tuple[PyTree, PyTree, PyTree]:
    learner, weights = task.learner, task.weights

    def function(*slices: PyTree) -> PyTree:
        return task.request.split(task.step_fn(*slices), lead)

    traced = trace(learner, function, sequence)
    at = traced.leaves_of(weights)
    inside = set(map(id, learner.model.states().values()))
    inside |= {id(e.state) for e in learner.graph.module_info.entries}  # used, if not held
    if unused := [k for k, st in weights.items() if id(st) not in {*inside, *traced.first}]:
        raise ValueError(
            f"`weights` has {', '.join(map(str, unused))}, which the model does not hold and `step_fn` "
            "does not use."
        )
    leaves = [leaf for values in traced.pure.values() for leaf in values]
    asked = [i for found in at.values() for i in found]
    wanted = tuple(dict.fromkeys(i for i in asked if is_inexact(leaves[i])))
    reset_leaves, initial = _initial(learner, traced, sequence)
    drive = replace(
        _drive(learner, traced.step, sequence, chunk_size, task.keep, is_window=bool(lead)),
        wanted=wanted,
        reset_leaves=reset_leaves,
        reset_traces=learner._cache.now.reset_traces,
    )
    if not lead:
        outside = [i for k, found in at.items() for i in found if id(weights[k]) not in inside]
        warn_of_paths(drive, asked, outside, learner.model)
    compiled = learner._cache.now
    total, outs, after = compiled.run(drive, leaves, _reporting(traced, sequence), initial)
    traced.assign(after)
    by_leaf = dict(zip(wanted, total, strict=True))
    grads = {}
    for k, st in weights.items():
        values, tree = jax.tree.flatten(st.value)
        pairs = zip(at.get(k, [None] * len(values)), values, strict=True)
        found = [by_leaf[i] if i in by_leaf else jnp.zeros_like(a) for i, a in pairs]
        grads[k] = jax.tree.unflatten(tree, found)
    return grads, *jax.tree.unflatten(jax.tree.structure(traced.pure.shapes), outs)


def evolve(
    learner: ETraceAlgorithm, sequence: Sequence, step: Function, chunk_size: int | None, *, alone: bool
) -> PyTree:
    """The results of all steps; `alone`: a step is a call of the learner and nothing else."""
    taken = learner.steps_at_once(chunk_size)
    if taken is None or taken == 1 or alone:
        return _evolve(learner, sequence, step, chunk_size)
    outs = [_evolve(learner, part, step, None) for part, _ in _in_windows(sequence, taken)]
    return _joined(outs)


@_meshes.no_types()
def _evolve(learner: ETraceAlgorithm, sequence: Sequence, step: Function, chunk_size: int | None) -> PyTree:
    traced = trace(learner, step, sequence)
    leaves = [leaf for values in traced.pure.values() for leaf in values]
    drive = _drive(learner, traced.step, sequence, chunk_size, True)
    outs, after = learner._cache.now.run(drive, leaves, _reporting(traced, sequence), evolve=True)
    traced.assign(after)
    return jax.tree.unflatten(jax.tree.structure(traced.pure.shapes), outs)


def _drive(
    learner: ETraceAlgorithm,
    step: UserStep,
    sequence: Sequence,
    chunk_size: int | None,
    keep: bool,
    *,
    is_window: bool = False,
) -> Drive:
    """The way to drive a step; `is_window`: the step takes a window of steps by itself."""
    compiled, values = learner._cache.now, learner._values()
    if is_window and not compiled.rule.back_through_time:
        return Drive(step, sequence.pace)
    if not compiled.rule.back_through_time:
        compiled.shard_like(leaves_of(compiled), learner._inputs_of(compiled))
    return compiled.drive(
        step,
        sequence,
        chunk_size=chunk_size,
        keep=keep,
        # outside of `jit`, traces that are kept are zero in the first call only: two programs for one
        fresh=learner._is_fresh() and (not keep or is_traced(values)),
        budget=learner.memory_budget,
    )


def _reporting(traced: TracedStep, sequence: Sequence) -> Sequence:
    """The sequence, with states that are up to date whenever progress is reported."""
    report = sequence.progress
    if report is None:
        return sequence

    def progress(done: int, total: int, carry: PyTree) -> None:
        if carry is not None:
            leaves = [leaf for values in traced.pure.values() for leaf in values]
            now = dict(zip(traced.step.moving, carry.moving, strict=True))
            traced.assign([now.get(i, a) for i, a in enumerate(leaves)])
        report(done, total, None)

    return replace(sequence, progress=progress)


def _initial(
    learner: ETraceAlgorithm, traced: TracedStep, sequence: Sequence
) -> tuple[tuple[int, ...], list[Array]]:
    """The leaves that a reset of a sample sets, and their initial values."""
    if sequence.reset is None:
        return (), []
    size = sequence.reset.shape[1]
    start = initial_states(learner, size, learner.graph.module_info.hidden)
    states = by_path(learner.model)
    reset_leaves, values = [], []
    for path, at in traced.leaves_of({p: states[p] for p in start}).items():
        reset_leaves += at
        values += jax.tree.leaves(start[path])
    return tuple(reset_leaves), values


def _in_windows(whole: Sequence, size: int) -> list[tuple[Sequence, int]]:
    """The sequence as windows of `size` steps, and one window of the remaining steps; with their lengths."""
    count, left = divmod(whole.length, size)
    found = []
    for start, number, length in ((0, count, size), (count * size, 1, left)):
        if number * length:
            steps = whole.part(start, start + number * length)
            arrays, mask, _ = jax.tree.map(lambda a, n=number, k=length: a.reshape(n, k, *a.shape[1:]), steps)
            found.append((Sequence(arrays, number, mask, progress=whole.progress), length))
    return found


def _joined(outs: list[PyTree]) -> PyTree:
    """The results of windows, with one time axis."""
    flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]) if a.ndim > 1 else a, outs)
    return jax.tree.map(lambda *a: jnp.concatenate(a), *flat)
