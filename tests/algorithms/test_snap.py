"""SnAp(n): its definition, what it becomes with many steps, its patterns, and how large they may be."""

from __future__ import annotations

import itertools
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace

from ..oracle import Brute, bptt
from ..run import agree, by_bptt, compiled, difference, every, online, sequence
from ..zoo import CASES, Step
from .test_estimates import places


@pytest.mark.parametrize(
    ("name", "n", "window"),
    every(
        2,
        [("ring", 2, 1), ("gru_fused", 1, 2), ("rnn_batched", 1, 1), ("ring", 3, 2), ("conv_of_state", 1, 1)],
    ),
)
def test_it_equals_its_definition(name, n, window):
    case = CASES[name]
    xs = sequence(case, 6)
    learner = compiled(braintrace.ETraceVjpAlgorithm(case.build(), braintrace.rules.SnAp(n)), xs[0])
    found = online(learner, xs, window)
    brute = Brute(case.build(), xs[0], learner.graph)
    expected = brute.snap(xs, window, n, places(learner, brute)[0])
    assert agree(expected, found, 1e-10), difference(expected, found)
    truth = by_bptt(name, 6)
    assert learner.report.exactness.exact == agree(truth, found, 1e-10) is False


@pytest.mark.parametrize(
    "name",
    every(2, ["two_layers", "mod_relu_rnn", "sparse_batched", "conv_lhs_dilated", "rule_reads_more"]),
)
def test_with_many_steps_it_is_rtrl(name):
    case = CASES[name]
    xs = sequence(case, 4)
    learner = braintrace.SnAp(case.build(), 9)
    found, truth = online(learner, xs, 1), by_bptt(name)
    assert agree(truth, found, 1e-10), difference(truth, found)
    assert learner.report.exactness.exact, str(learner.report.exactness)


@pytest.mark.slow
def test_on_a_ring_the_error_falls_with_every_step_that_is_followed():
    case = CASES["ring"]
    xs = sequence(case, 8)
    truth, errors = bptt(case.build(), xs), []
    for n in range(1, 7):
        learner = braintrace.SnAp(case.build(), n)
        errors.append(max(difference(truth, online(learner, xs)).values()))
        assert learner.report.exactness.exact == (n >= 6)
        kept = sum(st.value.size for st in learner.traces.values())
        assert kept == n * 6 * 5  # of each unit: three inputs and two units
    assert all(later < earlier for earlier, later in itertools.pairwise(errors)), errors
    assert errors[5] < 1e-12, errors
    found = [online(rule(case.build()), xs) for rule in (braintrace.OSTLRecurrent, braintrace.D_RTRL)]
    error = [max(difference(truth, grads).values()) for grads in found]
    assert abs(error[0] - errors[0]) < 1e-12 < abs(error[1] - errors[0])


MASK = np.eye(6) + np.eye(6, k=1) + np.eye(6, k=-5)  # the ring, as a mask


def chosen(w: Any) -> Any:
    return jnp.where(MASK.T == 0, jnp.zeros_like(w), w.T).T


@pytest.mark.parametrize("mask", [lambda w: w * MASK, chosen])
def test_a_mask_makes_a_pattern(mask):
    def masked(p, s, x):
        h = jnp.tanh(braintrace.matmul(x, p.wi) + braintrace.matmul(s.h, mask(p.w)))
        return {"h": h}, h

    learner = braintrace.SnAp(Step(masked, {"wi": (3, 6), "w": (6, 6)}, {"h": 6}), 2)
    compiled(learner, jnp.zeros(3))
    assert sum(st.value.size for st in learner.traces.values()) == 2 * 6 * 5


def test_a_convolution_reaches_its_neighbours():
    def images(p, s, x):
        h = jnp.tanh(x + braintrace.conv(s.h, p.k))
        return {"h": h}, h

    learner = braintrace.SnAp(Step(images, {"k": (1, 1, 3)}, {"h": (2, 1, 9)}), 2)
    compiled(learner, jnp.zeros((2, 1, 9)))
    pattern = learner.rule._influence(learner.executor)
    assert np.array_equal(pattern.moves, np.abs(np.subtract.outer(np.arange(9), np.arange(9))) < 2)


def test_too_large_a_pattern_is_refused_with_its_size():
    case = CASES["rnn_batched"]
    learner = braintrace.SnAp(case.build(), snap_max_jacobian_elements=2 * 4 * 28 - 1)
    with pytest.raises(braintrace.NotSupportedError, match=r"224 numbers.*max_jacobian_elements=223"):
        compiled(learner, sequence(case, 1)[0])
    with pytest.raises(ValueError, match="`n` is a number of steps"):
        braintrace.SnAp(case.build(), 0)


# -- sequences -----------------------------------------------------------------------------------------------

T, B = 6, 2
FLAGS = np.array([[False, True], [False] * 2, [True, False], [False] * 2, [True, True], [False] * 2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "window"),
    every(2, [(rule, window) for rule in ("snap", "uoro", "kf_rtrl") for window in (1, 2)]),
)
def test_sequences_episodes_and_what_is_kept(rule, window):
    rng = np.random.RandomState(0)
    xs, ys = jnp.asarray(rng.randn(T, B, 2)), jnp.asarray(rng.randn(T, B, 3))

    def made() -> Any:
        brainstate.random.seed(0)
        with jax.numpy_rank_promotion("allow"):
            cell = braintrace.nn.ValinaRNNCell(2, 3, activation="tanh")
        return braintrace.compile(cell, rule, xs[0], batch_size=B, window=window)

    def call(learner: Any) -> Any:
        def grads(xs: Any, ys: Any) -> Any:
            loss = lambda: jnp.sum((learner(braintrace.MultiStepData(xs)) - ys) ** 2)
            return brainstate.transform.grad(loss, learner.param_states)()

        return brainstate.transform.jit(grads)

    calls, total = made(), None
    by_hand = call(calls)
    for t in range(0, T, window):
        calls.reset_state(rows=FLAGS[t])
        grads = by_hand(xs[t : t + window], ys[t : t + window])
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    learner = made()
    loss = lambda x, y: jnp.sum((learner(x) - y) ** 2)
    found = learner.etrace_grad(xs, ys, step_fn=loss, reset=FLAGS, reduction="sum")
    assert agree(total, found, 1e-10), difference(total, found)
    for key, state in calls.traces.items():
        np.testing.assert_allclose(learner.traces[key].value, state.value, atol=1e-10)
    # another learner goes on from what was kept
    other = made()
    for key, state in calls.traces.items():
        other.traces[key].value = jnp.asarray(np.asarray(state.value))
    for key, state in calls.model.states().items():
        other.model.states()[key].value = state.value
    now = call(other)(xs[:window], ys[:window])
    jax.tree.map(np.testing.assert_array_equal, by_hand(xs[:window], ys[:window]), now)


def test_as_points_on_axes():
    of = lambda **axes: braintrace.ETraceConfig(**axes).rule()
    assert of(recurrence_scope="sparse_n", sparse_n=3) == braintrace.rules.SnAp(3)
    assert of(recurrence_scope="sparse_n", sparse_n=1) == of(recurrence_scope="coupled")
    uoro = of(trace_factorization="random_projection", recurrence_scope="coupled")
    assert uoro == braintrace.rules.UORO()
    with pytest.raises(ValueError, match="'coupled'"):
        of(trace_factorization="random_projection")
    with pytest.raises(ValueError, match="back-propagated"):
        of(recurrence_scope="sparse_n", sparse_n=2, learning_signal="random_feedback")
