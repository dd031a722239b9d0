"""Agents against naive versions with dense influence matrices, and their errors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import braintrace
from braintrace import nn
from braintrace.agents import QRC, ActorCritic, Agent, environments, from_module

UNITS, RATE = 3, 0.05
ENV = environments.MemoryChain(4)


def draw(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(0.5 * np.random.RandomState(seed).randn(*shape))


PARAMS = {
    "w": draw(3, UNITS),
    "decay": draw(UNITS, seed=1),
    "out": draw(UNITS, 2, seed=2),
    "value": draw(UNITS, seed=3),
}


def step(params: Any, h: Any, x: Any) -> Any:
    h = jnp.tanh(params["decay"] * h + x.astype(h.dtype) @ params["w"])
    return h, (jnp.sin(h) @ params["out"], h @ params["value"])


def step_with_features(params: Any, h: Any, x: Any) -> Any:
    h, (q, _) = step(params, h, x)
    return h, (q, jnp.cos(h) * params["value"])


def make(algorithm: Any, num_envs: int = 2, env: Any = ENV, function: Any = None) -> tuple[Agent, Any]:
    function = function or (step if isinstance(algorithm, ActorCritic) else step_with_features)
    net = braintrace.online(function, PARAMS, jnp.zeros(UNITS), jnp.zeros(3, jnp.float32))
    agent = Agent(net, algorithm, optax.sgd(RATE), env, num_envs=num_envs)
    return agent, agent.init(PARAMS, jnp.zeros(UNITS), jax.random.key(0))


class Influence:
    """The hidden state of one environment and all of its derivative in the parameters."""

    def __init__(self, function: Any) -> None:
        w, self.unravel = ravel_pytree(PARAMS)
        self.size = w.size
        self.function = jax.jit(lambda w, h, x: function(self.unravel(w), h, x))
        self.jacobians = jax.jit(jax.jacfwd(lambda w, h, x: function(self.unravel(w), h, x), (0, 1)))
        self.reset()

    def reset(self) -> None:
        self.h, self.P = np.zeros(UNITS), np.zeros((UNITS, self.size))

    def step(self, w: Any, x: Any) -> tuple[Any, Any]:
        """Advance; return the outputs and their total derivatives."""
        found = self.function(w, self.h, x), self.jacobians(w, self.h, x)
        (h, y), (of_h, of_y) = jax.tree.map(np.asarray, found)
        total = lambda jacobians: jacobians[0] + jacobians[1] @ self.P
        grads = [total(jacobians) for jacobians in of_y]
        self.h, self.P = h, total(of_h)
        return y, grads


@pytest.mark.parametrize("num_envs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_actor_critic_equals_a_naive_version(num_envs: int) -> None:
    algorithm = ActorCritic(gamma=0.9, lam=0.8, critic_weight=0.5, entropy_weight=0.02)
    agent, state = make(algorithm, num_envs)
    final, seen = agent.run(state, 23)
    seen = jax.tree.map(np.asarray, seen)
    w = np.asarray(ravel_pytree(PARAMS)[0])
    nets = [Influence(step) for _ in range(num_envs)]
    z, last = [0 * w] * num_envs, [0.0] * num_envs
    for t in range(23):
        moves = []
        for e, net in enumerate(nets):
            ended = t == 0 or bool(seen.done[t - 1, e])
            if ended:
                net.reset()
            (logits, value), (logits_w, value_w) = net.step(w, seen.observation[t, e])
            reward = float(seen.reward[t - 1, e]) if t else 0.0
            error = reward + (0.0 if ended else 0.9 * value) - last[e]
            np.testing.assert_allclose(seen.error[t, e], error, atol=1e-12)
            p = np.asarray(jax.nn.softmax(logits))
            entropy_logits = -p * (np.log(p) - np.sum(p * np.log(p)))
            moves.append(error * z[e] + 0.02 * entropy_logits @ logits_w)
            score = np.eye(2)[int(seen.action[t, e])] - p
            z[e] = (0.0 if ended else 0.9 * 0.8) * z[e] + score @ logits_w + 0.5 * value_w
            last[e] = value
        w = w + RATE * sum(moves) / num_envs
    np.testing.assert_allclose(ravel_pytree(final.params["net"])[0], w, atol=1e-12)
    np.testing.assert_allclose(
        jax.vmap(lambda z: ravel_pytree(z)[0])(final.memory.eligibility), z, atol=1e-12
    )
    assert np.asarray(seen.done).sum() > 2 * num_envs
    assert jnp.max(jnp.abs(w - ravel_pytree(PARAMS)[0])) > 1e-3


def test_q_learning_equals_a_naive_version() -> None:
    agent, state = make(QRC(gamma=0.9, lam=0.8, epsilon=0.4, beta=0.7))
    final, seen = agent.run(state, 23)
    seen = jax.tree.map(np.asarray, seen)
    w, theta = np.asarray(ravel_pytree(PARAMS)[0]), np.zeros((2, UNITS))
    nets = [Influence(step_with_features) for _ in range(2)]
    zero = {"z": 0 * w, "Z": 0 * theta, "y": 0.0, "q": 0.0, "h": 0.0, "dq": 0 * w, "dh": 0 * theta}
    memory, explored = [dict(zero), dict(zero)], 0
    for t in range(23):
        moves, moves_h = [], []
        for e, net in enumerate(nets):
            m, ended = memory[e], t == 0 or bool(seen.done[t - 1, e])
            if ended:
                net.reset()
            (q, f), (q_w, _) = net.step(w, seen.observation[t, e])
            best, action, gamma = int(np.argmax(q)), int(seen.action[t, e]), 0.0 if ended else 0.9
            reward = float(seen.reward[t - 1, e]) if t else 0.0
            error, d_error = reward + gamma * q[best] - m["q"], gamma * q_w[best] - m["dq"]
            moves.append(error * m["z"] - m["y"] * d_error - m["h"] * m["dq"])
            moves_h.append(error * m["Z"] - m["h"] * m["dh"] - 0.7 * theta)
            c, dh = gamma * 0.8 * (action == best), np.eye(2)[action][:, None] * np.asarray(f)[None]
            h = float(np.sum(theta * dh))
            explored += action != best
            memory[e] = {
                "z": c * m["z"] + q_w[action],
                "Z": c * m["Z"] + dh,
                "y": c * m["y"] + h,
                "q": q[action],
                "h": h,
                "dq": q_w[action],
                "dh": dh,
            }
        w, theta = w + RATE * sum(moves) / 2, theta + RATE * sum(moves_h) / 2
    np.testing.assert_allclose(ravel_pytree(final.params["net"])[0], w, atol=1e-12)
    np.testing.assert_allclose(final.params["correction"], theta, atol=1e-12)
    assert explored > 2
    assert np.abs(theta).max() > 1e-3


@pytest.mark.parametrize("num_envs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_runs_go_on_where_they_ended(num_envs: int) -> None:
    agent, state = make(QRC(epsilon=lambda count: 1 / (1 + count)), num_envs)
    whole, steps = agent.run(state, 19)
    half, first = agent.run(state, 9)
    half, middle = agent.step(half)
    half, last = agent.run(half, 9)
    joined = jax.tree.map(lambda a, b, c: jnp.concatenate([a, b[None], c]), first, middle, last)
    jax.tree.map(np.testing.assert_array_equal, jax.random.key_data(whole.key), jax.random.key_data(half.key))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12),
        (whole.params, steps),
        (half.params, joined),
    )


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [ActorCritic(0.95, 0.9, entropy_weight=0.01), QRC(0.95, 0.9)])
def test_a_model_learns_to_remember(algorithm: Any) -> None:
    class Net(brainstate.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.RTUCell(3, 8, r_min=0.8, r_max=0.99, max_phase=0.3)
            self.out, self.value = nn.Linear(16, 2), nn.Linear(16, 1)

        def update(self, x: Any) -> Any:
            h = self.cell(x)
            return self.out(h), self.value(h)[0] if isinstance(algorithm, ActorCritic) else h

    brainstate.random.seed(0)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        model, x = Net(), jnp.zeros(3, jnp.float32)
        brainstate.nn.init_all_states(model)
        function, params, carry = from_module(model, x)
        net = braintrace.online(function, params, carry, x)
        agent = Agent(net, algorithm, optax.adam(5e-3), ENV, num_envs=8)
        state = agent.init(params, carry, jax.random.key(0))
        state, early = agent.run(state, 40)
        state, _ = agent.run(state, 2960)
        state, late = agent.run(state, 500)
    assert early.episode_returns().mean() < 0.5
    assert late.episode_returns().mean() > 0.8


@dataclass(frozen=True)
class Broken(environments.MemoryChain):
    """An environment with one thing wrong."""

    wrong: str = ""

    def reset(self, key: Any, params: Any = None) -> Any:
        observation, state = super().reset(key)
        if self.wrong == "observation":
            return observation[:2], state
        return observation if self.wrong == "no state" else (observation, state)

    def step(self, key: Any, state: Any, action: Any, params: Any = None) -> Any:
        observation, new, reward, done, truncated, info = super().step(key, state, action)
        if self.wrong == "nan":
            reward = jnp.where(new.time == 3, jnp.nan, reward)
        if self.wrong == "flags":
            done = jnp.zeros(2, bool)
        if self.wrong == "reward":
            reward = reward[None]
        if self.wrong == "type":
            new = new._replace(time=new.time.astype(float))
        if self.wrong == "four":
            return observation, reward, done, info
        return observation, new, reward, done, truncated, info


class NoStep:
    def reset(self, key: Any, params: Any) -> Any:
        return ENV.reset(key)


class OtherArguments(NoStep):
    def step(self, state: Any, action: Any) -> Any:
        return state


@pytest.mark.parametrize(
    ("env", "error", "message"),
    [
        (NoStep(), TypeError, "NoStep has no method `step`"),
        (OtherArguments(), TypeError, "OtherArguments has another interface"),
        (Broken(wrong="no state"), TypeError, "`reset` of Broken returns ShapeDtypeStruct"),
        (Broken(wrong="observation"), ValueError, r"are float32\[2\], and the net was made for float32\[3\]"),
        (Broken(wrong="four"), TypeError, "`step` of Broken returns 4 values"),
        (Broken(wrong="flags"), ValueError, r"one boolean.*bool\[2\]"),
        (Broken(wrong="reward"), ValueError, r"one number; it has the shape \(1,\)"),
        (Broken(wrong="type"), ValueError, "The state of Broken after a step differs"),
    ],
    ids=lambda value: getattr(value, "wrong", type(value).__name__) if not isinstance(value, str) else "",
)
def test_an_environment_with_a_wrong_interface(env: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make(ActorCritic(), env=env)


def test_rewards_that_are_not_finite() -> None:
    agent, state = make(ActorCritic(), env=Broken(wrong="nan"))
    with pytest.raises(FloatingPointError, match="The reward at step 2 of this run in environment 0 is nan"):
        agent.run(state, 10)
    good, _ = agent.run(state, 2)
    assert all(bool(jnp.all(jnp.isfinite(a))) for a in jax.tree.leaves(good.params))


def test_outputs_that_do_not_fit_the_algorithm() -> None:
    with pytest.raises(ValueError, match="For `QRC`"):
        make(QRC(), function=step)
    with pytest.raises(ValueError, match="For `ActorCritic`"):
        make(ActorCritic(), function=step_with_features)


def test_environments_of_gymnax() -> None:
    gymnax = pytest.importorskip("gymnax")
    theirs, params = gymnax.make("MemoryChain-bsuite")
    with jax.numpy_dtype_promotion("standard"):
        agent, state = make(ActorCritic(), env=theirs)
        agent = replace(agent, env_params=params.replace(memory_length=4))
        after, steps = agent.run(state, 30)
    ours, state = make(ActorCritic())
    wanted, same = ours.run(state, 30)
    np.testing.assert_array_equal(steps.reward, same.reward)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), after.params, wanted.params)
