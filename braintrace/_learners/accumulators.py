"""Running sums and averages that published rules are built from, for use by hand."""

from __future__ import annotations

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp

from .._rules.es_d_rtrl import as_decay
from .._types import Array, ArrayLike, Key, PyTree, Value


class _Average(brainstate.ShortTermState):
    """A running sum, `value <- decay value + gain x`, which is reset to zeros."""

    def __init__(self, init_value: ArrayLike, decay: float, gain: float) -> None:
        value = jnp.asarray(init_value)
        super().__init__(value)
        self._shape, self._dtype, self._decay, self._gain = value.shape, value.dtype, decay, gain

    def update(self, x: ArrayLike) -> Array:
        """Take one step; the new value."""
        self.value: Array = self._decay * self.value + self._gain * x
        return self.value

    def reset_state(self, batch_size: int | None = None, **_: object) -> None:
        """Set to zero; `batch_size` sets the size of the first axis."""
        shape = self._shape if batch_size is None else (batch_size, *self._shape[1:])
        self.value = jnp.zeros(shape, self._dtype)


class PresynapticTrace(_Average):
    """A leaky sum of inputs, `a <- leak a + x`, the trace of OTTT.

    >>> import jax.numpy as jnp
    >>> trace = PresynapticTrace(jnp.zeros(2), leak=0.5)
    >>> _ = trace.update(jnp.ones(2))
    >>> print(trace.update(jnp.ones(2)))
    [1.5 1.5]
    """

    def __init__(self, init_value: ArrayLike, leak: float) -> None:
        if not 0 < leak < 1:
            raise ValueError(f"`leak` is between 0 and 1, not {leak!r}.")
        super().__init__(init_value, leak, 1.0)
        self.leak = leak


class KappaFilter(_Average):
    """A low-pass filter, `y <- kappa y + (1 - kappa) x`.

    >>> import jax.numpy as jnp
    >>> filter = KappaFilter(jnp.zeros(2), kappa=0.5)
    >>> _ = filter.update(jnp.ones(2))
    >>> print(filter.update(jnp.ones(2)))
    [0.75 0.75]
    """

    def __init__(self, init_value: ArrayLike, kappa: float) -> None:
        if not 0 <= kappa < 1:
            raise ValueError(f"`kappa` is at least 0 and less than 1, not {kappa!r}.")
        super().__init__(init_value, kappa, 1 - kappa)
        self.kappa = kappa


class FixedRandomFeedback:
    """A random matrix that no gradient goes through, (targets, units).

    >>> import jax, jax.numpy as jnp
    >>> FixedRandomFeedback(2, 3, jax.random.key(0)).project(jnp.ones(2)).shape
    (3,)
    """

    def __init__(self, n_target: int, n_layer: int, key: Key, init_scale: float = 0.1) -> None:
        self.n_target, self.n_layer = n_target, n_layer
        self.B = jax.lax.stop_gradient(init_scale * jax.random.normal(key, (n_target, n_layer)))

    def project(self, y_target: Array) -> Array:
        """`y_target B`."""
        return y_target @ self.B


class GradExpon(brainstate.nn.Module):
    """`gradients <- decay * gradients + new gradients`, for a tree of them.

    `tau_or_decay` is a decay in [0, 1), or a time constant: a number of steps, one or more, or a time with a
    unit (`decay = exp(-dt/tau)`, with `dt` from `brainstate.environ`). The sum is `gradients.value`.

    >>> import jax.numpy as jnp
    >>> total = GradExpon({"w": jnp.zeros(2)}, 0.5)
    >>> _ = total.update({"w": jnp.ones(2)})
    >>> total.update({"w": jnp.ones(2)})["w"]
    Array([1.5, 1.5], dtype=float32)
    """

    def __init__(self, grad_shape: PyTree, tau_or_decay: Value) -> None:
        super().__init__()
        if isinstance(tau_or_decay, u.Quantity):
            self.decay = float(u.math.exp(-brainstate.environ.get_dt() / tau_or_decay))
        elif tau_or_decay >= 1:
            self.decay = float(jnp.exp(-1.0 / tau_or_decay))
        else:
            self.decay = as_decay(float(tau_or_decay))
        self.gradients = brainstate.LongTermState(_zeros(grad_shape))

    def update(self, grads: PyTree) -> PyTree:
        """Take in the gradients of one step; the new sum."""
        old = self.gradients.value
        self.gradients.value = jax.tree.map(lambda a, g: self.decay * a + g, old, grads, is_leaf=_has_unit)
        return self.gradients.value

    def reset_state(self, batch_size: int | None = None) -> None:
        """Set the sum to zero; `batch_size` has no effect."""
        self.gradients.value = _zeros(self.gradients.value)


def _zeros(tree: PyTree) -> PyTree:
    return jax.tree.map(u.math.zeros_like, tree, is_leaf=_has_unit)


def _has_unit(leaf: PyTree) -> bool:
    return isinstance(leaf, u.Quantity)
