"""The product of a single row and a matrix, as a network without a batch needs it.

XLA leaves such a product to one thread of a CPU until the matrix is very large: cut into two halves it takes
0.5 to 0.8 of the time on two cores, and as long as before on one.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from .. import _compat

_LARGE = 2**17  # numbers in a matrix: above, halves are faster


def matrix_product(x: Any, matrix: Any) -> Any:
    """`x @ matrix`, x of shape (..., in)."""
    rows, columns = matrix.shape
    lead, dtypes = x.shape[:-1], {x.dtype, matrix.dtype}
    wide = dtypes in ({jnp.dtype("float32")}, {jnp.dtype("float64")})  # else halves round, and then their sum
    if math.prod(lead) != 1 or matrix.size < _LARGE or rows % 2 or not wide:
        return jnp.matmul(x, matrix)
    return jnp.reshape(row_p.bind(jnp.reshape(x, (rows,)), matrix, axis=0), (*lead, columns))


def _whole(row: Any, matrix: Any, *, axis: int) -> Any:
    """The row times that axis of the matrix."""
    return jnp.tensordot(row, matrix, (0, axis))


def _halves(row: Any, matrix: Any, *, axis: int) -> Any:
    """The same, from the upper and the lower half of the matrix."""
    halves = jnp.reshape(matrix, (2, -1, matrix.shape[1]))
    if axis == 1:
        return jnp.ravel(jnp.einsum("ho,hio->hi", jnp.broadcast_to(row, (2, *row.shape)), halves))
    if matrix.size == _LARGE and matrix.shape[0] < matrix.shape[1]:  # to add the two up takes longer
        return _whole(row, matrix, axis=axis)
    return jnp.sum(jnp.einsum("hi,hio->ho", jnp.reshape(row, (2, -1)), halves), axis=0)


def _to_row(ct: Any, row: Any, matrix: Any, *, axis: int) -> Any:
    return row_p.bind(ct, matrix, axis=1 - axis)


def _to_matrix(ct: Any, row: Any, matrix: Any, *, axis: int) -> Any:
    return jnp.outer(row, ct) if axis == 0 else jnp.outer(ct, row)


row_p = _compat.Primitive("row_product")
_compat.register_bilinear_rules(row_p, _whole, _halves, (_to_row, _to_matrix))
