"""Layers: the influence of parameters on the states above their traces, kept densely.

    P = E on the states that a parameter's traces follow        P = E + Q on those above, every unit of them

Over a window with full Jacobian `H`, in which parameters add the influence `A`, on the states above:

    Q' = H (E + Q) + A - E'        gradient = within the window + <dL/dh[start], E + Q>

Over several windows, the transpose of this recursion is a backward pass in which the cotangents of the states
above cross the start of a window, and all others meet `E` there: one pass for each distinct set of states.

If the traces of a layer are exact on its own states, its influence on the layers above is exact, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._compiler.errors import NotSupportedError
from .._compiler.layers_above import Above, Across
from .._compiler.step import name_of
from .._executor.dense_influence import DenseInfluence
from .._executor.executor import ETraceGraphExecutor
from .._executor.memory import device_memory, show_bytes
from .._executor.partial_sums import Gradient, plus
from .._executor.pending_matrices import AffineTermsOf
from .._executor.per_sample import PerSample, find_per_sample
from .._executor.pulled_rows import PulledRows
from .._executor.sharding import Spec
from .._executor.trace_math import finite
from .._executor.window import BackwardPass, Crossing, Window
from .._types import Array, Aval, DTypeLike, Leaves, NumPyArray, Values


@dataclass(frozen=True)
class Layers:
    """The correction `Q` for the states above the traces; `samples` is the batch axis of the states."""

    samples: int | str | None = "auto"
    dtype: DTypeLike | None = None

    def start(self, executor: ETraceGraphExecutor, _: Values) -> Values:
        values = {name: a for block in self._blocks(executor) for name, a in block.store.zeros().items()}
        _check_memory(values)
        return values

    def lasting(self, executor: ETraceGraphExecutor) -> Values:
        """The arrays that survive a reset."""
        return {}

    def renewed(self, values: Values, *, fresh: bool) -> Values:
        """The arrays at the start of a sequence."""
        return values

    def written(self, executor: ETraceGraphExecutor, values: Values, length: int | None = None) -> Values:
        """The arrays: no windows are pending."""
        return values

    def past_with_traces(
        self, executor: ETraceGraphExecutor, values: Values, signals: Leaves, window: Window
    ) -> dict[int, Gradient]:
        """No gradients: no windows are pending."""
        return {}

    def crossings(
        self, executor: ETraceGraphExecutor, values: Values, passed: BackwardPass
    ) -> tuple[BackwardPass, list[Array], dict[int, int]]:
        """Which cotangents cross in each backward pass, and the pass of each leaf of the parameters."""
        blocks = self._blocks(executor)
        sets = list(dict.fromkeys([frozenset[int](), *(block.crossing for block in blocks)]))
        number = {i: sets.index(block.crossing) for block in blocks for i in block.store.names}
        return passed, [_flags(executor, states) for states in sets], number

    def num_rows(self, executor: ETraceGraphExecutor) -> int:
        """The number of rows that are pulled back at once, for `Q` after windows."""
        return max((len(block.indices) for block in self._blocks(executor)), default=0)

    def no_pairs(self, executor: ETraceGraphExecutor, values: Values, windows: int) -> Array:
        """Zeros of the shape of one element of `crossings`."""
        return _flags(executor, frozenset())

    def cross(self, executor: ETraceGraphExecutor, cotangents: Leaves, flags: Array, index: Array) -> Leaves:
        """The cotangents at a window's start that go on to the window before: those of the flagged leaves."""
        each = zip(cotangents, flags, strict=True)
        return [None if c is None else jnp.where(f != 0, finite(c), jnp.zeros_like(c)) for c, f in each]

    def over_windows(
        self, executor: ETraceGraphExecutor, before: Values, passed: BackwardPass, _: AffineTermsOf
    ) -> Values:
        """`Q` after windows, given the rule's arrays before them."""
        if not passed.keep:
            return {}
        blocks, values, pulled = self._blocks(executor), dict[str, Array](), dict[Any, PulledRows]()
        for block in blocks:
            # in a single window, the rows are the same for all parameters
            per, key = block.store.per, (block.states, None if passed.is_single else block.crossing)
            if key not in pulled:
                crossing = self._crossing(executor, passed, block)
                unit = per.unit_rows[:, block.indices]
                pulled[key] = PulledRows.through(per, passed.window, unit, crossing)
            rows = pulled[key]
            by = [(blocks[n].store, rows.start[:, :, blocks[n].indices]) for n in block.acted_on_by]
            added = rows.added(per, None if passed.fresh else before)
            values.update(block.store.advanced(before, added, [] if passed.fresh else by))
        return values

    def _crossing(
        self, executor: ETraceGraphExecutor, passed: BackwardPass, block: _Block
    ) -> Crossing | None:
        flags = _flags(executor, block.crossing)
        part = lambda c, i: self.cross(executor, c, flags, i)
        return None if passed.is_single else Crossing(passed.starts[1:], part)

    def past(self, executor: ETraceGraphExecutor, values: Values, signals: Leaves) -> dict[int, Gradient]:
        """The gradients `<signal, Q>` of signals at the carried states, by leaf of the parameters."""
        found: dict[int, Gradient] = {}
        for block in self._blocks(executor):
            along = finite(block.store.per.vectors(signals, dual=True)[:, block.indices])
            for i, term in block.store.gradients(values, along).items():
                found[i] = plus(term, found.get(i))
        return found

    def forget(self, executor: ETraceGraphExecutor, values: Values, is_reset: Array) -> Values:
        each = [block.store.reset(values, is_reset) for block in self._blocks(executor)]
        return {name: a for arrays in each for name, a in arrays.items()}

    def specs(self, executor: ETraceGraphExecutor, _: Mapping[str, Aval]) -> dict[str, Spec]:
        return {name: s for block in self._blocks(executor) for name, s in block.store.specs().items()}

    def _blocks(self, executor: ETraceGraphExecutor) -> list[_Block]:
        found = executor.per_sample
        if self not in found:
            found[self] = _blocks(executor, find_per_sample(executor, self.samples), self.dtype)
        return found[self]  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class _Block:
    """Some entries of the state vector, and the influence of parameters on them."""

    states: tuple[int, ...]  # indices of carried leaves
    indices: NumPyArray  # of their entries in the state vector
    crossing: frozenset[int]  # all the states above these parameters, whose cotangents cross a window's start
    store: DenseInfluence
    acted_on_by: list[int]  # indices of blocks


def _blocks(executor: ETraceGraphExecutor, per: PerSample, dtype: DTypeLike | None) -> list[_Block]:
    across = Across(executor.graph)
    params = [f"{name_of(e.path)}:{i}" for e in executor.info.fixed for i, _ in enumerate(e.invars)]
    states = [name_of(e.path) for e in executor.info.carried for _ in e.invars]
    crossing: dict[int, frozenset[int]] = {}
    for above in across.above:
        crossing.update({i: crossing.get(i, frozenset()).union(above.states) for i in above.params})
    parts = [(above, c) for above in across.above for c in dict.fromkeys(crossing[i] for i in above.params)]

    def block(above: Above, crossed: frozenset[int]) -> _Block:
        to = "+".join(dict.fromkeys(states[n] for n in above.states))
        indices = np.concatenate([per.places[n] for n in above.states])
        names = {i: f"across:{params[i]}->{to}" for i in above.params if crossing[i] == crossed}
        acting = [n for n, (other, _) in enumerate(parts) if across.act(other, above)]
        return _Block(above.states, indices, crossed, DenseInfluence(per, len(indices), names, dtype), acting)

    return [block(*part) for part in parts]


def _flags(executor: ETraceGraphExecutor, states: frozenset[int]) -> Array:
    """For each carried leaf, one if it is among `states`."""
    return jnp.asarray([float(n in states) for n in range(len(executor.info.carried_invars))])


def _check_memory(values: Values) -> None:
    sizes = {k: v.size * v.dtype.itemsize for k, v in values.items()}
    have = device_memory()
    if sum(sizes.values()) > have:
        most = max(sizes, key=lambda k: sizes[k])
        what = most.removeprefix("across:")
        raise NotSupportedError(
            f"`across='layers'` would keep {show_bytes(sum(sizes.values()))} beside the traces, of "
            f"{show_bytes(have)} that there are; `{what}` alone takes {show_bytes(sizes[most])}. "
            "Take a smaller batch or fewer units, or keep some directions of it (`rank=4`)."
        )
