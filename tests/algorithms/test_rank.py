"""Rank: its definition and what it becomes with all directions, samples, sequences, and long runs."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace._executor import bases, pending_kernels
from braintrace._executor.per_sample import find_per_sample
from braintrace._rules import projection
from braintrace._rules.deferred import is_pending

from ..oracle import bptt
from ..run import (
    agree,
    brute_force,
    by_bptt,
    compiled,
    difference,
    digest,
    every,
    in_one_pass,
    online,
    sequence,
    some,
)
from ..zoo import CASES, IN_CONTROL_FLOW, WITH_WHILE, Step

ALL = 10**6  # more directions than any model here carries numbers
EXACT = [n for n, c in CASES.items() if c.exact]
TOGETHER = {"norms_of_two_states": {"samples": None}}  # where samples act on each other


def by_definition() -> list[Any]:
    """Models on which the diagonal is approximate and some others, each with a rank, a window and a basis."""
    flat = [n for n in CASES if n not in IN_CONTROL_FLOW | WITH_WHILE]  # BPTT speaks for the others, below
    exact = set(some(24, EXACT))
    names = [n for n in flat if CASES[n].kind != "complex" and (not CASES[n].exact or n in exact)]
    ways = [(1, 1), (3, 2), (3, 1), (1, 5), (1, 2), (3, 5)]
    ways = [(*way, basis) for basis in ("balanced", "pushed") for way in ways]
    return every(30, [(n, *ways[digest(n) // 100 % len(ways)]) for n in names])


@pytest.mark.parametrize(("name", "rank", "window", "basis"), by_definition())
def test_rank_equals_its_definition(name, rank, window, basis):
    case, brute = CASES[name], brute_force(name)
    xs = sequence(case, 4 if window < 5 else 10)  # more than one window, all of one length
    options = {"rank": rank, "basis": basis, **TOGETHER.get(name, {})}
    learner = compiled(braintrace.D_RTRL(case.build(), window=window, **options), xs[0])
    samples = find_per_sample(learner.executor, learner.rule.samples).samples
    places = [
        (e.path, i, v) for e in learner.graph.module_info.marked.carried for i, v in enumerate(e.invars)
    ]
    leaves = []
    for var in samples.carried:
        ((path, i),) = ((path, i) for path, i, v in places if v is var)
        leaves.append([n for n, p in enumerate(brute.f.state_paths) if p == path][i])
    pair = random_pair(samples.state_size, rank) if basis == "balanced" else None
    expected = brute.d_rtrl_rank(xs, window, rank, leaves, samples.axis, pair)
    # half of the models go window by window, and of the others those with a pushed basis a call at a time,
    # which would renew a balanced pair
    by_window = digest(name) // 1200 % 2 == 0 and window < 5
    prepare = None if pair is None else partial(set_pair, pair)
    found = in_one_pass(learner, xs, prepare, chunk_size=window if by_window else None)
    assert agree(expected, found, 1e-9), difference(expected, found)
    if basis == "pushed" and not by_window:
        found = online(braintrace.D_RTRL(case.build(), **options), xs, window)
        assert agree(expected, found, 1e-9), difference(expected, found)


def random_pair(numbers: int, rank: int) -> Any:
    """`S` and `T` with `S^T T = I`, of any kind."""
    rng = np.random.RandomState(numbers)
    s, t = rng.randn(2, numbers, min(rank, numbers)) / np.sqrt(numbers)
    return s @ np.linalg.inv(t.T @ s), t


def set_pair(pair: Any, learner: Any) -> None:
    """Give a learner a balanced pair, which it does not renew: as in the midst of a stream."""
    learner.traces["basis"].value = jnp.stack([jnp.asarray(a.T) for a in pair])
    age = learner.traces["balance age"]
    age.value = jnp.ones_like(age.value)


def with_all_directions() -> list[Any]:
    """Models whose diagonal is approximate, and of each kind with exact diagonals about a sixth."""
    kinds = dict.fromkeys(c.kind for c in CASES.values())
    exact = {n for kind in kinds for n in some(6, [n for n in EXACT if CASES[n].kind == kind] or [""])}
    names = [n for n in CASES if (n in exact or n not in EXACT) and n not in WITH_WHILE]
    hashes = {n: digest(n) // 100 for n in names}
    return every(50, [(n, 1 + (h % 4 == 0), h % 16 < 4) for n, h in hashes.items()])


@pytest.mark.parametrize(("name", "window", "apart"), with_all_directions())
def test_with_all_directions_it_is_bptt(name, window, apart):
    case = CASES[name]
    xs = sequence(case)
    options = {"rank": ALL, **TOGETHER.get(name, {})}
    learner = braintrace.D_RTRL(case.build(), **options if apart else {"window": window, **options})
    found = online(learner, xs, window) if apart else in_one_pass(learner, xs)
    truth = by_bptt(name)
    assert agree(truth, found, 1e-10), difference(truth, found)
    assert learner.report.exactness.exact, str(learner.report.exactness)


@pytest.mark.parametrize("name", every(2, sorted(WITH_WHILE)))
def test_loops_of_unknown_length_have_no_rank(name):
    learner = compiled(braintrace.D_RTRL(CASES[name].build(), rank=ALL), sequence(CASES[name], 1)[0])
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        online(learner, sequence(CASES[name]), 1)


@pytest.mark.parametrize(("name", "numbers"), every(2, [("rnn_batched", 4), ("gru_fused", 3)]))
def test_it_is_exact_with_as_many_directions_as_a_sample_has_numbers(name, numbers):
    case = CASES[name]
    xs = sequence(case)
    truth = bptt(case.build(), xs)
    for rank in (numbers - 1, numbers):
        learner = braintrace.D_RTRL(case.build(), rank=rank)
        found = online(learner, xs, 1)
        assert learner.report.exactness.exact == agree(truth, found, 1e-10) == (rank == numbers)


# -- samples and sequences -----------------------------------------------------------------------------------

T, B, N, X, RANK = 6, 2, 4, 2, 2
FLAGS = np.array([[False, True], [False] * 2, [True, False], [False] * 2, [True, True], [False] * 2])


def data(length: int = T) -> tuple[Any, Any]:
    rng = np.random.RandomState(0)
    return jnp.asarray(rng.randn(length, B, X)), jnp.asarray(rng.randn(length, B, N))


def gru(batch_size: int | None = B, **options: Any) -> Any:
    """A learner of a gated net, in which some weights have no trace."""
    brainstate.random.seed(0)
    with jax.numpy_rank_promotion("allow"):
        cell = braintrace.nn.GRUCell(X, N)
    x = jnp.zeros(X) if batch_size is None else jnp.zeros((batch_size, X))
    options = {"rank": RANK, **options}
    return braintrace.compile(cell, braintrace.D_RTRL, x, batch_size=batch_size, **options)


def squared(learner: Any) -> Any:
    return lambda x, y: jnp.sum((learner(x) - y) ** 2)


def one_call(learner: Any) -> Any:
    """The gradient of a window as one call of the learner: (time, ...) in."""

    def grads(xs: Any, ys: Any) -> Any:
        loss = lambda: jnp.sum((learner(braintrace.MultiStepData(xs)) - ys) ** 2)
        return brainstate.transform.grad(loss, learner.param_states)()

    return brainstate.transform.jit(grads)


def add(total: Any, grads: Any) -> Any:
    return grads if total is None else jax.tree.map(jnp.add, total, grads)


@pytest.mark.slow
@pytest.mark.parametrize("window", every(2, [2, 1]))
def test_a_batch_and_its_episodes_are_sequences_of_their_own(window):
    xs, ys = data()
    alone, together = gru(None, basis="pushed"), gru(basis="pushed")  # a balanced pair is of all samples
    call, call_all = one_call(alone), one_call(together)
    each, calls = None, None
    for row in range(B):
        alone.reset_state()
        for t in range(0, T, window):
            if FLAGS[t, row]:
                alone.reset_state()
            part = slice(t, t + window)
            each = add(each, call(xs[part, row], ys[part, row]))
    for t in range(0, T, window):
        together.reset_state(rows=FLAGS[t])
        calls = add(calls, call_all(xs[t : t + window], ys[t : t + window]))
    assert agree(each, calls, 1e-10), difference(each, calls)
    learner = gru(window=window, basis="pushed")
    found = learner.etrace_grad(xs, ys, step_fn=squared(learner), reset=FLAGS, reduction="sum")
    assert agree(each, found, 1e-10), difference(each, found)
    for key, state in together.traces.items():
        np.testing.assert_allclose(learner.traces[key].value, state.value, atol=1e-10)


def traces_of(learner: Any) -> dict[str, Any]:
    """Traces, `V`, basis and tangents; the averages of a balanced pair depend on how passes are cut."""
    averages = ("balance reach", "balance read", "balance counts")
    return {k: st for k, st in learner.traces.items() if k not in averages}


@pytest.mark.parametrize("basis", every(2, ["balanced", "pushed"]))
@pytest.mark.parametrize("fresh", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_pass_leaves_the_traces_that_a_pass_for_each_window_leaves(basis, fresh):
    (xs, ys), found = data(5), []
    flags = np.eye(5, 2, -1, dtype=bool)  # at the start of the second window, and in the midst of it
    for chunk_size in (None, 1):
        learner = gru(window=2, basis=basis)  # the first has one step
        etrace_grad = partial(learner.etrace_grad, step_fn=squared(learner), chunk_size=chunk_size)
        if not fresh:
            etrace_grad(ys[..., :X], ys)
            for key, value in found[0].items() if found else ():
                learner.traces[key].value = value  # with the same averages
            found = found or [{k: st.value for k, st in learner.traces.items()}]

        def run(xs: Any, ys: Any, learner: Any = learner, etrace_grad: Any = etrace_grad) -> Any:
            if fresh:
                learner.reset_state(B)
            return etrace_grad(xs, ys, reset=flags)

        grads = brainstate.transform.jit(run)(xs, ys)
        found.append({**grads, **{k: st.value for k, st in traces_of(learner).items()}})
    assert agree(*found[-2:], 1e-10), difference(*found[-2:])


@pytest.mark.parametrize("name", every(5, some(16, [n for n in CASES if n not in WITH_WHILE])))
def test_one_pass_of_any_model_leaves_the_same_traces(name):
    case, rank, found = CASES[name], 2, []
    window, basis = [(2, "balanced"), (3, "pushed"), (1, "balanced"), (2, "pushed")][digest(name) % 4]
    xs = sequence(case, 5)
    options = {"window": window, "rank": rank, "basis": basis, **TOGETHER.get(name, {})}

    def prepare(learner: Any) -> None:
        rng = np.random.RandomState(0)
        for _, state in sorted(traces_of(learner).items()):
            parts = 1 + 1j if jnp.iscomplexobj(state.value) else 1
            state.value = jnp.asarray(parts * rng.randn(*state.value.shape), state.value.dtype)
        if basis == "balanced":
            samples = find_per_sample(learner.executor, learner.rule.samples).samples
            set_pair(random_pair(samples.state_size, rank), learner)

    for chunk_size in (None, 1):
        learner = braintrace.D_RTRL(case.build(), **options)
        grads = in_one_pass(learner, xs, prepare, chunk_size=chunk_size)
        found.append({**grads, **{k: st.value for k, st in traces_of(learner).items()}})
    assert agree(*found, 1e-9), difference(*found)


@pytest.mark.slow
def test_episodes_within_windows():
    xs, ys = data()
    flags, found = np.roll(FLAGS, 1, 0), []
    cell = gru().model
    options = {"rank": ALL, "window": 3}
    for rule, given in ((braintrace.BPTT, {}), (braintrace.D_RTRL, options)):
        learner = braintrace.compile(cell, rule, xs[0], batch_size=B, **given)
        found.append(learner.etrace_grad(xs, ys, step_fn=squared(learner), reset=flags))
    assert agree(*found, 1e-10), difference(*found)


@pytest.mark.slow
def test_a_function_of_a_batch_is_mapped_over_it():
    def step(params: Any, h: Any, x: Any) -> Any:
        leak = jnp.broadcast_to(params["leak"] + jnp.sum(params["none"]), h.shape)
        h = leak * h + jnp.tanh(x @ params["w"] + h @ params["v"])
        return h, h

    rng = np.random.RandomState(1)
    params = {"w": rng.randn(X, N), "v": rng.randn(N, N) / 2, "leak": rng.rand(N), "none": np.zeros((0, N))}
    params = jax.tree.map(jnp.asarray, params)
    xs, ys = data()
    start = jnp.asarray(rng.randn(B, N))
    loss = lambda y, target: jnp.sum((y - target) ** 2)
    rule = braintrace.rules.D_RTRL(rank=RANK)

    def run(start: Any, xs: Any, ys: Any) -> Any:
        net = braintrace.online(step, params, start, xs[0], rule=rule)
        traces = net.init(params, start)
        return net.grad(loss, params, start, traces, xs, ys, reduction="sum")[0]

    found = jax.jit(run)(start, xs, ys)
    each = jax.jit(jax.vmap(run, (0, 1, 1)))(start, xs, ys)
    want = jax.tree.map(lambda g: jnp.sum(g, 0), each)
    assert agree(want, found, 1e-10), difference(want, found)


def normed(p: Any, s: Any, x: Any) -> Any:
    y = braintrace.matmul(x, p.w) + braintrace.matmul(s.h, p.v)
    h = jnp.tanh((y - y.mean(0, keepdims=True)) / (y.std(0, keepdims=True) + 0.1))
    return {"h": h}, h


@pytest.mark.parametrize(
    ("samples", "words"),
    [(-1, "`samples` is 'auto'"), (True, "`samples` is 'auto'"), (2, "no axis 2 of one length")],
)
def test_axes_that_there_are_not(samples, words):
    with pytest.raises((ValueError, braintrace.NotSupportedError), match=words):
        gru(samples=samples)


@jax.custom_vjp
def without_nan(x: Any) -> Any:
    return x


without_nan.defvjp(lambda x: (x, None), lambda _, g: (jnp.where(jnp.isnan(g), jnp.zeros_like(g), g),))


def test_derivatives_that_cannot_be_pushed():
    def step(w: Any, h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ w["w"] + without_nan(h) @ w["v"])
        return h, h

    params, h, (xs, ys) = {"w": jnp.ones((X, N)), "v": jnp.eye(N)}, jnp.zeros((B, N)), data()
    net = braintrace.online(step, params, h, xs[0], rule=braintrace.rules.D_RTRL(rank=RANK))
    with pytest.raises(braintrace.NotSupportedError, match=r"pushes directions .* \(at .*test_rank.py"):
        net.grad(lambda y, target: jnp.sum((y - target) ** 2), params, h, net.init(params, h), xs, ys)


@pytest.mark.slow
def test_the_verdict_counts_the_directions_that_there_are():
    """A trace of a weight that has an axis of samples of its own: one basis for all."""

    def step(params: Any, h: Any, x: Any) -> Any:
        leak = jnp.tile(params["leak"], (B, 1))
        h = braintrace.element_wise(leak) * h + jnp.tanh(x @ params["w"] + h @ params["v"])
        return h, h

    rng = np.random.RandomState(1)
    params = {"w": rng.randn(X, N), "v": rng.randn(N, N) / 2, "leak": rng.rand(N)}
    params, (xs, ys) = jax.tree.map(jnp.asarray, params), data()
    start, found = jnp.zeros((B, N)), {}
    for rank in (N, B * N - 1, B * N, None):
        rule = braintrace.rules.BPTT() if rank is None else braintrace.rules.D_RTRL(rank=rank)
        net = braintrace.online(step, params, start, xs[0], rule=rule, mark="ops")
        traces = net.init(params, start)
        grads = net.grad(lambda y, z: jnp.sum((y - z) ** 2), params, start, traces, xs, ys)[0]
        found[rank] = net.report.exactness.exact, grads
    truth = found.pop(None)[1]
    assert [agree(truth, grads, 1e-10) for _, grads in found.values()] == [False, False, True]
    assert [exact for exact, _ in found.values()] == [False, False, True]


def test_more_rank_than_states_is_warned_of():
    def rnn(p: Any, s: Any, x: Any) -> Any:
        h = jnp.tanh(braintrace.matmul(x, p.w) + braintrace.matmul(s.h, p.v))
        return {"h": h}, h

    build = lambda: Step(rnn, {"w": (X, N), "v": (N, N)}, {"h": (B, N)})
    said = f"`rank={N + 1}` is above the state size: a sample has {N} state variables, .*`rank={N}` is exact"
    with pytest.warns(UserWarning, match=said):
        braintrace.D_RTRL(build(), rank=N + 1).compile_graph(data()[0][0])
    learner = compiled(braintrace.D_RTRL(build()), data()[0][0])
    with pytest.warns(UserWarning, match=said):
        learner.take_windows(rank=N + 1)


def test_the_verdict_where_samples_act_on_each_other():
    def step(w: Any, h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ w + jnp.mean(h, 0, keepdims=True))
        return h, h

    rule = braintrace.rules.D_RTRL(rank=ALL)
    net = braintrace.online(step, jnp.ones((X, N)), jnp.zeros((B, N)), jnp.ones((B, X)), rule=rule)
    assert not net.report.exactness.exact
    assert net.with_rule(braintrace.rules.D_RTRL(rank=ALL, samples=None)).report.exactness.exact


def test_samples_that_act_on_each_other():
    xs = list(data()[0])
    build = lambda: Step(normed, {"w": (X, N), "v": (N, N)}, {"h": (B, N)})
    with pytest.raises(braintrace.NotSupportedError, match="samples=None"):
        online(braintrace.D_RTRL(build(), rank=RANK), xs, 1)
    found = online(braintrace.D_RTRL(build(), rank=ALL, samples=None), xs, 1)
    truth = bptt(build(), xs)
    assert agree(truth, found, 1e-10), difference(truth, found)


# -- how it is kept ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_in_half_precision_it_is_close():
    case, found = CASES["gru_fused"], []
    with jax.enable_x64(False):
        xs = jnp.stack(sequence(case)).astype(jnp.float32)
        for dtype in (None, jnp.bfloat16):
            learner = compiled(braintrace.D_RTRL(case.build(), rank=RANK, trace_dtype=dtype), xs[0])
            step = lambda x, learner=learner: jnp.sum(learner(x) ** 2)
            # a pass for each window: within one, no trace is stored
            found.append(learner.etrace_grad(xs, step_fn=step, chunk_size=1))
    assert agree(*found, 0.02), difference(*found)
    assert not agree(*found, 1e-6)
    kept = {k: st.value.dtype for k, st in learner.traces.items()}
    whole = {k: kept.pop(k) for k in list(kept) if k == "basis" or k.startswith("balance ")}
    assert whole.pop("balance counts") == jnp.int32
    assert set(whole.values()) == {jnp.dtype(jnp.float32)}
    assert set(kept.values()) == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
def test_a_run_goes_on_from_what_was_kept():
    xs, ys = data()
    first, second = gru(), gru()
    step = lambda learner: brainstate.transform.jit(
        lambda xs, ys: learner.etrace_grad(xs, ys, step_fn=squared(learner))
    )
    run = step(first)
    run(xs, ys)
    kept = {k: np.asarray(st.value) for k, st in first.traces.items()}
    model = {k: st.value for k, st in first.model.states().items()}
    want = run(xs, ys)
    assert kept.keys() == second.traces.keys()
    for key, value in kept.items():
        second.traces[key].value = jnp.asarray(value)
    for key, state in second.model.states().items():
        state.value = model[key]
    found = step(second)(xs, ys)
    jax.tree.map(np.testing.assert_array_equal, want, found)


def spiking(p: Any, s: Any, x: Any) -> Any:
    """Hard resets, units without a slope, and now and then nothing that stays at all."""
    v = 0.9 * s.v + braintrace.matmul(x, p.w) + braintrace.matmul(s.h, p.r)
    v = jnp.where(v > 1, jnp.zeros_like(v), v) * (x[:, :1] < 2).astype(v.dtype)
    h = jnp.maximum(v, 0)
    return {"v": v, "h": h}, h


@pytest.mark.slow
@pytest.mark.parametrize("basis", ["balanced", "pushed"])
def test_twenty_thousand_steps(basis):
    with jax.enable_x64(False):
        xs = jax.random.normal(jax.random.key(0), (10, 2000, B, X), jnp.float32)
        model = Step(spiking, {"w": (X, N), "r": (N, N)}, {"v": (B, N), "h": (B, N)})
        learner = compiled(braintrace.D_RTRL(model, rank=3, basis=basis), xs[0, 0])
        step = lambda x: jnp.mean(learner(x) ** 2)
        run = brainstate.transform.jit(lambda xs: learner.etrace_grad(xs, step_fn=step))
        for part in xs:
            grads = run(part)
            assert all(bool(jnp.all(jnp.isfinite(g))) for g in jax.tree.leaves(grads))
            assert all(bool(jnp.all(jnp.isfinite(st.value))) for st in learner.traces.values())
            found = learner.traces["basis"].value
            s, t = (found, found) if basis == "pushed" else (found[:1], found[1:])
            gram = jnp.einsum("brn,bqn->brq", s, t)
            np.testing.assert_allclose(gram, np.broadcast_to(np.eye(3), gram.shape), atol=1e-3)
    assert float(jnp.max(jnp.abs(grads["w",]))) > 0


# -- the kernel of a GPU -------------------------------------------------------------------------------------


ONE_ANEW = np.arange(T)[:, None] % 3 == [2, 3]  # at the start of a window of two and in the middle of one


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "inputs", "window", "options"),
    every(
        3,
        [
            ("GRU", 1, 2, {"reset": ONE_ANEW}),
            ("GRU", 2, 3, {}),
            ("LSTM", 1, 2, {"trace_dtype": jnp.bfloat16}),
        ],
    ),
)
def test_windows_that_wait_to_be_written_are_windows(cell, inputs, window, options, pending):
    options, results = dict(options), []
    reset = options.pop("reset", None)
    with jax.enable_x64(False), brainstate.environ.context(precision=32):
        xs, ys = (jnp.asarray(a, jnp.float32) for a in data())
        for on in (False, True):
            pending(on)
            brainstate.random.seed(0)
            with jax.numpy_rank_promotion("allow"):
                net = getattr(braintrace.nn, f"{cell}Cell")(inputs, N)
            learner = braintrace.compile(
                net, braintrace.D_RTRL, xs[0, :, :inputs], batch_size=B, rank=RANK, window=window, **options
            )
            step = squared(learner)
            cut = {"chunk_size": window, "reset": reset}  # a pass for each window
            grads = learner.etrace_grad(xs[..., :inputs], ys, step_fn=step, reduction="sum", **cut)
            assert any(map(is_pending, learner.traces)) == on
            learner.etrace_states  # noqa: B018  # writes them
            traces = {k: st.value for k, st in learner.traces.items() if not is_pending(k)}
            # several windows in a pass begin with written ones
            later = learner.etrace_grad(xs[..., :inputs], ys, step_fn=step, reduction="sum")
            results.append({**grads, **traces, **{f"later {k}": g for k, g in later.items()}})
    narrow = "trace_dtype" in options
    assert agree(*results, 2e-2 if narrow else 2e-5), difference(*results)


@pytest.mark.parametrize(
    ("size", "shape", "states", "length"),
    every(3, [(2, (2, 33, 40), 1, 5), (1, (3, 32, 128), 0, 1), (9, (2, 16, 72), 1, 2)]),
)
@jax.enable_x64(False)
def test_the_kernels_of_pending_windows(size, shape, states, length):
    samples, width, out = shape
    num, keys = size + states, iter(jax.random.split(jax.random.key(0), 16))
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.float32)
    large = [normal(samples, width, size, out), *([normal(states, *shape)] if states else [])]
    signal, mix = normal(samples, size), normal(samples, size, size)
    steps, own = (
        (normal(samples, width, length), normal(samples, num, length, out)),
        normal(samples, num, states, out),
    )
    written, followed = (
        (*steps, mix, own, jnp.ones(1, int), *large),
        (steps[1], mix, own, jnp.full(1, length)),
    )
    k, found = pending_kernels, []
    for kernel, given in ((k.read, (large[0], signal)), (k.write, written), (k.follow, followed)):
        found += jax.tree.leaves(jax.jit(partial(kernel, interpret=True))(*given))
    truth = k._read_plainly(large[0], signal), *k._write_plainly(*written), k._follow_plainly(*followed)
    for a, b in zip(found, truth, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5)


# -- balanced projections ------------------------------------------------------------------------------------


def covariances(n: int, ranks: tuple[int, int] = (10**6, 10**6)) -> Any:
    """Two random covariances, of these ranks or full ones."""
    rng = np.random.RandomState(3)
    factors = [rng.randn(n, min(n, r)) * np.logspace(0, -2, min(n, r)) for r in ranks]
    return [a @ a.T for a in factors]


def test_a_balanced_pair_spans_the_leading_eigenvectors():
    n, rank = 12, 3
    reach, read = covariances(n)
    basis = jnp.asarray(np.stack([bases.fixed_basis(n, rank).T] * 2))
    balanced = jax.jit(projection.balanced)
    for _ in range(60):
        basis = balanced(basis, jnp.asarray(reach), jnp.asarray(read))
    s, t = np.asarray(basis)
    np.testing.assert_allclose(s @ t.T, np.eye(rank), atol=1e-10)
    values, vectors = np.linalg.eig(reach @ read)
    leading = np.linalg.qr(vectors[:, np.argsort(-values.real)[:rank]].real)[0]
    np.testing.assert_allclose(np.linalg.norm(t @ leading, axis=1), 1, atol=1e-6)
    # the best read-out of what is kept: what is dropped is orthogonal to it under `O`
    np.testing.assert_allclose((np.eye(n) - s.T @ t) @ read @ t.T, 0, atol=1e-4)


def test_a_pair_from_nothing_read_or_nothing_reached_is_still_a_pair():
    n, rank = 6, 6
    none, (some, _) = jnp.zeros((n, n)), covariances(n, (2, 2))
    basis = jnp.asarray(np.stack([bases.fixed_basis(n, rank).T] * 2))
    balanced = jax.jit(projection.balanced)
    for reach, read in ((none, none), (none, some), (some, none), (some, some)):
        s, t = balanced(basis, jnp.asarray(reach), jnp.asarray(read))
        np.testing.assert_allclose(s.T @ t, np.eye(n), atol=1e-8)  # all directions: the identity


@pytest.mark.parametrize("rank", [3, 24])
def test_a_pair_in_float32_is_a_pair_where_little_is_read(rank):
    """What rounding leaves of a covariance of low rank is divided by small eigenvalues: not within `T`."""
    n = 24
    reach, read = (jnp.asarray(a, jnp.float32) for a in covariances(n, (n, 1)))
    basis = jnp.asarray(np.stack([bases.fixed_basis(n, rank).T] * 2), jnp.float32)
    balanced = jax.jit(projection.balanced)
    for scale in (1e-30, 1, 1e30):  # products of averages would vanish or overflow
        s, t = balanced(basis, np.float32(scale) * reach, np.float32(scale) * read)
        np.testing.assert_allclose(s @ t.T, np.eye(rank), atol=1e-4)


@pytest.mark.slow
def test_averages_forget_what_overflows():
    """After losses that overflow, averages and gradients are finite again."""
    net, params, start = functions(braintrace.rules.D_RTRL(rank=2))
    traces = net.init(params, start)
    rng = np.random.RandomState(0)
    xs, ys = jnp.asarray(rng.randn(6, 4, X)), jnp.asarray(rng.randn(6, 4, 1))
    _, (carry, traces), _ = net.grad(squared_error, params, start, traces, xs, 1e200 * ys)
    carry, traces = net.reset(carry, traces)
    grads, (_, traces), _ = net.grad(squared_error, params, carry, traces, xs, ys)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves((grads, traces)))


def test_a_sketch_of_a_low_rank_covariance_is_exact(monkeypatch):
    n, rank = 80, 2
    rows = np.random.RandomState(0).randn(5, n)
    columns = np.random.RandomState(1).randn(n, rank)
    monkeypatch.setattr(bases, "_DENSE", 10)
    like = jnp.zeros((n, bases.sketch_size(n, rank)))
    assert like.shape == (n, 64)
    sketch = bases.outer(jnp.asarray(rows), jnp.asarray(rows), like)
    found = bases.operators(sketch[None])[0](jnp.asarray(columns))
    np.testing.assert_allclose(found, rows.T @ (rows @ columns), rtol=2e-3)


def functions(rule: Any, window: Any = 2) -> Any:
    """A gated net as pure functions, with data in which one of few directions matters."""

    def step(p: Any, h: Any, x: Any) -> Any:
        z = jax.nn.sigmoid(x @ p["wz"] + h @ p["uz"] + 2)
        h = z * h + (1 - z) * jnp.tanh(x @ p["w"] + h @ p["u"])
        return h, h @ p["o"]

    rng = np.random.RandomState(0)
    shapes = {"wz": (X, 8), "uz": (8, 8), "w": (X, 8), "u": (8, 8), "o": (8, 1)}
    params = {k: jnp.asarray(rng.randn(*s) / np.sqrt(s[0])) for k, s in shapes.items()}
    start = jnp.zeros((4, 8))
    x = jnp.zeros((4, X))
    return braintrace.online(step, params, start, x, rule=rule, window=window), params, start


def squared_error(y: Any, target: Any) -> Any:
    return jnp.mean((y - target) ** 2)


def cosines(rule: Any, batches: int = 12, calls: int = 1) -> list[float]:
    """The cosine of the gradients of some batches to BPTT's; each sequence is cut into `calls` parts."""
    (net, params, start), (exact, _, _) = functions(rule), functions("bptt", None)
    traces, found = net.init(params, start), []
    grad = jax.jit(lambda carry, traces, xs, ys: net.grad(squared_error, params, carry, traces, xs, ys))
    for i in range(batches):
        rng = np.random.RandomState(i)
        xs = jnp.asarray(rng.randn(12, 4, X))
        ys = jnp.asarray(np.cumsum(rng.randn(12, 4, 1), 0))
        truth = exact.grad(squared_error, params, start, exact.init(params, start), xs, ys)[0]
        carry, total = start, None
        for part in np.split(np.arange(12), calls):
            grads, (carry, traces), _ = grad(carry, traces, xs[part], ys[part])
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        _, traces = net.reset(carry, traces)
        a, b = (np.concatenate([np.ravel(g) for g in jax.tree.leaves(t)]) for t in (truth, total))
        found.append(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("calls", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_a_balanced_pair_adapts_over_batches(calls):
    """In one pass or in a stream of windows, it beats traces alone, and what it began with."""
    found = cosines(braintrace.rules.D_RTRL(rank=2), calls=calls)
    alone = cosines(braintrace.rules.D_RTRL(), batches=12, calls=calls)
    assert np.mean(found[6:]) > 0.5 * (1 + np.mean(alone[6:]))
    assert np.mean(found[6:]) > found[0]


def test_averages_survive_a_reset_and_samples_do_not():
    net, params, start = functions(braintrace.rules.D_RTRL(rank=2))
    traces = net.init(params, start)
    rng = np.random.RandomState(0)
    xs, ys = jnp.asarray(rng.randn(6, 4, X)), jnp.asarray(rng.randn(6, 4, 1))
    _, (carry, traces), _ = net.grad(squared_error, params, start, traces, xs, ys)
    _, after = net.reset(carry, traces)
    kept = {k for k, v in after.items() if np.any(np.asarray(v) != 0)}
    assert kept == {"basis", "balance reach", "balance read", "balance counts", "balance turn"}
    for k in kept:
        np.testing.assert_array_equal(after[k], traces[k])
    jax.jit(lambda t: t, donate_argnums=0)(net.init(params, start))  # no two arrays share a buffer
    _, some = net.reset(carry, traces, jnp.array([True, False, False, True]))
    assert not np.any(some["balance tangent"][0])
    np.testing.assert_array_equal(some["balance tangent"][1], traces["balance tangent"][1])


def test_the_longest_windows_that_fit():
    xs, ys = data()
    truth = gru(rank=0).model
    bptt_learner = braintrace.compile(truth, braintrace.BPTT, xs[0], batch_size=B)
    expected = bptt_learner.etrace_grad(xs, ys, step_fn=squared(bptt_learner))
    learner = braintrace.compile(truth, braintrace.D_RTRL, xs[0], batch_size=B, window="auto")
    found = learner.etrace_grad(xs, ys, step_fn=squared(learner))
    assert agree(expected, found, 1e-10), difference(expected, found)
    learner.reset_state(B)
    in_chunks = learner.etrace_grad(xs, ys, step_fn=squared(learner), chunk_size=2)
    assert agree(expected, in_chunks, 1e-10), difference(expected, in_chunks)
    learner.reset_state(B)
    bptt_learner.reset_state(B)
    learner.memory_budget = 1  # windows of one step
    found = learner.etrace_grad(xs, ys, step_fn=squared(learner))
    single = braintrace.compile(truth, braintrace.D_RTRL, xs[0], batch_size=B, window=1)
    expected = single.etrace_grad(xs, ys, step_fn=squared(single))
    assert agree(expected, found, 1e-10), difference(expected, found)
    with pytest.raises(ValueError, match="'auto' or None"):
        braintrace.D_RTRL(truth, window="all")
    with pytest.raises(ValueError, match="'balanced' or 'pushed'"):
        braintrace.D_RTRL(truth, rank=2, basis="best")


def test_a_pair_that_is_renewed_in_a_stream_takes_the_correction_along():
    """With all directions the gradient is exact, and stays so when the pair changes."""
    xs, ys = (jnp.tile(a, (6, 1, 1)) for a in data())
    learner = gru(rank=ALL, window=1, basis="balanced")
    bptt = braintrace.compile(learner.model, braintrace.BPTT, xs[0], batch_size=B)
    expected = bptt.etrace_grad(xs, ys, step_fn=squared(bptt), reduction="sum")
    learner.reset_state(B)
    call = brainstate.transform.jit(
        lambda x, y: learner.etrace_grad(x, y, step_fn=squared(learner), reduction="sum")
    )
    found, pairs = None, []
    for x, y in zip(xs[:, None], ys[:, None], strict=True):
        found = add(found, call(x, y))
        pairs.append(np.asarray(learner.traces["basis"].value))
    changes = sum(not np.array_equal(a, b) for a, b in itertools.pairwise(pairs))
    assert changes > 1
    assert agree(expected, found, 1e-9), difference(expected, found)
