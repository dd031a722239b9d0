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

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .._compiler.errors import NotSupportedError
from .._compiler.graph import TraceGraph
from .._executor.bases import precise_einsum
from .._executor.dense_influence import DenseInfluence
from .._executor.executor import ETraceGraphExecutor
from .._executor.kernel_matrices import AffineTermsOf, KernelMatrices
from .._executor.partial_sums import Gradient
from .._executor.per_sample import PerSample, find_per_sample
from .._executor.pulled_rows import PulledRows
from .._executor.sharding import Spec
from .._executor.trace_math import finite
from .._executor.window import BackwardPass, Crossing
from .._types import Array, DTypeLike, Leaves, PyTree, Values
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

    def start(self, executor: ETraceGraphExecutor) -> Values:
        store = self._store(executor)
        return {**self.basis.start(store.per, store.size), **store.zeros()}

    def lasting(self, executor: ETraceGraphExecutor) -> Values:
        """The arrays that survive a reset."""
        store = self._store(executor)
        return self.basis.lasting(store.per, store.size)

    def specs(self, executor: ETraceGraphExecutor) -> dict[str, Spec]:
        store = self._store(executor)
        return {**self.basis.specs(store.per), **store.specs()}

    def over_windows(
        self,
        executor: ETraceGraphExecutor,
        values: Values,
        passed: BackwardPass,
        affine_terms: AffineTermsOf,
    ) -> tuple[Values, dict[int, Gradient]]:
        """The arrays after windows, given those before.

        A kernel advances large arrays over a single window together with their traces, and computes the
        gradient at its start in the same pass: these are returned by leaf.
        """
        per, single = self.per_sample(executor), passed.is_single
        state, pairs = passed.pairs or self.advance_basis(executor, values, passed)
        after: Values = {}
        grads: dict[int, Gradient] = {}
        pulled = read = None
        if passed.keep:
            after, grads, rows = self._advance(executor, values, passed, state, pairs, affine_terms)
            # in a stream, later losses are unknown
            pulled = rows if single and not passed.fresh else None
        if passed.read is not None:
            read = jax.vmap(lambda c: finite(per.vectors(c, dual=True)))(passed.read)
        return {**after, **self.basis.observed(per, values, state, read, len(passed.starts), pulled)}, grads

    def _advance(
        self,
        executor: ETraceGraphExecutor,
        values: Values,
        passed: BackwardPass,
        state: PyTree,
        pairs: PyTree,
        affine_terms: AffineTermsOf,
    ) -> tuple[Values, dict[int, Gradient], Array]:
        """`V` after windows, the kernel's gradients, and the rows of `S'` pulled back to the start."""
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
        kernel = KernelMatrices(store)
        if passed.is_single and not fresh:
            kernel = KernelMatrices.find(store, values, window, affine_terms)
        added = rows.added(per, None if fresh else values, list(kernel.matrices))
        after = store.advanced(values, added, [] if fresh else [(store, mixing)], list(kernel.matrices))
        if TURN in values:
            after[TURN] = jnp.eye(len(values[TURN]), dtype=values[TURN].dtype)
        if not kernel.matrices:
            return after, {}, rows.start
        signal = jnp.zeros_like(old[:, 0])
        if passed.signals is not None:
            signal = finite(per.vectors(passed.first, dual=True))
        along = self.basis.turned(values, along_rows(signal, old))
        large, grads = kernel.advanced(values, rows, mixing, signal, along)
        return {**after, **large}, grads if passed.signals is not None else {}, rows.start

    def advance_basis(
        self, executor: ETraceGraphExecutor, values: Values, passed: BackwardPass
    ) -> tuple[PyTree, PyTree]:
        """The state of the projection after windows, and its pairs at their starts."""
        return self.basis.advance_basis(self.per_sample(executor), values, passed.window, passed.size)

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
        signal = store.per.shard_samples(finite(store.per.vectors(signals, dual=True)))
        _, rows = self.basis.pair(self.basis.pairs(store.per, values))
        return store.gradients(values, self.basis.turned(values, along_rows(signal, rows)))

    def forget(self, executor: ETraceGraphExecutor, values: Values, is_reset: Array) -> Values:
        store = self._store(executor)
        own = {name: values[name] for name in self.basis.start(store.per, 0)}
        return {**store.reset(values, is_reset), **store.per.reset(own, is_reset)}

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
