"""Train a GRU online to remember, as well as by back-propagation through time.

Three symbols are shown, ten steps of nothing follow, then a marker asks for the symbols in their order.
Gradients go back through windows of a few steps, and eligibility traces summarise earlier steps. So memory
stays within a budget (1 GiB unless you set one), whatever the length of the sequence. That of BPTT grows
with it.

    python examples/demo.py [--batches 1200] [--out runs/demo]
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

BATCH, UNITS, WINDOW = 32, 128, 5
LONG = 100_000  # steps of a sequence that is too long for BPTT
ONLINE = f"online, windows of {WINDOW}"
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


def train(rule: Any, batches: int, **options: Any) -> tuple[Any, Any]:
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
        **options,
    )
    return learner, result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=1200)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    given = parser.parse_args()
    began = time.monotonic()
    say(f"[bold]The task: {task.description}.[/] A GRU of {UNITS} units learns it online, then by BPTT.")
    runs: dict[str, Any] = {}
    say(f"\n[bold]{ONLINE}[/]")
    online, runs[ONLINE] = train(braintrace.D_RTRL, given.batches, window=WINDOW)
    if not runs[ONLINE].interrupted:
        say("\n[bold]BPTT[/]")
        _, runs["BPTT"] = train(braintrace.BPTT, given.batches)
    if any(run.interrupted for run in runs.values()):
        return 130
    say("")
    braintrace.show_curves(runs, "accuracy")
    costs, longer = (plan(online.model, length) for length in (task.length, LONG))
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
        rule, window = ("BPTT", None) if name == "BPTT" else ("D_RTRL", WINDOW)
        now, then = (f"{p.row(rule, window=window).total_bytes / 2**20:,.0f} MiB" for p in (costs, longer))
        say(f"{name:20}  accuracy {score:.3f}  target {task.target:g} {found}")
        say(f"{'':20}  a gradient over {task.length} steps takes {now}, over {LONG:,} steps {then}")
    say(f"\n{time.monotonic() - began:.0f} s. Open [bold]{report}[/] in a browser; it needs no network.")
    return 0 if all(task.reached(run.metrics["accuracy"]) for run in runs.values()) else 1


def plan(model: Any, length: int) -> Any:
    """What a gradient takes."""
    x0 = jnp.zeros((BATCH, task.inputs))
    rules = ("D_RTRL", "BPTT")
    return braintrace.plan(model, x0, BATCH, length, rules=rules, chunk_sizes=[length], window=WINDOW)


if __name__ == "__main__":
    sys.exit(main())
