"""The arguments of a call: arrays and the rest, and wrappers that mark data of one step or of several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Self

import jax
import numpy as np

from .._types import Leaves, PyTree

Static = tuple[jax.tree_util.PyTreeDef, tuple[object, ...]]  # the structure of a call, and its static leaves


def split_static(
    args: Sequence[PyTree], kwargs: dict[str, PyTree], *, numbers: bool = True
) -> tuple[Leaves, Callable[[Sequence[object]], PyTree], Static]:
    """The array leaves of a call, a function that puts them back, and a key for all the rest.

    What is not a number or an array (a string, a flag, a function) is static: part of the program. So are,
    unless `numbers`, those of Python.
    """
    leaves, tree = jax.tree.flatten((tuple(args), kwargs))
    dynamic = [_is_data(leaf) and (numbers or not _is_plain(leaf)) for leaf in leaves]
    static = tuple(None if d else leaf for d, leaf in zip(dynamic, leaves, strict=True))

    def rebuild(data: Sequence[object]) -> PyTree:
        rest = iter(data)
        return jax.tree.unflatten(
            tree, [next(rest) if d else s for d, s in zip(dynamic, static, strict=True)]
        )

    return [leaf for leaf, d in zip(leaves, dynamic, strict=True) if d], rebuild, (tree, static)


def as_shape(leaf: PyTree) -> PyTree:
    """An array's shape and type; anything else as it is."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf


def _is_data(leaf: object) -> bool:
    return not isinstance(leaf, bool | str | bytes) and (
        isinstance(leaf, int | float | complex | np.generic | np.ndarray)
        or hasattr(leaf, "aval")
        or hasattr(leaf, "dtype")
    )


def _is_plain(leaf: object) -> bool:
    return isinstance(leaf, int | float | complex) and not isinstance(leaf, np.generic)


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
