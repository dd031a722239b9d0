"""The compiled steps of a `brainstate` model under one rule, cached by shapes and static arguments."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import brainstate
import jax
import jax.numpy as jnp

from .. import _compat, _meshes
from .._compiler import CompilationError
from .._compiler.step import show_path
from .._frontends.modules import Mark, read_module, traced_again
from .._online.arguments import as_shape, split_static
from .._online.request import WindowSize
from .._rules.rule import Rule, TraceRule
from .._types import Array, Function, Option, Options, PyTree
from .compiled_step import CompiledStep

if TYPE_CHECKING:
    from .stateful import ETraceAlgorithm

_REMEMBERED = 8  # compiled steps of the same shapes

Drives = TypeVar("Drives", bound=Function)
ShapeAndType = tuple[tuple[int, ...], str]


class Key(NamedTuple):
    """The shapes, static arguments and states that a step is compiled for."""

    data: tuple[ShapeAndType, ...]  # of the arrays among the arguments
    static: PyTree  # the structure of the arguments, and those that are not arrays
    states: tuple[PyTree, ...]  # the name of each state, and its arrays

    @staticmethod
    def of(model: brainstate.nn.Module, args: tuple[PyTree, ...], kwargs: Options) -> Key:
        data, _, static = split_static(args, kwargs)
        try:
            hash(static)
        except TypeError:
            static = static[0], (repr(static[1]),)
        return Key(tuple(map(_shape, data)), static, _states_of(model))


class NotCompiledError(CompilationError):
    """No step is compiled for a call."""

    def __init__(self, asked: Key, compiled: Collection[Key]) -> None:
        super().__init__(why_missing(asked, compiled))
        self.asked, self.compiled = asked, tuple(compiled)

    def looks_batch_first(self, sequences: PyTree) -> bool:
        """Whether the step of a sequence, with its first two axes exchanged, is what was compiled for."""
        asked, known = ({s for s, _ in data} for data in (self.asked.data, self._known()))
        shapes = [tuple(jnp.shape(a)) for a in jax.tree.leaves(sequences)]
        return any(s[1:] in asked and (s[0], *s[2:]) in known - asked for s in shapes if len(s) > 1)

    def _known(self) -> list[ShapeAndType]:
        return [one for key in self.compiled for one in key.data]


def time_first(drive: Drives) -> Drives:
    """A method over sequences whose error names a batch axis that seems to come before time."""

    @functools.wraps(drive)
    def checked(self: ETraceAlgorithm, *sequences: PyTree, **options: Option) -> PyTree:
        try:
            return drive(self, *sequences, **options)
        except NotCompiledError as e:
            if not e.looks_batch_first(sequences):
                raise
            shapes = ", ".join(str(tuple(jnp.shape(a))) for a in jax.tree.leaves(sequences))
            raise CompilationError(
                f"The sequences, of shapes {shapes}, seem to have the batch first: time must be the first "
                f"axis, then the batch. Exchange them (`jnp.swapaxes(xs, 0, 1)`). {e}"
            ) from e

    return cast(Drives, checked)


@dataclass(eq=False)
class StepCache:
    """Compiled steps by their keys, and the one in use.

    A copy or a restored learner compiles its own when they are first used, from `examples`.
    """

    model: brainstate.nn.Module
    rule: Rule
    mark: Mark
    window: WindowSize | None
    examples: dict[Key, PyTree] = field(default_factory=dict)  # the arguments that each was compiled with
    current: Key | None = None
    _compiled: dict[Key, CompiledStep] = field(default_factory=dict)
    # of the shapes in use, with other values that the model closes over
    _others: list[CompiledStep] = field(default_factory=list)

    def __getstate__(self) -> Options:
        return {**vars(self), "_compiled": {}, "_others": []}

    def with_rule(self, rule: Rule, window: WindowSize | None) -> StepCache:
        """A cache for the same shapes under another rule; nothing is compiled yet."""
        return replace(self, rule=rule, window=window, _compiled={}, _others=[])

    def key(self, args: tuple[PyTree, ...], kwargs: Options) -> Key:
        return Key.of(self.model, args, kwargs)

    def compile(self, args: tuple[PyTree, ...], kwargs: Options) -> None:
        """Compile for these arguments, unless that was done before, and use that step."""
        key = self.key(args, kwargs)
        if key not in self.examples:
            self._compiled[key] = self._new(args, kwargs)
            self.examples[key] = jax.tree.map(as_shape, (args, kwargs))
        self.current = key

    def _new(self, args: tuple[PyTree, ...], kwargs: Options) -> CompiledStep:
        with _meshes.no_types():
            function = read_module(self.model, args, kwargs)
        compiled = CompiledStep(function, self.rule, self.mark, self.window, complete=False)
        _ = compiled.graph if self.rule.back_through_time else compiled.rule_step  # now, with its warnings
        return compiled

    def __getitem__(self, key: Key) -> CompiledStep:
        if key not in self._compiled:
            with warnings.catch_warnings(action="ignore"):
                self._compiled[key] = self._new(*self.examples[key])
        return self._compiled[key]

    @property
    def now(self) -> CompiledStep:
        """The step in use."""
        if self.current is None:
            raise CompilationError("The graph is not compiled yet: call `learner.compile_graph(x)` first.")
        return self[self.current]

    @property
    def known(self) -> CompiledStep | None:
        """The step in use, if it is compiled in this process."""
        return None if self.current is None else self._compiled.get(self.current)

    def select(self, args: tuple[PyTree, ...], kwargs: Options, *, fresh: bool) -> bool:
        """Use the step for these arguments and the current states; whether its traces are others.

        `fresh`: the traces are zero, so that nothing is lost if they are others.
        """
        key, old = self.key(args, kwargs), self.current
        if key not in self.examples:
            raise NotCompiledError(key, self.examples)
        if key == old:
            return False
        agree = old is not None and have_same_traces(self[old], self[key])
        if old is not None and not agree and old.states == key.states and not fresh:
            raise CompilationError(
                "The learner was called with other static arguments or types than before, for which the "
                "model has other traces, and the traces of earlier steps would be lost. Call "
                "`learner.compile_graph` with these arguments first, outside of `jit`: traces start from "
                "zero then."
            )
        self.current = key
        return not agree

    def follow_states(self) -> bool:
        """Use a step that was compiled for the current states; whether it is another one."""
        now, current = _states_of(self.model), self.current
        fitting = [key for key in self.examples if key.states == now]
        if current is None or current.states == now or not fitting:
            return False
        alike = [key for key in fitting if key.static == current.static]
        self.current = (alike or fitting)[-1]
        return True

    def with_constants(self, args: tuple[PyTree, ...], kwargs: Options) -> tuple[CompiledStep, list[Array]]:
        """The step of the model as it is now, and the values that it closes over."""
        closed = traced_again(self.model, args, kwargs)
        for compiled in (self.now, *self._others):
            consts = compiled.info.constants_of(closed)
            if consts is not None:
                break
        else:
            compiled = self._new(args, kwargs)
            self._others = [compiled, *self._others[: _REMEMBERED - 1]]
            program = compiled.info.program
            consts = list(program.consts.values())
            # no value of a step that is being traced outlives it
            ended = {v: None for v, c in program.consts.items() if _compat.is_tracer(c)}
            program.consts.update(ended)  # type: ignore[arg-type]
        if compiled is not self.now:  # the same shapes, but the model closes over other values
            if not have_same_traces(self.now, compiled):
                raise CompilationError(
                    "The model has become another program since `compile_graph`: its marked ops reach other "
                    "places in its states now, so that the traces no longer fit (a flag, an index or a time "
                    "that it closes over has changed). Call `learner.compile_graph(x)` again as the model is "
                    "now. What changes from step to step, such as an index into a buffer, must be an "
                    "argument of the model or a state."
                )
            assert self.current is not None
            self._compiled[self.current] = compiled  # so that the report is of the model as it is now
        return compiled, consts


def have_same_traces(old: CompiledStep, new: CompiledStep) -> bool:
    """Whether the traces of one compiled step can be used in the other."""
    if old.rule.back_through_time:
        return True
    shapes = [{k: v.shape for k, v in step.rule_step.arrays.shapes.items()} for step in (old, new)]
    if shapes[0] != shapes[1] or not isinstance(old.rule, TraceRule):
        return shapes[0] == shapes[1]
    before, after = ({t.key: t for t in step.executor.slots} for step in (old, new))
    same = lambda key: before[key].means_the_same_as(after[key])
    return before.keys() == after.keys() and all(map(same, before))


def _states_of(model: brainstate.nn.Module) -> tuple[PyTree, ...]:
    """The name of each state of a model, and the shapes and types of its arrays."""
    states = model.states().items()
    return tuple((show_path(path), *map(_shape, jax.tree.leaves(st.value))) for path, st in states)


def _shape(leaf: Array) -> ShapeAndType:
    return tuple(jnp.shape(leaf)), str(jnp.result_type(leaf))


def why_missing(asked: Key, compiled: Collection[Key]) -> str:
    """The error message if no step is compiled for a call."""
    shapes = _shapes(asked.data)
    if not compiled:
        return (
            "The learner's graph is not compiled yet. Call `learner.compile_graph(x)` first, with one "
            f"step's input, after the states are initialised. This call has inputs of shapes {shapes}."
        )
    known = [key for key in compiled if key.data == asked.data]
    if known and all(key.static != asked.static for key in known):
        given = [s for s in asked.static[1] if s is not None]
        how = f"with other static arguments than {given}" if given else "in another structure or unit"
        return (
            f"The learner is compiled for inputs of shapes {shapes}, but {how}. Call `learner.compile_graph` "
            "with these arguments."
        )
    seen = [key.states for key in compiled]
    other = [s for s in asked.states if all(s not in states for states in seen)]
    if known and other:
        was = {name: dims for states in seen for name, *dims in states}
        listed = lambda dims: ", ".join(_shapes(dims)) or "none"
        words = ", ".join(f"`{k}` has {listed(dims)} and had {listed(was.get(k, []))}" for k, *dims in other)
        return (
            f"The learner is compiled for inputs of shapes {shapes}, but with other states: {words}. "
            "Initialise the states as they were (`learner.reset_state(batch_size)`), or call "
            "`learner.compile_graph(x)` again."
        )
    like = [key for key in compiled if key.static == asked.static and len(key.data) == len(asked.data)]
    return next(filter(None, (_mistake(asked, key) for key in like)), None) or (
        f"The learner is not compiled for inputs of shapes {shapes} with the states as they are now; it is "
        f"compiled for inputs {[_shapes(key.data) for key in compiled]}, given in the same way (by position "
        "or by name). Check the batch and feature sizes. For another batch size call "
        "`learner.reset_state(batch_size)` and then `learner.compile_graph(x)`; to predict without learning, "
        "`learner.reset_state(batch_size)` and then `learner.model(x)`."
    )


def _mistake(asked: Key, known: Key) -> str | None:
    """The message for a call that differs from the compiled one by its types, or by a time axis."""
    pairs = [(s, t, *k) for (s, t), k in zip(asked.data, known.data, strict=True)]
    if all(s == k for s, _, k, _ in pairs):
        types = ", ".join(f"{t} and not {u}" for _, t, _, u in pairs if t != u)
        wanted = next((u for _, t, _, u in pairs if t != u), None)
        return wanted and (
            f"The learner is compiled for inputs of shapes {_shapes(known.data)}, and this one is {types}. "
            f"Convert it (`x.astype('{wanted}')`), or call `learner.compile_graph(x)` with an input of this "
            "type as well."
        )
    longer = {s[0] for s, _, k, _ in pairs if s != k and s[1:] == k}
    if len(longer) == 1 and all(k in (s, s[1:]) for s, _, k, _ in pairs):
        length = longer.pop()
        return (
            f"The learner takes one step at a time: it is compiled for inputs {_shapes(known.data)}, and "
            f"{_shapes(asked.data)} looks like a whole sequence of {length} steps. Go through it with "
            "`learner.etrace_grad(xs, step_fn=...)`, `learner.etrace_evolve(xs)` or a loop; a learner with "
            "`vjp_method='multi-step'` takes a window of steps as `braintrace.MultiStepData(xs)`. If it is a "
            "batch, initialise the states for it (`brainstate.nn.init_all_states(model, batch_size="
            f"{length})`) and call `learner.compile_graph(x)` again."
        )
    return None


def _shapes(dims: Iterable[ShapeAndType]) -> list[str]:
    return [f"{t}{list(s)}" for s, t in dims]
