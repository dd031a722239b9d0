"""An exponentially fading sum of gradients."""

from __future__ import annotations

from typing import Any

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp

from .._rules.es_d_rtrl import as_decay


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

    def __init__(self, grad_shape: Any, tau_or_decay: Any) -> None:
        super().__init__()
        if isinstance(tau_or_decay, u.Quantity):
            self.decay = float(u.math.exp(-brainstate.environ.get_dt() / tau_or_decay))
        elif tau_or_decay >= 1:
            self.decay = float(jnp.exp(-1.0 / tau_or_decay))
        else:
            self.decay = as_decay(float(tau_or_decay))
        self.gradients = brainstate.LongTermState(_zeros(grad_shape))

    def update(self, grads: Any) -> Any:
        """Take in the gradients of one step; the new sum."""
        old = self.gradients.value
        self.gradients.value = jax.tree.map(lambda a, g: self.decay * a + g, old, grads, is_leaf=_has_unit)
        return self.gradients.value

    def reset_state(self, batch_size: int | None = None) -> None:
        """Set the sum to zero; `batch_size` has no effect."""
        self.gradients.value = _zeros(self.gradients.value)


def _zeros(tree: Any) -> Any:
    return jax.tree.map(u.math.zeros_like, tree, is_leaf=_has_unit)


def _has_unit(leaf: Any) -> bool:
    return isinstance(leaf, u.Quantity)
