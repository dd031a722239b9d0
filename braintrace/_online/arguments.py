"""The arguments of a call: arrays, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


def split_static(
    args: Sequence[Any], kwargs: dict[str, Any], *, numbers: bool = True
) -> tuple[list[Any], Callable[..., Any], Any]:
    """The array leaves of a call, a function that puts them back, and a key for all the rest.

    What is not a number or an array (a string, a flag, a function) is static: part of the program. So are,
    unless `numbers`, those of Python.
    """
    leaves, tree = jax.tree.flatten((tuple(args), kwargs))
    dynamic = [_is_data(leaf) and (numbers or not _is_plain(leaf)) for leaf in leaves]
    static = tuple(None if d else leaf for d, leaf in zip(dynamic, leaves, strict=True))

    def rebuild(data: Sequence[Any]) -> Any:
        rest = iter(data)
        return jax.tree.unflatten(
            tree, [next(rest) if d else s for d, s in zip(dynamic, static, strict=True)]
        )

    return [leaf for leaf, d in zip(leaves, dynamic, strict=True) if d], rebuild, (tree, static)


def as_shape(leaf: Any) -> Any:
    """An array's shape and type; anything else as it is."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf


def _is_data(leaf: Any) -> bool:
    return not isinstance(leaf, bool | str | bytes) and (
        isinstance(leaf, int | float | complex | np.generic | np.ndarray)
        or hasattr(leaf, "aval")
        or hasattr(leaf, "dtype")
    )


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, int | float | complex) and not isinstance(leaf, np.generic)
