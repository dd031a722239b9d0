"""Batches of sequences: where they come from, and going on in the middle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Batches = Iterable[Any] | Callable[[int], Iterable[Any]]
Batch = tuple[Any, Any, Any]


def read(batches: Batches, epoch: int) -> Iterator[Batch]:
    """The batches of one epoch, as `(xs, ys, mask)`.

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
    return map(check_batch, given)


def check_batch(batch: Any) -> Batch:
    """A batch with its mask: one for each step, unless there is one."""
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        found = f"a {type(batch).__name__} of {len(batch)}" if hasattr(batch, "__len__") else type(batch)
        raise TypeError(f"A batch is `(xs, ys)` or `(xs, ys, mask)`, time first; this one is {found}.")
    xs, ys = batch[0], batch[1]
    length = steps_of(xs)
    mask = jnp.ones(length) if len(batch) == 2 or batch[2] is None else batch[2]
    for name, tree in (("ys", ys), ("mask", mask)):
        for leaf in jax.tree.leaves(tree):
            _check_time_first(name, jnp.shape(leaf), jnp.shape(jax.tree.leaves(xs)[0]))
    return xs, ys, mask


def _check_time_first(name: str, shape: tuple[int, ...], of_xs: tuple[int, ...]) -> None:
    """Raise an error for targets or a mask that do not have a value for each step."""
    time, *rest = of_xs
    if shape[:1] == (time,):
        return
    said = f"`{name}` has the shape {shape} and `xs` {of_xs}; the first axis is time"
    if name == "ys" and shape == tuple(rest[:1]):
        raise ValueError(
            f"{said}. For one label per sequence give a target for each step, `np.broadcast_to(ys, ({time}, "
            f"{rest[0]}))`, and a mask of the steps that count, such as `np.arange({time}) == {time - 1}`."
        )
    raise ValueError(f"{said}. Swap the first two axes of what has the batch first.")


def why_failed(batch: Batch) -> str:
    """A probable reason why a step cannot take its targets; empty if there is none."""
    of_xs, of_ys = ([jnp.shape(a) for a in jax.tree.leaves(tree)] for tree in batch[:2])
    if not any(len(shape) == 1 for shape in of_ys) or len(of_xs[0]) < 2:
        return ""
    return (
        f"`ys` has the shape {of_ys[0]}: one target a step for all {of_xs[0][1]} sequences. If these are "
        "labels of sequences, `xs` has the batch first: swap its first two axes, and repeat labels over time."
    )


def not_finite(xs: Any, ys: Any) -> str:
    """Where inputs or targets have NaN or infinite values; empty if they have none."""
    for name, tree in (("xs", xs), ("ys", ys)):
        for a in jax.tree.leaves(tree):
            if a.is_fully_addressable and not (finite := np.isfinite(np.asarray(a))).all():
                at = tuple(map(int, np.argwhere(~finite)[0]))
                return (
                    f"The data are the cause: `{name}` of this batch has {a[at]} at {list(at)}, time first."
                )
    return ""


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
