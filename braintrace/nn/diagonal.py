"""Cells with an element-wise recurrence, for which online gradients are exact, and blocks to stack them.

Each unit reads its own past only, so that D-RTRL keeps all of `dh[t]/dθ`: online gradients of one layer are
those of back-propagation through time. In a stack, parameters of a lower layer also act through the states of
higher layers; `D_RTRL(model, across='layers')` follows these paths too.

`*` is element by element, `s` the logistic function.
"""

from __future__ import annotations

import math

import brainstate
import jax
import jax.numpy as jnp
from brainstate.nn import init, sigmoid

from .._ops import element_wise
from .._types import Activation, Array, Initializer, Model, PyTree, Value
from .cells import _as_row, _Cell, _function, _join, _sized, _split
from .linear import Linear


class LRUCell(_Cell):
    """`h = lambda * h + gamma * (B x)`, `y = Re(C h) + D * x`, with complex `h` of `d_hidden` units.

    `lambda = exp(-exp(nu) + i exp(theta))` lies inside the unit circle; at first its modulus is between
    `r_min` and `r_max`, its phase between 0 and `max_phase`, and `gamma = sqrt(1 - |lambda|^2)`. Real and
    imaginary parts are two states, `re` and `im`; the columns of `B` and the rows of `C` are (re, im), the
    imaginary part of `C` negated. x and y are (..., d_model).

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
        square, self.nu, self.theta = _draw_polar(d_hidden, r_min, r_max, max_phase)
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


def _draw_polar(
    num_units: int, r_min: float, r_max: float, max_phase: float
) -> tuple[Array, brainstate.ParamState, brainstate.ParamState]:
    """Draw complex numbers `r exp(i θ)`; return `r^2` and the parameters `log(-log(r))` and `log(θ)`."""
    draw, dtype = brainstate.random.uniform, brainstate.environ.dftype()
    tiny = jnp.finfo(dtype).tiny  # a modulus and a phase of 0 have no logarithm
    square = r_min**2 + (r_max**2 - r_min**2) * draw(size=(num_units,)).astype(dtype)
    nu = jnp.log(-0.5 * jnp.log(square + tiny))
    theta = jnp.log(max_phase * draw(size=(num_units,)).astype(dtype) + tiny)
    return square, brainstate.ParamState(nu), brainstate.ParamState(theta)


class RTUCell(_Cell):
    """A recurrent trace unit (Elelimy et al., 2024): a complex diagonal recurrence in real numbers.

        re[t] = f(r cos(θ) * re[t-1] - r sin(θ) * im[t-1] + sqrt(1 - r^2) * (W_re x[t]))
        im[t] = f(r sin(θ) * re[t-1] + r cos(θ) * im[t-1] + sqrt(1 - r^2) * (W_im x[t]))
        y[t] = [re[t], im[t]]        r = exp(-exp(nu))        θ = exp(theta)

    That is the non-linear form. In the linear form, `f` is applied to the output instead: the recurrence is
    linear, and `y = f([re, im])`. Unlike in `LRUCell`, the input gain is a function of `r`, and the output
    keeps both parts of the state. Online gradients equal those of back-propagation through time.

    Args:
        num_in: Size of the input.
        num_units: Number of complex units; the output has size `2 * num_units`.
        activation: `f`, a function or the name of one in `brainstate.nn`.
        linear: Whether the recurrence is linear and `f` is applied to the output.
        r_min, r_max: Range of the initial modulus `r`.
        max_phase: Largest initial phase `θ`.
        w_init: Initialiser of the input weights.
        state_init: Initialiser of the states.

    >>> import jax.numpy as jnp
    >>> cell = RTUCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(cell, batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 8)
    """

    state_names = ("re", "im")

    def __init__(
        self,
        num_in: int,
        num_units: int,
        activation: Activation = "relu",
        linear: bool = True,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 6.28,
        w_init: Initializer = init.XavierNormal(),
        state_init: Initializer = init.ZeroInit(),
        name: str | None = None,
    ) -> None:
        super().__init__(num_in, 2 * num_units, state_init, name)
        self.num_units, self.state_size, self.linear = num_units, num_units, linear
        self.activation = _function(activation)
        _, self.nu, self.theta = _draw_polar(num_units, r_min, r_max, max_phase)
        self.W = Linear(num_in, 2 * num_units, w_init=w_init, b_init=None)

    def update(self, x: Value) -> Value:
        re, im = self.re.value, self.im.value
        rate = _as_row(element_wise(self.nu.value, jnp.exp), re)
        phase = _as_row(element_wise(self.theta.value, jnp.exp), re)
        cos, sin = (jnp.exp(-rate) * part for part in _cos_sin(phase))
        gain = jnp.sqrt(-jnp.expm1(-2 * rate))  # sqrt(1 - r^2), accurate where r is close to 1
        in_re, in_im = _split(self.W(x), 2)
        re, im = cos * re - sin * im + gain * in_re, sin * re + cos * im + gain * in_im
        if not self.linear:
            re, im = self.activation(re), self.activation(im)
        self.re.value, self.im.value = re, im
        y = _join(re, im)
        return self.activation(y) if self.linear else y


@jax.custom_jvp
def _cos_sin(angle: Value) -> tuple[Value, Value]:
    """The cosine and sine of an angle, by series in arithmetic that XLA vectorises.

    XLA on CPU calls the C library for every element of `jnp.cos` and `jnp.sin`, which takes most of an
    online step of 256 units (10 us, and 5 us with this function).
    """
    turns = jnp.round(angle / (2 * math.pi))
    x = (angle - 2 * math.pi * turns) / 8
    square = x * x
    sin, cos_minus_1 = 0.0 * square, 0.0 * square
    for n in range(12, -1, -2):  # Horner's scheme
        sin = 1 / math.factorial(n + 1) - square * sin
        cos_minus_1 = 1 / math.factorial(n + 2) - square * cos_minus_1
    sin, cos_minus_1 = x * sin, -square * cos_minus_1
    for _ in range(3):  # double the angle; cos - 1 keeps the digits that 1 would swallow
        sin, cos_minus_1 = 2 * sin * (1 + cos_minus_1), -2 * sin**2
    return 1 + cos_minus_1, sin


@_cos_sin.defjvp
def _(angles: PyTree, tangents: PyTree) -> PyTree:
    cos, sin = _cos_sin(*angles)
    (tangent,) = tangents
    return (cos, sin), (-sin * tangent, cos * tangent)


@_sized
class RGLRUCell(_Cell):
    """The real-gated linear recurrent unit of Griffin (De et al., 2024).

        r, i = s(W_a x + b_a), s(W_x x + b_x)        log a = -c r * softplus(-Λ)
        h[t] = a * h[t-1] + sqrt(1 - a^2) * (i * v)        v = W_v x + b_v

    `a = s(Λ)^(c r)` with `c = 8`. In Griffin, `v` is the input itself, which a linear layer has made as wide
    as the state; here that layer is part of the cell. Online gradients equal those of back-propagation
    through time.

    Args:
        num_in: Size of the input.
        num_out: Number of units.
        a_min, a_max: Range of the initial `s(Λ)^c`.
        w_init, b_init: Initialisers of the weights and biases of `W`, whose columns are (r, i, v).
        state_init: Initialiser of the state.

    >>> import jax.numpy as jnp
    >>> cell = RGLRUCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(cell, batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        a_min: float = 0.9,
        a_max: float = 0.999,
        w_init: Initializer = init.XavierNormal(),
        b_init: Initializer = init.ZeroInit(),
        state_init: Initializer = init.ZeroInit(),
        name: str | None = None,
    ) -> None:
        super().__init__(num_in, num_out, state_init, name)
        drawn = brainstate.random.uniform(size=(num_out,)).astype(brainstate.environ.dftype())
        a = (a_min + (a_max - a_min) * drawn) ** (1 / 8)
        self.Lambda = brainstate.ParamState(jnp.log(a) - jnp.log1p(-a))
        self.W = Linear(num_in, 3 * num_out, w_init=w_init, b_init=b_init)

    def update(self, x: Value) -> Value:
        r, i, v = _split(self.W(x), 3)
        rate = _as_row(element_wise(self.Lambda.value, lambda a: 8 * jax.nn.softplus(-a)), r)
        log_a = -rate * sigmoid(r)
        gain = jnp.sqrt(-jnp.expm1(2 * log_a))  # sqrt(1 - a^2), accurate where a is close to 1
        self.h.value = jnp.exp(log_a) * self.h.value + gain * sigmoid(i) * v
        return self.h.value


@_sized
class ELSTMCell(_Cell):
    """The element-wise LSTM, eLSTM (Irie et al., 2024).

        f = s(F x + b_f + w_f * c[t-1])        z = tanh(Z x + b_z + w_z * c[t-1])
        c[t] = f * c[t-1] + (1 - f) * z        o = s(O x + W_o c[t] + b_o)        y[t] = o * c[t]

    The recurrent weights `w_f`, `w_z` are vectors. `O` and `W_o` read the new state and need no trace. Online
    gradients equal those of back-propagation through time.

    Args:
        num_in: Size of the input.
        num_out: Number of units.
        w_init, b_init: Initialisers of the weights and biases of `Wfz` (columns f, z) and of `Wo`.
        recurrent_init: Initialiser of `wf` and `wz`.
        state_init: Initialiser of the state `c`.

    >>> import jax.numpy as jnp
    >>> cell = ELSTMCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(cell, batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 4)
    """

    state_names = ("c",)

    def __init__(
        self,
        num_in: int,
        num_out: int,
        w_init: Initializer = init.XavierNormal(),
        b_init: Initializer = init.ZeroInit(),
        recurrent_init: Initializer = init.Normal(0.1),
        state_init: Initializer = init.ZeroInit(),
        name: str | None = None,
    ) -> None:
        super().__init__(num_in, num_out, state_init, name)
        self.Wfz = Linear(num_in, 2 * num_out, w_init=w_init, b_init=b_init)
        self.wf = brainstate.ParamState(init.param(recurrent_init, [num_out]))
        self.wz = brainstate.ParamState(init.param(recurrent_init, [num_out]))
        self.Wo = Linear(num_in + num_out, num_out, w_init=w_init, b_init=b_init)

    def update(self, x: Value) -> Value:
        c = self.c.value
        wf, wz = (_as_row(element_wise(w.value), c) for w in (self.wf, self.wz))
        f, z = _split(self.Wfz(x), 2)
        f, z = sigmoid(f + wf * c), jnp.tanh(z + wz * c)
        self.c.value = c = f * c + (1 - f) * z
        return sigmoid(self.Wo(_join(x, c))) * c


class DiagonalBlock(brainstate.nn.Module):
    """A residual block around a diagonal cell: norm, cell, gate and MLP, as in the blocks of Griffin.

        n = norm(x)        y = x + W_out (cell(n) * gelu(W_gate n))        z = y + W_down gelu(W_up norm(y))

    `norm(x) = x / rms(x)` has no gain of its own, because each linear layer after it has one for every
    input. Blocks stack, between a layer that sets the width and a readout. With a diagonal cell, online
    gradients of the stack are exact under `D_RTRL(model, across='layers')`.

    Args:
        d_model: Size of input and output.
        cell: A cell with inputs of size `d_model`; its output may have any size.
        num_hidden: Width of the MLP, `2 * d_model` by default.
        w_init: Initialiser of the weights of the linear layers.

    Raises:
        ValueError: The cell's input is not of size `d_model`.

    >>> import jax.numpy as jnp
    >>> blocks = [DiagonalBlock(8, RTUCell(8, 4)) for _ in range(2)]
    >>> model = brainstate.nn.Sequential(Linear(3, 8), *blocks, Linear(8, 2))
    >>> _ = brainstate.nn.init_all_states(model, batch_size=5)
    >>> model(jnp.ones((5, 3))).shape
    (5, 2)
    """

    def __init__(
        self,
        d_model: int,
        cell: Model,
        num_hidden: int | None = None,
        w_init: Initializer = init.XavierNormal(),
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if tuple(cell.in_size) != (d_model,):
            raise ValueError(
                f"A block of size {d_model} needs a cell with inputs of that size; "
                f"{type(cell).__name__} has inputs of size {tuple(cell.in_size)}."
            )
        (width,) = cell.out_size
        num_hidden = num_hidden or 2 * d_model
        self.in_size = self.out_size = (d_model,)
        self.cell = cell
        self.gate = Linear(d_model, width, w_init=w_init)
        self.out = Linear(width, d_model, w_init=w_init)
        self.up = Linear(d_model, num_hidden, w_init=w_init)
        self.down = Linear(num_hidden, d_model, w_init=w_init)

    def update(self, x: Value) -> Value:
        n = _norm(x)
        y = x + self.out(self.cell(n) * jax.nn.gelu(self.gate(n)))
        return y + self.down(jax.nn.gelu(self.up(_norm(y))))


def _norm(x: Value) -> Value:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
