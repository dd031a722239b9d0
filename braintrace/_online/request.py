"""The options of a gradient over a sequence, and the values that it returns."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from functools import partial
from typing import Literal

import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np

from .._types import Array, PyTree, Shape
from .parts import masked
from .sequence import Sequence

WindowSize = int | Literal["auto"]  # number of steps; 'auto' takes as many as the memory budget allows


@dataclass(frozen=True)
class Request:
    """The checked arguments of a gradient over a sequence."""

    sequence: Sequence
    has_aux: bool  # whether the loss function returns a pair
    reduction: str  # 'mean' divides gradients and total loss by the sum of the mask, 'sum' does not
    # losses: as the function returns them ('per_step'), times the mask ('masked'), or reduced ('scalar')
    loss_output: str = "per_step"
    return_value: bool = False  # whether the result has the losses, after the gradients

    def __post_init__(self) -> None:
        check_choice("reduction", self.reduction, ("mean", "sum"))
        check_choice("loss_output", self.loss_output, ("per_step", "masked", "scalar"))

    def split(self, out: PyTree, lead: Shape = ()) -> tuple[Array, PyTree]:
        """Split what the loss function returned into loss, of shape `lead` (steps) + samples, and aux."""
        return split_loss(out, self.has_aux, lead, self.sequence.mask.shape[1:])

    def result(self, grads: PyTree, losses: Array, aux: PyTree) -> PyTree:
        """The requested values, from the summed gradients and the losses and aux of all steps."""
        grads, counted, total = _reduced(self.reduction == "mean", self.sequence.mask, losses, grads)
        value = {"per_step": losses, "masked": counted, "scalar": total}[self.loss_output]
        found = (grads, *((value,) if self.return_value else ()), *((aux,) if self.has_aux else ()))
        return found if len(found) > 1 else grads

    def scaled(self, grads: PyTree, losses: Array) -> PyTree:
        """The summed gradients, divided by the sum of the mask if the reduction is 'mean'."""
        return _reduced(self.reduction == "mean", self.sequence.mask, losses, grads)[0]


@partial(jax.jit, static_argnums=0)  # eager operations would be a compiled program each
def _reduced(is_mean: bool, mask: Array, losses: Array, grads: PyTree) -> tuple[PyTree, Array, Array]:
    """The gradients, masked losses and total loss, divided by the sum of the mask if `is_mean`."""
    mask = mask.astype(losses.dtype)
    counted = masked(losses, mask)
    total = counted.sum()
    if is_mean:
        count = mask.sum()
        scale = 1 / jnp.where(count == 0, jnp.ones_like(count), count)
        grads, total = jax.tree.map(lambda v: v * scale.astype(v.dtype), (grads, total))
    return grads, counted, total


def split_loss(out: PyTree, has_aux: bool, lead: Shape = (), samples: Shape = ()) -> tuple[Array, PyTree]:
    """Split what the loss function returned into the loss, checked and without unit, and aux."""
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise ValueError(
            "With `has_aux=True`, the loss function returns a pair: the loss, and anything else."
        )
    loss, aux = out if has_aux else (out, None)
    loss = u.get_mantissa(loss)
    if isinstance(loss, tuple | list | dict):
        raise TypeError(
            f"The loss function must return the loss of the step, not a {type(loss).__name__}; to return a "
            "pair of the loss and anything else, pass `has_aux=True`."
        )
    if loss is None:
        raise TypeError("The loss function must return the loss of the step; it returned None.")
    loss = jnp.asarray(loss)
    if loss.shape != (*lead, *samples):
        raise ValueError(
            f"The loss function must return {_expected(lead, samples)}; it returned an array of shape "
            f"{jnp.shape(loss)}."
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(f"The loss must be a real floating number; its type is {loss.dtype}.")
    return loss, aux


def _expected(lead: Shape, samples: Shape) -> str:
    if not lead and not samples:
        return "one number, the loss of the step"
    if not samples:
        return f"{lead[0]} losses, one for each step"
    steps = f"of each of {lead[0]} steps, " if lead else ""
    return f"{steps}{samples[0]} losses, one for each sample, since the mask has a number for each"


def check_chunk_size(chunk_size: object) -> None:
    if chunk_size is None:
        return
    if not isinstance(chunk_size, numbers.Integral) or isinstance(chunk_size, bool):
        raise TypeError(f"`chunk_size` is an integer or None, not {chunk_size!r}.")
    if chunk_size < 1:
        raise ValueError(f"`chunk_size` must be at least 1, not {chunk_size}.")


def check_window(window: object) -> None:
    if window is None or window == "auto":
        return
    if not isinstance(window, int | np.integer) or isinstance(window, bool) or window < 1:
        raise ValueError(f"`window` is a number of steps, at least 1, 'auto' or None, not {window!r}.")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` is one of {', '.join(map(repr, choices))}, not {value!r}.")
