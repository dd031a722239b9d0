"""NIR files on the command line."""

from pathlib import Path

import brainstate
import jax
import nir
import numpy as np
import pytest

from braintrace._cli import main

from .graphs import affine, chain, neuron

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parent / "recorded"


@pytest.fixture(autouse=True)
def as_users_have_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    with (
        brainstate.environ.context(precision=32),
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def test_graph_and_check(capsys):
    file = str(FOLDER / "snntorch_recurrent.nir")
    assert main(["graph", f"{file}(dt=1e-4, method='euler')", "--html", "graph.html"]) == 0
    shown = capsys.readouterr().out
    assert "6 of 6 parameters learned online" in shown
    assert Path("graph.html").exists()
    assert main(["check", f"{file}(dt=1e-4)", "--length", "5", "--window", "5", "--exact"]) == 0


def test_errors(capsys):
    Path("damaged.nir").write_bytes(b"no HDF5")
    file = FOLDER / "snntorch_leaky.nir"
    for spec, code, words in (
        ("none.nir", 2, "There is no file none.nir"),
        ("damaged.nir", 1, "cannot be read as a NIR file"),
        (f"{file}(speed=2)", 2, "speed"),
        (f"{file}(method='euler')", 1, "less than the time step"),
    ):
        assert main(["graph", spec]) == code
        shown = capsys.readouterr().err
        assert words in shown
        assert "Traceback" not in shown


def test_train(capsys):
    rng = np.random.RandomState(0)
    graph = chain(
        (1,), affine(rng, 8, 1), neuron("LIF", rng, (8,)), affine(rng, 1, 8), neuron("LI", rng, (1,))
    )
    nir.write("net.nir", graph)
    sizes = "--batches 2 --batch-size 2 --eval-every 2 --out run".split()
    assert main(["train", "--task", "mackey_glass", "--model", "net.nir", *sizes]) == 0
    assert "results are in run" in capsys.readouterr().out
