"""A sparse network of excitatory and inhibitory spiking neurons, whose weights keep their signs (Dale's law).

Only existing synapses have a weight and a trace. The sign belongs to the neuron: the operation uses the
absolute value of the parameter times that sign, and automatic differentiation does the rest.

    python examples/sparse_ei.py [--quick]
"""

import sys
from typing import Any

import brainstate
import brainunit as u
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.sparse import BCSR

import braintrace
from braintrace import nn

QUICK = "--quick" in sys.argv
EXCITATORY, INHIBITORY = 64, 16
UNITS = EXCITATORY + INHIBITORY
task = braintrace.tasks.get("randman", classes=3, units=20, length=50)
signs = np.repeat([1.0, -1.0], [EXCITATORY, INHIBITORY]).astype(np.float32)


class Net(brainstate.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input = nn.SignedWLinear(task.inputs, UNITS, w_init=brainstate.nn.init.Uniform(0.0, 0.6))
        rng = np.random.default_rng(0)
        present = rng.random((UNITS, UNITS)) < 0.1  # one pair of neurons in ten is connected
        size = np.where(signs > 0, 0.05, 0.2)[:, None]  # few inhibitory neurons balance many
        self.synapses = BCSR.fromdense(jnp.asarray(present * size * rng.random((UNITS, UNITS)), jnp.float32))
        self.sign = signs[np.nonzero(present)[0]]  # of the neuron that each synapse comes from
        self.recurrent = brainstate.ParamState(self.synapses.data)
        self.neurons = nn.LIF(UNITS, R=20.0, tau=20.0 * u.ms)
        self.filter = nn.Expon(UNITS, tau=20.0 * u.ms)  # of each neuron's spikes: traces follow it
        self.readout = nn.Linear(UNITS, task.outputs)

    def signed(self, weight: Any) -> Any:
        return jnp.abs(weight) * self.sign

    def update(self, x: Any) -> Any:
        spikes = self.neurons.get_spike()
        recurrent = braintrace.sparse_matmul(
            spikes, self.recurrent.value, sparse_mat=self.synapses, weight_fn=self.signed
        )
        return self.readout(self.filter(self.neurons(self.input(x) + recurrent)))


brainstate.random.seed(0)
brainstate.environ.set(dt=1.0 * u.ms)
net = Net()
start = np.array(net.signed(net.recurrent.value))
number = 10 if QUICK else 400  # of batches
learner = braintrace.D_RTRL(net)
result = braintrace.fit(
    learner,
    task.batches(seed=0, batch_size=32),
    task.step(learner),  # of each time step the loss, and the output for the metric
    optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(1e-2, number))),
    max_batches=number,
    metrics={"accuracy": task.metric},
    eval_batches=list(task.batches(seed=0, batch_size=32, split="test")),
)
end = np.array(net.signed(net.recurrent.value))
print(f"{len(end)} synapses of {UNITS**2} possible; {(start != end).mean():.0%} of them have learned")
accuracy = result.metrics["accuracy"]
print(f"accuracy {accuracy:.3f} (chance {task.chance:.3f})")
assert (end * net.sign >= 0).all(), "a synapse changed its sign"
assert result.metrics["loss"] < result.history[0]["loss"]
assert QUICK or accuracy > 0.8
