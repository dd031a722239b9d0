"""The error of a call with shapes that a learner is not compiled for, and its message."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, TypeVar, cast

import jax
import jax.numpy as jnp

from .._compiler import CompilationError
from .._types import Function, Option, PyTree

if TYPE_CHECKING:
    from .stateful import ETraceAlgorithm
    from .step_cache import Key, ShapeAndType

Drives = TypeVar("Drives", bound=Function)


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
