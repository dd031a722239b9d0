"""Random small models against brute force: the strongest test there is.

A model is drawn from a grammar of ops, weights, tails, couplings, gates and outputs; each rule must equal
its definition. `BRAINTRACE_FUZZ` sets how many are drawn (`make fuzz`).
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import braintrace as bt
from braintrace._compiler.filters import followed_by_filters

from .oracle import Brute, bptt
from .run import agree, difference, online
from .zoo import Step

EXAMPLES = int(os.environ.get("BRAINTRACE_FUZZ", "24"))
SHARDS = 8  # each is a test of its own, so that they run side by side
IN, N, BATCH, STEPS = 2, 4, 2, 3

WEIGHTS = {
    "raw": lambda w: w,
    "tanh": jnp.tanh,
    "masked": lambda w: w * jnp.asarray((np.arange(w.size).reshape(w.shape) % 3 > 0).astype(w.dtype)),
    "twice transposed": lambda w: w.T.T,
    "standardised": lambda w: (w - w.mean()) / (w.std() + 0.1),
}
TAILS = {
    "none": lambda y: y,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "roll": lambda y: jnp.roll(y, 1, -1),
    "reverse": lambda y: y[..., ::-1],
    "permute": lambda y: y[..., np.array([2, 0, 3, 1])],
    "shift": lambda y: jnp.concatenate([y[..., 1:], jnp.zeros_like(y[..., :1])], -1),
    "spread": lambda y: jnp.broadcast_to(y[..., :1], y.shape),
    "centre": lambda y: y - y.mean(-1, keepdims=True),
    "softmax": lambda y: jax.nn.softmax(y, -1),
    "cumsum": lambda y: jnp.cumsum(y, -1),
    "fold": lambda y: y.reshape(*y.shape[:-1], 2, 2).swapaxes(-1, -2).reshape(y.shape),
    "checkpoint": lambda y: jax.checkpoint(jnp.sin)(y),
    "jit": lambda y: jax.jit(lambda z: jnp.where(z > 0, z, 0.1 * z))(y),
    "two copies": lambda y: y + jnp.roll(y, 1, -1),
}
READOUTS = {
    "plain": lambda h, w, gate: bt.matmul(jnp.tanh(h), w),
    "gated units": lambda h, w, gate: bt.matmul(h * gate, w),
    "gated readout": lambda h, w, gate: bt.matmul(h, w) * gate,
    "weight that varies": lambda h, w, gate: bt.matmul(h, w * gate.mean()),
    "behind an op": lambda h, w, gate: bt.matmul(jnp.tanh(bt.matmul(h, jnp.cos(w @ w.T))), w),
}


def draw_model(rng: np.random.RandomState) -> Any:
    """A random `Step` and the shape of its input."""

    def pick(options: Any) -> Any:
        return options[rng.randint(len(options))]

    lead = (BATCH,) if rng.rand() < 0.6 else ()
    names = ["a", "b", "c"][: (1, 1, 2, 2, 3)[rng.randint(5)]]
    params: dict[str, Any] = {}
    plans = []
    for state in names:
        terms = []
        for _ in range(rng.randint(1, 3)):
            k = len(params)
            source = pick(["x", "x", "old", "new", "both"])
            width = {"x": IN, "old": N, "new": N, "both": IN + N}[source]
            op = pick(["matmul", "matmul", "bias", "fused", "lora", "leak", "gain"])
            shapes = {
                "matmul": {f"w{k}": (width, N)},
                "bias": {f"w{k}": (width, N), f"b{k}": (N,)},
                "fused": {f"w{k}": (width, 2 * N)},
                "lora": {f"w{k}": (width, 1), f"b{k}": (1, N)},
                "leak": {f"w{k}": pick([(N,), (1,), ()])},
                "gain": {f"w{k}": (N,)},
            }[op]
            params.update(shapes)
            terms.append((op, f"w{k}", f"b{k}", source, pick(names), pick(list(WEIGHTS)), pick(list(TAILS))))
        plans.append((state, terms, pick(names), pick(["old", "new"]), rng.randint(3), rng.rand() < 0.15))
    params["plain"], params["read"] = (N, N), (N, 2)
    marked_readout, skip, reads_old = rng.rand() < 0.3, rng.rand() < 0.3, rng.rand() < 0.2
    old_by_op, leaky = rng.rand() < 0.5, pick([None, None, *READOUTS])
    states = dict.fromkeys(names, (*lead, N))
    if leaky is not None:
        states["r"], params["into"] = (*lead, 2), (N, 2)

    def f(p: Any, s: Any, x: Any) -> Any:
        old = {n: getattr(s, n) for n in names}
        new: dict[str, Any] = {}
        ys = []
        for state, terms, other, when, coupling, mixes in plans:
            total = 0.0
            for op, w, b, source, of, prepare, tail in terms:
                h = old[of] if source == "old" or of not in new else new[of]
                given = {"x": x, "old": h, "new": h, "both": jnp.concatenate([x, h], -1)}[source]
                weight = getattr(p, w)
                if op in ("leak", "gain"):
                    gain = bt.element_wise(weight, jax.nn.sigmoid)
                    gain = jnp.broadcast_to(gain, old[state].shape)
                    total = total + (gain * old[state] if op == "leak" else gain * jnp.tanh(h))
                    continue
                weight = WEIGHTS[prepare](weight)
                if op == "lora":
                    y = bt.lora_matmul(given, weight, getattr(p, b), alpha=0.5)
                elif op == "fused":
                    gate, y = jnp.split(bt.matmul(given, weight), 2, -1)
                    y = jax.nn.sigmoid(gate) * y
                else:
                    y = bt.matmul(given, weight, getattr(p, b) if op == "bias" else None)
                ys.append(y)
                total = total + TAILS[tail](y)
            from_other = new[other] if when == "new" and other in new else old[other]
            if coupling == 1:
                total = total + 0.3 * jnp.sin(from_other)
            elif coupling == 2:
                total = total * jnp.cos(from_other)
            if mixes:
                total = total + 0.2 * old[state] @ p.plain
            new[state] = 0.6 * old[state] + total
        last = new[names[-1]] + sum(new.values())
        out = jnp.tanh(bt.matmul(last, p.read) if marked_readout else last @ p.read)
        if reads_old:
            read = bt.matmul(old[names[0]], p.read) if old_by_op else old[names[0]]
            out = out * jnp.cos(read).sum(-1, keepdims=True)
        if leaky is not None:
            new["r"] = 0.8 * s.r + READOUTS[leaky](last, p.into, jnp.cos(x[..., :1]))
            out = out + jnp.tanh(new["r"])
        return new, (out, jnp.sin(ys[-1])) if skip and ys else out

    return Step(f, params, states), (*lead, IN)


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
@settings(
    max_examples=-(-EXAMPLES // SHARDS),
    deadline=None,
    derandomize=EXAMPLES <= 200,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(number=st.integers(0, 2**26 - 1))
def test_rules_equal_their_definitions(shard, number):
    check(SHARDS * number + shard)


def check(seed: int) -> None:
    """Compare one random model with brute force."""
    rng = np.random.RandomState(seed)
    model, shape = draw_model(rng)
    xs = [jnp.asarray(rng.randn(*shape)) for _ in range(STEPS)]

    def fresh() -> Any:
        again, _ = draw_model(np.random.RandomState(seed))
        return again

    with warnings.catch_warnings(action="ignore"):
        graph = bt.compile_etrace_graph(model, xs[0])
        brute = Brute(model, xs[0], graph)
        checks = {
            "D_RTRL": lambda: (brute.d_rtrl(xs), online(bt.D_RTRL(fresh()), xs)),
            "ES_D_RTRL": lambda: (brute.es_d_rtrl(xs, 0.7), online(bt.ES_D_RTRL(fresh(), 0.7), xs)),
            "window": lambda: (
                brute.d_rtrl(xs, 2),
                online(bt.D_RTRL(fresh(), vjp_method="multi-step"), xs, 2),
            ),
            "RTRL": lambda: (bptt(fresh(), xs), online(bt.RTRL(fresh()), xs)),
        }
        exact = [e.path for e in graph.module_info.params if e.path not in graph.exactness().weights]
        truth = bptt(fresh(), xs)
        for name in ("D_RTRL", ("ES_D_RTRL", "window", "RTRL")[seed % 3]):
            expected, found = checks[name]()
            if name == "D_RTRL":
                wrong = {k: d for k, d in difference(truth, found).items() if k in exact and not d < 1e-9}
                assert not wrong, (wrong, str(graph.exactness()))
            if name != "D_RTRL" or not followed_by_filters(graph):
                assert agree(expected, found, 1e-9), (name, difference(expected, found))
