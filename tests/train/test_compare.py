"""Rules side by side: numbers, words, pictures, and a model that stays as it was."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace._train.comparison import Agreement, Compared, Comparison
from braintrace._train.comparison_picture import draw, place_labels

from .nets import Net, batch

pytestmark = pytest.mark.slow
XS, YS, _ = batch(0, length=8)


def loss(net, x, y):
    return jnp.mean((net(x) - y) ** 2)


def gru():
    brainstate.random.seed(1)
    return braintrace.nn.GRUCell(3, 2)


def run(model, rules, step_fn=loss, **options):
    return braintrace.compare(model, XS, YS, step_fn, rules, progress=False, **options)


class Refusing(braintrace.rules.D_RTRL):
    """A rule that a model is too much for."""

    def seen(self, graph, windows):
        raise braintrace.NotSupportedError("no such op here\nand much more to say")


@cache
def some_rules():
    windows = braintrace.D_RTRL, {"window": 3, "rank": 1}
    return run(gru(), ["d_rtrl", windows, braintrace.rules.ES_D_RTRL(0.5), Refusing(), "RTRL"])


@pytest.fixture
def found():
    return some_rules()


def test_each_rule_is_beside_the_exact_gradient(found):
    labels = ["BPTT", "D_RTRL", "D_RTRL, windows of 3, rank 1", "ES_D_RTRL, decay_or_rank=0.5"]
    assert [r.rule for r in found.rows] == [*labels, "Refusing", "RTRL"]
    assert [r.exact for r in found.rows] == [True, False, False, False, False, True]
    assert "NotSupportedError: no such op here (" in found.row("Refusing").why  # and the line
    learner = braintrace.compile(gru(), "d_rtrl", XS[0], batch_size=4)
    check = braintrace.check_gradients(learner, XS, YS, step_fn=lambda x, y: loss(learner, x, y))
    row = found.row("D_RTRL")
    np.testing.assert_allclose(
        [row.cosine, row.gradient.norm_ratio, row.gradient.relative_error],
        [check.cosine, check.norm_ratio, check.relative_error],
        rtol=1e-3,
    )
    assert 0.5 < row.cosine < 0.9999
    for parameter in check.parameters:
        mine = row.parameters[".".join(parameter.path)]
        np.testing.assert_allclose(mine.cosine, parameter.cosine, rtol=1e-4)
        np.testing.assert_allclose(mine.norm_ratio, parameter.norm_ratio, rtol=1e-4)


def test_costs_are_measured(found):
    for row in (r for r in found.rows if r.ok):
        assert 0 < row.step_seconds < 1
        assert row.compile_seconds > row.step_seconds
    # two products of 5 inputs and a bias, for each of 4 samples and 2 units
    assert found.row("D_RTRL").trace_bytes == 2 * 6 * 4 * 2 * 4
    assert found.bptt.trace_bytes == 0 < found.bptt.activation_bytes


def test_words_data_and_files(found, tmp_path):
    text = found.to_str()
    assert f"5 Refusing cannot be used here: {found.rows[4].why}" in text
    assert "and much more" not in text
    assert f"* {found.recommendation}" in text
    assert "Wr.weight" in text
    data = json.loads(found.to_json())
    assert Comparison.from_dict(data) == found
    assert data["recommended"] == found.recommended.rule
    for name in ("page.html", "data.json", "frontier.svg", "frontier.png"):
        found.save(tmp_path / "new" / name)
        assert (tmp_path / "new" / name).stat().st_size > 1000
    assert "windows of 3, rank 1" in (tmp_path / "new" / "page.html").read_text()
    with pytest.raises(KeyError, match="there are BPTT"):
        found.row("UORO")


class Spiking(brainstate.nn.Module):
    """LIF neurons that start at random, and dropout."""

    def __init__(self):
        super().__init__()
        self.weights = braintrace.nn.Linear(3, 4, w_init=brainstate.nn.init.Uniform(0.0, 2.0))
        self.neurons = braintrace.nn.LIF(
            4, R=20.0, tau=20.0 * u.ms, V_initializer=brainstate.nn.init.Uniform(0.0, 1.0)
        )
        self.dropout = brainstate.nn.Dropout(0.5)
        self.readout = braintrace.nn.Linear(4, 2)

    def update(self, x):
        return self.readout(self.dropout(self.neurons(self.weights(x))))


def test_all_rules_start_alike_and_the_model_is_left_as_it_was():
    with brainstate.environ.context(dt=1.0 * u.ms):
        model = Spiking()
        brainstate.nn.init_all_states(model, batch_size=2)  # another batch than that of the data
        before = {k: (st, st.value) for k, st in model.states().items()}
        key = brainstate.random.DEFAULT.value
        found = run(model, ["d_rtrl"], train=2)
    assert found.row("D_RTRL").exact  # with the same noise and the same start only
    assert np.isfinite(found.row("D_RTRL").losses).all()
    after = model.states()
    assert after.keys() == before.keys()
    for path, (state, value) in before.items():
        assert after[path] is state
        assert jax.tree.all(jax.tree.map(lambda a, b: a is b, state.value, value))
    assert key == brainstate.random.DEFAULT.value


def test_a_model_without_states_stays_without():
    model = Net()
    before = set(model.states())
    run(model, ["d_rtrl"], seed=3)
    assert set(model.states()) == before


def test_learning_curves():
    model = Net()
    step = lambda net, x, y: (loss(net, x, y), {"anything": 1.0})
    found = run(
        model, {"plain": "d_rtrl"}, step, train={"updates": 12, "optimizer": "sgd", "learning_rate": 0.1}
    )
    assert [len(r.losses) for r in found.rows] == [12, 12]
    assert all(r.losses[-1] < r.losses[0] for r in found.rows)
    np.testing.assert_allclose(*(r.losses[0] for r in found.rows), rtol=1e-5)
    assert "after 12 updates" in found.recommendation
    assert Comparison.from_dict(json.loads(found.to_json())) == found
    assert "updates" in draw(found).to_svg()
    wild = run(model, ["d_rtrl"], train={"updates": 3, "optimizer": "sgd", "learning_rate": 1e38})
    assert wild.row("D_RTRL").diverged
    assert "diverged" in wild.to_str()
    json.loads(wild.to_json())


def test_functions():
    def step(params, h, x):
        h = 0.5 * h + jnp.tanh(x @ params["w"] + h @ params["r"])
        return h, h @ params["out"]

    keys = jax.random.split(jax.random.key(0), 3)
    sizes = {"w": (3, 4), "r": (4, 4), "out": (4, 2)}
    params = {k: jax.random.normal(i, s) for i, (k, s) in zip(keys, sizes.items(), strict=True)}
    h = jnp.zeros((4, 4))
    net = braintrace.online(step, params, h, XS[0], window=2)
    judge = lambda y, target: jnp.mean((y - target) ** 2)
    rules = ["d_rtrl", ("d_rtrl", {"window": 3}), braintrace.rules.RTRL()]
    found = net.compare(judge, params, h, XS, YS, rules=rules, window=3, rank=2, train=3, progress=False)
    assert [r.exact for r in found.rows] == [True, False, False, True, False]
    assert found.rows[-1].rule == "D_RTRL, windows of 3, rank 2"
    with pytest.raises(TypeError, match="no option 'windows'"):
        net.compare(judge, params, h, XS, YS, rules=rules, windows=3)
    single = braintrace.online(step, params, h, XS[0])
    cosine = single.check(judge, params, h, XS, YS).cosine
    np.testing.assert_allclose(found.row("D_RTRL").cosine, cosine, rtol=1e-5)
    assert found.row("D_RTRL").cosine < found.row("D_RTRL, windows of 3").cosine
    np.testing.assert_allclose(found.row("RTRL").losses, found.bptt.losses, rtol=1e-4)
    assert all(r.losses[-1] < r.losses[0] for r in found.rows)


def test_what_does_not_fit_is_not_tried():
    found = run(gru(), ["rtrl"], memory_budget=1000)
    assert "its traces take" in found.row("RTRL").why
    assert "train it by BPTT" in found.recommendation
    assert found.recommended is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"step_fn": None}, "calls the learner and returns the loss"),
        ({"step_fn": lambda x, y: 0.0}, r"step_fn\(learner, x, y\)"),
        ({"step_fn": lambda net, x, y: print(net(x))}, "must return the loss of the step; it returned None"),
        ({"step_fn": lambda net, x, y: jnp.sum(x)}, "must call the learner once"),
        ({"step_fn": lambda net, x, y: net(x)}, "one number, the loss of the step"),
        ({"xs": XS[:0], "ys": YS[:0]}, "no steps"),
        ({"ys": YS[:3]}, "share one length"),
        ({"xs": XS[:, 0, 0], "ys": None}, "batched=False"),
        ({"rules": ["d_rtl"]}, "did you mean 'd_rtrl'"),
        ({"rules": [3]}, "A rule is a name such as"),
        ({"rules": []}, "no rule to compare"),
        ({"rules": ["d_rtrl", braintrace.D_RTRL]}, "there twice"),
        ({"train": 0}, "a number of updates"),
        ({"train": {"epochs": 3}}, "a number of updates"),
        ({"train": {"updates": 3, "optimizer": "adem"}}, "no optimiser 'adem'"),
        ({"chunk_size": 0}, "chunk_size"),
    ],
)
def test_mistakes_are_told(options, words):
    given = {"xs": XS, "ys": YS, "step_fn": loss, "rules": ["d_rtrl"], "progress": False, **options}
    if given["ys"] is None and "step_fn" not in options:
        given["step_fn"] = lambda net, x: jnp.sum(net(x))
    with pytest.raises((TypeError, ValueError), match=words):
        braintrace.compare(gru(), **given)


def test_options_that_a_rule_does_not_have_are_said_in_its_row():
    found = run(gru(), [("es_d_rtrl", {"rank": 3}), "d_rtrl"])
    assert "rank" in found.rows[1].why
    assert found.row("D_RTRL").ok


def row(rule, cosine, cost, losses=None, **more):
    return Compared(
        rule,
        gradient=Agreement(cosine, 1.0, 0.1),
        step_seconds=1e-6 * cost,
        losses=losses,
        **{"activation_bytes": 1000, **more},
    )


def test_recommendations():
    bptt = row("BPTT", 1.0, 10, [1.0, 0.1], is_bptt=True, exact=True)
    rows = [bptt, row("cheap", 0.7, 1, [1.0, 0.9]), row("good", 0.97, 4, [1.0, 0.5]), row("dear", 0.99, 20)]
    found = Comparison(5, "cpu", rows)
    assert found.recommended.rule == "good"
    assert [r.rule for r in found.frontier] == ["cheap", "good", "BPTT"]
    assert "cosine of 0.970" in found.recommendation
    assert "0.4 times the time and 1 times the memory" in found.recommendation
    assert "(cheap: 0.700)" in found.recommendation
    far = Comparison(5, "cpu", rows[:2])
    assert far.recommended is None
    assert "the closest is cheap with 0.700" in far.recommendation
    dear = Comparison(5, "cpu", [bptt, replace(rows[3], trace_bytes=2000)])
    assert dear.recommended is bptt
    assert dear.recommendation.startswith("Take BPTT for sequences of 5 steps: it is exact")
    assert "For a stream" in dear.recommendation
    assert "take dear: it has a cosine of 0.990" in dear.recommendation
    assert "its memory grows with the length: from about 10 steps on" in dear.recommendation
    lean = row("lean", 0.99, 30, activation_bytes=900)  # dearer by time x memory, but it saves something
    assert Comparison(5, "cpu", [bptt, rows[3], lean]).recommended is lean
    assert "drawn at random" in Comparison(5, "cpu", rows, random=True).recommendation
    assert "`w` is exactly zero" in Comparison(5, "cpu", rows, zero=["w"]).recommendation
    learned = Comparison(5, "cpu", rows[:3], updates=2)
    assert learned.recommended is None
    assert "0.5 by good" in learned.recommendation
    rows[2] = row("good", 0.97, 4, [1.0, 0.1])
    learned = Comparison(5, "cpu", rows[:3], updates=2)
    assert learned.recommended.rule == "good"
    assert "falls by 98% or more of what it does in the best run" in learned.recommendation


def test_labels_keep_clear_of_each_other():
    rng = np.random.default_rng(0)
    points = {i: (50 + 20 * rng.random(), 60 + 20 * rng.random()) for i in range(12)} | {12: (50.0, 60.0)}
    placed = list(place_labels(points, (0, 0, 300, 300)).values())
    for i, (x, y) in enumerate(placed):
        assert all(max(abs(x - a), abs(y - b)) >= 13 for a, b in placed[:i])
        assert all(math.hypot(x - a, y - b) > 6 for a, b in points.values())
