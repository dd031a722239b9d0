"""Resonate-and-fire neurons: spiking units that oscillate, each with a frequency of its own."""

from __future__ import annotations

import brainstate
import jax.numpy as jnp

from .._ops import element_wise
from .._types import Size, Value
from . import surrogate
from .cells import _as_row
from .dynamics import Dynamics
from .neurons import Spike


class BRF(Dynamics):
    """The balanced resonate-and-fire neuron (Higuchi et al., 2024), with complex potential `u + i v`.

        q[t] = gamma q[t-1] + z[t-1]        b[t] = p(omega) - |b_offset| - q[t]
        u[t] = u[t-1] + delta (b[t] u[t-1] - omega v[t-1] + I[t])
        v[t] = v[t-1] + delta (omega u[t-1] + b[t] v[t-1])
        z[t] = 1 where u[t] >= theta + q[t]

    `p(omega) = (-1 + sqrt(1 - (delta omega)^2)) / delta` is the boundary above which the oscillation grows.
    A spike raises the threshold and the damping by `q` for a while (smooth reset); the potential itself is
    not reset. `omega` and `b_offset` are learned. All states are coupled unit by unit: online gradients of
    a layer without recurrent weights are those of back-propagation through time.

    Args:
        in_size: Number of units.
        omega: Range of the initial angular frequencies; `delta * omega` stays below 1.
        b_offset: Range of the initial damping.
        theta: Threshold at rest.
        gamma: Decay of `q` in a step.
        delta: Length of a step, in the time unit of `omega`.
        spk_fun: Spike function with a surrogate derivative.

    >>> import jax.numpy as jnp
    >>> neuron = BRF(1, omega=(10.0, 10.0), b_offset=(1.0, 1.0))
    >>> _ = brainstate.nn.init_all_states(neuron)
    >>> spikes = [float(neuron(30.0 * jnp.ones(1))[0]) for _ in range(60)]
    >>> sum(spikes) > 1
    True
    """

    def __init__(
        self,
        in_size: Size,
        omega: tuple[float, float] = (5.0, 10.0),
        b_offset: tuple[float, float] = (2.0, 3.0),
        theta: float = 1.0,
        gamma: float = 0.9,
        delta: float = 0.01,
        spk_fun: Spike = surrogate.sigmoid(),
        name: str | None = None,
    ) -> None:
        super().__init__(in_size, in_size, name, {"u": 0.0, "v": 0.0, "q": 0.0})
        if not 0 < delta * max(omega) < 1:
            raise ValueError(
                f"`delta * omega` must lie between 0 and 1, for frequencies above that have no stable "
                f"damping; it is {delta * max(omega):g}. Take a smaller `delta`."
            )
        self.theta, self.gamma, self.delta, self.spk_fun = theta, gamma, delta, spk_fun
        draw, dtype = brainstate.random.uniform, brainstate.environ.dftype()
        self.omega, self.b_offset = (
            brainstate.ParamState(draw(*between, size=self.out_size).astype(dtype))
            for between in (omega, b_offset)
        )

    def get_spike(self) -> Value:
        """The spikes of the last step."""
        return self.spk_fun(self.u.value - self.theta - self.q.value)

    def update(self, *inputs: Value) -> Value:
        u, v, delta = self.u.value, self.v.value, self.delta
        omega = _as_row(element_wise(self.omega.value), u)
        offset = _as_row(element_wise(self.b_offset.value, jnp.abs), u)
        q = self.gamma * self.q.value + self.get_spike()
        b = (jnp.sqrt(1 - (delta * omega) ** 2) - 1) / delta - offset - q
        self.u.value = u + delta * (b * u - omega * v + sum(inputs))
        self.v.value = v + delta * (omega * u + b * v)
        self.q.value = q
        return self.get_spike()
