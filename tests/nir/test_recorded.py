"""Networks that snnTorch 1.0 and Norse 1.1 wrote give the outputs here that they gave there.

`benchmarks/nir_exchange.py` wrote the files.
"""

from pathlib import Path

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from benchmarks.nir_exchange import SETTINGS, STEPS

FOLDER = Path(__file__).parent / "recorded"


def test_all_are_compared():
    assert {path.stem for path in FOLDER.glob("*.nir")} == set(SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_outputs_are_those_of_the_simulator(name):
    net = braintrace.nir.load(FOLDER / f"{name}.nir", **SETTINGS[name])
    recorded = np.load(FOLDER / f"{name}.npz")
    brainstate.nn.init_all_states(net)
    y = np.asarray(brainstate.transform.for_loop(net, jnp.asarray(recorded["x"])))
    assert len(y) == STEPS
    if name == "norse_readout":  # voltages, in float32
        np.testing.assert_allclose(y, recorded["y"], atol=1e-5)
    else:
        np.testing.assert_array_equal(y, recorded["y"])
        assert 5 < y.sum() < y.size - 5


def test_other_settings_give_other_spikes():
    recorded = np.load(FOLDER / "snntorch_subtract.npz")
    net = braintrace.nir.load(FOLDER / "snntorch_subtract.nir", dt=1e-4, method="euler")
    brainstate.nn.init_all_states(net)
    y = np.asarray(brainstate.transform.for_loop(net, jnp.asarray(recorded["x"])))
    assert (y != recorded["y"]).any()
