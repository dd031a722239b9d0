"""What windows add to dense rows `S P` of the influence that correct diagonal traces `E`: `S (H E + A - E')`.

`H` = d(state at the end)/d(state at the start) and `A`, the influence added within, are along all paths.
The traces `E'` after the windows are not computed: with `D` and `J` the local Jacobians, `-S E'` is pulled
back through the diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from .._types import Array, Values
from .backward import backward
from .per_sample import PerSample
from .per_sample_traces import Pulled, Rows, Terms, add_terms
from .trace_math import States, finite, stored
from .window import Crossing, Record, Signals, Window


@dataclass(frozen=True)
class PulledRows:
    """Rows `S` pulled back through windows, along all paths and through the diagonal."""

    window: Window
    start: Rows  # `S H`
    at_traces: Signals  # the rows that meet `E`, at the groups
    pulled: Pulled  # the rows at the outputs of sites
    instant: Terms  # the gradients of instant terms that are on no output of a site

    @staticmethod
    def through(per: PerSample, window: Window, rows: Rows, crossing: Crossing | None = None) -> PulledRows:
        """`crossing` says which rows go on at the start of each window, if there are several."""
        pulled = per.pull_rows(window, rows, crossing=crossing)
        start = per.shard_samples(finite(pulled.start))
        left = {}
        if crossing is not None:
            left = jax.vmap(jax.vmap(per.executor.at_groups))(jax.tree.map(finite, pulled.left))
        q, at_traces = {}, per.traces.at_groups(start)
        for k, g in per.traces.at_groups(-rows).items():
            before = jnp.zeros((len(g), window.length - 1, *g.shape[1:]), g.dtype)
            g = jnp.concatenate([left[k][:, 1:] if left else before, g[:, None]], 1)
            q[k], more = jax.vmap(partial(_through_traces, window.record.cut_at_resets(), k))(g)
            at_traces[k] = at_traces[k] + finite(jnp.stack(more, 1))
        pulled, instant = per.traces.instant(pulled, q, window)
        return PulledRows(window, start, at_traces, pulled, instant)

    def stored(self, size: int) -> PulledRows:
        """Make XLA on a CPU compute these rows once for results of `size` bytes (see `stored`)."""
        at_traces, dys = jax.tree.map(lambda a: stored(a, size), (self.at_traces, self.pulled.dys))
        return replace(self, at_traces=at_traces, pulled=replace(self.pulled, dys=dys))

    def added(self, per: PerSample, traces: Values | None, excluded: Sequence[int] = ()) -> Terms:
        """The sum, by leaf of the parameters; `traces` before the windows are None if they are zero."""
        found = [per.weight_terms(self.window, self.pulled), self.instant]
        if traces is not None:
            found.append(per.traces.contract(traces, self.at_traces, self.window))
        return add_terms(*({i: a for i, a in f.items() if i not in excluded} for f in found))


def _through_traces(record: Record, group: int, signals: Array) -> tuple[States, States]:
    """Signals after each step, pulled back through the local Jacobians: at every step, and at the start."""
    found = backward(replace(record, signals={group: signals}), group, products=False)
    assert found.q is not None
    assert found.start is not None
    return found.q, found.start
