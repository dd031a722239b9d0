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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .._compiler.errors import NotSupportedError
from .._compiler.graph import TraceGraph
from .._compiler.samples import find_samples
from .._compiler.step import name_of, show_paths
from .._executor.backward import backward
from .._executor.executor import ETraceGraphExecutor, Leaves
from .._executor.marked_step import MarkedStep
from .._executor.matrices import Matrix
from .._executor.memory import on_gpu
from .._executor.per_sample import PerSample
from .._executor.per_sample_traces import Pulled, Rows, Terms, add_terms
from .._executor.rows import fits, kernel_coefficients, step
from .._executor.sharding import Spec
from .._executor.slots import Slot
from .._executor.trace_math import States, add_up, contract_states, finite, promoted, stored
from .._executor.weight_gradients import row_axis
from .._executor.window import Crossing, Record, Signals, Window, starts_of
from .._meshes import mesh_of
from .._types import Array, Aval
from .projection import BASES, BASIS, TURN, Balanced, Pushed, along_rows, cross, precise_einsum

Values = dict[str, Any]
AffineTerms = dict[str, tuple[Any, Any]]  # `P` and `d` of traces that advance as `P trace + sum_t x[t] d[t]`


@dataclass(frozen=True)
class Rank:
    """A correction of rank `size` to the traces of each sample.

    `samples` is the batch axis of the states.
    """

    size: int
    samples: int | str | None = "auto"
    dtype: Any = None
    basis: Pushed | Balanced = BASES["pushed"]
    corrects_traces: bool = True  # whether there are traces, which need a batch axis, too

    def start(self, executor: ETraceGraphExecutor) -> Values:
        per = self.per_sample(executor)
        rank = self._rank(per)
        zeros = {key: zero_rows(per, aval, rank, self.dtype) for key, aval in named(per).values()}
        return {**self.basis.start(per, rank), **zeros}

    def _rank(self, per: PerSample) -> int:
        return min(self.size, per.state_size)

    def lasting(self, executor: ETraceGraphExecutor) -> Values:
        """The arrays that survive a reset."""
        per = self.per_sample(executor)
        return self.basis.lasting(per, self._rank(per))

    def specs(self, executor: ETraceGraphExecutor) -> dict[str, Spec]:
        """The partition specs: samples as the states', parameters as these."""
        per = self.per_sample(executor)
        of_rows = {key: spec_of_rows(per, i, aval) for i, (key, aval) in named(per).items()}
        return {**self.basis.specs(per), **of_rows}

    def begin(self, executor: ETraceGraphExecutor, values: Values, *, fresh: bool) -> Values:
        """The arrays at the start of a sequence, where a balanced pair is renewed; `fresh`: `V` is zero."""
        return self.basis.renewed(values, fresh=fresh)

    def advance(
        self,
        executor: ETraceGraphExecutor,
        values: Values,
        window: Window,
        size: int,
        crossed: tuple[Any, Any],
        *,
        affine_terms: Callable[[Sequence[Slot]], AffineTerms],
        signals: Leaves | None = None,
        fresh: bool = False,
    ) -> tuple[Values, dict[int, Any], Rows]:
        """Advance `V` over windows of `size` steps, given what `advance_basis` returned.

        A kernel advances large arrays over a single window together with their traces, and computes the
        gradient for `signals` at its start in the same pass; it needs `affine_terms` of the traces. With
        `fresh`, the traces and `V` are zero before.

        Returns:
            The new arrays, the kernel's gradients by leaf, and the rows of `S'` pulled back to the start.
        """
        per, (state, pairs) = self.per_sample(executor), crossed
        new, old = self.basis.pair(self.basis.pairs(per, values))
        if new.ndim == 3:  # pushed
            new = state
        else:
            new, old = (jnp.broadcast_to(a, (per.samples.count, *a.shape)) for a in (new, old))
        starts, crossing = starts_of(window.length, size)[1:], None
        if starts:
            crossing = Crossing(starts, lambda c, i: self.cross(executor, c, pairs, i))
        found = Rest.pull(per, window, new, crossing)
        if window.length == 1:
            found = found.stored(max((values[key].nbytes for key, _ in named(per).values()), default=0))
        carried = self.basis.turned(values, precise_einsum("bqn,brn->bqr", found.start, old))
        matrices: dict[int, Matrix] = {}
        if not starts and not fresh:
            matrices, specs, affine = self._in_kernel(executor, per, values, window.length, affine_terms)
        terms = found.terms(per, None if fresh else values, list(matrices))
        after: Values = {TURN: jnp.eye(len(values[TURN]), dtype=values[TURN].dtype)} if TURN in values else {}
        for i, (key, aval) in named(per).items():
            if i not in matrices:
                each = [] if fresh else [mixed(carried, values[key], 1 + row_axis(aval.ndim))]
                each += [terms[i]] if i in terms else []
                new_rows = add_up(promoted(*each)) if each else values[key]
                after[key] = new_rows.astype(values[key].dtype)
        if not matrices:
            return after, {}, found.start
        signal = jnp.zeros_like(old[:, 0]) if signals is None else finite(per.vectors(signals, dual=True))
        along = self.basis.turned(values, along_rows(signal, old))
        lifted = [
            per.traces.lift(a, window) for a in (found.at_traces, per.traces.at_groups(signal[:, None]))
        ]
        inputs, grads = per.inputs(window), {}
        for i, matrix in matrices.items():
            (key, aval), slot = named(per)[i], matrix.slot
            trace = None if slot is None else values[slot.key]
            more = () if slot is None else (*affine[slot.key], *(a[slot.key] for a in lifted))
            how = kernel_coefficients(
                matrix, *matrix.factors(inputs, found.pulled.dys), carried, along, *more
            )
            after[key], trace, grad = step(values[key], trace, how, executor.sharding, specs[i])
            after.update({} if slot is None else {slot.key: trace})
            grads[i] = grad.astype(aval.dtype)
        return after, {} if signals is None else grads, found.start

    def advance_basis(
        self, executor: ETraceGraphExecutor, values: Values, window: Window, size: int
    ) -> tuple[Any, Any]:
        """The state of the projection after windows of `size` steps, and its pairs at their starts."""
        return self.basis.advance_basis(self.per_sample(executor), values, window, size)

    def no_pairs(self, executor: ETraceGraphExecutor, values: Values, windows: int) -> Any:
        """Zeros of the shape of the pairs that `advance_basis` returns."""
        return self.basis.no_pairs(self.per_sample(executor), values, windows)

    def cross(self, executor: ETraceGraphExecutor, cotangents: Leaves, pairs: Any, index: Any) -> Leaves:
        """The part `u = (λ Tᵀ) S` of cotangents at a window's start, which goes on to the window before."""
        per = self.per_sample(executor)
        vectors = per.shard_samples(finite(per.vectors(cotangents, dual=True)))
        return per.leaves(cross(vectors, self.basis.pair(pairs, index)), dual=True)

    def observed(
        self,
        executor: ETraceGraphExecutor,
        values: Values,
        state: Any,
        read: Leaves | None,
        windows: int,
        pulled: Rows | None = None,
    ) -> Values:
        """The arrays of the projection after the windows of a pass.

        `state` is from `advance_basis`, `read` are the cotangents at starts of windows. In a stream, where
        later losses are unknown, `pulled` are the rows of `S`, pulled back to the start of the only window.
        """
        per = self.per_sample(executor)
        vectors = jax.vmap(lambda c: finite(per.vectors(c, dual=True)))
        at_starts = None if read is None else vectors(read)
        return self.basis.observed(per, values, state, at_starts, windows, pulled)

    def _in_kernel(
        self,
        executor: ETraceGraphExecutor,
        per: PerSample,
        values: Values,
        length: int,
        affine_terms: Callable[[Sequence[Slot]], AffineTerms],
    ) -> tuple[dict[int, Matrix], dict[int, Spec], AffineTerms]:
        """The matrices that the kernel advances because their `V` is large, by leaf.

        Also returns the partition specs of `V`, and the affine terms of their traces.
        """
        names, at = named(per), executor.sharding
        sharded = mesh_of(*values.values()) is not None
        if not on_gpu() or (sharded and at is None):
            return {}, {}, {}
        found, specs = {}, dict[int, Spec]()
        for i, matrix in per.matrices.items():
            rows = values[names[i][0]]
            trace = None if matrix.slot is None else values[matrix.slot.key]
            ways: Sequence[int] = (1, 1, 1, 1)
            if sharded and at is not None:
                on_inputs, on_outputs = at.of_leaf(i) or (None, None)
                specs[i] = at.fitted((per.lead, on_inputs, None, on_outputs), rows.shape)
                ways = [at.ways(p, n) for p, n in zip(specs[i], rows.shape, strict=True)]
            if rows.nbytes // math.prod(ways) >= _LARGE and fits(length, rows, trace, ways):
                found[i] = matrix
        affine = affine_terms([m.slot for m in found.values() if m.slot is not None])
        known = {i: m for i, m in found.items() if m.slot is None or m.slot.key in affine}
        return known, {i: specs.get(i, ()) for i in known}, affine

    def past(self, executor: ETraceGraphExecutor, values: Values, signals: Leaves) -> dict[int, Any]:
        """The gradients `<signal, Tᵀ V>` of signals at the carried states, by leaf of the parameters."""
        per = self.per_sample(executor)
        signal = per.shard_samples(finite(per.vectors(signals, dual=True)))
        _, rows = self.basis.pair(self.basis.pairs(per, values))
        along = self.basis.turned(values, along_rows(signal, rows))
        found = {}
        for i, (key, aval) in named(per).items():
            found[i] = summed(per, i, along, values[key], 1 + row_axis(aval.ndim), aval.dtype)
        return found

    def forget(self, executor: ETraceGraphExecutor, values: Values, rows: Any) -> Values:
        per = self.per_sample(executor)
        names = [*(key for key, _ in named(per).values()), *self.basis.start(per, 0)]
        return per.reset({k: values[k] for k in names}, rows)

    def per_sample(self, executor: ETraceGraphExecutor) -> PerSample:
        return per_sample(executor, self.samples, traces=self.corrects_traces)


@dataclass(frozen=True)
class Rest:
    """Rows `S` pulled back through windows: `S (H E + A - E')`, with `E`, `E'` the traces before and after.

    `E'` is not computed: with `D` and `J` the local Jacobians, `-S E'` is pulled back through the diagonal.
    """

    window: Window
    start: Rows  # `S H`
    at_traces: Signals  # the rows that meet `E`, at the groups
    pulled: Pulled  # the rows at the outputs of sites
    parts: Terms  # the terms that are on no output of a site

    @staticmethod
    def pull(per: PerSample, window: Window, rows: Rows, crossing: Crossing | None = None) -> Rest:
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
        pulled, parts = per.traces.instant(pulled, q, window)
        return Rest(window, start, at_traces, pulled, parts)

    def stored(self, size: int) -> Rest:
        """Make XLA on a CPU compute these rows once for results of `size` bytes (see `stored`)."""
        at_traces, dys = jax.tree.map(lambda a: stored(a, size), (self.at_traces, self.pulled.dys))
        return replace(self, at_traces=at_traces, pulled=replace(self.pulled, dys=dys))

    def terms(self, per: PerSample, traces: Values | None, excluded: Sequence[int] = ()) -> Terms:
        """The sum, by leaf of the parameters; `traces` before the windows are None if they are zero."""
        found = [per.weight_terms(self.window, self.pulled), self.parts]
        if traces is not None:
            found.append(per.traces.contract(traces, self.at_traces, self.window))
        return add_terms(*({i: a for i, a in f.items() if i not in excluded} for f in found))


def _through_traces(record: Record, group: int, signals: Any) -> tuple[States, States]:
    """Signals after each step, pulled back through the local Jacobians: at every step, and at the start."""
    found = backward(replace(record, signals={group: signals}), group, products=False)
    assert found.q is not None
    assert found.start is not None
    return found.q, found.start


def per_sample(executor: ETraceGraphExecutor, axis: int | str | None, *, traces: bool = True) -> PerSample:
    """The `PerSample` of a step, cached on its executor; with `traces`, all traces need a batch axis too."""
    if (axis, traces) not in executor.per_sample:
        linear = MarkedStep(executor)
        samples = find_samples(linear.info, axis)
        if samples.mixed:
            raise NotSupportedError(
                f"The rule stores arrays per sample, but the samples of {show_paths(samples.mixed)} along "
                f"axis {samples.axis} cannot be shown to be independent: an operation that combines entries "
                "along that axis (a norm over the batch, a linear solve with the batch in its columns) links "
                "them. Set `samples` to the axis of the states along which samples are independent "
                "(`samples=1`), or treat the batch as one sample (`samples=None`)."
            )
        if isinstance(axis, int) and not samples.have(axis):
            raise NotSupportedError(
                f"The states that parameters act on have no axis {axis} of one length in common: leave "
                "`samples` out, or take all as one (`samples=None`)."
            )
        found = PerSample(linear, samples)
        separate = not traces or found.traces.have_samples
        if not separate and axis != "auto":
            raise NotSupportedError(
                f"The traces of this model have no axis for the samples along axis {axis} of the states: "
                "leave `samples` out, or take all for one (`samples=None`)."
            )
        if not separate:  # such as the positions of an image without a batch
            found = PerSample(linear, find_samples(linear.info, None))
        executor.per_sample[axis, traces] = found
    return executor.per_sample[axis, traces]  # type: ignore[no-any-return]


def axis_of_samples(graph: TraceGraph, axis: int | str | None) -> int | str | None:
    """The batch axis that a rank correction of this graph uses; `axis` if the rule refuses it."""
    try:
        return per_sample(ETraceGraphExecutor(graph), axis).samples.axis
    except NotSupportedError:
        return axis


def named(per: PerSample) -> dict[int, tuple[str, Aval]]:
    """The name of `V` and the type of each parameter leaf that affects carried states, by leaf index."""
    leaves = [(e, i, v.aval) for e in per.info.fixed for i, v in enumerate(e.invars)]
    found = {n: leaves[n] for n in per.acting}
    return {n: (f"{BASIS}:{name_of(e.path)}:{i}", aval) for n, (e, i, aval) in found.items()}


def zero_rows(per: PerSample, aval: Aval, size: int, dtype: Any) -> Array:
    """Zeros for `size` rows of the influence of a parameter: (samples, *shape), rows at `row_axis`."""
    shape = list(aval.shape)
    shape.insert(row_axis(aval.ndim), size)
    return jnp.zeros((per.samples.count, *shape), dtype or aval.dtype)


def spec_of_rows(per: PerSample, leaf: int, aval: Aval) -> Spec:
    """The partition spec of rows of the influence of a parameter: samples as the states', axes as its own."""
    sharding = per.executor.sharding
    assert sharding is not None
    spec = list(sharding.of_leaf(leaf) or [None] * aval.ndim)
    spec.insert(row_axis(aval.ndim), None)
    return (per.lead, *spec)


_WRITTEN_OUT = 16  # rows up to which sums over them are unrolled; above, a matrix product is faster
_LARGE = 2**28  # bytes of `V` of a matrix; intermediate results of smaller ones stay in the GPU's cache


def mixed(carried: Any, kept: Any, axis: int) -> Any:
    """`sum_r carried[b, q, r] kept[b, .., r, ..]`."""
    carried, kept = promoted(carried, kept)
    size = kept.shape[axis]
    if 1 <= size <= _WRITTEN_OUT:
        # products of rows, which XLA fuses with the terms that are added: `V` is read once and not transposed
        shape = [1] * kept.ndim
        shape[0], shape[axis] = carried.shape[:2]
        rows = [jax.lax.slice_in_dim(kept, r, r + 1, axis=axis) for r in range(size)]
        return add_up(carried[:, :, r].reshape(shape) * row for r, row in enumerate(rows))
    # the parameter's axes are not merged: if they are sharded, that would gather them
    found = jnp.einsum("bqr,br...->bq...", carried, jnp.moveaxis(kept, axis, 1))
    return jnp.moveaxis(found, 1, axis)


def summed(per: PerSample, leaf: int, along: Any, kept: Any, axis: int, dtype: Any) -> Any:
    """The gradient of a leaf: `sum_br along[b, r] kept[b, .., r, ..]`, with the rows of `kept` at `axis`."""
    along, kept = promoted(along, kept)
    if mesh_of(kept) is not None:
        return per.summed(leaf, mixed(along[:, None], kept, axis).astype(dtype), axis)
    if len(kept) == 1 and 1 < kept.shape[axis] <= _WRITTEN_OUT:
        return jnp.squeeze(mixed(along[:, None], kept, axis), (0, axis)).astype(dtype)
    if kept.shape[axis] > 1:
        return jnp.tensordot(along, kept, ((0, 1), (0, axis))).astype(dtype)
    found = contract_states(along.reshape(1, -1, *[1] * (kept.ndim - 2)), jnp.squeeze(kept, axis)[None])
    return found.astype(dtype)
