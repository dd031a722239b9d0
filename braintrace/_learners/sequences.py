"""Drive a learner of a `brainstate` model over sequences, by a user's function of one step.

The function is traced with the states that it touches. Their values are read, a pure function runs over the
sequence, and the new values are written. Programs are cached by the jaxpr of the user's step, so that a
second call compiles nothing, even with another function of the same jaxpr.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import brainstate
import jax
import jax.numpy as jnp

from .. import _meshes
from .._compiler.step import show_path
from .._diagnostics.step_warnings import warn_of_paths
from .._executor.pull_back import is_inexact
from .._frontends.modules import by_path
from .._frontends.pure import Pure, cut, traced_with
from .._online.arguments import MultiStepData
from .._online.choose import choose
from .._online.drive import Drive
from .._online.sequence import NeverCalledError, Sequence, is_traced
from .._online.user_step import UserStep
from .._types import Array, Function, PyTree
from .calling import called_with, is_data, unchanged_on_error
from .model_states import hidden_of, initial_states, leaves_of, strengthen
from .step_cache import NotCompiledError
from .trace_states import is_unchanged

if TYPE_CHECKING:
    from .stateful import ETraceAlgorithm

K = TypeVar("K", bound=Hashable)
Report = Callable[[int, int], None]  # steps done, steps in all
Weights = Mapping[Hashable, brainstate.State]


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A user's step, traced with the states that it touches."""

    pure: Pure
    step: UserStep
    at: dict[int, list[int]]  # the indices of each state's leaves, by its identity

    @staticmethod
    def of(learner: ETraceAlgorithm, function: Function, arrays: PyTree) -> TracedStep:
        """Trace `function` on one step of the arrays."""
        slices = jax.tree.map(_meshes.slice_of, arrays)
        strengthen(learner.model)
        pure = traced_with(learner.states().values(), partial(Pure.trace, function), *slices)
        at: dict[int, list[int]] = {}
        names: list[str] = []
        paths = {id(st): p for p, st in learner.states().items()}
        for state, tree in zip(pure.states, pure.trees, strict=True):
            at[id(state)] = list(range(len(names), len(names) + tree.num_leaves))
            path = paths.get(id(state))
            name = show_path(path).removeprefix("model.") if path else ""
            names += [name or f"a {type(state).__name__} outside of the model"] * tree.num_leaves
        traces = {k: at[id(st)][0] for k, st in learner.traces.items() if id(st) in at}
        if learner.traces and not traces:  # nor does it, if it calls another learner
            raise NeverCalledError
        found = by_path(learner.model)
        carried: list[int | None] = []
        for e in learner.graph.module_info.carried:
            carried += at.get(id(found.get(e.path, e.state)), [None] * len(e.invars))
        return TracedStep(pure, UserStep.read(pure.closed, names, traces, carried), at)

    def leaves_of(self, states: Mapping[K, brainstate.State]) -> dict[K, list[int]]:
        """The leaves of each state, if the step touches it."""
        return {k: self.at[id(st)] for k, st in states.items() if id(st) in self.at}

    def assign(self, leaves: list[Array]) -> None:
        self.pure.assign(cut(leaves, self.pure.trees))


@dataclass(frozen=True, eq=False)
class Task:
    """A user's step to run over sequences, for the gradient of its losses or for its results alone."""

    learner: ETraceAlgorithm
    step_fn: Function
    split: Callable[..., PyTree] | None = None  # of a step's results into loss and others; unset without one
    weights: Weights = field(default_factory=dict)  # by which the loss is differentiated
    keep: bool = True  # the traces are used afterwards
    alone: bool = False  # a step is a call of the learner and nothing else

    @property
    def evolves(self) -> bool:
        """Whether there is no loss."""
        return self.split is None

    def window(self, sequence: Sequence, chunk_size: int | None) -> int | None:
        """The number of steps that `step_fn` takes at once; None for one step."""
        taken = self.learner.steps_at_once(chunk_size)
        if taken != 1 or self.alone:
            return None if self.alone else taken
        slices = jax.tree.map(lambda a: a[0], sequence.arrays)
        called = jax.tree.leaves(called_with(self.learner, self.step_fn, slices), is_leaf=is_data)
        return 1 if any(isinstance(a, MultiStepData) for a in called) else None

    def trace(self, sequence: Sequence, lead: tuple[int, ...]) -> TracedStep:
        """Trace a user's step on one step of the sequence, or on a window of `lead` steps."""

        def function(*slices: PyTree) -> PyTree:
            out = self.step_fn(*slices)
            return out if self.split is None else self.split(out, lead)

        before, self.learner._is_tracing = self.learner._is_tracing, True
        try:
            return TracedStep.of(self.learner, function, sequence.arrays)
        finally:
            self.learner._is_tracing = before

    def drive(self, step: UserStep, sequence: Sequence, chunk_size: int | None, is_window: bool) -> Drive:
        """Choose how to drive a step; `is_window`: the step takes a window of steps by itself."""
        learner, compiled, values = self.learner, self.learner._cache.now, self.learner._values()
        if not compiled.rule.back_through_time:
            if is_window:
                return Drive(step, sequence.pace)
            compiled.shard_like(leaves_of(compiled), learner._inputs_of(compiled))
        return choose(
            compiled.rule_step,
            step,
            sequence,
            chunk_size=chunk_size,
            window=compiled.window or 1,
            keep=self.keep,
            # outside of `jit`, traces that are kept are zero in the first call only: two programs for one
            fresh=learner._is_fresh() and (not self.keep or is_traced(values)),
            budget=learner.memory_budget,
        )


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


def run(task: Task, sequence: Sequence, chunk_size: int | None) -> tuple[PyTree, PyTree]:
    """The summed gradients and the results of every step; states and traces are those after the sequence.

    If it fails, states and traces are as before, or after the last report of progress.
    """
    learner = task.learner
    before = learner.steps.value
    # with reports of progress, states are up to date after each part, and stay so
    kept = list(learner.states().values()) if sequence.progress is None else []
    with unchanged_on_error(kept):
        size = task.window(sequence, chunk_size)
        found = _run(task, sequence, chunk_size) if size is None else _in_windows(task, sequence, size)
        if not task.evolves and is_unchanged(before, learner.steps.value):
            raise NeverCalledError
        if not task.keep:
            learner.init_etrace_state()
    return found


def _in_windows(task: Task, whole: Sequence, size: int) -> tuple[PyTree, PyTree]:
    """`run` for a `step_fn` that takes windows of `size` steps; a shorter one takes the remainder."""
    given = f"With `chunk_size={size}`, this learner, which goes in windows, hands {size} steps at once"
    if whole.reset is not None:
        raise ValueError(
            f"{given} to `step_fn`, and `reset` needs a `step_fn` of one step: leave `chunk_size` out; "
            "the learner's own `window` is the number of steps in a window."
        )
    count, left = divmod(whole.length, size)
    found: list[tuple[PyTree, PyTree]] = []
    try:
        for start, number, length in ((0, count, size), (count * size, 1, left)):
            if number * length:
                steps = whole.part(start, start + number * length)
                cut = lambda a, n=number, k=length: a.reshape(n, k, *a.shape[1:])
                arrays, mask, _ = jax.tree.map(cut, steps)
                found.append(
                    _run(task, Sequence(arrays, number, mask, progress=whole.progress), None, length)
                )
    except NotCompiledError as e:
        raise ValueError(
            f"{given} to `step_fn`, which calls it as with one: leave `chunk_size` out and give the "
            "learner its `window`, or wrap what `step_fn` is given in `MultiStepData` and return as many "
            "losses."
        ) from e
    with_time = lambda a: a.reshape(-1, *a.shape[2:]) if a.ndim > 1 else a
    outs = [jax.tree.map(with_time, out) for _, out in found]
    grads = jax.tree.map(lambda *g: sum(g[1:], g[0]), *(g for g, _ in found))
    return grads, jax.tree.map(lambda *a: jnp.concatenate(a), *outs)


@_meshes.no_types()
def _run(
    task: Task, sequence: Sequence, chunk_size: int | None, length: int | None = None
) -> tuple[PyTree, PyTree]:
    """`run` for a `step_fn` of one step or, with `length`, of a window of that many steps."""
    learner, compiled, weights = task.learner, task.learner._cache.now, task.weights
    traced = task.trace(sequence, () if length is None else (length,))
    at = traced.leaves_of(weights)
    leaves = [leaf for values in traced.pure.values() for leaf in values]
    drive = task.drive(traced.step, sequence, chunk_size, is_window=length is not None)
    shown = _reporting(traced, sequence)
    if task.evolves:
        outs, after = compiled.run(drive, leaves, shown, evolve=True)
        total: list[Array] = []
    else:
        inside = set(map(id, learner.model.states().values()))
        inside |= {id(e.state) for e in learner.graph.module_info.entries}  # used, if not held
        if unused := [k for k, st in weights.items() if id(st) not in {*inside, *traced.at}]:
            raise ValueError(
                f"`weights` has {', '.join(map(str, unused))}, which the model does not hold and `step_fn` "
                "does not use."
            )
        asked = [i for found in at.values() for i in found]
        wanted = tuple(dict.fromkeys(i for i in asked if is_inexact(leaves[i])))
        reset_leaves, initial = _initial(learner, traced, sequence)
        drive = replace(drive, wanted=wanted, reset_leaves=reset_leaves)
        if length is None:
            outside = [i for k, found in at.items() for i in found if id(weights[k]) not in inside]
            warn_of_paths(drive, asked, outside, learner.model)
        total, outs, after = compiled.run(drive, leaves, shown, initial)
    traced.assign(after)
    by_leaf = dict(zip(drive.wanted, total, strict=True))
    grads = {}
    for k, st in weights.items():
        values, tree = jax.tree.flatten(st.value)
        pairs = zip(at.get(k, [None] * len(values)), values, strict=True)
        found = [by_leaf[i] if i in by_leaf else jnp.zeros_like(a) for i, a in pairs]
        grads[k] = jax.tree.unflatten(tree, found)
    return grads, jax.tree.unflatten(jax.tree.structure(traced.pure.shapes), outs)


@contextmanager
def reporting(progress: bool | Report) -> Iterator[Report | None]:
    """The function that the option `progress` asks for; True is a bar in the terminal."""
    if not isinstance(progress, bool) and not callable(progress):
        raise TypeError(f"`progress` is True, False or a function of two numbers, not {progress!r}.")
    if progress is not True:
        yield progress or None
        return
    from .._train.progress_bar import StepBar  # rich takes long to import

    with StepBar() as bar:
        yield bar


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
    start = initial_states(learner, size)
    states = by_path(learner.model)
    reset_leaves, values = [], []
    for path, at in traced.leaves_of({p: states[p] for p in start}).items():
        reset_leaves += at
        values += jax.tree.leaves(start[path])
    return tuple(reset_leaves), values
