"""Environments: by their rules, and against the packages that have them where those are installed."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.agents import environments as envs

from ..run import every

ALL = [
    envs.MemoryChain(6, 3),
    envs.TMaze(4),
    envs.RepeatPrevious(3),
    envs.TraceConditioning(num_distractors=3),
    envs.TracePatterning(isi=(3, 5), iti=(8, 9)),
]


@lru_cache(maxsize=4)
def _compiled(env: Any) -> tuple[Any, Any]:
    return jax.jit(env.reset), jax.jit(env.step)


def roll(env: Any, actions: Any, seed: int = 0) -> list[Any]:
    """Observation, reward, terminated and state of each step, the first after a reset."""
    reset, step = _compiled(env)
    key, begin = jax.random.split(jax.random.key(seed))
    observation, state = reset(begin, None)
    found = [(np.asarray(observation), 0.0, False, state)]
    for action in actions:
        key, now = jax.random.split(key)
        observation, state, reward, *flags, _ = step(now, state, jnp.asarray(action), None)
        found.append((np.asarray(observation), float(reward), any(map(bool, flags)), state))
    return found


@pytest.mark.parametrize("env", every(3, ALL), ids=lambda env: type(env).__name__)
def test_environments_are_deterministic_and_map(env: Any) -> None:
    actions = np.random.RandomState(0).randint(env.num_actions, size=40)
    first, again = roll(env, actions), roll(env, actions)
    same = lambda a, b: all(
        np.array_equal(x[0], y[0]) and x[1:3] == y[1:3] for x, y in zip(a, b, strict=True)
    )
    assert same(first, again)
    assert not all(same(first, roll(env, actions, seed)) for seed in (1, 2, 3))
    assert first[0][0].shape == (env.observation_size,)
    assert first[0][0].dtype == np.float32
    observations, states = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 5))
    keys = jax.random.split(jax.random.key(1), 5)
    stepped = jax.jit(jax.vmap(env.step))(keys, states, jnp.zeros(5, int))
    assert observations.shape == stepped[0].shape == (5, env.observation_size)


def test_memory_chain_asks_for_a_bit() -> None:
    env = envs.MemoryChain(4, 3)
    steps = roll(env, [1] * 10)
    context, query = np.asarray(steps[0][3].context), int(steps[0][3].query)
    np.testing.assert_array_equal(steps[0][0], [1, 0, *(2 * context - 1)])
    np.testing.assert_array_equal(steps[1][0], steps[0][0])
    np.testing.assert_array_equal(steps[4][0], [0.25, query, 0, 0, 0])
    assert [s[2] for s in steps[:6]] == [False] * 5 + [True]
    assert steps[5][1] == (1.0 if context[query] == 1 else -1.0)


def test_t_maze_rewards_the_side_that_was_shown() -> None:
    north, east, south, west = range(4)
    for seed in range(4):
        start = roll(envs.TMaze(3), [], seed)[0]
        goal = north if list(start[0]) == [0, 1, 1] else south
        steps = roll(envs.TMaze(3), [east, north, west, east, east, east, east, goal], seed)
        np.testing.assert_allclose([s[1] for s in steps], [0, 0, -0.1, 0, 0, 0, 0, -0.1, 4])
        assert [s[2] for s in steps] == [False] * 8 + [True]
        np.testing.assert_array_equal(steps[1][0], [1, 0, 1])
        np.testing.assert_array_equal(steps[6][0], [0, 1, 0])
        wrong = roll(envs.TMaze(3), [east, east, east, 2 - goal], seed)[-1]
        assert (wrong[1], wrong[2]) == (pytest.approx(-0.1), True)


@pytest.mark.parametrize("env", [ALL[3], ALL[4]], ids=["conditioning", "patterning"])
def test_trials_of_conditioning(env: Any) -> None:
    steps = roll(env, [0] * 3000)
    patterning = isinstance(env, envs.TracePatterning)
    cs, us, distractors = np.split(np.stack([s[0] for s in steps]), [env.num_cs, env.num_cs + 1], 1)
    times = np.array([int(s[3].time) for s in steps])
    np.testing.assert_array_equal(us[1:, 0], [s[1] for s in steps[1:]])
    assert not any(s[2] for s in steps)
    starts = np.flatnonzero(times == 0)
    np.testing.assert_array_equal(np.diff(times)[np.diff(times) != 1], -times[starts[1:] - 1])
    paid: dict[tuple[float, ...], bool] = {}
    for start, stop in itertools.pairwise(starts):
        np.testing.assert_array_equal(cs[start : start + 4], np.tile(cs[start], (4, 1)))
        assert not cs[start + 4 : stop].any()
        follows = np.flatnonzero(us[start:stop])
        paid[tuple(cs[start])] = bool(len(follows))
        if len(follows):
            assert follows.tolist() == [follows[0], follows[0] + 1]
            assert env.isi[0] <= follows[0] <= env.isi[1]
            assert env.iti[0] <= stop - start - follows[0] <= env.iti[1]
        if patterning:
            on = distractors[start:stop]
            np.testing.assert_array_equal(on[:4], np.tile(on[0], (4, 1)))
            assert not on[4:].any()
    if patterning:
        pays = {tuple(map(float, pattern)) for pattern in env._patterns}
        assert len(pays) == 10
        assert {sum(pattern) for pattern in pays} == {3}
        assert {pattern for pattern, us in paid.items() if us} == pays
        assert len(paid) > 40  # of 64
        shares = [[us[start:stop].any(), *distractors[start]] for start, stop in itertools.pairwise(starts)]
        np.testing.assert_allclose(np.mean(shares, axis=0), 0.5, atol=0.15)
    else:
        for number, on in enumerate(distractors.T, 1):
            edges = np.flatnonzero(np.diff(on))[int(on[0]) :]
            assert set(np.diff(edges)[::2]) == {4}
            assert min(np.diff(edges)[1::2]) >= 1
            begins, off = np.sum(np.diff(on) > 0), np.sum(on[:-1] == 0)
            assert begins / off == pytest.approx(1 / (10 * number), rel=0.3)


def test_patterns_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="between 1 and 6, the number of ways to choose half of 4"):
        envs.TracePatterning(num_cs=4)


def test_memory_chain_equals_that_of_gymnax() -> None:
    gymnax = pytest.importorskip("gymnax")
    ours = envs.MemoryChain(6, 3)
    theirs, params = gymnax.make("MemoryChain-bsuite")
    theirs.num_bits = 3
    params = params.replace(memory_length=6)
    actions = np.random.RandomState(0).randint(2, size=60)

    class Theirs:
        reset = staticmethod(lambda key, _: theirs.reset(key, params))
        step = staticmethod(lambda key, state, action, _: theirs.step(key, state, action, params))

    with jax.numpy_dtype_promotion("standard"):
        other = roll(Theirs, actions)
    for a, b in zip(roll(ours, actions), other, strict=True):
        np.testing.assert_allclose(a[0], b[0], atol=1e-6)
        assert a[1:3] == b[1:3]


def test_repeat_previous_equals_that_of_popgym() -> None:
    module = pytest.importorskip("popgym.envs.repeat_previous")
    theirs, actions = module.RepeatPrevious(num_decks=1, k=4), np.random.RandomState(0).randint(4, size=51)
    first, _ = theirs.reset(seed=0)
    steps = [theirs.step(int(action)) for action in actions]
    suits = [first, *(s[0] for s in steps)]
    env = envs.RepeatPrevious(4)
    state = env.reset(jax.random.key(0))[1]._replace(suits=jnp.asarray(suits, jnp.int32))
    for action, (suit, reward, terminated, _, _) in zip(actions, steps, strict=True):
        observation, state, found, done = env.transition(None, state, jnp.int32(action))
        assert int(jnp.argmax(observation)) == suit
        assert float(found) == pytest.approx(reward)
        assert bool(done) == terminated


def test_repeat_previous_deals_whole_decks() -> None:
    env = envs.RepeatPrevious(3, num_decks=2)
    steps = roll(env, [0] * 103)
    suits = np.stack([s[0] for s in steps[:-1]])
    np.testing.assert_array_equal(suits.sum(0) + np.eye(4)[int(steps[0][3].suits[-1])], [26] * 4)
    assert [s[2] for s in steps] == [False] * 103 + [True]
    answers = [s[1] for s in steps[1:]]
    wanted = [0.0 if t < 2 else (1 if suits[t - 2][0] else -1) / (104 - 3) for t in range(103)]
    np.testing.assert_allclose(answers, wanted, rtol=1e-6)
    with pytest.raises(ValueError, match="between 1 and 51"):
        envs.RepeatPrevious(52)
