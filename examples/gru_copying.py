"""A GRU learns online to copy: it sees letters and has to repeat them after a delay.

The gradient of each step is computed from traces that are carried along with the state. Nothing is stored for
later, however long the sequence is.

    python examples/gru_copying.py [--quick]
"""

import sys
from typing import Any

import brainstate
import numpy as np
import optax

import braintrace

QUICK = "--quick" in sys.argv
task = braintrace.tasks.get("copying", symbols=2, delay=8)


class Net(brainstate.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = braintrace.nn.GRUCell(task.inputs, 64)  # its weights have traces
        self.readout = brainstate.nn.Linear(64, task.outputs)  # learned within each step

    def update(self, x: Any) -> Any:
        return self.readout(self.cell(x))


def step(x: Any, y: Any) -> tuple[Any, Any]:
    """The loss of one time step, and the output, for the metric."""
    out = learner(x)
    return task.loss(out, y), out


brainstate.random.seed(0)
number = 30 if QUICK else 1500  # of batches
learner = braintrace.D_RTRL(Net())
result = braintrace.fit(
    learner,
    task.batches(seed=0, batch_size=32),
    step,
    optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(5e-3, number))),
    max_batches=number,
    metrics={"accuracy": task.metric},
    eval_batches=list(task.batches(seed=0, batch_size=32, split="test")),
)

xs, _, mask = task.batch(seed=1, index=0, batch_size=32)
brainstate.nn.reset_all_states(learner.model, batch_size=32)
outs = brainstate.transform.for_loop(learner.model, xs)
letters = lambda symbols: "".join("ABCDEFGH_?"[s] for s in np.asarray(symbols))
for i in range(3):
    print(f"shown {letters(xs[:, i].argmax(-1))} answered {letters(outs[mask > 0, i].argmax(-1))}")

accuracy = result.metrics["accuracy"]
print(f"accuracy {accuracy:.3f} (chance {task.chance:.3f})")
assert result.metrics["loss"] < result.history[0]["loss"]
assert QUICK or accuracy > 0.9
