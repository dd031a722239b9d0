"""Gradients beside those of BPTT: numbers, words, and states left as they were."""

from __future__ import annotations

import json

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace as bt

from ..oracle import bptt, loss
from ..run import compiled, sequence
from ..zoo import CASES

pytestmark = pytest.mark.slow


def run(name, rule="D_RTRL", **options):
    case = CASES[name]
    xs = sequence(case)
    learner = compiled(getattr(bt, rule)(case.build()), xs[0])
    check = bt.check_gradients(
        learner, jnp.stack(xs), step_fn=lambda x: loss(learner(x)), reduction="sum", **options
    )
    return case, xs, learner, check


def test_an_exact_model_is_equal():
    _, _, _, check = run("leaky_batched")
    assert check.equal
    assert check.ok
    assert check.relative_error < 1e-10
    assert check.explanation == "D_RTRL gives the gradient of BPTT, to round-off."


def test_a_difference_of_the_rule_is_told_from_the_paths_it_drops():
    case, xs, learner, check = run("two_layers_of_one_shape")
    (first, second) = check.parameters
    assert (first.path, first.cause, second.cause) == (("w1",), "rule", "equal")
    truth = bptt(case.build(), xs)
    found = learner.etrace_grad(jnp.stack(xs), step_fn=lambda x: loss(learner(x)), reduction="sum")
    a, b = (np.ravel(g[("w1",)]) for g in (found, truth))
    np.testing.assert_allclose(first.relative_error, np.linalg.norm(a - b) / np.linalg.norm(b), rtol=1e-8)
    np.testing.assert_allclose(first.cosine, a @ b / np.linalg.norm(a) / np.linalg.norm(b), rtol=1e-8)
    np.testing.assert_allclose(first.norm_ratio, np.linalg.norm(a) / np.linalg.norm(b), rtol=1e-8)
    assert "`w1` is due to the rule" in check.explanation
    assert "what `b` keeps of `a` through `matmul` of `w2`" in check.explanation
    for text in (str(check), check._repr_html_(), json.dumps(check.to_dict())):
        assert "w1" in text
        assert "relative" in text


def test_a_difference_beyond_round_off_on_an_exact_model_is_numerical():
    _, _, _, check = run("leaky", tolerance=0.0)
    assert not check.ok
    assert "is numerical: it is not due to a truncated path" in check.explanation


def test_states_traces_and_random_numbers_stay_as_they_are():
    learner = compiled(bt.D_RTRL(CASES["gru"].build()), jnp.ones(3))
    learner(jnp.ones(3))
    states = {**learner.states(), "key": brainstate.random.DEFAULT}
    before = {k: jax.tree.leaves(st.value) for k, st in states.items()}
    dropout = brainstate.nn.Dropout(0.5)

    def step(x):
        with brainstate.environ.context(fit=True):
            return jnp.sum(dropout(learner(x)) ** 2)

    check = bt.check_gradients(learner, jnp.ones((4, 3)), step_fn=step)
    assert all(
        a is b for k, st in states.items() for a, b in zip(jax.tree.leaves(st.value), before[k], strict=True)
    )
    assert check.cosine > 0.9  # both saw the same units dropped
    assert learner.update.__func__ is type(learner).update


def test_windows_are_compared_window_by_window():
    case = CASES["gru"]
    xs = jnp.stack(sequence(case, 6))
    learner = compiled(bt.D_RTRL(case.build(), vjp_method="multi-step"), xs[0])
    step = lambda x: jax.vmap(loss)(learner(bt.MultiStepData(x)))
    assert bt.check_gradients(learner, xs, step_fn=step, chunk_size=6).equal
    check = bt.check_gradients(learner, xs, step_fn=step, chunk_size=2)
    assert not check.equal
    assert check.ok


def test_rtrl_is_equal_on_a_recurrent_model():
    assert run("rnn", "RTRL")[-1].equal


def test_a_learner_must_be_compiled():
    learner = bt.D_RTRL(CASES["rnn"].build())
    with pytest.raises(bt.CompilationError, match="compile_graph"):
        bt.check_gradients(learner, jnp.ones((4, 3)), step_fn=lambda x: loss(learner(x)))


def test_random_feedback_is_there_in_a_check():
    case = CASES["rnn_batched"]
    xs = sequence(case)
    learner = compiled(bt.RFLO(case.build()), xs[0])
    step_fn = lambda *x: loss(jax.tree.leaves(learner(*x)))
    check = bt.check_gradients(learner, jnp.stack(xs), step_fn=step_fn)
    assert all(p.cosine != 0 for p in check.parameters)


def test_a_signal_of_the_call_is_not_passed_to_the_model():
    case = CASES["leaky_batched"]
    xs = sequence(case)
    learner = compiled(bt.ThreeFactor(case.build()), xs[0])
    step_fn = lambda x: loss(learner(x, modulator=1.0))
    check = bt.check_gradients(learner, jnp.stack(xs), step_fn=step_fn)
    assert all(0 < abs(p.cosine) < 1 for p in check.parameters)


class Normalized(brainstate.nn.Module):
    """A bias before a normalisation, which takes it away again."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.asarray(np.random.RandomState(0).randn(3, 4)))
        self.b = brainstate.ParamState(jnp.ones(4))
        self.h = brainstate.HiddenState(jnp.zeros((5, 4)))

    def update(self, x):
        y = bt.matmul(x, self.w.value, self.b.value)
        self.h.value = 0.9 * self.h.value + (y - y.mean(0, keepdims=True)) / y.std(0, keepdims=True)
        return self.h.value


def test_what_cancels_is_round_off():
    learner = bt.RTRL(Normalized())
    xs = jnp.asarray(np.random.RandomState(1).randn(6, 5, 3))
    learner.compile_graph(xs[0])
    check = bt.check_gradients(learner, xs, step_fn=lambda x: loss(learner(x)))
    by_path = {p.path: p for p in check.parameters}
    assert by_path["b",].norm < 1e-12 < by_path["w",].norm
    assert by_path["b",].relative_error > check.tolerance
    assert check.equal


def test_masked_targets_may_be_anything():
    learner = bt.RTRL(Normalized())
    xs = jnp.asarray(np.random.RandomState(1).randn(3, 5, 3))
    learner.compile_graph(xs[0])
    ys = jnp.asarray([0, jnp.nan, jnp.inf])[:, None, None] * jnp.ones((3, 5, 4))
    mask = jnp.asarray([1.0, 0, 0])
    check = bt.check_gradients(learner, xs, ys, step_fn=lambda x, y: loss(learner(x) - y), mask=mask)
    assert check.equal
