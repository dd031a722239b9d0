"""Learning signals, which are contracted with traces: the back-propagated dL/dh, or a replacement for it.

A broadcast signal applies to the readings of a group (its spikes, say), and is multiplied by their slopes to
get to the states. Weights without a trace, such as those of a readout, keep their ordinary gradient. So do
the weights of a readout with memory, because errors reach its units directly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from .._compiler.errors import NotSupportedError
from .._compiler.leaky_readouts import find_readouts
from .._compiler.samples import find_samples
from .._executor.executor import ETraceGraphExecutor
from .._executor.group_readings import find_readings
from .._executor.output_errors import (
    at_states,
    at_units,
    check_readings,
    flat_rows,
    groups_of_errors,
    places,
    readout_slopes,
    specs_of_matrices,
    width_of,
)
from .._executor.sharding import Spec
from .._executor.trace_math import States
from .._executor.window import Signals
from .._types import Array, ArrayLike, Aval, Leaves, Options, PyTree, Values

Key = tuple[int, ...]


@dataclass(frozen=True)
class BackPropagated:
    """The derivative dL/dh of the step's loss, the default; also the interface of all signals."""

    takes: ClassVar[tuple[str, ...]] = ()  # names of the inputs that a call of the learner takes
    spellings: ClassVar[dict[str, str]] = {}  # other names for these
    is_broadcast: ClassVar[bool] = False  # applies to the readings of groups
    reads_outputs: ClassVar[bool] = False  # computed from cotangents of the outputs
    words: ClassVar[str] = ""  # its name in reports
    has_windows: ClassVar[bool] = True  # whether it is defined in windows
    moves: ClassVar[bool] = True  # whether its inputs differ from step to step
    comes_last: ClassVar[bool] = False  # its input may be the last positional argument

    def start(self, executor: ETraceGraphExecutor) -> Values:
        """The initial values of its arrays, which a reset keeps."""
        return {}

    def specs(self, executor: ETraceGraphExecutor, shapes: Mapping[str, Aval]) -> dict[str, Spec]:
        """The partition specs of its arrays, given `executor.sharding`."""
        return {}

    def prepared(
        self, executor: ETraceGraphExecutor, params: Leaves, consts: Leaves, values: Values
    ) -> Values:
        """The arrays of the signal, adapted to these parameters."""
        return values

    def at_end(self, executor: ETraceGraphExecutor, given: Options, hidden: Leaves) -> Leaves | None:
        """An estimate of dL/dh of losses after a window, by hidden state; None if it has none."""
        return None

    @property
    def is_bootstrapped(self) -> bool:
        """Whether it may have such an estimate, which counts at the end of every window."""
        return type(self).at_end is not BackPropagated.at_end

    def named(self, given: Options) -> Options:
        """The inputs of a call by their names in `takes`; unknown names are kept."""
        return {self.spellings.get(k, k): v for k, v in given.items()}

    def masked(self, values: Options, mask: Array) -> Options:
        """The inputs of a step times the mask of its loss, which is a scalar or (batch,)."""
        return {k: times_mask(v, mask) if self.moves and k in self.takes else v for k, v in values.items()}

    def of(self, executor: ETraceGraphExecutor, values: Values, d_outs: Leaves, given: Options) -> Made:
        """The signal of a step by group, at its readings if broadcast, else at its states; None for dL/dh."""
        return None


# a signal by group: one array, or one for each reading if it is broadcast; None for dL/dh
Made = dict[int, Any] | None

Signal = BackPropagated  # the type of any signal
PROPAGATED = BackPropagated()


@dataclass(frozen=True)
class Broadcast(BackPropagated):
    """A signal at the readings of each group, through matrices (entries of the error, units)."""

    is_broadcast: ClassVar[bool] = True
    has_windows: ClassVar[bool] = False

    def specs(self, executor: ETraceGraphExecutor, shapes: Mapping[str, Aval]) -> dict[str, Spec]:
        return specs_of_matrices(executor, shapes)


@dataclass(frozen=True)
class Feedback(Broadcast):
    """The outputs' errors through matrices of their own: `dL/dread = sum_o dL/do B`.

    `B` is random and fixed; with `adaptive`, whenever the readout changes from `R` to `R'` it becomes
    `R' + (1 - decay) (B - R)`, where `R` is the derivative of the outputs in the readings, at zero. So `B`
    follows the changes of the readout, and decays as it does.
    """

    key: Key = (0, 0)
    adaptive: bool = False
    decay: float = 0.0
    reads_outputs: ClassVar[bool] = True
    words: ClassVar[str] = "random feedback"

    def start(self, executor: ETraceGraphExecutor) -> Values:
        check_readings(executor)
        values = {}
        for k, i, o, size, width, dtype in places(executor):
            key = _folded(self.key, k, i, o)
            B = jax.random.normal(key, (size, width), jnp.finfo(dtype).dtype) / np.sqrt(size)
            values[f"feedback:{o}->{k}.{i}"] = B.astype(dtype)
            if self.adaptive:
                values[f"readout:{o}->{k}.{i}"] = jnp.zeros((size, width), dtype)
                values["readout:seen"] = jnp.zeros((), bool)
        return values

    def prepared(
        self, executor: ETraceGraphExecutor, params: Leaves, consts: Leaves, values: Values
    ) -> Values:
        if not self.adaptive:
            return values
        result = dict(values)
        for name, now in readout_slopes(executor, params, consts).items():
            B, before = values[f"feedback:{name}"], values[f"readout:{name}"]
            moved = now + (1 - self.decay) * (B - before)
            changed = jnp.any(now != before) & values["readout:seen"]
            result[f"feedback:{name}"] = jnp.where(changed, moved, B)
            result[f"readout:{name}"] = now
        return {**result, "readout:seen": jnp.ones((), bool)}

    def of(self, executor: ETraceGraphExecutor, values: Values, d_outs: Leaves, given: Options) -> Made:
        samples = find_samples(executor.info)
        errors = {o: flat_rows(d, samples) for o, d in enumerate(d_outs)}
        return _projected(executor, values, errors)


@dataclass(frozen=True)
class TargetProjection(Broadcast):
    """A fixed random projection of the target that a call is given: `dL/dread = target B`.

    `matrices`, (targets, units) for each group, replace random ones.
    """

    size: int = 1  # length of the target
    key: Key = (0, 0)
    # nested tuples for each group, because rules are compared by value
    matrices: tuple[tuple[tuple[float, ...], ...], ...] | None = None
    takes: ClassVar[tuple[str, ...]] = ("target",)
    spellings: ClassVar[dict[str, str]] = {"y_target": "target"}
    comes_last: ClassVar[bool] = True
    words: ClassVar[str] = "a projection of the target"

    def start(self, executor: ETraceGraphExecutor) -> Values:
        check_readings(executor)
        samples = find_samples(executor.info)
        if self.matrices is not None and len(self.matrices) != len(executor.graph.hidden_groups):
            raise ValueError(
                f"There are {len(self.matrices)} feedback matrices, and {len(executor.graph.hidden_groups)} "
                "groups of hidden states: give one for each, (targets, units)."
            )
        values = {}
        for group in groups_of_errors(executor):
            k, width = group.index, width_of(group.varshape, samples)
            for i, _ in enumerate(find_readings(executor.graph)[k]):
                if self.matrices is None:
                    B = jax.random.normal(_folded(self.key, k, i, 0), (self.size, width)) / np.sqrt(self.size)
                else:
                    B = jnp.asarray(self.matrices[k])
                    if B.ndim != 2 or B.shape[1] != width:
                        raise ValueError(
                            f"The feedback matrix of group {k} has the shape {B.shape}; its group has "
                            f"{width} units: (targets, {width})."
                        )
                values[f"feedback:0->{k}.{i}"] = B.astype(group.dtype)
        return values

    def of(self, executor: ETraceGraphExecutor, values: Values, d_outs: Leaves, given: Options) -> Made:
        rows = jnp.asarray(given["target"]).reshape(-1, _values_of(values, "feedback:")[0].shape[0])
        return _projected(executor, values, {0: rows})


@dataclass(frozen=True)
class Modulator(BackPropagated):
    """A third factor, passed to each call, as the signal at every state, whatever the loss is.

    It is a scalar, (batch,), or an array shaped as the states, with or without a last axis of states.
    """

    takes: ClassVar[tuple[str, ...]] = ("modulator",)
    has_windows: ClassVar[bool] = False
    words: ClassVar[str] = "a modulator"

    def of(self, executor: ETraceGraphExecutor, values: Values, d_outs: Leaves, given: Options) -> Made:
        return {
            g.index: at_states(jnp.asarray(given["modulator"]), g.varshape, g.num_state, g.dtype)
            for g in executor.graph.hidden_groups
        }


@dataclass(frozen=True)
class Bootstrapped(BackPropagated):
    """An estimate of dL/dh of later losses, added to the cotangents at a window's end.

    `net(synthesizer, states) -> signals` takes and returns `(*varshape, S)` by group; `synthesizer` is an
    input of the call.
    """

    net: Callable[[PyTree, dict[int, Array]], dict[int, Array]]
    takes: ClassVar[tuple[str, ...]] = ("synthesizer",)
    moves: ClassVar[bool] = False
    words: ClassVar[str] = "a bootstrapped signal"

    def at_end(self, executor: ETraceGraphExecutor, given: Options, hidden: Leaves) -> Leaves | None:
        by_var = {h.outvar: a for h, a in zip(executor.info.hidden, hidden, strict=True)}
        groups = executor.graph.hidden_groups
        if any(h.split for g in groups for h in g.hidden):
            raise NotSupportedError("There is no bootstrapped signal for complex states.")
        states = {g.index: g.concat_hidden([by_var[v] for v in g.hidden_outvars]) for g in groups}
        found = jax.lax.stop_gradient(self.net(given["synthesizer"], jax.lax.stop_gradient(states)))
        for g in groups:
            by_var.update(zip(g.hidden_outvars, g.split_hidden(found[g.index]), strict=True))
        return [by_var[h.outvar] for h in executor.info.hidden]


def learning_signals(
    signal: Signal,
    executor: ETraceGraphExecutor,
    values: Values,
    back: Signals,
    at_readings: dict[int, list[Array]],
    d_outs: Leaves,
    slopes: Mapping[int, Sequence[States]],
    given: Options,
) -> Signals:
    """The signals of one step by group, (S, *varshape); for filtered groups, at the filter states alone."""
    made = signal.of(executor, values, d_outs, given)
    result: Signals = {}
    for k, g in back.items():
        of_states, of_readings = g, at_readings.get(k, [])
        if made is not None and signal.is_broadcast and k not in find_readouts(executor.graph):
            of_readings = [a.astype(g.dtype) for a in made[k]]
            weighed = [
                jnp.stack([s * a for s in each]) for each, a in zip(slopes[k], of_readings, strict=True)
            ]
            of_states = sum(weighed[1:], weighed[0]) if weighed else jnp.zeros_like(g)
        elif made is not None and not signal.is_broadcast:
            of_states = made[k]
            of_readings = [made[k][0]] * len(of_readings)
        if executor.filters.get(k):
            result[k] = jnp.concatenate([jnp.zeros_like(of_states), jnp.stack(of_readings)])
        else:
            result[k] = of_states
    return result


def times_mask(given: ArrayLike, mask: Array) -> Array:
    """Multiply a value, with or without a batch axis, by the mask; zero where the mask is, even if NaN."""
    value = jnp.asarray(given)
    value = value if jnp.issubdtype(value.dtype, jnp.inexact) else value.astype(mask.dtype)
    if mask.ndim and value.shape[:1] != mask.shape:
        value = jnp.broadcast_to(value[None], (*mask.shape, *value.shape))
    mask = mask.reshape(*mask.shape, *[1] * (value.ndim - mask.ndim)).astype(value.dtype)
    return jnp.where(mask == 0, jnp.zeros_like(value), value * mask)


def _folded(key: Key, *numbers: int) -> Array:
    found = jnp.asarray(key, jnp.uint32)
    for n in numbers:
        found = jax.random.fold_in(found, n)
    return found


def as_key(key: ArrayLike | None) -> Key:
    """A random key as a tuple of integers, which can be compared."""
    if key is None:
        return (0, 0)
    if jnp.issubdtype(jnp.asarray(key).dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    return tuple(int(a) for a in np.asarray(key).ravel())


def _values_of(values: Values, prefix: str) -> list[Array]:
    return [v for k, v in values.items() if k.startswith(prefix)]


def _projected(
    executor: ETraceGraphExecutor, values: Values, errors: dict[int, Float[Array, "samples entries"]]
) -> dict[int, list[Array]]:
    """Project errors, of each sample or of all, to the readings of each group."""
    samples = find_samples(executor.info)
    found = {}
    for group in groups_of_errors(executor):
        k, shape = group.index, group.varshape
        each = []
        for i, _ in enumerate(find_readings(executor.graph)[k]):
            terms = [
                jnp.matmul(e.astype(B.dtype), B, precision="highest")
                for o, e in errors.items()
                if (B := values.get(f"feedback:{o}->{k}.{i}")) is not None
            ]
            each.append(at_units(sum(terms[1:], terms[0]), shape, samples))
        found[k] = each
    return found
