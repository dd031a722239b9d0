"""Wrappers that mark the arguments of a learner as data of one step or of a window of steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import jax

from .._types import Leaves, PyTree
from .arguments import split_static


@jax.tree_util.register_pytree_node_class
class SingleStepData:
    """Data of one time step."""

    def __init__(self, data: PyTree) -> None:
        self.data = data

    def tree_flatten(self) -> tuple[tuple[PyTree], None]:
        return (self.data,), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: tuple[PyTree]) -> Self:
        return cls(*children)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.data!r})"


@jax.tree_util.register_pytree_node_class
class MultiStepData(SingleStepData):
    """Data of several time steps, along the first axis of each array."""


def one_step(
    args: Iterable[PyTree], kwargs: dict[str, PyTree]
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """The arguments of a single step: of a window, the shapes of one."""

    def first(arg: PyTree) -> PyTree:
        if isinstance(arg, MultiStepData):
            return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), arg.data)
        return arg.data if isinstance(arg, SingleStepData) else arg

    return tuple(map(first, args)), {k: first(v) for k, v in kwargs.items()}


def time_axes(args: Iterable[PyTree], kwargs: dict[str, PyTree]) -> tuple[Leaves, list[bool]]:
    """The array leaves of a call, and which have a leading axis of time."""

    def mark(arg: PyTree) -> tuple[PyTree, PyTree]:
        is_window = isinstance(arg, MultiStepData)
        data = arg.data if isinstance(arg, SingleStepData) else arg
        return data, jax.tree.map(lambda _: is_window, data)

    marked = [mark(a) for a in args], {k: mark(v) for k, v in kwargs.items()}
    bare = [d for d, _ in marked[0]], {k: d for k, (d, _) in marked[1].items()}
    flags = [f for _, f in marked[0]], {k: f for k, (_, f) in marked[1].items()}
    data, _, (_, static) = split_static(*bare)
    return data, [f for f, s in zip(jax.tree.leaves(flags), static, strict=True) if s is None]
