"""An exponential average of gradients."""

from __future__ import annotations

from typing import Any

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp

from .learners import as_decay


class GradExpon(brainstate.nn.Module):
    """`average <- decay * average + (1 - decay) * gradient`, for a tree of gradients.

    `tau_or_decay` is a decay in [0, 1), or a time constant: a number of steps, one or more, or a time with a
    unit (`decay = exp(-dt/tau)`, with `dt` from `brainstate.environ`).

    >>> import jax.numpy as jnp
    >>> average = GradExpon({"w": jnp.zeros(2)}, 0.5)
    >>> average.update({"w": jnp.ones(2)})["w"]
    Array([0.5, 0.5], dtype=float32)
    """

    def __init__(self, grad_shape: Any, tau_or_decay: Any) -> None:
        super().__init__()
        if isinstance(tau_or_decay, u.Quantity):
            tau_or_decay = float(tau_or_decay / brainstate.environ.get_dt())
        if tau_or_decay >= 1:
            self.decay = float(jnp.exp(-1.0 / tau_or_decay))
        else:
            self.decay = as_decay(float(tau_or_decay))
        self.average = brainstate.ShortTermState(
            jax.tree.map(lambda a: jnp.zeros(jnp.shape(a), jnp.result_type(a)), grad_shape)
        )

    def update(self, grads: Any) -> Any:
        """Take in the gradients of one step; the new average."""
        old = self.average.value
        self.average.value = jax.tree.map(lambda a, g: self.decay * a + (1 - self.decay) * g, old, grads)
        return self.average.value

    def reset_state(self, batch_size: int | None = None) -> None:
        """Begin again from zero, whatever the batch."""
        self.average.value = jax.tree.map(jnp.zeros_like, self.average.value)
