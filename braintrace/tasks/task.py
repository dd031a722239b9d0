"""The type of tasks: batches of sequences, a loss, a metric, and the score that counts as learned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

if TYPE_CHECKING:  # it takes long to import, and a list of tasks does without
    import jax

    from .._types import Function

Array: TypeAlias = np.ndarray
Batch = tuple[Array, Array, Array]
Split = Literal["train", "test"]
Sample = Callable[[np.random.Generator, int], tuple[Array, Array]]
Draw = Callable[[int, int, int, Split], tuple[Array, Array]]  # seed, index, batch size, split -> xs, ys

SPLITS: tuple[Split, ...] = ("train", "test")
TEST_SIZE = 256  # of a generated task


@dataclass(frozen=True)
class Task:
    """Sequences to learn from, how to judge outputs, and the score to reach.

    A batch is `(xs, ys, mask)`, with time first: `xs` (length, batch, inputs) float32; `ys` (length, batch)
    int32 for classes and (length, batch, outputs) float32 for values; `mask` (length,) float32, one where
    the output counts. A model maps `x` (batch, inputs) to an output (batch, outputs): logits, or values.

    >>> from braintrace import tasks
    >>> task = tasks.get("copying", delay=5)
    >>> xs, ys, mask = task.batch(seed=0, index=0, batch_size=2)
    >>> xs.shape, ys.shape, int(mask.sum())
    ((26, 2, 10), (26, 2), 10)
    """

    name: str
    description: str  # one line
    inputs: int
    outputs: int
    length: int
    loss: Callable[[jax.Array, jax.Array], jax.Array]  # output and y of a step -> mean over the batch
    metric: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # outputs, ys, mask -> one number
    metric_name: str
    chance: float  # the metric of the best output that ignores the inputs
    target: float  # the metric that counts as learned
    higher_is_better: bool
    draw: Draw
    mask: Array
    test_size: int = TEST_SIZE  # sequences in the test set
    spiking: bool = False  # inputs are spikes, 0 or 1
    reference: str = ""  # where the settings come from

    def batch(self, seed: int, index: int, batch_size: int, split: Split = "train") -> Batch:
        """Batch number `index`: a function of its arguments alone."""
        if split not in SPLITS:
            raise ValueError(f"`split` is 'train' or 'test', not {split!r}.")
        if batch_size < 1 or index < 0:
            raise ValueError(f"There is no batch {index} of {batch_size} sequences.")
        if split == "test" and batch_size > self.test_size:
            raise ValueError(
                f"The test set of {self.name!r} has {self.test_size} sequences: no batch of {batch_size}."
            )
        xs, ys = self.draw(seed, index, batch_size, split)
        return xs, ys, self.mask

    def batches(self, seed: int, batch_size: int, split: Split = "train", start: int = 0) -> Iterator[Batch]:
        """Batches from number `start` on: without end to train, and the test set once, in whole batches."""
        stop = self.test_size // batch_size if split == "test" else None
        index = start
        while stop is None or index < stop:
            yield self.batch(seed, index, batch_size, split)
            index += 1

    def step(self, learner: Function) -> Function:
        """The `step_fn` of `fit`: the loss of one time step, and the output, for the metric."""

        def step_fn(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = learner(x)
            return self.loss(out, y), out

        return step_fn

    def reached(self, score: float) -> bool:
        """Whether a metric is as good as the target."""
        return score >= self.target if self.higher_is_better else score <= self.target


def generated(sample: Sample) -> Draw:
    """New batches of `sample(rng, batch_size)`."""

    def draw(seed: int, index: int, batch_size: int, split: Split) -> tuple[Array, Array]:
        return sample(np.random.default_rng([seed, SPLITS.index(split), index]), batch_size)

    return draw


def drawn(
    train: tuple[Array, Array],
    test: tuple[Array, Array],
    encode: Callable[[np.random.Generator, Array], Array] | None = None,
) -> Draw:
    """Batches out of stored sequences (length, number, ...), in a new random order in each pass.

    `encode(rng, xs)` turns the inputs of a batch into spikes.
    """

    def draw(seed: int, index: int, batch_size: int, split: Split) -> tuple[Array, Array]:
        xs, ys = train if split == "train" else test
        number = xs.shape[1]
        if batch_size > number:
            raise ValueError(f"There are {number} sequences to {split}: no batch of {batch_size}.")
        turn, place = divmod(index, number // batch_size)
        order = np.random.default_rng([seed, SPLITS.index(split), turn]).permutation(number)
        chosen = order[place * batch_size : (place + 1) * batch_size]
        batch = xs[:, chosen]
        if encode is not None:
            batch = encode(np.random.default_rng([seed, 2 + SPLITS.index(split), index]), batch)
        return batch, ys[:, chosen]

    return draw


def cross_entropy(out: jax.Array, y: jax.Array) -> jax.Array:
    """The mean of `-log softmax(out)[y]` over a batch."""
    return _surprise(out, y).mean()


def squared_error(out: jax.Array, y: jax.Array) -> jax.Array:
    """The mean of `(out - y)^2`."""
    return ((out - y.astype(out.dtype)) ** 2).mean()


def accuracy(outs: jax.Array, ys: jax.Array, mask: jax.Array) -> jax.Array:
    """The share of right answers among the steps that count."""
    return _mean((outs.argmax(-1) == ys.astype(int)).astype(outs.dtype), mask)


def decision(outs: jax.Array, ys: jax.Array, mask: jax.Array) -> jax.Array:
    """The share of sequences whose summed log-probabilities over the steps that count favour the class."""
    import jax

    weights = mask.reshape(*mask.shape, *[1] * (outs.ndim - mask.ndim)).astype(outs.dtype)
    votes = (weights * jax.nn.log_softmax(outs)).sum(0)
    return (votes.argmax(-1) == ys[-1].astype(int)).mean()


def bits(outs: jax.Array, ys: jax.Array, mask: jax.Array) -> jax.Array:
    """Bits per symbol: the cross-entropy, to base 2."""
    return _mean(_surprise(outs, ys), mask) / math.log(2)


def mse(outs: jax.Array, ys: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean squared error over the steps that count."""
    return _mean((outs - ys.astype(outs.dtype)) ** 2, mask)


def nrmse(outs: jax.Array, ys: jax.Array, mask: jax.Array) -> jax.Array:
    """The root of the mean squared error, over the standard deviation of the targets: 1 is the mean."""
    ys = ys.astype(outs.dtype)
    return (mse(outs, ys, mask) / _mean((ys - _mean(ys, mask)) ** 2, mask)) ** 0.5


def _surprise(outs: jax.Array, ys: jax.Array) -> jax.Array:
    """`-log softmax(outs)[ys]`."""
    import jax
    import jax.numpy as jnp

    return -jnp.take_along_axis(jax.nn.log_softmax(outs), ys[..., None], axis=-1)[..., 0]


def _mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean over the steps, or steps of samples, that count and all other axes."""
    weights = mask.astype(values.dtype)
    return (values.reshape(*mask.shape, -1).mean(-1) * weights).sum() / weights.sum()


# a task in which each sequence has a class, judged by the share of right decisions
decided = partial(Task, loss=cross_entropy, metric=decision, metric_name="accuracy", higher_is_better=True)
