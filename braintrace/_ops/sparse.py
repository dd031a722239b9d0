"""Products with a sparse matrix, one trace for each stored entry.

With the entries `n` at (row[n], col[n]),

    y[..., col[n]] += x[..., row[n]] * w[n]
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._types import Array, NumPyArray, Value
from .axis_labels import Term
from .primitive import WeightFn, bias_of, on_mantissa, register_primitive, shape_of, spikes_as

Index = Array | NumPyArray


class SparseMatrix(Protocol):
    """A sparse matrix of any library."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def _at(q: jax.Array, index: jax.Array) -> jax.Array:
    # padding entries of BCOO and BCSR lie outside the matrix: zero, not the nearest entry
    return q.at[..., index].get(mode="fill", fill_value=0)


def _sparse(
    x: jax.Array,
    row: jax.Array,
    col: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    size: int,
) -> jax.Array:
    lead = tuple(range(x.ndim - 1))
    entries = _at(x, row) * jnp.expand_dims(weight, lead)
    y = jnp.zeros((*x.shape[:-1], size), entries.dtype).at[..., col].add(entries, mode="drop")
    return y if bias is None else y + jnp.expand_dims(bias, lead)


sparse_p = register_primitive(
    "etp_sparse_matmul",
    _sparse,
    {
        "weight": Term(
            "...n,n->...n", x=lambda x, row, col: _at(x, row), y=lambda q, x, row, col: _at(q, col)
        ),
        "bias": "o->...o",
    },
)


def sparse_matmul(
    x: Value,
    weight_data: Value = None,
    *,
    sparse_mat: SparseMatrix,
    bias: Value = None,
    weight: Value = None,
    weight_fn: WeightFn | None = None,
    bias_fn: WeightFn | None = None,
) -> Value:
    """Multiply `x` by a sparse matrix whose stored entries are learned online.

    Args:
        x: Input, shape `(..., in)`.
        weight_data: Stored entries, shape `(entries,)`, in the storage order of `sparse_mat`; a single number
            is the value of all.
        sparse_mat: Matrix of shape `(in, out)` that gives the positions of the entries, its own are not used:
            CSR, CSC, COO, BCOO or BCSR of `brainevent`, `brainunit.sparse`, `jax.experimental.sparse` or
            `scipy.sparse`.
        bias: Bias, shape `(out,)`; by default none.
        weight: Another name for `weight_data`.
        weight_fn: Function applied to the entries first, without their unit.
        bias_fn: Function applied to the bias first.

    Returns:
        The product plus `bias`, shape `(..., out)`.

    >>> import jax.numpy as jnp
    >>> from jax.experimental.sparse import BCSR
    >>> M = BCSR.fromdense(jnp.array([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]))
    >>> print(sparse_matmul(jnp.ones(3), M.data, sparse_mat=M))
    [4. 2.]
    """
    if (weight_data is None) == (weight is None):
        raise TypeError("`sparse_matmul` takes `weight_data` or `weight`, which mean the same: one of them.")
    row, col = _coordinates(sparse_mat)
    rows, size = sparse_mat.shape
    weight = on_mantissa(weight_fn, weight if weight_data is None else weight_data)
    shape, have = shape_of(weight), shape_of(x)
    if shape not in ((), (1,), row.shape):
        raise ValueError(
            f"`sparse_matmul` takes weight_data of shape {row.shape}, one for each entry of sparse_mat, or a "
            f"single number, not {shape}."
        )
    if have[-1:] != (rows,):
        raise ValueError(
            f"`sparse_matmul` takes x of shape ('...', {rows}) for a matrix of shape {(rows, size)}, "
            f"not {have}."
        )
    weight = on_mantissa(lambda w: jnp.broadcast_to(w, row.shape), weight)
    bias = bias_of((size,), on_mantissa(bias_fn, bias))
    return sparse_p(spikes_as(weight, x), row, col, weights={"weight": weight, "bias": bias}, size=size)


def _coordinates(matrix: SparseMatrix) -> tuple[Index, Index]:
    """The row and the column of each stored entry, in storage order."""
    if hasattr(matrix, "row") and hasattr(matrix, "col"):
        return matrix.row, matrix.col
    indices, indptr = (_known(getattr(matrix, name, None)) for name in ("indices", "indptr"))
    if indices is not None and indptr is not None and indices.ndim == 1:
        xp = jnp if _compat.is_tracer(indptr) else np
        major = xp.searchsorted(indptr, xp.arange(len(indices), dtype=indptr.dtype), side="right") - 1
        by_column = any(c.__name__.lower().startswith("csc") for c in type(matrix).__mro__)
        return (indices, major) if by_column else (major, indices)
    if indices is not None and getattr(matrix, "n_sparse", 0) == 2 and indices.ndim == 2:
        return indices[:, 0], indices[:, 1]
    raise TypeError(
        "`sparse_matmul` takes a CSR, CSC, COO, BCOO or BCSR matrix without batch axes, not "
        f"{type(matrix).__name__}. Others can be converted, for example with `BCOO.fromdense(m.todense())`."
    )


def _known(array: Array | None) -> Index | None:
    """An array of known values in numpy: inside `jit`, `jnp` would work on it again at every call."""
    return array if array is None or _compat.is_tracer(array) else np.asarray(array)
