"""A GRU reads Python's own manual, byte by byte, and writes some of it.

The weights change every 20 steps, and traces continue through the whole sequence. Credit therefore reaches
further back than the 20 steps after which truncated BPTT would stop.

    python examples/char_lm.py [--quick]
"""

import sys
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace
from braintrace.tasks.series import topics

QUICK = "--quick" in sys.argv
UNITS = 64 if QUICK else 128
task = braintrace.tasks.get("text")
alphabet = np.unique(np.frombuffer(topics(), np.uint8))  # the byte of each symbol


class Net(brainstate.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = braintrace.nn.GRUCell(task.inputs, UNITS)
        self.readout = brainstate.nn.Linear(UNITS, task.outputs)

    def update(self, x: Any) -> Any:
        return self.readout(self.cell(x))


def write(number: int) -> str:
    """Let the net go on from its own output."""
    brainstate.nn.reset_all_states(net, batch_size=1)

    def next_symbol(symbol: Any, key: Any) -> Any:
        logits = net(jax.nn.one_hot(symbol, task.inputs))
        symbol = jax.random.categorical(key, 1.5 * logits)
        return symbol, symbol[0]

    start = jnp.array([int(np.flatnonzero(alphabet == ord("T"))[0])])
    _, symbols = brainstate.transform.scan(next_symbol, start, jax.random.split(jax.random.key(0), number))
    return "T" + bytes(alphabet[np.asarray(symbols)]).decode(errors="replace")


brainstate.random.seed(0)
net = Net()
learner = braintrace.ES_D_RTRL(net, decay_or_rank=0.9)
result = braintrace.fit(
    learner,
    task.batches(seed=0, batch_size=32),
    task.step(learner),  # of each time step the loss, and the output for the metric
    optax.adam(5e-3),
    update_every=20,
    max_batches=10 if QUICK else 600,
    metrics={"bits": task.metric},
    eval_batches=list(task.batches(seed=0, batch_size=64, split="test")),
)
print(write(300))
bits = result.metrics["bits"]
print(f"{bits:.2f} bits per byte ({task.chance:.2f} with single bytes alone)")
assert bits < (6.0 if QUICK else 3.0)
