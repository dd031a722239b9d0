"""Runs on many devices, and in several processes: the curve of one device, wherever the arrays are."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import braintrace
from braintrace._cli import main

ROOT = Path(__file__).parents[2]
IN, UNITS, OUT, SIZE, LENGTH = 3, 8, 3, 8, 4

needs_eight = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


class Net(brainstate.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = braintrace.nn.MinimalRNNCell(IN, UNITS)  # it leaks, so that traces have a past
        self.readout = braintrace.nn.Linear(UNITS, OUT)

    def update(self, x: Any) -> Any:
        return self.readout(self.cell(x))


def batch(number: int, size: int = SIZE) -> tuple[Any, Any]:
    xs = np.random.default_rng(number).normal(size=(LENGTH, size, IN))
    return xs, np.cumsum(xs, 0)


def mesh_of(*shape: int) -> Any:
    return jax.make_mesh(shape, ("data", "model")[: len(shape)], devices=jax.devices()[: int(np.prod(shape))])


def run(mesh: Any, number: int = 4, **options: Any) -> tuple[Any, Any]:
    """The losses of a run whose traces go on from batch to batch, and its learner."""
    with jax.enable_x64(True), brainstate.environ.context(precision=64):
        brainstate.random.seed(0)
        learner = braintrace.D_RTRL(Net())
        result = braintrace.fit(
            learner,
            [batch(i) for i in range(9)],
            lambda x, y: jnp.mean((learner(x) - y) ** 2),
            optax.adam(0.01),
            max_batches=number,
            mesh=mesh,
            reset=False,
            progress=False,
            **options,
        )
    return result.curve()[1], learner


@cache
def on_one() -> Any:
    return run(None)[0]


@needs_eight
@pytest.mark.parametrize("shape", [(8,), (4, 2), (1, 8)])
def test_curve_of_one_device(shape):
    losses, learner = run(mesh_of(*shape), eval_batches=[batch(100), batch(101, 3)])
    np.testing.assert_allclose(losses, on_one(), rtol=1e-12)
    columns = "model" if len(shape) > 1 else None
    weight = learner.model.cell.Wf.weight.value["weight"]
    assert weight.sharding.is_equivalent_to(NamedSharding(weight.sharding.mesh, P(None, columns)), 2)
    traces = [st.value for st in learner.traces.values()]
    assert traces
    for trace in traces:  # not one device holds more than its part
        part = trace.addressable_shards[0].data.size
        assert part * 8 == trace.size, trace.sharding


@needs_eight
def test_checkpoints_fit_any_number_of_devices(tmp_path):
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 1, "resume": True}
    for number, mesh in enumerate([mesh_of(4, 2), None, mesh_of(8), mesh_of(2)], 1):
        losses, _ = run(mesh, number, **options)
        np.testing.assert_allclose(losses, on_one()[:number], rtol=1e-12)


@needs_eight
def test_parameters_stay_where_they_are_put():
    mesh, learner = mesh_of(4, 2), braintrace.D_RTRL(Net())
    state = learner.model.cell.Wf.weight
    rows = NamedSharding(mesh, P(None, None))
    state.value = jax.device_put(state.value, {"weight": rows, "bias": NamedSharding(mesh, P())})
    loss = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    with pytest.warns(UserWarning, match="6 sequences cannot be spread evenly over 4 devices"):
        braintrace.fit(learner, [batch(0, 6)] * 2, loss, optax.adam(0.01), mesh=mesh, progress=False)
    assert state.value["weight"].sharding.is_equivalent_to(rows, 2)
    assert learner.model.readout.weight.value["weight"].sharding.is_fully_replicated  # 3 columns


def test_a_mesh_begins_with_batches():
    learner = braintrace.D_RTRL(Net())
    for wrong, words in [(jax.make_mesh((1,), ("model",)), "Put another before it"), (8, "jax.make_mesh")]:
        with pytest.raises((TypeError, ValueError), match=words):
            braintrace.fit(learner, [batch(0)], len, optax.adam(0.01), mesh=wrong)


# -- several processes -----------------------------------------------------------------------------

RUN = (
    "train --task copying --set delay=2 --set symbols=1 --cell rnn --hidden 4 --batch-size 8 --window 0 "
    "--steps 12 --checkpoint-every 2 --eval-every 6"
).split()


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "braintrace", *RUN, *more]
    return subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def curve_of(folder: Path) -> dict[Any, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {(line["kind"], line["batch"]): line["loss"] for line in lines}


@pytest.mark.slow
def test_a_process_is_killed_and_one_goes_on_alone(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    several = f"--out run --devices 8 --coordinator 127.0.0.1:{port} --processes 2 --heartbeat 10".split()
    several += ["--steps", "100000"]
    both = [start(tmp_path, *several, "--process", str(i)) for i in range(2)]
    try:
        waited = time.monotonic() + 60
        while not (tmp_path / "run/checkpoints/4").exists():
            assert time.monotonic() < waited
            assert not any(p.poll() for p in both), both[0].communicate()[0]
            time.sleep(0.05)
        both[1].kill()
        told, _ = both[0].communicate(timeout=40)
    finally:
        for process in both:
            process.kill()
    assert both[0].returncode not in (0, -9)
    assert "with --resume" in told or "`--resume`" in told, told
    assert "another" in told.lower(), told
    assert "batch" not in both[1].communicate()[0]  # only the first one speaks
    last = max(int(p.name) for p in (tmp_path / "run/checkpoints").iterdir() if p.name.isdigit())
    steps = ["--steps", str(last + 4)]
    alone = start(tmp_path, "--out", "run", "--resume", "--devices", "8", *steps)
    one = start(tmp_path, "--out", "one", *steps)
    for process in (alone, one):
        told, _ = process.communicate(timeout=60)
        assert process.returncode == 0, told
    found, wanted = curve_of(tmp_path / "run"), curve_of(tmp_path / "one")
    assert found.keys() == wanted.keys()
    np.testing.assert_allclose(list(found.values()), [wanted[k] for k in found], rtol=1e-5)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("--devices 8 --model-parallel 3", "does not divide"),
        ("--devices 1000", "there are"),
        ("--processes 2", "--coordinator HOST:PORT"),
        ("--coordinator here --processes 2 --process 0", "HOST:PORT, such as"),
        ("--coordinator a:1 --processes 2 --process 2", "counts from 0 to 1"),
        ("--coordinator a:1 --processes 2 --process 0 --devices 3", "shared evenly"),
        ("--distributed --processes 2", "finds out"),
    ],
)
def test_says_what_is_wrong_with_devices(typed, words, capsys):
    assert main(["train", "--task", "copying", *typed.split()]) == 2
    assert words in capsys.readouterr().err
