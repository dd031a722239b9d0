"""Loaded networks learn online: gradients compared with back-propagation through time."""

import brainstate
import nir
import numpy as np
import pytest

import braintrace
from tests.oracle import bptt
from tests.run import agree, every, in_one_pass, online

from .graphs import affine, chain, neuron, recurrent

STEPS = 6


def image(rng):
    pool = {"kernel_size": np.array([2, 2]), "stride": np.array([2, 2]), "padding": np.array([0, 0])}
    conv = nir.Conv2d(None, 3 * rng.randn(2, 1, 3, 3), 1, 1, 1, 1, rng.randn(2))
    return chain(
        (1, 4, 4),
        conv,
        neuron("LIF", rng, (2, 4, 4)),
        nir.AvgPool2d(**pool),
        nir.Flatten(None, 0, -1),
        affine(rng, 3, 8),
        neuron("CubaLI", rng, (3,)),
        output=(3,),
    )


def nets():
    rng = np.random.RandomState(0)
    deep = [affine(rng, 4, 3), recurrent(rng, 4, "CubaLIF"), nir.Scale(rng.rand(4) + 1), affine(rng, 4, 4)]
    delays = nir.Delay(0.001 * np.array([1, 2, 2, 3]))
    return {
        "recurrent": chain((3,), *deep, neuron("LI", rng)),
        "convolution": image(rng),
        "delays": chain(
            (3,), affine(rng, 4, 3), neuron("LIF", rng), delays, affine(rng, 4, 4), neuron("IF", rng)
        ),
        "threshold": chain(
            (3,), affine(rng, 4, 3), neuron("I", rng), nir.Threshold(np.ones(4)), affine(rng, 2, 4)
        ),
    }


def loaded(graph, **options):
    net = braintrace.nir.load(graph, **options)
    brainstate.nn.init_all_states(net, batch_size=2)
    xs = np.random.RandomState(2).uniform(-0.5, 1.5, (STEPS, 2, *net.in_size))
    return net, list(xs)


@pytest.mark.parametrize("name", every(2, nets()))
def test_one_window_is_bptt(name):
    make = lambda: loaded(nets()[name])
    (net, xs), (again, _) = make(), make()
    expected = bptt(again, xs)
    assert agree(in_one_pass(braintrace.D_RTRL(net, window=STEPS), xs), expected, 1e-9)
    assert any(np.abs(value).max() > 1e-3 for value in expected.values())


def test_time_constants_learn():
    rng = np.random.RandomState(0)
    graph = chain((3,), affine(rng, 4, 3), neuron("CubaLIF", rng))
    make = lambda: loaded(graph, learn=["n0", "n1"])
    (net, xs), (again, _) = make(), make()
    assert agree(in_one_pass(braintrace.D_RTRL(net, window=STEPS), xs), bptt(again, xs), 1e-9)


@pytest.mark.parametrize("kind", ["LI", "LIF", "CubaLIF"])
def test_one_layer_is_exact_step_by_step(kind):
    """Neurons and delays behind them are one group of states, coupled unit by unit."""
    rng = np.random.RandomState(0)
    delays = nir.Delay(0.001 * np.array([1, 2, 2, 3]))
    graph = chain((3,), affine(rng, 4, 3), neuron(kind, rng), delays)
    (net, xs), (again, _) = loaded(graph), loaded(graph)
    assert agree(online(braintrace.D_RTRL(net), xs), bptt(again, xs), 1e-9)


def test_frozen_weights_get_no_gradient():
    net, xs = loaded(nets()["recurrent"], learn=["n0"])
    (again, _) = loaded(nets()["recurrent"], learn=["n0"])
    found = in_one_pass(braintrace.D_RTRL(net, window=STEPS), xs)
    assert {path[1:] for path in found} == {("n0", "weight"), ("n0", "bias")}
    assert agree(found, bptt(again, xs), 1e-9)
