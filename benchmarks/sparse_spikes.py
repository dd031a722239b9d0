"""Sparse spikes: what gathers of the active inputs would save in steps of online learning, on a CPU.

    python benchmarks/sparse_spikes.py        (benchmarks/results/cpu/sparse_spikes.txt)

Time of a step with gathers / in the dense form (in brackets), in one process and in turns, 4096 inputs; the
median of rounds. The number of gathered rows is fixed, six standard deviations above its mean.

- *forward*: `x @ w`, as a sum of rows of the weight.
- *net*: LIF units with an update at every step. The trace is a filtered input, which is dense, as is its
  product with the signal. The forward pass sums rows.
- *trace*: a trace of every weight, whose decay per unit touches every row, and an update at every step.
- *deferred*: a trace of every weight, written once for all steps, by scattered rows.
"""

import itertools
import statistics
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

INPUTS, STEPS, ROUNDS, DECAY, RATE = 4096, 16, 7, 0.9, 1e-4


def rows_of(x: Any, most: int) -> Any:
    return jax.vmap(lambda one: jnp.nonzero(one, size=most, fill_value=INPUTS)[0])(x)


def product(w: Any, x: Any, most: int) -> Any:
    if not most:
        return x @ w
    return jax.lax.map(lambda i: w.at[i].get(mode="fill", fill_value=0).sum(0), rows_of(x, most))


def forward(most: int, w: Any, step: Any) -> Any:
    return w, product(w, step[0], most)


def net(most: int, carry: Any, step: Any) -> Any:
    (w, trace, v), (x, target) = carry, step
    v = DECAY * v + product(w, x, most)
    spikes = (v > 1).astype(v.dtype)
    g = (spikes - target) / (1 + jnp.abs(v - 1)) ** 2
    trace = DECAY * trace + x
    return (w - RATE * trace.T @ g, trace, v - spikes), spikes.sum()


def trace(most: int, carry: Any, step: Any) -> Any:
    (w, trace), (x, g) = carry, step
    trace = (1 - g**2)[:, None] * trace
    if most:
        trace = jax.vmap(lambda t, i, J: t.at[i].add(J, mode="drop"))(trace, rows_of(x, most), g)
    trace = trace if most else trace + x[..., None] * g[:, None]
    return (w - RATE * sum(t * one for t, one in zip(trace, g, strict=True)), trace), trace[0, 0, 0]


def deferred(most: int, trace: Any, steps: Any) -> Any:
    xs, gs = steps
    decayed = jnp.prod(1 - gs**2, 0)[:, None] * trace
    if not most:
        return decayed + jnp.einsum("tbi,tbo->bio", xs, gs)
    add = lambda t, i, J: t.at[i.ravel()].add(jnp.repeat(J, most, 0), mode="drop")
    return jax.vmap(add, (0, 1, 1))(decayed, jax.vmap(partial(rows_of, most=most))(xs), gs)


def ratio(function: Any, most: int, *given: Any) -> str:
    runs = [jax.jit(partial(function, n)).lower(*given).compile() for n in (0, most)]
    times: list[list[float]] = [[], []]
    for _ in range(ROUNDS + 1):  # the first warms up
        for each, run in zip(times, runs, strict=True):
            begin = time.perf_counter()
            jax.block_until_ready(run(*given))
            each.append(1e3 * (time.perf_counter() - begin) / STEPS)
    found = statistics.median(y / x for x, y in zip(times[0][1:], times[1][1:], strict=True))
    return f"{found:.2f} ({statistics.median(times[0][1:]):.2f} ms)"


a, b = jax.random.split(jax.random.key(0))
for batch, outputs, active in itertools.product((1, 16), (256, 1024), (0.1, 0.05, 0.01)):
    xs = jax.random.bernoulli(a, active, (STEPS, batch, INPUTS)).astype(float)
    given = xs, 0.1 * jax.random.normal(b, (STEPS, batch, outputs))
    most = int(active * INPUTS + 6 * (active * INPUTS) ** 0.5)
    w, full = jnp.full((INPUTS, outputs), 0.01), jnp.zeros((batch, INPUTS, outputs))
    print(f"batch {batch:2}, {outputs:4} outputs, {active:4.0%} active", end="", flush=True)
    for step, carry in {forward: w, net: (w, full[:, :, 0], full[:, 0]), trace: (w, full)}.items():
        loop = lambda most, carry, steps, step=step: jax.lax.scan(partial(step, most), carry, steps)
        print(f"  {step.__name__} {ratio(loop, most, carry, given)}", end="", flush=True)
    print(f"  deferred {ratio(deferred, most, full, given)}")
