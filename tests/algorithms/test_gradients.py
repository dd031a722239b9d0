"""Each rule against its definition, on every model of the zoo, in single steps and in windows."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace._compiler.leaky_readouts import followed_by_filters
from braintrace._executor import pending_steps
from braintrace._rules.deferred import is_pending

from ..oracle import bptt, loss
from ..run import (
    agree,
    brute_force,
    by_bptt,
    by_d_rtrl,
    compiled,
    difference,
    digest,
    every,
    is_flat,
    loops_forever,
    online,
    sequence,
    some,
)
from ..zoo import CASES, IN_CONTROL_FLOW, WITH_WHILE, Step

ROUND_OFF = 1e-10


EXACT = [name for name, case in CASES.items() if case.exact]


@pytest.mark.parametrize("name", every(16, CASES))
def test_d_rtrl_equals_bptt_where_and_only_where_the_verdict_is_exact(name):
    (graph, found), truth = by_d_rtrl(name), by_bptt(name)
    differs = {path for path, d in difference(truth, found).items() if not d < ROUND_OFF}
    assert (is_flat(graph), loops_forever(graph)) == (name not in IN_CONTROL_FLOW, name in WITH_WHILE)
    verdict = graph.exactness()
    assert verdict.exact == CASES[name].exact, str(verdict)
    assert differs == set(verdict.weights), (str(verdict), difference(truth, found))


def by_definition() -> list[Any]:
    """Every model on which a rule is approximate and some of the others, with D-RTRL and one more."""
    more = [("ES_D_RTRL", None), ("D_RTRL", 2), ("ES_D_RTRL", 2), ("ES_D_RTRL", None), ("D_RTRL", 4)]
    exact = set(some(16, EXACT))
    names = [n for n, c in CASES.items() if c.kind != "complex" and (not c.exact or n in exact)]
    names = [n for n in names if n not in IN_CONTROL_FLOW | WITH_WHILE]
    return [(n, *more[digest(n) % len(more)]) for n in names]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rule", "window"), by_definition())
def test_rules_equal_their_definitions(name, rule, window):
    case, (graph, found) = CASES[name], by_d_rtrl(name)
    xs = sequence(case)
    brute = brute_force(name)
    # a leaky readout that traces follow is exact
    step_by_step = by_bptt(name) if followed_by_filters(graph) else brute.d_rtrl(xs)
    assert agree(step_by_step, found, ROUND_OFF), difference(step_by_step, found)
    options: dict[str, Any] = {"vjp_method": "multi-step" if window else "single-step"}
    if rule == "D_RTRL":
        expected = brute.d_rtrl(xs, window) if window else step_by_step
    else:
        expected, options["decay_or_rank"] = brute.es_d_rtrl(xs, 0.7, window), 0.7
    found = online(getattr(braintrace, rule)(case.build(), **options), xs, window)
    assert agree(expected, found, ROUND_OFF), (rule, window, difference(expected, found))


@pytest.mark.parametrize("rule", [braintrace.D_RTRL, partial(braintrace.ES_D_RTRL, decay_or_rank=0.7)])
def test_one_step_has_its_whole_gradient_whatever_it_does_to_complex_numbers(rule):
    case = CASES["mod_relu_rnn"]
    xs = sequence(case, 1)
    truth, found = bptt(case.build(), xs), online(rule(case.build()), xs)
    assert agree(truth, found, ROUND_OFF), difference(truth, found)


def adaptive(p: Any, v: Any, a: Any, x: Any) -> Any:
    leak = braintrace.element_wise(p.leak, jax.nn.sigmoid)[None]
    v = leak * v - 0.3 * a + braintrace.matmul(x, p.w) + 0.2 * braintrace.matmul(a, p.r)
    return v, 0.8 * a + 0.2 * jnp.tanh(v)


def reset(h: Any) -> Any:
    """Reset one of two samples, and clip both."""
    return jnp.clip(jnp.where(jnp.asarray([[True], [False]]), 0.1, h), -0.5, 0.5)


PACKED: dict[str, Any] = {
    "joined": (lambda h: jnp.split(h, 2, -1), lambda parts, h: jnp.concatenate(parts, -1)),
    "stacked": (lambda h: (h[0], h[1]), lambda parts, h: jnp.stack(parts)),
    "stacked_last": (lambda h: (h[..., 0], h[..., 1]), lambda parts, h: jnp.stack(parts, -1)),
    "set": (
        lambda h: (h[:, :4], h[:, 4:]),
        lambda parts, h: h.at[:, :4].set(parts[0]).at[:, 4:].set(parts[1]),
    ),
    "reshaped": (
        lambda h: (h.reshape(2, 2, 4)[:, 0], h.reshape(2, 2, 4)[:, 1]),
        lambda parts, h: jnp.stack(parts, 1).reshape(2, 8),
    ),
    "interleaved": (
        lambda h: (h[:, ::2], h[:, 1::2]),
        lambda parts, h: jnp.stack(parts, -1).reshape(2, 8),
    ),
    "reset first": (lambda h: jnp.split(reset(h), 2, -1), lambda parts, h: jnp.concatenate(parts, -1)),
    "reset last": (lambda h: jnp.split(h, 2, -1), lambda parts, h: reset(jnp.concatenate(parts, -1))),
    "reset stacked": (lambda h: tuple(reset(h)), lambda parts, h: jnp.stack(parts)),
}


FIRST, LAST = ("reset first", "reset stacked"), ("reset last",)
OF_ADAPTIVE = {"w": (3, 4), "r": (4, 4), "leak": 4}
START, *DRAWN = np.split(np.random.RandomState(0).randn(40), [16, 22, 28, 34])
START, INPUTS = 0.3 * START.reshape(2, 2, 4), [jnp.asarray(x.reshape(2, 3)) for x in DRAWN]


@cache
def of_parts(rule: Any, window: int | None, first: Any, last: Any) -> Any:
    """The gradient of two states, which are changed by `first` before a step and by `last` after it."""

    def apart(p: Any, s: Any, x: Any) -> Any:
        v, a = adaptive(p, first(s.v), first(s.a), x)
        return {"v": last(v), "a": last(a)}, jnp.sin(v)

    states = {"v": jnp.asarray(START[0]), "a": jnp.asarray(START[1])}
    return online(rule(Step(apart, OF_ADAPTIVE, states)), INPUTS, window)


def unchanged(h: Any) -> Any:
    return h


@pytest.mark.parametrize("form", every(5, PACKED))
@pytest.mark.parametrize(
    ("rule", "window"),
    every(
        2,
        [
            (braintrace.D_RTRL, None),
            (partial(braintrace.D_RTRL, vjp_method="multi-step"), 2),
            (partial(braintrace.ES_D_RTRL, decay_or_rank=0.7), None),
            (braintrace.RTRL, None),
        ],
    ),
)
def test_a_packed_state_is_its_parts(form, rule, window):
    take, join = PACKED[form]

    def packed(p: Any, s: Any, x: Any) -> Any:
        v, a = adaptive(p, *take(s.h), x)
        return {"h": join([v, a], s.h)}, jnp.sin(v)

    in_a_row = form in ("set", "reshaped", "reset last")
    whole = jnp.concatenate(START, -1) if in_a_row else join([*jnp.asarray(START)], None)
    two = of_parts(rule, window, *(reset if form in names else unchanged for names in (FIRST, LAST)))
    one = online(rule(Step(packed, OF_ADAPTIVE, {"h": whole})), INPUTS, window)
    assert agree(two, one, ROUND_OFF), difference(two, one)


@pytest.mark.slow
@pytest.mark.parametrize("name", some(12, [n for n in CASES if n not in WITH_WHILE]))
def test_a_window_over_everything_is_bptt(name):
    case = CASES[name]
    xs, truth = sequence(case), by_bptt(name)
    found = online(braintrace.D_RTRL(case.build(), vjp_method="multi-step"), xs, len(xs))
    assert agree(truth, found, ROUND_OFF), difference(truth, found)


@pytest.mark.slow
@pytest.mark.parametrize("name", some(15, CASES))
def test_chunks_change_no_number(name):
    case = CASES[name]
    xs = [x if isinstance(x, tuple) else (x,) for x in sequence(case)]
    stacked = [jnp.stack(parts) for parts in zip(*xs, strict=True)]
    learners = [compiled(braintrace.D_RTRL(case.build()), xs[0]) for _ in range(3)]

    def drive(learner: Any, size: int) -> Any:
        step = lambda *x: loss(jax.tree.leaves(learner(*x)))
        grad = lambda *s: learner.etrace_grad(*s, step_fn=step, chunk_size=size)
        return brainstate.transform.jit(grad)(*stacked)

    grads = [drive(learner, size) for learner, size in zip(learners, (1, 3), strict=False)]
    assert agree(*grads, ROUND_OFF), difference(*grads)
    brainstate.transform.jit(learners[2].etrace_evolve)(*stacked)
    first, *others = ({k: st.value for k, st in lr.states().items()} for lr in learners)
    for other in others:
        assert agree(first, other, ROUND_OFF), difference(first, other)


@pytest.mark.parametrize(
    "name", every(4, ["rnn_batched", "lru_complex", "plain_recurrent", "lora", "rule_reads_more", "lif_vjp"])
)
def test_the_whole_influence_is_bptt_in_chunks(name):
    case, xs, length = CASES[name], sequence(CASES[name], 5), 5
    truth = by_bptt(name, length)
    for size in (1, 2, length):
        learner = compiled(braintrace.RTRL(case.build()), xs[0])
        step = lambda x, learner=learner: loss(jax.tree.leaves(learner(x)))
        found = learner.etrace_grad(jnp.stack(xs), step_fn=step, chunk_size=size, reduction="sum")
        assert agree(truth, found, ROUND_OFF), (size, difference(truth, found))
        kept = [st.value.shape[:2] for st in learner.etrace_states.values()]
        states = sum(s.value.size * (2 if jnp.iscomplexobj(s.value) else 1) for s in hidden(learner.model))
        assert all(a * b == states for a, b in kept), "each sample has its own numbers alone"


def test_the_whole_influence_of_samples_that_act_on_each_other():
    def step(p: Any, s: Any, x: Any) -> Any:
        h = jnp.tanh(braintrace.matmul(x, p.w) + 0.5 * s.h - s.h.mean(0, keepdims=True))
        return {"h": h}, h

    build = lambda: Step(step, {"w": (3, 4)}, {"h": (2, 4)})
    xs = list(jax.random.normal(jax.random.key(0), (4, 2, 3)))
    learner = braintrace.RTRL(build())
    found, truth = online(learner, xs, 2), bptt(build(), xs)
    assert agree(truth, found, ROUND_OFF), difference(truth, found)
    assert [st.value.shape for st in learner.etrace_states.values()] == [(1, 8, 3, 4)]


def hidden(model: Any) -> list[Any]:
    return list(model.states(brainstate.HiddenState).values())


def in_float32(case: Any) -> list[Any]:
    """A sequence of inputs, to be made and used where 64 bits are switched off."""
    narrow = lambda a: jnp.asarray(a, jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a
    return [jax.tree.map(narrow, x) for x in sequence(case)]


@pytest.mark.slow
@pytest.mark.parametrize("name", some(12, EXACT))
def test_float32_is_as_near_as_it_can_be(name):
    case = CASES[name]
    with jax.enable_x64(False):
        xs = in_float32(case)
        found = online(braintrace.D_RTRL(case.build()), xs)
        truth = bptt(case.build(), xs, forward=loops_forever(by_d_rtrl(name)[0]))
    assert agree(truth, found, 2e-5), difference(truth, found)


# -- traces that are written once in several steps -------------------------------------------------


ALWAYS_PENDING = ("gru", "lstm_fused")


@pytest.mark.parametrize(
    "name",
    [
        *ALWAYS_PENDING,
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in sorted({"cascade", *some(40, CASES)} - {*ALWAYS_PENDING})
        ),
    ],
)
def test_traces_that_are_written_once_in_several_steps_are_the_same(name, pending):
    case, results = CASES[name], []
    with jax.enable_x64(False):
        xs = [x if isinstance(x, tuple) else (x,) for x in in_float32(case)]
        stacked = [jnp.stack(parts) for parts in zip(*xs, strict=True)]
        for on in (False, True):
            pending(on)
            learner = compiled(braintrace.D_RTRL(case.build()), xs[0])
            step = lambda *x, learner=learner: loss(jax.tree.leaves(learner(*x)))
            grads = learner.etrace_grad(*stacked, step_fn=step, chunk_size=1, reduction="sum")
            traces = {k: st.value for k, st in learner.etrace_states.items() if not is_pending(k)}
            # a chunk after pending steps, and a loop of the user's
            more = learner.etrace_grad(*stacked, step_fn=step, chunk_size=len(xs), reduction="sum")
            looped = online(braintrace.D_RTRL(case.build()), xs)
            results.append([grads, traces, more, looped])
        deferred_ones = [k for k in learner.traces if is_pending(k)]
    for one, other in zip(*results, strict=True):
        assert agree(one, other, 2e-5), difference(one, other)
    assert deferred_ones or name not in ALWAYS_PENDING


def test_a_reset_of_some_samples_forgets_their_pending_steps(pending):
    def step(w: Any, h: Any, x: Any) -> Any:
        h = jnp.tanh(0.5 * h + braintrace.matmul(jnp.concatenate([x, h], -1), w))
        return h, h

    found: dict[bool, list[Any]] = {False: [], True: []}
    with jax.enable_x64(False):
        keys = jax.random.split(jax.random.key(0))
        w, xs = jax.random.normal(keys[0], (9, 5)), jax.random.normal(keys[1], (7, 3, 4))
        for on in found:
            pending(on)
            carry = jnp.zeros((3, 5))
            net = braintrace.online(step, w, carry, xs[0])
            traces = net.init(w, carry)
            assert on == any(map(is_pending, traces))
            for t, x in enumerate(xs):
                # of one sample at the first step, of one after some, of one just after the trace was written
                carry, traces = net.reset(carry, traces, rows=jnp.array([t == 0, t == 2, t == 3]))
                grad, (carry, traces), _ = net.grad(lambda y: jnp.sum(y**2), w, carry, traces, x[None])
                found[on].append(grad)
    for one, other in zip(*found.values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("states", "rows", "width", "out"), every(3, [(2, 3, 16, 64), (1, 4, 32, 512), (3, 2, 64, 32)])
)
@pytest.mark.parametrize("dtype", every(2, [jnp.float32, jnp.bfloat16]))
def test_the_kernels_that_read_and_write_a_trace(states, rows, width, out, dtype):
    shapes = {
        "trace": (states, rows, width, out),
        "P": (states, states, rows, out),
        "d": (16, states, rows, out),
        "x": (16, rows, width),
        "h": (states, rows, out),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    each = zip(keys, shapes.values(), strict=True)
    trace, P, d, x, h = (jax.random.normal(k, shape, jnp.float32) for k, shape in each)
    trace = trace.astype(dtype).at[0, 0, 0, 0].set(jnp.inf)
    P, h = P.at[:, 0, 0, 0].set(0), h.at[0, 0, 0].set(0)
    for due in (0, 1):
        given = trace, P, d, x, jnp.array([due])
        found, truth = pending_steps.write(*given, interpret=True), pending_steps._write_plainly(*given)
        assert found.dtype == dtype
        np.testing.assert_allclose(found.astype(jnp.float32), truth.astype(jnp.float32), rtol=0.02, atol=1e-4)
        assert due or bool(jnp.all(found == trace))
    found, truth = pending_steps.read(trace, h, interpret=True), pending_steps._read_plainly(trace, h)
    np.testing.assert_allclose(found, truth, rtol=1e-4, atol=1e-4)
