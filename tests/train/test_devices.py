"""Runs on many devices, and in several processes: the curve of one device, wherever the arrays are."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
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


def run(mesh: Any, number: int = 4, is_set: bool = False, **options: Any) -> tuple[Any, Any]:
    """The losses of a run, whose traces go on from batch to batch, and its learner."""
    options = {"batches": [batch(i) for i in range(9)], "reset": False, **options}
    with jax.enable_x64(True), brainstate.environ.context(precision=64):
        brainstate.random.seed(0)
        learner = braintrace.D_RTRL(Net())
        with jax.set_mesh(mesh) if is_set else nullcontext():
            result = braintrace.fit(
                learner,
                step_fn=lambda x, y: jnp.mean((learner(x) - y) ** 2),
                optimizer=optax.adam(0.01),
                max_batches=number,
                mesh=mesh,
                progress=False,
                **options,
            )
    return result.curve()[1], learner


@cache
def on_one() -> Any:
    return run(None)[0]


@pytest.mark.slow
@needs_eight
@pytest.mark.parametrize(
    "shape",
    [pytest.param((8,), marks=pytest.mark.slow), (4, 2), pytest.param((1, 8), marks=pytest.mark.slow)],
)
def test_curve_of_one_device(shape):
    losses, learner = run(mesh_of(*shape), eval_batches=[batch(100), batch(101, 3)])
    np.testing.assert_allclose(losses, on_one(), rtol=1e-12)
    columns = "model" if len(shape) > 1 else None
    weight = learner.model.cell.Wf.weight.value["weight"]
    assert weight.sharding.is_equivalent_to(NamedSharding(weight.sharding.mesh, P(None, columns)), 2)
    assert_spread(learner)


def assert_spread(learner: Any) -> None:
    """Not one device holds more than its part of a trace."""
    traces = [st.value for st in learner.traces.values()]
    assert traces
    for trace in traces:
        part = trace.addressable_shards[0].data.size
        assert part * 8 == trace.size, trace.sharding


@needs_eight
@pytest.mark.slow
@pytest.mark.parametrize("update_every", ["sequence", 1])
def test_a_second_batch_compiles_and_moves_nothing(update_every, caplog):
    told = []

    def batches(_: int) -> Any:
        for i in range(3):
            told.append(caplog.text.count("Compiling"))
            yield batch(i)

    mesh = mesh_of(4, 2)
    options = {"batches": batches, "reset": True, "update_every": update_every}
    with jax.log_compiles():
        learner = run(mesh, 3, is_set=update_every == 1, **options)[1]
    assert told[0] < told[1] == told[2] == caplog.text.count("Compiling")
    assert_spread(learner)
    readout = learner.model.readout.weight.value  # three columns cannot be cut
    assert all(a.sharding.is_fully_replicated for a in readout.values())


@needs_eight
@pytest.mark.slow
def test_checkpoints_fit_any_number_of_devices(tmp_path):
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 1, "resume": True}
    for number, mesh in enumerate([mesh_of(4, 2), None, mesh_of(8), mesh_of(2, 2)], 1):
        losses, _ = run(mesh, number, **options)
        np.testing.assert_allclose(losses, on_one()[:number], rtol=1e-12)


@needs_eight
@pytest.mark.slow
def test_parameters_stay_where_they_are_put():
    mesh, learner = mesh_of(4, 2), braintrace.D_RTRL(Net())
    state = learner.model.cell.Wf.weight
    rows = NamedSharding(mesh, P(None, None))
    state.value = jax.device_put(state.value, {"weight": rows, "bias": NamedSharding(mesh, P())})
    loss = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    with pytest.warns(UserWarning, match="6 sequences cannot be sharded evenly over 4 devices"):
        braintrace.fit(learner, [batch(0, 6)] * 2, loss, optax.adam(0.01), mesh=mesh, progress=False)
    assert state.value["weight"].sharding.is_equivalent_to(rows, 2)
    assert learner.model.readout.weight.value["weight"].sharding.is_fully_replicated  # 3 columns


@needs_eight
def test_says_along_which_axis_nothing_is_spread():
    mesh = jax.make_mesh((4, 2), ("data", "more"))
    with pytest.warns(UserWarning, match="Nothing is sharded along the axis 'more'"):
        np.testing.assert_allclose(run(mesh, 1)[0], on_one()[:1], rtol=1e-12)


@pytest.mark.slow
def test_a_mesh_begins_with_batches():
    learner = braintrace.D_RTRL(Net())
    for wrong, words in [(jax.make_mesh((1,), ("model",)), "Put another before it"), (8, "jax.make_mesh")]:
        with pytest.raises((TypeError, ValueError), match=words):
            braintrace.fit(learner, [batch(0)], len, optax.adam(0.01), mesh=wrong)


# -- several processes -----------------------------------------------------------------------------

RUN = (
    "train --task copying --set delay=2 --set symbols=1 --cell rnn --hidden 4 --batch-size 8 --window 0 "
    "--batches 12 --checkpoint-every 2 --eval-every 6"
).split()


def start(folder: Path, *more: str, **env: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **env}
    command = [sys.executable, "-m", "braintrace", *RUN, *more]
    return subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def under_slurm(number: int, port: int) -> dict[str, str]:
    """What SLURM says to the process of this number of two, each with four devices."""
    found = {"JOB_ID": 1, "STEP_NODELIST": "127.0.0.1", "NTASKS": 2, "PROCID": number, "LOCALID": number}
    also = {"JAX_COORDINATOR_PORT": str(port), "JAX_NUM_CPU_DEVICES": "4"}
    return {**{f"SLURM_{k}": str(v) for k, v in found.items()}, **also}


def newest(folder: Path) -> int:
    return max((int(p.name) for p in (folder / "checkpoints").glob("[0-9]*") if p.name.isdigit()), default=0)


def wait_for(both: list[Any], folder: Path, number: int) -> None:
    """Until there is a checkpoint so new."""
    waited = time.monotonic() + 60
    while newest(folder) < number:
        assert time.monotonic() < waited
        assert not any(p.poll() is not None for p in both), [p.communicate()[0] for p in both]
        time.sleep(0.05)


def curve_of(folder: Path) -> dict[Any, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {(line["kind"], line["batch"]): line["loss"] for line in lines}


@pytest.mark.slow
def test_processes_are_stopped_and_killed_and_one_goes_on_alone(tmp_path):
    out, port = tmp_path / "run", free_port()
    several = "--out run --devices 8 --heartbeat 10 --batches 100000".split()
    by_hand = f"--coordinator 127.0.0.1:{port} --processes 2 --process".split()
    first = [start(tmp_path, *several, "--distributed", **under_slurm(i, port)) for i in range(2)]
    started = [*first]
    try:
        wait_for(first, out, 4)
        first[1].terminate()  # a cluster's notice, to one of them
        told, other = (p.communicate(timeout=40)[0] for p in first)
        assert [p.returncode for p in first] == [130, 130], told + other
        stopped = newest(out)
        assert f"Interrupted after batch {stopped}. Go on with: braintrace train --out run --resume" in told

        second = [start(tmp_path, *several, "--resume", *by_hand, str(i)) for i in range(2)]
        started += second
        wait_for(second, out, stopped + 2)
        second[1].kill()
        told, _ = second[0].communicate(timeout=40)
    finally:
        for process in started:
            process.kill()
    assert second[0].returncode not in (0, -9)
    assert "with --resume" in told or "`--resume`" in told, told
    assert "another" in told.lower(), told
    assert "batch" not in second[1].communicate()[0]  # only the first one speaks
    steps = ["--batches", str(newest(out) + 4)]
    alone = start(tmp_path, "--out", "run", "--resume", "--devices", "8", *steps)
    one = start(tmp_path, "--out", "one", *steps)
    for process in (alone, one):
        told, _ = process.communicate(timeout=60)
        assert process.returncode == 0, told
    found, wanted = curve_of(out), curve_of(tmp_path / "one")
    assert found.keys() == wanted.keys()
    np.testing.assert_allclose(list(found.values()), [wanted[k] for k in found], rtol=1e-5)


@pytest.mark.slow
def test_a_process_that_waits_in_vain_says_so(tmp_path):
    where = f"127.0.0.1:{free_port()}"
    alone = start(tmp_path, *f"--coordinator {where} --processes 2 --process 0 --wait 1".split())
    told, _ = alone.communicate(timeout=60)
    assert alone.returncode not in (0, 2)
    assert "not all processes were there within 1 s" in told
    assert where in told


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
