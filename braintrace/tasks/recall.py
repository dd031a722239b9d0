"""Tasks that need memory: copying, adding, a^n b^n and delayed match-to-sample."""

from __future__ import annotations

import math

import numpy as np

from .task import Array, Task, accuracy, bits, cross_entropy, decided, generated, mse, squared_error


def copying(delay: int = 20, symbols: int = 10, alphabet: int = 8) -> Task:
    """Repeat a row of symbols after a delay, when a marker asks for it.

    The first `symbols` inputs are letters, then come `delay` blanks, the last of which is the marker, then
    as many blanks as there are letters; the outputs are blank until the marker has been seen. Hochreiter and
    Schmidhuber (1997), in the form of Arjovsky, Shah and Bengio (2016), where the delay is 100 to 500.
    """
    length = 2 * symbols + delay + 1
    blank, marker = alphabet, alphabet + 1

    def sample(rng: np.random.Generator, batch_size: int) -> tuple[Array, Array]:
        letters = rng.integers(alphabet, size=(symbols, batch_size))
        shown = np.full((length, batch_size), blank)
        shown[:symbols] = letters
        shown[symbols + delay] = marker
        ys = np.full((length, batch_size), blank, np.int32)
        ys[-symbols:] = letters
        return one_hot(shown, alphabet + 2), ys

    return Task(
        name="copying",
        description=f"repeat {symbols} symbols after {delay} steps",
        inputs=alphabet + 2,
        outputs=alphabet + 1,
        length=length,
        loss=cross_entropy,
        metric=accuracy,
        metric_name="accuracy",
        chance=1 / alphabet,
        target=0.95,
        higher_is_better=True,
        draw=generated(sample),
        mask=last(length, symbols),
        reference="Arjovsky et al. 2016, arXiv:1511.06464, section 5.1",
    )


def adding(length: int = 50) -> Task:
    """Add the two marked numbers of a row of random numbers.

    One input is uniform in [0, 1); the other is one at two places, one in each half. The answer at the last
    step is the sum of the two marked numbers. Always answering 1 gives a mean squared error of 1/6.
    """
    half = length // 2

    def sample(rng: np.random.Generator, batch_size: int) -> tuple[Array, Array]:
        values = rng.random((length, batch_size), np.float32)
        marks = np.zeros((length, batch_size), np.float32)
        every = np.arange(batch_size)
        marks[rng.integers(half, size=batch_size), every] = 1
        marks[rng.integers(half, length, size=batch_size), every] = 1
        total = (values * marks).sum(0)
        ys = np.broadcast_to(total[None, :, None], (length, batch_size, 1)).copy()
        return np.stack([values, marks], -1), ys

    return Task(
        name="adding",
        description=f"add the two marked numbers among {length}",
        inputs=2,
        outputs=1,
        length=length,
        loss=squared_error,
        metric=mse,
        metric_name="mean squared error",
        chance=1 / 6,
        target=0.02,
        higher_is_better=False,
        draw=generated(sample),
        mask=last(length),
        reference="Arjovsky et al. 2016, arXiv:1511.06464, section 5.1",
    )


def anbn(length: int = 140, longest: int = 32) -> Task:
    """Predict the next letter of a text in which each row of a's is followed by as many b's.

    A line of n a's and a line of n b's, n uniform in 1..`longest`, over and over; only the length of a line
    of a's is random, so the entropy is log2(longest) / (longest + 3) bits a letter: 0.14 with 32.
    """
    entropy = math.log2(longest) / (longest + 3)

    def sample(rng: np.random.Generator, batch_size: int) -> tuple[Array, Array]:
        texts = np.empty((length + 1, batch_size), np.int32)
        for column in texts.T:
            counts = rng.integers(1, longest + 1, size=length // 4 + 1)
            lines = [part for n in counts for part in ([0] * n, [2], [1] * n, [2])]
            column[:] = np.concatenate(lines)[: length + 1]
        return one_hot(texts[:-1], 3), texts[1:].copy()

    return Task(
        name="anbn",
        description=f"predict the next letter of a^n b^n, n up to {longest}",
        inputs=3,
        outputs=3,
        length=length,
        loss=cross_entropy,
        metric=bits,
        metric_name="bits per letter",
        chance=_anbn_chance(longest),
        target=1.25 * entropy,
        higher_is_better=False,
        draw=generated(sample),
        mask=last(length, length),
        reference="Tallec and Ollivier 2017 (UORO), arXiv:1702.05043, section 5",
    )


def dms(delay: int = 20, stimuli: int = 2, show: int = 5, noise: float = 0.1) -> Task:
    """Say whether a stimulus is the one shown before a delay (delayed match-to-sample).

    `show` steps of one of `stimuli` patterns, `delay` steps of nothing, `show` steps of the same pattern
    (half of the time) or another, then `show` steps with a cue, where the answer counts. Inputs are noisy.
    """
    length = 3 * show + delay
    inputs = stimuli + 1

    def sample(rng: np.random.Generator, batch_size: int) -> tuple[Array, Array]:
        first = rng.integers(stimuli, size=batch_size)
        same = rng.integers(2, size=batch_size)
        second = np.where(same, first, (first + rng.integers(1, stimuli, size=batch_size)) % stimuli)
        xs = noise * rng.standard_normal((length, batch_size, inputs), np.float32)
        xs[:show] += one_hot(first, inputs)
        xs[show + delay : -show] += one_hot(second, inputs)
        xs[-show:, :, -1] += 1
        return xs, np.broadcast_to(same.astype(np.int32), (length, batch_size)).copy()

    return decided(
        name="dms",
        description=f"is it the stimulus of {delay} steps ago?",
        inputs=inputs,
        outputs=2,
        length=length,
        chance=0.5,
        target=0.95,
        draw=generated(sample),
        mask=last(length, show),
        reference="after Miller et al. 1996, J. Neurosci. 16:5154",
    )


def one_hot(classes: Array, number: int) -> Array:
    """`classes` (...) as vectors (..., number) of a one and zeros."""
    vectors: Array = np.eye(number, dtype=np.float32)[classes]
    return vectors


def last(length: int, steps: int = 1) -> Array:
    """A mask of the last steps."""
    mask = np.zeros(length, np.float32)
    mask[-steps:] = 1
    return mask


def _anbn_chance(longest: int) -> float:
    """The entropy of single letters."""
    line = (longest + 1) / 2
    p = np.array([line, line, 2]) / (2 * line + 2)
    return float(-(p * np.log2(p)).sum())
