"""Steps per second of a stream through `fit`, compared with a bare jitted loop; an update at every step.

    python benchmarks/stream_speed.py [--cells GRUCell MiniGRU] [--units 64] [--batch-size 1] [--block 2000]

Blocks of both run in turn, so that other load on the machine meets both, and the fastest of each counts.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace

INPUTS, OUTPUTS = 8, 4


def make_learner(cell: str, units: int) -> Any:
    brainstate.random.seed(0)
    layers = getattr(braintrace.nn, cell)(INPUTS, units), braintrace.nn.Linear(units, OUTPUTS)
    return braintrace.D_RTRL(brainstate.nn.Sequential(*layers))


def bare_loop(learner: Any, optimizer: Any, xs: Any, ys: Any) -> Any:
    """Return a compiled function that learns from a block, with an update at every step and no checks."""
    brainstate.nn.init_all_states(learner.model, batch_size=xs.shape[1])
    learner.compile_graph(xs[0])
    weights = learner.param_states
    opt_state = brainstate.ShortTermState(optimizer.init({k: w.value for k, w in weights.items()}))

    def step(x: Any, y: Any) -> Any:
        loss = lambda: jnp.mean((learner(x) - y) ** 2)
        grads, value = brainstate.transform.grad(loss, weights, return_value=True)()
        updates, opt_state.value = optimizer.update(dict(grads), opt_state.value)
        for k, w in weights.items():
            w.value = optax.apply_updates(w.value, updates[k])
        return value

    return brainstate.transform.jit(lambda: brainstate.transform.for_loop(step, xs, ys))


def measure(cell: str, units: int, batch_size: int, block: int, seconds: float) -> tuple[float, float]:
    """Return steps per second of the bare loop and of `fit`."""
    rng = np.random.default_rng(0)
    xs, ys = (rng.normal(size=(block, batch_size, n)).astype(np.float32) for n in (INPUTS, OUTPUTS))
    optimizer = optax.sgd(1e-3)
    run = bare_loop(make_learner(cell, units), optimizer, xs, ys)
    jax.block_until_ready(run())
    bare: list[float] = []
    began = time.monotonic()

    def blocks() -> Iterator[Any]:
        for number in itertools.count():
            if time.monotonic() - began > seconds and number > 5:
                return
            start = time.perf_counter()
            jax.block_until_ready(run())
            bare.append(time.perf_counter() - start)
            yield xs, ys

    learner = make_learner(cell, units)
    loss = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    found = braintrace.fit(
        learner, braintrace.Stream(blocks(), block=None), loss, optimizer, progress=False
    ).history
    fitted = [b["seconds"] - a["seconds"] for a, b in itertools.pairwise(found)]
    return block / min(bare), block / min(fitted)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", nargs="+", default=["GRUCell", "MiniGRU"])
    for name, default in (("units", 64), ("batch-size", 1), ("block", 2000), ("seconds", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    for cell in given.cells:
        bare, fitted = measure(cell, given.units, given.batch_size, given.block, given.seconds)
        print(
            f"{cell} {given.units}: bare loop {bare:,.0f} steps/s, fit {fitted:,.0f} steps/s, "
            f"ratio {fitted / bare:.2f}"
        )


if __name__ == "__main__":
    main()
