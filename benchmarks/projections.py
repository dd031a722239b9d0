"""How close D_RTRL in windows is to BPTT along training: traces alone, pushed bases, balanced projections.

    python benchmarks/projections.py [--updates 200]

A GRU of 64 units learns by BPTT (Adam at 2e-3, batches of 32). At every update each rule takes the gradient
of the same batch, and its cosine to BPTT's over all weights of the cell is averaged over the last ten updates
at six times of the training. Writes `results/projections.md`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
from cosines import cosine, gru_cell, gru_weights, read

import braintrace

UNITS, BATCH, TIMES = 64, 32, 6
TASKS: dict[str, tuple[int, dict[str, Any]]] = {  # the window and the options of a task
    "adding": (5, {"length": 30}),
    "mackey_glass": (10, {}),
    "copying": (5, {"delay": 5, "symbols": 5}),
}
D_RTRL = braintrace.rules.D_RTRL
RULES = {
    "traces alone": D_RTRL(),
    **{f"{b}, rank {r}": D_RTRL(rank=r, basis=b) for b in ("pushed", "balanced") for r in (4, 8)},
}


def along_training(name: str, updates: int) -> dict[str, list[float]]:
    """The mean cosines of each rule at six times of the training."""
    window, options = TASKS[name]
    task = braintrace.tasks.get(name, **options)
    brainstate.random.seed(0)
    params = {
        "cell": gru_weights(task.inputs, UNITS),
        "out": brainstate.nn.Linear(UNITS, task.outputs).weight.value,
    }
    start, (x, *_) = jnp.zeros((BATCH, UNITS)), task.batch(0, 0, BATCH)[0]

    def step(params: Any, h: Any, x: Any) -> Any:
        h = gru_cell(params["cell"], h, x)
        return h, read(params, h)

    def gradient(rule: Any, window: int | None) -> Any:
        net = braintrace.online(step, params, start, x, rule=rule, window=window)

        @jax.jit
        def run(params: Any, traces: Any, xs: Any, ys: Any) -> Any:
            grads, (carry, traces), _ = net.grad(task.loss, params, start, traces, xs, ys, mask=task.mask)
            return grads, net.reset(carry, traces)[1]

        return run, net.init(params, start)

    exact, none = gradient("bptt", None)
    rules = {label: gradient(rule, window) for label, rule in RULES.items()}
    traces = {label: first for label, (_, first) in rules.items()}
    optimizer = optax.adam(2e-3)
    state = optimizer.init(params)
    found: dict[str, list[float]] = {label: [] for label in rules}
    for i in range(updates):
        xs, ys, _ = task.batch(0, i, BATCH)
        truth, _ = exact(params, none, xs, ys)
        for label, (run, _) in rules.items():
            grads, traces[label] = run(params, traces[label], xs, ys)
            found[label].append(cosine(truth["cell"], grads["cell"]))
        moves, state = optimizer.update(truth, state)
        params = optax.apply_updates(params, moves)
    ends = [updates * k // TIMES for k in range(1, TIMES + 1)]
    return {label: [float(np.mean(v[max(0, e - 10) : e])) for e in ends] for label, v in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=200)
    updates = parser.parse_args().updates
    lines = [
        "# Cosine to BPTT along training",
        "",
        f"Written by `benchmarks/projections.py --updates {updates}`: a GRU of {UNITS} units, the least and "
        f"the largest of {TIMES} means over ten updates.",
        "",
        f"| task | windows of | {' | '.join(RULES)} |",
        f"|---|---|{'---|' * len(RULES)}",
    ]
    for name, (window, _) in TASKS.items():
        found = along_training(name, updates)
        cells = [f"{min(v):.4f} to {max(v):.4f}" for v in found.values()]
        lines.append(f"| {name} | {window} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    (Path(__file__).parent / "results" / "projections.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
