"""Environments that need memory, with gymnax's interface: pure functions of keys, in JAX.

`reset(key) -> observation, state` and `step(key, state, action) -> observation, state, reward, terminated,
truncated, info`; where an episode ends, `step` returns the first observation and state of the next. Settings
are fields of the environment, so that the `params` that gymnax passes are not used.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import ClassVar, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from .._types import Key

State = TypeVar("State", bound=tuple[Array, ...])  # of an environment: a NamedTuple
Transition = tuple[Array, State, Array, Array]  # observation, state, reward, whether the episode has ended


@dataclass(frozen=True)
class Environment(Generic[State]):
    """Base class: `step` begins the next episode by itself, as in gymnax."""

    num_actions: ClassVar[int]

    @property
    def observation_size(self) -> int:
        """The length of an observation."""
        raise NotImplementedError

    def reset(self, key: Key, params: object = None) -> tuple[Array, State]:
        """Return the first observation and state of an episode."""
        raise NotImplementedError

    def transition(self, key: Key, state: State, action: Array) -> Transition[State]:
        """Return observation, state, reward and whether the episode has ended."""
        raise NotImplementedError

    def step(
        self, key: Key, state: State, action: Array, params: object = None
    ) -> tuple[Array, State, Array, Array, Array, dict[str, Array]]:
        """Take a step; return observation, state, reward, terminated, truncated and info."""
        own, action = jax.random.split(key)[0], jnp.asarray(action, jnp.int32)
        observation, new, reward, done = self.transition(own, state, action)
        # keys for a reset are drawn only where an episode ends: without `vmap`, that saves most of a step
        begin = lambda: self.reset(jax.random.split(key)[1])
        observation, new = jax.lax.cond(done, begin, lambda: (observation, new))
        return observation, new, reward, done, jnp.zeros((), bool), {}


class ChainState(NamedTuple):
    """The state of `MemoryChain`."""

    context: Int[Array, " bits"]
    query: Int[Array, ""]
    time: Int[Array, ""]


@dataclass(frozen=True)
class MemoryChain(Environment[ChainState]):
    """Remember bits for some steps, and report the one that is asked for at the end.

    As in bsuite (Osband et al., 2020) and gymnax. Observations are the time left, the index of the bit that
    is asked for (at the end) and the bits as -1 or 1 (at the beginning, twice). The last action is rewarded
    with 1 if it is the bit, else with -1. An episode has `memory_length + 1` steps.
    """

    num_actions: ClassVar[int] = 2
    memory_length: int = 5
    num_bits: int = 1

    @property
    def observation_size(self) -> int:
        return self.num_bits + 2

    def reset(self, key: Key, params: object = None) -> tuple[Array, ChainState]:
        key_context, key_query = jax.random.split(key)
        context = jax.random.bernoulli(key_context, 0.5, (self.num_bits,)).astype(jnp.int32)
        query = jax.random.randint(key_query, (), 0, self.num_bits).astype(jnp.int32)
        state = ChainState(context, query, jnp.zeros((), jnp.int32))
        return self._observation(state), state

    def transition(self, key: Key, state: ChainState, action: Array) -> Transition[ChainState]:
        asked = state.time >= self.memory_length
        right = action == state.context[state.query]
        reward = jnp.where(asked, jnp.where(right, 1.0, -1.0), 0.0)
        return self._observation(state), state._replace(time=state.time + 1), reward, asked

    def _observation(self, state: ChainState) -> Array:
        left = 1 - state.time / self.memory_length
        query = jnp.where(state.time == self.memory_length - 1, state.query, 0)
        bits = jnp.where(state.time == 0, 2 * state.context - 1, 0)
        return jnp.concatenate([a.astype(jnp.float32) for a in (left[None], query[None], bits)])


class MazeState(NamedTuple):
    """The state of `TMaze`."""

    position: Int[Array, ""]
    goal: Int[Array, ""]  # 0: north, 2: south, as the actions


@dataclass(frozen=True)
class TMaze(Environment[MazeState]):
    """Walk along a corridor and turn at its end to the side that was shown at its beginning (Bakker, 2001).

    Observations have three values: at the start 0 1 1 or 1 1 0, for a goal in the north or south; 1 0 1 in
    the corridor; 0 1 0 at the junction. Actions are north, east, south and west. The right turn is rewarded
    with 4 and ends the episode. The wrong turn costs 0.1 and ends it; each move into a wall costs 0.1.
    """

    num_actions: ClassVar[int] = 4
    observation_size: ClassVar[int] = 3
    length: int = 10

    def reset(self, key: Key, params: object = None) -> tuple[Array, MazeState]:
        goal = 2 * jax.random.randint(key, (), 0, 2, jnp.int32)
        state = MazeState(jnp.zeros((), jnp.int32), goal)
        return self._observation(state), state

    def transition(self, key: Key, state: MazeState, action: Array) -> Transition[MazeState]:
        turned = (state.position == self.length) & (action % 2 == 0)
        east = (action == 1).astype(jnp.int32) - (action == 3).astype(jnp.int32)
        position = jnp.clip(state.position + east, 0, self.length)
        stuck = (position == state.position) & ~turned
        found = turned & (action == state.goal)
        reward = jnp.where(found, 4.0, jnp.where(stuck | turned, -0.1, 0.0))
        state = state._replace(position=position)
        return self._observation(state), state, reward, turned

    def _observation(self, state: MazeState) -> Array:
        start = jnp.where(state.goal == 0, jnp.array([0.0, 1.0, 1.0]), jnp.array([1.0, 1.0, 0.0]))
        inside = jnp.where(
            state.position == self.length, jnp.array([0.0, 1.0, 0.0]), jnp.array([1.0, 0.0, 1.0])
        )
        return jnp.where(state.position == 0, start, inside).astype(jnp.float32)


class DeckState(NamedTuple):
    """The state of `RepeatPrevious`."""

    suits: Int[Array, " cards"]
    dealt: Int[Array, ""]


@dataclass(frozen=True)
class RepeatPrevious(Environment[DeckState]):
    """Name the suit of the card that was seen `k` cards ago, as in POPGym (Morad et al., 2023).

    `k = 1` is the card that is seen now. Observations are suits, one-hot. From the `k`-th card on, each
    right answer is rewarded with `1 / (52 num_decks - k)`, and each wrong one costs as much. The easy,
    medium and hard versions have `k` of 4, 32 and 64, and 1, 2 and 3 decks.
    """

    num_actions: ClassVar[int] = 4
    observation_size: ClassVar[int] = 4
    k: int = 4
    num_decks: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.k < 52 * self.num_decks:
            raise ValueError(f"`k` must lie between 1 and {52 * self.num_decks - 1}; it is {self.k}.")

    def reset(self, key: Key, params: object = None) -> tuple[Array, DeckState]:
        suits = jax.random.permutation(key, jnp.arange(52 * self.num_decks, dtype=jnp.int32) % 4)
        state = DeckState(suits, jnp.ones((), jnp.int32))
        return self._observation(state), state

    def transition(self, key: Key, state: DeckState, action: Array) -> Transition[DeckState]:
        cards = 52 * self.num_decks
        right = action == state.suits[state.dealt - self.k]
        reward = jnp.where(right, 1.0, -1.0) / (cards - self.k)
        reward = jnp.where(state.dealt >= self.k, reward, 0.0)
        state = state._replace(dealt=state.dealt + 1)
        return self._observation(state), state, reward, state.dealt == cards

    def _observation(self, state: DeckState) -> Array:
        return jax.nn.one_hot(state.suits[state.dealt - 1], 4, dtype=jnp.float32)


class TrialState(NamedTuple):
    """The state of `TraceConditioning` and `TracePatterning`."""

    time: Int[Array, ""]  # steps since the onset of the conditioned stimuli
    delay: Int[Array, ""]  # from their onset to that of the unconditioned stimulus
    pause: Int[Array, ""]  # from its onset to the next trial
    pattern: Bool[Array, " stimuli"]  # conditioned stimuli of this trial
    pays: Bool[Array, ""]  # whether the unconditioned stimulus follows
    distractors: Int[Array, " distractors"]  # steps for which each is still on, this one included


@dataclass(frozen=True)
class _Trials(Environment[TrialState]):
    """An endless sequence of trials: conditioned stimuli (CS), a delay, an unconditioned stimulus (US)."""

    num_actions: ClassVar[int] = 1
    isi: tuple[int, int] = (7, 13)
    iti: tuple[int, int] = (80, 129)
    num_distractors: int = 10
    cs_steps: int = 4
    us_steps: int = 2

    @property
    def num_cs(self) -> int:
        """The number of conditioned stimuli."""
        raise NotImplementedError

    @property
    def observation_size(self) -> int:
        return self.num_cs + 1 + self.num_distractors

    def draw_pattern(self, key: Key) -> tuple[Array, Array]:
        """Return the conditioned stimuli of a trial, and whether the unconditioned one follows."""
        raise NotImplementedError

    def draw_distractors(self, key: Key, left: Array, begins: Array) -> Array:
        """Return the steps for which each distractor is still on; `begins` is true where a trial begins."""
        raise NotImplementedError

    def reset(self, key: Key, params: object = None) -> tuple[Array, TrialState]:
        none = jnp.zeros(self.num_distractors, jnp.int32)
        key_trial, key_distractors = jax.random.split(key)
        state = self._trial(key_trial, self.draw_distractors(key_distractors, none, jnp.ones((), bool)))
        return self._observation(state), state

    def transition(self, key: Key, state: TrialState, action: Array) -> Transition[TrialState]:
        key_trial, key_distractors = jax.random.split(key)
        time = state.time + 1
        begins = time >= state.delay + state.pause
        left = self.draw_distractors(key_distractors, state.distractors, begins)
        same = lambda: state._replace(time=time, distractors=left)
        state = jax.lax.cond(begins, lambda: self._trial(key_trial, left), same)
        observation = self._observation(state)
        return observation, state, observation[self.num_cs], jnp.zeros((), bool)

    def _trial(self, key: Key, distractors: Array) -> TrialState:
        delay, pause, pattern = jax.random.split(key, 3)
        between = lambda key, ends: jax.random.randint(key, (), ends[0], ends[1] + 1, jnp.int32)
        times = jnp.zeros((), jnp.int32), between(delay, self.isi), between(pause, self.iti)
        return TrialState(*times, *self.draw_pattern(pattern), distractors)

    def _observation(self, state: TrialState) -> Array:
        cs = state.pattern & (state.time < self.cs_steps)
        since = state.time - state.delay
        us = state.pays & (since >= 0) & (since < self.us_steps)
        return jnp.concatenate([a.astype(jnp.float32) for a in (cs, us[None], state.distractors > 0)])


@dataclass(frozen=True)
class TraceConditioning(_Trials):
    """Predict a stimulus that follows another one after a random delay (Rafiee et al., 2022), for ever.

    Observations are the conditioned stimulus (CS), the unconditioned stimulus (US) and distractors. A trial
    begins with the CS, on for `cs_steps`. The US follows after a delay drawn from `isi` (onset to onset, both
    ends included), on for `us_steps`, and the next trial begins after a pause drawn from `iti`. Distractor
    `i` = 1, 2, ... starts with probability `1 / (10 i)` in a step if it was off in the step before, and is on
    for `cs_steps`. The reward is 1 where the US is on: the discounted return is what to predict. There is one
    action, without effect.
    """

    num_cs: ClassVar[int] = 1

    def draw_pattern(self, key: Key) -> tuple[Array, Array]:
        return jnp.ones(1, bool), jnp.ones((), bool)

    def draw_distractors(self, key: Key, left: Array, begins: Array) -> Array:
        chances = 1 / (10 * np.arange(1, self.num_distractors + 1, dtype=np.float32))
        starts = jax.random.uniform(key, left.shape, jnp.float32) < chances
        return jnp.where(left > 0, left - 1, self.cs_steps * starts.astype(left.dtype))


@dataclass(frozen=True)
class TracePatterning(_Trials):
    """`TraceConditioning` by patterns of several conditioned stimuli (Rafiee et al., 2022).

    The US follows where exactly one of the `num_patterns` activation patterns is on; each has half of the
    `num_cs` conditioned stimuli, and `seed` draws them. A trial shows one of them with a probability such
    that, together with the patterns drawn by tossing a coin for each CS in the other trials, half of the
    trials have a US. Each distractor is on in every second trial, by chance, together with the CSs.
    """

    num_cs: int = 6
    num_patterns: int = 10
    seed: int = 0
    _patterns: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        halves = list(itertools.combinations(range(self.num_cs), self.num_cs // 2))
        if not 1 <= self.num_patterns <= len(halves):
            raise ValueError(
                f"`num_patterns` must lie between 1 and {len(halves)}, the number of ways to choose half of "
                f"{self.num_cs} stimuli; it is {self.num_patterns}."
            )
        chosen = np.random.RandomState(self.seed).permutation(len(halves))[: self.num_patterns]
        rows = [[i in halves[number] for i in range(self.num_cs)] for number in chosen]
        object.__setattr__(self, "_patterns", np.array(rows))

    def draw_pattern(self, key: Key) -> tuple[Array, Array]:
        key_kind, key_number, key_coins = jax.random.split(key, 3)
        known, every = self.num_patterns, 2**self.num_cs
        # of the coins' patterns, a share of known / every has a US, too
        chosen = jax.random.bernoulli(key_kind, (every / 2 - known) / (every - known))
        patterns = jnp.asarray(self._patterns)
        coins = jax.random.bernoulli(key_coins, 0.5, (self.num_cs,))
        pattern = jnp.where(chosen, patterns[jax.random.randint(key_number, (), 0, known)], coins)
        return pattern, jnp.any(jnp.all(patterns == pattern[None], axis=1))

    def draw_distractors(self, key: Key, left: Array, begins: Array) -> Array:
        drawn = lambda: self.cs_steps * jax.random.bernoulli(key, 0.5, left.shape).astype(left.dtype)
        found: Array = jax.lax.cond(begins, drawn, lambda: jnp.maximum(left - 1, 0))
        return found
