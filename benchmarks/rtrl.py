"""RTRL in chunks: the time of a step of `etrace_grad` over four chunks, and what is kept.

python benchmarks/rtrl.py [--units 512] [--cells GRUCell LSTMCell] [--chunk 64] [--batch 1]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

import braintrace
from braintrace import nn


class Net(brainstate.nn.Module):
    """A recurrent layer as wide as its input, and a readout."""

    def __init__(self, cell: str, units: int) -> None:
        super().__init__()
        self.cell = getattr(nn, cell)(units, units)
        self.readout = nn.Linear(units, 10)

    def update(self, x: Any) -> Any:
        return self.readout(self.cell(x))


def measure(cell: str, units: int, chunk: int, batch: int) -> str:
    brainstate.random.seed(0)
    length = 4 * chunk
    xs = jnp.asarray(np.random.RandomState(0).randn(length, batch, units), jnp.float32)
    learner = braintrace.compile(Net(cell, units), braintrace.RTRL, xs[0], batch_size=batch)
    size = sum(st.value.nbytes for st in learner.etrace_states.values())

    @brainstate.transform.jit
    def gradient(xs: Any) -> Any:
        return learner.etrace_grad(xs, step_fn=lambda x: jnp.mean(learner(x) ** 2), chunk_size=chunk)

    times = []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready(gradient(xs))
        times.append(time.perf_counter() - start)
    return (
        f"{cell} {units}, batch {batch}, chunks of {chunk}: {size / 1e9:.2f} GB kept, "
        f"{1e3 * min(times[1:]) / length:.3f} ms a step, first call {times[0]:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--units", type=int, default=512)
    parser.add_argument("--cells", nargs="+", default=["GRUCell", "LSTMCell"])
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    given = parser.parse_args()
    print(jax.devices()[0].device_kind)
    for cell in given.cells:
        print(measure(cell, given.units, given.chunk, given.batch), flush=True)


if __name__ == "__main__":
    main()
