"""A table of vectors, looked up by integers and learned online."""

from __future__ import annotations

import brainstate
import jax
import jax.numpy as jnp

from .._ops import embedding
from .._types import Value


class Embedding(brainstate.nn.Embedding):
    """`y = weight[indices]`; indices are integers of any shape, weight (num_embeddings, *embedding_size).

    The options change the gradient of the table. The row `padding_idx` learns nothing; `scale_grad_by_freq`
    divides a row's gradient by how often it is looked up in the step; `freeze` learns nothing at all. With
    `max_norm`, vectors that are longer come out at that length; the table itself is left as it is.

    >>> import jax.numpy as jnp
    >>> Embedding(10, 3)(jnp.array([1, 4])).shape
    (2, 3)
    """

    def update(self, indices: Value) -> Value:
        indices = jnp.asarray(indices)
        if not jnp.issubdtype(indices.dtype, jnp.integer):
            raise TypeError(f"An embedding takes integer indices, not {indices.dtype}.")
        table = self.weight.value
        if self.padding_idx is not None:
            table = table.at[self.padding_idx].set(jax.lax.stop_gradient(table[self.padding_idx]))
        table = table.reshape(self.num_embeddings, -1)
        if self.freeze:  # a mark would only cost a trace
            y = jax.lax.stop_gradient(table)[indices]
        else:
            y = embedding(indices, table)
        if self.scale_grad_by_freq:
            counts = jnp.bincount(indices.ravel(), length=self.num_embeddings)[indices].astype(y.dtype)
            y = jax.lax.stop_gradient(y) + (y - jax.lax.stop_gradient(y)) / counts[..., None]
        if self.max_norm is not None:
            y = y + jax.lax.stop_gradient(self._shortened(y, indices) - y)
        return y.reshape(*indices.shape, *self.embedding_size)

    def _shortened(self, y: Value, indices: Value) -> Value:
        norm = jnp.linalg.norm(y, ord=self.norm_type, axis=-1, keepdims=True)
        scale = jnp.minimum(1.0, self.max_norm / (norm + 1e-8))
        if self.padding_idx is not None:
            scale = jnp.where((indices == self.padding_idx)[..., None], 1.0, scale)
        return y * scale
