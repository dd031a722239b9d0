"""Learn to act from a stream: reinforcement learning with memory, one step at a time, with no replay.

A T-maze shows at its entrance where the reward is, and asks at the end of a corridor. The agent sees one
observation at a time. A recurrent trace unit remembers, exact online traces tell how each weight has shaped
its memory, and eligibility traces tell which actions led to the reward. The weights change at every step.

    python examples/streaming_agent.py [--quick]
"""

import sys
import time
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import optax

import braintrace
from braintrace.agents import ActorCritic, Agent, environments, from_module

QUICK = "--quick" in sys.argv
LENGTH, STEPS = (3, 20_000) if QUICK else (20, 150_000)
env = environments.TMaze(LENGTH)


class Net(brainstate.nn.Module):
    """A memory, an actor and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = braintrace.nn.RTUCell(env.observation_size, 16, r_min=0.9, r_max=0.999, max_phase=0.1)
        self.actor = braintrace.nn.Linear(32, env.num_actions)
        self.critic = braintrace.nn.Linear(32, 1)

    def update(self, x: Any) -> Any:
        h = self.memory(x)
        return self.actor(h), self.critic(h)[0]


brainstate.random.seed(0)
model, x = Net(), jnp.zeros(env.observation_size)
brainstate.nn.init_all_states(model)
step, params, carry = from_module(model, x)
net = braintrace.online(step, params, carry, x)
agent = Agent(net, ActorCritic(gamma=0.98, lam=0.9, entropy_weight=0.02), optax.adam(2e-3), env, num_envs=4)
state = agent.init(params, carry, jax.random.key(0))
began = time.monotonic()
for _ in range(10):
    state, steps = agent.run(state, STEPS // 10)
    returns = steps.episode_returns()
    right = float((returns > 3).mean()) if len(returns) else 0.0
    print(f"{len(returns):6} episodes, the right turn in {right:4.0%} {'#' * round(50 * right)}", flush=True)
rate = 4 * STEPS / (time.monotonic() - began)
print(f"{rate:,.0f} steps per second, environments included")
assert right > (0.4 if QUICK else 0.9)
