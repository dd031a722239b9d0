"""How close online gradients are to exact ones, along training: a tanh net on three tasks.

The net has 64 units, h <- tanh(W x + U h + b), batches of 8 and Adam at 1e-3, as in the paper on Sketched
RTRL that published the figures for SnAp-1 (its settings of the tasks are not known here). It learns by the
exact gradient; now and then the gradients of the other rules are taken on the same batch. Their cosine to the
exact one is over all weights of the recurrent layer.
"""

from __future__ import annotations

import time
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace

UNITS, BATCH, RATE = 64, 8, 1e-3
UPDATES, EVERY = 1000, 50
TASKS: dict[str, tuple[dict[str, Any], str]] = {
    "copying": ({"symbols": 5, "delay": 10}, ".691"),
    "adding": ({"length": 20}, ".605"),
    "anbn": ({"length": 40, "longest": 8}, ".407"),
}


class Net(brainstate.nn.Module):
    """h <- tanh(W x + U h + b), and a readout.

    With `diagonal`, the path of each unit to itself through U stays open to traces: the value is the same,
    and D-RTRL becomes SnAp-1, which keeps the diagonal of the whole Jacobian.
    """

    def __init__(self, task: Any, diagonal: bool = False) -> None:
        super().__init__()
        self.diagonal = diagonal
        self.input = braintrace.nn.Linear(task.inputs, UNITS)
        start = brainstate.nn.init.Orthogonal()
        self.recurrent = braintrace.nn.Linear(UNITS, UNITS, w_init=start, b_init=None)
        self.readout = brainstate.nn.Linear(UNITS, task.outputs)

    def init_state(self, batch_size: int | None = None, **_: Any) -> None:
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))

    def reset_state(self, batch_size: int | None = None, **_: Any) -> None:
        self.h.value = jnp.zeros((batch_size, UNITS))

    def update(self, x: Any) -> Any:
        h = self.h.value
        drive = self.input(x) + self.recurrent(h)
        if self.diagonal:
            itself = h * jax.lax.stop_gradient(jnp.diag(self.recurrent.weight.value["weight"]))
            drive = drive + itself - jax.lax.stop_gradient(itself)
        self.h.value = jnp.tanh(drive)
        return self.readout(self.h.value)


def rules() -> dict[str, Any]:
    """The learners to compare with the exact one, by name: from a task."""
    windows = {"vjp_method": "multi-step"}
    return {
        "D_RTRL": lambda task: braintrace.D_RTRL(Net(task)),
        "ES_D_RTRL": lambda task: braintrace.ES_D_RTRL(Net(task)),
        "D_RTRL + diagonal (SnAp-1)": lambda task: braintrace.D_RTRL(Net(task, diagonal=True)),
        "D_RTRL, windows of 5": lambda task: braintrace.D_RTRL(Net(task), **windows),
    }


def gradient(learner: Any, task: Any, window: int | None) -> Any:
    """A compiled function from a batch to the gradients by parameter."""

    def loss(x: Any, y: Any) -> Any:
        if window is None:
            return task.loss(learner(x), y)
        return jax.vmap(task.loss)(learner(braintrace.MultiStepData(x)), y)

    @brainstate.transform.jit
    def grads(xs: Any, ys: Any) -> Any:
        learner.reset_state(BATCH)
        return learner.etrace_grad(xs, ys, step_fn=loss, mask=task.mask, chunk_size=window, keep_traces=False)

    return grads


def compare(task: Any, seed: int) -> dict[str, list[float]]:
    """Train by the exact gradient; the cosines of the others to it, every so often."""
    brainstate.random.seed(seed)
    x = jnp.zeros((BATCH, task.inputs))
    exact = braintrace.compile(Net(task), "rtrl", x, batch_size=BATCH)
    quick = braintrace.compile(exact.model, braintrace.BPTT, x, batch_size=BATCH)  # the same gradient, faster
    others = {name: make(task) for name, make in rules().items()}
    for learner in others.values():
        brainstate.nn.init_all_states(learner.model, batch_size=BATCH)
        learner.compile_graph(x)
    window = {name: 5 if "windows" in name else None for name in others}
    grads = {name: gradient(learner, task, window[name]) for name, learner in others.items()}
    exact_grads, quick_grads = gradient(exact, task, None), gradient(quick, task, None)
    params = exact.model.states(brainstate.ParamState)
    optimizer = optax.adam(RATE)
    opt_state = optimizer.init({k: s.value for k, s in params.items()})
    update = jax.jit(optimizer.update)
    found: dict[str, list[float]] = {name: [] for name in others}
    for i in range(UPDATES):
        xs, ys, _ = task.batch(seed, i, BATCH)
        now = quick_grads(xs, ys)
        if i % EVERY == 0:
            truth = flat(exact_grads(xs, ys))
            assert cosine(truth, flat(now)) > 0.9999, "RTRL and BPTT differ"
            for name, learner in others.items():
                for key, state in learner.model.states(brainstate.ParamState).items():
                    state.value = params[key].value
                found[name].append(cosine(truth, flat(grads[name](xs, ys))))
        updates, opt_state = update(now, opt_state)
        for key, state in params.items():
            state.value = optax.apply_updates(state.value, updates[key])
    return found


def flat(grads: Any) -> Any:
    """The gradient of the recurrent layer as one vector."""
    kept = {k: v for k, v in grads.items() if k[0] != "readout"}
    return np.concatenate([np.ravel(a) for a in jax.tree.leaves(kept)])


def cosine(a: Any, b: Any) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def measure(seeds: int) -> dict[str, Any]:
    """The mean cosine along training, for each task, rule and seed."""
    start = time.perf_counter()
    rows = {}
    for name, (options, published) in TASKS.items():
        task = braintrace.tasks.get(name, **options)
        cosines: dict[str, list[float]] = {}
        for seed in range(seeds):
            for rule, values in compare(task, seed).items():
                cosines.setdefault(rule, []).append(float(np.mean(values)))
            print(name, {rule: round(v[-1], 3) for rule, v in cosines.items()}, flush=True)
        rows[name] = {"cosines": cosines, "published": published, "options": options}
    about = " ".join((__doc__ or "").partition("\n\n")[2].split())
    settings = "; ".join(
        f"{name}: {', '.join(f'{k}={v}' for k, v in options.items())}" for name, (options, _) in TASKS.items()
    )
    text = f"{about} Mean over {UPDATES} updates, measured every {EVERY}, ± over seeds. {settings}."
    return {"rows": rows, "about": text, "seconds": time.perf_counter() - start}
