"""Graphs become modules and graphs again, with the same parameters and outputs."""

import pickle

import brainstate
import brainunit as u
import jax.numpy as jnp
import nir
import numpy as np
import pytest

import braintrace

from ..run import every
from .graphs import NEURONS, affine, assert_same, chain, every_node, neuron, random_graph, recurrent

GRAPHS = every_node(np.random.RandomState(0))


def outputs(net, length=12, batch=None, seed=0):
    rng = np.random.RandomState(seed)
    brainstate.nn.init_all_states(net, **({"batch_size": batch} if batch else {}))
    shape = (length, *((batch,) if batch else ()), *net.in_size)
    return np.asarray(brainstate.transform.for_loop(net, jnp.asarray(rng.randn(*shape))))


@pytest.mark.parametrize("name", GRAPHS)
def test_every_node(name, tmp_path):
    graph = GRAPHS[name]
    net = braintrace.nir.load(graph)
    braintrace.nir.save(net, tmp_path / "net.nir")
    again = braintrace.nir.load(tmp_path / "net.nir")
    assert_same(graph, braintrace.nir.read(tmp_path / "net.nir"))
    assert_same(graph, braintrace.nir.to_graph(again))
    y = outputs(net)
    assert y.shape[1:] == net.out_size
    np.testing.assert_allclose(outputs(again), y, atol=1e-6)
    np.testing.assert_allclose(outputs(net, batch=1, seed=0)[:, 0], y, atol=1e-12)


@pytest.mark.parametrize("seed", every(5, range(25)))
def test_random_graphs(seed, tmp_path):
    graph = random_graph(seed)
    net = braintrace.nir.load(graph)
    braintrace.nir.save(net, tmp_path / "net.nir")
    assert_same(graph, nir.read(tmp_path / "net.nir"))
    np.testing.assert_allclose(
        outputs(braintrace.nir.load(tmp_path / "net.nir")), outputs(net), rtol=1e-6, atol=1e-6
    )


def test_metadata_is_kept(tmp_path):
    graph = chain((3,), nir.Linear(np.ones((2, 3)), metadata={"made": "here"}))
    graph.metadata = {"dt": 1e-3}
    braintrace.nir.save(braintrace.nir.load(graph), tmp_path / "net.nir")
    again = nir.read(tmp_path / "net.nir")
    assert again.metadata == {"dt": 1e-3}
    assert again.nodes["n0"].metadata == {"made": "here"}


def test_several_inputs_and_outputs():
    nodes = {
        "a": nir.Input(np.array([2])),
        "b": nir.Input(np.array([3])),
        "to_a": nir.Linear(np.ones((4, 2))),
        "to_b": nir.Linear(np.ones((4, 3))),
        "sum": nir.Scale(np.full(4, 2.0)),
        "y": nir.Output(np.array([4])),
        "z": nir.Output(np.array([4])),
    }
    edges = [("a", "to_a"), ("b", "to_b"), ("to_a", "sum"), ("to_b", "sum"), ("sum", "y"), ("to_b", "z")]
    net = braintrace.nir.load(nir.NIRGraph(nodes, edges, type_check=False))
    y, z = net(jnp.ones(2), jnp.ones(3))
    assert (y.tolist(), z.tolist()) == ([10.0] * 4, [3.0] * 4)
    with pytest.raises(TypeError, match="takes 2 inputs"):
        net(jnp.ones(2))


def test_pools_and_convolutions():
    x = jnp.arange(32.0).reshape(2, 4, 4)
    pool = {"kernel_size": np.array([2, 2]), "stride": np.array([2, 2]), "padding": np.array([1, 1])}
    total = braintrace.nir.load(chain((2, 4, 4), nir.SumPool2d(**pool), output=(2, 3, 3)))(x)
    mean = braintrace.nir.load(chain((2, 4, 4), nir.AvgPool2d(**pool), output=(2, 3, 3)))(x)
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1)))
    expected = padded.reshape(2, 3, 2, 3, 2).sum((2, 4))
    np.testing.assert_allclose(total, expected)
    np.testing.assert_allclose(mean, expected / 4)

    weight, bias = np.random.RandomState(0).randn(4, 1, 3, 2), np.arange(4.0)
    conv = nir.Conv2d(None, weight, (1, 2), (1, 0), (1, 1), 2, bias)
    y = braintrace.nir.load(chain((2, 4, 4), conv, output=(4, 4, 2)))(x)
    rows = np.pad(x, ((0, 0), (1, 1), (0, 0)))
    for o, i, j in np.ndindex(4, 4, 2):
        window = rows[o // 2, i : i + 3, 2 * j : 2 * j + 2]
        np.testing.assert_allclose(y[o, i, j], (weight[o, 0] * window).sum() + bias[o], rtol=1e-12)


def test_learners_can_be_pickled_and_their_states_be_reset():
    rng = np.random.RandomState(0)
    net = braintrace.nir.load(chain((3,), affine(rng, 4, 3), recurrent(rng, 4)))
    y = outputs(net, batch=2)
    again = pickle.loads(pickle.dumps(braintrace.D_RTRL(net))).model
    np.testing.assert_array_equal(outputs(again, batch=2), y)
    brainstate.nn.reset_all_states(net, batch_size=2)
    assert float(jnp.abs(net.parts["n1/lif"].v.value - net.parts["n1/lif"].v_leak[None]).max()) == 0


def test_learned_and_frozen():
    rng = np.random.RandomState(0)
    graph = chain((3,), affine(rng, 4, 3), neuron("LIF", rng))
    paths = lambda **options: {
        ".".join(path[1:]) for path in braintrace.nir.load(graph, **options).states(brainstate.ParamState)
    }
    assert paths() == {"n0.weight", "n0.bias"}
    assert paths(learn=False) == set()
    assert paths(learn=["n0.bias", "n1.tau"]) == {"n0.bias", "n1.tau"}
    assert paths(learn="n1") == {f"n1.{name}" for name in NEURONS["LIF"]}
    with pytest.raises(ValueError, match=r"n1\.weight"):
        paths(learn=["n1.weight"])
    with pytest.raises(braintrace.nir.NIRError, match="cannot be learned"):
        braintrace.nir.load(GRAPHS["Delay"], learn="n0")


def test_time_steps():
    graph = GRAPHS["LIF"]
    of = lambda **options: braintrace.nir.load(graph, **options).parts["n0"].dt
    assert of() == 1e-3
    assert of(dt=0.5 * u.ms) == pytest.approx(5e-4)
    with brainstate.environ.context(dt=2.0 * u.ms):
        assert of() == pytest.approx(2e-3)
        assert of(dt=1e-4) == 1e-4
    with pytest.raises(ValueError, match="above 0"):
        of(dt=0.0)
    with pytest.raises(braintrace.nir.NIRError, match="less than the time step"):
        of(dt=0.1, method="euler")
    for options in ({"method": "runge"}, {"reset": "none"}):
        with pytest.raises(ValueError, match="is one of"):
            of(**options)
