"""Rank: what the diagonal traces `E` leave out of the influence of the parameters, in `r` directions.

    P = E + U V        U (numbers carried, r) orthonormal, V (r, parameters), each for one sample

Over a window, with `H` = d(state at its end)/d(state at its start) along all paths:

    U' = orthonormal(H U)
    V' = U'ᵀ (H (E + U V) + what the window adds - E')
    gradient = within the window + <dL/dh[start], E + U V>

Pushed forward, a basis turns to the directions that decay slowest: there the influence of the past lives.
Where many directions decay alike, as in spiking nets, a power step on what is left out, `R`, finds those that
are strong, `U' = orthonormal(R Rᵀ U')`. With as many directions as numbers carried, nothing is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler.errors import NotSupportedError
from .._compiler.graph import ETraceGraph
from .._compiler.samples import find_samples
from .._compiler.step import name_of, show_paths
from .._executor.executor import ETraceGraphExecutor, Leaves
from .._executor.fused import on_gpu
from .._executor.marked_step import MarkedStep
from .._executor.per_sample import Matrix, PerSample
from .._executor.rows import fits, step, through
from .._executor.sharding import Spec
from .._executor.slots import Slot
from .._executor.trace_math import add_up, promoted, weigh
from .._executor.weight_gradients import row_axis
from .._executor.window import Window, unroll, where_rows
from .._meshes import mesh_of

Values = dict[str, Any]
Courses = dict[str, tuple[Any, Any]]  # `P` and `d` of traces that go as `P trace + sum_t x[t] d[t]`
BASIS = "basis"


@dataclass(frozen=True)
class Rank:
    """`size` directions for each sample, after so many `power` steps.

    `samples` is the axis of the states along which samples lie.
    """

    size: int
    samples: int | str | None = "auto"
    dtype: Any = None
    power: int = 0
    beside_traces: bool = True  # whether there are traces, which samples must have an axis in

    def start(self, executor: ETraceGraphExecutor) -> Values:
        per = self.per_sample(executor)
        count, size = per.samples.count, min(self.size, per.numbers)
        values = {BASIS: jnp.zeros((count, size, per.numbers), per.dtype)}
        for name, aval in named(per).values():
            for key, rows in parts_of(name, size):
                shape = list(aval.shape)
                shape.insert(row_axis(aval.ndim), rows.stop - rows.start)
                values[key] = jnp.zeros((count, *shape), self.dtype or aval.dtype)
        return values

    def spread(self, executor: ETraceGraphExecutor, shapes: Values) -> dict[str, Spec]:
        """Over devices: samples as the states', parameters as these."""
        per, at = self.per_sample(executor), executor.spread
        assert at is not None
        lead = per.lead
        found: dict[str, Spec] = {BASIS: (lead, None, None)}
        for i, (name, aval) in named(per).items():
            spec = list(at.of_leaf(i) or [None] * aval.ndim)
            spec.insert(row_axis(aval.ndim), None)
            found |= {key: (lead, *spec) for key, _ in parts_of(name, shapes[BASIS].shape[1])}
        return found

    def advance(
        self,
        executor: ETraceGraphExecutor,
        before: Values,
        after: Values,
        window: Window,
        course: Callable[[Sequence[Slot]], Courses],
        signals: Leaves | None = None,
    ) -> tuple[Values, dict[int, Any]]:
        """What is kept beside the traces, which are `before` the window and `after` it.

        What is large goes through a kernel, with its trace, and the gradient of signals at the window's start
        comes with it; `course` says how traces go over the window.
        """
        per = self.per_sample(executor)
        old = self.basis_before(executor, before)
        basis = self.pushed(executor, old, window)
        matrices, specs, courses = self._in_kernel(executor, per, before, window.length, course)
        left_out = partial(self._left_out, per, old, before, after, window, matrices)
        for _ in range(self.power):
            rows, back, (traced, *_) = jax.vjp(left_out, basis, has_aux=True)
            # with some of what they were: rows that turn to the same direction would be lost to rounding
            turned = orthonormal(_unit(back(jax.tree.map(jnp.conj, rows))[0]) + 1e-3 * basis)
            # what traces tell but for rounding has no directions
            rounding = 100 * jnp.finfo(basis.dtype).eps
            some = _size(rows.values()) > rounding**2 * _size(traced.values())
            basis = jnp.where(jnp.reshape(some, (-1, 1, 1)), turned, basis)
        values, (_, start, factors) = left_out(basis)
        values = {BASIS: basis, **values}
        if not matrices:
            return values, {}
        # of what goes through the kernel, XLA drops the rest: nobody reads it
        signal = jnp.zeros_like(old[:, 0]) if signals is None else finite(per.vectors(signals, dual=True))
        carried, along = (_product("b...n,brn->b...r", a, old) for a in (start, signal))
        lifted = [per.lift(a, window) for a in (start, basis, signal[:, None])]
        grads = {}
        for i, matrix in matrices.items():
            (name, aval), slot = named(per)[i], matrix.slot
            keys = [key for key, _ in parts_of(name, basis.shape[1])]
            trace = None if slot is None else before[slot.key]
            more = () if slot is None else (*courses[slot.key], *(found[slot.key] for found in lifted))
            x, d = factors[i]
            how = through(matrix, x, d, carried, along, *more)
            old_rows = [jnp.squeeze(before[k], 2) for k in keys]
            new, trace, grad = step(old_rows, trace, how, executor.spread, specs[i])
            values.update({k: jnp.expand_dims(v, 2) for k, v in zip(keys, new, strict=True)})
            values.update({} if slot is None else {slot.key: trace})
            grads[i] = grad.astype(aval.dtype)
        return values, {} if signals is None else grads

    def _in_kernel(
        self,
        executor: ETraceGraphExecutor,
        per: PerSample,
        values: Values,
        length: int,
        course: Callable[[Sequence[Slot]], Courses],
    ) -> tuple[dict[int, Matrix], dict[int, Spec], Courses]:
        """The matrices whose rows are large, where there is a kernel for these.

        And how they are spread over devices, and how their traces go.
        """
        size, names, at = values[BASIS].shape[1], named(per), executor.spread
        spread = mesh_of(*values.values()) is not None
        if self.power or not on_gpu() or size > _APART or (spread and at is None):
            return {}, {}, {}
        found, specs = {}, dict[int, Spec]()
        for i, matrix in per.matrices.items():
            rows = [jnp.squeeze(values[key], 2) for key, _ in parts_of(names[i][0], size)]
            trace = None if matrix.slot is None else values[matrix.slot.key]
            ways: Sequence[int] = (1, 1, 1)
            if spread and at is not None:
                specs[i] = at.fitted((per.lead, *(at.of_leaf(i) or (None, None))), rows[0].shape)
                ways = [at.ways(p, n) for p, n in zip(specs[i], rows[0].shape, strict=True)]
            large = sum(v.nbytes for v in rows) // math.prod(ways) >= _LARGE
            if large and fits(length, rows, trace, ways):
                found[i] = matrix
        courses = course([m.slot for m in found.values() if m.slot is not None])
        known = {i: m for i, m in found.items() if m.slot is None or m.slot.key in courses}
        return known, {i: specs.get(i, ()) for i in known}, courses

    def _left_out(
        self,
        per: PerSample,
        old: Any,
        before: Values,
        after: Values,
        window: Window,
        apart: Iterable[int],
        basis: Any,
    ) -> tuple[Values, Any]:
        """`basis (H (E + U V) + what the window adds - E')`: linear in the basis.

        And `basis E'`, `basis H`, and of the matrices in `apart` the factors of what the window adds.
        """
        start, added, factors = per.pull_apart(window, basis, apart)
        start = per.whole(finite(start))
        carried = _product("bqn,brn->bqr", start, old)
        of_old, of_new = per.contract(before, start, window), per.contract(after, basis, window)
        values = {}
        for i, (name, aval) in named(per).items():
            axis, parts = 1 + row_axis(aval.ndim), parts_of(name, basis.shape[1])
            for key, rows in parts:
                terms = [mixed(carried[:, rows, q], before[k], axis) for k, q in parts]
                terms += [_rows(found[i], rows, axis) for found in (added, of_old) if i in found]
                new = add_up(promoted(*terms))
                new = new - _rows(of_new[i], rows, axis) if i in of_new else new
                values[key] = new.astype(before[key].dtype)
        return values, (of_new, start, factors)

    # -- the basis, for cotangents that cross from a window to the one before it ----------------------

    def basis_before(self, executor: ETraceGraphExecutor, values: Values, keep: Any = None) -> Any:
        """The basis before a window, (samples, rank, state size); `keep` is False for reset samples."""
        per = self.per_sample(executor)
        basis = per.whole(values[BASIS])
        if keep is not None:
            basis = where_rows(keep, basis, jnp.zeros_like(basis))
        return per.whole(_begun(basis))

    def pushed(self, executor: ETraceGraphExecutor, basis: Any, window: Window) -> Any:
        """The basis after a window: pushed through all its paths, and orthonormal again."""
        per = self.per_sample(executor)
        after = window.push(jax.vmap(lambda r: per.leaves(r, dual=False), 1)(basis))
        rows = jax.vmap(lambda t: per.vectors(t, dual=False), out_axes=1)(after)
        return per.whole(orthonormal(per.whole(rows)))

    def crossing(self, executor: ETraceGraphExecutor, basis: Any, cotangents: Leaves) -> Leaves:
        """The part of the carried leaves' cotangents that lies in the span of the basis."""
        per = self.per_sample(executor)
        vectors = per.whole(finite(per.vectors(cotangents, dual=True)))
        along = _product("bn,brn->br", vectors, basis)
        return per.leaves(_product("br,brn->bn", along, basis), dual=True)

    def past(self, executor: ETraceGraphExecutor, values: Values, signals: Leaves) -> dict[int, Any]:
        """What it gives each leaf of the parameters, of signals at the carried states."""
        per = self.per_sample(executor)
        signal = per.whole(finite(per.vectors(signals, dual=True)))
        along = _product("bn,brn->br", signal, per.whole(values[BASIS]))
        found = {}
        for i, (name, aval) in named(per).items():
            axis, parts = 1 + row_axis(aval.ndim), parts_of(name, along.shape[1])
            pairs = [(along[:, rows], values[key]) for key, rows in parts]
            found[i] = summed(per, i, pairs, axis, aval.dtype)
        return found

    def forget(self, executor: ETraceGraphExecutor, values: Values, rows: Any) -> Values:
        per = self.per_sample(executor)
        per.check_rows()
        size = values[BASIS].shape[1]
        names = [BASIS, *(key for name, _ in named(per).values() for key, _ in parts_of(name, size))]
        return {k: where_rows(rows, jnp.zeros_like(values[k]), values[k]) for k in names}

    def per_sample(self, executor: ETraceGraphExecutor) -> PerSample:
        return per_sample(executor, self.samples, traces=self.beside_traces)


def per_sample(executor: ETraceGraphExecutor, axis: int | str | None, *, traces: bool = True) -> PerSample:
    """The samples of a step, found once; `traces`: those have to be told apart by sample, too."""
    if (axis, traces) not in executor.per_sample:
        linear = MarkedStep(executor)
        samples = find_samples(linear.info, axis)
        if samples.mixed:
            raise NotSupportedError(
                f"What is kept is kept for each sample, and the samples of {show_paths(samples.mixed)} along "
                f"axis {samples.axis} act on each other (a norm over the batch?). Say along which axis of "
                "the states samples lie that do not (`samples=1`, say), or take all as one "
                "(`samples=None`)."
            )
        if isinstance(axis, int) and not samples.have(axis):
            raise NotSupportedError(
                f"The states that parameters act on have no axis {axis} of one length in common: leave "
                "`samples` out, or take all as one (`samples=None`)."
            )
        found = PerSample(linear, samples)
        told = not traces or found.tells_traces
        if not told and axis != "auto":
            raise NotSupportedError(
                f"The traces of this model have no axis for the samples along axis {axis} of the states: "
                "leave `samples` out, or take all for one (`samples=None`)."
            )
        if not told:  # places of an image, say, with no batch
            found = PerSample(linear, find_samples(linear.info, None))
        executor.per_sample[axis, traces] = found
    return executor.per_sample[axis, traces]  # type: ignore[no-any-return]


def axis_of_samples(graph: ETraceGraph, axis: int | str | None) -> int | str | None:
    """The axis along which samples have each a basis; as it is where the rule refuses it."""
    try:
        return per_sample(ETraceGraphExecutor(graph), axis).samples.axis
    except NotSupportedError:
        return axis


def named(per: PerSample) -> dict[int, tuple[str, Any]]:
    """The leaves of the parameters that act on what is carried, by number: names and types."""
    leaves = [(e, i, v.aval) for e in per.info.fixed for i, v in enumerate(e.invars)]
    found = {n: leaves[n] for n in per.acting}
    return {n: (f"{BASIS}:{name_of(e.path)}:{i}", aval) for n, (e, i, aval) in found.items()}


@lru_cache
def fixed_basis(numbers: int, size: int) -> Any:
    """Orthonormal columns to begin with, (numbers, size) or fewer."""
    random = np.random.RandomState(0).standard_normal((numbers, min(numbers, size)))
    return np.linalg.qr(random)[0]


def _begun(basis: Any) -> Any:
    """The basis, or a fixed one for samples that have none yet."""
    _, size, numbers = basis.shape
    first = jnp.asarray(fixed_basis(numbers, size).T, basis.dtype)[None]
    return jnp.where(jnp.any(basis != 0, axis=(1, 2), keepdims=True), basis, first)


def orthonormal(rows: Any) -> Any:
    """An orthonormal basis of the span of rows, (samples, rows, numbers).

    Where rows are lost (a hard reset), a little of the fixed basis takes their place.
    """
    _, size, numbers = rows.shape
    if not size:  # parameters act on nothing that is carried
        return rows
    rows = finite(rows)
    little = jnp.sqrt(jnp.finfo(rows.dtype).eps)
    fixed = fixed_basis(numbers, size).T.astype(rows.dtype)[None]
    rows = _unit(rows) + little * fixed

    def add(j: Any, basis: Any) -> Any:
        row = jax.lax.dynamic_index_in_dim(rows, j, 1, keepdims=False)
        for _ in range(2):  # once more, for what rounding left
            row = row - _product("br,brn->bn", _product("brn,bn->br", basis, row), basis)
            row = row / jnp.linalg.norm(row, axis=-1, keepdims=True)
        return jax.lax.dynamic_update_index_in_dim(basis, row, j, 1)

    return jax.lax.fori_loop(0, size, add, jnp.zeros_like(rows), unroll=min(size, unroll()))


def _unit(rows: Any) -> Any:
    length = jnp.linalg.norm(rows, axis=-1, keepdims=True)
    return rows / jnp.where(length == 0, 1, length)


def _size(arrays: Iterable[Any]) -> Any:
    """The sum of the squares of each sample's numbers."""
    squares = [jnp.sum(jnp.square(jnp.abs(a)), axis=tuple(range(1, a.ndim))) for a in arrays]
    return add_up(squares) if squares else jnp.zeros(1)


def _product(labels: str, *arrays: Any) -> Any:
    # small, and what is orthonormal must stay so: no tensor cores
    return jnp.einsum(labels, *promoted(*arrays), precision="highest")


def parts_of(name: str, size: int) -> list[tuple[str, slice]]:
    """The arrays that hold what is kept for one parameter, and which rows each has.

    A few rows are arrays of their own: then a loop updates them in place.
    """
    if size > _APART:
        return [(name, slice(0, size))]
    return [(f"{name}:{r}", slice(r, r + 1)) for r in range(size)]


_APART = 16
_LARGE = 2**28  # bytes of the rows of a matrix: what XLA writes of less, a GPU finds in its cache


def _rows(terms: Any, rows: slice, axis: int) -> Any:
    return jax.lax.slice_in_dim(terms, rows.start, rows.stop, axis=axis)


def mixed(carried: Any, kept: Any, axis: int) -> Any:
    """`sum_r carried[b, q, r] kept[b, .., r, ..]`."""
    carried, kept = promoted(carried, kept)
    if carried.shape[1:] == (1, 1):
        return carried.reshape(-1, *[1] * (kept.ndim - 1)) * kept
    # axes of a parameter stay apart: spread over devices, they would be gathered to be joined
    found = jnp.einsum("bqr,br...->bq...", carried, jnp.moveaxis(kept, axis, 1))
    return jnp.moveaxis(found, 1, axis)


def summed(per: PerSample, leaf: int, pairs: Sequence[tuple[Any, Any]], axis: int, dtype: Any) -> Any:
    """The gradient of a leaf: `sum_br along[b, r] kept[b, .., r, ..]` over pairs of them, rows at `axis`."""
    pairs = [tuple(promoted(*pair)) for pair in pairs]
    if mesh_of(*(kept for _, kept in pairs)) is None:
        return add_up(_summed(*pair, axis=axis) for pair in pairs).astype(dtype)
    each = add_up(mixed(along[:, None], kept, axis) for along, kept in pairs)
    return per.summed(leaf, each.astype(dtype), axis)


def _summed(along: Any, kept: Any, *, axis: int) -> Any:
    if kept.shape[axis] > 1:
        return jnp.tensordot(along, kept, ((0, 1), (0, axis)))
    return weigh(along.reshape(1, -1, *[1] * (kept.ndim - 2)), jnp.squeeze(kept, axis)[None])


def finite(a: Any) -> Any:
    """Zero where a slope is not finite: a state that nothing has reached may have one at its start."""
    return jnp.where(jnp.isfinite(a), a, 0)
