"""Compiled forms of a model: which one a call asks for, and why there is none."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp

from .._compiler import ETraceGraph
from .._compiler.module_info import StateEntry, split_static
from .._executor.executor import ETraceGraphExecutor


@dataclass(eq=False)
class Compiled:
    """One compiled form of a model: its graph and the functions made from it."""

    graph: ETraceGraph
    reduced: Callable[[ETraceGraph], ETraceGraph]  # to what the rule needs traces of

    @cached_property
    def executor(self) -> ETraceGraphExecutor:
        return ETraceGraphExecutor(self.reduced(self.graph))

    @property
    def carried(self) -> list[StateEntry]:
        """The states that a step hands to the next."""
        return [e for e in self.graph.module_info.entries if not e.is_fixed]


class Key(NamedTuple):
    """What a form is compiled for."""

    data: tuple[Any, ...]  # the shapes and types of the arrays among the arguments
    static: Any  # the rest of the arguments
    states: tuple[Any, ...]

    @staticmethod
    def of(model: brainstate.nn.Module, args: Any, kwargs: Any) -> Key:
        data, _, static = split_static(args, kwargs)
        try:
            hash(static)
        except TypeError:
            static = (static[0], repr(static[1]))
        return Key(tuple(map(_shape, data)), static, shapes_of_states(model))


def shapes_of_states(model: brainstate.nn.Module) -> tuple[Any, ...]:
    """The name of each state of a model, and the shapes and types of its arrays."""
    return tuple(
        (".".join(map(str, path)), *map(_shape, jax.tree.leaves(st.value)))
        for path, st in model.states().items()
    )


def why_missing(asked: Key, compiled: Collection[Key]) -> str:
    """What to say where no form is compiled for a call."""
    shapes = _shapes(asked.data)
    if not compiled:
        return (
            "The learner's graph is not compiled yet. Call `learner.compile_graph(x)` first, with one "
            f"step's input, after the states are initialised. This call has inputs of shapes {shapes}."
        )
    known = [key for key in compiled if key.data == asked.data]
    if known and all(key.static != asked.static for key in known):
        given = [s for s in asked.static[1] if s is not None]
        how = (
            f"with other static arguments than {given}"
            if given
            else "in another structure, or without a unit"
        )
        return (
            f"The learner is compiled for inputs of shapes {shapes}, but {how}. Call `learner.compile_graph` "
            "with these arguments."
        )
    seen = [key.states for key in compiled]
    other = [s for s in asked.states if all(s not in states for states in seen)]
    if known and other:
        was = {name: dims for states in seen for name, *dims in states}
        words = ", ".join(
            f"`{name}` has {_listed(dims)} and had {_listed(was.get(name, []))}" for name, *dims in other
        )
        return (
            f"The learner is compiled for inputs of shapes {shapes}, but with other states: {words}. "
            "Initialise the states as they were (`learner.reset_state(batch_size)`), or call "
            "`learner.compile_graph(x)` again."
        )
    return (
        f"The learner is not compiled for inputs of shapes {shapes} with the states as they are now; it is "
        f"compiled for inputs {[_shapes(key.data) for key in compiled]}, given in the same way (by position "
        "or by name). Check the batch and feature sizes; for another batch size, initialise the states for "
        "it and call `learner.compile_graph(x)` again."
    )


def _shape(leaf: Any) -> tuple[tuple[int, ...], str]:
    return tuple(jnp.shape(leaf)), str(jnp.result_type(leaf))


def _shapes(dims: Any) -> list[str]:
    return [f"{t}{list(s)}" for s, t in dims]


def _listed(dims: Any) -> str:
    return ", ".join(_shapes(dims)) or "none"
