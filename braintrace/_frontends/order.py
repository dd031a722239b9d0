"""Step functions with another order of arguments or results than `step(params, carry, x) -> (carry, y)`.

Flax cells            params carry x -> carry y
Haiku cores, spyx     params x carry -> y carry
Equinox cells         params x carry -> carry
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable

import jax
import numpy as np

from .._compiler.errors import CompilationError
from .._types import PyTree

Names = tuple[str, ...]
StepFunction = Callable[[PyTree, PyTree, PyTree], PyTree]  # (params, carry, x), or another order

_RETURNS: list[Names] = [("carry", "y"), ("y", "carry"), ("carry",)]
_INPUTS = ("x", "xs", "input", "inputs")
_STATES = ("h", "carry", "hidden", "hidden_state", "state", "prev_state")


def in_order(function: StepFunction, order: str | None = None) -> StepFunction:
    """`function` as `step(params, carry, x) -> (carry, y)`; an error where it is seen to have another order.

    `order` is what the function takes, after the parameters, and returns: 'x carry -> y carry'. Unset, it is
    'carry x -> carry y'. A carry that is returned alone is the output as well.
    """
    takes, _, returns = (tuple(part.split()) for part in (order or "carry x -> carry y").partition("->"))
    if sorted(takes) != ["carry", "x"] or returns not in _RETURNS:
        raise ValueError(f"`order` is such as 'x carry -> y carry', 'carry x -> carry', not {order!r}.")

    def step(params: PyTree, carry: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        given, found, seen = {"carry": carry, "x": x}, None, takes
        try:
            result = function(params, *(given[name] for name in takes))
            found = _form(result, carry, returns)
            if order is None and _are_misnamed(function):  # shapes that are alike do not tell
                seen = takes[::-1]
        except Exception as e:
            seen = takes[::-1]
            with contextlib.suppress(Exception):  # in the other order it may fail, too
                found = _form(function(params, *(given[name] for name in seen)), carry)
            if found is None or isinstance(e, CompilationError):
                raise
        if seen != takes or found not in (None, returns):
            taken, returned = " ".join(seen), " ".join(found or returns)
            raise CompilationError(
                "A step takes `(params, carry, x)` and returns a pair `(carry, y)`, unless `order` says "
                f"otherwise. {name_of(function)} is, by its shapes or names, `params {taken} -> {returned}`: "
                f"pass `order='{taken} -> {returned}'`."
            )
        if returns == ("carry",):
            return result, result
        if not isinstance(result, tuple) or len(result) != 2:
            raise CompilationError(
                "A step returns a pair of the new carry and the output, `step(params, carry, x) -> "
                f"(carry, y)`; {name_of(function)} returned {type(result).__name__}."
            )
        return result if returns[0] == "carry" else result[::-1]

    return step


def _are_misnamed(function: StepFunction) -> bool:
    """Whether the arguments after the parameters are named as an input and a state usually are."""
    names: list[str] = []
    with contextlib.suppress(TypeError, ValueError):  # there may be no signature
        names = [*inspect.signature(function).parameters][1:3]
    return len(names) == 2 and names[0] in _INPUTS and names[1] in _STATES


def _form(result: PyTree, carry: PyTree, first: Names = _RETURNS[0]) -> Names | None:
    """The place in a step's result of a tree with the structure and shapes of the carry."""
    pair = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
    parts = dict(zip(_RETURNS, (*pair, result), strict=True))
    form = lambda tree: (jax.tree.structure(tree), list(map(np.shape, jax.tree.leaves(tree))))
    return next((names for names in (first, *_RETURNS) if form(parts[names]) == form(carry)), None)


def name_of(function: StepFunction) -> str:
    """The name of a function, or of the class whose method it is."""
    owner = getattr(function, "__self__", None)
    if owner is not None:  # `module.apply`
        return type(owner).__name__
    name = str(getattr(function, "__name__", type(function).__name__))
    return name if name != "__call__" else str(function.__qualname__.split(".")[-2])
