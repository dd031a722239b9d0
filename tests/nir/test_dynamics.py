"""Neurons, delays and cycles compared with their equations, written in numpy."""

from itertools import pairwise

import brainstate
import jax.numpy as jnp
import nir
import numpy as np
import pytest

import braintrace
from braintrace.nir.schedule import schedule

from .graphs import NEURONS, chain, neuron

DT, STEPS = 1e-3, 40


def run(graph, xs, **options):
    net = braintrace.nir.load(graph, dt=DT, **options)
    brainstate.nn.init_all_states(net)
    return np.asarray(brainstate.transform.for_loop(net, jnp.asarray(xs)))


def simulate(node, xs, *, reset="hard", advance):
    """The outputs of a neuron whose voltage and current `advance` takes through a step."""
    v = np.array(getattr(node, "v_leak", np.zeros(4)))
    i, out, drop = np.zeros(4), [], 0.0
    for x in xs:
        v, i = advance(node, v, i, x)
        v, drop = v - drop, 0.0
        if not hasattr(node, "v_threshold"):
            out.append(v)
            continue
        z = v > node.v_threshold
        out.append(z)
        if reset == "hard":
            v = np.where(z, node.v_reset, v)
        else:
            lower = z * (node.v_threshold - node.v_reset)
            v, drop = (v - lower, 0.0) if reset == "soft" else (v, lower)
    return np.array(out, float)


def slope(node, v, i, x):
    """The derivatives of voltage and current, as NIR defines them."""
    if hasattr(node, "tau_syn"):
        return (node.v_leak - v + node.r * i) / node.tau_mem, (-i + node.w_in * x) / node.tau_syn
    if hasattr(node, "tau"):
        return (node.v_leak - v + node.r * x) / node.tau, 0.0
    return node.r * x, 0.0


def exact(node, v, i, x, parts=20):
    """Runge-Kutta steps, with the input held."""
    h = DT / parts
    for _ in range(parts):
        a = slope(node, v, i, x)
        b = slope(node, v + h / 2 * a[0], i + h / 2 * a[1], x)
        c = slope(node, v + h / 2 * b[0], i + h / 2 * b[1], x)
        d = slope(node, v + h * c[0], i + h * c[1], x)
        v, i = (y + h / 6 * (a[k] + 2 * b[k] + 2 * c[k] + d[k]) for k, y in enumerate((v, i)))
    return v, i


def euler(node, v, i, x):
    dv, di = slope(node, v, i, x)
    return v + DT * dv, i + DT * di


def semi_implicit(node, v, i, x):
    i = i + DT * slope(node, v, i, x)[1]
    return v + DT * slope(node, v, i, x)[0], i


METHODS = {"exponential": exact, "euler": euler, "semi-implicit": semi_implicit}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", NEURONS)
def test_neurons_follow_their_equations(kind, method):
    rng = np.random.RandomState(0)
    node = neuron(kind, rng)
    if kind.startswith("Cuba"):
        node.tau_syn[0] = node.tau_mem[0]  # where the closed form divides zero by zero
    xs = rng.uniform(-0.5, 1.0, (STEPS, 4))
    y, expected = run(chain((4,), node), xs, method=method), simulate(node, xs, advance=METHODS[method])
    np.testing.assert_allclose(y, expected, atol=1e-9)
    if kind in ("IF", "LIF", "CubaLIF"):
        assert 0.05 < y.mean() < 0.95


@pytest.mark.parametrize("reset", ["hard", "soft", "soft-delayed"])
def test_resets(reset):
    rng = np.random.RandomState(1)
    node, xs = neuron("LIF", rng), rng.uniform(0.0, 1.0, (STEPS, 4))
    y = run(chain((4,), node), xs, method="euler", reset=reset)
    np.testing.assert_array_equal(y, simulate(node, xs, reset=reset, advance=euler))
    others = {"hard", "soft", "soft-delayed"} - {reset}
    assert all((y != simulate(node, xs, reset=other, advance=euler)).any() for other in others)


def test_a_spike_needs_more_than_the_threshold():
    one = np.ones(1)
    graph = chain((1,), nir.IF(r=one / DT, v_threshold=2 * one, v_reset=0 * one))
    assert run(graph, np.ones((7, 1)))[:, 0].tolist() == [0, 0, 1, 0, 0, 1, 0]


def test_delays():
    xs = np.arange(1.0, 9.0)[:, None] * np.ones(3)
    y = run(chain((3,), nir.Delay(DT * np.array([0.0, 1.0, 3.0]))), xs)
    assert y.T.tolist() == [list(range(1, 9)), [0, *range(1, 8)], [0, 0, 0, *range(1, 6)]]
    with pytest.raises(braintrace.nir.NIRError, match="not a whole number of steps"):
        run(chain((1,), nir.Delay(np.array([0.0005]))), xs)


def loop(*nodes, order=None):
    """Units that count their input, and feed back half of their output."""
    named = {
        "in": nir.Input(np.array([1])),
        "sum": nir.I(r=np.ones(1) / DT),
        "half": nir.Scale(np.full(1, 0.5)),
        **dict(nodes),
        "out": nir.Output(np.array([1])),
    }
    back = ["sum", "half", *dict(nodes), "sum"]
    edges = [("in", "sum"), ("sum", "out"), *pairwise(back)]
    return nir.NIRGraph({name: named[name] for name in order or named}, edges, type_check=False)


def test_cycles_take_one_step():
    xs = np.array([[1.0], [0.0], [0.0]])
    assert run(loop(), xs)[:, 0].tolist() == [1, 1.5, 2.25]
    # the order of the nodes in the graph makes no difference
    assert run(loop(order=["half", "out", "sum", "in"]), xs)[:, 0].tolist() == [1, 1.5, 2.25]
    # a delay of a step is the step that the cycle takes; one of two steps takes one more
    assert run(loop(("delay", nir.Delay(np.array([DT])))), xs)[:, 0].tolist() == [1, 1.5, 2.25]
    assert run(loop(("delay", nir.Delay(np.array([2 * DT])))), xs)[:, 0].tolist() == [1, 1, 1.5]


def test_a_node_in_a_cycle_feeds_others_without_delay():
    graph = loop()
    graph.edges.remove(("sum", "out"))
    graph.edges.append(("half", "out"))
    assert run(graph, np.array([[1.0], [0.0], [0.0]]))[:, 0].tolist() == [0.5, 0.75, 1.125]


def test_schedules():
    two = {"x": [], "a": ["x", "back"], "b": ["a"], "back": ["b"], "y": ["b"]}
    assert schedule(two, {"a", "b"}, set()) == ["x", "back", "a", "b", "y"]
    # `b` comes first in the graph and is fed by the input, but its cycle waits for that of `a`
    fed = {"x": [], "b": ["x", "c", "on"], "c": ["b"], "on": ["a"], "a": ["x", "d"], "d": ["a"], "y": ["b"]}
    assert schedule(fed, {"a", "b"}, set()) == ["x", "d", "a", "on", "c", "b", "y"]
    with pytest.raises(braintrace.nir.NIRError, match="cycle without a neuron or a delay: a, b"):
        schedule({"x": [], "a": ["x", "b"], "b": ["a"], "y": ["b"]}, set(), set())


def test_the_order_of_nodes_makes_no_difference():
    rng = np.random.RandomState(0)
    nodes = {
        "in": nir.Input(np.array([4])),
        "a": neuron("LIF", rng),
        "b": neuron("LIF", rng),
        "out": nir.Output(np.array([4])),
    }
    edges = [("in", "a"), ("in", "b"), ("a", "b"), ("b", "a"), ("b", "out")]
    xs = rng.uniform(0, 0.5, (STEPS, 4))
    one, other = (
        run(nir.NIRGraph(dict(items), edges, type_check=False), xs)
        for items in (list(nodes.items()), list(nodes.items())[::-1])
    )
    np.testing.assert_array_equal(one, other)
    # `a` runs first, so that what `b` reads of it is new
    assert schedule({"in": [], "b": ["a", "in"], "a": ["b", "in"], "out": ["b"]}, {"a", "b"}, set())[:3] == [
        "in",
        "a",
        "b",
    ]
