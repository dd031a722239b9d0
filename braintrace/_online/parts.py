"""The values that a drive over a sequence starts from and carries, and the arithmetic of losses and masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from .._executor.memory import on_gpu
from .._executor.pull_back import is_inexact
from .._executor.signals import KnownOutput
from .._rules.rule import Gradients, Values
from .._types import Array, Leaves
from .user_step import UserStep


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Start:
    """The arrays that a drive starts from."""

    consts: Leaves  # the constants that the step closes over
    leaves: Leaves  # the leaves of the states that the step reads or writes
    initial: Leaves  # the reset values of the leaves in `Drive.reset_leaves`

    def moving(self, step: UserStep) -> Leaves:
        return [self.leaves[i] for i in step.moving]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Carry:
    """The carry of the loop over the parts of a sequence."""

    total: Leaves  # the sum of the gradients so far
    weight_grads: Gradients  # in chunks: the sum of those of effective weights, pulled back at the end
    moving: Leaves  # the leaves that a step changes


@dataclass(frozen=True)
class Part:
    """Consecutive steps of a sequence, with a leading time axis."""

    slices: Leaves
    mask: Float[Array, "time ..."]
    reset: Bool[Array, "time samples"] | None


class Recorded(NamedTuple):
    """Values that the call of the learner read and computed at a step, for a `Window`."""

    args: Leaves
    consts: Leaves  # None for those that do not vary
    before: list[Leaves]  # the carried states before the step
    ys: dict[int, KnownOutput]  # outputs of sites
    inputs: dict[int, Leaves]  # inputs of perturbed sites
    signal_inputs: Values


def finite_targets(slices: Leaves, mask: Float[Array, "time ..."], targets: list[bool]) -> Leaves:
    """The slices, with zeros for NaN and infinite targets of masked steps: 0 * NaN and 0 * inf are NaN."""

    def one(leaf: Array, is_target: bool) -> Array:
        if not is_target or not is_inexact(leaf) or leaf.shape[: mask.ndim] != mask.shape:
            return leaf
        unused = (mask == 0).reshape(*mask.shape, *[1] * (leaf.ndim - mask.ndim))
        return jnp.where(unused & ~jnp.isfinite(leaf), jnp.zeros_like(leaf), leaf)

    return list(map(one, slices, targets))


def masked(losses: Float[Array, ...], mask: Float[Array, ...]) -> Float[Array, ...]:
    """Multiply losses by the mask; where the mask is zero the result is zero, even if the loss is NaN."""
    mask = mask.astype(losses.dtype) + jnp.zeros_like(losses)  # with the sharding of `losses` in its type
    return jnp.where(mask == 0, jnp.zeros_like(losses), losses * mask)


def masked_sum(losses: Float[Array, ...], mask: Float[Array, ...]) -> Float[Array, ""]:
    return jnp.sum(masked(losses, mask))


def add(a: Leaves, b: Leaves) -> Leaves:
    """The sums of arrays. On a CPU, XLA's loop for a sum of two is four times slower than with a select.

    On a GPU, a select would keep it from adding in the product that computes `y`.
    """

    def one(x: Array, y: Array) -> Array:
        y = y.astype(x.dtype)
        return x + y if on_gpu() else jnp.where(y == 0, x, x + y)

    return jax.tree.map(one, a, b)  # type: ignore[no-any-return]
