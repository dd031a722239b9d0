"""The product of rows and a matrix, in the forms that XLA does best.

Many rows are one axis: of several axes, XLA copies the transpose when it differentiates. A single row, as
a network without a batch has, goes through two halves of a large matrix on a CPU: XLA leaves the whole to
one thread until it is very large.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .. import _compat

_LARGE = 2**17  # numbers in a matrix: above, halves are faster


def matrix_product(x: Any, matrix: Any) -> Any:
    """`x @ matrix`, x of shape (..., in)."""
    if x.dtype != matrix.dtype:
        return jnp.matmul(x, matrix)
    return _on_rows(x, matrix, axis=0)


def _on_rows(x: Any, matrix: Any, *, axis: int) -> Any:
    y = _product_p.bind(jnp.reshape(x, (-1, x.shape[-1])), matrix, axis=axis)
    return jnp.reshape(y, (*x.shape[:-1], y.shape[-1]))


def _whole(x: Any, matrix: Any, *, axis: int) -> Any:
    """The rows of `x` times that axis of the matrix."""
    return jax.lax.dot_general(x, matrix, (((1,), (axis,)), ((), ())))


def _on_cpu(x: Any, matrix: Any, *, axis: int) -> Any:
    large = matrix.size > _LARGE if axis == 0 else matrix.size >= _LARGE  # back, no halves are added up
    if len(x) != 1 or not large or len(matrix) % 2:
        return _whole(x, matrix, axis=axis)
    halves = jnp.reshape(matrix, (2, -1, matrix.shape[1]))
    if axis == 0:
        return jnp.sum(jnp.einsum("hi,hio->ho", jnp.reshape(x, (2, -1)), halves), axis=0, keepdims=True)
    twice = jnp.broadcast_to(x, (2, x.shape[1]))
    return jnp.reshape(jnp.einsum("ho,hio->hi", twice, halves), (1, -1))


def _to_rows(ct: Any, x: Any, matrix: Any, *, axis: int) -> Any:
    return _product_p.bind(ct, matrix, axis=1 - axis)


def _to_matrix(ct: Any, x: Any, matrix: Any, *, axis: int) -> Any:
    a, b = (x, ct) if axis == 0 else (ct, x)
    return jax.lax.dot_general(a, b, (((0,), (0,)), ((), ())))


def _vmapped(args: Any, dims: Any, *, axis: int) -> Any:
    x, matrix = args
    if dims[1] is None:
        return _on_rows(jnp.moveaxis(x, dims[0], 0), matrix, axis=axis), 0
    return jax.vmap(lambda x, m: _whole(x, m, axis=axis), dims)(x, matrix), 0


_product_p = _compat.Primitive("rows_times_matrix")
_compat.register_bilinear_rules(_product_p, _whole, _on_cpu, (_to_rows, _to_matrix), _vmapped)
