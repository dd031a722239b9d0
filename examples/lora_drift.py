"""A frozen net adapts to drifting sensors through a low-rank adapter (LoRA), online.

Eight sensors observe the Lorenz attractor, and a network learns to predict it. Then the sensors drift, and
the predictions fail. All weights stay frozen; only a matrix of rank three, added to the input weights, is
learned.

    python examples/lora_drift.py [--quick]
"""

import sys
from collections.abc import Iterator
from typing import Any

import brainstate
import jax.numpy as jnp
import numpy as np
import optax

import braintrace
from braintrace.tasks.series import lorenz_series

QUICK = "--quick" in sys.argv
SENSORS, UNITS, LENGTH, AHEAD = 8, 64, 30, 5
rng = np.random.default_rng(0)
points = lorenz_series(3_000 if QUICK else 10_000)
points = ((points - points.mean(0)) / points.std(0)).astype(np.float32)
before, drift = rng.standard_normal((2, 3, SENSORS)).astype(np.float32) / np.sqrt(3)
after = before + drift


def batches(sensors: Any, number: int) -> Iterator[tuple[Any, Any]]:
    for _ in range(number):
        when = rng.integers(len(points) - LENGTH - AHEAD, size=32) + np.arange(LENGTH)[:, None]
        yield points[when] @ sensors, points[when + AHEAD]


class Net(brainstate.nn.Module):
    """Leaky units: h <- h + (tanh(input(x) + recurrent(h)) - h) / 2."""

    def __init__(self) -> None:
        super().__init__()
        self.input = braintrace.nn.Linear(SENSORS, UNITS)
        self.recurrent = braintrace.nn.Linear(UNITS, UNITS, w_init=brainstate.nn.init.Orthogonal())
        self.readout = brainstate.nn.Linear(UNITS, 3)

    def init_state(self, batch_size: int | None = None, **_: Any) -> None:
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))

    def reset_state(self, batch_size: int | None = None, **_: Any) -> None:
        self.h.value = jnp.zeros((batch_size, UNITS))

    def update(self, x: Any) -> Any:
        drive = self.input(x) + self.recurrent(self.h.value)
        self.h.value = (self.h.value + jnp.tanh(drive)) / 2
        return self.readout(self.h.value)


def train(net: Net, sensors: Any, number: int, optimizer: Any) -> Any:
    """Train on `number` batches, and return the error of each."""
    learner = braintrace.D_RTRL(net)
    step = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    result = braintrace.fit(learner, batches(sensors, number), step, optimizer, progress=False)
    return np.array([row["loss"] for row in result.history])


brainstate.random.seed(0)
net = Net()
number = 20 if QUICK else 500
trained = train(net, before, number, optax.adam(5e-3))[-10:].mean()

net.input = braintrace.nn.LoRA(SENSORS, 3, UNITS, base_module=net.input)
recurrent = np.array(net.recurrent.weight.value["weight"])
names = {".".join(map(str, path)) for path in net.states(brainstate.ParamState)}
kinds = {name: "adapter" if name == "input.weight" else "frozen" for name in names}
only_adapter = optax.multi_transform({"adapter": optax.adam(5e-3), "frozen": optax.set_to_zero()}, kinds)
errors = train(net, after, number, only_adapter)
drifted, adapted = errors[:10].mean(), errors[-10:].mean()

print(f"error when trained {trained:.3f}, after the drift {drifted:.3f}, adapted {adapted:.3f}")
assert np.array_equal(recurrent, net.recurrent.weight.value["weight"]), "the net was to stay frozen"
assert adapted < (0.9 if QUICK else 0.5) * drifted
