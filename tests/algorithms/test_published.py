"""The choices that published rules are made of, and each rule against its definition."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace as bt
from braintrace._executor.executor import ETraceGraphExecutor
from braintrace._executor.own_diagonal import own_diagonals
from braintrace._frontends import compile_etrace_graph
from braintrace._learners.rule_choice import NAMES
from braintrace._rules.bounds import Normalized

from ..oracle import Brute, Units, bptt, loss
from ..run import agree, as_args, by_d_rtrl, compiled, difference, every, online, sequence
from ..zoo import CASES, Step

ROUND_OFF = 1e-10

# ops from a state to itself: alone, behind another one, in control flow; several states, samples or none
RECURRENT = [
    "rnn", "gru", "lstm_fused", "recurrent_conv", "recurrent_lora", "rnn_batched", "lif_recurrent",
    "scan_recurrent", "gru_fused",
    *(n for n, c in CASES.items() if c.kind == "recurrent"),
]  # fmt: skip


@pytest.mark.parametrize("name", every(3, list(dict.fromkeys(RECURRENT))))
@pytest.mark.filterwarnings("ignore")
def test_the_own_diagonal_is_that_of_the_whole_step(name):
    case = CASES[name]
    x = sequence(case, 1)[0]
    model = case.build()
    graph = compile_etrace_graph(model, *as_args(x))
    executor, info = ETraceGraphExecutor(graph), graph.module_info
    fixed = [leaf for e in info.entries if e.is_fixed for leaf in jax.tree.leaves(e.state.value)]
    rest = [jax.tree.leaves(e.state.value) for e in info.entries if not e.is_fixed]
    args = (fixed, jax.tree.leaves(as_args(x)), list(info.program.consts.values()), rest)

    def found(*args: Any) -> Any:
        _, _, env, operands = executor.forward(*args)
        local = executor.jacobians(env, operands)
        return own_diagonals(executor, env, local.D, local.J)

    for k, blocks in jax.jit(found)(*args).items():
        wanted = Brute(model, x, graph).own_blocks(k, x)
        assert np.max(np.abs(wanted)) > 0
        assert np.max(np.abs(np.asarray(blocks).reshape(wanted.shape) - wanted)) < ROUND_OFF


def test_samples_share_what_an_op_does_to_a_unit():
    case = CASES["rnn_batched"]
    x = sequence(case, 1)[0]
    graph = compile_etrace_graph(case.build(), x)
    executor, info = ETraceGraphExecutor(graph), graph.module_info
    zeros = lambda vs: [jnp.zeros(v.aval.shape, v.aval.dtype) for v in vs]
    fixed = zeros(v for e in info.fixed for v in e.invars)

    def found() -> Any:
        _, _, env, operands = executor.forward(fixed, [x], [], [zeros(e.invars) for e in info.carried])
        local = executor.jacobians(env, operands)
        return own_diagonals(executor, env, local.D, local.J)

    found()
    (plan,) = executor.planned["own diagonal"].values()
    (crossing,) = plan.crossings
    assert crossing.first.calls == 2  # on two samples: four places


# -- rules by models -----------------------------------------------------------------------------------


@jax.custom_vjp
def spike(v):
    return jnp.where(v > 0, jnp.ones_like(v), jnp.zeros_like(v))


spike.defvjp(lambda v: (spike(v), v), lambda v, g: (g / (1 + 3 * jnp.abs(v)) ** 2,))


def leaky(p, s, x, more):
    h = 0.9 * s["h"] + jnp.tanh(bt.matmul(x, p["w"], p["b"]) + bt.matmul(s["h"], p["r"]))
    return {"h": h}, (h + more.get(0, 0.0)) @ p["o"]


def spiking(p, s, x, more):
    z = spike(s["v"] - 0.5 - s["a"])
    v = 0.8 * s["v"] - 0.5 * jax.lax.stop_gradient(z) + bt.matmul(x, p["w"]) + bt.matmul(z, p["r"])
    a = 0.9 * s["a"] + 0.1 * z
    return {"v": v, "a": a}, (jnp.sin(spike(v - 0.5 - a)) + more.get(0, 0.0)) @ p["o"]


def layers(p, s, x, more):
    v1 = 0.8 * s["v1"] + bt.matmul(x, p["w1"])
    z1 = spike(v1 - 0.2) + more.get(0, 0.0)
    v2 = 0.8 * s["v2"] + bt.matmul(z1, p["w2"])
    return {"v1": v1, "v2": v2}, (spike(v2 - 0.2) + more.get(1, 0.0)) @ p["o"]


@dataclass(frozen=True)
class Net:
    """A model with what its units are read by."""

    f: Any
    params: dict[str, Any]
    states: dict[str, Any]
    reads: tuple[Any, ...]  # of each group

    def build(self) -> Any:
        def f(p, s, x):
            return self.f(vars(p), vars(s), x, {})

        return Step(f, self.params, self.states)

    @property
    def units(self) -> list[Units]:
        return [Units(read, lambda *args: self.f(*args)[1]) for read in self.reads]


NETS = {
    "leaky": Net(leaky, {"w": (3, 4), "b": 4, "r": (4, 4), "o": (4, 2)}, {"h": (2, 4)}, (lambda s: s["h"],)),
    "spiking": Net(
        spiking,
        {"w": (3, 4), "r": (4, 4), "o": (4, 2)},
        {"v": (2, 4), "a": (2, 4)},
        (lambda s: jnp.sin(spike(s["v"] - 0.5 - s["a"])),),
    ),
    "layers": Net(
        layers,
        {"w1": (3, 4), "w2": (4, 5), "o": (5, 2)},
        {"v1": (2, 4), "v2": (2, 5)},
        (lambda s: spike(s["v1"] - 0.2), lambda s: spike(s["v2"] - 0.2)),
    ),
}
LENGTH = 5
XS = [2.0 * np.random.RandomState(t).randn(2, 3) for t in range(LENGTH)]
TARGETS = [np.random.RandomState(100 + t).randn(2, 3) for t in range(LENGTH)]
MODULATORS = [np.random.RandomState(200 + t).randn(2) for t in range(LENGTH)]


@cache
def definition(net: str) -> tuple[Brute, list[Units], dict[Any, Any]]:
    """Of a net: the definitions of all rules, where its units are, and its gradient through time."""
    model = NETS[net]
    brute = Brute(model.build(), XS[0], compile_etrace_graph(model.build(), XS[0]))
    return brute, model.units, bptt(model.build(), XS)


@cache
def at_outputs(brute: Brute) -> list[Any]:
    """dL/dout of each step."""

    @jax.jit
    def step(states, x):
        out, states = brute.f.step(brute.f.params, states, x)
        return jax.grad(lambda o: loss([o]))(out[0]), states

    outs, states = [], brute.f.states
    for x in XS:
        out, states = step(states, x)
        outs.append(np.asarray(out))
    return outs


def feedback(learner, brute):
    """dL/dout of each step through the learner's own matrices."""
    outs = at_outputs(brute)
    return lambda t, k, back: (outs[t] @ np.asarray(learner.traces[f"feedback:0->{k}.0"].value)).ravel()


def back(learner, brute):
    return lambda t, k, signal: signal


def projected(learner, brute):
    return lambda t, k, _: (TARGETS[t] @ np.asarray(learner.traces[f"feedback:0->{k}.0"].value)).ravel()


def modulated(learner, brute):
    """The number of a sample at each of its states."""

    def signal(t, k, _):
        shapes = [brute.f.states[i].shape for i in brute.groups[k][0]]
        return np.concatenate([np.broadcast_to(MODULATORS[t][:, None], s).ravel() for s in shapes])

    return signal


# of each rule: the learner, what defines its signal, and the rest of its definition
PUBLISHED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "EProp": (lambda m: bt.EProp(m), back, {}),
    "EProp filtered": (lambda m: bt.EProp(m, kappa_filter_decay=0.7), back, {"kappa": {0: 0.7, 1: 0.7}}),
    "EProp random": (
        lambda m: bt.EProp(m, "random", 0.6, jax.random.key(3)), feedback, {"kappa": {0: 0.6, 1: 0.6}},
    ),
    "RFLO": (lambda m: bt.RFLO(m, 0.85), feedback, {"decay": 0.85}),
    "RFLO symmetric": (lambda m: bt.RFLO(m, 0.85, "symmetric"), back, {"decay": 0.85}),
    "OSTLRecurrent": (lambda m: bt.OSTLRecurrent(m), back, {"decay": "own"}),
    "OSTLFeedforward": (lambda m: bt.OSTLFeedforward(m), back, {}),
    "OTPE": (lambda m: bt.OTPE(m, leak=0.8), back, {"decay": 0.8, "one_layer_on": {0: 0.8}}),
    "OSTTP": (lambda m: bt.OSTTP(m, num_targets=3), projected, {}),
    "ThreeFactor": (lambda m: bt.ThreeFactor(m), modulated, {"at_states": True}),
    "config": (
        lambda m: bt.D_RTRL(
            m, config=bt.ETraceConfig("per_param", "none", learning_signal="random_feedback")
        ),
        feedback, {"decay": 0.0},
    ),
}  # fmt: skip
AVERAGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "OTTT": (lambda m: bt.OTTT(m, leak=0.8), {"leak": 0.8}),
    "OTTT at once": (lambda m: bt.OTTT(m, "O", leak=0.8), {"leak": 0.8}),
    "OTPE approx": (lambda m: bt.OTPE(m, "approx", leak=0.8), {"leak": 0.8, "one_layer_on": {0: 0.8}}),
    "S_TLLR": (
        lambda m: bt.S_TLLR(m, 0.5, 0.7, 1.2, -0.4),
        {"leak": 0.5, "before": 0.7, "after": 1.2, "ahead": -0.4},
    ),
}


def given(learner: Any, t: Any) -> dict[str, Any]:
    """What a call is given beside the input, from arrays of all steps."""
    arrays = {"target": TARGETS, "modulator": MODULATORS}
    return {k: jnp.asarray(np.stack(arrays[k]))[t] for k in learner.rule.signal.takes}


def in_steps(learner: Any) -> dict[Any, Any]:
    """The summed gradients of single calls."""
    params = learner.model.states(brainstate.ParamState)

    @brainstate.transform.jit
    def step(t, x):
        return brainstate.transform.grad(lambda: loss([learner(x, **given(learner, t))]), params)()

    total: Any = None
    for t, x in enumerate(XS):
        grads = jax.tree.map(np.asarray, step(jnp.asarray(t), x))
        total = grads if total is None else jax.tree.map(np.add, total, grads)
    return {tuple(map(str, k)): v for k, v in total.items()}


def in_chunks(learner: Any, size: int) -> dict[Any, Any]:
    def step(t, x):
        return loss([learner(x, **given(learner, t))])

    sequences = jnp.arange(LENGTH), jnp.asarray(np.stack(XS))
    found = brainstate.transform.jit(
        lambda *s: learner.etrace_grad(*s, step_fn=step, chunk_size=size, reduction="sum")
    )(*sequences)
    return {tuple(map(str, k)): v for k, v in found.items()}


RULES_BY_NETS = [
    (rule, net)
    for i, rule in enumerate([*PUBLISHED, *AVERAGES])
    for j, net in enumerate(NETS)
    if (i + j) % 3 < 2
]


@pytest.mark.parametrize(("rule", "net"), every(8, RULES_BY_NETS))
def test_rules_are_what_they_say(rule, net):
    make, *what, options = PUBLISHED.get(rule) or AVERAGES[rule]
    model = NETS[net]
    learner = compiled(make(model.build()), XS[0])
    brute, units, truth = definition(net)
    options = dict(options)
    if "one_layer_on" in options:
        one_layer_on = options.pop("one_layer_on")
        options["kappa" if what else "out"] = one_layer_on if net == "layers" else {}
    if what:
        expected = brute.published(XS, units, what[0](learner, brute), **options)
    else:
        expected = brute.presynaptic(XS, units, **options)
    found = in_steps(learner)
    assert agree(expected, found, ROUND_OFF), difference(expected, found)
    after = {k: st.value for k, st in learner.traces.items()}
    learner = compiled(make(model.build()), XS[0])
    chunks = in_chunks(learner, 3)
    assert agree(found, chunks, ROUND_OFF), difference(found, chunks)
    now = {k: st.value for k, st in learner.traces.items()}
    assert agree(after, now, ROUND_OFF), difference(after, now)
    dropped = learner.report.exactness.weights
    inexact = {k for k, d in difference(truth, found).items() if not d < ROUND_OFF}
    assert inexact <= set(dropped), (inexact, learner.report.exactness)


# -- readouts with memory ------------------------------------------------------------------------------


def leaky_readout(p, s, x):
    z = spike(s.v - 0.5)
    v = 0.8 * s.v - 0.5 * jax.lax.stop_gradient(z) + bt.matmul(x, p.w) + bt.matmul(z, p.r)
    y = 0.7 * s.y + bt.matmul(spike(v - 0.5), p.o)
    return {"v": v, "y": y}, y


def spiking_readout(p, s, x):
    v = 0.8 * s.v + bt.matmul(x, p.w)
    y = (0.7 - 0.2 * spike(s.y - 0.5)) * s.y + bt.matmul(spike(v - 0.5), p.o)
    return {"v": v, "y": y}, jax.nn.log_softmax(spike(y - 0.5) + 0.1 * y)


def with_readout(f):
    params = {"w": (3, 4), "o": (4, 2), **({"r": (4, 4)} if f is leaky_readout else {})}
    return Step(f, params, {"v": (2, 4), "y": (2, 2)})


@cache
def through_time(f):
    return bptt(with_readout(f), XS)


OWN_READOUT = [name for name in PUBLISHED if name != "ThreeFactor"]


@pytest.mark.parametrize(
    ("name", "f"),
    every(7, [(n, f) for f in (leaky_readout, spiking_readout) for n in [*PUBLISHED, *AVERAGES]]),
)
@pytest.mark.filterwarnings("ignore:.*filters traces")
def test_a_readout_with_memory_has_its_own_exact_gradient(name, f):
    learner = compiled((PUBLISHED.get(name) or AVERAGES[name])[0](with_readout(f)), XS[0])
    found, truth = in_chunks(learner, 3), through_time(f)
    inexact = {k for k, d in difference(truth, found).items() if not d < ROUND_OFF}
    assert inexact <= set(learner.report.exactness.weights)
    if name in OWN_READOUT:
        assert ("o",) not in inexact
        assert ("o",) not in learner.report.exactness.weights


@pytest.mark.slow
@pytest.mark.parametrize("feedback", every(3, ["random", "symmetric", "adaptive"]))
def test_the_filter_of_e_prop_is_that_of_the_readout(feedback):
    given = [
        in_chunks(compiled(bt.EProp(with_readout(leaky_readout), feedback, *kappa), XS[0]), 3)
        for kappa in ((), (0.7,), (0.0,))
    ]
    assert agree(given[0], given[1], ROUND_OFF), difference(given[0], given[1])
    assert not agree(given[0], given[2], 1e-3)
    with pytest.warns(UserWarning, match="decay of 0.5, but the readout `y`.* decays by 0.7"):
        bt.EProp(with_readout(leaky_readout), feedback, 0.5).compile_graph(XS[0])


# -- identities ----------------------------------------------------------------------------------------


def test_rflo_of_a_leaky_net_is_d_rtrl():
    case = CASES["plain_readout"]
    found = online(bt.RFLO(case.build(), 0.9, "symmetric"), sequence(case))
    assert agree(by_d_rtrl("plain_readout")[1], found, ROUND_OFF)


def test_e_prop_without_a_filter_is_d_rtrl_on_a_spiking_layer():
    found = in_steps(compiled(bt.EProp(NETS["spiking"].build()), XS[0]))
    assert agree(in_steps(compiled(bt.D_RTRL(NETS["spiking"].build()), XS[0])), found, ROUND_OFF)


def test_the_true_signal_as_modulator_is_d_rtrl():
    model, brute = NETS["leaky"].build(), definition("leaky")[0]
    learner, states, total = compiled(bt.ThreeFactor(model), XS[0]), brute.f.states, 0.0
    params = model.states(brainstate.ParamState)
    expected = in_steps(compiled(bt.D_RTRL(NETS["leaky"].build()), XS[0]))

    @brainstate.transform.jit
    def step(x, m):
        return brainstate.transform.grad(lambda: loss([learner(x, modulator=m)]), params)()["w",]

    for x in XS:
        now = brute.advance(states, x)
        m, states = now["g"][0].reshape(2, 4), now["states"]
        total = total + np.asarray(step(x, m))
    assert np.max(np.abs(expected["w",] - total)) < ROUND_OFF


@pytest.mark.slow
def test_a_modulator_is_one_number_or_stands():
    model = NETS["leaky"].build()
    learner = compiled(bt.ThreeFactor(model), XS[0])
    params = model.states(brainstate.ParamState)
    with pytest.raises(ValueError, match="modulator"):
        learner(XS[0])
    with pytest.raises(ValueError, match="shape"):
        brainstate.transform.grad(lambda: loss([learner(XS[0], modulator=np.ones(3))]), params)()
    learner.modulator = 2.0
    grads = []
    for more in ({}, {"modulator": 1.0}):
        learner.reset_state()
        model.h.value = np.ones((2, 4))
        grads.append(brainstate.transform.grad(lambda more=more: loss([learner(XS[0], **more)]), params)())
    assert np.allclose(grads[0][("w",)], 2 * grads[1][("w",)])


@pytest.mark.slow
def test_dni_with_the_true_synthesizer_is_bptt():
    model, (brute, _, truth) = NETS["leaky"].build(), definition("leaky")
    learner = compiled(bt.DNI(model, window=2), XS[0])
    net = bt.SyntheticGradient(learner.group_signal_shapes())
    net.apply = lambda values, states: {0: values["at"]}
    net.param_values = lambda: {"at": jnp.asarray(future)}
    future = np.zeros((2, 4, 1))
    learner.attach_synthesizer(net)

    def later(states, xs):
        def total(flat):
            now, value = [flat], 0.0
            for x in xs:
                outs, now = brute.f.step(brute.f.params, now, x)
                value = value + loss(outs)
            return value

        return np.asarray(jax.grad(total)(states[0])) if xs else np.zeros((2, 4))

    for alone in (False, True):
        learner.reset_state()
        states, total = brute.f.states, None
        model.h.value = states[0]
        for i in range(0, LENGTH, 2):
            xs = XS[i : i + 2]
            for x in xs:
                states = brute.f.step(brute.f.params, states, x)[1]
            future = later(states, XS[i + 2 :])[..., None]
            if alone:
                grads = brainstate.transform.grad(
                    lambda xs=xs: jnp.sum(
                        jax.vmap(lambda o: loss([o]))(learner(bt.MultiStepData(np.stack(xs))))
                    ),
                    model.states(brainstate.ParamState),
                )()
            else:
                step = lambda x: loss([learner(x)])
                grads = learner.etrace_grad(np.stack(xs), step_fn=step, reduction="sum")
            grads = {tuple(map(str, k)): np.asarray(v) for k, v in grads.items()}
            total = grads if total is None else jax.tree.map(np.add, total, grads)
        assert agree(truth, total, ROUND_OFF), difference(truth, total)
    assert not learner.report.exactness.exact


@pytest.mark.slow
def test_a_synthesizer_is_fitted():
    model = NETS["leaky"].build()
    learner = compiled(bt.DNI(model, window=2), XS[0])
    learner.attach_synthesizer(bt.SyntheticGradient(learner.group_signal_shapes()))
    model.r.value = -0.5 * jnp.eye(4)  # what comes later forgets: else an estimate of estimates grows
    options = {"chunk_size": 2, "loss_fn": lambda o: loss([o]), "lr": 0.05, "reset": False}
    errors, start = [], model.h.value
    for _ in range(20):
        errors += bt.train_synthetic_gradient(learner, np.stack(XS[:4]), **options)
    assert np.array_equal(model.h.value, start)
    assert errors[-1] < 0.9 * errors[0]


@pytest.mark.slow
def test_adaptive_feedback_follows_the_readout_and_outlasts_a_sequence():
    model = NETS["leaky"].build()
    learner = compiled(bt.EProp(model, "adaptive", feedback_decay=0.25), XS[0])
    learner(XS[0])
    B = learner.traces["feedback:0->0.0"].value
    learner(XS[1])
    assert np.array_equal(B, learner.traces["feedback:0->0.0"].value)
    step = np.random.RandomState(0).randn(4, 2)
    model.o.value = model.o.value + step
    learner.reset_state()
    learner.etrace_grad(np.stack(XS), step_fn=lambda x: loss([learner(x)]), chunk_size=2)
    found = learner.traces["feedback:0->0.0"].value
    now = np.asarray(model.o.value).T
    assert np.max(np.abs(now + 0.75 * (np.asarray(B) - now + step.T) - np.asarray(found))) < ROUND_OFF


# -- names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [("eprop", {}), ("rflo", {"leak": 0.9}), ("ottt", {"leak": 0.9}), ("otpe", {"leak": 0.9}),
     ("s_tllr", {"lambda_post": 0.5, "lambda_pre": 0.5}), ("three_factor", {"modulator": 1.0})],
)  # fmt: skip
def test_rules_have_names(name, options):
    learner = bt.compile(NETS["spiking"].build(), name, XS[0], **options)
    assert learner(XS[0]).shape == (2, 2)
    assert not learner.report.exactness.exact


def test_a_point_on_the_axes_is_a_rule():
    config = bt.ETraceConfig(trace_factorization="io_factorized", decay=(0.9, 0.0))
    assert config.temporal_recursion == ("scalar_leak", "none")
    assert bt.ETraceConfig(trace_filter="kappa", kappa=0.0) == bt.ETraceConfig()
    assert bt.ETraceConfig(recurrence_scope="sparse_n", sparse_n=1).recurrence_scope == "coupled"
    with pytest.raises(ValueError, match="kappa"):
        bt.ETraceConfig(kappa=0.5)
    with pytest.raises(ValueError, match="learning_signal"):
        bt.ETraceConfig(learning_signal="telepathy")
    learner = bt.compile(NETS["leaky"].build(), bt.ETraceConfig(recurrence_scope="coupled"), XS[0])
    assert learner.rule == bt.rules.D_RTRL(recursion=learner.rule.recursion, called="ETraceConfig")


BASE = {"name": "learner", "vjp_method": "single-step"}
FAST = {**BASE, "fast_solve": True}
PER_PARAM = {**FAST, "trace_dtype": None, "chunked_trace": True, "control_flow": None}
LAST = {"config": None, "random_feedback_key": None, "snap_max_jacobian_elements": 16777216}
KEYS = {"projection_key": 42, "projection_eps": 1e-12}
NO_CONFIG = {"random_feedback_key": None, "snap_max_jacobian_elements": 16777216}
IO = {**FAST, "control_flow": None, "config": None, "random_feedback_key": None}
MULTI = {**FAST, "vjp_method": "multi-step", "control_flow": None}
# the arguments of other releases, in their order, and those that are given by name alone
SIGNATURES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((name, {**PER_PARAM, **LAST}, {}) for name in ("D_RTRL", "ParamDimVjpAlgorithm", "OSTLRecurrent")),
    *(
        (name, {**FAST}, {"normalize_matrix_spectrum": True, "trace_dtype": None})
        for name in ("D_RTRL", "ParamDimVjpAlgorithm", "OSTLRecurrent")
    ),
    *(
        (name, {"decay_or_rank": decay, **IO}, {})
        for name in ("ES_D_RTRL", "IODimVjpAlgorithm", "pp_prop")
        for decay in (0.9, 5, (0.9, 0.5))
    ),
    ("OSTLFeedforward", {"decay_or_rank": 1e-6, "name": None}, {k: v for k, v in IO.items() if k != "name"}),
    (
        "EProp",
        {"feedback": "random", "kappa_filter_decay": 0.5, "random_feedback_key": jax.random.key(0), **FAST},
        {
            "trace_dtype": None,
            "chunked_trace": True,
            "control_flow": None,
            "snap_max_jacobian_elements": 16777216,
            "normalize_matrix_spectrum": True,
        },
    ),
    ("UORO", {**MULTI, **KEYS, **NO_CONFIG}, {}),
    ("RandomProjectionVjpAlgorithm", {**MULTI, "config": None, **KEYS, **NO_CONFIG}, {}),
    (
        "SnAp",
        {"n": 2, **FAST, "snap_max_jacobian_elements": 16777216},
        {"trace_dtype": None, "chunked_trace": True, "control_flow": None, "random_feedback_key": None},
    ),
    (
        "ThreeFactor",
        {
            **BASE,
            "modulator": 1.0,
            "fast_solve": True,
            "trace_dtype": None,
            "chunked_trace": True,
            "control_flow": None,
            "snap_max_jacobian_elements": 16777216,
        },
        {},
    ),
    (
        "DNI",
        {
            "synthesizer": None,
            **PER_PARAM,
            "vjp_method": "multi-step",
            "snap_max_jacobian_elements": 16777216,
        },
        {},
    ),
    ("OTTT", {"mode": "O"}, {"leak": 0.9, **BASE}),
    ("OTPE", {"mode": "full"}, {"leak": 0.9, **BASE, "trace_clip_abs": 1.0}),
    (
        "OSTTP",
        {"B_list": [np.ones((3, 4))], "target_timing": "sequence-end", **FAST},
        {"trace_dtype": None, "normalize_matrix_spectrum": True},
    ),
]


@pytest.mark.parametrize(("name", "in_order", "by_name"), SIGNATURES, ids=[s[0] for s in SIGNATURES])
def test_learners_take_the_arguments_of_other_releases(name, in_order, by_name):
    learner, model = getattr(bt, name), NETS["leaky"].build()
    rules = [
        learner(model, *in_order.values(), **by_name).rule,
        learner(model, **in_order, **by_name).rule,
    ]
    assert rules[0] == rules[1]


def test_an_option_has_one_name_and_old_spellings():
    build, rules = NETS["leaky"].build, bt.rules
    assert bt.EProp(build(), "random", key=3).rule == rules.EProp("random", key=3)
    assert bt.EProp(build(), "random", random_feedback_key=3).rule == rules.EProp("random", key=3)
    assert bt.UORO(build(), projection_key=3, projection_eps=0.5).rule == rules.UORO(key=3, eps=0.5)
    assert bt.SnAp(build(), snap_max_jacobian_elements=9).rule == rules.SnAp(max_jacobian_elements=9)
    assert bt.D_RTRL(build(), trace_dtype="float32").rule == rules.D_RTRL(trace_dtype=np.dtype("float32"))
    with pytest.raises(TypeError, match="`random_feedback_key` and `key`"):
        bt.EProp(build(), key=3, random_feedback_key=3)


@pytest.mark.parametrize(
    "name",
    ["d_rtrl", "pp_prop", "es_d_rtrl", "esd_rtrl", "eprop", "e_prop", "ostl_recurrent", "ostl_feedforward",
     "uoro", "three_factor", "dni", "otpe", "ottt", "osttp"],
)  # fmt: skip
def test_names_of_other_releases(name):
    assert issubclass(NAMES[name], bt.ETraceAlgorithm)


def test_a_config_chooses_the_learner_and_its_rule():
    build, of = NETS["leaky"].build, bt.ETraceConfig
    axes = {
        bt.D_RTRL: of(temporal_recursion="scalar_leak", decay=0.5),
        bt.ES_D_RTRL: of("io_factorized", decay=0.5),
        bt.UORO: of("random_projection", recurrence_scope="coupled"),
        bt.DNI: of(learning_signal="bootstrapped"),
    }
    for learner, config in axes.items():
        assert type(bt.compile(build(), config, XS[0])) is learner
    assert bt.D_RTRL(build(), config=axes[bt.D_RTRL]).rule == axes[bt.D_RTRL].rule()
    assert bt.D_RTRL(build()).config == of()
    assert bt.ETraceVjpAlgorithm(build(), config=axes[bt.ES_D_RTRL]).rule == axes[bt.ES_D_RTRL].rule()
    with pytest.raises(ValueError, match="compile"):
        bt.D_RTRL(build(), config=axes[bt.ES_D_RTRL])
    with pytest.raises(ValueError, match="DNI"):
        bt.D_RTRL(build(), config=axes[bt.DNI])
    windows = bt.D_RTRL(build(), config=of(update_schedule="window", window_size=3))
    assert (windows.window, windows.vjp_method) == (3, "multi-step")
    with pytest.raises(ValueError, match="window_size"):
        of(update_schedule="window")
    learner = bt.compile(build(), of(learning_signal="modulatory"), XS[0])
    learner.modulator = 1.0
    assert learner(XS[0]).shape == (2, 2)


@pytest.mark.slow
def test_a_target_may_come_last():
    found = []
    for given in ((TARGETS[0],), ()):
        model = NETS["leaky"].build()
        learner = compiled(bt.OSTTP(model, num_targets=3), XS[0])
        more = {} if given else {"y_target": TARGETS[0]}
        params = model.states(brainstate.ParamState)
        call = partial(learner, XS[0], *given, **more)
        found.append(brainstate.transform.grad(lambda call=call: loss([call()]), params)())
    assert np.array_equal(found[0]["w",], found[1]["w",])


# -- bounds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", ["normalized", "clipped"])
def test_traces_stay_below_a_bound(bound):
    def f(p, s, x):
        h = 1.5 * s.h + bt.matmul(x, p.w)
        return {"h": h}, h

    def below(a):
        return a / max(np.max(np.abs(a)), 1.0)

    trace = np.zeros((2, 3))
    for x in XS[:4]:
        trace = below(trace + below(x)) if bound == "normalized" else np.clip(0.9 * trace + x, -1.1, 1.1)
    for chunk_size in (1, 3):
        model = Step(f, {"w": (3, 4)}, {"h": (2, 4)})
        learner = (
            bt.D_RTRL(model, normalize_matrix_spectrum=True)
            if bound == "normalized"
            else bt.OTPE(model, leak=0.9, trace_clip_abs=1.1)
        )
        compiled(learner, XS[0])
        mask = np.array([0.0, 0.0, 0.0, 1.0])
        step = lambda x, learner=learner: jnp.sum(learner(x))
        grads = learner.etrace_grad(np.stack(XS[:4]), step_fn=step, mask=mask, chunk_size=chunk_size)
        assert np.max(np.abs(grads["w",] - trace.sum(0)[:, None])) < ROUND_OFF
        assert not learner.report.exactness.exact


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_spectral_radius_of_a_block(size):
    blocks = np.random.RandomState(0).randn(size, size, 7)
    expected = np.max(np.abs(np.linalg.eigvals(np.moveaxis(blocks, -1, 0))), -1)
    D = Normalized().jacobian(9 * jnp.asarray(blocks))
    assert np.max(np.abs(np.asarray(D) - blocks / expected)) < ROUND_OFF


# -- what calls are given: masks, and other front ends -------------------------------------------------

GIVEN = {
    "modulator": (lambda m: bt.ThreeFactor(m), bt.rules.D_RTRL(signal=bt.rules.Modulator())),
    "target": (
        lambda m: bt.OSTTP(m, num_targets=3),
        bt.rules.D_RTRL(signal=bt.rules.TargetProjection(3)),
    ),
}


def of_steps(name: str) -> Any:
    return jnp.asarray(np.stack({"target": TARGETS, "modulator": MODULATORS}[name]))


def losses_of(outs: Any, samples: bool) -> Any:
    """The loss of a step, or of each of its samples."""
    return jax.vmap(lambda o: loss([o]))(outs) if samples else loss([outs])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "samples"),
    every(3, [("modulator", True), ("modulator", False), ("target", True), ("target", False)]),
)
def test_a_masked_step_gives_no_gradient(name, samples):
    mask = np.array([1.0, 0.0, 1.0, 0.0, 0.5])
    mask = np.stack([mask, np.roll(mask, 1)], -1) if samples else mask
    given = np.asarray(of_steps(name))
    full = given[:, None] if given.ndim == 1 and samples else given
    weights = mask.reshape(*mask.shape, *[1] * (full.ndim - mask.ndim))
    made = np.where(np.broadcast_to(weights, full.shape) == 0, np.nan, given)  # what is masked is not read
    net, found = NETS["leaky"], []
    for chunk_size, sent, masked in ((1, made, mask), (3, made, mask), (3, full * weights, None)):
        model = net.build()
        learner = compiled(GIVEN[name][0](model), XS[0])
        step = lambda x, m, learner=learner: losses_of(learner(x, **{name: m}), samples)
        ones = np.ones_like(mask) if masked is None else masked
        grads = learner.etrace_grad(
            np.stack(XS), sent, step_fn=step, mask=ones, chunk_size=chunk_size, reduction="sum"
        )
        found.append({k: np.asarray(v) for k, v in grads.items() if k != ("o",)})
    assert agree(found[0], found[1], ROUND_OFF)
    assert agree(found[1], found[2], ROUND_OFF)


@pytest.mark.slow
@pytest.mark.parametrize("name", every(2, GIVEN))
def test_functions_are_given_signals(name):
    net = NETS["leaky"]
    expected = in_steps(compiled(GIVEN[name][0](net.build()), XS[0]))
    model = net.build()
    params = {k: jnp.asarray(getattr(model, k).value) for k in net.params}
    carry = {k: jnp.asarray(getattr(model, k).value) for k in net.states}
    step = lambda p, s, x: net.f(p, s, x, {})
    functions = bt.online(step, params, carry, XS[0], rule=GIVEN[name][1], mark="ops")
    traces, xs, given = functions.init(params, carry), jnp.asarray(np.stack(XS)), of_steps(name)
    found = functions.grad(
        lambda y: loss([y]), params, carry, traces, xs, reduction="sum", chunk_size=2, **{name: given}
    )[0]
    assert agree(expected, {(k,): v for k, v in found.items()}, ROUND_OFF)

    def total(params, carry=carry, traces=traces):
        value = 0.0
        for x, m in zip(xs, given, strict=True):
            carry, traces, y = functions.step(params, carry, traces, x, **{name: m})
            value = value + loss([y])
        return value

    found = jax.grad(total)(params)
    assert agree(expected, {(k,): v for k, v in found.items()}, ROUND_OFF)
    kept = functions.reset(carry, traces)[1]
    assert all(np.array_equal(v, kept[k]) for k, v in traces.items() if k.startswith("feedback"))
    assert not functions.check(lambda y: loss([y]), params, carry, xs, **{name: given}).equal
    with pytest.raises(ValueError, match=name):
        functions.step(params, carry, traces, xs[0])
    with pytest.raises(TypeError, match="made of"):
        functions.grad(lambda y: loss([y]), params, carry, traces, xs, dopamine=given)


def test_functions_with_an_estimate_of_what_comes_later():
    net, model = NETS["leaky"], NETS["leaky"].build()
    params = {k: jnp.asarray(getattr(model, k).value) for k in net.params}
    carry = {"h": jnp.asarray(model.h.value)}
    rule = bt.rules.DNI(bt.rules.Bootstrapped(lambda values, states: {0: values * states[0]}))
    step = lambda p, s, x: net.f(p, s, x, {})
    functions = bt.online(step, params, carry, XS[0], rule=rule, window=2)
    grads = [
        functions.grad(
            lambda y: loss([y]), params, carry, {}, jnp.asarray(np.stack(XS)), synthesizer=jnp.asarray(scale)
        )[0]["w"]
        for scale in (0.0, 0.3)
    ]
    assert np.max(np.abs(grads[0] - grads[1])) > 1e-3


@pytest.mark.parametrize("rule", [bt.rules.D_RTRL, bt.rules.ES_D_RTRL])
def test_an_estimate_of_what_comes_later_counts_at_every_window(rule):
    net, model = NETS["leaky"], NETS["leaky"].build()
    params = {k: jnp.asarray(getattr(model, k).value) for k in net.params}
    carry, xs = {"h": jnp.asarray(model.h.value)}, jnp.asarray(np.stack(XS))
    signal = bt.rules.Bootstrapped(lambda values, states: {0: values * jnp.tanh(states[0])})
    options = {"decay_or_rank": 0.5} if rule is bt.rules.ES_D_RTRL else {}
    chosen = rule(signal=signal, **options)
    functions = bt.online(lambda p, s, x: net.f(p, s, x, {}), params, carry, XS[0], rule=chosen, window=1)
    start = functions.init(params, carry)
    found = [
        functions.grad(
            lambda y: loss([y]), params, carry, start, xs, synthesizer=jnp.asarray(0.7), chunk_size=size
        )[0]
        for size in (1, 2, None)
    ]
    for other in found[1:]:
        assert agree(found[0], other, 1e-10), difference(found[0], other)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda m, **o: bt.EProp(m, kappa_filter_decay=0.5, **o),
            "EProp has no windows.*kappa_filter_decay=0",
        ),
        (lambda m, **o: bt.S_TLLR(m, 0.5, 0.5, **o), "S_TLLR has no windows"),
        (lambda m, **o: bt.EProp(m, "random", **o), "random feedback.*single-step"),
        (lambda m, **o: bt.OSTTP(m, num_targets=3, **o), "a projection of the target"),
        (lambda m, **o: bt.ThreeFactor(m, **o), "a modulator"),
    ],
)
def test_rules_without_windows_say_why(make, words):
    with pytest.raises(bt.NotSupportedError, match=words):
        compiled(make(NETS["spiking"].build(), vjp_method="multi-step"), XS[0])


@pytest.mark.parametrize(
    "make",
    every(
        3,
        [
            lambda m, **o: bt.EProp(m, **o),
            lambda m, **o: bt.OSTLRecurrent(m, **o),
            lambda m, **o: bt.OTTT(m, leak=0.8, **o),
        ],
    ),
)
def test_a_window_over_all_steps_is_bptt(make):
    learner = compiled(make(NETS["spiking"].build(), vjp_method="multi-step"), XS[0])
    step = lambda xs: jax.vmap(lambda o: loss([o]))(learner(bt.MultiStepData(xs)))
    grads = learner.etrace_grad(np.stack(XS), step_fn=step, chunk_size=LENGTH, reduction="sum")
    expected = bptt(NETS["spiking"].build(), XS)
    assert agree(expected, {tuple(map(str, k)): v for k, v in grads.items()}, ROUND_OFF)
