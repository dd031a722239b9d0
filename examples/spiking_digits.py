"""Spiking neurons learn to read digits that arrive row by row, as spikes.

Spikes have a surrogate gradient. Traces follow the voltage and the filtered spikes of each neuron, and
ignore influence that passes from neuron to neuron. In a large network, use `ES_D_RTRL` in place of
`D_RTRL`: its memory grows with the number of neurons, not of weights.

    python examples/spiking_digits.py [--quick]        needs the images of scikit-learn
"""

import sys
from typing import Any

import brainstate
import brainunit as u
import jax.numpy as jnp
import optax
from brainstate.nn import init

import braintrace
from braintrace import nn

QUICK = "--quick" in sys.argv
UNITS = 64
task = braintrace.tasks.get("spiking_digits_rows")


class Net(brainstate.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(task.inputs, UNITS, w_init=init.Normal(scale=0.15))
        self.recurrent = nn.Linear(UNITS, UNITS, w_init=init.Normal(scale=0.1), b_init=None)
        self.neurons = nn.LIF(UNITS, R=20.0, tau=20.0 * u.ms)
        self.filter = nn.Expon(UNITS, tau=20.0 * u.ms)  # of each neuron's spikes: traces follow it
        self.readout = nn.Linear(UNITS, task.outputs)

    def update(self, x: Any) -> Any:
        spikes = self.neurons.get_spike()  # of the step before
        return self.readout(self.filter(self.neurons(self.input(x) + self.recurrent(spikes))))


brainstate.random.seed(0)
brainstate.environ.set(dt=1.0 * u.ms)
number = 10 if QUICK else 600  # of batches
learner = braintrace.D_RTRL(Net())
result = braintrace.fit(
    learner,
    task.batches(seed=0, batch_size=32),
    task.step(learner),  # of each time step the loss, and the output for the metric
    optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(5e-3, number))),
    max_batches=number,
    metrics={"accuracy": task.metric},
    eval_batches=list(task.batches(seed=0, batch_size=32, split="test")),
)

spikes = []
brainstate.nn.reset_all_states(learner.model, batch_size=32)
for x in task.batch(seed=0, index=0, batch_size=32, split="test")[0]:
    learner.model(x)
    spikes.append(learner.model.neurons.get_spike().mean())
print(f"neurons fire in {float(jnp.array(spikes).mean()):.1%} of the steps")
accuracy = result.metrics["accuracy"]
print(f"accuracy {accuracy:.3f} (chance {task.chance:.3f})")
assert result.metrics["loss"] < result.history[0]["loss"]
assert QUICK or accuracy > 0.8
