"""Checked sequences, and a loop over parts of them: chunks, windows or checkpointed segments."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from .. import _compat
from .._types import Array, ArrayLike, PyTree
from .arguments import SingleStepData

Report = Callable[[int, int, PyTree], None]  # steps done, number of steps, carry
Steps = tuple[tuple[PyTree, ...], Array, Array | None]  # arrays, mask and resets of consecutive steps


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays", "mask", "reset"],
    meta_fields=["length", "progress", "has_mask"],
)
@dataclass(frozen=True)
class Sequence:
    """Checked arguments of a drive over a sequence."""

    arrays: tuple[PyTree, ...]  # time first
    length: int
    mask: Float[Array, "time ..."]  # with a batch axis if a step has a loss for each sample
    reset: Bool[Array, "time batch"] | None = None  # the samples that are reset before each step
    progress: Report | None = None
    has_mask: bool = False  # whether a mask was given; otherwise it is all ones

    @staticmethod
    def check(
        sequences: tuple[PyTree, ...],
        mask: ArrayLike | None,
        reset: ArrayLike | None = None,
        progress: Report | None = None,
    ) -> Sequence:
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
        has_mask, dtype = mask is not None, jnp.result_type(float)
        # NumPy's ones need no compiled program
        mask = jnp.asarray(mask if has_mask else np.ones(length, dtype), dtype)
        if mask.shape[:1] != (length,) or mask.ndim > 2:
            raise ValueError(
                f"The mask must have one number for each of the {length} steps, or one for each step and "
                f"sample, not the shape {mask.shape}."
            )
        if reset is not None:
            reset = jnp.asarray(reset)
            if reset.ndim != 2 or reset.shape[0] != length or reset.dtype not in (bool, jnp.dtype(int)):
                raise ValueError(
                    f"`reset` has a flag for each of the {length} steps and each sample, an array of "
                    f"booleans of shape (time, batch), not {reset.dtype}{list(reset.shape)}."
                )
            reset = reset.astype(bool)
        return Sequence(jax.tree.map(jnp.asarray, sequences), length, mask, reset, progress, has_mask)

    @property
    def steps(self) -> Steps:
        """The arrays with a leading time axis."""
        return self.arrays, self.mask, self.reset

    def part(self, start: int, stop: int) -> Steps:
        return jax.tree.map(lambda a: a[start:stop], self.steps)  # type: ignore[no-any-return]

    @property
    def pace(self) -> int:
        """The largest number of steps to take at once, which is small if progress is reported."""
        return self.length if self.progress is None else -(-self.length // _REPORTS)


_REPORTS = 20


class NeverCalledError(ValueError):
    """A step does not call the learner."""

    def __str__(self) -> str:
        return "`step_fn` must call the learner once; it did not call it."


def even_chunks(length: int, most: int) -> int:
    """The size of about equal chunks of at most `most` steps."""
    return math.ceil(length / math.ceil(length / max(1, most)))


def scan_parts(
    run: Callable[..., tuple[PyTree, PyTree]],
    carry: PyTree,
    sequence: Sequence,
    size: int,
    scan: Callable[..., tuple[PyTree, PyTree]] = jax.lax.scan,
    *,
    rest_first: bool = False,
) -> tuple[PyTree, PyTree]:
    """Run `carry, outs = run(carry, arrays, mask, reset)` over parts of `size` steps of a sequence.

    The remainder is a shorter part, the last one or, with `rest_first`, the first. Outputs have a leading
    time axis. `scan` is `jax.lax.scan` or a replacement that also carries states.
    """
    count, left = divmod(sequence.length, size)
    begin = left if rest_first else 0
    progress = sequence.progress
    if progress is not None and not is_traced((carry, sequence.steps)):
        return _call_by_call(run, carry, sequence, size, progress, begin)

    def report(done: ArrayLike) -> None:
        if progress is not None:
            jax.debug.callback(lambda done: progress(done, sequence.length, None), done)

    outs: list[PyTree] = []
    if begin:
        carry, out = run(carry, *sequence.part(0, begin))
        outs.append(out)
        report(begin)
    if count == 1:
        carry, out = run(carry, *sequence.part(begin, begin + size))
        outs.append(out)
        report(begin + size)
    elif count > 1:
        # slice, where XLA would copy the whole sequence to reshape it: with a remainder, or for single steps
        by_slice = left > 0 or size == 1
        in_parts = lambda a: a.reshape(count, size, *a.shape[1:])
        parts = () if by_slice else jax.tree.map(in_parts, sequence.steps)

        def one(carry: PyTree, given: tuple[Array, Steps | tuple[()]]) -> tuple[PyTree, PyTree]:
            number, now = given
            if by_slice:
                start = begin + number * size
                now = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, size), sequence.steps)
            carry, out = run(carry, *now)
            report(begin + (number + 1) * size)
            return carry, out

        carry, out = scan(one, carry, (jnp.arange(count), parts))
        outs.append(jax.tree.map(lambda a: a.reshape(count * size, *a.shape[2:]), out))
    if left and not rest_first:
        carry, out = run(carry, *sequence.part(count * size, sequence.length))
        outs.append(out)
        report(sequence.length)
    return carry, _joined(outs)


def _call_by_call(
    run: Callable[..., tuple[PyTree, PyTree]],
    carry: PyTree,
    sequence: Sequence,
    size: int,
    progress: Report,
    begin: int,
) -> tuple[PyTree, PyTree]:
    """`scan_parts` outside of `jit`: one compiled call per part, so that it can be interrupted."""
    compiled = jax.jit(run)
    outs = []
    starts = [*([0] if begin else []), *range(begin, sequence.length, size)]
    for start, stop in itertools.pairwise([*starts, sequence.length]):
        carry, out = jax.block_until_ready(compiled(carry, *sequence.part(start, stop)))
        outs.append(out)
        progress(stop, sequence.length, carry)
    return carry, _joined(outs)


def _joined(outs: list[PyTree]) -> PyTree:
    return outs[0] if len(outs) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *outs)


def is_traced(tree: PyTree) -> bool:
    return any(map(_compat.is_tracer, jax.tree.leaves(tree)))
