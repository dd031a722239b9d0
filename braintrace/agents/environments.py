"""Environments that need memory, with gymnax's interface: pure functions of keys, in JAX.

`reset(key) -> observation, state` and `step(key, state, action) -> observation, state, reward, terminated,
truncated, info`; where an episode ends, `step` returns the first observation and state of the next. Settings
are fields of the environment, so that the `params` that gymnax passes are not used.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Environment:
    """What environments share: the next episode begins by itself, as in gymnax."""

    @property
    def num_actions(self) -> int:
        """The number of actions."""
        raise NotImplementedError

    @property
    def observation_size(self) -> int:
        """The length of an observation."""
        raise NotImplementedError

    def reset(self, key: Any, params: Any = None) -> tuple[Any, Any]:
        """Return the first observation and state of an episode."""
        raise NotImplementedError

    def transition(self, key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any]:
        """Return observation, state, reward and whether the episode has ended."""
        raise NotImplementedError

    def step(self, key: Any, state: Any, action: Any, params: Any = None) -> tuple[Any, ...]:
        """Take a step; return observation, state, reward, terminated, truncated and info."""
        key, key_reset = jax.random.split(key)
        observation, new, reward, done = self.transition(key, state, jnp.asarray(action, jnp.int32))
        begun = self.reset(key_reset)
        observation, new = jax.tree.map(partial(jnp.where, done), begun, (observation, new))
        return observation, new, reward, done, jnp.zeros((), bool), {}


class ChainState(NamedTuple):
    """The state of `MemoryChain`."""

    context: Any
    query: Any
    time: Any


@dataclass(frozen=True)
class MemoryChain(Environment):
    """Remember bits for some steps, and report the one that is asked for at the end.

    As in bsuite (Osband et al., 2020) and gymnax. Observations are the time left, the index of the bit that
    is asked for (at the end) and the bits as -1 or 1 (at the beginning, twice). The last action is rewarded
    with 1 if it is the bit, else with -1. An episode has `memory_length + 1` steps.
    """

    memory_length: int = 5
    num_bits: int = 1

    @property
    def num_actions(self) -> int:
        return 2

    @property
    def observation_size(self) -> int:
        return self.num_bits + 2

    def reset(self, key: Any, params: Any = None) -> tuple[Any, ChainState]:
        key_context, key_query = jax.random.split(key)
        context = jax.random.bernoulli(key_context, 0.5, (self.num_bits,)).astype(jnp.int32)
        query = jax.random.randint(key_query, (), 0, self.num_bits).astype(jnp.int32)
        state = ChainState(context, query, jnp.zeros((), jnp.int32))
        return self._observation(state), state

    def transition(self, key: Any, state: ChainState, action: Any) -> tuple[Any, ...]:
        asked = state.time >= self.memory_length
        right = action == state.context[state.query]
        reward = jnp.where(asked, jnp.where(right, 1.0, -1.0), 0.0)
        return self._observation(state), state._replace(time=state.time + 1), reward, asked

    def _observation(self, state: ChainState) -> Any:
        left = 1 - state.time / self.memory_length
        query = jnp.where(state.time == self.memory_length - 1, state.query, 0)
        bits = jnp.where(state.time == 0, 2 * state.context - 1, 0)
        return jnp.concatenate([a.astype(jnp.float32) for a in (left[None], query[None], bits)])


class MazeState(NamedTuple):
    """The state of `TMaze`."""

    position: Any
    goal: Any  # 0: north, 2: south, as the actions


@dataclass(frozen=True)
class TMaze(Environment):
    """Walk along a corridor and turn at its end to the side that was shown at its beginning (Bakker, 2001).

    Observations have three values: at the start 0 1 1 or 1 1 0, for a goal in the north or south; 1 0 1 in
    the corridor; 0 1 0 at the junction. Actions are north, east, south and west. The right turn is rewarded
    with 4 and ends the episode. The wrong turn costs 0.1 and ends it; each move into a wall costs 0.1.
    """

    length: int = 10

    @property
    def num_actions(self) -> int:
        return 4

    @property
    def observation_size(self) -> int:
        return 3

    def reset(self, key: Any, params: Any = None) -> tuple[Any, MazeState]:
        goal = 2 * jax.random.randint(key, (), 0, 2, jnp.int32)
        state = MazeState(jnp.zeros((), jnp.int32), goal)
        return self._observation(state), state

    def transition(self, key: Any, state: MazeState, action: Any) -> tuple[Any, ...]:
        turned = (state.position == self.length) & (action % 2 == 0)
        east = (action == 1).astype(jnp.int32) - (action == 3).astype(jnp.int32)
        position = jnp.clip(state.position + east, 0, self.length)
        stuck = (position == state.position) & ~turned
        found = turned & (action == state.goal)
        reward = jnp.where(found, 4.0, jnp.where(stuck | turned, -0.1, 0.0))
        state = state._replace(position=position)
        return self._observation(state), state, reward, turned

    def _observation(self, state: MazeState) -> Any:
        start = jnp.where(state.goal == 0, jnp.array([0.0, 1.0, 1.0]), jnp.array([1.0, 1.0, 0.0]))
        inside = jnp.where(
            state.position == self.length, jnp.array([0.0, 1.0, 0.0]), jnp.array([1.0, 0.0, 1.0])
        )
        return jnp.where(state.position == 0, start, inside).astype(jnp.float32)


class DeckState(NamedTuple):
    """The state of `RepeatPrevious`."""

    suits: Any
    dealt: Any


@dataclass(frozen=True)
class RepeatPrevious(Environment):
    """Name the suit of the card that was seen `k` cards ago, as in POPGym (Morad et al., 2023).

    `k = 1` is the card that is seen now. Observations are suits, one-hot. From the `k`-th card on, each
    right answer is rewarded with `1 / (52 num_decks - k)`, and each wrong one costs as much. The easy,
    medium and hard versions have `k` of 4, 32 and 64, and 1, 2 and 3 decks.
    """

    k: int = 4
    num_decks: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.k < 52 * self.num_decks:
            raise ValueError(f"`k` must lie between 1 and {52 * self.num_decks - 1}; it is {self.k}.")

    @property
    def num_actions(self) -> int:
        return 4

    @property
    def observation_size(self) -> int:
        return 4

    def reset(self, key: Any, params: Any = None) -> tuple[Any, DeckState]:
        suits = jax.random.permutation(key, jnp.arange(52 * self.num_decks, dtype=jnp.int32) % 4)
        state = DeckState(suits, jnp.ones((), jnp.int32))
        return self._observation(state), state

    def transition(self, key: Any, state: DeckState, action: Any) -> tuple[Any, ...]:
        cards = 52 * self.num_decks
        right = action == state.suits[state.dealt - self.k]
        reward = jnp.where(right, 1.0, -1.0) / (cards - self.k)
        reward = jnp.where(state.dealt >= self.k, reward, 0.0)
        state = state._replace(dealt=state.dealt + 1)
        return self._observation(state), state, reward, state.dealt == cards

    def _observation(self, state: DeckState) -> Any:
        return jax.nn.one_hot(state.suits[state.dealt - 1], 4, dtype=jnp.float32)


class TrialState(NamedTuple):
    """The state of `TraceConditioning` and `TracePatterning`."""

    time: Any  # steps since the onset of the conditioned stimuli
    delay: Any  # from their onset to that of the unconditioned stimulus
    pause: Any  # from its onset to the next trial
    pattern: Any  # conditioned stimuli of this trial
    pays: Any  # whether the unconditioned stimulus follows
    distractors: Any  # steps for which each is on


@dataclass(frozen=True)
class TraceConditioning(Environment):
    """Predict a stimulus that follows another one after a random delay (Rafiee et al., 2023), for ever.

    Observations are the conditioned stimulus (CS), the unconditioned stimulus (US) and distractors. A trial
    begins with the CS, on for `cs_steps`. The US follows after a delay drawn from `isi` (onset to onset, both
    ends included), on for `us_steps`, and the next trial begins after a pause drawn from `iti`. Distractor
    `i` = 1, 2, ... starts with probability `1 / (10 i)` in a step and is on for `cs_steps`. The reward is 1
    where the US is on: the discounted return is what to predict. There is one action, without effect.
    """

    isi: tuple[int, int] = (7, 13)
    iti: tuple[int, int] = (80, 129)
    num_distractors: int = 10
    cs_steps: int = 4
    us_steps: int = 2

    @property
    def num_actions(self) -> int:
        return 1

    @property
    def num_cs(self) -> int:
        """The number of conditioned stimuli."""
        return 1

    @property
    def observation_size(self) -> int:
        return self.num_cs + 1 + self.num_distractors

    def draw_pattern(self, key: Any) -> tuple[Any, Any]:
        """Return the conditioned stimuli of a trial, and whether the unconditioned one follows."""
        return jnp.ones(1), jnp.ones((), bool)

    def _trial(self, key: Any, distractors: Any) -> TrialState:
        delay, pause, pattern = jax.random.split(key, 3)
        between = lambda key, ends: jax.random.randint(key, (), ends[0], ends[1] + 1, jnp.int32)
        times = jnp.zeros((), jnp.int32), between(delay, self.isi), between(pause, self.iti)
        return TrialState(*times, *self.draw_pattern(pattern), distractors)

    def reset(self, key: Any, params: Any = None) -> tuple[Any, TrialState]:
        state = self._trial(key, jnp.zeros(self.num_distractors, jnp.int32))
        return self._observation(state), state

    def transition(self, key: Any, state: TrialState, action: Any) -> tuple[Any, ...]:
        key_trial, key_distractors = jax.random.split(key)
        starts = jax.random.uniform(key_distractors, (self.num_distractors,))
        starts = starts < 1 / (10 * jnp.arange(1, self.num_distractors + 1))
        left = jnp.where(starts, self.cs_steps, jnp.maximum(state.distractors - 1, 0))
        state = state._replace(time=state.time + 1, distractors=left)
        over = state.time >= state.delay + state.pause
        state = jax.tree.map(partial(jnp.where, over), self._trial(key_trial, left), state)
        observation = self._observation(state)
        return observation, state, observation[self.num_cs], jnp.zeros((), bool)

    def _observation(self, state: TrialState) -> Any:
        cs = jnp.where(state.time < self.cs_steps, state.pattern, 0)
        since = state.time - state.delay
        us = state.pays & (since >= 0) & (since < self.us_steps)
        return jnp.concatenate([a.astype(jnp.float32) for a in (cs, us[None], state.distractors > 0)])


@dataclass(frozen=True)
class TracePatterning(TraceConditioning):
    """`TraceConditioning` by one of twenty patterns: three of six conditioned stimuli (Rafiee et al., 2023).

    The unconditioned stimulus follows ten of the patterns, drawn from `seed`, and none of the others.
    """

    seed: int = 0
    _pays: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        order = np.random.RandomState(self.seed).permutation(20)
        object.__setattr__(self, "_pays", order < 10)

    @property
    def num_cs(self) -> int:
        return 6

    def draw_pattern(self, key: Any) -> tuple[Any, Any]:
        patterns = np.array(
            [[float(i in on) for i in range(6)] for on in itertools.combinations(range(6), 3)]
        )
        number = jax.random.randint(key, (), 0, 20)
        return jnp.asarray(patterns, jnp.result_type(float))[number], jnp.asarray(self._pays)[number]
