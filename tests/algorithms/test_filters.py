"""Leaky readouts: where traces follow them, in steps and chunks, and where they do not."""

from __future__ import annotations

from typing import Any

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import braintrace as bt
from braintrace import nn
from braintrace._compiler.leaky_readouts import find_filters

from ..oracle import bptt, loss
from ..run import agree, compiled, difference, every, online
from ..zoo import Step, vjp_spike

ROUND_OFF = 1e-10


def rotation(p: Any, s: Any, x: Any) -> Any:
    """Two states, a leak towards the input, two readouts."""
    a = 0.9 * s.a - 0.2 * s.b + bt.matmul(x, p.w)
    b = 0.2 * s.a + 0.9 * s.b + bt.matmul(x, p.v)
    r = s.r + 0.3 * (bt.matmul(jnp.tanh(a) * b, p.o) - s.r)
    q = 0.7 * s.q + bt.matmul(b, p.o) / 2.0
    return {"a": a, "b": b, "r": r, "q": q}, (jnp.tanh(r), q)


def leaky(
    read: Any,
    keep: Any = lambda r: 0.8 * r,
    out: Any = lambda r, y, s: jnp.tanh(r),
    more: Any = lambda s: {},
) -> Any:
    """`a` and a readout `r` of it; `read` is what is added to the readout, `more` other new states."""

    def step(p: Any, s: Any, x: Any) -> Any:
        a = 0.9 * s.a + bt.matmul(x, p.w)
        y = read(p, s, a, x)
        r = keep(s.r) + y
        return {"a": a, "r": r, **more(s)}, out(r, y, s)

    return step


def plain(p: Any, s: Any, a: Any, x: Any) -> Any:
    return bt.matmul(jnp.tanh(a), p.o)


def by(weight: Any, more: Any = lambda s: {}) -> Any:
    """A readout with an effective weight."""
    return leaky(lambda p, s, a, x: bt.matmul(jnp.tanh(a), weight(p, s, x)), more=more)


def rotating(p: Any, s: Any, x: Any) -> Any:
    """A readout with a complex decay."""
    a = 0.9 * s.a + bt.matmul(x, p.w)
    r = (0.8 + 0.3j) * s.r + bt.matmul(jnp.tanh(a), p.o).astype(s.r.dtype)
    return {"a": a, "r": r}, (r.real, r.imag)


BANK = np.random.RandomState(5).randn(2, 4, 2)
OTHER_STATES = {
    "counter": {"n": lambda draw: brainstate.LongTermState(jnp.zeros(()))},
    "Hebbian": {"m": lambda draw: brainstate.LongTermState(draw((4, 2)))},
    "complex decay": {"r": lambda draw: brainstate.HiddenState(lax.complex(draw(2), draw(2)))},
}

# a step, and how many filters its readouts have
STEPS = {
    "rotation": (rotation, 2),
    "spikes": (leaky(lambda p, s, a, x: 0.2 * bt.matmul(vjp_spike(a - 0.5), p.o)), 1),
    "gated by data": (leaky(lambda p, s, a, x: bt.matmul(jnp.tanh(a) * jnp.cos(x[0]), p.o)), 1),
    "fixed weight": (by(lambda p, s, x: jnp.asarray(BANK[0])), 1),
    "gain of each": (leaky(lambda p, s, a, x: jnp.asarray([0.3, 0.7]) * plain(p, s, a, x)), 1),
    "op of a linear op": (leaky(lambda p, s, a, x: bt.matmul(jnp.tanh(a) @ BANK[0] @ BANK[1].T, p.o)), 1),
    "op of an op": (leaky(lambda p, s, a, x: bt.matmul(jnp.tanh(bt.matmul(a, BANK[0] @ BANK[1].T)), p.o)), 0),
    "scaled by data": (by(lambda p, s, x: x[0] * BANK[0]), 0),
    "parameter scaled by data": (by(lambda p, s, x: x[0] * p.o), 0),
    "picked by data": (by(lambda p, s, x: jnp.asarray(BANK)[(x[0] > 0).astype(int)]), 0),
    "random mask": (
        by(lambda p, s, x: BANK[0] * jax.random.uniform(jax.random.key((9 * x[0]).astype(int)), (4, 2))),
        0,
    ),
    "counter": (by(lambda p, s, x: jnp.cos(s.n) * BANK[0], more=lambda s: {"n": s.n + 1}), 0),
    "Hebbian": (by(lambda p, s, x: p.o + s.m, more=lambda s: {"m": 0.9 * s.m + jnp.outer(s.a, s.r)}), 0),
    "selected by data": (leaky(lambda p, s, a, x: jnp.where(x[0] > 0, plain(p, s, a, x), 0.0)), 0),
    "op is read": (leaky(plain, out=lambda r, y, s: (r, y)), 0),
    "complex decay": (rotating, 0),
    "each its own decay": (leaky(plain, lambda r: jnp.asarray([0.5, 0.8]) * r), 0),
    "not linear": (leaky(plain, lambda r: jnp.tanh(r)), 0),
    "gain of data": (leaky(lambda p, s, a, x: bt.matmul(jnp.tanh(a), p.o) * jnp.cos(x[0])), 0),
    "around the op": (leaky(lambda p, s, a, x: bt.matmul(jnp.tanh(a), p.o) + 0.1 * a[:2]), 0),
    "old units": (leaky(lambda p, s, a, x: bt.matmul(jnp.tanh(s.a), p.o)), 0),
    "old readout": (leaky(plain, out=lambda r, y, s: jnp.tanh(r) * s.r), 0),
    "mixed units": (leaky(lambda p, s, a, x: bt.matmul(jax.nn.softmax(a), p.o)), 0),
}


def build(name: str) -> Step:
    params: dict[str, Any] = {"w": (3, 4), "o": (4, 2)}
    states: dict[str, Any] = {"a": 4, "r": 2}
    if name == "rotation":
        params, states = {**params, "v": (3, 4)}, {**states, "b": 4, "q": 2}
    return Step(STEPS[name][0], params, {**states, **OTHER_STATES.get(name, {})})


def in_chunks(learner: Any, xs: list[Any], size: int | None) -> Any:
    step = lambda x: loss(jax.tree.leaves(learner(x)))
    found = compiled(learner, xs[0]).etrace_grad(
        jnp.stack(xs), step_fn=step, chunk_size=size, reduction="sum"
    )
    return {tuple(map(str, k)): v for k, v in found.items()}


@pytest.mark.parametrize("name", every(8, STEPS))
def test_traces_follow_leaky_readouts_where_the_verdict_says_so(name):
    xs = [jnp.asarray(x) for x in np.random.RandomState(1).randn(6, 3)]
    truth = bptt(build(name), xs)
    learner = bt.D_RTRL(build(name))
    found = online(learner, xs)
    differs = {path for path, d in difference(truth, found).items() if not d < ROUND_OFF}
    verdict = learner.report.exactness
    assert differs == set(verdict.weights), (str(verdict), difference(truth, found))
    assert len(find_filters(learner.graph)) == STEPS[name][1]
    assert verdict.exact == bool(STEPS[name][1])
    for size in (2, None):
        assert agree(found, in_chunks(bt.D_RTRL(build(name)), xs, size), ROUND_OFF)


class Net(brainstate.nn.Module):
    def __init__(self, cell: Any) -> None:
        super().__init__()
        brainstate.random.seed(0)
        self.cell, self.readout = cell(), nn.LeakyRateReadout(4, 2)

    def update(self, x: Any) -> Any:
        return self.readout(self.cell(x))


class Spiking(brainstate.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.neuron = nn.Linear(3, 4), nn.ALIF(4, V_th=0.1)

    def update(self, x: Any) -> Any:
        return self.neuron(self.w(x))


@pytest.mark.slow
@pytest.mark.parametrize("cell", [Spiking, pytest.param(lambda: nn.MiniGRU(3, 4), marks=pytest.mark.slow)])
def test_layers_with_leaky_readouts_are_exact_in_steps_chunks_and_episodes(cell):
    xs = jnp.asarray(2 * np.random.RandomState(0).randn(6, 2, 3))
    begins = jnp.asarray(np.random.RandomState(3).rand(6, 2) < 0.3)
    allowed = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    with allowed[0], allowed[1], brainstate.environ.context(dt=1.0 * u.ms):

        def gradient(rule: Any, size: int | None) -> Any:
            learner = bt.compile(Net(cell), rule, xs[0], batch_size=2)
            assert rule is bt.BPTT or learner.report.exactness.exact
            step = lambda x: jnp.sum(learner(x) ** 2)
            return learner.etrace_grad(xs, step_fn=step, chunk_size=size, reset=begins, reduction="sum")

        truth = gradient(bt.BPTT, None)
        assert all(jnp.any(a != 0) for a in jax.tree.leaves(truth))
        for size in (1, 2, None):
            found = gradient(bt.D_RTRL, size)
            assert agree(truth, found, ROUND_OFF), (size, difference(truth, found))


def test_of_functions():
    def step(params: Any, h: Any, x: Any) -> Any:
        a = 0.9 * h[0] + x @ params[0]
        r = 0.8 * h[1] + jnp.tanh(a) @ params[1]
        return (a, r), jnp.tanh(r)

    params = [jnp.asarray(np.random.RandomState(i).randn(3, 3)) for i in range(2)]
    h = (jnp.zeros((2, 3)),) * 2
    xs = jnp.asarray(np.random.RandomState(2).randn(5, 2, 3))
    net = bt.online(step, params, h, xs[0], rule=bt.rules.D_RTRL(), mark="auto")
    assert net.report.exactness.exact
    total = lambda y: jnp.sum(y**2)
    found, *_ = net.grad(total, params, h, net.init(params, h), xs, reduction="sum")
    run = lambda p: jnp.sum(jax.vmap(total)(jax.lax.scan(lambda h, x: step(p, h, x), h, xs)[1]))
    for a, b in zip(found, jax.grad(run)(params), strict=True):
        assert jnp.allclose(a, b, rtol=1e-10, atol=1e-12)


def integrator(keep: Any = lambda p, s, x: 0.9, gain: Any = lambda y: y, reset: Any = lambda v: v) -> Any:
    """A state with a decay, an input gain and a reset."""
    return lambda p, s, x: (
        {"v": (v := keep(p, s, x) * reset(s.v) + gain(bt.matmul(x, p.w, p.b)))},
        jnp.tanh(v) @ p.o,
    )


def coupled(p: Any, s: Any, x: Any) -> Any:
    """Two states with a decay that depends on time, and a norm of the input."""
    y = bt.matmul(x, p.w, p.b)
    v = 0.9 * s.v - 0.2 * s.u + jnp.linalg.norm(x, axis=-1, keepdims=True) * y
    u = jnp.cos(x[..., :1]) * s.u + 0.3 * s.v + 0.5 * y
    return {"v": v, "u": u}, jnp.tanh(v * u) @ p.o


def _squares(v: Any) -> Any:
    return jnp.sum(v**2, axis=-1, keepdims=True)


def spike_reset(stop: Any) -> Any:
    return lambda v: v - stop(vjp_spike(v - 0.1))


# a step, and whether its traces are filtered inputs
INTEGRATORS = {
    "one decay": (integrator(), True),
    "two states": (coupled, True),
    "decay of data": (integrator(lambda p, s, x: jnp.cos(x[..., :1])), True),
    "decay of all states": (integrator(lambda p, s, x: _squares(lax.stop_gradient(s.v))), True),
    "equal decays": (integrator(lambda p, s, x: jnp.asarray([0.9] * 4)), True),
    "reset without derivative": (integrator(reset=spike_reset(lax.stop_gradient)), True),
    "gain of data": (integrator(gain=lambda y: jnp.asarray(BANK[0, 0, 0]) * y), True),
    "each its own decay": (integrator(lambda p, s, x: jnp.asarray([0.9, 0.9, 0.9, 0.8])), False),
    "decay of units": (
        integrator(lambda p, s, x: jnp.cos(x[..., :1]) * jnp.tanh(lax.stop_gradient(s.v))),
        False,
    ),
    "gain of each": (integrator(gain=lambda y: jnp.asarray([0.3, 0.3, 0.3, 0.7]) * y), False),
    "rectified": (integrator(gain=jax.nn.relu), False),
    "reset": (integrator(reset=spike_reset(lambda z: z)), False),
    "reversed": (integrator(reset=lambda v: v[..., ::-1]), True),
    "masked": (integrator(gain=lambda y: jnp.where(jnp.arange(4) < 3, y, 0.0)), False),
}


@pytest.mark.parametrize("name", every(5, INTEGRATORS))
@pytest.mark.parametrize("batched", every(2, [False, True]))
@jax.numpy_rank_promotion("allow")
def test_traces_of_integrators_are_filtered_inputs(name, batched):
    step, is_filter = INTEGRATORS[name]
    shape = (2, 4) if batched else 4
    states: dict[str, Any] = {"v": shape, **({"u": shape} if step is coupled else {})}
    build = lambda: Step(step, {"w": (3, 4), "b": 4, "o": (4, 2)}, states)
    xs = [jnp.asarray(x) for x in np.random.RandomState(1).randn(6, *[2] * batched, 3)]
    truth, learner = bptt(build(), xs), bt.D_RTRL(build())
    found = online(learner, xs)
    num = len(states)
    traces = {tuple(v.value.shape) for v in learner.states(bt.EligibilityTrace).values()}
    lead, units = (num, *[2] * batched), () if is_filter else (4,)
    assert traces == {(*lead, 3, *units), (*lead, *units)}
    exact = learner.report.exactness.exact
    assert exact == (name != "reversed")
    assert agree(found, in_chunks(bt.D_RTRL(build()), xs, 4 if batched else None), ROUND_OFF)
    if exact:
        assert agree(truth, found, ROUND_OFF), difference(truth, found)
        assert agree(truth, in_chunks(bt.D_RTRL(build(), window=2), xs, 4), ROUND_OFF)


@pytest.mark.parametrize("vmap", [False, True])
@pytest.mark.parametrize("unit", [1.0, pytest.param(u.mV, marks=pytest.mark.slow)])
def test_spiking_layers_without_a_derivative_of_the_reset_keep_filtered_inputs(vmap, unit):
    xs = jnp.asarray(2 * np.random.RandomState(0).randn(6, 2, 3))
    begins = jnp.asarray(np.random.RandomState(3).rand(6, 2) < 0.3)

    def layers() -> Any:
        brainstate.random.seed(0)
        into = nn.Linear(3, 4, w_init=brainstate.nn.init.KaimingNormal(unit=u.get_unit(unit)), b_init=None)
        neuron = nn.LIF(4, R=5.0, V_th=0.2 * unit, reset_gradient=False)
        return brainstate.nn.Sequential(into, neuron, brainstate.nn.Linear(4, 2))

    allowed = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    with allowed[0], allowed[1], brainstate.environ.context(dt=1.0 * u.ms):

        def gradient(rule: Any, size: int | None) -> Any:
            learner = bt.compile(layers(), rule, xs[0], batch_size=2, vmap=vmap)
            traces = [v.value for v in learner.states(bt.EligibilityTrace).values()]
            assert sum(a.size for a in jax.tree.leaves(traces)) == (0 if rule is bt.BPTT else 2 * 3)
            step = lambda x: jnp.sum(learner(x) ** 2)
            return learner.etrace_grad(xs, step_fn=step, chunk_size=size, reset=begins, reduction="sum")

        truth = gradient(bt.BPTT, None)
        mantissas = lambda tree: jax.tree.map(
            u.get_mantissa, tree, is_leaf=lambda a: isinstance(a, u.Quantity)
        )
        assert all(jnp.any(a != 0) for a in jax.tree.leaves(mantissas(truth)))
        for size in (1, 2, None):
            assert agree(mantissas(truth), mantissas(gradient(bt.D_RTRL, size)), ROUND_OFF)
