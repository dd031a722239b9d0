"""Agents in streams: return of MemoryChain, error of predicted returns in conditioning, and speed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
from stream_nets import Net, functional, make_cell

import braintrace
from braintrace.agents import QRC, ActorCritic, Agent, environments

Row = dict[str, Any]


def memory_chain(
    seed: int, length: int, algorithm: str, steps: int, units: int = 32, rate: float = 1e-3, envs: int = 1
) -> Row:
    """Return the mean return of the last tenth of the run, and the best of its tenths."""
    brainstate.random.seed(seed)
    env, x = environments.MemoryChain(length), jnp.zeros(3, jnp.float32)
    critic = algorithm == "AC"
    model = Net(make_cell("RTU", 3, units, 10 * length), 2, 1 if critic else None)
    net, params, carry = functional(model, x, scalar=critic)
    rule: Any = ActorCritic(0.99, 0.99, entropy_weight=0.01)
    if not critic:
        rule = QRC(0.99, 0.95, epsilon=optax.linear_schedule(1.0, 0.02, steps // 2))
    agent = Agent(net, rule, optax.adam(rate), env, num_envs=envs)
    state = agent.init(params, carry, jax.random.key(seed))
    tenths = []
    for _ in range(10):
        state, found = agent.run(state, steps // 10)
        tenths.append(float(found.episode_returns().mean()))
    return {"score": max(tenths), "last": tenths[-1], "curve": tenths}


# -- conditioning -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Truncated:
    """A learner that back-propagates through the last `length` steps, again at each step.

    It has the functions of a learner that `Agent` calls; its traces are the last inputs, and the hidden state
    before the first of them.
    """

    net: Any
    length: int

    @property
    def function(self) -> Any:
        return self.net.function

    def init(self, params: Any, carry: Any) -> dict[str, Any]:
        (x,) = self.function.x.like
        return {"inputs": jnp.zeros((self.length, *x.shape), x.dtype), "carry": carry}

    def reset(self, carry: Any, traces: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        start = self.function.carry.rebuild(self.net.start)
        return start, {"inputs": jnp.zeros_like(traces["inputs"]), "carry": start}

    def step(self, params: Any, carry: Any, traces: dict[str, Any], x: Any) -> tuple[Any, Any, Any]:
        inputs, forward = jnp.concatenate([traces["inputs"][1:], x[None]]), self.function.function
        second = jax.lax.stop_gradient(forward(params, traces["carry"], inputs[0])[0])
        carry, ys = jax.lax.scan(lambda h, x: forward(params, h, x), traces["carry"], inputs)
        return carry, {"inputs": inputs, "carry": second}, jax.tree.map(lambda a: a[-1], ys)


def conditioning(
    seeds: list[int], env: str, isi: tuple[int, int], steps: int, cell: str = "RTU", units: int = 16,
    rank: int = 0, truncated: int = 0, rate: float = 1e-3,
) -> list[Row]:  # fmt: skip
    """Return the squared error of predicted returns over the last fifth of the stream, against the mean's.

    TD(lambda) with an update at every step; all seeds run in one program.
    """
    task, gamma = getattr(environments, env)(isi=tuple(isi)), 0.9
    x = jnp.zeros(task.observation_size, jnp.float32)
    options = {"rule": braintrace.rules.D_RTRL(rank=rank), "window": 1} if rank else {}
    states = []
    for seed in seeds:
        brainstate.random.seed(seed)
        model = Net(make_cell(cell, task.observation_size, units, 50), 1, 1)
        net, params, carry = functional(model, x, scalar=True, **options)
        learner = Truncated(net, truncated) if truncated else net
        agent = Agent(learner, ActorCritic(gamma, 0.9), optax.adam(rate), task)
        states.append(agent.init(params, carry, jax.random.key(seed)))

    run = jax.jit(jax.vmap(lambda state: agent.rollout(state, steps)[1]))
    found = run(jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))
    pairs = zip(np.asarray(found.reward), np.asarray(found.value), strict=True)
    return [_return_error(rewards[:, 0], values[:, 0], gamma) for rewards, values in pairs]


def _return_error(rewards: np.ndarray, values: np.ndarray, gamma: float) -> Row:
    returns = np.zeros(len(rewards))
    for t in reversed(range(len(rewards) - 1)):
        returns[t] = rewards[t] + gamma * returns[t + 1]
    fifths = []
    for part in np.array_split(np.arange(len(rewards) - 100), 5):  # the last returns are not complete
        error, variance = np.mean((values[part] - returns[part]) ** 2), np.var(returns[part])
        fifths.append(float(error / variance))
    return {"score": fifths[-1], "fifths": fifths, "squared error": float(error), "variance": float(variance)}


# -- speed --------------------------------------------------------------------------------------------------


def speed(seed: int, cell: str, units: int, steps: int, rounds: int = 100) -> Row:
    """Return steps per second of a bare loop, one with an environment, and an agent; batch 1.

    Each has the same net with three outputs and an update by SGD at every step. Runs of the three take turns,
    and the least CPU time of each counts.
    """
    brainstate.random.seed(seed)
    env = environments.MemoryChain(10)
    x = jnp.zeros(env.observation_size, jnp.float32)
    net, params, carry = functional(Net(make_cell(cell, len(x), units, 100), 2, 1), x, scalar=True)
    agent = Agent(net, ActorCritic(), optax.sgd(1e-4), env)
    start = agent.init(params, carry, jax.random.key(seed))
    env_state = jax.tree.map(lambda a: a[0], start.env_state)

    def update(state: Any, _: None, acts: bool) -> Any:
        params, carry, traces, key, env_state, seen = state

        def loss(params: Any) -> Any:
            after = net.step(params, carry, traces, seen)
            logits, value = after[2]
            return jnp.sum(logits**2) + (value - 1) ** 2, after

        grads, (carry, traces, (logits, _)) = jax.grad(loss, has_aux=True)(params)
        params = jax.tree.map(lambda p, g: p - 1e-4 * g, params, grads)
        reward = seen[0]
        if acts:
            key, key_env = jax.random.split(key)
            seen, env_state, reward, *_ = env.step(key_env, env_state, jnp.argmax(logits))
        return (params, carry, traces, key, env_state, seen), reward

    bare = (params, carry, net.init(params, carry), jax.random.key(seed), env_state, x)
    loop = lambda acts: lambda state: jax.lax.scan(lambda s, n: update(s, n, acts), state, length=steps)
    found = _race(
        {
            "bare loop": (loop(False), bare),
            "bare loop with environment": (loop(True), bare),
            "agent": (lambda state: agent.rollout(state, steps), start),
        },
        rounds,
    )
    per_second = {name: steps / seconds for name, seconds in found.items()}
    ratios = {f"agent / {name}": found[name] / found["agent"] for name in found if name != "agent"}
    return {"score": per_second["bare loop"], **per_second, **ratios}


def _race(loops: dict[str, Any], rounds: int) -> dict[str, float]:
    """Return the least CPU time of each loop, run in turns."""
    compiled = {name: (jax.jit(f).lower(state).compile(), state) for name, (f, state) in loops.items()}
    best = dict.fromkeys(compiled, float("inf"))
    for _ in range(rounds):
        for name, (run, state) in compiled.items():
            began = time.process_time()
            jax.block_until_ready(run(state))
            best[name] = min(best[name], time.process_time() - began)
    return best
