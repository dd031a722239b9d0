"""Supervised streams: chaotic series, copying and a cue task, with updates while the stream goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
from chaotic_series import draw
from stream_nets import Net, functional, make_cell

import braintrace
from braintrace import nn
from braintrace.agents import from_module

Row = dict[str, Any]
Update = Callable[[Any, Any], tuple[Any, Any]]


def timed_scan(update: Update, state: Any, parts: Any, steps: int) -> tuple[Any, Row]:
    """Run a scan; return its outputs, the time per step and the memory that XLA plans for one update."""
    compiled = jax.jit(lambda state, parts: jax.lax.scan(update, state, parts)).lower(state, parts).compile()
    first = jax.tree.map(lambda a: a[0], parts)
    one = jax.jit(update).lower(state, first).compile().memory_analysis()
    began, cpu = time.monotonic(), time.process_time()
    _, found = jax.block_until_ready(compiled(state, parts))
    return found, {
        "us per step": 1e6 * (time.monotonic() - began) / steps,
        "us per step, CPU time": 1e6 * (time.process_time() - cpu) / steps,
        "KiB of an update": (one.temp_size_in_bytes + one.argument_size_in_bytes) / 2**10,
    }


# -- prediction of chaotic series ---------------------------------------------------------------------------

RULES = {
    "rank 4": lambda: braintrace.rules.D_RTRL(rank=4),
    "diagonal": braintrace.rules.D_RTRL,
    "SnAp-1": lambda: braintrace.rules.SnAp(1),
    "exact": braintrace.rules.RTRL,
}


def series(
    seed: int, name: str, rule: str, steps: int, units: int = 64, batch: int = 8, decay: float = 0.999,
    clip: float = np.inf,
) -> Row:  # fmt: skip
    """Return the NMSE of the next value by the protocol of Sketched RTRL.

    State and traces are reset every 200 steps. A record is the mean of the last 200 errors, every 250 steps;
    the score is the mean of the last five records. `decay` is that of Adam's second moment; `clip` bounds the
    norm of a gradient.
    """
    data = jnp.asarray(draw(name, seed, batch)[: steps + 1, :, None], jnp.float32)
    keys, k = jax.random.split(jax.random.key(seed), 4), units**-0.5
    uniform = lambda key, *shape: jax.random.uniform(key, shape, minval=-k, maxval=k)
    params = {"w": uniform(keys[0], 1, units), "r": uniform(keys[1], units, units), "b": jnp.zeros(units)}
    params |= {"out": uniform(keys[2], units, 1), "c": uniform(keys[3], 1)}

    def step(params: Any, h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ params["w"] + h @ params["r"] + params["b"])
        return h, h @ params["out"] + params["c"]

    h = jnp.zeros((batch, units))
    net = braintrace.online(step, params, h, data[0], rule=RULES[rule](), window=1)
    optimizer = optax.chain(optax.clip_by_global_norm(clip), optax.adam(1e-3, b2=decay))

    def update(state: Any, part: Any) -> Any:
        params, opt_state, h, traces = state
        x, target, reset = part
        loss = lambda y, target: jnp.mean((y - target) ** 2)
        grads, (h, traces), (error, _) = net.grad(
            loss, params, h, traces, x[None], target[None], reset=jnp.broadcast_to(reset, (1, batch))
        )
        changes, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, changes), opt_state, h, traces), jnp.sum(error)

    resets = jnp.arange(steps) % 200 == 0
    state = (params, optimizer.init(params), h, net.init(params, h))
    errors, spent = timed_scan(update, state, (data[:-1], data[1:], resets), steps)
    records = [float(np.mean(errors[max(0, end - 199) : end + 1])) for end in range(0, steps, 250)]
    return {"score": float(np.mean(records[-5:])), "records": records[::4], **spent}


# -- copying ------------------------------------------------------------------------------------------------


def copying(
    seed: int, delay: int, cell: str, steps: int, window: int, rank: int = 0, truncated: bool = False,
    units: int = 64, letters: int = 3, alphabet: int = 4, batch: int = 8, rate: float = 3e-3,
    reach: float = 3.0, phase: float = 3.0, gate: float = 0.0,
) -> Row:  # fmt: skip
    """Return the accuracy of repeated letters over the last fifth of an endless sequence of trials.

    At the start, the memory of the cell is up to `reach` times the delay; `phase` is the largest one of RTU
    and LRU, which tells apart letters that follow each other; `gate` is the standard deviation of the input
    weights of a GRU's update gate.
    """
    rng, length = np.random.RandomState(seed), 2 * letters + delay + 1
    trials = -(-steps // length)
    shown = np.full((trials, length, batch), alphabet)
    shown[:, :letters] = rng.randint(alphabet, size=(trials, letters, batch))
    shown[:, letters + delay] = alphabet + 1
    answers = np.zeros((trials, length, batch), np.int32)
    answers[:, -letters:] = shown[:, :letters]
    asked = np.zeros((trials, length), np.float32)
    asked[:, -letters:] = 1
    in_windows = lambda a: a.reshape(-1, *a.shape[2:])[: steps - steps % window].reshape(
        -1, window, *a.shape[2:]
    )
    data = [jnp.asarray(in_windows(a)) for a in (shown, answers, asked)]
    brainstate.random.seed(seed)
    x = jnp.zeros((batch, alphabet + 2))
    longest = reach * delay
    rule = braintrace.rules.BPTT() if truncated else braintrace.rules.D_RTRL(rank=rank)
    options = {"window": window} if rank else {}
    slow = float(np.exp(-5 / longest))
    model = Net(make_cell(cell, alphabet + 2, units, longest, slow, phase, gate), alphabet)
    net, params, carry = functional(model, x, rule=rule, **options)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

    def loss(y: Any, answer: Any, asked: Any) -> Any:
        each = optax.softmax_cross_entropy_with_integer_labels(y, answer)
        return asked * jnp.mean(each), asked * jnp.mean(jnp.argmax(y, -1) == answer)

    def update(state: Any, part: Any) -> Any:
        params, opt_state, carry, traces = state
        shown, answers, asked = part
        grads, (carry, traces), (_, right) = net.grad(
            loss, params, carry, traces, jax.nn.one_hot(shown, alphabet + 2), answers, asked,
            reduction="sum", has_aux=True,
        )  # fmt: skip
        changes, new_opt_state = optimizer.update(grads, opt_state, params)
        # without a loss there is no gradient: momentum alone must not move the weights
        keep = lambda new, old: jnp.where(jnp.sum(asked) > 0, new, old)
        params = jax.tree.map(lambda old, change: keep(old + change, old), params, changes)
        opt_state = jax.tree.map(keep, new_opt_state, opt_state)
        return (params, opt_state, carry, traces), (jnp.sum(right), jnp.sum(asked))

    state = (params, optimizer.init(params), carry, net.init(params, carry))
    (right, asked), spent = timed_scan(update, state, data, steps)
    fifths = [float(np.sum(r) / np.sum(a)) for r, a in zip(*map(_fifths, (right, asked)), strict=True)]
    return {"score": fifths[-1], "fifths": fifths, "chance": 1 / alphabet, **spent}


def _fifths(a: Any) -> list[np.ndarray]:
    return np.array_split(np.asarray(a), 5)


# -- cue and recall -----------------------------------------------------------------------------------------


class Resonators(brainstate.nn.Module):
    """A layer of resonate-and-fire neurons with hardly any damping, and a linear readout."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(15, units, w_init=brainstate.nn.init.Normal(0.0, 4.0), b_init=None)
        self.neurons = nn.BRF(units, omega=(5.0, 10.0), b_offset=(0.0, 0.01))
        self.readout = nn.Linear(units, 2)

    def update(self, x: Any) -> Any:
        return self.readout(self.neurons(self.inputs(x)))


def cue(
    seed: int, delay: int, steps: int, units: int = 1024, batch: int = 4, rate: float = 1e-2, shown: int = 20
) -> Row:
    """Return the accuracy at recall over the second half of the trials, with one update per trial.

    Of 15 inputs, five spike for a cue of the first kind, five for one of the second, and five at the recall,
    each with probability 1/2 in a step. States and traces are reset at the start of a trial.
    """
    brainstate.random.seed(seed)
    model, x = Resonators(units), jnp.zeros((batch, 15))
    brainstate.nn.init_all_states(model, batch_size=batch)
    step, params, carry = from_module(model, x)
    net = braintrace.online(step, params, carry, x)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    group, trials = jnp.arange(15) // 5, steps // (delay + 2 * shown)
    spikes = lambda key, on: jax.random.bernoulli(key, 0.5 * on, (shown, batch, 15)).astype(x.dtype)

    def loss(y: Any, kind: Any) -> Any:
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(y, kind)), y

    def trial(state: Any, key: Any) -> Any:
        params, opt_state = state
        key_kind, key_cue, key_recall = jax.random.split(key, 3)
        kind = jax.random.randint(key_kind, (batch,), 0, 2)
        cue = spikes(key_cue, group[None] == kind[:, None])
        before = net.evolve(params, carry, net.init(params, carry), cue)[:2]
        before = jax.lax.fori_loop(0, delay, lambda _, now: net.step(params, *now, x)[:2], before)
        kinds = jnp.broadcast_to(kind, (shown, batch))
        recall = spikes(key_recall, jnp.broadcast_to(group == 2, (batch, 15)))
        grads, _, (_, ys) = net.grad(loss, params, *before, recall, kinds, has_aux=True)
        changes, opt_state = optimizer.update(grads, opt_state, params)
        right = jnp.mean(jnp.argmax(jnp.sum(ys, 0), -1) == kind)
        return (optax.apply_updates(params, changes), opt_state), right

    keys = jax.random.split(jax.random.key(seed), trials)
    right, spent = timed_scan(trial, (params, optimizer.init(params)), keys, trials * (delay + 2 * shown))
    fifths = [float(np.mean(part)) for part in _fifths(right)]
    return {"score": float(np.mean(right[trials // 2 :])), "fifths": fifths, "chance": 0.5, **spent}
