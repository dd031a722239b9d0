"""Gradients as per-device partial sums, where the batch is sharded.

They are added to each other before the sum over devices, which is then a single one for each gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import overload

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._ops.axis_labels import Labels
from .trace_math import add_up, promoted

PARTS = "parts"  # the label of the first axis of partial sums


@dataclass(frozen=True)
class DeviceSplit:
    """A batch axis split over devices, so that sums over it are per-device partial sums."""

    label: str
    ways: int
    sums: Callable[[Array], PartialSums]  # of such sums, as an array with the axis `PARTS` in front

    def of(self, array: Array, labels: Labels) -> tuple[Array, Labels]:
        """Split the batch axis of an array; returns it with its labels."""
        if self.label not in labels:
            return array, labels
        at = labels.index(self.label)
        return self.split(array, at), (*labels[:at], PARTS, *labels[at:])

    def split(self, array: Array, axis: int) -> Array:
        """Split an axis into (parts, entries of each part)."""
        return array.reshape(*array.shape[:axis], self.ways, -1, *array.shape[axis + 1 :])


@dataclass(frozen=True, eq=False)
class PartialSums:
    """A gradient as per-device partial sums, along the first axis."""

    parts: Float[Array, "parts ..."]


Gradient = Array | PartialSums


@overload
def plus(a: Gradient, b: Gradient | None) -> Gradient: ...
@overload
def plus(a: Gradient | None, b: Gradient) -> Gradient: ...
def plus(a: Gradient | None, b: Gradient | None) -> Gradient | None:
    """Add two gradients (None is zero); the result is a partial sum if both are."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, PartialSums) and isinstance(b, PartialSums) and a.parts.shape == b.parts.shape:
        return PartialSums(add_up(promoted(a.parts, b.parts)))
    return full_sum(a) + full_sum(b)


def full_sum(a: Gradient) -> Array:
    """The gradient, summed over devices if it is a partial sum."""
    return jnp.sum(a.parts, 0) if isinstance(a, PartialSums) else a
