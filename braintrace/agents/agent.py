"""The loop of an agent: environments, the learner and an algorithm, as pure functions and one scan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, UInt32

from .._learners.learner import Learner
from .._types import Key, PyTree

if TYPE_CHECKING:
    import optax

Params = dict[str, PyTree]  # all that is learned: the parameters of the net under 'net', and any others
Pair = tuple[Array, Array]
Pull = Callable[[PyTree], PyTree]  # cotangents of the net's output -> online gradient of its parameters


class GymnaxEnvironment(Protocol):
    """An environment with gymnax's interface, as described in `Agent`."""

    def reset(self, key: Key, params: PyTree, /) -> tuple[PyTree, PyTree]: ...

    def step(self, key: Key, state: PyTree, action: Array, params: PyTree, /) -> tuple[PyTree, ...]: ...


class Algorithm(Protocol):
    """How an agent acts and learns: pure functions, for one environment."""

    def init_params(self, params: PyTree, y: PyTree) -> Params:
        """Return all that is learned; `y` has the shapes of the net's output."""

    def init_memory(self, params: PyTree, y: PyTree) -> PyTree:
        """Return the eligibility traces, and what else is carried from step to step."""

    def draw(self, key: Key, y: PyTree) -> PyTree:
        """Return the random numbers of one step."""

    def step(
        self, params: Params, y: PyTree, pull: Pull, memory: PyTree, reward: Array, done: Array, drawn: PyTree
    ) -> tuple[Array, Array, PyTree, Params, Array]:
        """Learn from the last transition, and act.

        Args:
            params: All that is learned.
            y: The output of the net at this step.
            pull: The derivative of `y`, from cotangents of `y` to gradients of the net's parameters.
            memory: The result of `init_memory` or of the last step.
            reward: The reward of the last action.
            done: Whether the last action ended an episode; `y` then belongs to the first step of the next.
            drawn: The result of `draw`.

        Returns:
            The action, its predicted return, the memory, the direction in which to move the parameters, and
            the TD error of the last transition.
        """


class AgentState(NamedTuple):
    """All that an agent carries from step to step; leaves of an environment have a leading axis."""

    params: Params
    opt_state: PyTree
    key: Key
    time: UInt32[Array, ""]  # steps so far; with the key, it gives the random numbers of the next step
    env_state: PyTree
    observation: PyTree
    carry: PyTree  # hidden states of the net
    traces: dict[str, Array]  # the learner's: influence of the parameters on the hidden states
    memory: PyTree  # the algorithm's: eligibility traces of returns
    reward: Float[Array, " env"]
    done: Bool[Array, " env"]


class Steps(NamedTuple):
    """Transitions and diagnostics of a run."""

    observation: PyTree
    action: Int[Array, "time env"]
    reward: Float[Array, "time env"]
    done: Bool[Array, "time env"]
    value: Float[Array, "time env"]  # the predicted return of the action
    error: Float[Array, "time env"]  # the TD error of the transition before

    def episode_returns(self) -> np.ndarray:
        """Return the sum of rewards of each whole episode between two ends, in order of time."""
        found = []
        for rewards, dones in zip(np.asarray(self.reward).T, np.asarray(self.done).T, strict=True):
            ends = np.flatnonzero(dones)
            found += [(b, rewards[a:b].sum()) for a, b in zip(ends[:-1] + 1, ends[1:] + 1, strict=True)]
        return np.array([total for _, total in sorted(found, key=lambda pair: pair[0])])


@dataclass(frozen=True, eq=False)
class Agent:
    """An agent that acts in environments and learns at every step.

    At each step the net reads an observation, the algorithm learns from the transition before and chooses an
    action, and the environment answers. The parameters are shared by all environments; states, traces and
    eligibility are each environment's own (`vmap`), and the updates of all environments are averaged. Where
    an episode ends, hidden states and traces of that environment are reset.

    Args:
        net: A learner of `braintrace.online`, made for one observation without a batch axis. Its output is
            what the algorithm takes.
        algorithm: `ActorCritic(...)` or `QRC(...)`.
        optimizer: An Optax gradient transformation.
        env: An environment with gymnax's interface: `reset(key, params) -> observation, state` and
            `step(key, state, action, params)`, which returns observation, state, reward, terminated,
            truncated and info (or, before gymnax 1, `done` for both), and begins the next episode by itself.
            An episode that is truncated counts as ended: its value is not bootstrapped.
        env_params: The parameters of the environment, its `default_params` by default.
        num_envs: The number of environments in parallel.

    Raises:
        TypeError: The environment has another interface.
        ValueError: The environment's observations, rewards or flags have the wrong shapes.

    >>> import braintrace, jax, jax.numpy as jnp, optax
    >>> from braintrace.agents import ActorCritic, environments
    >>> def step(params, h, x):
    ...     h = jnp.tanh(0.9 * h + x @ params["w"])
    ...     return h, (h @ params["actor"], h @ params["critic"])
    >>> params = {"w": jnp.ones((3, 4)), "actor": jnp.zeros((4, 2)), "critic": jnp.zeros(4)}
    >>> net = braintrace.online(step, params, jnp.zeros(4), jnp.ones(3))
    >>> agent = Agent(net, ActorCritic(gamma=0.9, lam=0.9), optax.sgd(1e-2), environments.MemoryChain(4))
    >>> state = agent.init(params, jnp.zeros(4), jax.random.key(0))
    >>> state, steps = agent.run(state, 100)
    >>> steps.reward.shape, len(steps.episode_returns())
    ((100, 1), 19)
    """

    net: Learner
    algorithm: Algorithm
    optimizer: optax.GradientTransformation
    env: GymnaxEnvironment
    env_params: PyTree = None
    num_envs: int = 1

    def init(self, params: PyTree, carry: PyTree, key: Key) -> AgentState:
        """Return the state of the agent at the start.

        Args:
            params: The parameters of the net.
            carry: The hidden states of the net at the start of an episode.
            key: A random key.
        """
        _check_environment(self.env, self._env_params, self.net)
        key, key_env = jax.random.split(key)
        observation, env_state = jax.vmap(self._reset_env)(jax.random.split(key_env, self.num_envs))
        traces, y = self.net.init(params, carry), self._output
        learned = self.algorithm.init_params(params, y)
        repeat = partial(jax.tree.map, lambda a: jnp.repeat(jnp.asarray(a)[None], self.num_envs, 0))
        memory = self.algorithm.init_memory(params, y)
        return AgentState(
            params=learned,
            opt_state=self.optimizer.init(learned),
            key=key,
            time=jnp.zeros((), jnp.uint32),
            env_state=env_state,
            observation=observation,
            carry=repeat(carry),
            traces=repeat(traces),
            memory=repeat(memory),
            reward=jnp.zeros(self.num_envs),
            done=jnp.ones(self.num_envs, bool),
        )

    def step(self, state: AgentState) -> tuple[AgentState, Steps]:
        """Take one step in each environment and update the parameters: a pure function."""
        after, steps = self.rollout(state, 1)
        return after, jax.tree.map(lambda a: a[0], steps)

    def rollout(self, state: AgentState, num_steps: int) -> tuple[AgentState, Steps]:
        """Take many steps: `run` as a pure function, without its checks; it may be jitted and mapped."""
        # random numbers of all steps at once: one at a time, they would take longer than the net
        times = state.time + jnp.arange(num_steps, dtype=jnp.uint32)
        drawn = jax.vmap(partial(self._draw, state.key))(times)
        if self.num_envs > 1:
            return jax.lax.scan(self._advance, state, drawn)
        # no axis of environments in the loop: where it is added to a trace, XLA computes the trace twice
        drawn, own = jax.tree.map(lambda a: a[:, 0], drawn), jax.tree.map(lambda a: a[0], state[4:])
        # two steps per iteration: with one, XLA copies the eligibility traces at every step
        state, steps = jax.lax.scan(self._advance, AgentState(*state[:4], *own), drawn, unroll=2)
        own = jax.tree.map(lambda a: a[None], state[4:])
        return AgentState(*state[:4], *own), jax.tree.map(lambda a: a[:, None], steps)

    def _draw(self, key: Key, time: Array) -> tuple[Key, PyTree]:
        """Return keys for the environments, and the algorithm's random numbers, of one step."""
        keys = jax.random.split(jax.random.fold_in(key, time), (2, self.num_envs))
        return keys[0], jax.vmap(lambda key: self.algorithm.draw(key, self._output))(keys[1])

    def _advance(self, state: AgentState, drawn: tuple[Key, PyTree]) -> tuple[AgentState, Steps]:
        """Take a step with given random numbers; with one environment, arrays have no axis for it."""
        params, opt_state, key, time, *own = state
        if self.num_envs == 1:  # a mapped `cond` runs both of its branches
            after, direction, steps = self._one(params, drawn, own)
        else:
            after, direction, steps = jax.vmap(partial(self._one, params))(drawn, own)
            direction = jax.tree.map(lambda a: jnp.mean(a, 0), direction)
        descent = jax.tree.map(jnp.negative, direction)
        updates, opt_state = self.optimizer.update(descent, opt_state, params)
        params = jax.tree.map(jnp.add, params, updates)
        return AgentState(params, opt_state, key, time + 1, *after), steps

    def run(self, state: AgentState, num_steps: int) -> tuple[AgentState, Steps]:
        """Take many steps in one compiled loop.

        Args:
            state: The result of `init`, or of an earlier `run`; it remains valid.
            num_steps: The number of steps in each environment.

        Returns:
            The state after the last step, and what happened.

        Raises:
            FloatingPointError: A reward or a prediction is not finite. `state` is the last good one.
        """
        after, steps = _rollout(self, state, num_steps)
        for what, array, advice in (
            ("The reward", steps.reward, "an environment that returns numbers"),
            ("The TD error", steps.error, "smaller updates"),
        ):
            values = np.asarray(array)
            if not np.isfinite(values).all():
                time, env = map(int, np.argwhere(~np.isfinite(values))[0])
                raise FloatingPointError(
                    f"{what} at step {time} of this run in environment {env} is {values[time, env]}. The "
                    f"state that was passed to `run` is unchanged; go on from there with {advice}."
                )
        return after, steps

    @property
    def _env_params(self) -> PyTree:
        given = self.env_params
        return getattr(self.env, "default_params", None) if given is None else given

    @property
    def _output(self) -> PyTree:
        """The shapes of the net's output."""
        function = self.net.function
        return jax.tree.unflatten(function.step.out_tree, function.outputs)

    def _reset_env(self, key: Key) -> tuple[PyTree, PyTree]:
        observation, state = _strong(self.env.reset(key, self._env_params))
        return observation, state

    def _one(
        self, params: Params, drawn: tuple[Key, PyTree], own: list[PyTree]
    ) -> tuple[list[PyTree], Params, Steps]:
        """Take a step in one environment, with its part of the state: the fields after `time`.

        Returns that part after the step, the direction in which to move the parameters, and the transition.
        """
        env_state, observation, carry, traces, memory, reward, done = own
        # a branch, because `where` over all traces would slow down every step
        carry, traces = jax.lax.cond(done, self.net.reset, lambda *now: now, carry, traces)

        def forward(net: PyTree) -> tuple[PyTree, PyTree]:
            new_carry, new_traces, y = self.net.step(net, carry, traces, observation)
            return y, (new_carry, new_traces)

        y, pull, (carry, traces) = jax.vjp(forward, params["net"], has_aux=True)
        key, numbers = drawn
        action, value, memory, direction, error = self.algorithm.step(
            params, y, lambda dy: pull(dy)[0], memory, reward, done, numbers
        )
        seen, env_state, reward, *flags, _ = _strong(self.env.step(key, env_state, action, self._env_params))
        done = flags[0] if len(flags) == 1 else flags[0] | flags[1]
        reward = jnp.asarray(reward, jnp.result_type(float))
        after = [env_state, seen, carry, traces, memory, reward, done]
        return after, direction, Steps(observation, action, reward, done, value, error)


_rollout = jax.jit(Agent.rollout, static_argnums=(0, 2))


def _strong(tree: PyTree) -> PyTree:
    """Convert weakly typed numbers to strong types, so that a loop carries the same types."""
    return jax.tree.map(lambda a: jax.lax.convert_element_type(a, jnp.result_type(a)), tree)


def _check_environment(env: GymnaxEnvironment, params: PyTree, net: Learner) -> None:
    """Raise an error unless `env` has gymnax's interface and fits the net."""
    name, key = type(env).__name__, jax.random.key(0)
    form = (
        "`reset(key, params) -> observation, state` and `step(key, state, action, params) -> observation, "
        "state, reward, terminated, truncated, info` as pure functions, as in gymnax"
    )

    def shapes(method: str, lengths: tuple[int, ...], *args: PyTree) -> PyTree:
        """The shapes of what a method returns, a tuple of one of these lengths."""
        function = getattr(env, method, None)
        if not callable(function):
            raise TypeError(f"{name} has no method `{method}`. An environment has {form}.")
        try:
            found = jax.eval_shape(lambda *args: _strong(function(*args, params)), *args)
        except TypeError as error:
            raise TypeError(f"{name} has another interface ({error}). An environment has {form}.") from error
        if not isinstance(found, tuple) or len(found) not in lengths:
            what = f"{len(found)} values" if isinstance(found, tuple) else type(found).__name__
            raise TypeError(f"`{method}` of {name} returns {what}. An environment has {form}.")
        return found

    observation, state = shapes("reset", (2,), key)
    wanted, found = (
        ", ".join(f"{a.dtype}{list(a.shape)}" for a in leaves)
        for leaves in (net.function.x.like, jax.tree.leaves(observation))
    )
    if wanted != found:
        raise ValueError(
            f"Observations of {name} are {found}, and the net was made for {wanted}, without "
            "an axis for environments. Make the net with an observation of this environment."
        )
    seen, new, reward, *flags, _ = shapes("step", (5, 6), key, state, jnp.zeros((), int))
    if reward.shape != ():
        raise ValueError(f"The reward of {name} must be one number; it has the shape {reward.shape}.")
    for flag in flags:
        if flag.shape != () or flag.dtype != bool:
            raise ValueError(
                f"The flags of {name} that end an episode must each be one boolean, because environments "
                f"are mapped by `vmap`; one is {flag.dtype}{list(flag.shape)}."
            )
    for what, old, now in (("state", state, new), ("observation", observation, seen)):
        if old != now:
            raise ValueError(
                f"The {what} of {name} after a step differs from that after a reset in structure, shape or "
                f"type: {now} and {old}."
            )


def check_pair(y: PyTree, algorithm: str, ranks: tuple[int, int], what: str) -> None:
    """Raise an error unless the net's output is a pair of arrays of these ranks."""
    if not isinstance(y, tuple | list) or [len(a.shape) for a in y] != [*ranks]:
        raise ValueError(
            f"For `{algorithm}`, the net's output is a pair: {what}. It is "
            f"{jax.tree.map(lambda a: a.shape, y)}."
        )
