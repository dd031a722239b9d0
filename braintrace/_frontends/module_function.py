"""A `brainstate` module as a pure function of pytrees: `step(params, carry, x) -> (carry, y)`.

`params` and `carry` are dictionaries of the values of its states, by path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import brainstate
import jax
import jax.numpy as jnp

from .._compiler.step import Path, Role, State
from .._types import Options, PyTree
from .functions import Function, Tree
from .modules import step_of

Values = dict[Path, PyTree]  # by the path of a state


def read_module(
    model: brainstate.nn.Module,
    args: Sequence[PyTree],
    kwargs: Options | None = None,
    function: Callable[..., PyTree] | None = None,
) -> Function:
    """Trace `model(*args, **kwargs)` as a function of the values of its states.

    Args:
        model: The module. Its states have shapes as in training; shapes may stand for arrays.
        args: The arguments of one step. `x` of the function is the only argument, or a tuple of several.
        kwargs: Arguments by name; with some, `x` is the pair `(args, kwargs)`.
        function: Called in place of the model, which it may call: a step with its loss, say.
    """
    kwargs = kwargs or {}
    step = step_of(model, args, kwargs, function)
    x = (tuple(args), kwargs) if kwargs else args[0] if len(args) == 1 else tuple(args)
    params, carry = _split(step.states)
    as_array = lambda leaf: leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
    values = lambda states: {st.path: jax.tree.map(as_array, st.handle.value) for st in states}
    trees = Tree.of("params", values(params)), Tree.of("carry", values(carry)), Tree.of("x", x)
    by_path = [sorted(some, key=lambda st: st.path) for some in (params, carry)]  # as a pytree is flattened
    untraced = [
        not isinstance(st.handle, brainstate.ShortTermState)
        for st in by_path[1]
        for _ in range(st.tree.num_leaves)
    ]
    positions = [
        tuple(i for st in some for i, owner in enumerate(step.owners) if owner is st) for some in by_path
    ]
    return Function(function or model, step, *trees, tuple(untraced), *positions)


def read_states(function: Function) -> tuple[Values, Values]:
    """The parameters and the carry of a module's function, as the module's states are now."""
    params, carry = _split(function.step.states)
    found = states_of(function)
    values = lambda states: {st.path: found[st.path].value for st in states}
    return values(params), values(carry)


def by_path(model: brainstate.nn.Module) -> dict[Path, brainstate.State]:
    """The model's states as they are now."""
    return {tuple(map(str, path)): st for path, st in model.states().items()}


def states_of(function: Function) -> dict[Path, brainstate.State]:
    """The states of a module by path: those that it has now, which may be others than were traced."""
    now = by_path(function.step.model)
    return {st.path: now.get(st.path, st.handle) for st in function.step.states}


def _split(states: Sequence[State]) -> tuple[list[State], list[State]]:
    """The parameters, and the other states."""
    is_param = lambda st: st.role is Role.PARAMETER
    return [st for st in states if is_param(st)], [st for st in states if not is_param(st)]
