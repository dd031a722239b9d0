"""Q-learning with eligibility traces and gradient correction, QRC(λ)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from .._types import Key, PyTree
from .agent import Pair, Params, Pull, check_pair


class Memory(NamedTuple):
    """The state of QRC(λ)."""

    eligibility: PyTree  # z: decayed sum of gradients of q
    eligibility_h: Float[Array, "actions features"]  # decayed sum of gradients of h
    sum_h: Float[Array, ""]  # decayed sum of h itself
    grads: PyTree  # ∇q(s, a) of the last step
    features: Float[Array, "actions features"]  # ∇h(s, a) of the last step
    q: Float[Array, ""]  # q(s, a) of the last step
    h: Float[Array, ""]  # h(s, a) of the last step
    steps: Int[Array, ""]


@dataclass(frozen=True)
class QRC:
    """Q-learning with regularised gradient corrections and eligibility traces, QRC(λ) (Elelimy et al., 2025).

        δ[t] = r[t+1] + γ max_b q(s[t+1], b) - q(s[t], a[t])        h[t] = <Θ[a[t]], f[t]>
        z[t] = c z[t-1] + ∇q[t]        y[t] = c y[t-1] + h[t]        Z[t] = c Z[t-1] + ∇h[t]
        θ <- θ + δ[t] z[t] - y[t] ∇δ[t] - h[t] ∇q[t]        Θ <- Θ + δ[t] Z[t] - h[t] ∇h[t] - β Θ

    `c = γ λ` where `a[t]` is greedy, and 0 where it explores (Watkins). `h` estimates the expected TD error,
    linearly in features `f` of the net, which it does not change. The net returns `(q, f)`: one value for
    each action, and a vector. Where an episode ends, `q(s[t+1], b)` counts as 0, and the traces start again.

    Args:
        gamma: Discount `γ` of a step.
        lam: Decay `λ` of the eligibility traces.
        epsilon: Probability of a random action, a number or a schedule of the number of steps.
        beta: Strength `β` of the regularisation of `h`.
    """

    gamma: float = 0.99
    lam: float = 0.9
    epsilon: float | Callable[[Array], Array] = 0.1
    beta: float = 1.0

    def init_params(self, params: PyTree, y: PyTree) -> Params:
        check_pair(y, "QRC", (1, 1), "the values of all actions and features, two vectors")
        q, features = y
        return {"net": params, "correction": jnp.zeros((*q.shape, *features.shape), features.dtype)}

    def init_memory(self, params: PyTree, y: Pair) -> Memory:
        q, features = y
        none, zero = jax.tree.map(jnp.zeros_like, params), jnp.zeros((), q.dtype)
        of_h = jnp.zeros((*q.shape, *features.shape), features.dtype)
        return Memory(none, of_h, zero, none, of_h, zero, zero, jnp.zeros((), int))

    def draw(self, key: Key, y: Pair) -> Pair:
        key_explore, key_action = jax.random.split(key)
        return jax.random.uniform(key_explore), jax.random.randint(key_action, (), 0, len(y[0]))

    def step(
        self, params: Params, y: Pair, pull: Pull, memory: Memory, reward: Array, done: Array, drawn: Pair
    ) -> tuple[Array, Array, Memory, Params, Array]:
        q, features = y
        m, theta, best = memory, params["correction"], jnp.argmax(q)
        gradient_at = lambda i: pull((jax.nn.one_hot(i, len(q), dtype=q.dtype), jnp.zeros_like(features)))
        next_gamma = self.gamma * (1 - done.astype(q.dtype))
        error = reward.astype(q.dtype) + next_gamma * q[best] - m.q

        def corrected(z: Array, now: Array, before: Array) -> Array:
            return error * z - m.sum_h * (next_gamma * now - before) - m.h * before

        net = jax.tree.map(corrected, m.eligibility, gradient_at(best), m.grads)
        correction = error * m.eligibility_h - m.h * m.features - self.beta * theta

        epsilon = self.epsilon(m.steps) if callable(self.epsilon) else self.epsilon
        chance, other = drawn
        action = jnp.where(chance < epsilon, other, best)
        decay = next_gamma * self.lam * (action == best).astype(q.dtype)
        grads = gradient_at(action)
        of_h = jax.nn.one_hot(action, len(q), dtype=features.dtype)[:, None] * features[None]
        h = jnp.sum(theta * of_h)
        memory = Memory(
            jax.tree.map(lambda z, g: decay * z + g, m.eligibility, grads),
            decay * m.eligibility_h + of_h,
            decay * m.sum_h + h,
            grads,
            of_h,
            q[action],
            h,
            m.steps + 1,
        )
        return action, q[action], memory, {"net": net, "correction": correction}, error
