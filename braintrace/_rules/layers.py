"""Layers: the influence of parameters on the states above their traces, kept densely.

    P = E on the states that a parameter's traces follow        P = E + Q on those above, every unit of them

Over a window with full Jacobian `H`, in which parameters add the influence `A`, on the states above:

    Q' = H (E + Q) + A - E'        gradient = within the window + <dL/dh[start], E + Q>

If the traces of a layer are exact on its own states, its influence on the layers above is exact, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._compiler.errors import NotSupportedError
from .._compiler.layers_above import Above, Across
from .._compiler.step import name_of
from .._executor.executor import ETraceGraphExecutor, Leaves
from .._executor.memory import device_memory, show_bytes
from .._executor.per_sample import PerSample
from .._executor.sharding import Spec, plus
from .._executor.trace_math import add_up, finite, promoted
from .._executor.weight_gradients import row_axis
from .._executor.window import Window
from .._types import Aval
from .rank import Rest, mixed, per_sample, spec_of_rows, summed, zero_rows

Values = dict[str, Any]


@dataclass(frozen=True)
class Layers:
    """The correction `Q` for the states above the traces; `samples` is the batch axis of the states."""

    samples: int | str | None = "auto"
    dtype: Any = None

    def start(self, executor: ETraceGraphExecutor) -> Values:
        per, blocks = self._of(executor)
        values = {}
        for block in blocks:
            for key, aval in block.keys.values():
                values[key] = zero_rows(per, aval, len(block.indices), self.dtype)
        _check_memory(values)
        return values

    def advance(self, executor: ETraceGraphExecutor, before: Values, window: Window) -> Values:
        """Advance `Q` over a window, given the rule's arrays before it."""
        per, blocks = self._of(executor)
        values = {}
        for block in blocks:
            rows = jnp.eye(per.state_size, dtype=per.dtype)[block.indices]
            rows = jnp.broadcast_to(rows, (per.samples.count, *rows.shape))
            found = Rest.pull(per, window, rows)
            terms = found.terms(per, before)
            for i, (key, aval) in block.keys.items():
                axis = 1 + row_axis(aval.ndim)
                acting = [blocks[n] for n in block.acted_on_by if i in blocks[n].keys]
                each = [mixed(found.start[:, :, b.indices], before[b.keys[i][0]], axis) for b in acting]
                each += [terms[i]] if i in terms else []
                values[key] = add_up(promoted(*each)).astype(before[key].dtype)
        return values

    def past(self, executor: ETraceGraphExecutor, values: Values, signals: Leaves) -> dict[int, Any]:
        """The gradients `<signal, Q>` of signals at the carried states, by leaf of the parameters."""
        per, blocks = self._of(executor)
        found: dict[int, Any] = {}
        for block in blocks:
            along = finite(per.vectors(signals, dual=True)[:, block.indices])
            for i, (key, aval) in block.keys.items():
                term = summed(per, i, along, values[key], 1 + row_axis(aval.ndim), aval.dtype)
                found[i] = plus(found.get(i), term)
        return found

    def forget(self, executor: ETraceGraphExecutor, values: Values, rows: Any) -> Values:
        per, blocks = self._of(executor)
        kept = {key: values[key] for block in blocks for key, _ in block.keys.values()}
        return per.reset(kept, rows) if kept else {}

    def specs(self, executor: ETraceGraphExecutor) -> dict[str, Spec]:
        """The partition specs: samples as the states', parameters as these."""
        per, blocks = self._of(executor)
        each = [(i, *of_leaf) for block in blocks for i, of_leaf in block.keys.items()]
        return {key: spec_of_rows(per, i, aval) for i, key, aval in each}

    def _of(self, executor: ETraceGraphExecutor) -> tuple[PerSample, list[_Block]]:
        found = executor.per_sample
        if self not in found:
            found[self] = _blocks(executor, per_sample(executor, self.samples))
        return per_sample(executor, self.samples), found[self]


@dataclass(frozen=True, eq=False)
class _Block:
    """Some entries of the state vector, and the parameter leaves whose influence on them is stored."""

    indices: Any  # in the state vector
    keys: dict[int, tuple[str, Aval]]  # by leaf index: name of its `Q`, and its type
    acted_on_by: list[int]  # indices of blocks


def _blocks(executor: ETraceGraphExecutor, per: PerSample) -> list[_Block]:
    across = Across(executor.graph)
    names = [(f"{name_of(e.path)}:{i}", v.aval) for e in executor.info.fixed for i, v in enumerate(e.invars)]
    states = [name_of(e.path) for e in executor.info.carried for _ in e.invars]

    def block(above: Above) -> _Block:
        to = "+".join(dict.fromkeys(states[n] for n in above.states))
        return _Block(
            np.concatenate([per.places[n] for n in above.states]),
            {i: (f"across:{names[i][0]}->{to}", names[i][1]) for i in above.params},
            [n for n, other in enumerate(across.above) if across.act(other, above)],
        )

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
