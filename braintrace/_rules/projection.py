"""Projections of a rank-`r` correction: which part of a cotangent crosses the start of a window.

With rows `S` and `T` (`S Tᵀ = I`), a cotangent `λ` of the carried state at a window's start is split into

    u = (λ Tᵀ) S        which goes on to the windows before,
    λ - u               which meets the diagonal traces.

*Pushed*: `S = T`, orthonormal, one basis per sample, pushed through each window by its Jacobian `H`:
`S' = orthonormal(S Hᵀ)`. It turns to the directions that decay slowest.

*Balanced*: one pair for all samples, by balanced truncation. `R` is the average covariance of `P ν` at window
starts, for random changes `ν` of the parameters; `O` that of `λ`. The rows of `T` span the leading
eigenvectors of `R O`, and `S = (T O Tᵀ)⁻¹ T O`. So the pair keeps the directions that parameters reach and
losses read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._executor import bases
from .._executor.bases import Covariance, precise_einsum
from .._executor.per_sample import PerSample
from .._executor.sharding import Spec
from .._executor.trace_math import promoted
from .._executor.window import Window, starts_of, where_rows

# A projection has arrays of its own (`start`, `lasting`). Over windows, `advance_basis` computes its
# state after them and the pairs at their starts; `pair` picks one pair, `observed` returns the new arrays.
Values = dict[str, Any]
Rows = Float[Array, "*samples rank state"]
Vectors = Float[Array, "samples state"]

BASIS = "basis"
TANGENT, AGE = "balance tangent", "balance age"
REACH, READ = "balance reach", "balance read"
COUNTS, TURN = "balance counts", "balance turn"


# -- pushed ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pushed:
    """One orthonormal basis per sample, pushed along the trajectory."""

    def start(self, per: PerSample, rank: int) -> Values:
        return {BASIS: jnp.zeros((per.samples.count, rank, per.state_size), per.dtype)}

    def lasting(self, per: PerSample, rank: int) -> Values:
        return {}

    def specs(self, per: PerSample) -> dict[str, Spec]:
        return {BASIS: (per.lead, None, None)}

    def pairs(self, per: PerSample, values: Values) -> Rows:
        """The pair at the start of the first window."""
        found: Rows = per.shard_samples(bases.or_fixed_basis(per.shard_samples(values[BASIS])))
        return found

    def pair(self, pairs: Rows, index: Any = None) -> tuple[Rows, Rows]:
        """`S` and `T` at the start of one of several windows, or of the first."""
        basis = pairs if index is None else jax.lax.dynamic_index_in_dim(pairs, index, keepdims=False)
        return basis, basis

    def advance_basis(self, per: PerSample, values: Values, window: Window, size: int) -> tuple[Rows, Rows]:
        """The basis after windows of `size` steps, and the bases at the starts of all but the first."""

        def along(basis: Rows, window: Window) -> tuple[Rows, Rows]:
            if window.keep is not None:
                basis = where_rows(window.keep[0], basis, jnp.zeros_like(basis))
            basis = per.shard_samples(bases.or_fixed_basis(basis))
            rows = jax.vmap(partial(per.push, window.without_first_reset), 1, 1)(basis)
            return per.shard_samples(bases.orthonormal(per.shard_samples(rows))), basis

        after, pairs = window.scan_windows(size, along, per.shard_samples(values[BASIS]))
        return after, pairs[1:]

    def no_pairs(self, per: PerSample, values: Values, windows: int) -> Rows:
        """Zeros of the shape of the pairs at the starts of all but the first of `windows`."""
        return jnp.zeros((windows - 1, *values[BASIS].shape), per.dtype)

    def renewed(self, values: Values, *, fresh: bool) -> Values:
        """The arrays at the start of a sequence."""
        return values

    def turned(self, values: Values, rows: Any) -> Any:
        """Coefficients (..., rank) of the rows of `V`, given those in the present basis."""
        return rows

    def observed(self, per: PerSample, values: Values, state: Rows, *losses: Any) -> Values:
        """The arrays after windows of a pass; `state` is the basis then."""
        return {BASIS: state}


# -- balanced --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Balanced:
    """One pair `S`, `T` for all samples, from running averages that survive resets.

    `P ν` costs a second forward pass, so it is computed for some sequences only.

    Attributes:
        memory: Number of windows over which the averages forget all but `1/e`.
        renew_every: Number of windows after which the pair is computed again if no reset comes before.
        reach_every: `P ν` is computed for the first sequences, up to this many, and then for one in so many.
    """

    memory: int = 50
    renew_every: int = 16
    reach_every: int = 4

    def start(self, per: PerSample, rank: int) -> Values:
        count = per.samples.count
        return {TANGENT: jnp.zeros((count, per.state_size), per.dtype), AGE: jnp.zeros((count,), per.dtype)}

    def lasting(self, per: PerSample, rank: int) -> Values:
        first = jnp.asarray(bases.fixed_basis(per.state_size, rank).T, per.dtype)
        none = lambda: jnp.zeros((per.state_size, bases.sketch_size(per.state_size, rank)), per.dtype)
        # number of sequences, which seeds the change of the parameters; windows since the pair changed
        counts, turn = jnp.zeros((2,), jnp.int32), jnp.eye(len(first), dtype=per.dtype)
        return {BASIS: jnp.stack([first, first]), REACH: none(), READ: none(), COUNTS: counts, TURN: turn}

    def specs(self, per: PerSample) -> dict[str, Spec]:
        return {TANGENT: (per.lead, None), AGE: (per.lead,)}

    def pairs(self, per: PerSample, values: Values) -> Rows:
        found: Rows = values[BASIS]
        return found

    def pair(self, pairs: Rows, index: Any = None) -> tuple[Rows, Rows]:
        s, t = pairs  # those of all windows
        return s, t

    def no_pairs(self, per: PerSample, values: Values, windows: int) -> tuple[Rows, Rows]:
        return tuple(jnp.zeros_like(values[BASIS]))

    def advance_basis(
        self, per: PerSample, values: Values, window: Window, size: int
    ) -> tuple[tuple[Vectors, Vectors], tuple[Rows, Rows]]:
        """The tangent `P ν` after windows of `size` steps and at their starts, and the pair.

        `P ν` advances by the derivative of the steps along `(P ν, ν)`.
        """
        tangent = per.shard_samples(values[TANGENT])

        def push() -> tuple[Vectors, Vectors]:
            fixed = [v.aval for e in per.info.fixed for v in e.invars]
            signs = _signs(values[COUNTS][0], [fixed[i] for i in per.acting])
            change = dict(zip(per.acting, signs, strict=True))
            after, before = per.linear.window(window).push(per.leaves(tangent, dual=False), change)
            at_starts = jax.tree.map(lambda a: a[np.array(starts)], before)
            found = jax.vmap(lambda a: per.vectors(a, dual=False))(at_starts)
            return per.shard_samples(per.vectors(after, dual=False)), found

        starts = starts_of(window.length, size)
        none = jnp.zeros_like(tangent), jnp.zeros((len(starts), *tangent.shape), tangent.dtype)
        s, t = values[BASIS]  # two arrays: in the loop over steps, XLA would cut them out at each
        return jax.lax.cond(self._has_reach(values), push, lambda: none), (s, t)

    def _has_reach(self, values: Values) -> Any:
        """Whether `P ν` is computed for the present sequence."""
        index = values[COUNTS][0]
        return (index <= self.reach_every) | (index % self.reach_every == 0)

    def renewed(self, values: Values, *, fresh: bool) -> Values:
        """The arrays at the start of a sequence, with a new pair if all samples are reset or it is due.

        `V` keeps the coordinates of the old pair until it is next written: `S' Tᵀ` is kept in `TURN` instead,
        because a rotation of `V` here would be one more pass over it. `fresh`: `V` is zero.
        """
        index, since = values[COUNTS]
        all_reset = ~jnp.any(values[AGE] != 0)
        due = all_reset | (since >= self.renew_every)
        averages = values[BASIS], values[REACH], values[READ]
        basis = jax.lax.cond(due, balanced, lambda basis, *_: basis, *averages)
        counts = jnp.stack([jnp.where(all_reset, index + 1, index), jnp.where(due, 0, since)])
        turn = jnp.eye(len(values[TURN]), dtype=values[TURN].dtype)
        if not fresh:
            onto = precise_einsum("qn,rn->qr", basis[0], values[BASIS][1])
            later = jnp.where(due, precise_einsum("qr,rk->qk", onto, values[TURN]), values[TURN])
            turn = jnp.where(all_reset, turn, later)
        return {**values, BASIS: basis, COUNTS: counts, TURN: turn}

    def turned(self, values: Values, rows: Any) -> Any:
        """Coefficients (..., rank) of the rows of `V`, given those in the present pair."""
        return precise_einsum("...r,rk->...k", rows, values[TURN])

    def observed(
        self, per: PerSample, values: Values, state: Any, read: Any, windows: int, pulled: Rows | None = None
    ) -> Values:
        """The arrays that choose the pair, after windows of a pass.

        `state` is that of `advance_basis`; `read` are the `λ` at the starts of windows, if there is a loss;
        `pulled` are the rows of `S` at the start of the only window, if losses after it are unknown.
        """
        tangent, starts = state
        counts = values[COUNTS] + jnp.array([0, windows], jnp.int32)
        after = {TANGENT: tangent, COUNTS: counts, AGE: jnp.ones_like(values[AGE])}
        new, each = 1 - jnp.exp(-windows / self.memory), 1 / (windows * per.samples.count)
        for key, vectors in {REACH: starts, READ: read}.items():
            if vectors is None:
                continue
            rows, before = per.replicated(vectors).reshape(-1, vectors.shape[-1]), values[key]
            total = bases.outer(rows, rows, before)
            if key == READ and pulled is not None:
                total = total + self._read_later(per, values, pulled)
            average = before + (new * (each * total - before)).astype(before.dtype)
            counts_in = True if key == READ else self._has_reach(values)
            # an overflow would stay for good
            after[key] = jnp.where(counts_in & jnp.isfinite(jnp.sum(total)), average, before)
        return after

    def _read_later(self, per: PerSample, values: Values, pulled: Rows) -> Covariance:
        """The part of `λᵀλ` that comes from losses after the window, if `O` stays as it is.

        `pulled` are the rows of `S`, pulled back to the window's start.
        """
        _, t = values[BASIS]
        inner = precise_einsum("qn,nr->qr", t, bases.operators(values[READ][None])[0](t.T))
        pulled = per.replicated(pulled)
        weighed = precise_einsum("qr,brn->bqn", inner, pulled)
        n = pulled.shape[-1]
        found = bases.outer(pulled.reshape(-1, n), weighed.reshape(-1, n), values[READ])
        # an expanding window would let the average grow without bound
        before, now = bases.trace(values[READ]) * per.samples.count, bases.trace(found)
        return found * jnp.minimum(1, before / jnp.where(now == 0, 1, now))


def _signs(seed: Any, avals: list[Any]) -> list[Any]:
    """Arrays of random signs by hashing each element's index: all windows of a sequence draw the same."""
    found, start = [], 0
    for aval in avals:
        count = jax.lax.iota(jnp.uint32, int(aval.size)) + np.uint32(start)
        bits = count * np.uint32(0x9E3779B1) ^ (seed.astype(jnp.uint32) * np.uint32(0x85EBCA77))
        bits = (bits ^ (bits >> 15)) * np.uint32(0x2C1B3C6D)
        bits = (bits ^ (bits >> 12)) * np.uint32(0x297A2D39)
        found.append((1 - 2 * (bits >> 31).astype(jnp.int32)).astype(aval.dtype).reshape(aval.shape))
        start += int(aval.size)
    return found


def balanced(basis: Rows, reach: Covariance, read: Covariance) -> Rows:
    """`S` and `T` after two steps of subspace iteration from the present `T`: (2, rank, state size).

    `O` is regularised by a multiple of the identity: directions that no loss has read yet are ranked by `R`
    alone, and the inverse in `S` exists.
    """
    n = len(reach)
    # scaled, so that products of averages neither overflow nor underflow
    largest = jnp.stack([jnp.max(jnp.abs(average)) for average in (reach, read)])
    scale, total = jnp.where(largest == 0, 1, largest), bases.trace(read)
    least = max(_LEAST, n * float(jnp.finfo(read.dtype).eps))
    level = jnp.where(total > 0, least / n * total / scale[1], 1)  # before any loss, `O` is the identity
    by_reach, by_read = bases.operators(jnp.stack([reach, read]))
    iterated = lambda _, t: bases.orthonormal_columns(by_reach(by_read(t) / scale[1] + level * t) / scale[0])
    t = jax.lax.fori_loop(0, 2, iterated, basis[1].T)
    read_t = by_read(t)
    inner = precise_einsum("nq,nr->qr", t, read_t) / scale[1]
    # the inverse by eigenvalues: `jnp.linalg.solve` takes three times as long to compile
    each, vectors = jnp.linalg.eigh(inner)
    scaled = vectors / ((jnp.maximum(each, 0) + level) * scale[1])[None]
    s = precise_einsum("nq,qr->nr", read_t, precise_einsum("qk,rk->qr", scaled, vectors))
    # exactly `S Tᵀ = I`, despite the regulariser
    s = t + s - precise_einsum("nq,qr->nr", t, precise_einsum("nq,nr->qr", t, s))
    return jnp.stack([s.T, t.T])


_LEAST = 1e-6  # the regulariser of `O`, relative to its mean eigenvalue

BASES: dict[str, Pushed | Balanced] = {"balanced": Balanced(), "pushed": Pushed()}


def along_rows(vectors: Vectors, rows: Rows) -> Float[Array, "samples rank"]:
    """Products of per-sample vectors with rows, which are shared, (r, n), or per sample, (b, r, n)."""
    return precise_einsum("bn,brn->br" if rows.ndim == 3 else "bn,rn->br", vectors, rows)


def cross(vectors: Vectors, pair: tuple[Rows, Rows]) -> Vectors:
    """The part `(λ Tᵀ) S` of cotangents that crosses the start of a window.

    Its products have the precision of all others that cotangents take, because they are taken at every step.
    """
    s, t = pair
    each = "bn,brn->br", "br,brn->bn"
    shared = "bn,rn->br", "br,rn->bn"
    (along, back), (vectors, s, t) = each if s.ndim == 3 else shared, promoted(vectors, s, t)
    return jnp.einsum(back, jnp.einsum(along, vectors, t), s)
