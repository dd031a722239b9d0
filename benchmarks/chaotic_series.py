"""Chaotic series as in the experiments of Sketched RTRL (Yi and Wang, 2026): one coordinate, normalised."""

from __future__ import annotations

import numpy as np

LENGTH, SKIPPED = 20_065, 64  # steps that are normalised together, and those before the first input


def henon(batch: int, rng: np.random.RandomState, length: int) -> np.ndarray:
    """Return `x` of the Hénon map (a = 1.4, b = 0.3), started at 0.1, 0.11, ...; the same for all seeds."""
    x, y = 0.1 + 0.01 * np.arange(batch), np.zeros(batch)
    found = np.empty((length, batch))
    for t in range(length):
        found[t] = x
        x, y = 1 - 1.4 * x * x + y, 0.3 * x
    return found


def mackey_glass(batch: int, rng: np.random.RandomState, length: int) -> np.ndarray:
    """Return the Mackey-Glass series by Euler steps of 1, from random values between 1.2 and 1.4.

    The published program reads the value of 16 steps ago, one less than its delay of 17, and so does this.
    """
    found = np.empty((length + 18, batch))
    found[:18] = rng.uniform(1.2, 1.4, (18, batch))
    for t in range(18, len(found)):
        late = found[t - 17]  # 16 steps before the last value
        found[t] = 0.9 * found[t - 1] + 0.2 * late / (1 + late**10)
    return found[18:]


def lorenz(batch: int, rng: np.random.RandomState, length: int) -> np.ndarray:
    """Return `x` of the Lorenz system at every second Euler step of 0.01, from about (1, 1, 1)."""
    x, y, z = 1 + 0.1 * rng.randn(3, batch)
    found = []
    for _ in range(2 * length + 100):
        x, y, z = x + 0.1 * (y - x), y + 0.01 * (x * (28 - z) - y), z + 0.01 * (x * y - 8 / 3 * z)
        found.append(x)
    return np.stack(found[100::2])


SERIES = {"henon": henon, "mackey_glass": mackey_glass, "lorenz": lorenz}


def draw(name: str, seed: int, batch: int) -> np.ndarray:
    """Return a series of shape `(steps, batch)` with mean 0 and variance 1 in each column."""
    found = SERIES[name](batch, np.random.RandomState(seed), LENGTH)
    return ((found - found.mean(0)) / found.std(0, ddof=1))[SKIPPED:]
