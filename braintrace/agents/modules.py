"""A `brainstate` model as the step function that `braintrace.online` takes."""

from __future__ import annotations

from collections.abc import Callable

import brainstate
import jax

from .._frontends.pure import Pure
from .._types import PyTree

Values = dict[str, PyTree]  # of states, by their names
StepFunction = Callable[[Values, Values, PyTree], tuple[Values, PyTree]]


def from_module(model: brainstate.nn.Module, x: PyTree) -> tuple[StepFunction, Values, Values]:
    """Return a model as a pure function: `step(params, carry, x) -> (carry, y)`, `params` and `carry`.

    Args:
        model: A model with its states initialised, for one sample.
        x: The input of one step, for its shapes.

    Returns:
        The step function, the values of the model's parameters and those of its other states, both as
        dicts from the names of the states.

    >>> import braintrace, jax.numpy as jnp
    >>> model = braintrace.nn.RTUCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(model)
    >>> step, params, carry = from_module(model, jnp.ones(3))
    >>> sorted(params), sorted(carry)
    (['W.weight', 'nu', 'theta'], ['im', 're'])
    >>> net = braintrace.online(step, params, carry, jnp.ones(3))
    """
    pure = Pure.trace(model, x)
    paths = {id(state): ".".join(map(str, path)) for path, state in model.states().items()}
    names = [paths[id(state)] for state in pure.states]
    fixed = [isinstance(state, brainstate.ParamState) for state in pure.states]

    def step(params: Values, carry: Values, x: PyTree) -> tuple[Values, PyTree]:
        values = {**params, **carry}
        y, new = pure([jax.tree.leaves(values[name]) for name in names], x)
        trees = (jax.tree.unflatten(*each) for each in zip(pure.trees, new, strict=True))
        return {name: v for name, v, keep in zip(names, trees, fixed, strict=True) if not keep}, y

    now = {name: state.value for name, state in zip(names, pure.states, strict=True)}
    params = {name: now[name] for name, keep in zip(names, fixed, strict=True) if keep}
    return step, params, {name: now[name] for name in names if name not in params}
