"""Orthonormal bases of the state space, and covariances of state vectors, which may be sketched."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._types import NumPyArray
from .trace_math import finite, promoted
from .window import unroll

Rows = Float[Array, "samples rank state"]
Columns = Float[Array, "state rank"]
Covariance = Float[Array, "state sketch"]  # a matrix, or its products with some columns


def precise_einsum(axes: str, *arrays: Array) -> Array:
    """`jnp.einsum` without tensor cores: the products are small, and bases must stay orthonormal."""
    found: Array = jnp.einsum(axes, *promoted(*arrays), precision="highest")
    return found


@lru_cache
def fixed_basis(state_size: int, size: int) -> NumPyArray:
    """A fixed random orthonormal basis in columns, (state size, size), to start from."""
    random = np.random.RandomState(0).standard_normal((state_size, min(state_size, size)))
    found: NumPyArray = np.linalg.qr(random)[0]
    return found


def or_fixed_basis(basis: Rows) -> Rows:
    """The basis, or the fixed one for samples whose basis is still zero."""
    _, size, state_size = basis.shape
    first = jnp.asarray(fixed_basis(state_size, size).T, basis.dtype)[None]
    return jnp.where(jnp.any(basis != 0, axis=(1, 2), keepdims=True), basis, first)


def orthonormal(rows: Rows) -> Rows:
    """An orthonormal basis of the span of rows, for each sample, by Gram-Schmidt.

    A small multiple of the fixed basis is added first: rows that a hard reset has made zero, or parallel to
    others, are replaced by it instead of by 0/0.
    """
    _, size, state_size = rows.shape
    if not size:  # parameters act on no carried state
        return rows
    rows = finite(rows)
    rows = _unit(rows, -1) + _little(rows) * fixed_basis(state_size, size).T.astype(rows.dtype)[None]

    def add(j: Array, basis: Rows) -> Rows:
        row = jax.lax.dynamic_index_in_dim(rows, j, 1, keepdims=False)
        for _ in range(2):  # the second time removes rounding errors of the first
            row = row - precise_einsum("br,brn->bn", precise_einsum("brn,bn->br", basis, row), basis)
            row = row / jnp.linalg.norm(row, axis=-1, keepdims=True)
        return jax.lax.dynamic_update_index_in_dim(basis, row, j, 1)  # type: ignore[no-any-return]

    found: Rows = jax.lax.fori_loop(0, size, add, jnp.zeros_like(rows), unroll=min(size, unroll()))
    return found


def orthonormal_columns(columns: Columns) -> Columns:
    """Orthonormalise columns, with the fixed basis in place of lost ones, as in `orthonormal`."""
    n, size = columns.shape
    fixed = jnp.asarray(fixed_basis(n, size), columns.dtype)
    found: Array = jnp.linalg.qr(_unit(finite(columns), 0) + _little(columns) * fixed)[0]
    return found


def _little(a: Array) -> Array:
    return jnp.sqrt(jnp.finfo(a.dtype).eps)


def _unit(a: Array, axis: int) -> Array:
    length = jnp.linalg.norm(a, axis=axis, keepdims=True)
    found: Array = a / jnp.where(length == 0, 1, length)
    return found


_DENSE = 256  # state size up to which averages are full matrices; above, a sketch is as good


def sketch_size(n: int, rank: int) -> int:
    return n if n <= _DENSE else min(n, max(64, 8 * rank))


@lru_cache
def _test_columns(n: int, size: int) -> NumPyArray:
    """The fixed random columns `Ω`, (n, size), of the sketch `C = M Ω` of a covariance `M`."""
    found: NumPyArray = np.random.RandomState(1).standard_normal((n, size)).astype(np.float32) / np.sqrt(n)
    return found


def outer(
    a: Float[Array, "*pairs k state"],
    b: Float[Array, "*pairs k state"],
    like: Float[Array, "*pairs state sketch"],
) -> Float[Array, "*pairs state sketch"]:
    """`aᵀ b`, or its sketch `aᵀ b Ω` if `like` is one."""
    n, size = like.shape[-2:]
    if size < n:
        b = precise_einsum("...kn,nm->...km", b, jnp.asarray(_test_columns(n, size), b.dtype))
    return precise_einsum("...kn,...km->...nm", a, b).astype(like.dtype)


def operators(
    averages: Float[Array, "several state sketch"],
) -> list[Callable[[Columns], Columns]]:
    """The products of covariances with columns.

    Of a sketch `C = M Ω` it is the product with the Nyström approximation `C (Ωᵀ C)⁻¹ Cᵀ` of `M`.
    """
    _, n, size = averages.shape
    if size == n:
        return [partial(precise_einsum, "nm,mr->nr", average) for average in averages]
    core = precise_einsum("nm,snk->smk", jnp.asarray(_test_columns(n, size), averages.dtype), averages)
    core = (core + jnp.swapaxes(core, 1, 2)) / 2
    total = jnp.trace(core, axis1=1, axis2=2) / size
    total = jnp.where(total > 0, total, 1)[:, None, None, None]
    # rounding can make a core indefinite: the least of three levels is taken for which it is not
    levels = jnp.asarray([1e-5, 1e-3, 1e-1], core.dtype)[None, :, None, None]
    eye = jnp.broadcast_to(jnp.eye(size, dtype=core.dtype), (len(averages), 3, size, size))
    # The root of `[[A, I], [I, c I]]` has the transposed inverse of the root of `A` as its lower left block.
    # A triangular solve would start threads of its own on a CPU, which compete with those of XLA.
    blocks = [[core[:, None] / total + levels * eye, eye], [eye, 1e20 * eye]]
    inverses = jnp.linalg.cholesky(jnp.block(blocks), symmetrize_input=False)[..., size:, :size]
    least = jnp.argmax(jnp.all(jnp.isfinite(inverses), axis=(2, 3)), axis=1)
    roots = jnp.take_along_axis(inverses / jnp.sqrt(total), least[:, None, None, None], 1)[:, 0]
    return [partial(_nystrom, average, root) for average, root in zip(averages, roots, strict=True)]


def _nystrom(average: Covariance, root: Float[Array, "sketch sketch"], columns: Columns) -> Columns:
    """`C R Rᵀ Cᵀ` of columns."""
    found = precise_einsum("nk,nr->kr", average, columns)
    found = precise_einsum("km,mr->kr", root, precise_einsum("km,kr->mr", root, found))
    return precise_einsum("nk,kr->nr", average, found)


def trace(average: Covariance) -> Array:
    n, size = average.shape
    if size == n:
        return jnp.trace(average)
    return precise_einsum("nm,nm->", jnp.asarray(_test_columns(n, size), average.dtype), average) * n / size
