"""Learn from a stream, with an update after every step: no batches, no epochs, nothing seen twice.

The Mackey-Glass series arrives one value at a time. The network predicts the value ten steps ahead. Its
weights change after every step, and states and traces are never reset.

    python examples/streaming_prediction.py [--quick]
"""

import sys
from typing import Any

import brainstate
import jax.numpy as jnp
import numpy as np
import optax

import braintrace
from braintrace.tasks.series import mackey_glass_series

QUICK = "--quick" in sys.argv
AHEAD, STEPS = 10, 1_000 if QUICK else 10_000
series = np.tanh(mackey_glass_series(STEPS + AHEAD, 17.0) - 1).astype(np.float32)[:, None]


class Net(brainstate.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = braintrace.nn.GRUCell(1, 32)
        self.readout = brainstate.nn.Linear(32, 1)

    def update(self, x: Any) -> Any:
        return self.readout(self.cell(x))


def step(x: Any, y: Any) -> Any:
    """The error before the weights have seen the answer: a fair test, at every step."""
    return jnp.mean((learner(x) - y) ** 2)


brainstate.random.seed(0)
learner = braintrace.D_RTRL(Net(), window=1)  # the signal passes through recurrent weights, too
pieces = [(series[i : i + 100], series[i + AHEAD : i + AHEAD + 100]) for i in range(0, STEPS, 100)]
result = braintrace.fit(
    learner,
    pieces,  # the stream, a hundred steps at a time: only for the progress bar
    step,
    optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3)),
    update_every=1,
    reset=False,  # states and traces go on
    batched=False,
)

_, errors = result.curve("loss")
variance = float(series.var())
for part in np.array_split(errors / variance, 5):
    print(f"error {part.mean():.3f} {'#' * round(60 * min(1, float(part.mean())))}")
first, final = errors[: len(errors) // 5].mean(), errors[-len(errors) // 5 :].mean()
print(f"mean squared error {first / variance:.3f} -> {final / variance:.3f} of the variance")
assert final < (0.9 if QUICK else 0.3) * first
