"""The linear recurrent unit: a diagonal complex recurrence, for which online gradients are exact."""

from __future__ import annotations

import brainstate
import jax.numpy as jnp
from brainstate.nn import init

from .._ops import element_wise
from .._types import Array, Initializer, Value
from .cells import _as_row, _Cell, _join, _split
from .linear import Linear


def draw_polar(
    num_units: int, r_min: float, r_max: float, max_phase: float
) -> tuple[Array, brainstate.ParamState, brainstate.ParamState]:
    """Draw complex numbers `r exp(i θ)`; return `r^2` and the parameters `log(-log(r))` and `log(θ)`."""
    draw, dtype = brainstate.random.uniform, brainstate.environ.dftype()
    tiny = jnp.finfo(dtype).tiny  # a modulus and a phase of 0 have no logarithm
    square = r_min**2 + (r_max**2 - r_min**2) * draw(size=(num_units,)).astype(dtype)
    nu = jnp.log(-0.5 * jnp.log(square + tiny))
    theta = jnp.log(max_phase * draw(size=(num_units,)).astype(dtype) + tiny)
    return square, brainstate.ParamState(nu), brainstate.ParamState(theta)


class LRUCell(_Cell):
    """`h = lambda * h + gamma * (B x)`, `y = Re(C h) + D * x`, with complex `h` of `d_hidden` units.

    `lambda = exp(-exp(nu) + i exp(theta))` lies inside the unit circle; at first its modulus is between
    `r_min` and `r_max`, its phase between 0 and `max_phase`, and `gamma = sqrt(1 - |lambda|^2)`. Real and
    imaginary parts are two states, `re` and `im`; the columns of `B` and the rows of `C` are (re, im), with
    the sign of the imaginary part of `C` turned. x and y are (..., d_model).

    Online gradients equal those of back-propagation through time.

    >>> import jax.numpy as jnp
    >>> cell = LRUCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(cell, batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 3)
    """

    state_names = ("re", "im")

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 6.28,
        state_init: Initializer = init.ZeroInit(),
        name: str | None = None,
    ) -> None:
        super().__init__(d_model, d_model, state_init, name)
        self.d_model, self.d_hidden, self.state_size = d_model, d_hidden, d_hidden
        square, self.nu, self.theta = draw_polar(d_hidden, r_min, r_max, max_phase)
        self.gamma = brainstate.ParamState(0.5 * jnp.log1p(-square))
        self.B = Linear(d_model, 2 * d_hidden, w_init=init.Normal((2 * d_model) ** -0.5), b_init=None)
        self.C = Linear(2 * d_hidden, d_model, w_init=init.Normal(d_hidden**-0.5), b_init=None)
        self.D = brainstate.ParamState(init.Normal(1.0)((d_model,)))

    def update(self, x: Value) -> Value:
        re, im = self.re.value, self.im.value
        modulus = _as_row(element_wise(self.nu.value, lambda nu: jnp.exp(-jnp.exp(nu))), re)
        phase = _as_row(element_wise(self.theta.value, jnp.exp), re)
        gamma = _as_row(element_wise(self.gamma.value, jnp.exp), re)
        cos, sin = modulus * jnp.cos(phase), modulus * jnp.sin(phase)
        in_re, in_im = _split(self.B(x), 2)
        self.re.value = cos * re - sin * im + gamma * in_re
        self.im.value = sin * re + cos * im + gamma * in_im
        D = _as_row(element_wise(self.D.value), x)
        return self.C(_join(self.re.value, self.im.value)) + D * x
