"""Marks that the compiler finds: in the models of the zoo with theirs taken away, and in other ones."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import braintrace as bt
from braintrace import DiagnosticKind, compile_etrace_graph
from braintrace._ops.primitive import without_marks
from tests.oracle import bptt
from tests.run import agree, by_bptt, by_d_rtrl, compiled, difference, every, online, sequence, some
from tests.run import graph_of as marked_graph
from tests.zoo import CASES, Step

ROUND_OFF = 1e-10


def graph_of(model: Any, *args: Any, **options: Any) -> Any:
    with warnings.catch_warnings(action="ignore"):
        return compile_etrace_graph(model, *args, mark="auto", **options)


def learned(graph: Any) -> set[Any]:
    """Each parameter that is learned online, with each hidden state that it feeds."""
    relations = graph.hidden_param_op_relations
    return {(p, h) for r in relations for p in r.param_paths for h in r.connected_hidden_paths}


def ops(graph: Any) -> list[str]:
    return [s.primitive.name.removeprefix("etp_") for s in graph.module_info.program.sites]


# -- the zoo ---------------------------------------------------------------------------------------------

# Models in which other sites are found than the hand-written marks.
EXCEPTIONS = {
    "lora": "two products, of which the first reaches the state through the second only",
    "lora_and_frozen": "the same",
    "vmap_of_cond": "`vmap` chooses between results, and not between weights",
    "bias_of_state": "an ordinary sum, and not the bias of an op",
    "plain_bias_of_state": "a bias without a mark is found",
    "plain_input_weight": "a weight without a mark is found",
    "recurrent_lora": "the same",
    "recurrent_sparse": "a sparse product is no operation of its own",
    "ring": "the same",
    "plain_recurrent": "a recurrent weight without a mark is found, which closes the path through it",
    "weight_that_changes": "a weight times a state is found where it meets the state",
    "weight_of_input": "a weight times an input is found where it meets the input",
}

KINDS = {case.kind for case in CASES.values()}
# Of the others, a third of each kind shows that equal graphs have equal gradients.
WITH_GRADIENTS = {n for kind in KINDS for n in some(3, [n for n in CASES if CASES[n].kind == kind])} | {
    *EXCEPTIONS
}


@pytest.mark.parametrize("name", every(24, CASES))
def test_the_zoo_without_its_marks(name):
    case, xs = CASES[name], sequence(CASES[name])
    marked, truth = by_d_rtrl(name) if name in WITH_GRADIENTS else (marked_graph(name), {})
    remembered = name == "same_call_twice"  # by `jit`: the marks, and that there were none
    if remembered:
        jax.clear_caches()
    with without_marks():
        unmarked = compiled(bt.D_RTRL(case.build(), mark="auto"), xs[0])
        found = online(unmarked, xs) if name in WITH_GRADIENTS else {}
    if remembered:
        jax.clear_caches()
    graphs = marked, unmarked.graph
    assert all(s.found for s in graphs[1].module_info.program.sites)
    groups = [[g.hidden_paths for g in graph.hidden_groups] for graph in graphs]
    same = learned(graphs[0]) == learned(graphs[1])
    if truth:
        same = same and agree(truth, found, ROUND_OFF)
    else:
        assert len({frozenset(graph.exactness().weights) for graph in graphs}) == 1
    assert groups[0] == groups[1]
    assert same == (name not in EXCEPTIONS), (
        learned(graphs[0]) ^ learned(graphs[1]),
        difference(truth, found),
    )
    if not same:
        bad = difference(by_bptt(name), found)
        assert {p for p, d in bad.items() if not d < ROUND_OFF} == set(graphs[1].exactness().weights)


# -- what can be found -----------------------------------------------------------------------------------


def leaky(f: Any, x: Any = 3, h: Any = 4, **params: Any) -> tuple[Any, Any]:
    """`h = 0.9 h + f(parameters, h, x)` and a sequence for it."""

    def step(p, s, x):
        h = 0.9 * s.h + f(p, s.h, x)
        return {"h": h}, jnp.tanh(h)

    rng = np.random.RandomState(3)
    draw = x if callable(x) else lambda rng: jnp.asarray(rng.randn(*((x,) if isinstance(x, int) else x)))
    return partial(Step, step, params or {"w": (3, 4)}, {"h": h}), [draw(rng) for _ in range(3)]


def _indices(*shape: int) -> Any:
    return lambda rng: jnp.asarray(rng.randint(-1, 4, shape))


def _conv(x: Any, w: Any, **options: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1,) * (w.ndim - 2), "VALID", **options)


FOUND: dict[str, tuple[str, Any]] = {
    "weight_first": ("dot_general", leaky(lambda p, h, x: p.w.T @ x)),
    "two_axes": (
        "dot_general",
        leaky(lambda p, h, x: jnp.tensordot(p.w, x, ((0, 2), (1, 0))), (2, 3), w=(3, 4, 2)),
    ),
    "batch_axes_both_ways": (
        "dot_general dot_general",
        leaky(
            lambda p, h, x: jnp.einsum("bhd,hde->bhe", x, p.w) + jnp.einsum("hde,bhd->bhe", p.v, x),
            (2, 2, 3),
            (2, 2, 4),
            w=(2, 3, 4),
            v=(2, 3, 4),
        ),
    ),
    "outer": ("dot_general", leaky(lambda p, h, x: jnp.einsum("i,o->io", x, p.w), 3, (3, 4), w=4)),
    "conv_of_groups": (
        "conv element_wise",
        leaky(
            lambda p, h, x: (
                _conv(
                    x, p.w, feature_group_count=2, rhs_dilation=(2,), dimension_numbers=("NHC", "HIO", "NHC")
                )
                + p.b[None, None]
            ),
            (2, 5, 4),
            (2, 3, 2),
            w=(2, 2, 2),
            b=2,
        ),
    ),
    "conv_of_wide_type": (
        "conv",
        leaky(
            lambda p, h, x: _conv(
                x.astype("float32"),
                p.w.astype("float32"),
                precision=lax.Precision.HIGHEST,
                preferred_element_type=jnp.float64,
            ),
            (1, 2, 3),
            (1, 2, 2),
            w=(2, 2, 2),
        ),
    ),
    "rows": ("gather", leaky(lambda p, h, x: p.w[x], _indices(2), (2, 4), w=(4, 4))),
    "take_clipped": (
        "gather",
        leaky(lambda p, h, x: jnp.take(p.w, x, axis=1, mode="clip").T, _indices(2), (2, 3), w=(3, 3)),
    ),
    "take_beyond": (
        "gather",
        leaky(lambda p, h, x: p.w.at[x].get(mode="fill", fill_value=0.5), _indices(5), (5, 4), w=(2, 4)),
    ),
    "entries": ("gather", leaky(lambda p, h, x: p.w[x, :, x[::-1]], _indices(3), (3, 2), w=(4, 2, 4))),
    "one_row": ("gather", leaky(lambda p, h, x: p.w[x], _indices(), w=(4, 4))),
    "one_row_each": (
        "gather",
        leaky(lambda p, h, x: jax.vmap(lambda i: p.w[i])(x), _indices(2), (2, 4), w=(4, 4)),
    ),
    "bias_by_hand": (
        "dot_general element_wise",
        leaky(lambda p, h, x: x @ p.w + p.b[None], (2, 3), (2, 4), w=(3, 4), b=4),
    ),
    "bias_of_fused_gates": (
        "dot_general element_wise",
        leaky(
            lambda p, h, x: jnp.prod((x @ p.w + p.b[None]).reshape(2, 2, 4), 1), (2, 3), (2, 4), w=(3, 8), b=8
        ),
    ),
    "element_by_element": (
        "element_wise " * 6,
        leaky(
            lambda p, h, x: (
                jnp.where(x > 0, p.a, p.b)
                + jnp.maximum(x, p.a * p.b)
                + x / jnp.exp(p.c)
                + jnp.abs(x) ** jax.nn.softplus(p.a)
                + lax.clamp(-0.1, p.b - x, 2.0)
            ),
            4,
            a=4,
            b=4,
            c=(),
        ),
    ),
    "gain_for_each_input": (
        "element_wise",
        leaky(lambda p, h, x: jnp.sum(x[:, :, None] * p.w[None], 1), (2, 3), (2, 4)),
    ),
    "made_of_several": (
        "dot_general",
        leaky(lambda p, h, x: x @ (jnp.tanh(p.u) @ p.v.T * jax.nn.softplus(p.g)), u=(3, 2), v=(4, 2), g=()),
    ),
    "joined_with_a_state": (
        "dot_general element_wise",
        leaky(
            lambda p, h, x: x @ p.w + jnp.split(jnp.concatenate([p.b, h]), 2)[0] * h,
            w=(3, 4),
            b=4,
        ),
    ),
    "start_that_is_learned": (
        "dot_general element_wise",
        leaky(lambda p, h, x: lax.cond(x[0] > 0, lambda: p.b, lambda: x @ p.w), w=(3, 4), b=4),
    ),
    "jit_and_checkpoint": (
        "dot_general element_wise",
        leaky(lambda p, h, x: jax.jit(jax.checkpoint(lambda x, w, b: x @ w + b))(x, p.w, p.b), w=(3, 4), b=4),
    ),
    "loop": (
        "dot_general element_wise",
        leaky(
            lambda p, h, x: lax.scan(lambda y, w: (jnp.tanh(y) * p.b + x @ w, None), jnp.zeros(4), p.w)[0],
            w=(3, 3, 4),
            b=4,
        ),
    ),
}


@pytest.mark.parametrize("name", every(3, FOUND))
def test_found(name):
    expected, (build, xs) = FOUND[name]
    learner = bt.D_RTRL(build(), mark="auto")
    found, truth = online(learner, xs), bptt(build(), xs)
    assert sorted(ops(learner.graph)) == sorted(expected.split())
    assert learner.report.exactness.exact, str(learner.report.exactness)
    tolerance = 1e-5 if "wide_type" in name else ROUND_OFF
    assert agree(truth, found, tolerance), difference(truth, found)
    for site in learner.graph.module_info.program.sites:
        assert site.found
        assert "test_marking.py" in site.source


@pytest.mark.parametrize("f", [jnp.sin, lambda w: w])
def test_a_state_that_is_a_parameter(f):
    def step(p, s, x):
        return {"h": f(p.w)}, jnp.tanh(s.h) * x

    build, xs = partial(Step, step, {"w": 4}, {"h": 4}), [jnp.arange(4.0) + i for i in range(3)]
    learner = bt.D_RTRL(build(), mark="auto")
    assert agree(bptt(build(), xs), online(learner, xs), ROUND_OFF)
    assert ops(learner.graph) == ["element_wise"]


@jax.custom_vjp
def product(x, w):
    return x @ w


product.defvjp(lambda x, w: (x @ w, (x, w)), lambda xw, g: (xw[1] @ g, jnp.outer(xw[0], g)))

NOT_FOUND: dict[str, tuple[str, Any]] = {
    "while": ("", leaky(lambda p, h, x: lax.while_loop(lambda y: y[0] > 1, lambda y: y - p.w, x), 4, w=4)),
    "own_rule": ("", leaky(lambda p, h, x: product(x, p.w))),
    "sort": ("", leaky(lambda p, h, x: jnp.sort(jnp.concatenate([p.w, x]))[:4], w=4)),
    "wide_slice": ("", leaky(lambda p, h, x: lax.dynamic_slice(p.w, (x,), (4,)), _indices(), w=8)),
    "frozen": ("", leaky(lambda p, h, x: x @ lax.stop_gradient(p.w))),
    "by_hand": ("matmul", leaky(lambda p, h, x: bt.matmul(x, jnp.tanh(p.w) * p.g), w=(3, 4), g=())),
    "after_a_mark": ("element_wise", leaky(lambda p, h, x: x * jnp.tanh(bt.element_wise(p.w)), 4, w=4)),
}


@pytest.mark.parametrize("name", NOT_FOUND)
def test_not_found(name):
    expected, (build, xs) = NOT_FOUND[name]
    graph = graph_of(build(), xs[0])
    assert ops(graph) == expected.split()
    assert not any(s.found for s in graph.module_info.program.sites)


def test_what_is_not_found_is_said():
    build, xs = NOT_FOUND["sort"][1]
    (record,) = graph_of(build(), xs[0]).explain(kind=DiagnosticKind.NO_MARKED_OP)
    assert "`w`" in record.message
    assert "found where" in record.message
    with pytest.raises(ValueError, match="'auto'"):
        bt.D_RTRL(build(), mark="all")


def test_a_step_with_some_marks():
    """Marks by hand stay, others are found beside them, and reports tell them apart."""
    build, xs = leaky(lambda p, h, x: bt.matmul(x, p.w) + p.b, w=(3, 4), b=4)
    graph = graph_of(build(), xs[0])
    assert [s.found for s in graph.module_info.program.sites] == [False, True]
    text = str(graph)
    assert "matmul w  f64[3,4] -> f64[4]  all_direct  marked by hand" in text
    assert "element_wise b  f64[4] -> f64[4]  all_direct  found" in text
    records = graph.explain(kind=DiagnosticKind.RELATION_INCLUDED)
    assert [r.context["found"] for r in records] == [False, True]
    assert "found" in graph.to_html()
    with pytest.warns(UserWarning, match="`b`"):
        assert "marked by hand" not in str(compile_etrace_graph(build(), xs[0], mark="ops"))


def test_a_step_that_changes_is_marked_again():
    """What the model closes over may change between calls; the marks are found in each new tracing."""

    class Model(brainstate.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = 1.0
            self.w, self.h = brainstate.ParamState(jnp.ones((3, 4))), brainstate.HiddenState(jnp.zeros(4))

        def update(self, x):
            self.h.value = 0.5 * self.h.value + self.gain * (x @ self.w.value)
            return self.h.value

    model = Model()
    learner = bt.D_RTRL(model, mark="auto")
    learner.compile_graph(jnp.ones(3))
    for model.gain, expected in ((1.0, 1.0), (2.0, 2.5)):
        learn = brainstate.transform.grad(lambda x: learner(x).sum(), model.states(brainstate.ParamState))
        np.testing.assert_allclose(learn(jnp.ones(3))["w",], np.full((3, 4), expected))


# -- layers of brainstate --------------------------------------------------------------------------------


def cells(name: str) -> tuple[Any, Any]:
    """A cell of `brainstate.nn`, and that of `braintrace.nn` with the same parameters."""
    with jax.numpy_rank_promotion("allow"):
        plain, marked = (getattr(nn, name)(3, 4) for nn in (brainstate.nn, bt.nn))
        for cell in (plain, marked):
            brainstate.nn.init_all_states(cell, batch_size=2)
    for path, state in marked.states(brainstate.ParamState).items():
        if name == "GRUCell" and path[0] != "Wh":
            half = slice(0, 4) if path[0] == "Wr" else slice(4, 8)
            state.value = jax.tree.map(lambda w: w[..., half], plain.states()["Wrz", "weight"].value)  # noqa: B023
        else:
            state.value = plain.states()[path].value
    return plain, marked


@pytest.mark.parametrize("rule", ["D_RTRL", pytest.param("ES_D_RTRL", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", every(5, ["GRUCell", "ValinaRNNCell", "MGUCell", "LSTMCell", "URLSTMCell"]))
def test_cells_of_brainstate(name, rule):
    brainstate.random.seed(0)
    plain, marked = cells(name)
    xs = [jnp.asarray(np.random.RandomState(i).randn(2, 3)) for i in range(4)]
    with jax.numpy_rank_promotion("allow"):
        found = online(getattr(bt, rule)(plain, mark="auto"), xs)
        truth = online(getattr(bt, rule)(marked), xs)
    if name == "GRUCell":
        gates = [truth.pop((gate, "weight")) for gate in ("Wr", "Wz")]
        truth["Wrz", "weight"] = jax.tree.map(lambda *parts: jnp.concatenate(parts, -1), *gates)
    assert agree(truth, found, ROUND_OFF), difference(truth, found)
