"""The verdict: what each rule drops, and where. That it holds on every model is `test_gradients`."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import braintrace as bt
from braintrace._compiler import RuleKind
from braintrace._compiler.custom_derivatives import not_linear
from braintrace._compiler.program import read_program

from ..oracle import bptt
from ..run import agree, difference, online, sequence
from ..zoo import CASES, Step


def graph_of(model: Any, x: Any) -> Any:
    with warnings.catch_warnings(action="ignore"):
        return bt.compile_etrace_graph(model, x)


def verdict_of(name: str, rule: RuleKind | None = None) -> Any:
    case = CASES[name]
    return graph_of(case.build(), sequence(case, 1)[0]).exactness(rule)


@pytest.mark.parametrize(
    ("name", "weight", "primitive", "words"),
    [
        ("rnn", "wi", "etp_matmul", "what `h` passes on to itself through `matmul` of `wh`"),
        ("two_layers_of_one_shape", "w1", "etp_matmul", "what `b` keeps of `a` through `matmul` of `w2`"),
        ("cascade_summed", "w", "reduce_sum", "what `b` keeps of `a` through `reduce_sum`"),
        ("op_of_op", "w1", "etp_matmul", "acts on `h` beyond the step through `matmul` of `w2`"),
        ("layer_norm", "w", "reduce_sum", "other units of `h` beyond the step by `reduce_sum`"),
        ("plain_recurrent", "r", "dot_general", "`r` acts on `h` beyond the step, without a mark by `dot"),
        ("plain_recurrent", "w", "dot_general", "how units of `h` act on other units by `dot_general`"),
        ("running_mean", "w", "etp_matmul", "leaves in `m`, which is carried"),
        ("weight_that_changes", "w", "etp_matmul", "no trace, since the weight depends on more"),
        ("while_that_rolls", "w", "while", "other units of `h` beyond the step by `while`"),
    ],
)
def test_a_dropped_path_says_from_where_through_what_and_at_which_line(name, weight, primitive, words):
    verdict = verdict_of(name)
    found = [d for d in verdict.weights[weight,] if words in d.reason]
    assert found, str(verdict)
    assert found[0].primitive.name == primitive
    assert "zoo.py" in found[0].source
    assert words in str(verdict)


def test_the_words_of_a_verdict():
    assert str(verdict_of("leaky")) == (
        "D_RTRL is exact here: the gradient of a loss of the model's outputs is that of back-propagation "
        "through time."
    )
    text = str(verdict_of("gru"))
    assert text.startswith("D_RTRL is approximate here: 3 of 3 parameters miss some of their effect on later")
    assert "what `h` passes on to itself through `matmul` of `wz`, through `matmul` of `wr`, " in text
    assert "(missed by `wz`, `wh`)" in text


def delayed(p: Any, s: Any, x: Any) -> Any:
    """A state that does not read its past; the output reads it a step later."""
    return {"h": bt.matmul(x, p.w)}, jnp.tanh(s.h)


def delayed_constant(p: Any, s: Any, x: Any) -> Any:
    return {"h": jnp.tanh(bt.element_wise(p.w)) * x}, jnp.tanh(s.h)


@pytest.mark.parametrize(
    ("step", "params", "decay", "exact"),
    [
        (delayed, {"w": (3, 4)}, 0.5, False),
        (delayed, {"w": (3, 4)}, 1, True),
        (delayed_constant, {"w": 4}, 0.5, True),
        (delayed_constant, {"w": 4}, (0.5, 0.7), False),
        (CASES["leaky"].build().f, {"w": (3, 4)}, 1, False),
    ],
)
def test_averages_are_exact_where_nothing_is_remembered(step, params, decay, exact):
    build = lambda: Step(step, params, {"h": 4})
    x = jnp.arange(4.0 if "w" in params and params["w"] == 4 else 3.0) - 0.5
    xs = [x * (1 + 0.3 * t) for t in range(4)]
    learner = bt.ES_D_RTRL(build(), decay)
    assert agree(bptt(build(), xs), online(learner, xs), 1e-10) == exact
    verdict = learner.report.exactness
    assert verdict.exact == exact, str(verdict)
    assert exact or "averages are kept, not their products" in str(verdict)


def test_rtrl_is_exact_and_windows_are_not():
    model = CASES["gru"].build()
    learner = bt.RTRL(model)
    learner.compile_graph(jnp.ones(3))
    assert learner.report.exactness.exact
    windows = bt.D_RTRL(model, vjp_method="multi-step")
    windows.compile_graph(jnp.ones(3))
    assert "across windows" in str(windows.report.exactness)


def test_a_rule_of_ones_own_is_not_vouched_for():
    class Own(bt.rules.D_RTRL):
        kind = bt.rules.Rule.kind

    learner = bt.ETraceVjpAlgorithm(CASES["leaky"].build(), Own())
    learner.compile_graph(jnp.ones(3))
    assert "whatever the rule a rule of one's own leaves out" in str(learner.report.exactness)


def test_a_scan_of_length_one_is_no_loop():
    def plain(p: Any, s: Any, x: Any) -> Any:
        h = jnp.tanh(0.5 * s.h + bt.matmul(x, p.w) + bt.matmul(s.h, p.r))
        return {"h": h}, jnp.sin(h)

    def scanned(p: Any, s: Any, x: Any) -> Any:
        def cell(h: Any, x: Any) -> Any:
            new, y = plain(p, SimpleNamespace(h=h), x)
            return new["h"], y

        h, y = lax.scan(cell, s.h, x[None])
        return {"h": h}, y[0]

    xs = sequence(CASES["rnn"])
    learners = [bt.D_RTRL(Step(f, {"w": (3, 4), "r": (4, 4)}, {"h": 4})) for f in (plain, scanned)]
    first, second = (online(learner, xs) for learner in learners)
    assert agree(first, second, 1e-12), difference(first, second)
    few, same = ([d.what for d in learner.report.exactness.dropped] for learner in learners)
    assert few == same
    assert not learners[1].report.graph.module_info.program.sites[0].loops


def test_an_op_without_output_elements_is_no_site():
    def f(p: Any, s: Any, x: Any) -> Any:
        h = 0.9 * s.h + bt.matmul(x, p.w)
        return {"h": h}, jnp.concatenate([h, bt.matmul(x[:0, None], p.w[:1])[:, 0]])

    graph = graph_of(Step(f, {"w": (3, 4)}, {"h": 4}), jnp.ones(3))
    assert len(graph.module_info.program.sites) == 1
    assert graph.exactness().exact


def test_equal_findings_are_one_with_a_count():
    def f(p: Any, s: Any, x: Any) -> Any:
        y = 0.9 * s.h
        for _ in range(3):
            y = y + bt.matmul(x, p.w)
        return {"h": y}, y

    records = graph_of(Step(f, {"w": (3, 4)}, {"h": 4}), jnp.ones(3)).diagnostics
    assert [r.message.rsplit(". ", 1)[-1] for r in records] == ["(3 times)"], records


def rnn(p: Any, s: Any, x: Any) -> Any:
    return jnp.tanh(bt.matmul(x, p.w) + bt.matmul(s.h, p.r))


@pytest.mark.parametrize(
    ("step", "exact"),
    [
        (lambda p, s, x: ({"h": rnn(p, s, x)}, None), False),  # a loss must read the state itself
        (lambda p, s, x: ({"h": rnn(p, s, x), "m": 0.9 * s.m + bt.matmul(x, p.w)}, s.m), True),
        (lambda p, s, x: ({"h": 0.9 * s.h + bt.matmul(x, lax.stop_gradient(p.w)) + s.h @ p.r}, s.h), False),
        (lambda p, s, x: ({"h": bt.matmul(x, p.w) + bt.matmul(lax.stop_gradient(s.h), p.r)}, s.h), True),
        (lambda p, s, x: ({"h": 0.9 * s.h + bt.matmul(x, bt.element_wise(p.w))}, s.h), True),
    ],
    ids=["no output", "a state that no loss sees", "frozen", "cut recurrence", "op in the weight"],
)
def test_only_paths_to_a_loss_count(step, exact):
    model = Step(step, {"w": (3, 4), "r": (4, 4)}, {"h": 4, "m": 4})
    verdict = graph_of(model, jnp.ones(3)).exactness()
    assert verdict.exact == exact, str(verdict)


def test_a_state_that_no_output_depends_on():
    def step(p: Any, s: Any, x: Any) -> Any:
        return {"h": 0.9 * s.h + bt.matmul(x, p.w), "m": jnp.tanh(s.m + bt.matmul(s.h, p.r))}, jnp.tanh(s.h)

    build = lambda: Step(step, {"w": (3, 4), "r": (4, 4)}, {"h": 4, "m": 4})
    xs = [jnp.sin(jnp.arange(3.0) + t) for t in range(4)]
    verdict = graph_of(build(), xs[0]).exactness()
    assert verdict.exact
    assert verdict.unseen == {("m",): [("w",)]}
    assert "a loss that reads `m`, on which no output depends, has an approximate gradient of `w`" in str(
        verdict
    )
    # directions of all states: what is missed of `m` is wrong in `h`
    learner = bt.D_RTRL(build(), rank=1)
    assert not agree(bptt(build(), xs), online(learner, xs), 1e-6)
    assert set(learner.report.exactness.weights) == {("w",)}


def test_a_frozen_weight_misses_nothing():
    step = lambda p, s, x: ({"h": bt.matmul(x, lax.stop_gradient(p.w)) + bt.matmul(s.h, p.r)}, s.h)
    model = Step(step, {"w": (3, 4), "r": (4, 4)}, {"h": 4})
    assert set(graph_of(model, jnp.ones(3)).exactness().weights) == {("r",)}


@jax.custom_jvp
def doubled(x, w):
    return bt.matmul(x, w)


doubled.defjvp(lambda p, t: (bt.matmul(*p), 2 * (bt.matmul(t[0], p[1]) + bt.matmul(p[0], t[1]))))


def test_a_derivative_rule_that_is_not_used_is_said():
    step = lambda p, s, x: ({"h": 0.9 * s.h + doubled(x, p.w)}, s.h)
    verdict = graph_of(Step(step, {"w": (3, 4)}, {"h": 4}), jnp.ones(3)).exactness()
    assert "the derivative rule of a function that holds `matmul` of `w`" in str(verdict)


def test_a_stack_of_layers_is_summed_up_in_a_few_lines():
    with jax.numpy_rank_promotion("allow"):
        model = brainstate.nn.Sequential(*[bt.nn.GRUCell(4, 4) for _ in range(6)])
        brainstate.nn.init_all_states(model)
        verdict = graph_of(model, jnp.ones(4)).exactness()
    text = str(verdict)
    assert len(text.splitlines()) == 7
    assert "more: see `.dropped`" in text
    assert len(verdict.weights) == 18


def with_backward(bwd: Any) -> Any:
    """The identity, with a backward of one's own: from the input and a gradient to a gradient."""
    f = jax.custom_vjp(lambda x: x)
    f.defvjp(lambda x: (x, x), lambda x, g: (bwd(x, g),))
    return f


@pytest.mark.parametrize(
    ("bwd", "linear"),
    [
        (lambda x, g: jnp.where(jnp.abs(x) < 1, g / (1 + x**2), 0), True),
        (lambda x, g: jax.vjp(jax.nn.softmax, x)[1](g)[0] - g[::-1], True),
        (lambda x, g: jnp.nan_to_num(g) * x, True),
        (lambda x, g: jnp.linalg.solve(jnp.diag(x), g) + jnp.fft.irfft(jnp.fft.rfft(g), 5), True),
        (lambda x, g: lax.fori_loop(0, 2, lambda i, c: c.at[i].set(2 * c[i + 1]), g), True),
        (
            lambda x, g: lax.while_loop(lambda c: c[1] < x[0], lambda c: (2 * c[0], c[1] + 1), (g, 0.0))[0],
            True,
        ),
        (lambda x, g: jnp.where(jnp.abs(x) > 50, jnp.clip(g, -1, 1), g), False),  # not near zero
        (lambda x, g: lax.scan(lambda c, a: (a, c), 1.0, g)[1], False),
        (lambda x, g: lax.while_loop(lambda c: jnp.abs(c[0]) > 1, lambda c: c / 2, g), False),
        (lambda x, g: lax.cond(g[0] > 0, lambda: g, lambda: 2 * g), False),
        (lambda x, g: g.astype(int).astype(g.dtype), False),
        (lambda x, g: jax.pure_callback(lambda a: a, g, g), False),  # nobody knows
        (lambda x, g: lax.scan(lambda c, a: (c + a, c * 2), g[0], g)[1], True),
        (lambda x, g: jnp.clip(g, -0.1, 0.1), False),
        (lambda x, g: jnp.clip(g, -1e4, 1e4) * jnp.sqrt(x), False),
        (lambda x, g: g * jnp.minimum(1, 5 / jnp.linalg.norm(g)), False),
        (lambda x, g: jax.nn.relu(g), False),
        (lambda x, g: g + 0.1 * x, False),
        (lambda x, g: jnp.ones_like(g), False),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_backward_is_read_for_linearity(bwd, linear, dtype):
    with jax.numpy_dtype_promotion("standard"):
        program = read_program(jax.make_jaxpr(with_backward(bwd))(jnp.ones(5, dtype)))
        assert (not list(not_linear(program))) == linear


def test_a_backward_that_prints_is_not_run(capsys):
    bwd = lambda x, g: (jax.debug.print("{}", g), jnp.tanh(g))[1]
    assert list(not_linear(read_program(jax.make_jaxpr(with_backward(bwd))(jnp.ones(5)))))
    jax.effects_barrier()
    assert capsys.readouterr().out == ""


clipped = with_backward(lambda x, g: jnp.clip(g, -0.1, 0.1))
deaf = with_backward(lambda x, g: jnp.ones_like(g))
CLIPPED = {
    "state": (lambda p, s, x: ({"h": 0.9 * clipped(s.h) + bt.matmul(x, p.w)}, s.h), "w"),
    "op": (lambda p, s, x: ({"h": 0.9 * s.h + clipped(bt.matmul(x, p.w))}, s.h), "w"),
    "one of two": (
        lambda p, s, x: (
            {
                "h": 0.9 * s.h + bt.matmul(x, p.w),
                "m": lax.scan(lambda m, _: (0.5 * jax.jit(clipped)(m), None), s.m, length=2)[0]
                + bt.matmul(x, p.v),
            },
            s.h + s.m,
        ),
        "v",
    ),
    "readout": (lambda p, s, x: ({"h": 0.9 * s.h + bt.matmul(x, p.w)}, clipped(s.h)), ""),
    "deaf": (lambda p, s, x: ({"h": jnp.tanh(deaf(s.h) + bt.matmul(x, p.w))}, s.h), "w"),
}


@pytest.mark.parametrize("name", CLIPPED)
def test_a_backward_that_is_not_linear_is_exact_for_bptt_alone(name):
    step, missed = CLIPPED[name]
    build = lambda: Step(step, {"w": (3, 4), "v": (3, 4)}, {"h": 4, "m": 4})
    xs = [jnp.sin(jnp.arange(3.0) + t) for t in range(4)]
    truth = bptt(build(), xs)
    for learner in (bt.D_RTRL(build()), bt.RTRL(build())):
        with warnings.catch_warnings(record=True, action="always") as caught:
            learner.compile_graph(xs[0])
        said = [str(w.message) for w in caught if "that is not linear" in str(w.message)]
        assert len(said) == bool(missed)
        assert not missed or ("test_exactness.py" in said[0] and f"of `{missed}` is approximate" in said[0])
        differs = {path for path, d in difference(truth, online(learner, xs)).items() if d > 1e-10}
        verdict = learner.report.exactness
        assert differs == set(verdict.weights) == {(n,) for n in missed}, str(verdict)
    learner = bt.BPTT(build())
    learner.compile_graph(xs[0])
    assert learner.report.exactness.exact


def leaky(p: Any, s: Any, x: Any) -> Any:
    return 0.9 * s.h + bt.matmul(x, p.w)


def long(draw: Any) -> brainstate.State:
    return brainstate.LongTermState(draw(4))


@pytest.mark.parametrize(
    ("step", "states", "words"),
    [
        (  # a readout that remembers, where no trace is kept
            lambda p, s, x: ({"h": leaky(p, s, x), "m": 0.5 * s.m + s.h}, s.m @ p.r),
            {"m": long},
            "what `w` did in earlier steps through `m` (LongTermState), which has no trace",
        ),
        (  # by way of a hidden state
            lambda p, s, x: ({"h": 0.9 * s.h + s.m, "m": 0.5 * s.m + bt.matmul(x, p.w)}, s.h @ p.r),
            {"m": long},
            "what `w` did in earlier steps through `m` (LongTermState), which has no trace",
        ),
        (  # a layer that reads the one before as it was
            lambda p, s, x: ({"h": leaky(p, s, x), "m": 0.9 * s.m + bt.matmul(s.h, p.r)}, s.m),
            {"m": 4},
            "the gradient of `w` is zero: it acts on losses of later steps only, and not counted is what `m`",
        ),
        (  # running statistics that no output reads, and a clock
            lambda p, s, x: (
                {"h": leaky(p, s, x) * jnp.cos(s.t), "m": 0.9 * s.m + 0.1 * s.h, "t": s.t + 1},
                s.h @ p.r,
            ),
            {"m": long, "t": lambda draw: brainstate.ShortTermState(jnp.zeros(4))},
            "",
        ),
        (  # what an ordinary recurrence drops, too
            lambda p, s, x: (
                {"h": leaky(p, s, x) + bt.matmul(s.m, p.r), "m": 0.5 * s.m + s.h},
                s.h,
            ),
            {"m": long},
            "",
        ),
    ],
    ids=["readout", "into a state", "late layer", "statistics", "recurrence"],
)
def test_a_gradient_that_a_state_swallows_is_said(step, states, words):
    build = lambda: Step(step, {"w": (3, 4), "r": (4, 4)}, {"h": 4, **states})
    xs = [jnp.sin(jnp.arange(3.0) + t) for t in range(4)]
    learner = bt.D_RTRL(build())
    with warnings.catch_warnings(record=True, action="always") as caught:
        learner.compile_graph(xs[0])
    assert len(caught) == bool(words)
    assert all(words in str(w.message) for w in caught), caught[0].message
    truth, found = bptt(build(), xs), online(learner, xs)
    assert bool(jnp.any(found["w",])) != bool(words)
    verdict = learner.report.exactness
    assert {p for p, d in difference(truth, found).items() if d > 1e-10} == set(verdict.weights), str(verdict)
    assert agree(truth, online(bt.RTRL(build()), xs), 1e-10)


class Delayed(brainstate.nn.Module):
    """A leaky state that is read some steps later."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.w = brainstate.ParamState(jnp.sin(jnp.arange(12.0)).reshape(3, 4))
        self.h = brainstate.HiddenState(jnp.zeros(4))
        with brainstate.environ.context(dt=1.0):
            self.delay = brainstate.nn.Delay(self.h.value, entries={"read": float(steps)})
        brainstate.nn.init_all_states(self.delay)

    def update(self, x: Any) -> Any:
        self.h.value = 0.9 * self.h.value + bt.matmul(x, self.w.value)
        self.delay.update(self.h.value)
        return jnp.tanh(self.delay.at("read"))


@pytest.mark.parametrize("steps", [2, 20])
def test_a_delay_of_a_few_steps_is_exact_and_a_long_one_says_so(steps):
    xs = [jnp.sin(jnp.arange(3.0) + t) for t in range(5)]
    learner = bt.D_RTRL(Delayed(steps))
    with warnings.catch_warnings(record=True, action="always") as caught:
        learner.compile_graph(xs[0])
    said = [str(w.message) for w in caught]
    assert ["what `w` did in earlier steps through `delay.history` (DelayState)" in s for s in said] == [
        True
    ] * (steps > 16)
    assert learner.report.exactness.exact == (steps <= 16)
    if steps == 2:
        assert agree(bptt(Delayed(steps), xs), online(learner, xs), 1e-10)


def one_array(p: Any, h: Any, x: Any) -> Any:
    v, a = jnp.split(h, 2, -1)
    v, a = 0.9 * v + x @ p["w"] + jnp.tanh(v) @ p["u"] - 0.7 * a, 0.8 * a + jnp.tanh(v)
    return jnp.concatenate([v, a], -1), jnp.tanh(v)


def one_stack(p: Any, h: Any, x: Any) -> Any:
    h, y = one_array(p, jnp.concatenate(tuple(h), -1), x)
    return jnp.stack(jnp.split(h, 2, -1)), y


def scaled_identity(p: Any, h: Any, x: Any) -> Any:
    h = 0.5 * h + jnp.tanh(x @ p["w"] @ (p["s"] * jnp.eye(4)))
    return h, h


@pytest.mark.parametrize(
    ("step", "shape", "rule", "missed"),
    [
        (one_array, (3, 8), bt.rules.SnAp(1), {"w", "u"}),
        (one_array, (3, 8), bt.rules.SnAp(3), set()),
        (one_stack, (2, 3, 4), bt.rules.SnAp(1), {"w", "u"}),
        (one_stack, (2, 3, 4), bt.rules.D_RTRL(across="layers"), {"w", "u"}),
        (scaled_identity, (3, 4), bt.rules.SnAp(1), set()),
    ],
)
def test_verdicts_of_patterns_and_layers_know_arrays_by_their_parts(step, shape, rule, missed):
    rng = np.random.RandomState(0)
    params = {"w": rng.randn(2, 4), "u": rng.randn(4, 4), "s": np.float64(0.3)}
    params = jax.tree.map(jnp.asarray, params)
    start, xs = jnp.zeros(shape), jnp.asarray(rng.randn(4, 3, 2))
    loss = lambda y: jnp.sum(y**2)
    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings(action="ignore"):
        net = bt.online(step, params, start, xs[0], rule=rule)
        found = net.grad(loss, params, start, net.init(params, start), xs, reduction="sum")[0]
        truth = jax.grad(lambda p: jnp.sum(lax.scan(lambda h, x: step(p, h, x), start, xs)[1] ** 2))(params)
    assert {path[-1] for path in net.report.exactness.weights} == missed
    differs = {k for k in params if not jnp.allclose(found[k], truth[k], rtol=1e-9, atol=1e-9)}
    assert differs == missed
