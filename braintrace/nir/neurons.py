"""NIR nodes with dynamics: neurons and delays, and how time becomes steps of `dt`.

With the input held for a step, "exponential" is the exact solution; "euler" takes all derivatives at the
beginning of the step; "semi-implicit" is Euler with the new synaptic current in the equation of the voltage.
As in `braintrace.nn`, a voltage is kept as it is before the reset: spikes are a function of the state.
"""

from __future__ import annotations

from typing import ClassVar

import brainunit as u
import jax.numpy as jnp
import nir
import numpy as np

from .._types import Array, Shape
from .errors import NIRError
from .nodes import Node, Settings, above

METHODS = ("exponential", "euler", "semi-implicit")
RESETS = ("hard", "soft", "soft-delayed")


def relax(method: str, v: Array, target: Array, ratio: Array) -> Array:
    """Integrate `dv/dt = (target - v) / tau` over a step, where `ratio = dt / tau`."""
    if method == "exponential":
        return target + (v - target) * jnp.exp(-ratio)
    return v + ratio * (target - v)


def relax_both(
    method: str, i: Array, v: Array, s: Array, v_leak: Array, r: Array, a: Array, b: Array
) -> tuple[Array, Array]:
    """Integrate `dI/dt = (s - I) / tau_syn` and `dv/dt = (v_leak + r I - v) / tau_mem` over a step.

    `a` and `b` are `dt / tau_syn` and `dt / tau_mem`.
    """
    new = relax(method, i, s, a)
    if method != "exponential":
        return new, relax(method, v, v_leak + r * (i if method == "euler" else new), b)
    # b (exp(-a) - exp(-b)) / (b - a), also where a = b
    part = b * jnp.exp(-jnp.minimum(a, b)) * u.math.exprel(-jnp.abs(b - a))
    return new, relax(method, v, v_leak + r * s, b) + r * (i - s) * part


class Neuron(Node):
    """I, IF, LI, LIF, CubaLI and CubaLIF: the voltage `v`, and the current `i` of those with synapses."""

    remembers, sized_by = True, "r"
    names: ClassVar[dict[str, tuple[str, ...]]] = {
        "I": ("r",),
        "IF": ("r", "v_threshold", "v_reset"),
        "LI": ("tau", "r", "v_leak"),
        "LIF": ("tau", "r", "v_leak", "v_threshold", "v_reset"),
        "CubaLI": ("tau_syn", "tau_mem", "r", "v_leak", "w_in"),
        "CubaLIF": ("tau_syn", "tau_mem", "r", "v_leak", "v_threshold", "v_reset", "w_in"),
    }

    def __init__(self, node: nir.NIRNode, name: str, settings: Settings, in_size: Shape) -> None:
        self.parameters = self.names[type(node).__name__]
        super().__init__(node, name, settings, in_size)
        for field in self.parameters:
            if self.value(field).shape != self.value("r").shape:
                raise NIRError(f"`{name}`: `{field}` and `r` differ in shape.")
            if field.startswith("tau"):
                self._check_time(field, name, settings)
        self.dt, self.method = settings.dt, settings.method
        self.reset, self.spk_fun = settings.reset, settings.spk_fun
        self.initial_values = {"v": self.value("v_leak") if "v_leak" in self.parameters else 0.0}
        if "w_in" in self.parameters:
            self.initial_values["i"] = 0.0

    def _check_time(self, field: str, name: str, settings: Settings) -> None:
        shortest = self.value(field).min(initial=np.inf)
        if shortest <= 0:
            raise NIRError(f"`{name}`: `{field}` is {shortest}; a time constant is above 0.")
        if settings.method != "exponential" and settings.dt > shortest * 1.001:
            raise NIRError(
                f"`{name}`: `{field}` is {shortest:g}, less than the time step {settings.dt:g}, with which "
                "Euler steps overshoot. Take a smaller `dt`, in the unit of the file (mostly seconds)."
            )

    def last(self) -> Array:
        """The output of the last step."""
        v: Array = self.v.value
        if "v_threshold" not in self.parameters:
            return v
        threshold, lowest = (self.for_units(name, v) for name in ("v_threshold", "v_reset"))
        # the surrogate sees the distance in units of the range of the voltage, as those of `braintrace.nn` do
        width = jnp.where(threshold > lowest, threshold - lowest, jnp.ones_like(lowest))
        return above(self.spk_fun, (v - threshold) / width)

    def update(self, x: Array) -> Array:
        v: Array = self.v.value
        after: Array | float = 0.0
        if "v_threshold" in self.parameters:
            z, v_reset = self.last(), self.for_units("v_reset", v)
            if self.reset == "hard":
                v = v + z * (v_reset - v)
            else:
                drop = z * (self.for_units("v_threshold", v) - v_reset)
                v, after = (v - drop, 0.0) if self.reset == "soft" else (v, drop)
        self.v.value = self._integrate(v, x) - after
        return self.last()

    def _integrate(self, v: Array, x: Array) -> Array:
        of = lambda name: self.for_units(name, x)
        if "v_leak" not in self.parameters:
            return v + self.dt * of("r") * x
        if "w_in" not in self.parameters:
            return relax(self.method, v, of("v_leak") + of("r") * x, self.dt / of("tau"))
        ratios = self.dt / of("tau_syn"), self.dt / of("tau_mem")
        i, s = self.i.value, of("w_in") * x
        self.i.value, v = relax_both(self.method, i, v, s, of("v_leak"), of("r"), *ratios)
        return v


class Delay(Node):
    """`y(t) = x(t - delay)`: the last inputs, one state for each step of the longest delay.

    States with the shape of the units belong to the group of the neuron that feeds them, so that traces pass
    through a delay without loss.
    """

    parameters, sized_by = ("delay",), "delay"

    def __init__(self, node: nir.NIRNode, name: str, settings: Settings, in_size: Shape) -> None:
        super().__init__(node, name, settings, in_size)
        if not isinstance(self.delay, np.ndarray):
            raise NIRError(f"`{name}`: a delay is a whole number of steps and cannot be learned.")
        steps = self.delay / settings.dt
        if np.any(steps < 0) or np.any(np.abs(steps - np.round(steps)) > 1e-3):
            raise NIRError(f"`{name}`: a delay is not a whole number of steps of {settings.dt:g}.")
        self.steps = np.round(steps).astype(int)
        self.foresees = bool(np.all(self.steps > 0))
        self.initial_values = {f"x{k}": 0.0 for k in range(1, self.steps.max(initial=0) + 1)}

    def last(self) -> Array:
        """The output of a step before its input is known, if all delays are of at least one step."""
        return self._read(self.x1.value)

    def _read(self, x: Array) -> Array:
        steps = np.expand_dims(self.steps, tuple(range(x.ndim - self.steps.ndim)))
        y = x
        for k, name in enumerate(self.initial_values, start=1):
            y = jnp.where(steps == k, getattr(self, name).value, y)
        return y

    def update(self, x: Array) -> Array:
        y, new = self._read(x), x
        for name in self.initial_values:
            state = getattr(self, name)
            state.value, new = new, state.value
        return y
