"""D-RTRL: a trace of every weight, advanced by the diagonal of the recurrence.

trace[t] = D[t] trace[t-1] + J[t] x[t]        gradient = sum_t <g[t], trace[t]>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compat import row_major
from .._compiler.exactness import RuleKind
from .._compiler.graph import TraceGraph
from .._compiler.leaky_readouts import with_filters
from .._compiler.states_with_memory import remembering
from .._executor.backward import backward
from .._executor.executor import Local
from .._executor.filtered_inputs import with_columns, with_filtered_inputs
from .._executor.memory import on_gpu
from .._executor.slots import Slot
from .._executor.trace_math import add_up, promoted, stored
from .._executor.trace_recursion import Recursion
from .._executor.window import Record, Signals
from .._meshes import mesh_of
from .bounds import Bound
from .chunk import affine_terms, chunk_gradient, chunk_traces
from .layers import Layers
from .projection import BASES
from .rank import Rank
from .rule import Flags, Gradients, TraceRule, Values, add_all, add_to, kind_of
from .signal import PROPAGATED, Signal


@dataclass(frozen=True)
class D_RTRL(TraceRule):
    """A trace of every weight, advanced by the diagonal of the recurrence.

    `recursion`, `signal`, `bound`, `called` and `by_readouts` define published rules.

    Args:
        rank: Rank of the low-rank correction of the traces of each sample; 0 keeps the diagonal alone.
        samples: Batch axis of the states; 'auto' finds it, None treats the batch as one sample.
        basis: Projection of the correction. 'balanced' is one for all samples, from running averages of the
            directions that parameters reach and losses read; 'pushed' is an orthonormal basis per sample.
        across: 'layers' stores the influence of each weight on the states of later layers, densely.
        trace_dtype: Type that traces are stored in; by default the type they are computed in.
        recursion: Replaces the local Jacobians in the update of the traces.
        signal: The learning signal.
        bound: Keeps traces from growing.
        called: Name in reports.
        by_readouts: Filter the traces of units that a leaky readout reads by its decay, even where the result
            is approximate.
    """

    rank: int = 0
    samples: int | str | None = "auto"
    basis: str = "balanced"
    across: str | None = None
    trace_dtype: Any = None
    recursion: Recursion | None = None
    signal: Signal = PROPAGATED
    bound: Bound | None = None
    called: str = "D_RTRL"
    by_readouts: bool = False

    @property
    def follows_chains(self) -> bool:
        """Whether traces follow the chain rule: local Jacobians, back-propagated signals and no bound."""
        return self.recursion is None and self.signal == PROPAGATED and self.bound is None

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int | np.integer) or isinstance(self.rank, bool) or self.rank < 0:
            raise ValueError(f"`rank` is a number of directions (0: the diagonal alone), not {self.rank!r}.")
        if self.basis not in BASES:
            raise ValueError(f"`basis` is {' or '.join(map(repr, BASES))}, not {self.basis!r}.")
        if (self.rank or self.across) and not self.follows_chains:
            raise ValueError(
                f"`{'rank' if self.rank else 'across'}` corrects traces that advance by the local Jacobians "
                f"and meet back-propagated signals; {self.called} has other traces or signals."
            )
        is_axis = isinstance(self.samples, int) and not isinstance(self.samples, bool) and self.samples >= 0
        if not (is_axis or self.samples in ("auto", None)):
            raise ValueError(f"`samples` is 'auto', an axis of the states or None, not {self.samples!r}.")

        if self.across not in (None, "layers"):
            raise ValueError(f"`across` is 'layers' or None, not {self.across!r}.")
        if self.across is not None and self.rank:
            raise ValueError(
                "`across` and `rank` both correct for paths that traces truncate: pass one of them."
            )

    @property
    def correction(self) -> Rank | Layers | None:
        if self.across is not None:
            return Layers(self.samples, self.trace_dtype)
        return Rank(self.rank, self.samples, self.trace_dtype, BASES[self.basis]) if self.rank else None

    def seen(self, graph: TraceGraph, windows: bool) -> TraceGraph:
        if not windows and (self.follows_chains or self.by_readouts):
            graph = with_filters(graph, exact=not self.by_readouts)
        if self.follows_chains and not windows:
            graph = remembering(graph)
        # a bound and corrections act on traces of each weight
        plain = self.recursion is None and self.bound is None and self.correction is None
        return with_columns(with_filtered_inputs(graph)) if plain else graph

    @property
    def several_windows_per_pass(self) -> bool:
        return self.bound is None

    def kind(self, windows: bool) -> RuleKind:
        return RuleKind(
            self.called,
            windows=windows,
            rank=self.rank,
            samples=self.samples,
            across=self.across is not None,
            filters=self.follows_chains and not windows,
            bounded=self.bound is not None,
            **kind_of(self),
        )

    def init(self, slots: Sequence[Slot], local: Local) -> Values:
        values = {}
        for slot in slots:
            _, factor, J = local.at(slot)
            weight = local.weights[slot.relation.site.index][slot.name]
            now = slot.instant(factor, J, weight)
            values[slot.key] = jnp.zeros(now.shape, self.trace_dtype or now.dtype)
        return values

    def update(self, slots: Sequence[Slot], values: Values, local: Local) -> Values:
        result = {}
        for slot in slots:
            old = values[slot.key]
            D, factor, J = _unshared(*local.at(slot), old.nbytes)
            weight = local.weights[slot.relation.site.index][slot.name]
            now = slot.instant(factor, J, weight)
            if self.bound is not None:
                D, now = None if D is None else self.bound.jacobian(D), self.bound.instant(now)
            if D is not None:
                coupled = slot.group.coupled if self.recursion is None else None
                now = add_up(promoted(slot.decay(D, old, coupled), now))
            if self.bound is not None:
                now = self.bound.trace(now)
            result[slot.key] = now.astype(old.dtype)
        return result

    def gradient(self, slots: Sequence[Slot], values: Values, signals: Signals, local: Local) -> Gradients:
        grads: Gradients = {}
        for slot in slots:
            site = slot.relation.site.index
            g = slot.lift(signals[slot.group.index], local.inputs[site], 1)
            # a barrier for each weight, so that XLA does not merge the contractions of several traces
            g, _ = jax.lax.optimization_barrier((g, local.weights[site][slot.name]))
            add_to(grads, slot, slot.contract(g, values[slot.key], local.sharding))
        return grads

    def chunk(
        self,
        slots: Sequence[Slot],
        values: Values,
        record: Record,
        total: Gradients,
        *,
        fresh: bool,
        keep: bool,
    ) -> tuple[Values, Gradients]:
        if self.bound is not None:  # bounded traces are not linear in the steps
            return super().chunk(slots, values, record, total, fresh=fresh, keep=keep)
        record = record.cut_at_resets()
        before = None if fresh else values
        dense = {t.group.index for t in slots if not t.uniform}
        found = {k: backward(record, k, products=keep and k in dense) for k in record.local.D}
        grads = chunk_gradient(slots, before, record, found) if record.has_signals else {}
        after = chunk_traces(slots, before, record, found, values) if keep else values
        return after, add_all(total, grads)

    def joins_within_step(self, length: int) -> bool:
        return self.bound is None and length > 1

    def affine_terms(self, slots: Sequence[Slot], record: Record) -> dict[str, tuple[Any, Any]]:
        record = record.cut_at_resets()
        groups = dict.fromkeys(t.group.index for t in slots)
        found = {k: backward(record, k, products=True).products for k in groups}
        each = {t.key: (t, found[t.group.index]) for t in slots}
        return {k: affine_terms(t, record, p) for k, (t, p) in each.items() if p is not None}

    def reset(self, slots: Sequence[Slot], values: Values, keep: Flags) -> Values:
        return {t.key: t.where(keep, values[t.key]) for t in slots}


def _unshared(D: Any, factor: Any, J: Any, size: int) -> tuple[Any, Any, Any]:
    """The operands of one trace of `size` bytes, behind a barrier.

    Without it, XLA merges the loops of several traces, and copies all but one.
    On a GPU inputs are also kept row-major, because XLA would transpose a whole sequence before its loop.
    """
    if D is None or factor is None:
        return D, factor, J
    D, x, J = jax.lax.optimization_barrier((D, factor[0], J))
    x = row_major(x) if on_gpu() and mesh_of(x) is None else x  # XLA would gather a sharded one
    return D, (x, factor[1]), stored(J, size)
