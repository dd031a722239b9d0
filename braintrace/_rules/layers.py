"""Layers: the influence of parameters on the states above their traces, kept densely.

    P = E on the states that a parameter's traces follow        P = E + Q on those above, every unit of them

Over a window with full Jacobian `H`, in which parameters add the influence `A`, on the states above:

    Q' = H (E + Q) + A - E'        gradient = within the window + <dL/dh[start], E + Q>

If the traces of a layer are exact on its own states, its influence on the layers above is exact, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
from .._executor.window import BackwardPass
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

    def over_windows(
        self, executor: ETraceGraphExecutor, before: Values, passed: BackwardPass, _: AffineTermsOf
    ) -> Values:
        """`Q` after a window, given the rule's arrays before it."""
        blocks, values = self._blocks(executor), dict[str, Array]()
        for block in blocks:
            per = block.store.per
            rows = PulledRows.through(per, passed.window, per.unit_rows[:, block.indices])
            by = [(blocks[n].store, rows.start[:, :, blocks[n].indices]) for n in block.acted_on_by]
            values.update(block.store.advanced(before, rows.added(per, before), by))
        return values

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

    indices: NumPyArray  # in the state vector
    store: DenseInfluence
    acted_on_by: list[int]  # indices of blocks


def _blocks(executor: ETraceGraphExecutor, per: PerSample, dtype: DTypeLike | None) -> list[_Block]:
    across = Across(executor.graph)
    params = [f"{name_of(e.path)}:{i}" for e in executor.info.fixed for i, _ in enumerate(e.invars)]
    states = [name_of(e.path) for e in executor.info.carried for _ in e.invars]

    def block(above: Above) -> _Block:
        to = "+".join(dict.fromkeys(states[n] for n in above.states))
        indices = np.concatenate([per.places[n] for n in above.states])
        names = {i: f"across:{params[i]}->{to}" for i in above.params}
        acting = [n for n, other in enumerate(across.above) if across.act(other, above)]
        return _Block(indices, DenseInfluence(per, len(indices), names, dtype), acting)

    return [block(above) for above in across.above]


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
