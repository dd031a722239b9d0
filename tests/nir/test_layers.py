"""Layers of `braintrace.nn` as NIR: the same outputs, or an error that names what NIR does not have."""

import brainstate
import brainunit as u
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import nn
from braintrace.nir import NIRError
from tests.run import every

Sequential = brainstate.nn.Sequential


def hard(kind=nn.LIF, size=4, **options):
    return kind(size, R=3.0, tau=5.0 * u.ms, reset=nn.hard_reset, **options)


def images():
    conv = nn.Conv2d(
        (2, 5, 5), 3, (3, 2), padding="VALID", channel_first=True, b_init=brainstate.nn.init.Normal()
    )
    flat = brainstate.nn.Flatten(in_size=(3, 3, 4))
    return Sequential(conv, hard(size=(3, 3, 4)), flat, nn.Linear(36, 2))


MODELS = {
    "lif": lambda: Sequential(nn.Linear(3, 4), hard(V_rest=0.1, V_reset=-0.2), nn.Linear(4, 2, b_init=None)),
    "if": lambda: Sequential(nn.Linear(3, 4), hard(nn.IF)),
    "readout": lambda: Sequential(nn.Linear(3, 4), hard(), nn.LeakyRateReadout(4, 2, tau=8.0 * u.ms)),
    "nested": lambda: Sequential(Sequential(nn.Linear(3, 4), hard()), nn.Linear(4, 4)),
    "conv1d": lambda: Sequential(nn.Conv1d((2, 9), 3, 3, stride=2, padding=((1, 1),), channel_first=True)),
    "images": images,
}


@pytest.mark.parametrize("name", every(2, MODELS))
def test_layers_in_a_row(name, tmp_path):
    with brainstate.environ.context(dt=1.0 * u.ms):
        model = MODELS[name]()
        braintrace.nir.save(model, tmp_path / "net.nir")
        net = braintrace.nir.load(tmp_path / "net.nir")
        xs = jnp.asarray(np.random.RandomState(0).uniform(-1, 2, (30, *net.in_size)))
        found = []
        for module in (model, net):
            brainstate.nn.init_all_states(module)
            found.append(np.asarray(brainstate.transform.for_loop(module, xs)))
    np.testing.assert_allclose(*found, atol=1e-9)
    assert np.ptp(found[0]) > 0


def test_firing_at_the_threshold_is_kept(tmp_path):
    """Neurons here fire at the threshold, those of NIR above it."""
    with brainstate.environ.context(dt=1.0 * u.ms):
        model = Sequential(nn.IF(1, tau=1.0 * u.ms, V_th=3.0, reset=nn.hard_reset))
        braintrace.nir.save(model, tmp_path / "net.nir")
        net = braintrace.nir.load(tmp_path / "net.nir")
        for module in (model, net):
            brainstate.nn.init_all_states(module)
            y = brainstate.transform.for_loop(module, jnp.ones((6, 1)))
            assert y[:, 0].tolist() == [0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (lambda: nn.ALIF(4), "layer 1, `ALIF`: an adaptive threshold"),
        (lambda: nn.GIF(4), "`GIF`: an adaptive threshold and spike-triggered"),
        (lambda: nn.LIF(4), "`LIF` has the reset `soft_reset`"),
        (lambda: hard(V_th=1.0 * u.mV), "voltages with a unit"),
        (lambda: hard(V_initializer=0.5), "`LIF`: `V` has an initial value of its own"),
        (lambda: hard(nn.IF, V_initializer=brainstate.nn.init.Uniform(0.1, 0.9)), "`IF`: `V` has an initial"),
        (lambda: nn.LeakyRateReadout(4, 4, r_init=1.0), "`r` has an initial value"),
        (lambda: nn.STP(4), "`STP`: short-term plasticity"),
        (
            lambda: nn.GRUCell(4, 4, w_init=brainstate.nn.init.XavierNormal()),
            "no node for layer 1, `GRUCell`",
        ),
        (lambda: jnp.tanh, "no node for layer 1"),
        (lambda: brainstate.nn.Flatten(), "needs `in_size`"),
        (lambda: nn.Conv2d((5, 5, 2), 3, 3), "channels first"),
    ],
)
def test_what_nir_does_not_have_is_refused_by_name(layer, words, tmp_path):
    with pytest.raises(NIRError, match=words):
        braintrace.nir.save(Sequential(nn.Linear(4, 4), layer()), tmp_path / "net.nir")
    assert not list(tmp_path.iterdir())


def test_soft_resets_are_not_saved(tmp_path):
    graph = braintrace.nir.to_graph(Sequential(nn.Linear(4, 4), hard()))
    for reset in ("soft", "soft-delayed"):
        with pytest.raises(NIRError, match=rf"`1` has a {reset} reset"):
            braintrace.nir.save(braintrace.nir.load(graph, reset=reset), tmp_path / "net.nir")
    with pytest.raises(TypeError, match="takes a module"):
        braintrace.nir.save(graph, tmp_path / "net.nir")
