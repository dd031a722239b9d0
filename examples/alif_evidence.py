"""Adaptive spiking neurons accumulate evidence: were there more cues on the left or on the right?

A neuron with an adaptive threshold remembers its own spikes for as long as the threshold takes to decay.
Voltage and threshold of a neuron depend on each other, and traces follow both.

    python examples/alif_evidence.py [--quick]
"""

import sys
from typing import Any

import brainstate
import brainunit as u
import optax
from brainstate.nn import init

import braintrace
from braintrace import nn

QUICK = "--quick" in sys.argv
UNITS = 50
# the published task takes 2,250 steps of 1 ms; this is a shorter one
task = braintrace.tasks.get("evidence", cue=20, gap=10, delay=60, recall=20)


class Net(brainstate.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(task.inputs, UNITS, w_init=init.Normal(scale=0.3))
        self.recurrent = nn.Linear(UNITS, UNITS, w_init=init.Normal(scale=0.1), b_init=None)
        self.neurons = nn.ALIF(UNITS, R=20.0, tau=20.0 * u.ms, tau_a=200.0 * u.ms, beta=0.3)
        self.filter = nn.Expon(UNITS, tau=20.0 * u.ms)  # of each neuron's spikes: traces follow it
        self.readout = nn.Linear(UNITS, task.outputs)

    def update(self, x: Any) -> Any:
        spikes = self.neurons.get_spike()  # of the step before
        return self.readout(self.filter(self.neurons(self.input(x) + self.recurrent(spikes))))


brainstate.random.seed(0)
number = 6 if QUICK else 250  # of batches
brainstate.environ.set(dt=1.0 * u.ms)
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
learner.show_graph()  # one group of three states: V, a and the filtered spikes
accuracy = result.metrics["accuracy"]
print(f"accuracy {accuracy:.3f} (chance {task.chance:.3f})")
assert result.metrics["loss"] < result.history[0]["loss"]
assert QUICK or accuracy > 0.85
