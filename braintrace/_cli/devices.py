"""`--devices`, `--model-parallel` and several processes: the device mesh of a run."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .options import UsageError, positive

if TYPE_CHECKING:
    from .._types import Mesh, Options

HEARTBEAT = 30  # seconds without a heartbeat after which a process counts as lost
WAIT = 300  # seconds within which all processes must start
BY_HAND = ("coordinator", "processes", "process")
SEVERAL = (*BY_HAND, "distributed")
# JAX ends a process, without an exception, if another one does not start or is lost. These lines are printed
# before that can happen.
WAITING = (
    "braintrace train: waiting for the other processes. JAX ends this process if not all processes were "
    "there within {wait} s: start all of them with the same address of the first one ({where}), which each "
    "must be able to reach, or raise --wait."
)
JOINED = (
    "braintrace train: if this process is ended because another one was lost, start all of them again with "
    "--resume, on as many devices as are left. The run continues from its newest checkpoint."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = add_counts(parser).add_argument
    add("--coordinator", metavar="HOST:PORT", help="several processes: the address of the first one")
    add("--processes", type=positive, metavar="N", help="number of processes")
    add("--process", type=int, metavar="I", help="number of this process, from 0")
    add("--distributed", action="store_true", help="several processes, found through SLURM, MPI or the like")
    seconds = functools.partial(add, type=positive, metavar="SECONDS")
    seconds("--heartbeat", help=f"silence after which a process counts as lost (default: {HEARTBEAT})")
    seconds("--wait", help=f"time within which all processes must start (default: {WAIT})")


def add_counts(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("devices")
    add = functools.partial(group.add_argument, type=positive)
    add("--devices", metavar="N", help="devices of all processes together, over which batches are sharded")
    add("--model-parallel", metavar="M", help="devices over which the columns of weights are sharded")
    return group


@contextlib.contextmanager
def mesh_of(given: Namespace) -> Iterator[Mesh | None]:
    """Yield the mesh of the options, or None; only the first of several processes prints in here."""
    typed = vars(given)
    devices, model = typed.get("devices"), typed.get("model_parallel") or 1
    if devices is not None and devices % model:
        raise UsageError(f"--model-parallel {model} does not divide --devices {devices}.")
    if not any(name in typed for name in SEVERAL):
        yield _mesh(devices, model) if devices or model > 1 else None
        return
    import jax

    _join(typed)
    print(JOINED, file=sys.stderr, flush=True)
    silent = contextlib.redirect_stdout(io.StringIO()) if jax.process_index() else contextlib.nullcontext()
    with silent:
        yield _mesh(devices, model)


def describe(mesh: Mesh) -> str:
    """Return a sentence about the devices in use."""
    axes = " x ".join(f"{size} {name}" for name, size in mesh.shape.items())
    found = mesh.devices.ravel()
    processes = len({d.process_index for d in found})
    several = f" of {processes} processes" if processes > 1 else ""
    return f"On {found.size} devices{several} ({axes}), {found[0].device_kind}."


def leave(code: int, error: Exception | None = None) -> None:
    """End a failed process of several at once: JAX would wait for the others, which wait for it."""
    import jax

    if jax.distributed.is_initialized():
        if error is not None:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _mesh(devices: int | None, model: int) -> Mesh:
    import jax

    if devices is not None and not jax.distributed.is_initialized():
        _count_cpus(devices)
    found = jax.devices()
    number = devices or len(found)
    if number > len(found) or number % model:
        have = f"there are {len(found)}: {', '.join(map(str, found[:4]))}{' ...' if len(found) > 4 else ''}"
        cpus = "; JAX_NUM_CPU_DEVICES sets how many a CPU counts as" if found[0].platform == "cpu" else ""
        raise UsageError(f"--devices {number}, --model-parallel {model}: {have}{cpus}.")
    if number < len(found) and jax.process_count() > 1:
        raise UsageError(f"Several processes use all of their {len(found)} devices, not {number}.")
    shape, names = ((number // model, model), ("data", "model")) if model > 1 else ((number,), ("data",))
    kinds = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, names, axis_types=kinds, devices=found[:number])


def _count_cpus(number: int) -> None:
    """Make the CPU count as this many devices, unless that is set already."""
    import jax

    counted = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if jax.config.values["jax_num_cpu_devices"] < 1 and not counted:
        with contextlib.suppress(RuntimeError):  # JAX is initialised
            jax.config.update("jax_num_cpu_devices", number)


def _join(typed: Options) -> None:
    """Connect to the other processes."""
    import jax

    wait = typed.get("wait", WAIT)
    options = {"heartbeat_timeout_seconds": typed.get("heartbeat", HEARTBEAT), "initialization_timeout": wait}
    if "distributed" in typed:
        if any(name in typed for name in BY_HAND):
            raise UsageError("--distributed finds out --coordinator, --processes and --process by itself.")
        try:
            print(WAITING.format(wait=wait, where="named by the cluster"), file=sys.stderr, flush=True)
            jax.distributed.initialize(**options)
        except ValueError as error:  # not started by a cluster
            raise UsageError(
                f"--distributed: this process was not started by a cluster ({error}) Start it with srun or "
                "mpirun, or give --coordinator, --processes and --process."
            ) from error
        return
    if any(name not in typed for name in BY_HAND):
        raise UsageError("Several processes need --coordinator HOST:PORT, --processes N and --process I.")
    where, number, own = (typed[name] for name in BY_HAND)
    if ":" not in where:
        raise UsageError(f"--coordinator is HOST:PORT, such as node0:1234, not {where!r}.")
    if not 0 <= own < number:
        raise UsageError(f"--process counts from 0 to {number - 1}, and {own} is not among them.")
    if (devices := typed.get("devices")) is not None:
        if devices % number:
            raise UsageError(f"--devices {devices} cannot be shared evenly by --processes {number}.")
        _count_cpus(devices // number)
    print(WAITING.format(wait=wait, where=where), file=sys.stderr, flush=True)
    jax.distributed.initialize(where, number, own, **options)
