"""Streams without end, as `fit` reads them: in blocks of steps, from any step on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter

import jax
import numpy as np

from .._types import PyTree
from .batches import Batch, check_batch, steps_of

Steps = Iterable[PyTree] | Callable[[int], Iterable[PyTree]]


@dataclass(frozen=True)
class Stream:
    """A stream of time steps without end, for `fit`.

    States and traces are carried on from step to step. `fit` runs blocks of steps on the device; the length
    of a block changes speed and how often scores are logged, never the numbers.

    Args:
        source: An iterable of steps `(x, y)`, `(x, y, mask)` or `(x, y, mask, reset)`, or a function of the
            number of steps done so far that returns one. With a function, a resumed run starts where it
            stopped; an iterable is read again from its start.
        block: The number of steps per block, an int. With None, the entries of `source` are blocks, with a
            time axis in front of every array. Default 1000.
        average: The time constant of running averages of loss and metrics, in steps. Default 10,000.

    Of one step, `x` and `y` have the shapes (batch, ...), where the batch are parallel streams (or `(...)`
    with `fit(batched=False)`); `mask` weighs the loss of the step, or of each sample; `reset` has a boolean
    for each sample, which resets its states and traces before the step.

    Example:
        >>> import itertools, numpy as np
        >>> steps = lambda start: ((np.ones((1, 3)), np.full((1, 2), i)) for i in itertools.count(start))
        >>> block = next(Stream(steps, block=4).read(10))
        >>> block.xs.shape, block.ys[:, 0, 0].tolist()
        ((4, 1, 3), [10, 11, 12, 13])
    """

    source: Steps
    block: int | None = 1000
    average: float = 10_000

    def __post_init__(self) -> None:
        if not callable(self.source) and not isinstance(self.source, Iterable):
            raise TypeError(
                "A stream is an iterable of `(x, y)`, `(x, y, mask)` or `(x, y, mask, reset)`, or a function "
                f"of the number of steps done that returns one, not {type(self.source)}."
            )
        if (self.block is not None and self.block < 1) or self.average <= 0:
            raise ValueError("`block` is at least 1, and `average` is above 0.")

    def read(self, start: int = 0, stop: int | None = None, batched: bool = True) -> Iterator[Batch]:
        """Yield checked blocks from step `start` to step `stop`."""
        skipped = 0 if callable(self.source) else start
        steps = iter(self.source(start) if callable(self.source) else self.source)
        if self.block is None:
            yield from _cut(steps, start - skipped, start, stop, batched)
            return
        steps = islice(steps, skipped, None if stop is None else skipped + max(0, stop - start))
        while found := list(islice(steps, self.block)):  # the last block may be shorter
            yield check_batch(_stack(found), batched)


def _stack(steps: list[PyTree]) -> tuple[PyTree, ...]:
    lengths = {len(step) if isinstance(step, tuple | list) else None for step in steps}
    if len(lengths) != 1 or not lengths <= {2, 3, 4}:
        raise TypeError(
            "A step of a stream is `(x, y)`, `(x, y, mask)` or `(x, y, mask, reset)`, all steps alike; "
            f"these have {sorted(map(str, lengths))} entries."
        )
    try:
        return tuple(map(_stack_column, zip(*steps, strict=True)))
    except ValueError as error:
        raise ValueError(f"The steps of a stream differ in their shapes or entries: {error}") from error


def _stack_column(column: tuple[PyTree, ...]) -> PyTree:
    """Stack one entry of all steps: arrays, pytrees of arrays, or None."""
    if all(issubclass(kind, np.ndarray | np.generic | float) for kind in set(map(type, column))):
        return np.array(column)  # three times as fast as np.stack
    return jax.tree.map(lambda *leaves: np.array(leaves), *column)


def _cut(blocks: Iterator[PyTree], at: int, start: int, stop: int | None, batched: bool) -> Iterator[Batch]:
    """Yield the part from `start` to `stop` of blocks, the first of which begins at step `at`."""
    while stop is None or at < stop:
        if (given := next(blocks, None)) is None:
            return
        block = check_batch(given, batched)
        part = slice(max(start - at, 0), None if stop is None else stop - at)
        at += steps_of(block.xs)
        if at > start:
            yield jax.tree.map(itemgetter(part), block)


@dataclass
class Averages:
    """Running averages of scores over about the last `steps` steps, weighted by the losses that count."""

    steps: float
    totals: dict[str, float]  # of each score, the decayed sum of weight times value
    weights: dict[str, float]  # of each score, the decayed sum of weights

    def add(self, scores: dict[str, float], weight: float, steps: int) -> None:
        """Add the scores of a block of this many steps."""
        decay = float(np.exp(-steps / self.steps))
        for name, value in scores.items():
            counted = weight if np.isfinite(value) else 0.0
            self.totals[name] = decay * self.totals.get(name, 0.0) + (counted * value if counted else 0.0)
            self.weights[name] = decay * self.weights.get(name, 0.0) + counted

    @property
    def values(self) -> dict[str, float]:
        return {k: self.totals[k] / w for k, w in self.weights.items() if w > 0}
