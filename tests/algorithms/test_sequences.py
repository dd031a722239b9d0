"""Drives over sequences: windows, episodes, masks, losses that read old states, programs that are known."""

from __future__ import annotations

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import braintrace as bt
from braintrace._executor import trace_math

from ..oracle import windows_of
from ..run import agree, difference, every

T, B, N, X = 7, 3, 4, 2
RULES = [bt.D_RTRL, bt.ES_D_RTRL, bt.RTRL, bt.BPTT]
FLAGS = np.random.RandomState(5).rand(T, B) < 0.35
FLAGS[0] = [True, False, True]


class Leaky(brainstate.nn.Module):
    """Leaky integrators: D-RTRL is exact on them."""

    def __init__(self):
        super().__init__()
        rng = np.random.RandomState(0)
        self.w = brainstate.ParamState(jnp.asarray(rng.randn(X, N)))
        self.leak = brainstate.ParamState(jnp.asarray(rng.rand(N)))

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.full((batch_size, N), 0.3))

    def reset_state(self, batch_size=None, **_):
        self.h.value = jnp.full((batch_size, N), 0.3)

    def update(self, x):
        drive = bt.matmul(x, self.w.value)
        leak = jnp.broadcast_to(bt.element_wise(self.leak.value)[None], drive.shape)
        self.h.value = leak * self.h.value + drive
        return self.h.value


class Recurrent(Leaky):
    """With a recurrent weight, each rule is another."""

    def __init__(self):
        super().__init__()
        self.v = brainstate.ParamState(jnp.asarray(np.random.RandomState(1).randn(N, N) / 3))

    def update(self, x):
        drive = bt.matmul(x, self.w.value) + bt.matmul(self.h.value, self.v.value)
        leak = jnp.broadcast_to(bt.element_wise(self.leak.value)[None], drive.shape)
        self.h.value = leak * self.h.value + jnp.tanh(drive)
        return self.h.value


def data(seed=0, length=T):
    rng = np.random.RandomState(seed)
    return jnp.asarray(rng.randn(length, B, X)), jnp.asarray(rng.randn(length, B, N))


def learner_of(rule, model=Recurrent, **options):
    return bt.compile(model(), rule, data()[0][0], batch_size=B, **options)


def squared(learner):
    return lambda x, y: jnp.sum((learner(x) - y) ** 2)


def gradient(rule, size=None, model=Recurrent, step=squared, sequences=None, options=None, **asked):
    learner = learner_of(rule, model, **(options or {}))
    asked = {"reduction": "sum", **asked}
    return learner.etrace_grad(*(sequences or data()), step_fn=step(learner), chunk_size=size, **asked)


# -- windows -----------------------------------------------------------------------------------------------


def in_windows(step, model, window, rest_first=True):
    """BPTT inside windows, and the diagonal influence before each: design section 7, with dense matrices."""
    del step
    net = model()
    brainstate.nn.init_all_states(net, batch_size=B)
    names = list(net.states(brainstate.ParamState))
    params = {k: net.states()[k].value for k in names}
    h0 = net.h.value

    def one(p, h, x, open_ops=True):
        stop = (lambda a: a) if open_ops else jax.lax.stop_gradient
        drive = x @ p[("w",)]
        if ("v",) in p:
            drive = drive + stop(h) @ p[("v",)] if open_ops else drive + jax.lax.stop_gradient(h) @ p[("v",)]
            drive = jnp.tanh(drive)
        return p[("leak",)][None] * h + drive

    xs, ys = data()
    trace = jax.tree.map(lambda a: jnp.zeros((B, N, *a.shape)), params)
    total = jax.tree.map(jnp.zeros_like, params)
    h = h0
    for steps in windows_of(list(range(T)), window, rest_first=rest_first):
        part = slice(steps[0], steps[-1] + 1)

        def loss(p, h, part=part):
            losses = []
            for x, y in zip(xs[part], ys[part], strict=True):
                h = one(p, h, x)
                losses.append(jnp.sum((h - y) ** 2))
            return sum(losses)

        within, signal = jax.grad(loss, (0, 1))(params, h)
        past = jax.tree.map(lambda e, g=signal: jnp.einsum("bn,bn...->...", g, e), trace)
        total = jax.tree.map(lambda a, b, c: a + b + c, total, within, past)
        for x in xs[part]:
            diagonal = jnp.einsum("bnbn->bn", jax.jacobian(lambda h, x=x: one(params, h, x, False))(h))
            added = jax.jacobian(lambda p, h=h, x=x: one(p, h, x, False))(params)
            trace = jax.tree.map(
                lambda e, a, d=diagonal: jnp.einsum("bn,bn...->bn...", d, e) + a, trace, added
            )
            h = one(params, h, x)
    return total


@pytest.mark.slow
@pytest.mark.parametrize("window", every(4, [T, 1, 2, 3]))
def test_windows_of_a_step_are_back_propagated_through(window):
    options = {"vjp_method": "multi-step", "window": window}
    found = gradient(bt.D_RTRL, options=options)
    assert agree(in_windows(None, Recurrent, window), found, 1e-11), window
    if window == T:
        assert agree(gradient(bt.BPTT), found, 1e-12)


@pytest.mark.slow
def test_a_plain_call_of_a_multi_step_learner_is_a_window_of_one():
    learner = learner_of(bt.D_RTRL, vjp_method="multi-step")
    weights, total = learner.param_states, None
    for x, y in zip(*data(), strict=True):
        grads = brainstate.transform.grad(lambda x=x, y=y: squared(learner)(x, y), weights)()
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    assert agree(in_windows(None, Recurrent, 1), total, 1e-11)
    for size in (None, 1):  # a step of its own, in both
        assert agree(total, gradient(bt.D_RTRL, size, options={"vjp_method": "multi-step"}), 1e-11)
    single = gradient(bt.D_RTRL)
    assert not agree(single, total, 1e-3)

    def as_before(learner):
        return lambda x, y: jnp.sum((learner(bt.MultiStepData(x)) - y) ** 2, (1, 2))

    for size in (1, 3):  # the form that takes several steps at once
        old = gradient(bt.D_RTRL, size, step=as_before, options={"vjp_method": "multi-step"})
        assert agree(in_windows(None, Recurrent, size, rest_first=False), old, 1e-11), size


def test_averages_in_windows():
    step_by_step = []
    for size in (1, 3):
        learner = learner_of(bt.ES_D_RTRL, vjp_method="multi-step", window=size)
        learner.etrace_evolve(data()[0])
        step_by_step.append({k: st.value for k, st in learner.etrace_states.items()})
    assert agree(*step_by_step, 1e-12)


@pytest.mark.parametrize(
    "options", [{"window": 0}, {"window": True}, {"window": 4, "vjp_method": "single-step"}]
)
def test_wrong_windows(options):
    with pytest.raises(ValueError, match=r"Windows of 4 steps|`window` is a number"):
        bt.D_RTRL(Leaky(), **options)


# -- a loss that reads a state before the call ---------------------------------------------------------------


def change_of_state(learner):
    def step(x, y):
        before = learner.model.h.value
        out = learner(x)
        return jnp.sum((out - before) ** 2) + jnp.sum(before * y)

    return step


class Layers(brainstate.nn.Module):
    """Two LSTM layers: within a step, each weight reaches the loss through its trace and past it."""

    def __init__(self):
        super().__init__()
        with brainstate.random.seed_context(0):
            self.cells = [bt.nn.LSTMCell(m, N) for m in (X, N)]

    def update(self, x):
        for cell in self.cells:
            x = cell(x)
        return x


@pytest.mark.parametrize("size", every(2, [3, None]))
def test_chunks_of_layers_whose_weights_reach_the_loss_in_two_ways(size):
    truth, found = (gradient(bt.D_RTRL, n, Layers) for n in (1, size))
    assert agree(truth, found, 1e-11), difference(truth, found)


@pytest.mark.parametrize("size", every(2, [1, 3, None]))
def test_a_loss_may_read_a_state_before_the_call(size):
    truth = gradient(bt.BPTT, model=Leaky, step=change_of_state)
    found = gradient(bt.D_RTRL, size, Leaky, change_of_state)
    assert agree(truth, found, 1e-11), difference(truth, found)


@pytest.mark.slow
def test_a_loss_that_reads_a_state_before_the_call_in_windows_and_whole():
    truth = gradient(bt.BPTT, step=change_of_state)
    assert agree(truth, gradient(bt.RTRL, 3, step=change_of_state), 1e-10)
    options = {"vjp_method": "multi-step", "window": 2}
    exact = gradient(bt.BPTT, model=Leaky, step=change_of_state)
    assert agree(exact, gradient(bt.D_RTRL, None, Leaky, change_of_state, options=options), 1e-11)


def change_that_is_watched(learner):
    def step(x, y):
        loss = change_of_state(learner)(x, y)
        jax.debug.callback(lambda _: None, loss)  # steps that do more than compute are taken one by one
        return loss

    return step


@pytest.mark.parametrize(
    ("rule", "options"),
    [(bt.D_RTRL, {}), (bt.D_RTRL, {"vjp_method": "multi-step"}), (bt.ES_D_RTRL, {}), (bt.RTRL, {})],
)
def test_a_loss_that_reads_a_state_before_the_call_in_steps_of_their_own(rule, options):
    truth = gradient(rule, model=Leaky, step=change_of_state, options=options)
    found = gradient(rule, model=Leaky, step=change_that_is_watched, options=options)
    assert agree(truth, found, 1e-11), difference(truth, found)


@pytest.mark.slow
def test_a_state_read_before_the_call_in_a_loop_of_ones_own_is_told_of():
    learner = learner_of(bt.D_RTRL)
    x, y = (a[0] for a in data())
    learner(x)
    weights = learner.param_states
    with pytest.warns(UserWarning, match="`h` is read before the learner is called"):
        brainstate.transform.grad(lambda: change_of_state(learner)(x, y), weights)()
    learner = learner_of(bt.D_RTRL)
    loop = lambda xs: brainstate.transform.for_loop(lambda x: (learner(x), learner.model.h.value)[1], xs)
    brainstate.transform.jit(loop)(data()[0])  # what is read after a call is the call's own: no warning
    twice = lambda: jnp.sum(learner(x)) + jnp.sum(learner.model.h.value) + jnp.sum(learner(x))
    brainstate.transform.grad(twice, learner.param_states)()


# -- paths that are left out ---------------------------------------------------------------------------------


def with_an_encoder(learner):
    encoder = brainstate.ParamState(jnp.eye(X))
    learner.encoder = encoder
    return lambda x, y: jnp.sum((learner(x @ encoder.value) - y) ** 2)


def with_a_filter(learner):
    low = brainstate.ShortTermState(jnp.zeros((B, N)))

    def step(x, y):
        low.value = 0.9 * low.value + learner(x)
        return jnp.sum((low.value - y) ** 2)

    return step


def with_feedback(learner):
    return lambda x, y: jnp.sum((learner(x + learner.model.h.value[:, :X]) - y) ** 2)


def with_a_tied_encoder(learner):
    weight = next(iter(learner.param_states.values()))
    return lambda x, y: jnp.sum((learner(x * jnp.sum(jax.tree.leaves(weight.value)[0])) - y) ** 2)


def with_feedback_twice(learner):
    return lambda x, y: jnp.sum((learner(x) - y) ** 2) + with_feedback(learner)(x, y)


def with_pauses(learner):
    def step(x, y):
        h = brainstate.transform.cond(x[0, 0] > 0, learner, lambda _: learner.model.h.value, x)
        return jnp.sum((h - y) ** 2)

    return step


class Averaging(Leaky):
    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.mean = brainstate.LongTermState(jnp.zeros((batch_size, N)))

    def update(self, x):
        h = super().update(x)
        self.mean.value = 0.9 * self.mean.value + h
        return h


def with_an_average(learner):
    return lambda x, y: jnp.sum((learner(x) + learner.model.mean.value - y) ** 2)


def lstm():
    return bt.nn.LSTMCell(X, N)  # only marked ops read its `h`


class Apart(Leaky):
    """A recurrent state beside the one that is returned."""

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.r, self.o = brainstate.HiddenState(jnp.zeros((batch_size, N))), brainstate.ParamState(jnp.eye(N))

    def update(self, x):
        self.r.value = jnp.tanh(bt.matmul(self.r.value, self.o.value) + x @ jnp.ones((X, N)))
        return super().update(x)


def with_a_state_apart(learner):
    return lambda x, y: jnp.sum((learner(x) + learner.model.r.value - y) ** 2)


class Readout(Leaky):
    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.r, self.o = brainstate.HiddenState(jnp.zeros((batch_size, N))), brainstate.ParamState(jnp.eye(N))

    def update(self, x):
        self.r.value = 0.8 * self.r.value + bt.matmul(super().update(x), self.o.value)
        return self.r.value


def with_the_old_readout(learner):
    return lambda x, y: jnp.sum((learner.model.r.value + learner(x) - y) ** 2)


@pytest.mark.parametrize(
    ("step", "message", "rule", "options"),
    every(
        2,
        [
            (with_a_filter, "carries `a ShortTermState outside of the model`", bt.D_RTRL, {}),
            (with_feedback, "feeds `h` back into the model", bt.D_RTRL, {}),
            (with_feedback, "feeds `h` back into the model", bt.D_RTRL, {"vjp_method": "multi-step"}),
            (with_feedback, "feeds `h` back into the model", bt.RTRL, {}),
            (with_feedback_twice, "feeds `h` back into the model", bt.D_RTRL, {}),
            (with_a_tied_encoder, "makes an argument of the model with", bt.D_RTRL, {}),
            (with_a_tied_encoder, "makes an argument of the model with", bt.D_RTRL, {"rank": 10**6}),
            (with_pauses, "reads a hidden state", bt.D_RTRL, {}),
            (change_of_state, "reads `h` as it was before", bt.D_RTRL, {"model": lstm}),
            (with_an_average, "reads `mean`, which the model carries", bt.D_RTRL, {"model": Averaging}),
            (with_a_state_apart, "at `r`, on which no output depends", bt.D_RTRL, {"model": Apart}),
            (with_the_old_readout, "reads `r` as it was before", bt.D_RTRL, {"model": Readout}),
        ],
    ),
)
def test_paths_beside_the_model_are_told_of(step, message, rule, options):
    options = {"model": Recurrent, "options": options} if "model" not in options else options
    with pytest.warns(UserWarning, match=message):
        gradient(rule, step=step, **options)
    gradient(bt.BPTT, step=step, model=options["model"])


def test_parameters_outside_of_the_model_are_told_of():
    learner = learner_of(bt.D_RTRL)
    step = with_an_encoder(learner)
    with pytest.warns(UserWarning, match="act through a state that the step carries on"):
        learner.etrace_grad(*data(), step_fn=step, weights={"encoder": learner.encoder})


# -- masks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", every(2, RULES))
@pytest.mark.parametrize("size", every(2, [1, None]))
def test_what_a_mask_leaves_out_may_be_anything(rule, size):
    xs, ys = data()
    mask = jnp.asarray([1.0, 0, 2, 0, 0, 1, 1])
    holes = ys + jnp.asarray([0, jnp.nan, 0, jnp.inf, -jnp.inf, 0, 0])[:, None, None]
    found = [gradient(rule, size, sequences=(xs, y), mask=mask) for y in (ys, holes)]
    assert agree(*found, 1e-12)


@pytest.mark.parametrize("rule", every(2, RULES))
def test_a_mask_may_have_a_number_for_each_sample(rule):
    xs, ys = data()
    mask = jnp.asarray(np.random.RandomState(3).randint(0, 3, (T, B)), float)
    each = lambda learner: lambda x, y: jnp.sum((learner(x) - y) ** 2, -1)
    holes = jnp.where((mask == 0)[:, :, None], jnp.nan, ys)
    found = gradient(rule, sequences=(xs, holes), step=each, mask=mask, reduction="mean")
    weighed = lambda learner: lambda x, y, m: jnp.sum(jnp.sum((learner(x) - y) ** 2, -1) * m)
    want = gradient(rule, sequences=(xs, ys, mask), step=weighed)
    assert agree(jax.tree.map(lambda g: g / mask.sum(), want), found, 1e-12)
    with pytest.raises(ValueError, match="one for each sample"):
        gradient(rule, sequences=(xs, ys), mask=mask)


@pytest.mark.parametrize(("rule", "reset"), [(bt.D_RTRL, None), (bt.ES_D_RTRL, FLAGS)])
def test_steps_of_weight_zero_add_no_gradient(rule, reset):
    """Without `mask`, the gradients of all steps are computed, and some are multiplied by zero."""
    mask = jnp.asarray([0.0, 0, 2, 0, 0, 1, 0])
    step = lambda weigh: lambda learner: lambda x, y, m: weigh(m) * squared(learner)(x, y)
    nans = step(lambda m: jnp.where(m == 0, jnp.nan, 1.0))
    want = gradient(rule, 1, step=step(lambda m: m), sequences=(*data(), mask), reset=reset)
    assert agree(want, gradient(rule, 1, step=nans, sequences=(*data(), mask), mask=mask, reset=reset), 1e-12)
    masks = jnp.stack([mask, jnp.ones(T), jnp.zeros(T)])
    each = jax.vmap(lambda m: gradient(rule, 1, sequences=data(), mask=m, reset=reset))(masks)
    assert agree(want, jax.tree.map(lambda g: g[0], each), 1e-12)
    assert not any(g[2].any() for g in jax.tree.leaves(each))


def test_factors_of_large_traces_are_stored_unchanged(monkeypatch):
    values = jnp.asarray([0.0, -0.0, 1e-40, -3.7, 1e30, jnp.inf, -jnp.inf, jnp.nan])
    found = jax.jit(lambda a: trace_math.stored(a, 2**20, [a[::-1], jnp.ones(0)]))(values)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(values))
    np.testing.assert_array_equal(found, values)
    for size in (0, 2**20):  # a zero trace has a gradient of zero, whatever the slope
        factor, times = trace_math.guarded(values, size)
        np.testing.assert_array_equal(times(factor, jnp.zeros(8)), jnp.zeros(8))
        np.testing.assert_array_equal(times(factor, jnp.full(8, 2.0))[:5], 2 * values[:5])
    many = jnp.full((1, 1, 2**15, 8), -1e-9).at[0, 0, 0].set(0).at[0, 0, 1].set(1)
    found = trace_math.contract_states(values[None, None, None], many)
    assert not found[0].any()  # also of large traces
    np.testing.assert_array_equal(found[1, :5], values[:5])
    assert not jnp.isfinite(found[1:, 5:]).any()  # and an infinite slope is never a large number
    want = gradient(bt.D_RTRL, None)
    monkeypatch.setattr(trace_math, "_STORED", 0)
    assert agree(want, gradient(bt.D_RTRL, 1), 1e-12)


def test_an_output_gate_has_no_trace(monkeypatch):
    model = lambda: brainstate.random.seed(0) or lstm()
    each = lambda: [gradient(bt.D_RTRL, size, model, reset=FLAGS) for size in (1, 3)]
    found, traces = each(), learner_of(bt.D_RTRL, model).etrace_states
    assert {st.value.shape[-1] for st in traces.values()} == {3 * N}  # of four gates
    monkeypatch.setattr("braintrace._rules.d_rtrl.with_columns", lambda graph: graph)
    for a, b in zip(found, each(), strict=True):
        assert agree(a, b, 1e-12)


# -- episodes ------------------------------------------------------------------------------------------------


def of_episodes(rule, model=Recurrent, **options):
    """Each episode as a sequence of its own, of a batch of one."""
    xs, ys = data()
    total = None
    for row in range(B):
        starts = [t for t in range(T) if t == 0 or FLAGS[t, row]]
        for start, stop in zip(starts, [*starts[1:], T], strict=True):
            net = model()
            learner = bt.compile(net, rule, xs[0, :1], batch_size=1, **options)
            part = (slice(start, stop), slice(row, row + 1))
            step = squared(learner)
            grads = learner.etrace_grad(xs[part], ys[part], step_fn=step, reduction="sum")
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    return total


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (bt.D_RTRL, {}),
        pytest.param(bt.ES_D_RTRL, {}, marks=pytest.mark.slow),
        pytest.param(bt.RTRL, {}, marks=pytest.mark.slow),
        pytest.param(bt.BPTT, {}, marks=pytest.mark.slow),
    ],
)
def test_episodes_are_sequences_of_their_own(rule, options):
    want = of_episodes(rule, **options)
    for size in (1, 3, None):
        found = gradient(rule, size, options=options, reset=FLAGS)
        assert agree(want, found, 1e-11), (rule, size, difference(want, found))


PATTERN = BCOO.fromdense(np.array([[1, 0, 1, 1], [0, 1, 1, 0]]))


class WithUnits(Leaky):
    """In millivolts, and by a sparse weight."""

    def __init__(self):
        super().__init__()
        self.w.value = jnp.asarray(np.random.RandomState(0).randn(5)) * u.mV

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.full((batch_size, N), 0.3) * u.mV)

    def reset_state(self, batch_size=None, **_):
        self.h.value = jnp.full((batch_size, N), 0.3) * u.mV

    def update(self, x):
        self.h.value = 0.9 * self.h.value + bt.sparse_matmul(x, self.w.value, sparse_mat=PATTERN)
        return self.h.value / u.mV


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:No output and no state of a step depends on `leak`")
@pytest.mark.parametrize("rule", every(2, [bt.D_RTRL, bt.ES_D_RTRL]))
def test_episodes_with_units_and_sparse_weights(rule):
    want = jax.tree.leaves(of_episodes(rule, WithUnits))
    found = jax.tree.leaves(gradient(rule, 3, WithUnits, reset=FLAGS))
    np.testing.assert_allclose(found[0], want[0], rtol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("rule", every(2, [bt.D_RTRL, bt.ES_D_RTRL]))
def test_episodes_of_mapped_learners(rule):
    """With as many units as samples, which must not be mistaken for each other."""
    xs, found = data()[0], []
    for mapped in (False, True):
        brainstate.random.seed(0)
        with jax.numpy_rank_promotion("allow"):
            cell = bt.nn.GRUCell(X, B)
        learner = bt.compile(cell, rule, xs[0], batch_size=B, vmap=mapped)
        learner.etrace_evolve(xs[:2])
        learner.reset_state(rows=FLAGS[1])
        step = lambda x, learner=learner: jnp.sum(learner(x) ** 2)
        found.append(learner.etrace_grad(xs, step_fn=step, reset=FLAGS))
    assert agree(*found, 1e-11)
    with pytest.raises(bt.NotSupportedError, match="mapped"):
        learner.module.etrace_grad(xs, step_fn=step, reset=FLAGS)
    with pytest.raises(ValueError, match="did not call it"):
        learner_of(rule).etrace_grad(xs, step_fn=step)


@pytest.mark.slow
def test_episodes_in_windows_and_with_losses_of_old_states():
    options = {"vjp_method": "multi-step", "window": T}
    assert agree(gradient(bt.BPTT, reset=FLAGS), gradient(bt.D_RTRL, options=options, reset=FLAGS), 1e-12)
    options["window"] = 3
    want = gradient(bt.BPTT, model=Leaky, step=change_of_state, reset=FLAGS)
    for given in ({}, options):
        found = gradient(bt.D_RTRL, None, Leaky, change_of_state, options=given, reset=FLAGS)
        assert agree(want, found, 1e-11), given


@pytest.mark.parametrize("rule", every(2, [bt.D_RTRL, bt.ES_D_RTRL, bt.RTRL]))
def test_rows_begin_anew_in_a_loop_of_ones_own(rule):
    learner = learner_of(rule)
    weights = learner.param_states

    def step(total, given):
        x, y, flags = given
        learner.reset_state(rows=flags)
        grads = brainstate.transform.grad(lambda: squared(learner)(x, y), weights)()
        return jax.tree.map(jnp.add, total, grads), None

    def run(xs, ys, flags):
        zeros = {k: jnp.zeros_like(st.value) for k, st in weights.items()}
        return brainstate.transform.scan(step, zeros, (xs, ys, flags))[0]

    found = brainstate.transform.jit(run)(*data(), jnp.asarray(FLAGS))
    want = gradient(rule, reset=FLAGS)
    assert agree(want, found, 1e-11), difference(want, found)


class Unbatched(Leaky):
    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros(N))

    def reset_state(self, batch_size=None, **_):
        self.h.value = jnp.zeros(N)

    def update(self, x):
        self.h.value = 0.9 * self.h.value + bt.matmul(x, self.w.value)
        return self.h.value


class Delayed(Leaky):
    """As many steps of delay as there are samples, and random numbers."""

    def __init__(self):
        super().__init__()
        self.random = brainstate.random.RandomState(jax.random.key(0))

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.said = brainstate.ShortTermState(jnp.zeros((B, batch_size, N)))

    def reset_state(self, batch_size=None, **_):
        super().reset_state(batch_size)
        self.said.value = jnp.zeros((B, batch_size, N))

    def update(self, x):
        now = super().update(x * self.random.random(x.shape))
        self.said.value = jnp.concatenate([self.said.value[1:], now[None]])
        return self.said.value[0]


def test_wrong_resets():
    learner = learner_of(bt.D_RTRL)
    with pytest.raises(ValueError, match="a boolean for each sample"):
        learner.reset_state(rows=jnp.ones((B, 2)))
    for flags in (FLAGS[:3], FLAGS.astype(float)):
        with pytest.raises(ValueError, match=r"of shape \(time, batch\)"):
            gradient(bt.D_RTRL, reset=flags)
    with pytest.raises(bt.CompilationError, match="`said` has no axis of 3 samples in front"):
        gradient(bt.D_RTRL, model=Delayed, reset=FLAGS)
    net = Unbatched()
    alone = bt.compile(net, bt.D_RTRL, jnp.ones(X))
    with pytest.raises(bt.CompilationError, match="`h` has no axis of 3 samples in front"):
        alone.etrace_grad(data()[0][:, 0], step_fn=lambda x: alone(x).sum(), reset=FLAGS)


@pytest.mark.slow
def test_a_reset_of_states_alone_is_told_of_in_a_loop():
    learner = learner_of(bt.D_RTRL)
    x = data()[0][0]
    learner(x)
    learner.reset_state(B)
    learner(x)  # both were reset: no warning
    learner(x)
    brainstate.nn.reset_all_states(learner.model, batch_size=B)
    with pytest.warns(UserWarning, match="`h` was set since the last call"):
        learner(x)


# -- programs that are known ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [bt.D_RTRL, bt.BPTT])
def test_a_second_sequence_compiles_nothing(rule, caplog):
    learner = learner_of(rule)
    gain = jnp.asarray(2.0)

    def run(scale):
        step = lambda x, y: scale * jnp.sum(jax.nn.relu(learner(x) - y))  # another function each time
        return learner.etrace_grad(*data(), step_fn=step)

    first = run(gain)
    with jax.log_compiles():
        second = run(gain)
        assert "Finished XLA compilation" not in caplog.text
        assert "Compiling" not in caplog.text
        assert not agree(first, second, 1e-12)  # the states have gone on
        tripled = run(3 * gain)  # what is closed over is an input
        assert "Finished XLA compilation of jit(<lambda>)" not in caplog.text
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(tripled))
    run(2.0)  # a number in the program: another program, and no stale one


def test_another_derivative_rule_is_another_program():
    learner = learner_of(bt.D_RTRL, Leaky)

    def run(slope):
        @jax.custom_vjp
        def spike(v):
            return (v > 0).astype(v.dtype)

        spike.defvjp(lambda v: (spike(v), v), lambda v, g: (slope * g,))
        learner.reset_state(B)
        return learner.etrace_grad(*data(), step_fn=lambda x, y: jnp.sum(spike(learner(x)) * y))

    one, two = run(1.0), run(2.0)
    assert agree(jax.tree.map(lambda g: 2 * g, one), two, 1e-12)


def test_what_the_model_closes_over_is_not_stale():
    class Scaled(Leaky):
        scale = 1.0

        def update(self, x):
            return self.scale * super().update(x)

    learner = learner_of(bt.D_RTRL, Scaled)
    found = []
    for scale in (1.0, 2.0):
        learner.model.scale = scale
        learner.reset_state(B)
        found.append(learner.etrace_grad(*data(), step_fn=lambda x, y: jnp.sum(learner(x))))
    assert agree(jax.tree.map(lambda g: 2 * g, found[0]), found[1], 1e-12)


def test_a_step_is_traced_once():
    learner, calls = learner_of(bt.D_RTRL), []

    def step(x, y):
        calls.append(None)
        return squared(learner)(x, y)

    learner.etrace_grad(*data(), step_fn=step, chunk_size=2)
    assert len(calls) == 1
