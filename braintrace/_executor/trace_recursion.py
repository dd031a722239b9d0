"""Variants of the trace recursion: another decay than the local Jacobian, and a low-pass filter.

    trace[t] = A trace[t-1] + J x        A = D (no paths through ops), the own diagonal, a fixed leak, or zero
    read[t]  = kappa read[t-1] + slope trace[t]

`slope` is the element-wise derivative of a reading, the variable through which others read the states (a
spike of a voltage). For a rule, a filter is one more state for each reading, with these rows of `D` and `J`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array

from .._compiler.errors import NotSupportedError
from .._compiler.leaky_readouts import find_readouts
from .._compiler.program import Var
from .._compiler.slices import behind
from .._compiler.step import show_paths
from .._types import DTypeLike, Shape
from .group_readings import find_readings
from .trace_math import Jacobian, States, dot

if TYPE_CHECKING:
    from .executor import ETraceGraphExecutor

Jacobians = dict[int, Jacobian | None]
Instants = dict[tuple[int, int], States]
Slopes = Mapping[int, Sequence[States]]  # of the readings of each group


# computes the matrix `A` of each group
Decay = Callable[["ETraceGraphExecutor", Mapping[Var, Array], Jacobians, Instants], Jacobians]


@dataclass(frozen=True)
class Own:
    """Decay by the own diagonal: the derivative of each unit in its own old state, along all paths."""

    def __call__(
        self, executor: ETraceGraphExecutor, env: Mapping[Var, Array], D: Jacobians, J: Instants
    ) -> Jacobians:
        from .own_diagonal import own_diagonals

        return own_diagonals(executor, env, D, J)


@dataclass(frozen=True)
class Leak:
    """Decay by a fixed number for all units but those of readouts; with zero, traces have no memory."""

    value: float

    def __call__(
        self, executor: ETraceGraphExecutor, env: Mapping[Var, Array], D: Jacobians, J: Instants
    ) -> Jacobians:
        readouts = find_readouts(executor.graph)
        result: Jacobians = {k: d if k in readouts else None for k, d in D.items()}
        for local in executor.groups:
            if local.group.index in readouts or not self.value:
                continue
            n, shape, dtype = range(local.group.num_state), local.group.varshape, local.group.dtype
            one, zero = jnp.full(shape, self.value, dtype), jnp.zeros(shape, dtype)
            result[local.group.index] = [[one if s == r else zero for r in n] for s in n]
        return result


@dataclass(frozen=True)
class Recursion:
    """A variant of the trace recursion."""

    decay: Decay | None = None  # None for the local Jacobian
    kappa: float | None = None  # the decay of the filter; None for no filter
    one_layer_on: bool = False  # filter only readings that another group uses

    def filters(self, executor: ETraceGraphExecutor) -> dict[int, int]:
        """The number of filtered readings of each group."""
        if self.kappa is None:
            return {}
        graph, found = executor.graph, {}
        for group in graph.hidden_groups:
            read = behind(graph.module_info.program, graph.other_outvars(group))
            readings = find_readings(graph)[group.index]
            if self.kappa and group.index in find_readouts(graph):  # a readout filters by itself
                continue
            if self.one_layer_on and not any(v in read for v in readings):
                continue
            if any(h.axis is not None or h.split for h in group.hidden):
                raise NotSupportedError(
                    f"The trace of {show_paths(group.hidden_paths)} cannot be filtered: its states share an "
                    "array or are complex. Use the rule without a filter."
                )
            found[group.index] = len(readings)
        return found

    def of(
        self,
        executor: ETraceGraphExecutor,
        env: Mapping[Var, Array],
        D: Jacobians,
        J: Instants,
        slopes: Slopes,
    ) -> tuple[Jacobians, Instants]:
        """The matrices `A` and `J` of the recursion, including filter states."""
        if self.decay is not None:
            D = self.decay(executor, env, D, J)
        for k, num in executor.filters.items():
            assert self.kappa is not None
            n, (shape, dtype) = range(num), _like(executor, k)
            zero = jnp.zeros(shape, dtype)
            old = D[k] if D[k] is not None else [[zero] * len(s) for s in [slopes[k][0]] for _ in s]
            assert old is not None
            columns = list(zip(*old, strict=True))
            own = [[jnp.full(shape, self.kappa if a == b else 0.0, dtype) for b in n] for a in n]
            below = [[*(dot(s, c) for c in columns), *row] for s, row in zip(slopes[k], own, strict=True)]
            D = {**D, k: [*([*row, *[zero] * num] for row in old), *below]}
        slots = {(t.relation.site.index, t.group.index): t for t in executor.slots}
        J = {
            key: j
            if key[1] not in executor.filters
            else [*j, *(slots[key].pair(s, j) for s in slopes[key[1]])]
            for key, j in J.items()
        }
        return D, J


def _like(executor: ETraceGraphExecutor, k: int) -> tuple[Shape, DTypeLike]:
    group = executor.graph.hidden_groups[k]
    return group.varshape, group.dtype
