"""Across layers: exact stacks, what is kept of the others, and what the verdict says of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import nn
from braintrace._rules import layers

from ..oracle import Brute, bptt
from ..run import agree, by_bptt, compiled, difference, every, in_one_pass, online, sequence
from ..zoo import CASES, Step

ROUND_OFF = 1e-10
BATCH = 2


@contextmanager
def lenient() -> Iterator[None]:
    """brainstate's own layers add axes and mix types."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Stack(brainstate.nn.Module):
    def __init__(self, *layers: Any) -> None:
        super().__init__()
        brainstate.random.seed(0)
        self.layers = [make(*sizes) for make, *sizes in layers]

    def update(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class Spiking(brainstate.nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.w = nn.Linear(num_in, num_out, w_init=drawn)
        self.neuron = nn.LIF(num_out, V_th=0.5)

    def update(self, x: Any) -> Any:
        return self.neuron(self.w(x))


def drawn(shape: Any, **_: Any) -> Any:
    return jnp.asarray(np.random.RandomState(sum(shape)).randn(*shape))


def stack(*layers: Any) -> Stack:
    with lenient():
        model = Stack(*layers)
        brainstate.nn.init_all_states(model, batch_size=BATCH)
    return model


def data(length: int = 5) -> list[Any]:
    return list(jnp.asarray(2 * np.random.RandomState(0).randn(length, BATCH, 3)))


STACKS = {
    "lif": [(Spiking, 3, 4), (Spiking, 4, 3), (nn.LeakyRateReadout, 3, 2)],
    "lru": [(nn.LRUCell, 3, 4), (nn.LRUCell, 3, 2)],
    "mini_gru": [(nn.MiniGRU, 3, 4), (nn.MiniGRU, 4, 2), (nn.MiniGRU, 2, 3), (nn.MiniGRU, 3, 2)],
    "blocks": [
        (nn.Linear, 3, 4),
        (lambda d: nn.DiagonalBlock(d, nn.RTUCell(d, 2, activation="tanh")), 4),
        (lambda d: nn.DiagonalBlock(d, nn.ELSTMCell(d, 3)), 4),
    ],
    "encoder": [(nn.Linear, 3, 2), (nn.MiniGRU, 2, 3), (nn.Linear, 3, 2), (nn.MiniGRU, 2, 2)],
}


@cache
def of_stack(name: str) -> tuple[Any, Any]:
    """Its gradient through time, and that of diagonal traces alone."""
    with lenient(), brainstate.environ.context(dt=1.0 * u.ms):
        learner = braintrace.D_RTRL(stack(*STACKS[name]))
        return bptt(stack(*STACKS[name]), data()), online(learner, data())


@pytest.mark.slow
@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("window", [1, 2])
def test_a_stack_of_diagonal_layers_equals_bptt(name, window):
    truth, diagonal = of_stack(name)
    with lenient(), brainstate.environ.context(dt=1.0 * u.ms):
        learner = braintrace.D_RTRL(stack(*STACKS[name]), across="layers")
        found = online(learner, data(), window)
        assert agree(truth, found, ROUND_OFF), difference(truth, found)
        assert learner.report.exactness.exact, str(learner.report.exactness)
        assert not learner.report.excluded_weights.keys() & set(learner.report.exactness.weights)
        assert not agree(truth, diagonal, 0.1)


LAYERED = [n for n, c in CASES.items() if c.kind in ("layers", "state") and not c.exact]
MORE = ["tied_layers", "gru", "plain_input_weight", "lif_and_leaky_readout"]


@pytest.mark.parametrize("name", every(3, [*LAYERED, *MORE]))
def test_it_equals_bptt_where_and_only_where_the_verdict_is_exact(name):
    case, truth = CASES[name], by_bptt(name)
    learner = braintrace.D_RTRL(case.build(), across="layers")
    found = online(learner, sequence(case))
    differs = {path for path, d in difference(truth, found).items() if not d < ROUND_OFF}
    verdict = learner.report.exactness
    assert differs == set(verdict.weights), (str(verdict), difference(truth, found))


def recurrent_above(p: Any, s: Any, x: Any) -> Any:
    a = 0.9 * s.a + braintrace.matmul(x, p.w)
    b = jnp.tanh(0.5 * s.b + braintrace.matmul(jnp.tanh(a), p.v) + braintrace.matmul(s.b, p.r))
    return {"a": a, "b": b}, b


def recurrent_below(p: Any, s: Any, x: Any) -> Any:
    a = jnp.tanh(0.5 * s.a + braintrace.matmul(x, p.w) + braintrace.matmul(s.a, p.r))
    b = 0.9 * s.b + braintrace.matmul(a, p.v)
    return {"a": a, "b": b}, jnp.tanh(b)


def feedback(p: Any, s: Any, x: Any) -> Any:
    a = 0.9 * s.a + braintrace.matmul(x, p.w) + braintrace.matmul(s.b, p.r)
    b = 0.8 * s.b + braintrace.matmul(jnp.tanh(a), p.v)
    return {"a": a, "b": b}, jnp.tanh(b)


@pytest.mark.parametrize(
    ("step", "above"),
    [
        (recurrent_above, {"w": "b"}),
        pytest.param(recurrent_below, {"w": "b", "r": "b"}, marks=pytest.mark.slow),
        pytest.param(feedback, {}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("window", every(2, [2, 1]))
def test_it_equals_its_definition_where_it_is_approximate(step, above, window):
    back = (3, 4) if step is feedback else (4, 4)
    b, v = ((3,), (4, 3)) if step is feedback else ((4,), (4, 4))
    build = lambda: Step(step, {"w": (3, 4), "v": v, "r": back}, {"a": 4, "b": b})
    xs = [jnp.asarray(x) for x in np.random.RandomState(1).randn(5, 3)]
    learner = compiled(braintrace.D_RTRL(build(), across="layers", window=window), xs[0])
    expected = Brute(build(), xs[0], learner.graph).d_rtrl_across(xs, window, above)
    for found in (online(braintrace.D_RTRL(build(), across="layers"), xs, window), in_one_pass(learner, xs)):
        assert agree(expected, found, ROUND_OFF), difference(expected, found)
    truth = bptt(build(), xs)
    differs = {path for path, d in difference(truth, found).items() if not d < ROUND_OFF}
    assert differs
    assert differs == set(learner.report.exactness.weights)


def test_in_sequences_with_episodes_it_is_bptt():
    xs = jnp.stack(data(6))
    begins = jnp.asarray(np.random.RandomState(3).rand(6, BATCH) < 0.3)
    results = []
    with lenient():
        for rule, options in ((braintrace.BPTT, {}), (braintrace.D_RTRL, {"across": "layers", "window": 2})):
            model = Stack((nn.MiniGRU, 3, 2), (nn.MiniGRU, 2, 2))
            learner = braintrace.compile(model, rule, xs[0], batch_size=BATCH, **options)
            step = lambda x, learner=learner: jnp.sum(learner(x) ** 2)
            results.append(learner.etrace_grad(xs, step_fn=step, reset=begins, reduction="sum"))
    assert agree(*results, ROUND_OFF), difference(*results)


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_pass_is_a_pass_for_each_window(fresh):
    xs, flags = jnp.stack(data(7)), np.eye(7, BATCH, -1, dtype=bool)  # at the start of a window and inside
    mask, results = jnp.asarray([1.0, 0, 1, 1, 2, 0, 1]), []
    for chunk_size in (1, 4, None):  # windows of two, the first of one
        with lenient():
            model = Stack((nn.MiniGRU, 3, 2), (nn.GRUCell, 2, 3), (nn.MiniGRU, 3, 2))
            learner = braintrace.compile(
                model, braintrace.D_RTRL, xs[0], batch_size=BATCH, across="layers", window=2
            )
            rng = np.random.RandomState(0)
            for _, state in sorted(learner.traces.items() if not fresh else ()):
                state.value = jnp.asarray(rng.randn(*state.value.shape))
            step = lambda x, learner=learner: jnp.sum(learner(x) ** 2)
            grads = learner.etrace_grad(xs, mask=mask, step_fn=step, reset=flags, chunk_size=chunk_size)
        results.append({**grads, **{k: st.value for k, st in learner.traces.items()}})
    for found in results[1:]:
        assert agree(results[0], found, ROUND_OFF), difference(results[0], found)


def test_of_functions():
    def step(params: Any, h: Any, x: Any) -> Any:
        a = 0.9 * h[0] + x @ params[0]
        b = 0.8 * h[1] + jnp.tanh(a) @ params[1]
        return (a, b), jnp.tanh(b)

    params = [jnp.asarray(np.random.RandomState(i).randn(3, 3)) for i in range(2)]
    h, xs = (jnp.zeros((BATCH, 3)),) * 2, jnp.stack(data())
    rule = braintrace.rules.D_RTRL(across="layers")
    net = braintrace.online(step, params, h, xs[0], rule=rule, mark="auto")
    assert net.report.exactness.exact
    loss = lambda y: jnp.sum(y**2)
    found, *_ = net.grad(loss, params, h, net.init(params, h), xs, reduction="sum")
    run = lambda p: jnp.sum(jax.vmap(loss)(jax.lax.scan(lambda h, x: step(p, h, x), h, xs)[1]))
    for a, b in zip(found, jax.grad(run)(params), strict=True):
        assert jnp.allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_its_memory_is_planned_and_refused_where_it_does_not_fit(monkeypatch):
    xs = jnp.stack(data())
    with lenient():
        model = stack((nn.MiniGRU, 3, 4), (nn.MiniGRU, 4, 2))
        plan = braintrace.plan(model, xs[0], BATCH, 5, rules=["D_RTRL"], chunk_sizes=[5], across="layers")
        row = plan.row("D_RTRL", window=1)
        more = BATCH * 2 * (3 + 1) * 8 * 8  # samples, units above, weights and biases, bytes
        assert row.trace_bytes == plan.row("D_RTRL").trace_bytes + more
        assert row.exact
        assert "across layers" in str(plan)
        monkeypatch.setattr(layers, "device_memory", lambda: 1000)
        with pytest.raises(braintrace.NotSupportedError, match=r"layers.0.W.*->layers.1.h.* takes .*B"):
            braintrace.D_RTRL(model, across="layers").compile_graph(xs[0])


def test_what_cannot_be_asked_for():
    with pytest.raises(ValueError, match="`across` is 'layers'"):
        braintrace.rules.D_RTRL(across="units")
    with pytest.raises(ValueError, match="pass one of them"):
        braintrace.rules.D_RTRL(across="layers", rank=2)
