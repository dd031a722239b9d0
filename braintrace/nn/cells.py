"""Recurrent cells: one step of a recurrent network, with weights that are learned online.

Gates that share an input share one product, split afterwards. `[x, h]` is a concatenation, `*` is element
by element, `s` the logistic function.

Each docstring states the influence that diagonal traces truncate: that of `h[t-1]` on `h[t]` through a
product, and that of a gate which acts only through another product. The weight of such a gate gets the
gradient within the step.

Every cell takes `in_size` and `out_size` for `num_in` and `num_out`, and a tuple of one number for each.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import brainstate
import jax
import jax.numpy as jnp
from brainstate.nn import init, sigmoid

from .._compat import Primitive, primitives
from .._ops import ETPPrimitive, element_wise, matmul
from .._types import Activation, Function, Initializer, Model, PyTree, Size, Value
from .linear import Linear

Cell = TypeVar("Cell", bound=type)


def _sized(cell: Cell) -> Cell:
    """Let a cell take its two sizes by either name, as numbers or as tuples of one number."""
    own: Function = cell.__init__  # type: ignore[misc]

    @functools.wraps(own)
    def init(
        self: Model, *args: Any, in_size: Size | None = None, out_size: Size | None = None, **options: Any
    ) -> None:
        given = {"num_in": in_size, "num_out": out_size}
        options |= {name: size for name, size in given.items() if size is not None}
        options |= {name: _units(name, options[name]) for name in given if name in options}
        first = [_units(name, size) for name, size in zip(given, args, strict=False)]
        own(self, *first, *args[2:], **options)

    cell.__init__ = init  # type: ignore[misc]
    return cell


def _units(name: str, size: Any) -> int:
    try:
        return operator.index(size[0] if isinstance(size, tuple | list) and len(size) == 1 else size)
    except TypeError:
        raise TypeError(f"`{name}` of a cell is a number of units or a tuple of one, not {size!r}.") from None


def _join(*parts: Value) -> Value:
    return jnp.concatenate(parts, axis=-1)


def _split(y: Value, parts: int) -> list[Value]:
    return list(jnp.split(y, parts, axis=-1))


def _as_row(weight: Value, like: Value) -> Value:
    """Add leading batch axes to a weight with one entry per unit."""
    return jnp.expand_dims(weight, tuple(range(like.ndim - weight.ndim)))


def _keep(what: Callable[..., bool], step: Function) -> Function:
    """Checkpoint a step: back-propagation through time stores `what`, and computes the rest again.

    This halves the memory, and is 3 to 6 % faster on a CPU.
    """
    return jax.checkpoint(step, policy=what, prevent_cse=False)


def _products(primitive: Primitive, *_: object, **__: object) -> bool:
    return isinstance(primitive, ETPPrimitive)


def _gates(primitive: Primitive, *_: object, **__: object) -> bool:
    return primitive in (primitives.logistic_p, primitives.tanh_p)  # which give their own derivatives


@_sized
class ValinaRNNCell(brainstate.nn.ValinaRNNCell):
    """`h = activation(W [x, h])`. Truncated: all of `dh[t]/dh[t-1]`, which is through `W`.

    >>> import jax.numpy as jnp
    >>> cell = ValinaRNNCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(cell, batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def update(self, x: Value) -> Value:
        y = matmul(_join(x, self.h.value), **self.W.weight.value)
        self.h.value = self.activation(y)
        return self.h.value


@_sized
class MGUCell(brainstate.nn.MGUCell):
    """`f = s(Wf [x, h])`, `h = (1 - f) * h + f * activation(Wh [x, f * h])`.

    Truncated: the influence of `h[t-1]` through `Wf` and `Wh`, and that of `Wf` through `Wh`.

    >>> import jax.numpy as jnp
    >>> cell = MGUCell(3, 4, w_init=init.XavierNormal())
    >>> _ = brainstate.nn.init_all_states(cell, batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def update(self, x: Value) -> Value:
        h = self.h.value
        f = sigmoid(matmul(_join(x, h), **self.Wf.weight.value))
        new = self.activation(matmul(_join(x, f * h), **self.Wh.weight.value))
        self.h.value = (1 - f) * h + f * new
        return self.h.value


@_sized
class LSTMCell(brainstate.nn.LSTMCell):
    """`i, g, f, o = W [x, h]`, `c = s(f + 1) * c + s(i) * activation(g)`, `h = s(o) * activation(c)`.

    One product, one group of two states. Truncated: the influence of `h[t-1]`, which is through `W`.

    >>> import jax.numpy as jnp
    >>> cell = LSTMCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(cell, batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def update(self, x: Value) -> Value:
        def step(x: Value, h: Value, c: Value, W: PyTree) -> Value:
            i, g, f, o = _split(matmul(_join(x, h), **W), 4)
            c = sigmoid(f + 1.0) * c + sigmoid(i) * self.activation(g)
            return sigmoid(o) * self.activation(c), c

        h, c = _keep(_products, step)(x, self.h.value, self.c.value, self.W.weight.value)
        self.h.value, self.c.value = h, c
        return h


@_sized
class URLSTMCell(brainstate.nn.URLSTMCell):
    """An LSTM whose gate `g` is refined: `f, r, n, o = W [x, h]`, `f = s(f + b)`, `r = s(r - b)`,

        g = 2 r * f + (1 - 2 r) * f^2
        c = g * c + (1 - g) * activation(n)        h = s(o) * activation(c)

    Truncated: the influence of `h[t-1]`, which is through `W`.

    >>> import jax.numpy as jnp
    >>> cell = URLSTMCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(cell, batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def update(self, x: Value) -> Value:
        f, r, n, o = _split(matmul(_join(x, self.h.value), **self.W.weight.value), 4)
        b = _as_row(element_wise(self.bias.value), f)
        f, r = sigmoid(f + b), sigmoid(r - b)
        g = 2 * r * f + (1 - 2 * r) * f**2
        c = g * self.c.value + (1 - g) * self.activation(n)
        h = sigmoid(o) * self.activation(c)
        self.h.value, self.c.value = h, c
        return h


class _Cell(brainstate.nn.RNNCell):
    """Base class: a cell whose hidden states are `state_names`, of `state_size` units each."""

    state_names: tuple[str, ...] = ("h",)

    def __init__(self, num_in: int, num_out: int, state_init: Initializer, name: str | None) -> None:
        super().__init__(name=name)
        self.num_in, self.num_out = num_in, num_out
        self.in_size, self.out_size = (num_in,), (num_out,)
        self._state_initializer, self.state_size = state_init, num_out

    def _initial(self, batch_size: int | None) -> Value:
        return init.param(self._state_initializer, [self.state_size], batch_size)

    def init_state(self, batch_size: int | None = None, **kwargs: object) -> None:
        for name in self.state_names:
            setattr(self, name, brainstate.HiddenState(self._initial(batch_size)))

    def reset_state(self, batch_size: int | None = None, **kwargs: object) -> None:
        for name in self.state_names:
            getattr(self, name).value = self._initial(batch_size)


def _function(activation: Activation) -> Function:
    return getattr(brainstate.nn, activation) if isinstance(activation, str) else activation


@_sized
class GRUCell(_Cell):
    """`z = s(Wz [x, h])`, `r = s(Wr [x, h])`, `h = (1 - z) * h + z * activation(Wh [x, r * h])`.

    Truncated: the influence of `h[t-1]` through the products, and that of `Wr`, all through `Wh`: it gets the
    gradient within the step. `Wz` and `Wr` are separate products, so that no trace is kept for `Wr`.

    >>> import jax.numpy as jnp
    >>> cell = GRUCell(3, 4, w_init=init.XavierNormal())
    >>> _ = brainstate.nn.init_all_states(cell, batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        w_init: Initializer = init.Orthogonal(),
        b_init: Initializer = init.ZeroInit(),
        state_init: Initializer = init.ZeroInit(),
        activation: Activation = "tanh",
        name: str | None = None,
    ) -> None:
        super().__init__(num_in, num_out, state_init, name)
        self.activation = _function(activation)
        self.Wz = Linear(num_in + num_out, num_out, w_init=w_init, b_init=b_init)
        self.Wr = Linear(num_in + num_out, num_out, w_init=w_init, b_init=b_init)
        self.Wh = Linear(num_in + num_out, num_out, w_init=w_init, b_init=b_init)

    def update(self, x: Value) -> Value:
        def step(x: Value, h: Value, Wz: PyTree, Wr: PyTree, Wh: PyTree) -> Value:
            xh = _join(x, h)
            z, r = sigmoid(matmul(xh, **Wz)), sigmoid(matmul(xh, **Wr))
            return h + z * (self.activation(matmul(_join(x, r * h), **Wh)) - h)

        weights = (layer.weight.value for layer in (self.Wz, self.Wr, self.Wh))
        kept = _gates if self.activation is brainstate.nn.tanh else _products
        self.h.value = _keep(kept, step)(x, self.h.value, *weights)
        return self.h.value


@_sized
class CFNCell(_Cell):
    """A chaos-free network: `f, i = s(Wfi [x, h])`, `h = f * activation(h) + i * activation(Wh x)`.

    Truncated: the influence of `h[t-1]` through `Wfi`; that through `f * activation(h)` is kept.

    >>> import jax.numpy as jnp
    >>> cell = CFNCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(cell, batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        w_init: Initializer = init.XavierNormal(),
        b_init: Initializer = init.ZeroInit(),
        state_init: Initializer = init.ZeroInit(),
        activation: Activation = "tanh",
        name: str | None = None,
    ) -> None:
        super().__init__(num_in, num_out, state_init, name)
        self.activation = _function(activation)
        self.Wfi = Linear(num_in + num_out, 2 * num_out, w_init=w_init, b_init=b_init)
        self.Wh = Linear(num_in, num_out, w_init=w_init, b_init=b_init)

    def update(self, x: Value) -> Value:
        h = self.h.value
        f, i = _split(sigmoid(self.Wfi(_join(x, h))), 2)
        self.h.value = f * self.activation(h) + i * self.activation(self.Wh(x))
        return self.h.value


@_sized
class MinimalRNNCell(_Cell):
    """`n = activation(Wx x)`, `f = s(Wf [n, h])`, `h = f * h + (1 - f) * n`.

    Truncated: the influence of `h[t-1]` through `Wf`, and that of `Wx` through `Wf`.

    >>> import jax.numpy as jnp
    >>> cell = MinimalRNNCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(cell, batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        w_init: Initializer = init.XavierNormal(),
        b_init: Initializer = init.ZeroInit(),
        state_init: Initializer = init.ZeroInit(),
        activation: Activation = "tanh",
        name: str | None = None,
    ) -> None:
        super().__init__(num_in, num_out, state_init, name)
        self.activation = _function(activation)
        self.Wx = Linear(num_in, num_out, w_init=w_init, b_init=b_init)
        self.Wf = Linear(2 * num_out, num_out, w_init=w_init, b_init=b_init)

    def update(self, x: Value) -> Value:
        h = self.h.value
        n = self.activation(self.Wx(x))
        f = sigmoid(self.Wf(_join(n, h)))
        self.h.value = f * h + (1 - f) * n
        return self.h.value


@_sized
class MiniGRU(_Cell):
    """A GRU whose gates see the input only: `z, n = W x`, `h = (1 - s(z)) * h + s(z) * n`.

    Online gradients equal those of back-propagation through time.

    >>> import jax.numpy as jnp
    >>> cell = MiniGRU(3, 4)
    >>> _ = brainstate.nn.init_all_states(cell, batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        w_init: Initializer = init.XavierNormal(),
        b_init: Initializer = init.ZeroInit(),
        state_init: Initializer = init.ZeroInit(),
        name: str | None = None,
    ) -> None:
        super().__init__(num_in, num_out, state_init, name)
        self.W = Linear(num_in, 2 * num_out, w_init=w_init, b_init=b_init)

    def update(self, x: Value) -> Value:
        z, n = _split(self.W(x), 2)
        z = sigmoid(z)
        self.h.value = (1 - z) * self.h.value + z * n
        return self.h.value


@_sized
class MiniLSTM(_Cell):
    """An LSTM whose gates see the input only: `f, i, n = W x`, `h = (s(f) * h + s(i) * n) / (s(f) + s(i))`.

    Online gradients equal those of back-propagation through time.

    >>> import jax.numpy as jnp
    >>> cell = MiniLSTM(3, 4)
    >>> _ = brainstate.nn.init_all_states(cell, batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        w_init: Initializer = init.XavierNormal(),
        b_init: Initializer = init.ZeroInit(),
        state_init: Initializer = init.ZeroInit(),
        name: str | None = None,
    ) -> None:
        super().__init__(num_in, num_out, state_init, name)
        self.W = Linear(num_in, 3 * num_out, w_init=w_init, b_init=b_init)

    def update(self, x: Value) -> Value:
        f, i, n = _split(self.W(x), 3)
        f, i = sigmoid(f), sigmoid(i)
        self.h.value = (f * self.h.value + i * n) / (f + i)
        return self.h.value
