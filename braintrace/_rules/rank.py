"""Rank: a low-rank correction to the diagonal traces `E` of the influence of the parameters on the states.

    P ≈ E + Tᵀ V        S, T: (r, state size) with S Tᵀ = I;  V = S (P - E): (r, parameters), per sample

Over a window, with `H` = d(state at its end)/d(state at its start) along all paths, and `A` the influence of
the parameters on the state at its end for a fixed state at its start:

    V' = S' (H (E + Tᵀ V) + A - E')
    gradient = within the window + <dL/dh[start], E + Tᵀ V>

The rows `S` and `T` come from a projection (`projection.py`). With as many rows as a sample has state
variables, the gradient is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from .._compiler.errors import NotSupportedError
from .._compiler.graph import TraceGraph
from .._executor.bases import precise_einsum
from .._executor.dense_influence import DenseInfluence
from .._executor.executor import ETraceGraphExecutor
from .._executor.partial_sums import Gradient
from .._executor.pending_matrices import AffineTermsOf, PendingMatrices
from .._executor.pending_windows import STEPS
from .._executor.per_sample import PerSample, find_per_sample
from .._executor.pulled_rows import PulledRows
from .._executor.sharding import Spec
from .._executor.trace_math import finite
from .._executor.window import BackwardPass, Crossing, Window
from .._types import Array, Aval, DTypeLike, Leaves, PyTree, Values
from .projection import BASES, BASIS, TURN, Balanced, Pushed, along_rows, cross


@dataclass(frozen=True)
class Rank:
    """A correction of rank `size` to the traces of each sample.

    `samples` is the batch axis of the states.
    """

    size: int
    samples: int | str | None = "auto"
    dtype: DTypeLike | None = None
    basis: Pushed | Balanced = BASES["pushed"]

    def start(self, executor: ETraceGraphExecutor, traces: Values) -> Values:
        store = self._store(executor)
        values = {**self.basis.start(store.per, store.size), **store.zeros()}
        return {**values, **PendingMatrices.start(store, {**traces, **values})}

    def lasting(self, executor: ETraceGraphExecutor) -> Values:
        """The arrays that survive a reset."""
        store = self._store(executor)
        return self.basis.lasting(store.per, store.size)

    def renewed(self, values: Values, *, fresh: bool) -> Values:
        """The arrays at the start of a sequence."""
        return self.basis.renewed(values, fresh=fresh)

    def specs(self, executor: ETraceGraphExecutor, shapes: Mapping[str, Aval]) -> dict[str, Spec]:
        store = self._store(executor)
        pending = PendingMatrices.of(store, shapes)
        return {**self.basis.specs(store.per), **store.specs(), **pending.specs()}

    def written(self, executor: ETraceGraphExecutor, values: Values, length: int | None = None) -> Values:
        """The arrays with pending windows written, if there is no room for one more of this length."""
        return PendingMatrices.of(self._store(executor), values).written(values, length)

    def over_windows(
        self,
        executor: ETraceGraphExecutor,
        values: Values,
        passed: BackwardPass,
        affine_terms: AffineTermsOf,
    ) -> Values:
        """The arrays after windows, given those before.

        A single window may be added to those that are pending for a matrix; its trace is then among the
        arrays, too, as it was.
        """
        per = self.per_sample(executor)
        state, pairs = passed.pairs or self.advance_basis(executor, values, passed)
        after: Values = {}
        pulled = read = None
        if passed.keep:
            after, rows = self._advance(executor, values, passed, state, pairs, affine_terms)
            # in a stream, later losses are unknown
            pulled = rows if passed.is_single and not passed.fresh else None
        if passed.read is not None:
            read = jax.vmap(lambda c: finite(per.vectors(c, dual=True)))(passed.read)
        return {**after, **self.basis.observed(per, values, state, read, len(passed.starts), pulled)}

    def _advance(
        self,
        executor: ETraceGraphExecutor,
        values: Values,
        passed: BackwardPass,
        state: PyTree,
        pairs: PyTree,
        affine_terms: AffineTermsOf,
    ) -> tuple[Values, Array]:
        """`V` after windows, and the rows of `S'` pulled back to the start."""
        store, window, fresh = self._store(executor), passed.window, passed.fresh
        per = store.per
        new, old = self.basis.pair(self.basis.pairs(per, values))
        if new.ndim == 3:  # pushed
            new = state
        else:
            new, old = (jnp.broadcast_to(a, (per.samples.count, *a.shape)) for a in (new, old))
        crossing = None
        if not passed.is_single:
            crossing = Crossing(passed.starts[1:], lambda c, i: self.cross(executor, c, pairs, i))
        rows = PulledRows.through(per, window, new, crossing)
        if window.length == 1:
            rows = rows.stored(max((values[name].nbytes for name in store.names.values()), default=0))
        mixing = self.basis.turned(values, precise_einsum("bqn,brn->bqr", rows.start, old))
        pending = PendingMatrices(store, {})
        if passed.is_single and not fresh and window.length < STEPS:
            pending = PendingMatrices.of(store, values)
        waiting = list(pending.matrices)
        added = rows.added(per, None if fresh else values, waiting)
        after = store.advanced(values, added, [] if fresh else [(store, mixing)], waiting)
        if TURN in values:
            after[TURN] = jnp.eye(len(values[TURN]), dtype=values[TURN].dtype)
        return {**after, **pending.followed_by(values, window, rows, mixing, affine_terms)}, rows.start

    def crossings(
        self, executor: ETraceGraphExecutor, values: Values, passed: BackwardPass
    ) -> tuple[BackwardPass, list[PyTree], dict[int, int]]:
        """The pairs at the windows' starts: one backward pass for all parameters."""
        passed = replace(passed, pairs=self.advance_basis(executor, values, passed))
        return passed, [passed.pairs[1]], {}

    def advance_basis(
        self, executor: ETraceGraphExecutor, values: Values, passed: BackwardPass
    ) -> tuple[PyTree, PyTree]:
        """The state of the projection after windows, and its pairs at their starts."""
        return self.basis.advance_basis(self.per_sample(executor), values, passed.window, passed.size)

    def num_rows(self, executor: ETraceGraphExecutor) -> int:
        """The number of rows that are pulled back at once, for `V` after windows."""
        return self._store(executor).size

    def no_pairs(self, executor: ETraceGraphExecutor, values: Values, windows: int) -> PyTree:
        """Zeros of the shape of the pairs that `advance_basis` returns."""
        return self.basis.no_pairs(self.per_sample(executor), values, windows)

    def cross(self, executor: ETraceGraphExecutor, cotangents: Leaves, pairs: PyTree, index: Array) -> Leaves:
        """The part `u = (λ Tᵀ) S` of cotangents at a window's start, which goes on to the window before."""
        per = self.per_sample(executor)
        vectors = per.shard_samples(finite(per.vectors(cotangents, dual=True)))
        return per.leaves(cross(vectors, self.basis.pair(pairs, index)), dual=True)

    def past(self, executor: ETraceGraphExecutor, values: Values, signals: Leaves) -> dict[int, Gradient]:
        """The gradients `<signal, Tᵀ V>` of signals at the carried states, by leaf of the parameters."""
        store = self._store(executor)
        return store.gradients(values, self._along(store, values, signals)[0])

    def past_with_traces(
        self, executor: ETraceGraphExecutor, values: Values, signals: Leaves, window: Window
    ) -> dict[int, Gradient]:
        """The gradients through `V` and the trace of each matrix of which windows are pending."""
        store = self._store(executor)
        pending = PendingMatrices.of(store, values)
        return pending.gradients(values, *self._along(store, values, signals), window)

    def _along(self, store: DenseInfluence, values: Values, signals: Leaves) -> tuple[Array, Array]:
        """The coefficients of signals at the carried states in the rows of `V`, and their vectors."""
        signal = store.per.shard_samples(finite(store.per.vectors(signals, dual=True)))
        _, rows = self.basis.pair(self.basis.pairs(store.per, values))
        return self.basis.turned(values, along_rows(signal, rows)), signal

    def forget(self, executor: ETraceGraphExecutor, values: Values, is_reset: Array) -> Values:
        store = self._store(executor)
        own = {name: values[name] for name in self.basis.start(store.per, 0)}
        pending = PendingMatrices.of(store, values).reset(values, is_reset)
        return {**store.reset(values, is_reset), **store.per.reset(own, is_reset), **pending}

    def per_sample(self, executor: ETraceGraphExecutor) -> PerSample:
        return find_per_sample(executor, self.samples)

    def _store(self, executor: ETraceGraphExecutor) -> DenseInfluence:
        """The arrays `V`."""
        per = self.per_sample(executor)
        names = DenseInfluence.names_of(per, f"{BASIS}:")
        return DenseInfluence(per, min(self.size, per.state_size), names, self.dtype)


def axis_of_samples(graph: TraceGraph, axis: int | str | None) -> int | str | None:
    """The batch axis that a rank correction of this graph uses; `axis` if the rule refuses it."""
    try:
        return find_per_sample(ETraceGraphExecutor(graph), axis).samples.axis
    except NotSupportedError:
        return axis
