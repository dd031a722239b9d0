"""Batches of sequences: how they are read, and checks of their shapes and values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._types import ArrayLike, PyTree

# batches `(xs, ys)`, `(xs, ys, mask)` or `(xs, ys, mask, reset)`, or a function of the epoch
Batches = Iterable[PyTree] | Callable[[int], Iterable[PyTree]]


class Batch(NamedTuple):
    """Inputs, targets, weights of the losses, and flags of samples that are reset before a step."""

    xs: PyTree
    ys: PyTree
    mask: ArrayLike
    reset: ArrayLike | None = None


def read(batches: Batches, epoch: int, batched: bool = True) -> Iterator[Batch]:
    """Return the checked batches of one epoch: those of `batches(epoch)`, or of `batches` itself."""
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
    return (check_batch(batch, batched) for batch in given)


def check_batch(batch: PyTree, batched: bool = True) -> Batch:
    """Return a batch with its mask, which is one for each step by default."""
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3, 4):
        found = f"a {type(batch).__name__} of {len(batch)}" if hasattr(batch, "__len__") else type(batch)
        raise TypeError(
            f"A batch is `(xs, ys)`, `(xs, ys, mask)` or `(xs, ys, mask, reset)`, time first; this one is "
            f"{found}."
        )
    xs, ys, mask, reset = [*batch, None, None][:4]
    length = steps_of(xs)
    mask = np.ones(length, np.float32) if mask is None else mask
    for name, tree in (("ys", ys), ("mask", mask)):
        for leaf in jax.tree.leaves(tree):
            _check_time_first(name, np.shape(leaf), np.shape(jax.tree.leaves(xs)[0]))
    if reset is not None:
        _check_reset(reset, (length, size_of(xs)) if batched else (length,))
    return Batch(xs, ys, mask, reset)


def _check_reset(reset: ArrayLike, shape: tuple[int, ...]) -> None:
    """Raise an error for reset flags of another shape or type."""
    flags = reset if isinstance(reset, jax.Array) else np.asarray(reset)
    if flags.shape != shape or flags.dtype != bool:
        axes = "(time, batch)" if len(shape) == 2 else "(time,)"
        raise ValueError(
            f"`reset` has a boolean for each step and sample, shape {axes} = {shape}; these flags are "
            f"{flags.dtype}{list(flags.shape)}. A flag that is set resets the sample before that step."
        )


def _check_time_first(name: str, shape: tuple[int, ...], of_xs: tuple[int, ...]) -> None:
    """Raise an error for targets or a mask that do not have a value for each step."""
    time, *rest = of_xs
    if shape[:1] == (time,):
        return
    found = f"`{name}` has the shape {shape} and `xs` {of_xs}; the first axis is time"
    if name == "ys" and shape == tuple(rest[:1]):
        raise ValueError(
            f"{found}. For one label per sequence give a target for each step, `np.broadcast_to(ys, ({time}, "
            f"{rest[0]}))`, and a mask of the steps that count, such as `np.arange({time}) == {time - 1}`."
        )
    raise ValueError(f"{found}. Swap the first two axes of arrays that have the batch first.")


def probable_cause(batch: Batch) -> str:
    """Return a probable reason why a step fails on its targets; empty if there is none."""
    of_xs, of_ys = ([jnp.shape(a) for a in jax.tree.leaves(tree)] for tree in batch[:2])
    if not any(len(shape) == 1 for shape in of_ys) or len(of_xs[0]) < 2:
        return ""
    return (
        f"`ys` has the shape {of_ys[0]}: one target a step for all {of_xs[0][1]} sequences. If these are "
        "labels of sequences, `xs` has the batch first: swap its first two axes, and repeat labels over time."
    )


def not_finite(xs: PyTree, ys: PyTree) -> str:
    """Return where inputs or targets have NaN or infinite values; empty if they have none."""
    for name, tree in (("xs", xs), ("ys", ys)):
        for a in jax.tree.leaves(tree):
            if a.is_fully_addressable and not (finite := np.isfinite(np.asarray(a))).all():
                at = tuple(map(int, np.argwhere(~finite)[0]))
                return (
                    f"The data are the cause: `{name}` of this batch has {a[at]} at {list(at)}, time first."
                )
    return ""


def steps_of(xs: PyTree) -> int:
    """Return the number of time steps."""
    shape = np.shape(jax.tree.leaves(xs)[0])
    if not shape:
        raise ValueError("Sequences have time as their first axis; this batch holds a single number.")
    return int(shape[0])


def size_of(xs: PyTree) -> int:
    """Return the number of sequences of a batch."""
    shape = np.shape(jax.tree.leaves(xs)[0])
    if len(shape) < 2:
        raise ValueError(
            f"A batch of sequences has the axes (time, batch, ...); this one has the shape {shape}. For "
            "sequences without a batch axis pass `batched=False`."
        )
    return int(shape[1])
