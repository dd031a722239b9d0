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
from braintrace._compiler.leaky_readouts import followed_by_filters

from .oracle import Brute, bptt
from .run import agree, difference, online
from .zoo import Step

EXAMPLES = int(os.environ.get("BRAINTRACE_FUZZ", "16"))
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
            "RTRL": lambda: (truth, online(bt.RTRL(fresh()), xs)),
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


# -- verdicts ----------------------------------------------------------------------------------------------
#
# Stacks of layers as users write them: cells whose states are apart, packed or stacked, effective weights
# that vary over time or go through linear algebra, readouts with memory behind anything, outputs that read
# old states, dead code, and loops of length one.

WIDTH, CLASSES, SAMPLES, LENGTH = 3, 2, 4, 5
MIXED = jnp.asarray(np.random.RandomState(0).randn(WIDTH, WIDTH))


@jax.custom_vjp
def spike(v: Any) -> Any:
    return jnp.where(v > 0, jnp.ones_like(v), 0)


spike.defvjp(lambda v: (spike(v), v), lambda v, g: (g / (1 + 4 * jnp.abs(v)) ** 2,))


def _positive(w: Any) -> Any:
    return 2 * jnp.eye(len(w), dtype=w.dtype) + 0.3 * w @ w.T


# effective weights of a parameter `w`, the input `x` and the number of the step `n`
EFFECTIVE = {
    "tanh": lambda w, x, n: jnp.tanh(w),
    "standardised": lambda w, x, n: (w - w.mean()) / (w.std() + 0.1),
    "solved": lambda w, x, n: jnp.linalg.solve(_positive(w), w),
    "inverted": lambda w, x, n: jnp.linalg.inv(_positive(w)) @ w,
    "by cholesky": lambda w, x, n: jnp.linalg.cholesky(_positive(w)) @ w,
    "sorted": lambda w, x, n: jnp.sort(w, 0),
    "scaled by the input": lambda w, x, n: w * (1 + x.mean()),
    "scaled by a counter": lambda w, x, n: w * jnp.sin(n.astype(w.dtype)),
    "picked by a counter": lambda w, x, n: jnp.stack([w, 2 * w, -w])[n % 3],
}


def leaky(h: Any, i: Any, p: Any, mm: Any) -> Any:
    return (0.8 * h[0] + i,), 0.8 * h[0] + i


def leaky_by_parameter(h: Any, i: Any, p: Any, mm: Any) -> Any:
    new = jax.nn.sigmoid(p["d"]) * h[0] + i
    return (new,), new


def joined(h: Any, i: Any, p: Any, mm: Any) -> Any:
    both = jnp.concatenate([jnp.broadcast_to(p["d"], h[0].shape), h[0]], -1)
    decay, old = jnp.split(both, 2, -1)
    new = jnp.tanh(decay) * old + i
    return (new,), new


def lif(h: Any, i: Any, p: Any, mm: Any) -> Any:
    v = 0.9 * h[0] * (1 - spike(h[0] - 1)) + i
    return (v,), spike(v - 1)


def alif(h: Any, i: Any, p: Any, mm: Any) -> Any:
    v = 0.9 * h[0] - spike(h[0] - 1 - h[1]) + i
    a = jax.nn.sigmoid(p["d"]) * h[1] + 0.3 * spike(v - 1 - h[1])
    return (v, a), spike(v - 1 - a)


def recurrent(h: Any, i: Any, p: Any, mm: Any) -> Any:
    new = jnp.tanh(i + mm(h[0], p["r"]))
    return (new,), new


def rolled(h: Any, i: Any, p: Any, mm: Any) -> Any:
    return (0.6 * jnp.roll(h[0], 1, -1) + i,), jnp.tanh(h[0])


def cascade(h: Any, i: Any, p: Any, mm: Any) -> Any:
    a = 0.7 * h[0] - 0.2 * h[1] + i
    b = 0.9 * h[1] + jnp.sin(a)
    return (a, b), b


def delayed(h: Any, i: Any, p: Any, mm: Any) -> Any:
    return (i, 1.0 * h[0]), h[1]


def packed(h: Any, i: Any, p: Any, mm: Any) -> Any:
    new, out = cascade(jnp.split(h[0], 2, -1), i, p, mm)
    return (jnp.concatenate(new, -1),), out


def packed_with_resets(h: Any, i: Any, p: Any, mm: Any) -> Any:
    return packed((jnp.where(i[..., :1] > 0.5, 0, h[0]),), i, p, mm)


def set_in_place(h: Any, i: Any, p: Any, mm: Any) -> Any:
    (a, b), out = cascade((h[0][..., :WIDTH], h[0][..., WIDTH:]), i, p, mm)
    return (h[0].at[..., :WIDTH].set(a).at[..., WIDTH:].set(b),), out


def stacked(h: Any, i: Any, p: Any, mm: Any) -> Any:
    new, out = cascade(tuple(h[0]), i, p, mm)
    return (jnp.stack(new),), out


def rotated(h: Any, i: Any, p: Any, mm: Any) -> Any:
    new = jnp.exp(-jnp.exp(p["d"]) + 1j * p["d"]) * h[0] + i
    return (new,), new.real


# of each cell: the function, the shapes of its states after the batch, and its parameters
CELLS: dict[str, Any] = {
    "leaky": (leaky, [(WIDTH,)], {}),
    "leaky by parameter": (leaky_by_parameter, [(WIDTH,)], {"d": (WIDTH,)}),
    "joined": (joined, [(WIDTH,)], {"d": (WIDTH,)}),
    "lif": (lif, [(WIDTH,)], {}),
    "alif": (alif, [(WIDTH,)] * 2, {"d": (WIDTH,)}),
    "recurrent": (recurrent, [(WIDTH,)], {"r": (WIDTH, WIDTH)}),
    "rolled": (rolled, [(WIDTH,)], {}),
    "cascade": (cascade, [(WIDTH,)] * 2, {}),
    "delayed": (delayed, [(WIDTH,)] * 2, {}),
    "packed": (packed, [(2 * WIDTH,)], {}),
    "packed with resets": (packed_with_resets, [(2 * WIDTH,)], {}),
    "set in place": (set_in_place, [(2 * WIDTH,)], {}),
    "stacked": (stacked, [(WIDTH,)], {}),
    "rotated": (rotated, [(WIDTH,)], {"d": (WIDTH,)}),
}
BETWEEN = {
    "nothing": lambda z, p, mm: z,
    "op": lambda z, p, mm: jnp.tanh(mm(z, p["c"])),
    "fixed": lambda z, p, mm: z @ MIXED,
    "tanh": lambda z, p, mm: jnp.tanh(z),
}
# of the old state, what the op gives and the input, the new state and the output
MEMORIES: dict[str, Any] = {
    "none": lambda r, y, x: (r, y),
    "leaky": lambda r, y, x: (0.9 * r + y, 0.9 * r + y),
    "uneven": lambda r, y, x: (jnp.asarray([0.9, 0.5]) * r + y,) * 2,
    "complex": lambda r, y, x: ((0.6 + 0.5j) * r + y, ((0.6 + 0.5j) * r + y).real),
    "scaled by the input": lambda r, y, x: (0.9 * r + y * x.mean(),) * 2,
    "late": lambda r, y, x: (0.9 * r + y, r),
    "leaky and plain": lambda r, y, x: (0.9 * r + y, 0.9 * r + 2 * y),
}


def draw_stack(rng: np.random.RandomState) -> Any:
    """A random step function `step(params, carry, x)`, its parameters, carry and mark."""
    pick = lambda options: list(options)[rng.randint(len(options))]
    draw = lambda shape, scale=0.6: jnp.asarray(scale * rng.randn(*shape))
    lead = (SAMPLES,) if rng.rand() < 0.5 else ()
    by_hand, odd = rng.rand() < 0.4, rng.rand() < 0.4
    mm = bt.matmul if by_hand else jnp.matmul
    params: dict[str, Any] = {"o": draw((WIDTH, CLASSES))}
    carry: dict[str, Any] = {"n": jnp.asarray(0)}
    layers = []
    for k in range(rng.randint(1, 3)):
        name, effective = pick(CELLS), pick(EFFECTIVE) if odd else None
        _, states, own = CELLS[name]
        params[f"w{k}"] = draw((WIDTH if k else IN, WIDTH))
        params |= {f"{p}{k}": draw(shape) for p, shape in own.items()}
        names = [f"h{k}{i}" for i in range(len(states))]
        first = (2,) if name == "stacked" else ()
        kind = complex if name == "rotated" else float
        carry |= {n: draw((*first, *lead, *s)).astype(kind) for n, s in zip(names, states, strict=True)}
        between, wrapped = pick(BETWEEN), pick(["as it is"] * 3 + ["scan", "cond"])
        if between == "op":
            params[f"c{k}"] = draw((WIDTH, WIDTH))
        layers.append((k, name, names, effective, between, wrapped))
    readout, weight = pick(MEMORIES), pick(EFFECTIVE) if odd else None
    if readout != "none":
        carry["r"] = draw((*lead, CLASSES)).astype(complex if readout == "complex" else float)
    looks_back, dead = pick(["no"] * 3 + ["op", "plain"]), rng.rand() < 0.2
    if looks_back == "op":
        params["q"] = draw((WIDTH, CLASSES))

    def step(p: Any, s: Any, x: Any) -> Any:
        made = lambda w, how: w if how is None else EFFECTIVE[how](w, x, s["n"])
        new, z = {"n": s["n"] + 1}, x
        for k, name, names, effective, between, wrapped in layers:
            mine = {key[:-1]: v for key, v in p.items() if key.endswith(str(k))}

            def cell(old: Any, z: Any, name=name, mine=mine, effective=effective) -> Any:
                return CELLS[name][0](old, mm(z, made(mine["w"], effective)), mine, mm)

            old = tuple(s[n] for n in names)
            if wrapped == "scan":
                after, z = jax.lax.scan(lambda h, z: cell(h, z), old, z[None])
                z = z[0]
            elif wrapped == "cond":
                keeps = lambda h=old: (h, jnp.zeros((*lead, WIDTH)))
                after, z = jax.lax.cond(s["n"] < 3, lambda h=old, z=z: cell(h, z), keeps)
            else:
                after, z = cell(old, z)
            new |= dict(zip(names, after, strict=True))
            z = BETWEEN[between](z, mine, mm)
        r, y = MEMORIES[readout](s.get("r"), mm(z, made(p["o"], weight)), x)
        new |= {"r": r} if "r" in s else {}
        back = s["h00"].real
        back = back[0] if layers[0][1] == "stacked" else back[..., :WIDTH]
        if looks_back == "op":
            y = y + jnp.tanh(mm(back, p["q"]))
        elif looks_back == "plain":
            y = y + back @ MIXED[:, :CLASSES]
        if dead:
            mm(jnp.tanh(back @ MIXED), MIXED)
        return {n: new[n] for n in s}, y

    return step, params, carry, (*lead, IN), "ops" if by_hand else "auto"


VERDICTS = {
    "D_RTRL": (bt.rules.D_RTRL(), None),
    "ES_D_RTRL": (bt.rules.ES_D_RTRL(0.7), None),
    "windows": (bt.rules.D_RTRL(), 2),
    "layers": (bt.rules.D_RTRL(across="layers"), None),
    "rank": (bt.rules.D_RTRL(rank=64), 2),
    "SnAp": (bt.rules.SnAp(2), None),
    "RTRL": (bt.rules.RTRL(), None),
}


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
def test_what_a_verdict_calls_exact_is_bptt(shard, number):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as users have it
        check_verdicts(SHARDS * number + shard)


def check_verdicts(seed: int) -> None:
    """Compare what rules claim to be exact with BPTT, on one random stack."""
    rng = np.random.RandomState(seed)
    step, params, carry, shape, mark = draw_stack(rng)
    xs = jnp.asarray(rng.randn(LENGTH, *shape))
    targets = jnp.asarray(rng.randn(LENGTH, *shape[:-1], CLASSES))
    loss = lambda y, target: jnp.sum((y - target) ** 2)

    def total(params: Any) -> Any:
        def one(now: Any, given: Any) -> Any:
            now, y = step(params, now, given[0])
            return now, loss(y, given[1])

        return jnp.sum(jax.lax.scan(one, carry, (xs, targets))[1])

    others = list(VERDICTS)[1:]
    nets, claims = {}, {}
    with warnings.catch_warnings(action="ignore"):
        first = bt.online(step, params, carry, xs[0], mark=mark)
        for name in ("D_RTRL", others[seed % len(others)]):
            net = first.with_rule(*VERDICTS[name])
            missed = {path[-1] for path in net.report.exactness.weights}
            if not params.keys() <= missed:
                nets[name], claims[name] = net, params.keys() - missed

        @jax.jit  # one program for BPTT and all rules
        def gradients(params: Any) -> Any:
            online = lambda net: net.grad(
                loss, params, carry, net.init(params, carry), xs, targets, reduction="sum"
            )
            return jax.grad(total)(params), {name: online(net)[0] for name, net in nets.items()}

        truth, found = gradients(params) if nets else ({}, {})
    size = max((float(np.max(np.abs(g))) for g in truth.values()), default=0.0)
    for name, claimed in claims.items():
        for k in claimed:
            scale = float(np.max(np.abs(truth[k]))) + 1e-6 * size
            assert float(np.max(np.abs(found[name][k] - truth[k]))) <= 1e-8 * scale, (seed, name, k)
