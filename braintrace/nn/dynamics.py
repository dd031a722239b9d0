"""Base class of neurons, synapses and leaky readouts: states with initial values, exact decay over a step."""

from __future__ import annotations

from typing import Any

import brainstate
import brainunit as u
import jax.numpy as jnp

from .._types import Options, Shape, Size, Value


class Dynamics(brainstate.nn.Module):
    """A module whose hidden states are its `initial_values`: by name, an initialiser or a value."""

    in_size: Any  # set as a number or a shape, read as a shape
    out_size: Any

    def __init__(self, in_size: Size, out_size: Size, name: str | None, initial_values: Options) -> None:
        super().__init__(name=name)
        self.in_size, self.out_size = in_size, out_size
        self.initial_values = initial_values

    def init_state(self, batch_size: int | None = None, **kwargs: object) -> None:
        for name, value in self.initial_values.items():
            setattr(self, name, brainstate.HiddenState(initial(value, self.out_size, batch_size)))

    def reset_state(self, batch_size: int | None = None, **kwargs: object) -> None:
        for name, value in self.initial_values.items():
            getattr(self, name).value = initial(value, self.out_size, batch_size)


def initial(value: Value, size: Shape, batch_size: int | None) -> Value:
    """Make the initial value of a state from an initialiser, a number or an array."""
    shape = size if batch_size is None else (batch_size, *size)
    if callable(value):
        return value(shape)
    mantissa = jnp.asarray(u.get_mantissa(value), brainstate.environ.dftype())
    return with_unit(jnp.broadcast_to(mantissa, shape), value)


def zero_like(value: Value) -> Value:
    """Zero, in the unit of `value`."""
    return with_unit(0.0, value)


def with_unit(number: Value, like: Value) -> Value:
    return u.maybe_decimal(u.Quantity(number, unit=u.get_unit(like)))


def decay(tau: Value) -> Value:
    """The factor by which a state decays in a step of `dt` (of `brainstate.environ`): `exp(-dt / tau)`."""
    return u.math.exp(-brainstate.environ.get_dt() / tau)
