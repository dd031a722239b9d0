"""Random signs: the same for the same key and count, so that a run can be repeated."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Key = int | tuple[int, ...]


def as_key(key: Any) -> Key:
    """A key that can be compared: a whole number, or the numbers of a key of JAX's."""
    if isinstance(key, int) and not isinstance(key, bool):
        return key
    if isinstance(key, tuple):
        return tuple(map(int, key))
    array = jnp.asarray(key)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.ndim > 1:
        raise TypeError(f"`projection_key` is a whole number or a random key, not {key!r}.")
    return int(array) if array.ndim == 0 else tuple(map(int, array))


def key_at(key: Key, count: Any) -> Any:
    """The random key of a step, by how many there were before it."""
    if isinstance(key, int):
        made = jax.random.key(key)
    else:
        made = jax.random.wrap_key_data(jnp.asarray(key, jnp.uint32))
    return jax.random.fold_in(made, count)


def signs(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Ones with random signs."""
    return jax.random.rademacher(key, shape, dtype)
