"""Actor-critic with eligibility traces, AC(λ)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from .._types import Key, PyTree
from .agent import Pair, Params, Pull, check_pair


class Memory(NamedTuple):
    """The state of AC(λ)."""

    eligibility: PyTree  # z: decayed sum of gradients
    value: Float[Array, ""]  # v(s) of the last step


@dataclass(frozen=True)
class ActorCritic:
    """Actor-critic with eligibility traces, AC(λ) (Sutton and Barto, 2018, section 13.5), for shared nets.

        δ[t] = r[t+1] + γ v[t+1] - v[t]        z[t] = γ λ z[t-1] + ∇(log π(a[t]) + critic_weight v[t])
        θ <- θ + δ[t] z[t] + entropy_weight ∇H(π[t+1])

    The net returns `(logits, value)`: one logit for each action, and the predicted return, a number. Where an
    episode ends, `v[t+1]` counts as 0, and `z` starts again. With one action this is TD(λ).

    Args:
        gamma: Discount `γ` of a step.
        lam: Decay `λ` of the eligibility traces.
        critic_weight: Weight of the critic's gradient next to the actor's.
        entropy_weight: Weight of the entropy of the policy, which is increased; it has no trace.
    """

    gamma: float = 0.99
    lam: float = 0.9
    critic_weight: float = 1.0
    entropy_weight: float = 0.0

    def init_params(self, params: PyTree, y: PyTree) -> Params:
        check_pair(y, "ActorCritic", (1, 0), "logits, one for each action, and the value, a number")
        return {"net": params}

    def init_memory(self, params: PyTree, y: Pair) -> Memory:
        return Memory(jax.tree.map(jnp.zeros_like, params), jnp.zeros((), y[1].dtype))

    def draw(self, key: Key, y: Pair) -> Array:
        return jax.random.gumbel(key, y[0].shape, y[0].dtype)

    def step(
        self, params: Params, y: Pair, pull: Pull, memory: Memory, reward: Array, done: Array, drawn: Array
    ) -> tuple[Array, Array, Memory, Params, Array]:
        logits, value = y
        z, last = memory
        goes_on = 1 - done.astype(value.dtype)
        error = reward.astype(value.dtype) + self.gamma * goes_on * value - last
        direction = jax.tree.map(lambda z: error * z, z)
        if self.entropy_weight:
            d_logits = jax.grad(lambda x: -jnp.sum(jax.nn.softmax(x) * jax.nn.log_softmax(x)))(logits)
            entropy = pull((self.entropy_weight * d_logits, jnp.zeros_like(value)))
            direction = jax.tree.map(jnp.add, direction, entropy)
        action = jnp.argmax(logits + drawn)  # with Gumbel noise, a sample of the policy
        d_logits = jax.nn.one_hot(action, len(logits), dtype=logits.dtype) - jax.nn.softmax(logits)
        grads = pull((d_logits, jnp.full_like(value, self.critic_weight)))
        decay = self.gamma * self.lam * goes_on
        z = jax.tree.map(lambda z, g: decay * z + g, z, grads)
        return action, value, Memory(z, value), {"net": direction}, error
