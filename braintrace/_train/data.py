"""Batches of sequences: where they come from, and going on in the middle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp

Batches = Iterable[Any] | Callable[[int], Iterable[Any]]
Batch = tuple[Any, Any, Any]


def read(batches: Batches, epoch: int, start: int = 0) -> Iterator[Batch]:
    """The batches of one epoch from number `start` on, as `(xs, ys, mask)`.

    `batches(epoch)` is an iterable, or `batches` is one, the same in every epoch.
    """
    given = batches(epoch) if callable(batches) else batches
    if not isinstance(given, Iterable):
        raise TypeError(
            f"`batches` is an iterable of `(xs, ys)` or `(xs, ys, mask)`, or a function of the epoch that "
            f"returns one, not {type(given)}."
        )
    if isinstance(given, Iterator) and not callable(batches) and epoch > 0:
        raise ValueError(
            "`batches` is an iterator, which can be read only once. For several epochs give a list, or a "
            "function of the epoch that returns an iterator."
        )
    return map(check_batch, islice(given, start, None))


def check_batch(batch: Any) -> Batch:
    """A batch with its mask: one for each step, unless there is one."""
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        raise TypeError(
            "A batch is `(xs, ys)` or `(xs, ys, mask)`, time first; this one is "
            + (
                f"a {type(batch).__name__} of {len(batch)}."
                if hasattr(batch, "__len__")
                else f"{type(batch)}."
            )
        )
    xs, ys = batch[0], batch[1]
    length = steps_of(xs)
    mask = jnp.ones(length) if len(batch) == 2 or batch[2] is None else batch[2]
    return xs, ys, mask


def steps_of(xs: Any) -> int:
    """The number of time steps."""
    shape = jnp.shape(jax.tree.leaves(xs)[0])
    if not shape:
        raise ValueError("Sequences have time as their first axis; this batch holds a single number.")
    return int(shape[0])


def size_of(xs: Any) -> int:
    """The number of sequences, where they come in batches."""
    shape = jnp.shape(jax.tree.leaves(xs)[0])
    if len(shape) < 2:
        raise ValueError(
            f"A batch of sequences has the axes (time, batch, ...); this one has the shape {shape}. For "
            "sequences without a batch axis pass `batched=False`."
        )
    return int(shape[1])
