"""Random estimates of the influence of parameters: their definitions, and that they are right on average."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace._rules.rank import per_sample
from braintrace.rules import KF_RTRL, UORO

from ..oracle import Brute
from ..run import agree, compiled, difference, every, online, sequence
from ..zoo import CASES

KEY, EPS = 3, 1e-12


def places(learner: Any, brute: Brute) -> tuple[list[int], int | None]:
    """The states of which a sample's numbers are, as the oracle counts them, and the axis of samples."""
    samples = per_sample(learner.executor, "auto", traces=False).samples
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
    sites = [w.site.index for w in per_sample(learner.executor, "auto", traces=False).sites]
    expected = brute.kf_rtrl(xs, *places(learner, brute), sites, KEY, EPS)
    assert agree(expected, found, 1e-9), difference(expected, found)


@pytest.mark.parametrize("name", ["conv", "leaky_three_axes"])
def test_kf_rtrl_refuses_what_is_no_product(name):
    case = CASES[name]
    with pytest.raises(braintrace.NotSupportedError, match=r"(`w`|`k`) of `etp_(conv|matmul)` at .*zoo.py"):
        compiled(braintrace.KF_RTRL(case.build()), sequence(case, 1)[0])


# -- right on average ----------------------------------------------------------------------------------------

B, N, X, T, KEYS = 2, 3, 2, 5, 4000


def step(params: Any, h: Any, x: Any) -> Any:
    h = 0.5 * h + jnp.tanh(x @ params["w"] + h @ params["v"] + params["b"][None])
    return h, h


@pytest.mark.parametrize(("rule", "window"), every(2, [(UORO(), 1), (UORO(), 2), (KF_RTRL(), 1)]), ids=str)
def test_they_are_right_on_average(rule, window):
    rng = np.random.RandomState(0)
    params = {"w": rng.randn(X, N), "v": 0.7 * rng.randn(N, N), "b": 0.3 * rng.randn(N)}
    params, start = jax.tree.map(jnp.asarray, params), jnp.asarray(rng.randn(B, N))
    xs, ys = jnp.asarray(rng.randn(T, B, X)), jnp.asarray(rng.randn(T, B, N))
    loss = lambda y, target: jnp.sum((y - target) ** 2)
    net = braintrace.online(step, params, start, xs[0], rule=rule, window=window)
    traces = net.init(params, start)
    (count,) = (k for k in traces if traces[k].dtype == jnp.int32)

    def gradient(first: Any) -> Any:
        begun = {**traces, count: first[None]}
        return net.grad(loss, params, start, begun, xs, ys, reduction="sum")[0]

    found = jax.jit(jax.vmap(gradient))(T * jnp.arange(KEYS, dtype=jnp.int32))
    exact = net.with_rule(braintrace.rules.BPTT())
    truth = exact.grad(loss, params, start, exact.init(params, start), xs, ys, reduction="sum")[0]
    errors = {k: (np.asarray(found[k]) - np.asarray(truth[k])).reshape(KEYS, -1) for k in truth}
    for k, e in errors.items():
        standard = e.std(0) / np.sqrt(KEYS)
        assert np.all(standard > 0), k
        assert np.all(np.abs(e.mean(0)) < 3 * standard), (k, e.mean(0) / standard)
