"""Take the elements of an array at known places, by the cheapest operation that does it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from .._compiler.links import numbered
from .._types import Array, NumPyArray, Shape


def take_at(q: Array, places: NumPyArray, lead: int, shape: Shape) -> Array:
    """`q[..., places]` over the flattened axes of `shape` after `lead`; zero where `places` is -1."""
    numbers = numbered(shape)
    axis = _repeated(places, numbers)
    if axis is not None:  # gates side by side: faster than a gather
        q = jnp.concatenate([q] * (places.shape[axis] // shape[axis]), lead + axis)
    elif not np.array_equal(places.ravel(), numbers.ravel()):
        flat = places.ravel()
        # -1 is read from 0 and then cleared, so that all indices are in bounds
        q = q.reshape(*q.shape[:lead], -1).at[..., np.maximum(flat, 0)].get(mode="promise_in_bounds")
        if np.any(flat < 0):
            q = jnp.where(jnp.asarray(flat >= 0), q, 0)
    return q.reshape(*q.shape[:lead], *places.shape)


def _repeated(places: NumPyArray, numbers: NumPyArray) -> int | None:
    """The axis along which `places` repeats `numbers`, if there is one."""
    if places.ndim != numbers.ndim:
        return None
    for axis, (many, one) in enumerate(zip(places.shape, numbers.shape, strict=True)):
        if many > one > 0 and many % one == 0:
            tiled = np.concatenate([numbers] * (many // one), axis)
            return axis if np.array_equal(places, tiled) else None
    return None
