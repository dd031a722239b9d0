"""A warning of parameters that a step uses but that are not part of the model, and so are not learned."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import brainstate
import jax
import jax.numpy as jnp

from .._compiler.step import show_path
from .._lines import warn_user
from .._types import Function, Model


def warn_of_unlearned(step_fn: Function, used: Iterable[brainstate.State], model: Model) -> None:
    """Warn of parameters among the states in use that are not the model's."""
    own = {id(st) for st in model.states().values()}
    others = [st for st in used if isinstance(st, brainstate.ParamState) and id(st) not in own]
    if others:
        names = _names(step_fn)
        shapes = lambda st: ", ".join(str(jnp.shape(leaf)) for leaf in jax.tree.leaves(st.value))
        shown = ", ".join(names.get(id(st)) or f"a parameter {shapes(st)}" for st in others)
        warn_user(
            f"`step_fn` uses parameters that are no part of `learner.model`, so `fit` does not learn them: "
            f"{shown}. Call them in the model's `update`, or keep constants in plain arrays."
        )


def _names(step_fn: Function) -> dict[int, str]:
    """Return the names of parameters in the closure of a function, by identity."""
    if not inspect.isroutine(step_fn):
        return {}
    seen = inspect.getclosurevars(step_fn)
    found = {}
    for name, value in {**seen.globals, **seen.nonlocals}.items():
        if isinstance(value, brainstate.ParamState):
            found[id(value)] = f"`{name}`"
        elif isinstance(value, brainstate.nn.Module):
            for path, st in value.states(brainstate.ParamState).items():
                found[id(st)] = f"`{show_path((name, *path))}`"
    return found
