"""Spiking neurons: integrate and fire, step by step.

The state is the voltage at the end of a step, before any reset; the spike of a step is a function of the
state, and no state itself. The next step begins with the reset, then integrates its equations over `dt` (of
`brainstate.environ`) with constant inputs, exactly where they are linear:

    tau dV/dt = f - k V        V <- f/k + (V - f/k) exp(-k dt / tau)

Inputs are currents or, from `COBA`, conductances, whose current depends on the voltage; several add up. All
states of a neuron, and of synapses that feed it, are coupled unit by unit: traces of input weights are exact.

With `R=1` a step adds only about `dt / tau` of an input to the voltage, and units behind a default `Linear`
hardly ever fire. With `R=tau/dt` each input adds its weight: at `dt` of 1 ms, `LIF(n, R=5.0)` and `ALIF` fire
in 3 to 25 % of the steps for standard normal inputs and for spikes at rates of 10 to 50 %.

The reset is differentiated by default, as in SpikingJelly and brainpy. With `reset_gradient=False`, as in
snnTorch and Norse, the spike is a constant in it. `LIF` and `IF` with `soft_reset` and one `tau` for all
units are then linear in their inputs, and `D_RTRL` stores filtered inputs in place of a trace per weight.

Voltages and times may have units or not, as long as all fit together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import brainstate
import brainunit as u
import jax

from .._types import Initializer, Options, Size, Value
from . import surrogate
from .dynamics import Dynamics, decay, with_unit, zero_like

Spike = Callable[[Value], Value]
Reset = Callable[[Value, Value, Value, Value], Value]


class Conductance(NamedTuple):
    """An input whose current depends on the voltage: `g (E - V)`."""

    g: Value
    E: Value


def soft_reset(V: Value, z: Value, V_th: Value, V_reset: Value) -> Value:
    """Lower the voltage at a spike by `V_th - V_reset`.

    >>> soft_reset(1.5, 1.0, V_th=1.0, V_reset=0.0)
    0.5
    """
    return V - z * (V_th - V_reset)


def hard_reset(V: Value, z: Value, V_th: Value, V_reset: Value) -> Value:
    """Set the voltage at a spike to `V_reset`.

    >>> hard_reset(1.5, 1.0, V_th=1.0, V_reset=0.0)
    0.0
    """
    return V - z * (V - V_reset)


class Neuron(Dynamics):
    """Base class of neurons, which fire and are reset; subclasses define `threshold`.

    `spk_fun` takes the distance of the voltage from the threshold, divided by `V_th - V_reset`.
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        V_th: Value,
        V_reset: Value,
        spk_fun: Spike,
        reset: Reset,
        reset_gradient: bool,
        name: str | None,
        initial_values: Options,
    ) -> None:
        super().__init__(in_size, out_size, name, initial_values)
        self.V_reset = zero_like(V_th) if V_reset is None else V_reset
        self.V_range = V_th - self.V_reset
        self.spk_fun, self.reset, self.reset_gradient = spk_fun, reset, reset_gradient

    def threshold(self) -> Value:
        raise NotImplementedError

    def get_spike(self) -> Value:
        """The spikes of the last step."""
        return self.spk_fun((self.V.value - self.threshold()) / self.V_range)

    def after_reset(self, z: Value, V_th: Value) -> Value:
        """The voltage at the start of a step, reset by the spikes `z` of the last step."""
        z = z if self.reset_gradient else jax.lax.stop_gradient(z)
        return self.reset(self.V.value, z, V_th, self.V_reset)


def leaky_step(V: Value, V_rest: Value, R: Value, tau: Value, inputs: Value) -> Value:
    """Integrate `tau dV/dt = V_rest - V + R I(V)` over one step."""
    f, k = V_rest, 1.0
    for i in inputs:
        if isinstance(i, Conductance):
            f, k = f + R * i.g * i.E, k + R * i.g
        else:
            f = f + R * i
    return f / k + (V - f / k) * decay(tau / k)


class IF(Neuron):
    """Integrate and fire, without a leak: `tau dV/dt = R I(V)`, and a spike where `V >= V_th`.

    `V_reset` and `V_initializer` default to zero in the unit of `V_th`. `reset` is `soft_reset`,
    `hard_reset` or a function like them; `reset_gradient=False` treats the spike as a constant in it.

    >>> import jax.numpy as jnp
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     neuron = IF(1, tau=2.0 * u.ms)
    ...     _ = brainstate.nn.init_all_states(neuron)
    ...     [float(neuron(jnp.ones(1))[0]) for _ in range(4)]
    [0.0, 1.0, 0.0, 1.0]
    """

    def __init__(
        self,
        in_size: Size,
        R: Value = 1.0,
        tau: Value = 5.0 * u.ms,
        V_th: Value = 1.0,
        V_reset: Value = None,
        V_initializer: Initializer = None,
        spk_fun: Spike = surrogate.sigmoid(),
        reset: Reset = soft_reset,
        reset_gradient: bool = True,
        name: str | None = None,
    ) -> None:
        start = zero_like(V_th) if V_initializer is None else V_initializer
        super().__init__(in_size, in_size, V_th, V_reset, spk_fun, reset, reset_gradient, name, {"V": start})
        self.R, self.tau, self.V_th = R, tau, V_th

    def threshold(self) -> Value:
        return self.V_th

    def update(self, *inputs: Value) -> Value:
        V = self.after_reset(self.get_spike(), self.V_th)
        f, k = zero_like(V), zero_like(1.0)
        for i in inputs:
            if isinstance(i, Conductance):
                f, k = f + self.R * i.g * (i.E - V), k + self.R * i.g
            else:
                f = f + self.R * i
        steps = brainstate.environ.get_dt() / self.tau
        self.V.value = V + f * steps * u.math.exprel(-k * steps)
        return self.get_spike()


class LIF(Neuron):
    """Leaky integrate and fire: `tau dV/dt = V_rest - V + R I(V)`, and a spike where `V >= V_th`.

    `V_reset` and `V_rest` default to zero in the unit of `V_th`, and `V_initializer` to `V_rest`. `reset` is
    `soft_reset`, `hard_reset` or a function like them; `reset_gradient=False` treats the spike as a constant
    in it. After a default `Linear`, use `R=tau/dt`: with a smaller `R`, units hardly ever fire.

    >>> import jax.numpy as jnp
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     neuron = LIF(1, tau=2.0 * u.ms, V_th=10.0 * u.mV)
    ...     _ = brainstate.nn.init_all_states(neuron)
    ...     [float(neuron(20.0 * u.mV * jnp.ones(1))[0]) for _ in range(4)]
    [0.0, 1.0, 0.0, 1.0]
    """

    def __init__(
        self,
        in_size: Size,
        R: Value = 1.0,
        tau: Value = 5.0 * u.ms,
        V_th: Value = 1.0,
        V_reset: Value = None,
        V_rest: Value = None,
        V_initializer: Initializer = None,
        spk_fun: Spike = surrogate.sigmoid(),
        reset: Reset = soft_reset,
        reset_gradient: bool = True,
        name: str | None = None,
    ) -> None:
        V_rest = zero_like(V_th) if V_rest is None else V_rest
        start = V_rest if V_initializer is None else V_initializer
        super().__init__(in_size, in_size, V_th, V_reset, spk_fun, reset, reset_gradient, name, {"V": start})
        self.R, self.tau, self.V_th, self.V_rest = R, tau, V_th, V_rest

    def threshold(self) -> Value:
        return self.V_th

    def update(self, *inputs: Value) -> Value:
        V = self.after_reset(self.get_spike(), self.V_th)
        self.V.value = leaky_step(V, self.V_rest, self.R, self.tau, inputs)
        return self.get_spike()


class ALIF(Neuron):
    """A `LIF` neuron with an adaptive threshold: `tau_a da/dt = -a`, and a spike where `V >= V_th + beta a`.

    Each spike adds one to `a`. Options are those of `LIF`; `beta` defaults to 0.1 in the unit of `V_th`.

    >>> import jax.numpy as jnp
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     neuron = ALIF(1, tau=2.0 * u.ms, beta=1.0)
    ...     _ = brainstate.nn.init_all_states(neuron)
    ...     [float(neuron(2.0 * jnp.ones(1))[0]) for _ in range(4)]
    [0.0, 1.0, 0.0, 0.0]
    """

    def __init__(
        self,
        in_size: Size,
        R: Value = 1.0,
        tau: Value = 5.0 * u.ms,
        tau_a: Value = 100.0 * u.ms,
        V_th: Value = 1.0,
        V_reset: Value = None,
        V_rest: Value = None,
        beta: Value = None,
        V_initializer: Initializer = None,
        a_initializer: Initializer = 0.0,
        spk_fun: Spike = surrogate.sigmoid(),
        reset: Reset = soft_reset,
        reset_gradient: bool = True,
        name: str | None = None,
    ) -> None:
        V_rest = zero_like(V_th) if V_rest is None else V_rest
        values = {"V": V_rest if V_initializer is None else V_initializer, "a": a_initializer}
        super().__init__(in_size, in_size, V_th, V_reset, spk_fun, reset, reset_gradient, name, values)
        self.R, self.tau, self.tau_a, self.V_th, self.V_rest = R, tau, tau_a, V_th, V_rest
        self.beta = with_unit(0.1, V_th) if beta is None else beta

    def threshold(self) -> Value:
        return self.V_th + self.beta * self.a.value

    def update(self, *inputs: Value) -> Value:
        z = self.get_spike()
        V = self.after_reset(z, self.V_th)
        self.V.value = leaky_step(V, self.V_rest, self.R, self.tau, inputs)
        self.a.value = (self.a.value + z) * decay(self.tau_a)
        return self.get_spike()


class GIF(Neuron):
    """The generalised integrate-and-fire neuron (Mihalas & Niebur, 2009), with a threshold and two currents:

        tau dV/dt = V_rest - V + R (I(V) + I1 + I2)        dIj/dt = -kj Ij
        dV_th/dt = a (V - V_rest) - b (V_th - V_th_inf)

    It fires where `V >= V_th`; then `Ij <- Rj Ij + Aj`, `V_th <- max(V_th, V_th_reset)`, and `V` is reset.
    `V_rest` and `V_reset` default to zero in the unit of `V_th_inf`, `V_th_reset` to `V_th_inf`, and `A1` and
    `A2` to zero. The states start at rest.

    >>> import jax.numpy as jnp
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     neuron = GIF(1, tau=2.0 * u.ms, A2=-1.0)
    ...     _ = brainstate.nn.init_all_states(neuron)
    ...     [float(neuron(2.0 * jnp.ones(1))[0]) for _ in range(4)]
    [0.0, 1.0, 0.0, 0.0]
    """

    def __init__(
        self,
        in_size: Size,
        R: Value = 1.0,
        tau: Value = 20.0 * u.ms,
        V_rest: Value = None,
        V_reset: Value = None,
        V_th_inf: Value = 1.0,
        V_th_reset: Value = None,
        a: Value = 0.0 / u.ms,
        b: Value = 0.01 / u.ms,
        k1: Value = 0.2 / u.ms,
        k2: Value = 0.02 / u.ms,
        R1: Value = 0.0,
        R2: Value = 1.0,
        A1: Value = None,
        A2: Value = None,
        spk_fun: Spike = surrogate.sigmoid(),
        reset: Reset = hard_reset,
        reset_gradient: bool = True,
        name: str | None = None,
    ) -> None:
        V_rest = zero_like(V_th_inf) if V_rest is None else V_rest
        none = zero_like(V_th_inf / R)
        values = {"V": V_rest, "I1": none, "I2": none, "V_th": V_th_inf}
        super().__init__(in_size, in_size, V_th_inf, V_reset, spk_fun, reset, reset_gradient, name, values)
        self.R, self.tau, self.V_rest, self.V_th_inf = R, tau, V_rest, V_th_inf
        self.V_th_reset = V_th_inf if V_th_reset is None else V_th_reset
        self.a, self.b, self.k1, self.k2, self.R1, self.R2 = a, b, k1, k2, R1, R2
        self.A1, self.A2 = (none if A is None else A for A in (A1, A2))

    def threshold(self) -> Value:
        return self.V_th.value

    def update(self, *inputs: Value) -> Value:
        z, I1, I2, V_th = self.get_spike(), self.I1.value, self.I2.value, self.V_th.value
        V = self.after_reset(z, V_th)
        I1 = I1 + z * (self.R1 * I1 + self.A1 - I1)
        I2 = I2 + z * (self.R2 * I2 + self.A2 - I2)
        V_th = V_th + z * (u.math.maximum(V_th, self.V_th_reset) - V_th)
        dt = brainstate.environ.get_dt()
        slope = self.a * (V - self.V_rest) - self.b * (V_th - self.V_th_inf)
        self.V.value = leaky_step(V, self.V_rest, self.R, self.tau, (*inputs, I1, I2))
        self.I1.value = I1 * u.math.exp(-self.k1 * dt)
        self.I2.value = I2 * u.math.exp(-self.k2 * dt)
        self.V_th.value = V_th + slope * dt * u.math.exprel(-self.b * dt)
        return self.get_spike()
