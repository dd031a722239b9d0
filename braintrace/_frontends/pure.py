"""A function over `brainstate` states as a pure function of their values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import brainstate
import jax

from .. import _compat

Leaves = list[Any]


@dataclass(frozen=True, eq=False)
class Pure:
    """What a function computes from its arguments and from the states that it touches."""

    closed: Any
    shapes: Any  # of what it returns
    states: tuple[brainstate.State, ...]
    trees: tuple[Any, ...]
    written: tuple[bool, ...]
    specs: tuple[Any, ...]  # how what it returns and the new leaves are spread, as types say

    @staticmethod
    def trace(function: Callable[..., Any], *args: Any) -> Pure:
        """Trace `function(*args)` with abstract values of these shapes."""
        stateful = brainstate.transform.StatefulFunction(function, return_only_write=False)
        stateful.make_jaxpr(*args)
        typed = stateful.get_jaxpr(*args)
        closed = _compat.without_types(typed)
        states = tuple(stateful.get_states(*args))
        trees: tuple[Any, ...] = tuple(jax.tree.structure(st.value) for st in states)
        jaxpr = _compat.parts(closed)[0]
        num = sum(t.num_leaves for t in trees)
        same = [a is b for a, b in zip(jaxpr.invars[-num:], jaxpr.outvars[-num:], strict=True)] if num else []
        specs = tuple(map(_compat.spec_of, typed.out_avals))
        written = tuple(not all(part) for part in cut(same, trees))
        return Pure(closed, stateful.get_out_shapes(*args)[0], states, trees, written, specs)

    @property
    def effects(self) -> Any:
        """What it does beside computing: it prints, or calls back."""
        return self.closed.effects

    def values(self) -> list[Leaves]:
        """The leaves of each state as they are now."""
        return [jax.tree.leaves(st.value) for st in self.states]

    def assign(self, values: list[Leaves]) -> None:
        """Give the states that the function writes these values."""
        for state, tree, leaves, written in zip(self.states, self.trees, values, self.written, strict=True):
            if written:
                state.value = jax.tree.unflatten(tree, leaves)

    def __call__(self, values: list[Leaves], *args: Any) -> tuple[Any, list[Leaves]]:
        """What the function returns, and the new leaves of each state."""
        flat = [*jax.tree.leaves(args), *(leaf for leaves in values for leaf in leaves)]
        outs = _compat.jaxpr_as_fun(self.closed)(*flat)
        num = len(outs) - sum(t.num_leaves for t in self.trees)
        return jax.tree.unflatten(jax.tree.structure(self.shapes), outs[:num]), cut(outs[num:], self.trees)


def cut(leaves: Leaves, trees: tuple[Any, ...]) -> list[Leaves]:
    items = iter(leaves)
    return [[next(items) for _ in range(t.num_leaves)] for t in trees]
