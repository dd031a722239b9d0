"""Drive a learner over a whole sequence: the summed online gradient, in chunks, or no gradient at all."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .data import SingleStepData
from .progress import Progress, unchanged_on_error

StepFn = Callable[..., Any]


@dataclass(frozen=True)
class Sequence:
    """Checked arguments of a drive over a sequence."""

    arrays: Any  # a tuple of trees, time first
    length: int
    mask: Any
    progress: Progress | None = None

    @staticmethod
    def check(sequences: tuple[Any, ...], mask: Any, progress: Progress | None = None) -> Sequence:
        if not sequences:
            raise ValueError("Give at least one sequence: arrays with time as their first axis.")
        if any(isinstance(s, SingleStepData) for s in sequences):
            raise TypeError(
                "Give plain arrays with time first; wrap slices in `MultiStepData` inside `step_fn`."
            )
        if any(isinstance(s, Iterator) for s in sequences):
            raise TypeError("A sequence is an array with time as its first axis: `jnp.stack(list(steps))`.")
        odd = [
            a
            for a in jax.tree.leaves(sequences)
            if not isinstance(a, numbers.Number | np.generic | np.ndarray | jax.Array)
        ]
        if odd:
            raise TypeError(
                f"A sequence is an array with time as its first axis, not {type(odd[0]).__name__}; make one "
                "of many steps with `jnp.stack`."
            )
        lengths = {jnp.shape(leaf)[0] if jnp.ndim(leaf) else None for leaf in jax.tree.leaves(sequences)}
        if len(lengths) != 1 or None in lengths:
            raise ValueError(f"The sequences must share one length, their first axis; theirs are {lengths}.")
        length = jnp.shape(jax.tree.leaves(sequences)[0])[0]
        if length == 0:
            raise ValueError("The sequences have no steps.")
        mask = jnp.ones(length) if mask is None else jnp.asarray(mask, jnp.result_type(float))
        if mask.shape != (length,):
            raise ValueError(
                f"The mask must have one number for each of the {length} steps, not {mask.shape}."
            )
        return Sequence(jax.tree.map(jnp.asarray, sequences), length, mask, progress)

    def part(self, start: int, stop: int) -> tuple[Any, Any]:
        return jax.tree.map(lambda a: a[start:stop], self.arrays), self.mask[start:stop]

    @property
    def pace(self) -> int:
        """The most steps to take at once: few enough to see progress where it is wanted."""
        return self.length if self.progress is None else -(-self.length // _REPORTS)


_REPORTS = 20


class NeverCalledError(ValueError):
    """A step does not call the learner."""

    def __str__(self) -> str:
        return "`step_fn` must call the learner once; it did not call it."


def chunks(length: int, size: int) -> tuple[int, int]:
    """How many chunks of one size there are, and how many steps are left over."""
    return length // size, length % size


def even_chunks(length: int, most: int) -> int:
    """The size of about equal chunks of at most `most` steps."""
    return math.ceil(length / math.ceil(length / max(1, most)))


def split_loss(out: Any, has_aux: bool, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """The loss that `step_fn` returned, checked and without its unit, and the rest of what it returned."""
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise ValueError("With `has_aux=True`, `step_fn` returns a pair: the loss, and anything else.")
    loss, aux = out if has_aux else (out, None)
    loss = u.get_mantissa(loss)
    if isinstance(loss, tuple | list | dict):
        raise TypeError(
            f"`step_fn` must return the loss of the step, not a {type(loss).__name__}; to return a pair of "
            "the loss and anything else, pass `has_aux=True`."
        )
    if loss is None:
        raise TypeError("`step_fn` must return the loss of the step; it returned None.")
    loss = jnp.asarray(loss)
    if loss.shape != shape:
        what = "one number, the loss of the step" if shape == () else f"{shape[0]} losses, one for each step"
        raise ValueError(f"`step_fn` must return {what}; it returned an array of shape {jnp.shape(loss)}.")
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(f"The loss must be a real floating number; its type is {loss.dtype}.")
    return loss, aux


def add_trees(a: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), a, b)


def over_chunks(
    run: Callable[[Any, Any, Any], tuple[Any, Any]], carry: Any, sequence: Sequence, size: int
) -> tuple[Any, Any]:
    """`carry, outs = run(carry, arrays, mask)` over chunks of a sequence, and over what is left.

    The outputs of `run` have time in front; so have the results.
    """
    count, left = chunks(sequence.length, size)
    progress = sequence.progress
    if progress is not None and not _is_traced(carry, sequence.arrays, sequence.mask):
        return _one_by_one(run, carry, sequence, size, progress)

    def report(done: Any) -> None:
        if progress is not None:
            jax.debug.callback(progress.report, done, sequence.length)

    outs: list[Any] = []
    if count == 1:
        carry, out = run(carry, *sequence.part(0, size))
        outs.append(out)
        report(size)
    elif count > 1:
        whole = (sequence.arrays, sequence.mask)
        cut = () if left else jax.tree.map(lambda a: a.reshape(count, size, *a.shape[1:]), whole)

        def one(carry: Any, given: Any) -> Any:
            number, now = given
            if left:  # to reshape what comes before would copy it, and memory would grow with the sequence
                start = number * size
                now = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, size), whole)
            carry, out = run(carry, *now)
            report((number + 1) * size)
            return carry, out

        carry, out = brainstate.transform.scan(one, carry, (jnp.arange(count), cut))
        outs.append(jax.tree.map(lambda a: a.reshape(count * size, *a.shape[2:]), out))
    if left:
        carry, out = run(carry, *sequence.part(count * size, sequence.length))
        outs.append(out)
        report(sequence.length)
    return carry, _joined(outs)


def _one_by_one(
    run: Callable[[Any, Any, Any], tuple[Any, Any]],
    carry: Any,
    sequence: Sequence,
    size: int,
    progress: Progress,
) -> tuple[Any, Any]:
    """The same outside of `jit`: a call for each chunk, so that an interrupt comes between two of them."""
    compiled = brainstate.transform.jit(run)
    outs = []
    for start in range(0, sequence.length, size):
        stop = min(start + size, sequence.length)
        with unchanged_on_error(progress.states):
            carry, out = jax.block_until_ready(compiled(carry, *sequence.part(start, stop)))
        outs.append(out)
        progress.report(stop, sequence.length)
    return carry, _joined(outs)


def _joined(outs: list[Any]) -> Any:
    return outs[0] if len(outs) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *outs)


def _is_traced(*trees: Any) -> bool:
    return any(map(_compat.is_tracer, jax.tree.leaves(trees)))
