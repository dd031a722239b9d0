"""Series to predict, from windows of them: Mackey-Glass, Lorenz, a laser, text; and an integrator."""

from __future__ import annotations

import functools
import math

import numpy as np

from .files import locate
from .recall import last, one_hot
from .task import SPLITS, Array, Draw, Split, Task, bits, cross_entropy, generated, nrmse, squared_error


def integrator(length: int = 100) -> Task:
    """Keep the running sum of white noise: y[t] = (x[0] + ... + x[t]) / sqrt(length)."""

    def sample(rng: np.random.Generator, batch_size: int) -> tuple[Array, Array]:
        xs = rng.standard_normal((length, batch_size, 1), np.float32)
        return xs, xs.cumsum(0) / np.float32(math.sqrt(length))

    return _prediction(
        name="integrator",
        description=f"the running sum of {length} random numbers",
        length=length,
        draw=generated(sample),
        washout=0,
        target=0.1,
    )


def mackey_glass(length: int = 100, horizon: int = 10, tau: float = 17.0) -> Task:
    """Predict the Mackey-Glass series: dx/dt = 0.2 x(t - tau) / (1 + x(t - tau)^10) - 0.1 x(t).

    Steps of 0.1, one in ten kept, shown as tanh(x - 1); the output is the value `horizon` steps ahead. The
    first three quarters of 10,000 values train, the last quarter tests.
    """
    return _prediction(
        name="mackey_glass",
        description=f"the Mackey-Glass series {horizon} steps ahead",
        length=length,
        draw=windows(np.tanh(mackey_glass_series(10_000, tau) - 1), length, horizon),
        washout=length // 4,
        target=0.1,
        reference="Jaeger 2001, GMD report 148, section 4.2",
    )


def lorenz(length: int = 100, horizon: int = 10) -> Task:
    """Predict the x of the Lorenz attractor from the x so far.

    dx/dt = 10 (y - x), dy/dt = x (28 - z) - y, dz/dt = x y - 8/3 z, in steps of 0.02 (Runge-Kutta, 0.01); the
    output is the value `horizon` steps ahead, in standard deviations.
    """
    x = lorenz_series(10_000)[:, 0]
    return _prediction(
        name="lorenz",
        description=f"the x of the Lorenz attractor {horizon} steps ahead",
        length=length,
        draw=windows((x - x.mean()) / x.std(), length, horizon),
        washout=length // 4,
        target=0.2,
        reference="Lorenz 1963, J. Atmos. Sci. 20:130",
    )


def laser(length: int = 100, horizon: int = 1) -> Task:
    """Predict the intensity of a chaotic laser (Santa Fe competition, set A): 10,093 measurements.

    The first three quarters train and the last quarter tests, in standard deviations. The file comes with the
    package reservoirpy.
    """
    x = np.load(locate("reservoirpy", "datasets/santafe_laser.npy"))[:, 0].astype(np.float64)
    return _prediction(
        name="laser",
        description=f"the Santa Fe laser {horizon} step{'s' if horizon > 1 else ''} ahead",
        length=length,
        draw=windows((x - x.mean()) / x.std(), length, horizon),
        washout=length // 4,
        target=0.2,
        reference="Weigend and Gershenfeld 1994, set A",
    )


def text(length: int = 100) -> Task:
    """Predict the next byte of Python's own manual, the text of `pydoc_data.topics`.

    The first nine tenths train and the last tenth tests. Symbols are the bytes that occur in the text.
    """
    data = np.frombuffer(topics(), np.uint8)
    alphabet, symbols, counts = np.unique(data, return_inverse=True, return_counts=True)
    shares = counts / counts.sum()
    inner = windows(symbols.astype(np.int32), length, 1, train_share=0.9)

    def draw(seed: int, index: int, batch_size: int, split: Split) -> tuple[Array, Array]:
        xs, ys = inner(seed, index, batch_size, split)
        return one_hot(xs, len(alphabet)), ys

    return Task(
        name="text",
        description="the next byte of Python's manual",
        inputs=len(alphabet),
        outputs=len(alphabet),
        length=length,
        loss=cross_entropy,
        metric=bits,
        metric_name="bits per byte",
        chance=float(-(shares * np.log2(shares)).sum()),
        target=3.0,
        higher_is_better=False,
        draw=draw,
        mask=last(length, length),
    )


def topics() -> bytes:
    """The text of the language reference that comes with Python."""
    from pydoc_data.topics import topics as entries

    return "\n\n".join(entries[name] for name in sorted(entries)).encode()


@functools.cache
def mackey_glass_series(number: int, tau: float, start: float = 1.2) -> Array:
    """`number` values one time unit apart, after 1,000 units to settle."""
    steps, lag = 10, round(10 * tau)
    x = [start] * (lag + 1)
    for _ in range(steps * (1_000 + number) - 1):
        late = x[-1 - lag]
        x.append(x[-1] + (0.2 * late / (1 + late**10) - 0.1 * x[-1]) / steps)
    return np.array(x[-steps * number :: steps])


@functools.cache
def lorenz_series(number: int, dt: float = 0.01, every: int = 2) -> Array:
    """`number` points (number, 3), `every * dt` apart, after ten time units to settle."""

    def slope(x: float, y: float, z: float) -> tuple[float, float, float]:
        return 10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z

    def move(p: tuple[float, ...], d: tuple[float, ...], h: float) -> tuple[float, float, float]:
        return p[0] + h * d[0], p[1] + h * d[1], p[2] + h * d[2]

    point, points = (1.0, 1.0, 1.0), []
    settle = round(10 / dt)
    for _ in range(settle + every * number):
        points.append(point)
        k1 = slope(*point)
        k2 = slope(*move(point, k1, dt / 2))
        k3 = slope(*move(point, k2, dt / 2))
        k4 = slope(*move(point, k3, dt))
        mean = tuple((a + 2 * b + 2 * c + d) / 6 for a, b, c, d in zip(k1, k2, k3, k4, strict=True))
        point = move(point, mean, dt)
    return np.array(points[settle::every])


def windows(series: Array, length: int, horizon: int, train_share: float = 0.75) -> Draw:
    """Random windows of a series and what follows them; values (not symbols) get an axis of one feature."""
    cut = int(train_share * len(series))
    parts = {"train": series[:cut], "test": series[cut:]}
    if min(map(len, parts.values())) <= length + horizon:
        raise ValueError(f"The series is too short for windows of {length} steps and {horizon} more.")
    values = np.issubdtype(series.dtype, np.floating)

    def draw(seed: int, index: int, batch_size: int, split: Split) -> tuple[Array, Array]:
        rng = np.random.default_rng([seed, SPLITS.index(split), index])
        part = parts[split]
        starts = rng.integers(len(part) - length - horizon + 1, size=batch_size)
        when = starts + np.arange(length)[:, None]
        xs, ys = part[when], part[when + horizon]
        return (xs[..., None].astype(np.float32), ys[..., None].astype(np.float32)) if values else (xs, ys)

    return draw


def _prediction(
    name: str,
    description: str,
    length: int,
    draw: Draw,
    washout: int,
    target: float,
    reference: str = "",
) -> Task:
    """A task of one number in, one number out; the first steps, `washout`, do not count."""
    return Task(
        name=name,
        description=description,
        inputs=1,
        outputs=1,
        length=length,
        loss=squared_error,
        metric=nrmse,
        metric_name="normalised error",
        chance=1.0,
        target=target,
        higher_is_better=False,
        draw=draw,
        mask=last(length, length - washout),
        reference=reference,
    )
