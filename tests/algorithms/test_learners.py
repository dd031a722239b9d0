"""How learners behave: calls, errors, copies, types, transforms and sequences."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import warnings
from functools import partial

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import nn
from braintrace._executor import trace_math
from braintrace._frontends.pure import Pure
from braintrace._learners.rule_choice import NAMES
from braintrace._rules import d_rtrl

from ..oracle import bptt
from ..run import agree, difference, online, sequence
from ..zoo import CASES

BATCH, LENGTH = 2, 6


@pytest.fixture(autouse=True)
def lenient():
    """brainstate's own layers add axes and mix types."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


class Net(brainstate.nn.Module):
    """A GRU and a plain readout."""

    def __init__(self, cell=nn.GRUCell, seed=0):
        super().__init__()
        brainstate.random.seed(seed)
        self.cell = cell(3, 4)
        self.readout = brainstate.nn.Linear(4, 2)

    def update(self, x):
        return jnp.tanh(self.readout(self.cell(x)))


def net(batch_size=BATCH, dtype=float, cell=nn.GRUCell):
    model = Net(cell)
    brainstate.nn.init_all_states(model, batch_size=batch_size)
    for state in model.states().values():
        state.value = jax.tree.map(lambda a: a.astype(dtype), state.value)
    return model


def data(length=LENGTH, batch_size=BATCH, seed=0):
    rng = np.random.RandomState(seed)
    shape = () if batch_size is None else (batch_size,)
    return jnp.asarray(rng.randn(length, *shape, 3)), jnp.asarray(rng.randn(length, *shape, 2))


def learner_of(rule=braintrace.D_RTRL, batch_size=BATCH, **options):
    learner = rule(net(batch_size), **options)
    learner.compile_graph(data(1, batch_size)[0][0])
    return learner


def squared(learner):
    return lambda x, y: jnp.sum((learner(x) - y) ** 2)


def gradient_of_step(learner, x, y):
    params = learner.model.states(brainstate.ParamState)
    return brainstate.transform.grad(lambda: squared(learner)(x, y), params)()


def equal(a, b):
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool(jnp.all(x == y)), a, b)))


# -- mistakes ---------------------------------------------------------------------------------------


def unbatched():
    learner_of(batch_size=None)(jnp.ones((5, 3)))


def other_batch():
    learner_of()(jnp.ones((5, 3)))


def wrong_features():
    braintrace.D_RTRL(net()).compile_graph(jnp.ones((2, 7)))


def batched_input_on_unbatched_states():
    braintrace.D_RTRL(net(None)).compile_graph(jnp.ones((2, 3)))


def states_not_initialised():
    braintrace.D_RTRL(Net()).compile_graph(jnp.ones((2, 3)))


def window_in_single_step_mode():
    learner_of()(braintrace.MultiStepData(data()[0]))


def no_hidden_state():
    braintrace.D_RTRL(nn.Linear(3, 2)).compile_graph(jnp.ones(3))


def state_that_grows():
    learner = braintrace.D_RTRL(Moving(lambda y: y[..., :4]))
    learner.compile_graph(jnp.ones((2, 3)))


def forgotten_batch_size():
    learner = learner_of()
    learner.reset_state()
    learner(jnp.ones((2, 3)))


class Forgetful(brainstate.nn.Module):
    """A model that hands an op the parameter itself."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((3, 4)))
        self.h = brainstate.HiddenState(jnp.zeros(4))

    def update(self, x):
        self.h.value = 0.9 * self.h.value + braintrace.matmul(x, self.w)
        return self.h.value


def without_value():
    braintrace.D_RTRL(Forgetful()).compile_graph(jnp.ones(3))


def batch_first(drive):
    learner = learner_of()
    getattr(learner, drive)(data()[0].swapaxes(0, 1), step_fn=lambda x: learner(x).sum())


def compiled_with_a_sequence():
    braintrace.D_RTRL(Moving(lambda y: y[..., :4])).compile_graph(data()[0])


NO_VALUE = rf"`matmul` at {re.escape(__file__)}:\d+ takes arrays, but was given a `ParamState`.*\.value"

MISTAKES = {
    "no value": (without_value, NO_VALUE),
    "sequence": (lambda: learner_of()(data()[0]), "looks like a whole sequence of 6 steps.*etrace_grad"),
    "sequence to compile": (compiled_with_a_sequence, "whole sequence, give one step"),
    "batch first": (lambda: batch_first("etrace_grad"), r"shapes \(2, 6, 3\), seem to have the batch first"),
    "batch first, no loss": (lambda: batch_first("etrace_evolve"), "time must be the first axis"),
    "integers": (
        lambda: learner_of()(jnp.ones((2, 3), int)),
        r"is int64 and not float64.*astype\('float64'\)",
    ),
    "grows": (state_that_grows, "batch axis, initialise it with one"),
    "forgotten": (forgotten_batch_size, r"`cell.h` has float\d+\[4\] and had float\d+\[2, 4\]"),
    "trace type": (lambda: braintrace.D_RTRL(net(), trace_dtype=jnp.int32), "trace_dtype"),
    "trace type name": (lambda: braintrace.ES_D_RTRL(net(), trace_dtype="foo"), "trace_dtype"),
    "three decays": (lambda: braintrace.ES_D_RTRL(net(), (0.9, 0.8, 0.7)), "a pair"),
    "option of reset": (lambda: learner_of().reset_state(batchsize=2), "batchsize"),
    "not compiled": (lambda: braintrace.D_RTRL(net())(jnp.ones((2, 3))), "compile_graph"),
    "other batch": (other_batch, "batch"),
    "batched call": (unbatched, "If it is a batch, initialise the states"),
    "wrong features": (wrong_features, "feature size"),
    "batched input": (batched_input_on_unbatched_states, "batch axis"),
    "uninitialised": (states_not_initialised, "init_all_states"),
    "no hidden state": (no_hidden_state, "no hidden state"),
    "method": (lambda: braintrace.D_RTRL(net(), vjp_method="multi_step"), "'multi-step'"),
    "decay": (lambda: braintrace.ES_D_RTRL(net(), 1.0), "less than 1"),
    "rank": (lambda: braintrace.ES_D_RTRL(net(), 0), "at least 1"),
    "window": (window_in_single_step_mode, "multi-step"),
    "string": (lambda: braintrace.D_RTRL(net()).compile_graph("x"), "string"),
    "no model": (lambda: braintrace.D_RTRL(jnp.tanh), "update"),
    "no loss": (lambda: learner_of().etrace_grad(data()[0], step_fn=lambda x: jnp.sum(x)), "did not call"),
    "losses": (lambda: learner_of().etrace_grad(data()[0], step_fn=lambda x: x), "one number"),
    "lengths": (lambda: learner_of().etrace_grad(jnp.ones((2, 3)), jnp.ones((3, 3)), step_fn=sum), "length"),
    "mask": (lambda: learner_of().etrace_grad(data()[0], step_fn=sum, mask=jnp.ones(2)), "mask"),
    "chunk": (lambda: learner_of().etrace_grad(data()[0], step_fn=sum, chunk_size=0), "at least 1"),
    "reduction": (lambda: learner_of().etrace_grad(data()[0], step_fn=sum, reduction="max"), "'mean'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_an_error_that_says_what_to_do(name):
    mistake, message = MISTAKES[name]
    with pytest.raises((braintrace.CompilationError, ValueError, TypeError), match=message):
        mistake()


# -- calls and states -------------------------------------------------------------------------------


def test_model_arguments_pass_through():
    class Scaled(Net):
        def update(self, x, scale, mode="plain", flag=False):
            y = super().update(x)
            return y * scale if mode == "scaled" and flag else y

    model = Scaled()
    brainstate.nn.init_all_states(model)
    learner = braintrace.D_RTRL(model)
    learner.compile_graph(jnp.ones(3, jnp.float32), 2.0, mode="scaled", flag=True)
    scaled = learner(jnp.ones(3, jnp.float32), 2.0, mode="scaled", flag=True)
    learner.reset_state()
    learner.compile_graph(jnp.ones(3, jnp.float32), 2.0)
    np.testing.assert_allclose(scaled, 2 * learner(jnp.ones(3, jnp.float32), 2.0), rtol=1e-6)


def test_what_the_model_closes_over_may_change():
    class Timed(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(jnp.ones((3, 4)))
            self.h = brainstate.HiddenState(jnp.zeros(4))

        def update(self, x):
            time = brainstate.environ.get("t")
            self.h.value = 0.5 * self.h.value + braintrace.matmul(x, self.w.value) * time
            return self.h.value

    learner = braintrace.D_RTRL(Timed())
    with brainstate.environ.context(t=1.0):
        learner.compile_graph(jnp.ones(3))

    def step(t, x):
        with brainstate.environ.context(t=t):
            return learner(x)

    outs = brainstate.transform.for_loop(step, jnp.arange(3.0), jnp.ones((3, 3)))
    np.testing.assert_allclose(outs[:, 0], [0.0, 3.0, 7.5])
    learner.reset_state()
    learner.model.h.value = jnp.zeros(4)
    for t, expected in zip((2.0, 4.0), (6.0, 15.0), strict=True):
        with brainstate.environ.context(t=t):
            np.testing.assert_allclose(learner(jnp.ones(3))[0], expected)


WRONG = {  # an implementation, and letters that do not describe it
    "swapped": (lambda x, weight: x @ weight, "i,oi->o"),
    "squared": (lambda x, weight: x @ weight**2, "i,io->o"),
    "not linear": (lambda x, weight: jnp.tanh(x @ weight), "i,io->o"),
    "factor": (lambda x, weight: x**2 @ weight, "i,io->o"),
    "rank": (lambda x, weight: x @ weight, "i,ioz->o"),
    "name": (lambda x, w: x @ w, "i,io->o"),
}


@pytest.mark.parametrize("name", WRONG)
def test_letters_that_do_not_describe_an_op_are_refused(name):
    implementation, letters = WRONG[name]
    op = braintrace.register_primitive(f"wrong_{name.replace(' ', '_')}", implementation, letters)
    names = implementation.__code__.co_varnames[1:2]

    class Own(Moving):
        def update(self, x):
            self.h.value = 0.9 * self.h.value + op(x, weights={names[0]: self.w.value[:, :4]})
            return self.h.value

    with pytest.raises((braintrace.CompilationError, ValueError), match="axis labels"):
        braintrace.D_RTRL(Own(None)).compile_graph(jnp.ones(3))


class Moving(brainstate.nn.Module):
    """A leaky state; what it is fed goes through a function that may be another one later."""

    def __init__(self, pick, keep=lambda h: h):
        super().__init__()
        self.pick, self.keep = pick, keep
        self.w = brainstate.ParamState(jnp.asarray(np.random.RandomState(0).randn(3, 8)))
        self.h = brainstate.HiddenState(jnp.zeros(4))

    def update(self, x):
        h = 0.9 * self.keep(self.h.value)
        self.h.value = h + self.pick(braintrace.matmul(x, self.w.value))
        return jnp.tanh(self.h.value)


def at_time(y):
    return jax.lax.dynamic_slice(y, (brainstate.environ.get("i"),), (4,))


ORDER = np.arange(4)
OTHERS = {  # before and after
    "slice": (lambda y: y[:4], lambda y: y[2:6]),
    "order": (lambda y: y[:4][ORDER], lambda y: y[:4][ORDER[::-1]]),
    "roll": (lambda y: jnp.roll(y[:4], 1), lambda y: jnp.roll(y[:4], 2)),
    "new operation": (lambda y: y[:4], lambda y: jnp.flip(y[:4])),
    "index of a loop": (at_time, at_time),
}


@pytest.mark.parametrize("name", OTHERS)
def test_traces_are_not_read_at_other_places(name):
    learner = braintrace.D_RTRL(Moving(OTHERS[name][0]))
    x = jnp.ones(3)
    with brainstate.environ.context(i=0):
        learner.compile_graph(x)
        learner(x)
    learner.model.pick = OTHERS[name][1]
    with (
        brainstate.environ.context(i=1),
        pytest.raises(braintrace.CompilationError, match="has become another program"),
    ):
        learner(x)


def test_the_report_is_of_the_model_as_it_is_now():
    learner = braintrace.D_RTRL(Moving(lambda y: y[:4]))
    learner.compile_graph(jnp.ones(3))
    assert learner.report.exactness.exact
    learner.model.keep = lambda h: h - 0.5 * jnp.mean(h)
    with pytest.warns(UserWarning, match="reach other positions"):
        learner(jnp.ones(3))
    assert not learner.report.exactness.exact


@pytest.mark.slow
def test_other_forms_of_a_model_share_their_traces():
    class Gated(Moving):
        def update(self, x, gain, train=True):
            return super().update(jnp.asarray(x, float) * (gain if train else 1.0))

    def last(pair):
        calls = [((x, 2.0), {}), ((x > 0, 3), {"train": False}), ((x.astype(jnp.float32), 2.0), {})]
        for args, kwargs in calls:
            pair.compile_graph(*args, **kwargs)
        pair.reset_state()
        return sum(jnp.sum(pair(*args, **kwargs) ** 2) for args, kwargs in calls)

    x = data(1, None)[0][0]
    found = []
    for rule in (braintrace.D_RTRL, braintrace.BPTT):
        learner = rule(Gated(lambda y: y[:4]))
        found.append(brainstate.transform.grad(lambda: last(learner), learner.param_states)())  # noqa: B023
        assert int(learner.running_index) == 3
    assert agree(*found, 1e-10), difference(*found)


@pytest.mark.slow
def test_compiling_again_leaves_the_traces_to_a_jitted_step():
    learner = learner_of()
    xs, ys = data()
    step = brainstate.transform.jit(lambda x, y: gradient_of_step(learner, x, y))
    episodes = []
    for _ in range(2):
        episodes.append([step(x, y) for x, y in zip(xs, ys, strict=True)])
        learner.compile_graph(xs[0])
        learner.reset_state(BATCH)
        learner.model.cell.h.value = learner.model.cell.h.value.astype(float)
    assert equal(*episodes)


@pytest.mark.slow
def test_a_parameter_outside_the_model_is_learned_in_chunks_too():
    outside = brainstate.ParamState(jnp.asarray(np.random.RandomState(0).randn(3, 4)))

    class Inner(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.h = brainstate.HiddenState(jnp.zeros(4))

        def update(self, x):
            self.h.value = 0.9 * self.h.value + braintrace.matmul(x, outside.value)
            return jnp.tanh(self.h.value)

    found = []
    for size in (1, 4):
        learner = braintrace.D_RTRL(Inner())
        xs = data(batch_size=None)[0]
        learner.compile_graph(xs[0])
        step_fn = lambda x: jnp.sum(learner(x) ** 2)  # noqa: B023
        found.append(learner.etrace_grad(xs, step_fn=step_fn, chunk_size=size, weights={"w": outside}))
    assert jnp.abs(found[0]["w"]).max() > 0.1
    assert agree(*found, 1e-10), difference(*found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "size"),
    [
        (braintrace.D_RTRL, 1),
        (braintrace.D_RTRL, 2),
        (braintrace.D_RTRL, None),
        (braintrace.ES_D_RTRL, 1),
        (braintrace.RTRL, 1),
    ],
)
def test_a_state_that_starts_where_it_has_no_slope(rule, size):
    learner = rule(Moving(lambda y: y[:4], lambda h: h / (jnp.sqrt(jnp.mean(h**2)) + 1e-3)))
    xs = data(batch_size=None)[0]
    with warnings.catch_warnings(action="ignore"):
        learner.compile_graph(xs[0])
    grads = learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x) ** 2), chunk_size=size)
    assert jnp.all(jnp.isfinite(grads["w",]))
    assert all(jnp.all(jnp.isfinite(st.value)) for st in learner.etrace_states.values())


@pytest.mark.slow
def test_averages_of_coarse_inputs_are_kept_in_the_type_of_the_weights():
    xs = jnp.asarray(np.random.RandomState(0).rand(60, 3), jnp.bfloat16)
    found = []
    for given, size in ((xs.astype(jnp.float32), 1), (xs, 1), (xs, None)):
        model = Moving(lambda y: y[:4])
        model.w.value, model.h.value = model.w.value.astype(jnp.float32), jnp.zeros(4, jnp.float32)
        learner = braintrace.ES_D_RTRL(model, 0.99)
        learner.compile_graph(given[0])
        step_fn = lambda x: jnp.sum(learner(x))  # noqa: B023
        found.append(learner.etrace_grad(given, step_fn=step_fn, chunk_size=size))
    assert all(agree(found[0], other, 1e-4) for other in found[1:])


def halved_before(learner):
    def step(x):
        learner.model.h.value = 0.5 * learner.model.h.value
        return jnp.sum(learner(x))

    return step


def halved_after(learner):
    def step(x):
        loss = jnp.sum(learner(x))
        learner.model.h.value = 0.5 * learner.model.h.value
        return loss

    return step


def reset_before(learner):
    def step(x):
        learner.model.h.value = jnp.zeros(4)
        learner.init_etrace_state()
        return jnp.sum(learner(x))

    return step


def jitted_call(learner):
    return lambda x: jnp.sum(brainstate.transform.jit(lambda x: learner(x))(x))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, None])
@pytest.mark.parametrize("step", [halved_before, halved_after, reset_before, jitted_call])
def test_a_state_assigned_beside_the_model_is_told_of(step, size):
    learner = braintrace.D_RTRL(Moving(lambda y: y[:4]))
    xs = data(batch_size=None)[0]
    learner.compile_graph(xs[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learner.etrace_grad(xs, step_fn=step(learner), chunk_size=size)
    told = any("assigns `h`" in str(w.message) for w in caught)
    assert told == (step in (halved_before, halved_after))


def total(learner, xs):
    return jnp.sum(brainstate.transform.for_loop(lambda x: jnp.sum(learner(x) ** 2), xs))


def jitted(learner):
    """The gradient over a sequence, compiled."""
    gradient = brainstate.transform.grad(lambda xs: total(learner, xs), learner.param_states)
    return brainstate.transform.jit(gradient)


def reset_model(learner):
    brainstate.nn.reset_all_states(learner.model, batch_size=BATCH)


def reset_between(learner, xs):
    go = jitted(learner)
    go(xs), reset_model(learner), go(xs)


def reset_inside(learner, xs):
    def both(xs):
        reset_model(learner)
        return total(learner, xs)

    brainstate.transform.jit(both)(xs)


def reset_between_sequences(learner, xs, **options):
    for _ in range(2):
        learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x) ** 2), **options)
        reset_model(learner)


def called_between(learner, xs):
    go, model = jitted(learner), brainstate.transform.jit(learner.model.update)
    go(xs), model(xs[0]), go(xs)


def two_learners(learner, xs):
    other = braintrace.D_RTRL(learner.model)
    other.compile_graph(xs[0])
    for go in (jitted(learner), jitted(other)) * 2:
        go(xs)


def two_learners_in_one(learner, xs):
    other = braintrace.D_RTRL(learner.model)
    other.compile_graph(xs[0])
    brainstate.transform.jit(lambda x: learner(x) + other(x))(xs[0])


def all_are_reset(learner, xs):
    go = jitted(learner)
    go(xs), learner.reset_state(BATCH), go(xs)
    learner.init_etrace_state(), reset_model(learner), go(xs)
    reset_model(learner), learner.init_etrace_state(), go(xs), go(xs)


def all_are_reset_inside(learner, xs):
    def both(xs):
        reset_model(learner)
        learner.init_etrace_state()
        return total(learner, xs)

    go = brainstate.transform.jit(both)
    go(xs), learner.model(xs[0]), go(xs)


def put_back(learner, xs):
    @brainstate.transform.jit
    def evaluate(xs):
        states = learner.model.states(brainstate.HiddenState).values()
        before = [state.value for state in states]
        out = brainstate.transform.for_loop(learner.model, xs)
        for state, value in zip(states, before, strict=True):
            state.value = value
        return out

    go = jitted(learner)
    go(xs), evaluate(xs), go(xs)


def without_traces(learner, xs):
    reset_between_sequences(learner, xs, keep_traces=False)


def mapped(learner, xs):
    return braintrace.compile(net(None), "d_rtrl", xs[0], batch_size=BATCH, vmap=True)


def set_to_zero(learner):
    learner.model.cell.h.value = jnp.zeros_like(learner.model.cell.h.value)


def mapped_and_set(learner, xs):
    learner = mapped(learner, xs)
    gradient_of_step(learner, xs[0], 0.0)
    set_to_zero(learner)
    gradient_of_step(learner, xs[0], 0.0)


def mapped_called_and_set(learner, xs):
    learner = mapped(learner, xs)
    learner(xs[0]), set_to_zero(learner), learner(xs[1])


def mapped_and_reset(learner, xs):
    learner = mapped(learner, xs)
    for rows in (None, jnp.array([True, False])):
        gradient_of_step(learner, xs[0], 0.0)
        learner(xs[1])
        learner.reset_state(rows=rows)
    gradient_of_step(learner, xs[0], 0.0)


TAMPERING = reset_between, reset_inside, reset_between_sequences, called_between, two_learners
TAMPERING = (*TAMPERING, two_learners_in_one, mapped_and_set, mapped_called_and_set)


@pytest.mark.slow
@pytest.mark.parametrize(
    "use",
    [*TAMPERING, all_are_reset, all_are_reset_inside, put_back, without_traces, mapped_and_reset],
    ids=lambda f: f.__name__,
)
def test_a_model_reset_or_called_without_its_learner_is_told_of(use):
    learner, (xs, _) = learner_of(), data()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use(learner, xs[:2])
    told = any("`cell.h` was set since the last call" in str(w.message) for w in caught)
    assert told == (use in TAMPERING), [str(w.message) for w in caught]


class Started(brainstate.nn.Module):
    """Leaky units whose first state is learned: in the step, by a flag, or by a reset."""

    def __init__(self, by_reset):
        super().__init__()
        self.w = brainstate.ParamState(jnp.asarray(np.random.RandomState(0).randn(3, 2)))
        self.h0 = brainstate.ParamState(jnp.array([0.5, -1.0]))
        self.h = brainstate.HiddenState(jnp.zeros((BATCH, 2)))
        self.by_reset = by_reset

    def reset_state(self, batch_size=None):
        start = jnp.broadcast_to(self.h0.value, (batch_size, 2))
        self.h.value = start if self.by_reset else jnp.zeros_like(start)

    def update(self, x, first):
        h = self.h.value
        if not self.by_reset:
            h = jnp.where(first, braintrace.element_wise(self.h0.value), h)
        self.h.value = 0.7 * h + jnp.tanh(braintrace.matmul(x, self.w.value))
        return self.h.value


def test_a_learned_initial_state_is_part_of_the_step():
    xs, ys = data()
    first = jnp.arange(LENGTH) == 0

    def gradient(by_reset):
        learner = braintrace.D_RTRL(Started(by_reset))
        learner.compile_graph(xs[0], first[0])
        learner.reset_state(BATCH)
        loss = lambda x, f, y: jnp.sum((learner(x, f) - y) ** 2)
        return learner.etrace_grad(xs, first, ys, step_fn=loss, reduction="sum")

    def total(params):
        def body(h, now):
            h = 0.7 * h + jnp.tanh(now[0] @ params["w",])
            return h, jnp.sum((h - now[1]) ** 2)

        return jnp.sum(jax.lax.scan(body, jnp.broadcast_to(params["h0",], (BATCH, 2)), (xs, ys))[1])

    params = {path: st.value for path, st in Started(False).states(brainstate.ParamState).items()}
    assert agree(jax.grad(total)(params), gradient(by_reset=False), 1e-12)
    with pytest.warns(UserWarning, match="No output and no state of a step depends on `h0`"):
        gradient(by_reset=True)
    step = lambda params, h, x: (0.7 * h + x @ params["w"],) * 2
    values = {"w": jnp.ones((3, 2)), "h0": jnp.ones(2)}
    net = braintrace.online(step, values, jnp.zeros((BATCH, 2)), xs[0])
    with pytest.warns(UserWarning, match=r"depends on `params\.h0`: the gradient is zero"):
        assert net.report.excluded_weights["params", "h0"] == "no output or state depends on it"


@pytest.mark.slow
def test_states_are_found_again_and_reset():
    learner = learner_of()
    xs, ys = data()
    first = gradient_of_step(learner, xs[0], ys[0])
    assert int(learner.running_index) == 1
    assert any(np.any(st.value) for st in learner.etrace_states.values())
    learner.reset_state(BATCH)
    assert int(learner.running_index) == 0
    assert not any(np.any(st.value) for st in learner.etrace_states.values())
    for state in learner.model.states(brainstate.HiddenState).values():
        state.value = state.value.astype(float)
    assert equal(first, gradient_of_step(learner, xs[0], ys[0]))
    assert all(isinstance(key, str) for key in learner.etrace_states)
    assert set(learner.hidden_states) == {("cell", "h")}
    assert learner.get_etrace_of(learner.model.cell.Wz.weight)
    with pytest.raises(ValueError, match="no trace"):
        learner.get_etrace_of("readout.weight")


@pytest.mark.slow
def test_another_batch_size_compiles_anew():
    learner = learner_of()
    for size in (4, 2):
        learner.reset_state(size)
        x = jnp.ones((size, 3))
        learner.model.cell.h.value = learner.model.cell.h.value.astype(float)
        learner.compile_graph(x)
        assert learner(x).shape == (size, 2)


@pytest.mark.parametrize("learner", [*dict.fromkeys(NAMES.values()), braintrace.RandomProjectionVjpAlgorithm])
def test_constructors_have_signatures(learner):
    of_class, of_init = (inspect.signature(f).parameters for f in (learner, learner.__init__))
    assert [*of_class] == [*of_init][1:]
    assert next(iter(of_class)) == "model"
    kinds = {p.kind for p in of_class.values()}
    assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    assert all(name in learner.__doc__ for name in of_class) or learner is braintrace.BPTT
    needed = {k: 0.5 for k, p in of_class.items() if p.default is p.empty and k != "model"}
    with pytest.raises(TypeError, match=f"{learner.__name__}.*unexpected keyword argument 'typo'"):
        learner(net(), **needed, typo=1)

    class Own(learner):
        def __init__(self, model, extra):
            super().__init__(model, **needed)

    assert [*inspect.signature(Own).parameters] == ["model", "extra"]


@pytest.mark.slow
@pytest.mark.parametrize("rule", [braintrace.D_RTRL, braintrace.ES_D_RTRL, braintrace.RTRL])
def test_copies_and_pickles_continue_bit_for_bit(rule):
    learner = learner_of(rule)
    xs, ys = data()
    gradient_of_step(learner, xs[0], ys[0])
    learners = [learner, copy.deepcopy(learner), pickle.loads(pickle.dumps(learner))]
    found = []
    for one in learners:
        gradient = brainstate.transform.jit(lambda x, y, one=one: gradient_of_step(one, x, y))
        found.append([gradient(x, y) for x, y in zip(xs[1:], ys[1:], strict=True)])
    assert equal(found[0], found[1])
    assert equal(found[0], found[2])


def test_a_second_call_compiles_nothing():
    learner = learner_of()
    xs, ys = data()
    traced = []

    @brainstate.transform.jit
    def step(x, y):
        traced.append(1)
        return gradient_of_step(learner, x, y)

    step(xs[0], ys[0])
    count = len(traced)
    with jax.log_compiles(False), warnings.catch_warnings(action="error"):
        step(xs[1], ys[1])
    assert len(traced) == count


# -- names and options that code written for 0.2.x uses ---------------------------------------------


def test_options_by_position_and_without_effect(capsys):
    xs, ys = data(2)
    plain = learner_of()
    given = braintrace.D_RTRL(
        net(), "mine", "single-step", fast_solve=False, chunked_trace=False, control_flow=None
    )
    given.compile_graph(xs[0])
    assert given.name == "mine"
    for x, y in zip(xs, ys, strict=True):
        assert equal(gradient_of_step(plain, x, y), gradient_of_step(given, x, y))
    factored = braintrace.compile(
        Net(), "esd_rtrl", xs[0], batch_size=BATCH, decay_or_rank=0.8, verbose=1, control_flow=None
    )
    shown = capsys.readouterr().out
    assert shown.strip() == factored.report.to_str()
    assert factored.show_graph(verbose=False, return_msg=True) == shown.strip()
    assert not capsys.readouterr().out
    assert braintrace.ES_D_RTRL(net(), 0.9, "other", "multi-step").vjp_method == "multi-step"


def test_names_of_traces_and_of_the_counter():
    learner, factored = learner_of(), learner_of(braintrace.ES_D_RTRL)
    assert learner.etrace_bwg == learner.etrace_states
    averages = {k: st for k, st in factored.etrace_states.items() if not k.startswith("steps")}
    assert {**factored.etrace_xs, **factored.etrace_dfs} == averages
    assert factored.etrace_xs
    assert factored.etrace_dfs
    assert learner.graph_executor is learner.executor
    learner(data()[0][0])
    assert learner.running_index.value == 1
    assert learner.running_index == 1
    assert learner.running_index in [learner.model.cell.h, learner.running_index]
    assert np.asarray(learner.running_index).shape == ()
    learner.running_index.value = jnp.zeros((), jnp.int32)
    assert int(learner.running_index) == 0


def test_version():
    assert braintrace.__version__.split(".")[0].isdigit()


# -- modes ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rule", [braintrace.D_RTRL, braintrace.ES_D_RTRL])
def test_several_calls_in_one_loss_add_up(rule):
    xs, ys = data()
    one, many = learner_of(rule), learner_of(rule)
    params = many.model.states(brainstate.ParamState)
    total = lambda: sum(squared(many)(x, y) for x, y in zip(xs, ys, strict=True))
    together = brainstate.transform.grad(total, params)()
    summed = None
    for x, y in zip(xs, ys, strict=True):
        grads = gradient_of_step(one, x, y)
        summed = grads if summed is None else jax.tree.map(jnp.add, summed, grads)
    assert agree(summed, together, 1e-12)


@pytest.mark.parametrize("rule", [braintrace.D_RTRL, braintrace.ES_D_RTRL])
def test_batched_and_vmapped_and_summed_samples_agree(rule):
    xs, _ = data()
    batched = online(rule(net()), list(xs))
    summed = None
    for b in range(BATCH):
        grads = online(rule(net(None)), list(xs[:, b]))
        summed = grads if summed is None else jax.tree.map(jnp.add, summed, grads)
    assert agree(batched, summed, 1e-12), difference(batched, summed)


@pytest.mark.slow
def test_compiling_in_one_call_batched_and_vmapped():
    xs, ys = (a.astype(jnp.float32) for a in data())
    found = []
    for vmap in (False, True):
        model = Net()
        learner = braintrace.compile(model, "D_RTRL", xs[0], batch_size=BATCH, seed=1, vmap=vmap)
        params = model.states(brainstate.ParamState)
        total = None
        for x, y in zip(xs, ys, strict=True):
            loss = lambda x=x, y=y, learner=learner: jnp.sum((learner(x) - y) ** 2)
            grads = brainstate.transform.grad(loss, params)()
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        found.append(total)
        learner.reset_state(BATCH)
        again = brainstate.transform.grad(lambda: jnp.sum((learner(xs[0]) - ys[0]) ** 2), params)()  # noqa: B023
        assert np.all(learner.running_index == 1)
        found.append(again)
    assert agree(found[0], found[2], 1e-5), difference(found[0], found[2])
    assert agree(found[1], found[3], 1e-5), difference(found[1], found[3])
    with pytest.raises(ValueError, match="Unknown algorithm"):
        braintrace.compile(Net(), "no such rule", xs[0])


def test_a_rule_may_come_with_its_options():
    def step(w, h, x):
        h = jnp.tanh(x @ w + h)
        return h, h

    options = {"window": 2, "rank": 1}
    for rule in ("d_rtrl", braintrace.D_RTRL):
        learner = braintrace.online(step, jnp.ones((3, 2)), jnp.zeros(2), jnp.ones(3), rule=(rule, options))
        assert (learner.window, learner.rule.rank) == (2, 1)
    with pytest.raises(TypeError, match="takes no option 'rank'"):
        braintrace.online(
            step, jnp.ones((3, 2)), jnp.zeros(2), jnp.ones(3), rule=(braintrace.rules.D_RTRL(), options)
        )


NEEDED = {"ottt": {"leak": 0.9}, "otpe": {"leak": 0.9}, "osttp": {"num_targets": 1}} | {
    "s_tllr": {"lambda_post": 0.9, "lambda_pre": 0.9}
}


@pytest.mark.parametrize("name", NAMES)
def test_every_learner_takes_mark(name):
    assert NAMES[name](Net(), mark="auto", **NEEDED.get(name, {})).model is not None
    with pytest.raises(ValueError, match="`mark` is 'ops'"):
        NAMES[name](Net(), mark="all", **NEEDED.get(name, {}))


class Unmarked(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.h = brainstate.ParamState(jnp.ones((3, 4))), brainstate.HiddenState(jnp.zeros(4))

    def update(self, x):
        self.h.value = 0.9 * self.h.value + x @ self.w.value
        return self.h.value


@pytest.mark.parametrize("rule", ["d_rtrl", "rtrl"])
def test_unmarked_models_are_compiled_by_name(rule):
    learner = braintrace.compile(Unmarked(), rule, jnp.ones(3), mark="auto")
    assert learner.report.exactness.exact


def test_second_derivatives_through_a_learner_are_refused():
    learner = braintrace.compile(Unmarked(), "d_rtrl", jnp.ones(3), mark="auto")
    params = learner.param_states

    def squared(x):
        grads = brainstate.transform.grad(lambda: jnp.sum(learner(x) ** 2), params)()
        return sum(jnp.sum(g**2) for g in grads.values())

    with pytest.raises(braintrace.NotSupportedError, match="differentiated again"):
        brainstate.transform.grad(squared, params)(jnp.ones(3))
    step = lambda x: jnp.sum(learner(x) ** 2)
    total = lambda xs: jnp.sum(learner.etrace_grad(xs, step_fn=step, return_value=True)[1])
    with pytest.raises(braintrace.NotSupportedError, match="`etrace_grad` returned, is differentiated again"):
        brainstate.transform.grad(total, params)(jnp.ones((2, 3)))


@pytest.mark.slow
def test_a_loss_may_read_the_state_after_the_call():
    xs, _ = data()
    model, plain = net(), net()
    learner = braintrace.RTRL(model)
    learner.compile_graph(xs[0])
    params = model.states(brainstate.ParamState)

    def loss(call, model, x):
        call(x)
        return jnp.sum(jnp.sin(model.cell.h.value))

    truth = brainstate.transform.grad(
        lambda: sum(loss(plain, plain, x) for x in xs), plain.states(brainstate.ParamState)
    )()
    total = None
    for x in xs:
        grads = brainstate.transform.grad(lambda x=x: loss(learner, model, x), params)()
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    assert agree(truth, total, 1e-12)


@pytest.mark.slow
def test_rtrl_is_exact_in_steps_and_windows():
    xs, _ = data()
    truth = bptt(net(), list(xs))
    assert agree(truth, online(braintrace.RTRL(net()), list(xs)), 1e-12)
    assert agree(truth, online(braintrace.RTRL(net()), list(xs), 4), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rule", [braintrace.D_RTRL, braintrace.ES_D_RTRL])
def test_small_types_learn_much_the_same(rule, dtype):
    xs, _ = data()
    truth = online(rule(net()), list(xs))
    found = online(rule(net(dtype=dtype)), list(xs.astype(dtype)))
    assert all(a.dtype == dtype for a in jax.tree.leaves(found))
    scale = {jnp.float16: 2e-2, jnp.bfloat16: 2e-1, jnp.float32: 1e-5}[dtype]
    assert agree(truth, jax.tree.map(lambda a: a.astype(float), found), scale)


@pytest.mark.slow
def test_traces_may_be_stored_small():
    xs, _ = data()
    learner = braintrace.D_RTRL(net(), trace_dtype=jnp.bfloat16)
    found = online(learner, list(xs))
    assert {st.value.dtype for st in learner.traces.values()} == {jnp.dtype(jnp.bfloat16)}
    assert agree(online(braintrace.D_RTRL(net()), list(xs)), found, 3e-2)


def test_rank_is_a_decay():
    assert braintrace.ES_D_RTRL(net(), 19).rule == braintrace.ES_D_RTRL(net(), 0.9).rule
    assert braintrace.pp_prop(net(), (0.5, 0.9)).rule.inp == 0.5


# -- sequences --------------------------------------------------------------------------------------

CELLS = [nn.GRUCell, nn.LSTMCell]


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("rule", [braintrace.D_RTRL, braintrace.ES_D_RTRL, braintrace.RTRL])
def test_chunks_change_no_number(rule, cell):
    xs, ys = data(7)
    mask = jnp.asarray([1.0, 0.0, 2.0, 1.0, 1.0, 0.5, 1.0])

    def drive(**options):
        learner = rule(net(cell=cell))
        learner.compile_graph(xs[0])
        run = lambda xs, ys: learner.etrace_grad(
            xs, ys, step_fn=squared(learner), mask=mask, return_value=True, **options
        )
        grads, losses = brainstate.transform.jit(run)(xs, ys)
        return grads, losses, {k: st.value for k, st in learner.traces.items()}

    learner = rule(net(cell=cell))
    learner.compile_graph(xs[0])
    truth = None
    gradient = brainstate.transform.jit(lambda x, y: gradient_of_step(learner, x, y))
    for x, y, m in zip(xs, ys, mask, strict=True):
        grads = jax.tree.map(lambda g, m=m: g * m / mask.sum(), gradient(x, y))
        truth = grads if truth is None else jax.tree.map(jnp.add, truth, grads)
    for size in (None, 3):
        grads, losses, traces = drive(chunk_size=size)
        assert agree(truth, grads, 1e-11), (size, difference(truth, grads))
        assert losses.shape == (7,)
        for key, state in learner.traces.items():
            np.testing.assert_allclose(traces[key], state.value, rtol=1e-9, atol=1e-11)
    grads, _, traces = drive(keep_traces=False)
    assert agree(truth, grads, 1e-11)
    assert not any(np.any(t) for t in traces.values())


@pytest.mark.slow
def test_windows_of_a_sequence():
    xs, ys = data(7)
    learner = learner_of(vjp_method="multi-step")
    step = lambda x, y: jnp.sum((learner(braintrace.MultiStepData(x)) - y) ** 2, axis=(1, 2))
    grads, total = learner.etrace_grad(
        xs, ys, step_fn=step, chunk_size=7, reduction="sum", return_value=True, loss_output="scalar"
    )
    model = net()
    params = model.states(brainstate.ParamState)
    loss = lambda: sum(jnp.sum((model(x) - y) ** 2) for x, y in zip(xs, ys, strict=True))
    truth, value = brainstate.transform.grad(loss, params, return_value=True)()
    assert agree(truth, grads, 1e-12)
    np.testing.assert_allclose(total, value)


def test_evolving_advances_states_and_traces():
    xs, _ = data()
    learner, other = learner_of(), learner_of()
    outs = learner.etrace_evolve(xs, return_outputs=True)
    for x, out in zip(xs, outs, strict=True):
        np.testing.assert_allclose(other(x), out, rtol=1e-12)
    for key, state in other.traces.items():
        np.testing.assert_allclose(learner.traces[key].value, state.value, rtol=1e-12)
    assert int(learner.running_index) == LENGTH
    for again, size in ((learner_of(), 4), (learner_of(vjp_method="multi-step"), 4)):
        found = again.etrace_evolve(xs, chunk_size=size, return_outputs=True)
        np.testing.assert_allclose(found, outs, rtol=1e-12)
        assert again.running_index.value == LENGTH
    for key, state in other.traces.items():  # of the last one, which keeps all states' traces
        np.testing.assert_allclose(again.traces[key].value[: len(state.value)], state.value, rtol=1e-12)


def test_evolving_many_samples_at_once():
    xs, _ = data()
    outs = learner_of().etrace_evolve(xs, return_outputs=True)
    mapped = braintrace.compile(net(None), "d_rtrl", xs[0], batch_size=BATCH, vmap=True)
    assert isinstance(mapped, braintrace.ETraceVmap)
    np.testing.assert_allclose(mapped.etrace_evolve(xs, return_outputs=True), outs, rtol=1e-6)
    assert np.all(mapped.running_index == LENGTH)


@pytest.mark.slow
def test_what_evolve_returns_has_the_derivative_of_its_steps():
    learner, xs = learner_of(), data()[0]
    params = learner.model.states(brainstate.ParamState)

    def grad(run):
        learner.reset_state(BATCH)
        return brainstate.transform.grad(lambda: jnp.sum(run() ** 2), params)()

    found = grad(lambda: learner.etrace_evolve(xs, return_outputs=True))
    truth = grad(lambda: brainstate.transform.for_loop(learner, xs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), found, truth)


@pytest.mark.slow
def test_evolve_takes_windows_and_may_be_part_of_a_step():
    learner, xs = learner_of(vjp_method="multi-step"), data()[0]
    windows = xs[:4].reshape(2, 2, *xs.shape[1:])
    learner.etrace_evolve(windows, step_fn=lambda x: learner(braintrace.MultiStepData(x)))
    assert learner.running_index == 4
    learner, xs = learner_of(), data()[0]

    def settled(settle):
        def step(x):
            settle(x)
            return jnp.sum(learner(x) ** 2)

        learner.reset_state(BATCH)
        return learner.etrace_grad(xs, step_fn=step)

    found = settled(lambda x: learner.etrace_evolve(jnp.stack([x, x])))
    assert learner.running_index == 3 * len(xs)
    truth = settled(lambda x: (learner(x), learner(x)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), found, truth)


@pytest.mark.parametrize("given", [2.0, np.exp(-0.5), 2.0 * u.ms, 2e-3 * u.second])
def test_grad_expon(given):
    with brainstate.environ.context(dt=1.0 * u.ms):
        total = braintrace.GradExpon({"w": jnp.zeros(2), "b": jnp.zeros(1) * u.mV}, given)
    new, decay = {"w": jnp.ones(2), "b": jnp.ones(1) * u.mV}, np.exp(-0.5)
    for expected in (1, 1 + decay, 1 + decay * (1 + decay)):
        total.update(new)
        np.testing.assert_allclose(total.gradients.value["w"], expected, rtol=1e-6)
    np.testing.assert_allclose(total.gradients.value["b"].to_decimal(u.mV), expected, rtol=1e-6)
    total.reset_state()
    assert not np.any(total.gradients.value["w"])


def test_a_time_constant_shorter_than_a_step():
    with brainstate.environ.context(dt=1.0 * u.ms):
        assert np.isclose(braintrace.GradExpon(jnp.zeros(2), 0.5 * u.ms).decay, np.exp(-2))


class WithoutReset(brainstate.nn.Module):
    """A cell of a user's who wrote `init_state` and nothing more."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.full((3, 4), 0.1))

    def init_state(self, batch_size=None):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        self.h.value = 0.9 * self.h.value + braintrace.matmul(x, self.w.value)
        return self.h.value


@pytest.mark.slow
def test_progress_interrupts_and_resets_leave_states_consistent():
    model, xs = WithoutReset(), jnp.ones((23, 2, 3))
    learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=2)
    loss = lambda x: jnp.sum(learner(x) ** 2)
    state, truth = model.h, learner.etrace_grad(xs, step_fn=loss)
    after = state.value
    assert learner.running_index == 23

    learner.reset_state(2)
    assert model.h is state
    assert not state.value.any()
    calls: list[tuple[int, int]] = []
    found = learner.etrace_grad(xs, step_fn=loss, chunk_size=10, progress=lambda *a: calls.append(a))
    assert calls == [(10, 23), (20, 23), (23, 23)]
    assert agree(truth, found, 1e-12)
    assert agree({"h": after}, {"h": state.value}, 1e-12)

    learner.reset_state(2)
    calls.clear()
    drive = lambda xs: learner.etrace_grad(
        xs, step_fn=loss, chunk_size=10, progress=lambda *a: calls.append(tuple(map(int, a)))
    )
    assert agree(truth, brainstate.transform.jit(drive)(xs), 1e-12)
    jax.effects_barrier()
    assert sorted(calls) == [(10, 23), (20, 23), (23, 23)]

    def interrupt(done, total):
        if done == 20:
            raise KeyboardInterrupt

    learner.reset_state(2)
    with pytest.raises(KeyboardInterrupt):
        learner.etrace_grad(xs, step_fn=loss, chunk_size=10, progress=interrupt)
    assert learner.running_index == 20
    rest = learner.etrace_grad(xs[20:], step_fn=loss, reduction="sum")
    assert learner.running_index == 23
    assert agree({"h": after}, {"h": state.value}, 1e-12)
    assert jnp.all(jnp.isfinite(rest["w",]))

    def fails(x):
        learner(x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        learner.etrace_grad(xs, step_fn=fails)
    assert learner.running_index == 23
    assert agree({"h": after}, {"h": state.value}, 1e-12)


def test_steps_that_print_are_taken_in_turn(capfd):
    model, xs = WithoutReset(), jnp.ones((3, 2, 3))
    learner = braintrace.compile(model, "es_d_rtrl", xs[0], batch_size=2)

    def loss(x):
        value = jnp.sum(learner(x) ** 2)
        jax.debug.print("loss {}", value)
        return value

    learner.etrace_grad(xs, step_fn=loss)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("loss") == 3


class Gained(brainstate.nn.Module):
    """A leaky cell with two factors of a weight, and a gain that it closes over."""

    def __init__(self):
        super().__init__()
        rng = np.random.RandomState(0)
        self.b, self.a = (brainstate.ParamState(jnp.asarray(rng.randn(*s))) for s in ((3, 2), (2, 4)))
        self.h = brainstate.HiddenState(jnp.zeros((2, 4)))
        self.gain = 1.0

    def update(self, x):
        drive = braintrace.matmul(x, self.gain * (self.b.value @ self.a.value))
        self.h.value = 0.8 * self.h.value + jnp.tanh(drive)
        return self.h.value


def plainly(learner, x):
    return jnp.mean(learner(x) ** 2)


def with_another_gain(learner, x):
    learner.model.gain = jnp.asarray(3.0)
    return jnp.mean(learner(x) ** 2)


def with_a_gain_of_the_step(learner, x):
    learner.model.gain = 1 + x[0, 0]
    return jnp.mean(learner(x) ** 2)


def changing_a_factor(learner, x):
    out = learner(x)
    learner.model.a.value = 0.8 * learner.model.a.value
    return jnp.mean(out**2)


def clearing_traces(learner, x):
    out = learner(x)
    for trace in learner.traces.values():
        trace.value = trace.value * jnp.asarray(x[0, 0] > 0, trace.value.dtype)
    return jnp.mean(out**2)


def inside_a_cond(learner, x):
    return brainstate.transform.cond(x[0, 0] > 0, lambda: jnp.mean(learner(x) ** 2), lambda: jnp.zeros(()))


def twice(learner, x):
    return jnp.mean(learner(x) ** 2) + jnp.mean(learner(-x) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [plainly, with_another_gain, with_a_gain_of_the_step, changing_a_factor])
@pytest.mark.parametrize("names", ["own", "other"])
def test_whatever_a_step_does_chunks_change_no_number(loss, names):
    check_odd_step(loss, names)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [clearing_traces, inside_a_cond, twice])
def test_what_cannot_be_taken_together_is_taken_in_turn(loss):
    check_odd_step(loss, "own")


def check_odd_step(loss, names):
    xs = jnp.asarray(np.random.RandomState(1).randn(5, 2, 3))
    found = []
    for size in (1, None, 2):
        model = Gained()
        learner = braintrace.D_RTRL(model)
        learner.compile_graph(xs[0])
        weights = {("b",): model.b} if names == "own" else {("core", "x"): model.b, ("a",): model.b}
        step = lambda x, learner=learner: loss(learner, x)
        with warnings.catch_warnings(action="ignore"):  # of a weight that changes from step to step
            found.append(learner.etrace_grad(xs, step_fn=step, chunk_size=size, weights=weights))
    assert agree(found[0], found[1], 1e-11), difference(found[0], found[1])
    assert agree(found[0], found[2], 1e-11), difference(found[0], found[2])


@pytest.mark.slow
def test_what_is_jitted_inside_a_step_is_not_mixed_up():
    xs = jnp.asarray(np.random.RandomState(1).randn(4, 2, 3))
    learner = braintrace.D_RTRL(Gained())
    learner.compile_graph(xs[0])
    loss = brainstate.transform.jit(lambda x: jnp.mean(learner(x) ** 2))
    truth = learner.etrace_grad(xs, step_fn=lambda x: jnp.mean(learner(x) ** 2))
    traces = {k: st.value for k, st in learner.traces.items()}
    for _ in range(2):
        learner.init_etrace_state()
        learner.model.h.value = jnp.zeros((2, 4))
        assert agree(truth, learner.etrace_grad(xs, step_fn=loss), 1e-11)
        assert agree(traces, {k: st.value for k, st in learner.traces.items()}, 1e-11)


def test_the_mean_divides_by_the_sum_of_the_mask():
    xs = jnp.asarray(np.random.RandomState(1).randn(4, 2, 3))
    found = []
    for weight in (1.0, 0.05):
        learner = braintrace.D_RTRL(Gained())
        learner.compile_graph(xs[0])
        loss = lambda x, learner=learner: plainly(learner, x)
        found.append(learner.etrace_grad(xs, step_fn=loss, mask=jnp.full(4, weight)))
    assert agree(*found, 1e-11)


@pytest.mark.slow
def test_averages_in_blocks_are_the_same(monkeypatch):
    xs, ys = data(7)
    found = []
    monkeypatch.setattr(trace_math, "_BLOCK", 3)
    for backend in ("cpu", "gpu"):
        learner = learner_of(braintrace.ES_D_RTRL)
        with monkeypatch.context() as patch:
            patch.setattr(jax, "default_backend", lambda backend=backend: backend)
            grads = learner.etrace_grad(xs, ys, step_fn=squared(learner))
        found.append((grads, {k: st.value for k, st in learner.traces.items()}))
    assert agree(found[0][0], found[1][0], 1e-11)
    assert agree(found[0][1], found[1][1], 1e-11)


@pytest.mark.parametrize(("axis", "count"), [(0, 5), (1, 4)])
def test_a_norm_over_any_axis_takes_as_many_colours_as_it_mixes(axis, count):
    learner = braintrace.D_RTRL(Moving(lambda y: (y - jnp.mean(y, axis, keepdims=True))[:, :4]))
    learner.model.w.value = learner.model.w.value[:, :4]
    learner.model.h.value = jnp.zeros((5, 4))
    with warnings.catch_warnings(action="ignore"):
        learner.compile_graph(jnp.ones((5, 3)))
    assert [group.colouring[1] for group in learner.executor.groups] == [count]


@pytest.mark.parametrize("axis", [0, 1, None])
def test_a_wide_norm_goes_through_its_sums(axis):
    learner = braintrace.D_RTRL(Moving(lambda y: y / jnp.sqrt(1 + jnp.mean(y**2, axis, keepdims=True))))
    learner.model.h.value = jnp.zeros((20, learner.model.w.value.shape[1]))
    with warnings.catch_warnings(action="ignore"):
        learner.compile_graph(jnp.ones((20, 3)))
    (group,) = learner.executor.groups
    assert group.num_pulled == 3 < group.colouring[1]


# -- what has traces ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["single-step", "multi-step"])
def test_only_states_that_remember_have_traces(method):
    learner = braintrace.D_RTRL(net(cell=nn.LSTMCell), vjp_method=method)
    learner.compile_graph(data(1)[0][0])
    states = {trace.value.shape[0] for trace in learner.traces.values()}
    assert states == {1 if method == "single-step" else 2}  # a window reads the old output through its op
    assert [group.num_state for group in learner.graph.hidden_groups] == [2]
    assert "recomputed in each step" in learner.report.to_str()


@pytest.mark.parametrize("size", [1, 2])
def test_a_group_without_memory_has_no_traces(size, monkeypatch):
    xs, found = data(5)[0], []
    for reduced in (True, False):
        monkeypatch.setattr(d_rtrl.D_RTRL, "follows_chains", reduced)
        learner = braintrace.D_RTRL(net(cell=nn.ValinaRNNCell))
        learner.compile_graph(xs[0])
        assert bool(learner.traces) != reduced
        step = lambda x, learner=learner: jnp.sum(learner(x) ** 2)
        found.append(learner.etrace_grad(xs, step_fn=step, chunk_size=size))
    assert agree(*found, 1e-12)


class ReadsOld(brainstate.nn.Module):
    """The op reads the old `h`, a function of `c`; so may `h` itself, the output or another group."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.w = brainstate.ParamState(jnp.asarray(np.random.RandomState(0).randn(7, 4)))
        self.c, self.h, self.sum = (brainstate.HiddenState(jnp.zeros(n)) for n in (4, 4, 1))

    def update(self, x):
        old = self.h.value
        self.c.value = 0.9 * self.c.value + braintrace.matmul(jnp.concatenate([x, old]), self.w.value)
        self.h.value = jnp.tanh(self.c.value) * (1 + 0.5 * old if self.kind == "itself" else 1)
        read = self.h.value if self.kind == "other group" else self.c.value
        self.sum.value = 0.5 * self.sum.value + jnp.sum(read)
        return self.h.value + (old if self.kind == "output" else 0) + self.sum.value


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "states"), [("none", 1), ("itself", 2), ("output", 2), ("other group", 2)])
def test_a_state_remembers_if_its_old_value_is_read(kind, states, monkeypatch):
    xs, found = data(5, None)[0], []
    for reduced in (True, False):
        monkeypatch.setattr(d_rtrl.D_RTRL, "follows_chains", reduced)
        for size in (1, 2):
            learner = braintrace.D_RTRL(ReadsOld(kind))
            with warnings.catch_warnings(action="ignore"):
                learner.compile_graph(xs[0])
            shapes = {t.value.shape[0] for t in learner.traces.values()}
            assert shapes == {states if reduced else 2}
            step = lambda x, learner=learner: jnp.sum(learner(x) ** 2)
            found.append(learner.etrace_grad(xs, step_fn=step, chunk_size=size))
    assert all(agree(found[-1], other, 1e-12) for other in found)


# -- forms -------------------------------------------------------------------------------------------


class Turned(brainstate.nn.Module):
    """A static argument sends the op's output to other places."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.asarray(np.random.RandomState(0).randn(3, 4)))
        self.h = brainstate.HiddenState(jnp.zeros(4))

    def update(self, x, mode="plain"):
        y = braintrace.matmul(x, self.w.value)
        self.h.value = 0.9 * self.h.value + (y if mode == "plain" else y[::-1])
        return jnp.tanh(self.h.value)


@pytest.mark.parametrize("size", [1, 2, None])
def test_other_traces_are_asked_for(size):
    xs = data(4, None)[0]
    learner = braintrace.D_RTRL(Turned())
    for mode in ("turned", "plain"):
        learner.compile_graph(xs[0], mode=mode)
    gradient = lambda mode: learner.etrace_grad(
        xs, step_fn=lambda x: jnp.sum(learner(x, mode=mode)), chunk_size=size
    )
    gradient("plain")
    with pytest.raises(braintrace.CompilationError, match="compile_graph"):
        gradient("turned")
    learner.model.h.value = jnp.zeros(4)
    learner.compile_graph(xs[0], mode="turned")
    found = gradient("turned")
    fresh = braintrace.D_RTRL(Turned())
    fresh.compile_graph(xs[0], mode="turned")
    again = fresh.etrace_grad(xs, step_fn=lambda x: jnp.sum(fresh(x, mode="turned")), chunk_size=size)
    assert agree(found, again, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_back_to_a_batch_size_of_before(size):
    xs, ys = data(4, 3)
    learner = learner_of(batch_size=3)
    first = learner.etrace_grad(xs, ys, step_fn=squared(learner), chunk_size=size)
    learner.reset_state(2)
    learner.compile_graph(xs[0, :2])
    learner.etrace_evolve(xs[:, :2])
    learner.reset_state(3)
    assert agree(learner.etrace_grad(xs, ys, step_fn=squared(learner), chunk_size=size), first, 1e-12)


class Pruned(brainstate.nn.Module):
    """One of two forms makes its weight of more than the parameter; both keep the same trace."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.asarray(np.random.RandomState(0).randn(3, 4)))
        self.h = brainstate.HiddenState(jnp.zeros(4))

    def update(self, x, pruned=False):
        w = self.w.value * np.tri(3, 4) if pruned else self.w.value
        self.h.value = 0.9 * self.h.value + braintrace.matmul(x, w)
        return self.h.value


def test_forms_that_share_traces_may_make_their_weights_of_more():
    learner, xs = braintrace.D_RTRL(Pruned()), data(2, None)[0]
    for pruned in (True, False):
        learner.compile_graph(xs[0], pruned=pruned)
    learner(xs[0], pruned=False)
    with pytest.warns(UserWarning, match="has changed from step to step"):
        learner(xs[1], pruned=True)


class Scaled(brainstate.nn.Module):
    """A weight times a number that the model closes over."""

    def __init__(self):
        super().__init__()
        self.gain = 1.0
        self.w = brainstate.ParamState(jnp.asarray(np.random.RandomState(0).randn(3, 4)))
        self.h = brainstate.HiddenState(jnp.zeros(4))

    def update(self, x):
        self.h.value = 0.9 * self.h.value + braintrace.matmul(x, self.w.value * jnp.asarray(self.gain))
        return self.h.value


def test_a_weight_that_changes_from_step_to_step_is_said():
    learner = braintrace.D_RTRL(Scaled())
    xs = data(4, None)[0]
    learner.compile_graph(xs[0])
    with warnings.catch_warnings(action="error"):
        learner(xs[0])
        learner(xs[1])
    learner.model.gain = 2.0
    with pytest.warns(UserWarning, match="has changed from step to step"):
        learner(xs[2])

    def step(x):
        learner.model.gain = x[0]
        return jnp.sum(learner(x))

    with pytest.warns(UserWarning, match="may change from step to step"):
        learner.etrace_grad(xs, step_fn=step, chunk_size=1)


def test_a_warning_is_given_once_of_a_model():
    learner = learner_of()

    def step(x, y):
        learner.model.cell.h.value = learner.model.cell.h.value * 0.5
        return jnp.sum((learner(x) - y) ** 2)

    with warnings.catch_warnings(record=True, action="always") as found:
        for size in (None, 2, 1, None):
            learner.etrace_grad(*data(), step_fn=step, chunk_size=size)
    assert [w.filename for w in found] == [__file__]
    assert "`step_fn` assigns `cell.h`" in str(found[0].message)


@pytest.mark.slow
def test_a_mask_in_a_state_is_a_constant_until_it_is_assigned():
    case = CASES["weight_mask_in_a_state"]
    xs = jnp.stack(sequence(case, 4))

    def gradient(rule, size=None, step=lambda learner, x: jnp.sum(learner(x) ** 2), **options):
        learner = rule(case.build(), **options)
        learner.compile_graph(xs[0])
        return learner, learner.etrace_grad(xs, step_fn=partial(step, learner), chunk_size=size)

    _, truth = gradient(braintrace.BPTT)
    assert truth[("w",)].any()
    for rule, size in ((braintrace.D_RTRL, 1), (braintrace.D_RTRL, 2), (braintrace.RTRL, None)):
        learner, found = gradient(rule, size)
        assert agree(truth, found, 1e-10), (rule, size)
    assert ("mask",) in learner.other_states

    whole = lambda learner: learner.etrace_grad(xs, step_fn=lambda x: learner(x).sum())
    for again in (lambda learner: learner(xs[1]), whole):
        learner, _ = gradient(braintrace.D_RTRL)
        learner.model.mask.value = ~learner.model.mask.value
        learner.reset_state()
        again(learner)  # the traces began anew: no warning
        learner.model.mask.value = ~learner.model.mask.value
        with pytest.warns(UserWarning, match="the state `mask`, `gain`, which has changed"):
            again(learner)

    def assigns(learner, x):
        learner.model.gain.value = learner.model.gain.value * 0.9
        return jnp.sum(learner(x))

    with pytest.warns(UserWarning, match="`step_fn` assigns `gain`"):
        found = [gradient(braintrace.D_RTRL, size, assigns)[1] for size in (1, None)]
    assert agree(*found, 1e-10)


# -- what is given and returned ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("size", [25, None])
def test_memory_does_not_grow_where_chunks_do_not_divide_the_sequence(size):
    def memory(length):
        learner = learner_of(batch_size=8)
        learner.memory_budget = 2**17
        run = lambda xs, ys: learner.etrace_grad(xs, ys, step_fn=squared(learner), chunk_size=size)
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in data(length, 8)]
        pure = Pure.trace(run, *shapes)
        compiled = (
            jax.jit(lambda values, *arrays: pure(values, *arrays)).lower(pure.values(), *shapes).compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    assert memory(4001) < 1.2 * memory(401) + 40 * 4001  # the losses have one number a step


@pytest.mark.slow
@pytest.mark.parametrize("rule", [braintrace.D_RTRL, braintrace.RTRL, braintrace.BPTT])
@pytest.mark.parametrize("size", [1, 3])
def test_a_loss_with_a_unit_is_taken_by_its_number(rule, size):
    xs, ys = data(4)
    found = []
    for unit in (u.UNITLESS, u.mV**2):
        learner = learner_of(rule)
        step = lambda x, y, learner=learner, unit=unit: (squared(learner)(x, y) * unit, 3)
        found.append(learner.etrace_grad(xs, ys, step_fn=step, has_aux=True, chunk_size=size)[0])
    assert agree(found[0], found[1], 1e-12)


@pytest.mark.parametrize("size", [1, 2, None])
@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda learner, x: None, "returned None"),
        (lambda learner, x: (jnp.sum(learner(x)), 1), "has_aux=True"),
        (lambda learner, x: jnp.sum(learner.model(x)), "call the learner"),
    ],
)
def test_wrong_steps(step, message, size):
    learner = learner_of()
    with pytest.raises((TypeError, ValueError), match=message), warnings.catch_warnings(action="ignore"):
        learner.etrace_grad(data()[0], step_fn=lambda x: step(learner, x), chunk_size=size)


def test_wrong_weights_and_sequences():
    learner, xs = learner_of(), data()[0]
    step = lambda x: jnp.sum(learner(x))
    with pytest.raises(ValueError, match="does not hold"):
        learner.etrace_grad(xs, step_fn=step, weights={"other": brainstate.ParamState(jnp.ones(3))})
    with pytest.raises(ValueError, match="hidden states"):
        learner.etrace_grad(xs, step_fn=step, weights={"h": learner.model.cell.h})
    with pytest.raises(TypeError, match="stack"):
        learner.etrace_grad((x for x in xs), step_fn=step)
    with pytest.raises(TypeError, match="class"):
        braintrace.D_RTRL(Net)
    with pytest.raises(TypeError, match="text"):
        braintrace.ES_D_RTRL(net(), "0.9")


@pytest.mark.slow
def test_no_value_of_a_traced_step_is_left_behind():
    learner, xs = learner_of(), data()[0]
    with jax.checking_leaks():
        learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x)), chunk_size=np.int64(3))
