"""Synapses: the time course of the response to a weighted spike, and how it drives a neuron.

The input of a synapse is the weighted spikes of the step, its state has the shape of the neurons that it
drives: `LIF(n)(COBA(E)(Expon(n)(Linear(m, n)(spikes))))` is one group of states.

Short-term plasticity comes before the weights: `Linear(m, n)(STP(m)(spikes))`. Its state belongs to the
presynaptic neurons, and its output is the release of each of them.
"""

from __future__ import annotations

import brainstate
import brainunit as u
import numpy as np
from brainstate.nn import init

from .._types import Initializer, Size, Value
from .dynamics import Dynamics, decay
from .neurons import Conductance


class Expon(Dynamics):
    """`tau dg/dt = -g`, and the input adds to `g`: a kernel `exp(-t / tau)`.

    >>> import jax.numpy as jnp
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     synapse = Expon(1, tau=2.0 * u.ms)
    ...     _ = brainstate.nn.init_all_states(synapse)
    ...     [round(float(synapse(jnp.array([x]))[0]), 3) for x in (1.0, 0.0, 0.0)]
    [1.0, 0.607, 0.368]
    """

    def __init__(
        self,
        in_size: Size,
        tau: Value = 8.0 * u.ms,
        g_initializer: Initializer = init.ZeroInit(),
        name: str | None = None,
    ) -> None:
        super().__init__(in_size, in_size, name, {"g": g_initializer})
        self.tau = tau

    def update(self, x: Value) -> Value:
        self.g.value = self.g.value * decay(self.tau) + x
        return self.g.value


class DualExpon(Dynamics):
    """Two exponentials: `g = A (g_decay - g_rise)`, a kernel `A (exp(-t/tau_decay) - exp(-t/tau_rise))`.

    By default the amplitude `A` is such that the kernel peaks at one.

    >>> import jax.numpy as jnp
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     synapse = DualExpon(1, tau_decay=4.0 * u.ms, tau_rise=2.0 * u.ms, amplitude=1.0)
    ...     _ = brainstate.nn.init_all_states(synapse)
    ...     [round(float(synapse(jnp.array([x]))[0]), 3) for x in (1.0, 0.0, 0.0)]
    [0.0, 0.172, 0.239]
    """

    def __init__(
        self,
        in_size: Size,
        tau_decay: Value = 10.0 * u.ms,
        tau_rise: Value = 1.0 * u.ms,
        amplitude: Value = None,
        g_initializer: Initializer = init.ZeroInit(),
        name: str | None = None,
    ) -> None:
        super().__init__(in_size, in_size, name, {"g_decay": g_initializer, "g_rise": g_initializer})
        self.tau_decay, self.tau_rise = tau_decay, tau_rise
        self.amplitude = _one_over_peak(tau_decay / tau_rise) if amplitude is None else amplitude

    def update(self, x: Value) -> Value:
        self.g_decay.value = self.g_decay.value * decay(self.tau_decay) + x
        self.g_rise.value = self.g_rise.value * decay(self.tau_rise) + x
        return self.amplitude * (self.g_decay.value - self.g_rise.value)


def _one_over_peak(ratio: Value) -> Value:
    """The inverse of the kernel's peak at `t = tau_decay log(ratio) / (ratio - 1)`."""
    if np.any(np.asarray(ratio) == 1.0):
        raise ValueError("`tau_decay` and `tau_rise` must differ; with one time constant use `Alpha`.")
    return ratio ** (ratio / (ratio - 1)) / (ratio - 1)


class Alpha(Dynamics):
    """`tau dg/dt = h - g`, `tau dh/dt = -h`: a kernel `(t / tau) exp(1 - t / tau)`, which peaks at one.

    >>> import jax.numpy as jnp
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     synapse = Alpha(1, tau=2.0 * u.ms)
    ...     _ = brainstate.nn.init_all_states(synapse)
    ...     [round(float(synapse(jnp.array([x]))[0]), 3) for x in (1.0, 0.0, 0.0)]
    [0.0, 0.824, 1.0]
    """

    def __init__(
        self,
        in_size: Size,
        tau: Value = 8.0 * u.ms,
        g_initializer: Initializer = init.ZeroInit(),
        name: str | None = None,
    ) -> None:
        super().__init__(in_size, in_size, name, {"g": g_initializer, "h": g_initializer})
        self.tau = tau

    def update(self, x: Value) -> Value:
        g, h, kept = self.g.value, self.h.value, decay(self.tau)
        self.g.value = (g + h * (brainstate.environ.get_dt() / self.tau)) * kept
        self.h.value = h * kept + np.e * x
        return self.g.value


class STP(Dynamics):
    """Short-term plasticity (Tsodyks & Markram): spikes `z` make `u` rise and use up resources `x`.

        u <- u exp(-dt / tau_f) + z U (1 - u)        x <- 1 - (1 - x) exp(-dt / tau_d) - z u x

    The output is `z u x`, with `u` after the spike and `x` before it; `x` starts at one.

    >>> import jax.numpy as jnp
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     synapse = STP(1, U=0.5)
    ...     _ = brainstate.nn.init_all_states(synapse)
    ...     [round(float(synapse(jnp.array([z]))[0]), 3) for z in (1.0, 0.0, 1.0)]
    [0.75, 0.0, 0.225]
    """

    def __init__(
        self,
        in_size: Size,
        U: Value = 0.15,
        tau_f: Value = 1500.0 * u.ms,
        tau_d: Value = 200.0 * u.ms,
        name: str | None = None,
    ) -> None:
        super().__init__(in_size, in_size, name, {"u": U, "x": 1.0})
        self.U, self.tau_f, self.tau_d = U, tau_f, tau_d

    def update(self, z: Value) -> Value:
        old_u, old_x = self.u.value, self.x.value
        use = old_u * decay(self.tau_f) + z * self.U * (1 - old_u)
        left = 1 - (1 - old_x) * decay(self.tau_d)
        self.u.value, self.x.value = use, left - z * use * old_x
        return z * use * left


class STD(Dynamics):
    """Short-term depression: each spike `z` uses up a part `U` of the resources `x`.

        x <- 1 - (1 - x) exp(-dt / tau) - z U x

    The output is `z x`, with `x` before the spike; `x` starts at one.

    >>> import jax.numpy as jnp
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     synapse = STD(1, U=0.5)
    ...     _ = brainstate.nn.init_all_states(synapse)
    ...     [round(float(synapse(jnp.array([z]))[0]), 3) for z in (1.0, 0.0, 1.0)]
    [1.0, 0.0, 0.505]
    """

    def __init__(
        self, in_size: Size, tau: Value = 200.0 * u.ms, U: Value = 0.07, name: str | None = None
    ) -> None:
        super().__init__(in_size, in_size, name, {"x": 1.0})
        self.tau, self.U = tau, U

    def update(self, z: Value) -> Value:
        left = 1 - (1 - self.x.value) * decay(self.tau)
        self.x.value = left - z * self.U * self.x.value
        return z * left


class CUBA(brainstate.nn.Module):
    """Current-based coupling, `I = scale g`.

    >>> import jax.numpy as jnp
    >>> CUBA(2.0)(jnp.ones(1)).tolist()
    [2.0]
    """

    def __init__(self, scale: Value = 1.0, name: str | None = None) -> None:
        super().__init__(name=name)
        self.scale = scale

    def update(self, g: Value) -> Value:
        return self.scale * g


class COBA(brainstate.nn.Module):
    """Conductance-based coupling, `I(V) = g (E - V)`, for a neuron to integrate.

    >>> import jax.numpy as jnp
    >>> COBA(E=3.0)(jnp.ones(1)).E
    3.0
    """

    def __init__(self, E: Value, name: str | None = None) -> None:
        super().__init__(name=name)
        self.E = E

    def update(self, g: Value) -> Conductance:
        return Conductance(g, self.E)
