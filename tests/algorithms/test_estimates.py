"""Random estimates of the influence of parameters: their definitions, and that they are right on average."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace._executor.per_sample import find_per_sample
from braintrace.rules import KF_RTRL, UORO

from ..oracle import Brute
from ..run import agree, compiled, difference, every, online, sequence
from ..zoo import CASES

KEY, EPS = 3, 1e-12


def places(learner: Any, brute: Brute) -> tuple[list[int], int | None]:
    """The states of which a sample's numbers are, as the oracle counts them, and the axis of samples."""
    samples = find_per_sample(learner.executor, "auto", traces=False).samples
    at = [(e.path, i, v) for e in learner.graph.module_info.marked.carried for i, v in enumerate(e.invars)]
    leaves = []
    for var in samples.carried:
        ((path, i),) = ((path, i) for path, i, v in at if v is var)
        leaves.append([n for n, p in enumerate(brute.f.state_paths) if p == path][i])
    return leaves, samples.axis


@pytest.mark.parametrize(
    ("name", "window"),
    every(3, [("gru_fused", 2), ("rnn_batched", 1), ("conv_of_state", 1), ("two_layers", 1), ("lstm", 2)]),
)
def test_uoro_equals_its_definition(name, window):
    case = CASES[name]
    xs = sequence(case, 5)
    learner = compiled(braintrace.UORO(case.build(), projection_key=KEY), xs[0])
    found = online(learner, xs, window)
    brute = Brute(case.build(), xs[0], learner.graph)
    expected = brute.uoro(xs, window, *places(learner, brute), KEY, EPS)
    assert agree(expected, found, 1e-9), difference(expected, found)


@pytest.mark.parametrize(
    "name", every(2, ["rnn_batched", "gru", "embedding", "lstm_fused", "grouped_matmul"])
)
def test_kf_rtrl_equals_its_definition(name):
    case = CASES[name]
    xs = sequence(case, 4)
    learner = compiled(braintrace.KF_RTRL(case.build(), projection_key=KEY), xs[0])
    found = online(learner, xs, 1)
    brute = Brute(case.build(), xs[0], learner.graph)
    sites = [w.site.index for w in find_per_sample(learner.executor, "auto", traces=False).sites]
    expected = brute.kf_rtrl(xs, *places(learner, brute), sites, KEY, EPS)
    assert agree(expected, found, 1e-9), difference(expected, found)


@pytest.mark.parametrize("name", ["conv", "leaky_three_axes"])
def test_kf_rtrl_refuses_what_is_no_product(name):
    case = CASES[name]
    with pytest.raises(braintrace.NotSupportedError, match=r"(`w`|`k`) of `etp_(conv|matmul)` at .*zoo.py"):
        compiled(braintrace.KF_RTRL(case.build()), sequence(case, 1)[0])


# -- right on average ----------------------------------------------------------------------------------------

B, N, X, T, KEYS, RESETS = 2, 3, 2, 5, 4000, 300


def step(params: Any, h: Any, x: Any) -> Any:
    h = 0.5 * h + jnp.tanh(x @ params["w"] + h @ params["v"] + params["b"][None])
    return h, h


def problem(rule: Any, window: int) -> Any:
    """The functions of a rule, traces at their start, a gradient from some traces, and that of BPTT."""
    rng = np.random.RandomState(0)
    params = {"w": rng.randn(X, N), "v": 0.7 * rng.randn(N, N), "b": 0.3 * rng.randn(N)}
    params, start = jax.tree.map(jnp.asarray, params), jnp.asarray(rng.randn(B, N))
    xs, ys = jnp.asarray(rng.randn(T, B, X)), jnp.asarray(rng.randn(T, B, N))
    loss = lambda y, target: jnp.sum((y - target) ** 2)
    net = braintrace.online(step, params, start, xs[0], rule=rule, window=window)

    def gradient(net: Any, traces: Any) -> Any:
        grads, after, _ = net.grad(loss, params, start, traces, xs, ys, reduction="sum")
        return grads, after

    exact = net.with_rule(braintrace.rules.BPTT())
    begin = lambda **options: net.init(params, start, **options)
    return net, begin, gradient, gradient(exact, exact.init(params, start))[0]


def assert_right_on_average(found: Any, truth: Any, most: float) -> None:
    for k in truth:
        e = (np.asarray(found[k]) - np.asarray(truth[k])).reshape(len(found[k]), -1)
        standard = e.std(0) / np.sqrt(len(e))
        assert np.all(standard > 0), k
        assert np.all(np.abs(e.mean(0)) < most * standard), (k, e.mean(0) / standard)


@pytest.mark.parametrize(("rule", "window"), every(2, [(UORO(), 1), (UORO(), 2), (KF_RTRL(), 1)]), ids=str)
def test_they_are_right_on_average(rule, window):
    net, begin, gradient, truth = problem(rule, window)
    traces = begin()
    (count,) = (k for k in traces if traces[k].dtype == jnp.int32)
    first = T * jnp.arange(KEYS, dtype=jnp.int32)
    found = jax.jit(jax.vmap(lambda n: gradient(net, {**traces, count: n[None]})[0]))(first)
    assert_right_on_average(found, truth, 3)


@pytest.mark.parametrize("rule", [UORO(), KF_RTRL()], ids=str)
def test_sequences_have_signs_of_their_own(rule):
    net, begin, gradient, truth = problem(rule, 1)

    def body(traces: Any, _: Any) -> Any:
        grads, after = gradient(net, traces)
        return net.reset(*after)[1], grads

    resets = jax.jit(lambda traces: jax.lax.scan(body, traces, length=RESETS)[1])(begin())
    assert_right_on_average(resets, truth, 4)
    found = jax.jit(jax.vmap(lambda key: gradient(net, begin(key=key))[0]))(jnp.arange(RESETS))
    assert_right_on_average(found, truth, 4)
    key = jax.random.key(1)
    for given in (key, jax.random.key_data(key)):
        jax.tree.map(np.testing.assert_array_equal, begin(key=given), begin(key=1))
