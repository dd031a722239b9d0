"""Leaky readouts: the last layer of a network whose output is integrated over time."""

from __future__ import annotations

import brainstate
import brainunit as u
from brainstate.nn import init

from .._ops import matmul
from .._types import Initializer, Size, Value
from . import surrogate
from .dynamics import Dynamics, decay, zero_like
from .neurons import Neuron, Reset, Spike, leaky_step, soft_reset


class LeakyRateReadout(Dynamics):
    """`r = exp(-dt / tau) r + x @ weight`, with `dt` of `brainstate.environ`.

    Online gradients equal those of back-propagation through time. `r_init` is an alias of `r_initializer`.

    >>> import jax.numpy as jnp
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     readout = LeakyRateReadout(3, 2)
    ...     _ = brainstate.nn.init_all_states(readout, batch_size=5)
    ...     readout(jnp.ones((5, 3))).shape
    (5, 2)
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        tau: Value = 5.0 * u.ms,
        w_init: Initializer = init.KaimingNormal(),
        r_initializer: Initializer = init.ZeroInit(),
        name: str | None = None,
        param_type: type = brainstate.ParamState,
        r_init: Initializer = None,
    ) -> None:
        super().__init__(in_size, out_size, name, {"r": r_initializer if r_init is None else r_init})
        self.tau = tau
        self.weight = param_type(init.param(w_init, (self.in_size[-1], self.out_size[-1]), allow_none=False))

    def update(self, x: Value) -> Value:
        self.r.value = self.r.value * decay(self.tau) + matmul(x, self.weight.value)
        return self.r.value


class LeakySpikeReadout(Neuron):
    """A leaky readout that spikes: `tau dV/dt = x @ weight - V`, and a spike where `V >= V_th`.

    Online gradients equal those of back-propagation through time. Options are those of `LIF`; if `V_th` has
    a unit, the weights must have the same.

    >>> import jax.numpy as jnp
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     readout = LeakySpikeReadout(3, 2)
    ...     _ = brainstate.nn.init_all_states(readout, batch_size=5)
    ...     readout(jnp.ones((5, 3))).shape
    (5, 2)
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        tau: Value = 5.0 * u.ms,
        V_th: Value = 1.0,
        V_reset: Value = None,
        w_init: Initializer = init.KaimingNormal(),
        V_initializer: Initializer = None,
        spk_fun: Spike = surrogate.sigmoid(),
        reset: Reset = soft_reset,
        reset_gradient: bool = True,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ) -> None:
        start = zero_like(V_th) if V_initializer is None else V_initializer
        super().__init__(in_size, out_size, V_th, V_reset, spk_fun, reset, reset_gradient, name, {"V": start})
        self.tau, self.V_th = tau, V_th
        self.weight = param_type(init.param(w_init, (self.in_size[-1], self.out_size[-1]), allow_none=False))

    def threshold(self) -> Value:
        return self.V_th

    def update(self, x: Value) -> Value:
        V = self.after_reset(self.get_spike(), self.V_th)
        current = matmul(x, self.weight.value)
        self.V.value = leaky_step(V, zero_like(V), 1.0, self.tau, [current])
        return self.get_spike()
