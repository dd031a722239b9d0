"""The arguments of a call: arrays, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
