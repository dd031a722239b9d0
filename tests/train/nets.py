"""A small net, data that depend on the batch's number alone, and a run that can be killed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import brainstate
import jax.numpy as jnp
import numpy as np
import optax

import braintrace

IN, UNITS, OUT, BATCH, LENGTH = 3, 5, 2, 4, 4


class Net(brainstate.nn.Module):
    """A recurrent layer, with dropout, so that a run depends on random numbers too, and a readout."""

    def __init__(self, units: int = UNITS, dropout: float = 0.0) -> None:
        super().__init__()
        self.cell = braintrace.nn.ValinaRNNCell(IN, units, activation="tanh")
        self.dropout = brainstate.nn.Dropout(1 - dropout) if dropout else None
        self.readout = brainstate.nn.Linear(units, OUT)

    def update(self, x: Any) -> Any:
        h = self.cell(x)
        return self.readout(self.dropout(h) if self.dropout else h)


def batch(number: int, size: int = BATCH, length: int = LENGTH) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(number)
    xs = rng.normal(size=(length, size, IN)).astype(np.float32)
    ys = np.cumsum(xs[..., :OUT], 0).astype(np.float32)
    return xs, ys, np.ones(length, np.float32)


def epoch(number: int) -> Any:
    return (batch(10 * number + i) for i in range(10))


def make(rule: Any = braintrace.D_RTRL, **options: Any) -> tuple[Any, Any]:
    """A learner and the loss of its steps."""
    brainstate.random.seed(0)
    learner = rule(Net(**options))

    def loss(x: Any, y: Any) -> Any:
        out = learner(x)
        return jnp.mean((out - y) ** 2), out

    return learner, loss


def close(outs: Any, ys: Any, mask: Any) -> Any:
    return jnp.mean(jnp.abs(outs - ys) < 1)


def long_run(folder: Path, **options: Any) -> Any:
    """35 batches with checkpoints every 5, resumed if there are any."""
    learner, loss = make(dropout=0.2)
    return braintrace.fit(
        learner,
        epoch,
        loss,
        optax.adam(1e-2),
        **{
            "max_batches": 35,
            "metrics": {"close": close},
            "eval_batches": [batch(1000), batch(1001)],
            "eval_every": 7,
            "checkpoint_dir": folder / "checkpoints",
            "checkpoint_every": 5,
            "metrics_file": folder / "metrics.jsonl",
            "progress": False,
            "resume": True,
            **options,
        },
    )


if __name__ == "__main__":
    long_run(Path(sys.argv[1]))
