"""SnAp(n): its definition, what it becomes with many steps, its patterns, and how large they may be."""

from __future__ import annotations

import pytest

import braintrace

from ..oracle import Brute, bptt
from ..run import agree, compiled, difference, online, sequence
from ..zoo import CASES
from .test_estimates import places


@pytest.mark.parametrize(
    ("name", "n", "window"),
    [("ring", 2, 1), ("ring", 3, 2), ("rnn_batched", 1, 1), ("gru_fused", 1, 2), ("conv_of_state", 1, 1)],
)
def test_it_equals_its_definition(name, n, window):
    case = CASES[name]
    xs = sequence(case, 5)
    learner = compiled(braintrace.SnAp(case.build(), n), xs[0])
    found = online(learner, xs, window)
    brute = Brute(case.build(), xs[0], learner.graph)
    expected = brute.snap(xs, window, n, places(learner, brute)[0])
    assert agree(expected, found, 1e-10), difference(expected, found)
    truth = bptt(case.build(), xs)
    assert learner.report.exactness.exact == agree(truth, found, 1e-10) is False


@pytest.mark.parametrize(
    "name",
    ["two_layers", "mod_relu_rnn", "lstm_fused", "sparse_batched", "conv_lhs_dilated", "rule_reads_more"],
)
def test_with_many_steps_it_is_rtrl(name):
    case = CASES[name]
    xs = sequence(case, 4)
    learner = braintrace.SnAp(case.build(), 9)
    found, truth = online(learner, xs, 1), bptt(case.build(), xs)
    assert agree(truth, found, 1e-10), difference(truth, found)
    assert learner.report.exactness.exact, str(learner.report.exactness)


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
    assert all(later < earlier for earlier, later in zip(errors[:4], errors[1:5], strict=True)), errors
    assert errors[5] < 1e-12, errors
