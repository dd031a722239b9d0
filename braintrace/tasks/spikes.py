"""Tasks of spikes: evidence accumulation and random manifolds."""

from __future__ import annotations

import math

import numpy as np

from .recall import last, one_hot
from .task import Array, Task, decided, generated


def evidence(
    cues: int = 7, cue: int = 100, gap: int = 50, delay: int = 1050, recall: int = 150, neurons: int = 10
) -> Task:
    """Say, after a delay, on which side more cues were seen (spikes; one step is 1 ms).

    Four populations of `neurons` fire at 40 Hz: one for a cue on the left, one on the right, one to ask for
    the answer; the fourth is noise of 10 Hz throughout. In each sequence one side is drawn, and each cue is
    on that side with probability 0.7. Less of everything (`delay=200`) makes it quick.
    """
    length = cues * (cue + gap) + delay + recall
    rate = 0.04

    def sample(rng: np.random.Generator, batch_size: int) -> tuple[Array, Array]:
        side = rng.integers(2, size=batch_size)
        sides = np.where(rng.random((cues, batch_size)) < 0.7, side, 1 - side)
        rates = np.zeros((length, batch_size, 4), np.float32)
        for k, shown in enumerate(sides):
            start = gap + k * (cue + gap)
            rates[start : start + cue, :, :2] = rate * one_hot(shown, 2)
        rates[-recall:, :, 2] = rate
        rates[..., 3] = rate / 4
        xs = rng.random((length, batch_size, 4 * neurons), np.float32) < rates.repeat(neurons, -1)
        answer = (2 * sides.sum(0) > cues).astype(np.int32)
        return xs.astype(np.float32), np.broadcast_to(answer, (length, batch_size)).copy()

    return decided(
        name="evidence",
        description=f"on which side were more of {cues} cues, {delay} ms ago?",
        inputs=4 * neurons,
        outputs=2,
        length=length,
        chance=0.5,
        target=0.9,
        draw=generated(sample),
        mask=last(length, recall),
        spiking=True,
        reference="Bellec et al. 2020 (e-prop), Nature Communications 11:3625, methods",
    )


def randman(
    classes: int = 10, units: int = 20, length: int = 100, dimension: int = 1, smoothness: float = 3.0
) -> Task:
    """Tell smooth random manifolds of spike times apart; every unit fires once.

    A class is a random manifold: unit i fires at the time f_i(u) of a random point u in [0, 1]^dimension,
    f_i(u) = prod_d sum_k a_k (k + 1)^-smoothness sin(2 pi (k b_k u_d + c_k)), with a, b, c uniform in [0, 1),
    scaled so that times fill the sequence. Only the times carry the class. The manifolds are the same
    for every seed; points on them are drawn for each batch.
    """
    rng = np.random.default_rng(units)
    cutoff = min(1000, math.ceil(1e-3 ** (-1 / smoothness)))
    coefficients = rng.random((classes, units, dimension, 3, cutoff))
    spectrum = np.arange(1, cutoff + 1) ** -smoothness

    def times(points: Array, chosen: Array) -> Array:
        a, b, c = np.moveaxis(coefficients[chosen], 3, 0)
        phase = np.arange(cutoff) * b * points[:, None, :, None] + c
        return np.asarray((a * spectrum * np.sin(2 * np.pi * phase)).sum(-1).prod(-1))

    labels = np.repeat(np.arange(classes), 1000)
    reference = times(rng.random((len(labels), dimension)), labels).reshape(classes, 1000, units)
    low, high = reference.min(1), reference.max(1)

    def sample(rng: np.random.Generator, batch_size: int) -> tuple[Array, Array]:
        chosen = rng.integers(classes, size=batch_size)
        when = times(rng.random((batch_size, dimension)), chosen)
        when = np.clip((when - low[chosen]) / (high - low)[chosen], 0, 1) * (length - 1)
        xs = np.moveaxis(one_hot(when.astype(int), length), -1, 0)
        return xs.copy(), np.broadcast_to(chosen.astype(np.int32), (length, batch_size)).copy()

    return decided(
        name="randman",
        description=f"which of {classes} random manifolds do the times of {units} spikes lie on?",
        inputs=units,
        outputs=classes,
        length=length,
        chance=1 / classes,
        target=0.9,
        draw=generated(sample),
        mask=last(length, length // 2),
        spiking=True,
        reference="Zenke and Vogels 2021, Neural Computation 33:899",
    )
