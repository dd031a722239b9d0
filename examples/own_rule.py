"""A learning rule of one's own: random-feedback-like traces that forget at a fixed rate (RFLO).

A rule is three pure functions over a dictionary of arrays: what to keep, how it advances in a step, and what
gradient it makes of a learning signal. Here the local Jacobian `D` of D-RTRL is replaced by a constant:

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
class FixedDecay:
    """Traces of every weight, which fade at the same rate whatever the state."""

    decay: float

    def init(self, traces: Any, local: Any) -> Any:
        return {t.key: jnp.zeros_like(self._now(t, local)) for t in traces}

    def update(self, traces: Any, values: Any, local: Any) -> Any:
        return {t.key: self.decay * values[t.key] + self._now(t, local) for t in traces}

    def gradient(self, traces: Any, values: Any, signals: Any, local: Any) -> Any:
        grads: dict[Any, Any] = {}
        for t in traces:
            site = t.relation.site.index
            signal = t.lift(signals[t.group.index], local.inputs[site], 1)
            part = t.contract(signal, values[t.key])
            grads[site, t.name] = grads[site, t.name] + part if (site, t.name) in grads else part
        return grads

    def _now(self, trace: Any, local: Any) -> Any:
        """J[t] x[t]: what this step adds."""
        _, factor, J = local.at(trace)
        return trace.instant(factor, J, local.weights[trace.relation.site.index][trace.name])


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


def learner_of(rule: Any) -> Any:
    """A net with the same weights each time, and the rule that trains it."""
    brainstate.random.seed(0)
    return braintrace.ETraceVjpAlgorithm(Net(), rule)


def train(rule: Any) -> float:
    learner = learner_of(rule)

    def step(x: Any, y: Any) -> tuple[Any, Any]:
        out = learner(x)
        return task.loss(out, y), out

    result = braintrace.fit(
        learner,
        task.batches(seed=0, batch_size=16),
        step,
        optax.adam(5e-3),
        max_batches=20 if QUICK else 500,
        metrics={"error": task.metric},
        eval_batches=list(task.batches(seed=0, batch_size=64, split="test")),
        progress=False,
    )
    return result.metrics["error"]


# the local Jacobian of these units is the leak: with that decay, the rule is D-RTRL, whatever the data
gradients = []
for learner in (learner_of(FixedDecay(LEAK)), braintrace.D_RTRL(learner_of(FixedDecay(LEAK)).model)):
    xs, ys, _ = task.batch(seed=0, index=0, batch_size=16)
    brainstate.nn.init_all_states(learner.model, batch_size=16)
    learner.compile_graph(jnp.asarray(xs[0]))
    gradients.append(learner.etrace_grad(xs, ys, step_fn=lambda x, y, f=learner: task.loss(f(x), y)))
difference = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), *gradients)
print("difference to D_RTRL:", max(jax.tree.leaves(difference)))
assert max(jax.tree.leaves(difference)) < 1e-6

errors = {decay: train(FixedDecay(decay)) for decay in ((LEAK,) if QUICK else (0.0, 0.4, LEAK))}
for decay, error in errors.items():
    print(f"decay {decay}: normalised error {error:.3f} (chance {task.chance:.0f})")
assert max(errors.values()) < (0.9 if QUICK else 0.2)
