"""Costs before anything is allocated, against what is then measured."""

from __future__ import annotations

import dataclasses
import json

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import pytest

import braintrace as bt
from braintrace._frontends.pure import Pure
from braintrace._learners.rule_choice import read_request
from braintrace._report.flops import count_flops
from braintrace._report.plan import _recommend

pytestmark = pytest.mark.slow

BATCH, LENGTH, IN, UNITS = 8, 20, 6, 48


@pytest.fixture(autouse=True)
def _ranks():
    with jax.numpy_rank_promotion("allow"):
        yield


class Net(brainstate.nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell
        self.out = brainstate.nn.Linear(UNITS, 2)

    def update(self, x):
        return self.out(self.cell(x))


class Spiking(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.cell, self.out = bt.nn.Linear(IN, UNITS), bt.nn.LIF(UNITS), bt.nn.Linear(UNITS, 2)

    def update(self, x):
        return self.out(self.cell(self.w(x)))


NETS = {
    "gru": lambda: Net(bt.nn.GRUCell(IN, UNITS)),
    "lstm": lambda: Net(bt.nn.LSTMCell(IN, UNITS)),
    "lif": Spiking,
}
X0 = jax.ShapeDtypeStruct((BATCH, IN), float)


def loss(learner, x):
    return jnp.mean(learner(x) ** 2)


@pytest.mark.parametrize(
    ("name", "rule", "size"),
    [("gru", "D_RTRL", 5), ("gru", "BPTT", LENGTH), ("lstm", "BPTT", LENGTH), ("lif", "D_RTRL", LENGTH)],
)
def test_bytes_are_those_that_are_then_measured(name, rule, size):
    net = NETS[name]()
    with brainstate.environ.context(dt=1.0 * u.ms):
        row = bt.plan(net, X0, BATCH, LENGTH, rules=[rule], chunk_sizes=[size]).row(rule, size)
        learner = bt.compile(net, rule.lower(), jnp.zeros(X0.shape), batch_size=BATCH)
        assert row.trace_bytes == sum(st.value.nbytes for st in learner.etrace_states.values())

        @brainstate.transform.jit
        def gradient(xs):
            return learner.etrace_grad(xs, step_fn=lambda x: loss(learner, x), chunk_size=size)

        compiled = gradient.compile(jnp.zeros((LENGTH, BATCH, IN)))
    measured = compiled.memory_analysis().temp_size_in_bytes
    assert abs(row.activation_bytes - measured) < 0.1 * measured


@pytest.mark.parametrize("rule", ["D_RTRL", "ES_D_RTRL", "RTRL", "SnAp", "UORO", "KF_RTRL"])
def test_traces_of_every_rule(rule):
    cell = bt.nn.GRUCell(3, 4)
    found = bt.plan(cell, jax.ShapeDtypeStruct((2, 3), float), 2, 4, rules=[rule], chunk_sizes=[1])
    learner = bt.compile(cell, rule.lower(), jnp.zeros((2, 3)), batch_size=2)
    assert found.row(rule).trace_bytes == sum(st.value.nbytes for st in learner.etrace_states.values())
    assert found.row(rule).exact == (rule in ("RTRL", "SnAp"))  # a dense net is reached in two steps


def test_operations_are_those_that_xla_counts():
    net = NETS["gru"]()
    learner = bt.compile(net, "bptt", jnp.zeros(X0.shape), batch_size=BATCH)
    params = net.states(brainstate.ParamState)
    pure = Pure.trace(
        lambda x: brainstate.transform.grad(lambda: loss(learner, x), params)(), jnp.zeros(X0.shape)
    )
    compiled = jax.jit(pure).lower(pure.values(), jnp.zeros(X0.shape)).compile()
    expected = compiled.cost_analysis()["flops"]
    assert abs(count_flops(pure.closed) - expected) < 0.1 * expected

    def often(x):
        return jax.lax.scan(lambda h, _: (h @ x, None), x, length=7)[0]

    assert count_flops(jax.make_jaxpr(often)(jnp.ones((3, 3)))) == 7 * 2 * 27


def test_a_row_and_a_large_matrix_count_as_any_product():
    row, matrix = jnp.ones(512), jnp.ones((512, 256))
    assert count_flops(jax.make_jaxpr(bt.matmul)(row, matrix)) == 2 * matrix.size


def test_nothing_is_allocated_and_the_model_stays_as_it_is():
    cell = bt.nn.GRUCell(3, 4)
    before = {k: st.value for k, st in cell.states().items()}
    key = brainstate.random.DEFAULT.value
    large = jax.ShapeDtypeStruct((1000, 3), float)
    found = bt.plan(cell, large, 1000, 100, rules=["D_RTRL"], chunk_sizes=[10], memory_budget=10**6)
    assert found.row("D_RTRL").trace_bytes == 2 * 1000 * 4 * 8 * 8  # two products of 7 inputs and a bias
    assert {k: st.value for k, st in cell.states().items()} == before
    assert brainstate.random.DEFAULT.value is key
    assert all(leaf.size < 100 for leaf in jax.live_arrays() if leaf.shape[:1] == (1000,))
    assert found.recommended is None
    assert found.recommendation.startswith("Nothing fits in")


def test_a_plan_reads_well_and_recommends():
    class Exact(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = bt.nn.MiniGRU(3, 4)

        def update(self, x):
            return self.cell(x)

    found = bt.plan(Exact(), jax.ShapeDtypeStruct((2, 3), float), 2, 4, rules=["D_RTRL", "BPTT"], window=2)
    assert [r.chunk_size for r in found.rows] == [1, 2, 4, 2, 4, 2]
    assert found.row("D_RTRL", window=2).title == "D_RTRL, windows of 2"
    assert found.recommended is not None
    assert found.recommendation.startswith("D_RTRL, the whole sequence at once: ")
    assert "gradient on this model is exact" in found.recommendation
    assert "at any length, less than BPTT from about" in found.recommendation
    bptt, best = found.row("BPTT"), found.recommended
    dear = bptt.total_bytes <= best.total_bytes and bptt.flops_per_step <= best.flops_per_step
    assert ("BPTT is exact and takes neither more memory nor more" in found.recommendation) == dear
    text = str(found)
    assert text.splitlines()[1].split() == (
        "rule steps at once gradient traces activations together flops per step".split()
    )
    assert "D_RTRL *" in text
    assert "<table>" in found._repr_html_()
    assert json.loads(json.dumps(found.to_dict()))["length"] == 4


def test_rules_have_options_and_windows_come_last():
    rules = ["es_d_rtrl", (bt.D_RTRL, {"window": 2, "rank": 1})]
    request = read_request(9, rules, window=3, basis="pushed")
    titles = ["ES_D_RTRL", "D_RTRL, windows of 2, rank 1", "D_RTRL, windows of 3, basis=pushed"]
    assert [choice.label for choice in request.choices] == titles
    more = read_request(9, "es_d_rtrl", window=3, rank=None).choices  # also without another row of D_RTRL
    assert [choice.label for choice in more] == ["ES_D_RTRL", "D_RTRL, windows of 3"]
    assert len(read_request(9, {"a": "d_rtrl"}, rank=0).choices) == 1
    with pytest.raises(TypeError, match="no option 'length_'; options of `D_RTRL` are window"):
        read_request(9, "d_rtrl", length_=3)
    assert [request.sizes(name) for name in ("D_RTRL", "BPTT", "SnAp")] == [[1, 3, 9], [3, 9], [1]]


def test_mistakes():
    cell = bt.nn.GRUCell(3, 4)
    with pytest.raises(ValueError, match="Unknown rule 'D'"):
        bt.plan(cell, jnp.ones((2, 3)), 2, 5, rules=["D"])
    with pytest.raises(ValueError, match="at least 1"):
        bt.plan(cell, jnp.ones((2, 3)), 2, 0)


def test_what_is_no_cheaper_than_bptt_is_for_streams():
    cell, x = bt.nn.GRUCell(3, 4), jax.ShapeDtypeStruct((2, 3), float)
    found = bt.plan(cell, x, 2, 4, rules=["D_RTRL", "BPTT"], chunk_sizes=[1, 4], memory_budget=10**9)
    bptt = dataclasses.replace(found.row("BPTT"), activation_bytes=1, flops_per_step=1.0)
    words = _recommend([*found.rows[:2], bptt], 4, 10**9, 0, 0)[1]
    assert "take an online rule for a stream" in words
