"""A function over `brainstate` states as a pure function of their values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import brainstate
import jax
from jax.tree_util import PyTreeDef

from .. import _compat, _meshes
from .._types import Function, Leaves, PyTree

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Pure:
    """A function over states, traced as a pure function of its arguments and of the values of the states."""

    closed: _compat.ClosedJaxpr
    shapes: PyTree  # of its results
    states: tuple[brainstate.State, ...]
    trees: tuple[PyTreeDef, ...]
    written: tuple[bool, ...]

    @staticmethod
    def trace(function: Function, *args: PyTree) -> Pure:
        """Trace `function(*args)` with abstract values of these shapes."""
        stateful = brainstate.transform.StatefulFunction(function, return_only_write=False)
        stateful.make_jaxpr(*args)
        closed = _meshes.without_types(stateful.get_jaxpr(*args))
        states = tuple(stateful.get_states(*args))
        trees: tuple[PyTreeDef, ...] = tuple(jax.tree.structure(st.value) for st in states)
        jaxpr = _compat.parts(closed)[0]
        num = sum(t.num_leaves for t in trees)
        same = [a is b for a, b in zip(jaxpr.invars[-num:], jaxpr.outvars[-num:], strict=True)] if num else []
        written = tuple(not all(part) for part in cut(same, trees))
        return Pure(closed, stateful.get_out_shapes(*args)[0], states, trees, written)

    def values(self) -> list[Leaves]:
        """The leaves of each state as they are now."""
        return [jax.tree.leaves(st.value) for st in self.states]

    def assign(self, values: list[Leaves]) -> None:
        """Give the states that the function writes these values."""
        for state, tree, leaves, written in zip(self.states, self.trees, values, self.written, strict=True):
            if written:
                state.value = jax.tree.unflatten(tree, leaves)

    def __call__(self, values: list[Leaves], *args: PyTree) -> tuple[PyTree, list[Leaves]]:
        """The results of the function, and the new leaves of each state."""
        flat = [*jax.tree.leaves(args), *(leaf for leaves in values for leaf in leaves)]
        outs = _compat.jaxpr_as_fun(self.closed)(*flat)
        num = len(outs) - sum(t.num_leaves for t in self.trees)
        return jax.tree.unflatten(jax.tree.structure(self.shapes), outs[:num]), cut(outs[num:], self.trees)


def traced_with(states: Iterable[brainstate.State], trace: Callable[..., Result], *args: PyTree) -> Result:
    """`trace(*args)` with types of states and arguments that carry no sharding."""
    states = list(states)
    before = [st.value for st in states]

    def at(values: list[PyTree], *args: PyTree) -> Result:
        if values is before:
            return trace(*args)
        for st, value in zip(states, values, strict=True):
            st.restore_value(value)
        try:
            return trace(*args)
        finally:
            for st, value in zip(states, before, strict=True):
                st.restore_value(value)

    return _meshes.traced(at, before, *args)


def cut(leaves: Iterable[Result], trees: tuple[PyTreeDef, ...]) -> list[list[Result]]:
    items = iter(leaves)
    return [[next(items) for _ in range(t.num_leaves)] for t in trees]
