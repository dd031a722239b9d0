"""Train a GRU online to remember, beside back-propagation through time.

Three symbols are shown, ten steps of nothing follow, then a marker asks for the symbols in their order.
Online learning goes forward only: the gradient of every step comes from eligibility traces that are carried
along, so nothing of the past is stored, whatever the length of the sequence. BPTT stores all of it.

    python examples/demo.py [--batches 2000] [--out runs/demo]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import brainstate
import jax.numpy as jnp
import optax
from rich.console import Console

import braintrace

BATCH, UNITS = 32, 128
say = Console(highlight=False).print
task = braintrace.tasks.get("copying", delay=10, symbols=3)


class Net(brainstate.nn.Module):
    """A GRU that learns online, and a readout that learns within each step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = braintrace.nn.GRUCell(task.inputs, UNITS)
        self.readout = braintrace.nn.Linear(UNITS, task.outputs)

    def update(self, x: Any) -> Any:
        return self.readout(self.cell(x))


def train(rule: Any, batches: int) -> tuple[Any, Any]:
    """The same net, the same data, and one rule or another."""
    brainstate.random.seed(0)
    learner = rule(Net())

    result = braintrace.fit(
        learner,
        task.batches(seed=0, batch_size=BATCH),
        task.step(learner),
        optax.chain(
            optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(5e-3, batches, alpha=0.1))
        ),
        max_batches=batches,
        metrics={"accuracy": task.metric},
        eval_batches=list(task.batches(seed=0, batch_size=128, split="test")),
        eval_every=max(1, batches // 20),
    )
    return learner, result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    given = parser.parse_args()
    began = time.monotonic()
    say(f"[bold]The task: {task.description}.[/] A GRU of {UNITS} units learns it online, then by BPTT.")
    runs: dict[str, Any] = {}
    for name, rule in (("online (D_RTRL)", braintrace.D_RTRL), ("BPTT", braintrace.BPTT)):
        say(f"\n[bold]{name}[/]")
        learner, runs[name] = train(rule, given.batches)
        if runs[name].interrupted:
            return 130
        if rule is braintrace.D_RTRL:
            online = learner
    say("")
    braintrace.show_curves(runs, "accuracy")
    rules = ("D_RTRL", "ES_D_RTRL", "BPTT")
    costs = braintrace.plan(online.model, jnp.zeros((BATCH, task.inputs)), BATCH, task.length, rules=rules)
    report = braintrace.write_report(
        given.out / "report.html",
        runs,
        online,
        title="Online learning beside back-propagation through time",
        subtitle=f"The task: {task.description}. The same GRU of {UNITS} units, on the same data.",
        target=("accuracy", task.target, task.higher_is_better),
        memory=costs,
    )
    braintrace.save_curves(runs, given.out / "curves.png", {"accuracy": task.target})
    say("\n[bold]What the online rule learns how[/]\n")
    online.show_graph()
    say("")
    for name, run in runs.items():
        score = run.metrics["accuracy"]
        found = "[green]reached[/]" if task.reached(score) else "[yellow]not reached[/]"
        say(f"{name:16}  accuracy {score:.3f}  target {task.target:g} {found}")
    say(f"\n{time.monotonic() - began:.0f} s. Open [bold]{report}[/] in a browser; it needs no network.")
    return 0 if all(task.reached(run.metrics["accuracy"]) for run in runs.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
