"""How close online gradients are to exact ones, along training: a tanh net on three tasks, and a gated one.

The tanh net has 64 units, h <- tanh(W x + U h + b), batches of 8 and Adam at 1e-3, as in the paper on
Sketched RTRL that published the figures for SnAp-1 (its settings of the tasks are not known here); the GRU
has 32. A net learns by the exact gradient; now and then the gradients of the other rules are taken on the
same batch. Their cosine to the exact one is over all weights of the recurrent layer. D_RTRL, ES_D_RTRL,
SnAp-1 and RFLO (with random feedback) are in single steps; ranks are of D_RTRL, in windows of one step or as
said, with a balanced projection that adapts at every update or, where said, a pushed one; UORO and KF_RTRL
are in windows of one, too. Sketch 4: windows of one step and no diagonal; the best four directions of the
whole influence, by a full decomposition at every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import braintrace
from braintrace.rules import D_RTRL, ES_D_RTRL, KF_RTRL, UORO, Feedback, Own, Recursion

BATCH, RATE = 8, 1e-3
UPDATES, EVERY = 1000, 50


class Net(NamedTuple):
    """A recurrent layer as a function of one sample or several, `h = cell(weights, h, x)`, and its start."""

    units: int
    cell: Callable[..., Any]
    weights: Callable[[int, int], Any]


def tanh_cell(p: Any, h: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["w"] + h @ p["u"] + p["b"])


def tanh_weights(inputs: int, units: int) -> Any:
    drive = braintrace.nn.Linear(inputs, units).weight.value
    u = brainstate.nn.init.Orthogonal()((units, units))
    return {"w": drive["weight"], "u": u, "b": drive["bias"]}


def gru_cell(p: Any, h: Any, x: Any) -> Any:
    of = lambda name, h: jnp.concatenate([x, h], -1) @ p[name]["weight"] + p[name]["bias"]
    z, r = jax.nn.sigmoid(of("z", h)), jax.nn.sigmoid(of("r", h))
    return (1 - z) * h + z * jnp.tanh(of("h", r * h))


def gru_weights(inputs: int, units: int) -> Any:
    cell = braintrace.nn.GRUCell(inputs, units)
    return {name: getattr(cell, "W" + name).weight.value for name in "zrh"}


TANH, GRU = Net(64, tanh_cell, tanh_weights), Net(32, gru_cell, gru_weights)
COPYING = {"symbols": 5, "delay": 10}
ROWS: dict[str, tuple[Net, str, dict[str, Any], str]] = {  # with what was published for SnAp-1
    "copying": (TANH, "copying", COPYING, ".691"),
    "adding": (TANH, "adding", {"length": 20}, ".605"),
    "anbn": (TANH, "anbn", {"length": 40, "longest": 8}, ".407"),
    "copying, GRU": (GRU, "copying", COPYING, "-"),
}

# -- gradients: (params, xs, ys) -> of the recurrent layer, up to a factor -----------------------------------


def exact(net: Net, task: Any) -> Any:
    mask = jnp.asarray(task.mask)

    def loss(params: Any, xs: Any, ys: Any) -> Any:
        def body(h: Any, now: Any) -> Any:
            x, y, weight = now
            h = net.cell(params["cell"], h, x)
            return h, weight * task.loss(read(params, h), y)

        return jnp.mean(jax.lax.scan(body, jnp.zeros((BATCH, net.units)), (xs, ys, mask))[1])

    return jax.jit(jax.grad(loss))


def read(params: Any, h: Any) -> Any:
    return h @ params["out"]["weight"] + params["out"]["bias"]


def by_rule(rule: Any, window: int | None, net: Net, task: Any) -> Any:
    """By the library, on the batched step as it is."""

    def step(params: Any, h: Any, x: Any) -> Any:
        h = net.cell(params["cell"], h, x)
        return h, read(params, h)

    start = jnp.zeros((BATCH, net.units))

    @jax.jit
    def grads(params: Any, traces: Any, xs: Any, ys: Any) -> Any:
        online = braintrace.online(step, params, start, xs[0], rule=rule, window=window)
        traces = online.init(params, start) if traces is None else traces
        found, (_, traces), _ = online.grad(task.loss, params, start, traces, xs, ys, mask=task.mask)
        return found["cell"], online.reset(start, traces)[1]

    traces: Any = None

    def next_batch(params: Any, xs: Any, ys: Any) -> Any:
        """The averages of a balanced projection go from batch to batch, as in training."""
        nonlocal traces
        found, traces = grads(params, traces, xs, ys)
        return found

    return next_batch


def sketch(rank: int, net: Net, task: Any) -> Any:
    """The gradient sees all of a step; the best directions of the influence `P` of weights on units stay."""
    mask = jnp.asarray(task.mask)

    def of_sample(params: Any, xs: Any, ys: Any) -> Any:
        theta, unravel = ravel_pytree(params["cell"])
        none = jnp.zeros((net.units, theta.size))
        cell = lambda theta, h, x: net.cell(unravel(theta), h, x)

        def body(carry: Any, now: Any) -> Any:
            h, P, total = carry
            x, y, weight = now
            W, H = jax.jacrev(cell, (0, 1))(theta, h, x)
            h = cell(theta, h, x)
            signal = jax.grad(lambda h: weight * task.loss(read(params, h)[None], y[None]))(h)
            P = H @ P + W
            basis = jnp.linalg.eigh(P @ P.T)[1][:, -rank:]
            return (h, basis @ (basis.T @ P), total + signal @ P), None

        start = (jnp.zeros(net.units), none, jnp.zeros_like(theta))
        return jax.lax.scan(body, start, (xs, ys, mask))[0][2]

    return jax.jit(lambda *given: jnp.mean(jax.vmap(of_sample, (None, 1, 1))(*given), 0))


RULES: dict[str, Any] = {
    "D_RTRL": partial(by_rule, D_RTRL(), None),
    "ES_D_RTRL": partial(by_rule, ES_D_RTRL(), None),
    "windows of one": partial(by_rule, D_RTRL(), 1),
    **{f"rank {r}": partial(by_rule, D_RTRL(rank=r), 1) for r in (1, 2, 4, 8, 16)},
    **{f"rank {r}, pushed": partial(by_rule, D_RTRL(rank=r, basis="pushed"), 1) for r in (4, 8)},
    "windows of 5": partial(by_rule, D_RTRL(), 5),
    "windows of 5, rank 4": partial(by_rule, D_RTRL(rank=4), 5),
    "windows of 5, rank 4, pushed": partial(by_rule, D_RTRL(rank=4, basis="pushed"), 5),
    "SnAp-1": partial(by_rule, D_RTRL(recursion=Recursion(Own())), None),
    "RFLO": partial(by_rule, D_RTRL(signal=Feedback()), None),
    "UORO": partial(by_rule, UORO(), 1),
    "KF_RTRL": partial(by_rule, KF_RTRL(), 1),
    "sketch 4": partial(sketch, 4),
}

ADAPTS = [name for name in RULES if "rank" in name and "pushed" not in name]  # to every batch

# -- along training ------------------------------------------------------------------------------------------


def compare(net: Net, task: Any, seeds: int) -> dict[str, list[float]]:
    """Train by the exact gradient; the mean cosine of the others to it, for each seed."""
    truth = exact(net, task)
    others = {name: make(net, task) for name, make in RULES.items()}
    optimizer = optax.adam(RATE)

    @jax.jit
    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state

    found: dict[str, list[float]] = {name: [] for name in others}
    for seed in range(seeds):
        brainstate.random.seed(seed)
        params = {
            "cell": net.weights(task.inputs, net.units),
            "out": brainstate.nn.Linear(net.units, task.outputs).weight.value,
        }
        state = optimizer.init(params)
        cosines: dict[str, list[float]] = {name: [] for name in others}
        for i in range(UPDATES):
            xs, ys, _ = task.batch(seed, i, BATCH)
            grads = truth(params, xs, ys)
            for name, other in others.items():
                if i % EVERY == 0:
                    cosines[name].append(cosine(grads["cell"], other(params, xs, ys)))
                elif name in ADAPTS:
                    other(params, xs, ys)
            params, state = update(params, state, grads)
        for name, values in cosines.items():
            found[name].append(float(np.mean(values)))
        print({name: round(v[-1], 3) for name, v in found.items()}, flush=True)
    return found


def cosine(a: Any, b: Any) -> float:
    a, b = ravel_pytree(a)[0], ravel_pytree(b)[0]
    return float(a @ b / (jnp.linalg.norm(a) * jnp.linalg.norm(b)))


def measure(seeds: int) -> dict[str, Any]:
    """The mean cosine along training, for each row, rule and seed."""
    start = time.process_time()
    rows = {}
    for name, (net, task, options, published) in ROWS.items():
        print(name, flush=True)
        cosines = compare(net, braintrace.tasks.get(task, **options), seeds)
        rows[name] = {"cosines": cosines, "published": published, "options": options}
    about = " ".join((__doc__ or "").partition("\n\n")[2].split())
    settings = "; ".join(
        f"{name}: {', '.join(f'{k}={v}' for k, v in row['options'].items())}" for name, row in rows.items()
    )
    text = f"{about} Mean over {UPDATES} updates, measured every {EVERY}, ± over seeds. {settings}."
    return {"rows": rows, "about": text, "seconds": time.process_time() - start}
