"""A gradient over a whole sequence: what was asked for, and what is returned of it."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .sequence import Sequence, StepFn, add_trees, over_chunks, split_loss


@dataclass(frozen=True)
class Drive:
    """The checked arguments of `etrace_grad`."""

    sequence: Sequence
    step_fn: StepFn
    weights: Mapping[Any, Any]
    chunk_size: int | None
    has_aux: bool
    keep: bool  # the traces after the sequence
    reduction: str
    loss_output: str
    return_value: bool

    def __post_init__(self) -> None:
        check_choice("reduction", self.reduction, ("mean", "sum"))
        check_choice("loss_output", self.loss_output, ("per_step", "masked", "scalar"))
        check_chunk_size(self.chunk_size)
        if not isinstance(self.weights, Mapping):
            raise TypeError(
                "`weights` is a dictionary of states, such as `model.states(brainstate.ParamState)`, not "
                f"{type(self.weights).__name__}."
            )
        if not self.weights:
            raise ValueError("There is no weight to take the gradient of: `weights` is empty.")

    def zeros(self) -> Any:
        """No gradient."""
        return {k: jax.tree.map(jnp.zeros_like, st.value) for k, st in self.weights.items()}

    def loss(self, slices: Any, shape: tuple[int, ...] = ()) -> tuple[Any, Any]:
        """The loss of a step, or of the steps of a window, and what else `step_fn` returns."""
        return split_loss(self.step_fn(*slices), self.has_aux, shape)

    def in_turn(self, unroll: int = 1) -> tuple[Any, Any]:
        """The summed gradients, and the losses and other outputs of every step, one step after the other."""

        def run(total: Any, arrays: Any, mask: Any) -> Any:
            def step(total: Any, given: Any) -> Any:
                slices, weight = given

                def loss_of() -> Any:
                    loss, aux = self.loss(slices)
                    return loss * weight.astype(jnp.result_type(loss)), (loss, aux)

                grads, kept = brainstate.transform.grad(loss_of, self.weights, has_aux=True)()
                return add_trees(total, grads), kept

            return brainstate.transform.scan(step, total, (arrays, mask), unroll=unroll)

        return over_chunks(run, self.zeros(), self.sequence, self.sequence.pace)

    def in_windows(self, size: int) -> tuple[Any, Any]:
        """The same, with `step_fn` called on windows of so many steps."""

        def run(total: Any, arrays: Any, mask: Any) -> Any:
            def loss_of() -> Any:
                losses, aux = self.loss(arrays, mask.shape)
                return jnp.sum(losses * mask.astype(losses.dtype)), (losses, aux)

            grads, kept = brainstate.transform.grad(loss_of, self.weights, has_aux=True)()
            return add_trees(total, grads), kept

        return over_chunks(run, self.zeros(), self.sequence, size)

    def result(self, grads: Any, losses: Any, aux: Any) -> Any:
        """What the caller asked for, of summed gradients and of all steps."""
        mask = self.sequence.mask.astype(losses.dtype)
        masked = losses * mask
        total = masked.sum()
        if self.reduction == "mean":
            count = mask.sum()
            scale = 1 / jnp.where(count == 0, jnp.ones_like(count), count)
            grads, total = jax.tree.map(lambda v: v * scale.astype(v.dtype), (grads, total))
        value = {"per_step": losses, "masked": masked, "scalar": total}[self.loss_output]
        found = (grads, *((value,) if self.return_value else ()), *((aux,) if self.has_aux else ()))
        return found if len(found) > 1 else grads


def check_chunk_size(chunk_size: Any) -> None:
    if chunk_size is None:
        return
    if not isinstance(chunk_size, numbers.Integral) or isinstance(chunk_size, bool):
        raise TypeError(f"`chunk_size` is an integer or None, not {chunk_size!r}.")
    if chunk_size < 1:
        raise ValueError(f"`chunk_size` must be at least 1, not {chunk_size}.")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` is one of {', '.join(map(repr, choices))}, not {value!r}.")
