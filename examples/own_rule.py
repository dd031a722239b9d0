"""A learning rule of your own: random-feedback-like traces that forget at a fixed rate (RFLO).

A rule is three pure functions over a dictionary of arrays: `init`, `update` (one step) and `gradient` (traces
times learning signals). Here the local Jacobian `D` of D-RTRL is replaced by a constant:

    trace[t] = decay * trace[t-1] + J[t] x[t]        (Murray 2019, eLife 8:e43299)

    python examples/own_rule.py [--quick]
"""

import sys
from dataclasses import dataclass
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import optax

import braintrace

QUICK = "--quick" in sys.argv
UNITS, LEAK = 32, 0.8
task = braintrace.tasks.get("integrator", length=30)


@dataclass(frozen=True)
class FixedDecay(braintrace.rules.TraceRule):
    """Traces of every weight, which fade at the same rate whatever the state."""

    decay: float

    def init(self, slots: Any, local: Any) -> Any:
        return {s.key: jnp.zeros_like(self._now(s, local)) for s in slots}

    def update(self, slots: Any, values: Any, local: Any) -> Any:
        return {s.key: self.decay * values[s.key] + self._now(s, local) for s in slots}

    def gradient(self, slots: Any, values: Any, signals: Any, local: Any) -> Any:
        grads: dict[Any, Any] = {}
        for s in slots:
            site = s.relation.site.index
            signal = s.lift(signals[s.group.index], local.inputs[site], 1)
            part = s.contract(signal, values[s.key])
            grads[site, s.name] = grads[site, s.name] + part if (site, s.name) in grads else part
        return grads

    def _now(self, slot: Any, local: Any) -> Any:
        """J[t] x[t]: what this step adds."""
        _, factor, J = local.at(slot)
        return slot.instant(factor, J, local.weights[slot.relation.site.index][slot.name])


class Net(brainstate.nn.Module):
    """h <- leak h + (1 - leak) tanh(input(x) + recurrent(h))"""

    def __init__(self) -> None:
        super().__init__()
        self.weights = braintrace.nn.Linear(task.inputs + UNITS, UNITS)
        self.readout = brainstate.nn.Linear(UNITS, task.outputs)

    def init_state(self, batch_size: int | None = None, **_: Any) -> None:
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))

    def reset_state(self, batch_size: int | None = None, **_: Any) -> None:
        self.h.value = jnp.zeros((batch_size, UNITS))

    def update(self, x: Any) -> Any:
        drive = self.weights(jnp.concatenate([x, self.h.value], -1))
        self.h.value = LEAK * self.h.value + (1 - LEAK) * jnp.tanh(drive)
        return self.readout(self.h.value)


def gradient(learner: Any) -> Any:
    """The gradient of one sequence, from the net's weights as they are."""
    xs, ys, _ = task.batch(seed=0, index=0, batch_size=16)
    brainstate.nn.init_all_states(net, batch_size=16)
    learner.compile_graph(jnp.asarray(xs[0]))
    run = lambda: learner.etrace_grad(xs, ys, step_fn=lambda x, y: task.loss(learner(x), y))
    return brainstate.transform.jit(run)()


brainstate.random.seed(0)
net = Net()
learner = braintrace.ETraceVjpAlgorithm(net, FixedDecay(LEAK))
# the local Jacobian of these units is the leak: with that decay, the rule is D-RTRL, whatever the data
mine, theirs = gradient(learner), gradient(braintrace.D_RTRL(net))
difference = max(jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), mine, theirs)))
print(f"largest difference to D_RTRL: {difference:.1e}")
assert difference < 1e-6

loss = lambda x, y: task.loss(learner(x), y)
number = 20 if QUICK else 500
result = braintrace.fit(learner, task.batches(0, batch_size=16), loss, optax.adam(5e-3), max_batches=number)
first, final = result.history[0]["loss"], result.metrics["loss"]
print(f"loss {first:.3f} -> {final:.3f}")
assert final < (0.8 if QUICK else 0.05) * first
