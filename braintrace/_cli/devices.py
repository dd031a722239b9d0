"""`--devices`, `--model-parallel` and several processes: the mesh that a run is spread over."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from .common import UsageError
from .models import positive

HEARTBEAT = 30  # seconds; a process that says nothing for so long is lost
WAIT = 300  # seconds that all of them have to start
BY_HAND = ("coordinator", "processes", "process")
SEVERAL = (*BY_HAND, "distributed")
# JAX ends a process, without an exception, if another one does not start or is lost. These lines are printed
# before that can happen.
WAITING = (
    "braintrace train: waiting for the other processes. JAX ends this process if not all processes were there "
    "within {wait} s: start all of them with the same address of the first one ({where}), which each must be "
    "able to reach, or raise --wait."
)
JOINED = (
    "braintrace train: if this process is ended because another one was lost, start all of them again with "
    "--resume, on as many devices as are left. The run continues from its newest checkpoint."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = add_counts(parser).add_argument
    add("--coordinator", metavar="HOST:PORT", help="several processes: where the first one listens")
    add("--processes", type=positive, metavar="N", help="how many there are")
    add("--process", type=int, metavar="I", help="which of them this one is, from 0")
    add("--distributed", action="store_true", help="several processes as SLURM, MPI or the like has them")
    seconds = functools.partial(add, type=positive, metavar="SECONDS")
    seconds("--heartbeat", help=f"a process that is silent for so long is lost (default: {HEARTBEAT})")
    seconds("--wait", help=f"how long to wait for the others to start (default: {WAIT})")


def add_counts(parser: argparse.ArgumentParser) -> Any:
    group = parser.add_argument_group("devices")
    add = functools.partial(group.add_argument, type=positive)
    add("--devices", metavar="N", help="spread batches over so many, of all processes together")
    add("--model-parallel", metavar="M", help="of which so many share the columns of weights")
    return group


@contextlib.contextmanager
def mesh_of(given: argparse.Namespace) -> Iterator[Any]:
    """The mesh that was asked for, if any; of several processes only the first one prints in here."""
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


def words_of(mesh: Any) -> str:
    """How many devices there are, so that none is left out unseen."""
    axes = " x ".join(f"{size} {name}" for name, size in mesh.shape.items())
    found = mesh.devices.ravel()
    processes = len({d.process_index for d in found})
    several = f" of {processes} processes" if processes > 1 else ""
    return f"On {found.size} devices{several} ({axes}), {found[0].device_kind}."


def leave(code: int, error: Exception | None = None) -> None:
    """End a process of several that failed: JAX would wait for the others, which wait for it."""
    import jax

    if jax.distributed.is_initialized():
        if error is not None:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _mesh(devices: int | None, model: int) -> Any:
    import jax

    if devices is not None and not jax.distributed.is_initialized():
        _count_cpus(devices)
    found = jax.devices()
    number = devices or len(found)
    if number > len(found) or number % model:
        have = f"there are {len(found)}: {', '.join(map(str, found[:4]))}{' ...' if len(found) > 4 else ''}"
        cpus = "; how many a CPU is, JAX_NUM_CPU_DEVICES says" if found[0].platform == "cpu" else ""
        raise UsageError(f"--devices {number}, --model-parallel {model}: {have}{cpus}.")
    if number < len(found) and jax.process_count() > 1:
        raise UsageError(f"Several processes use all of their {len(found)} devices, not {number}.")
    shape, names = ((number // model, model), ("data", "model")) if model > 1 else ((number,), ("data",))
    kinds = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, names, axis_types=kinds, devices=found[:number])


def _count_cpus(number: int) -> None:
    """Have the CPU count as so many devices, unless the user or JAX has said already how many it is."""
    import jax

    counted = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if jax.config.values["jax_num_cpu_devices"] < 1 and not counted:
        with contextlib.suppress(RuntimeError):  # JAX has been used before
            jax.config.update("jax_num_cpu_devices", number)


def _join(typed: dict[str, Any]) -> None:
    """Find the other processes."""
    import jax

    wait = typed.get("wait", WAIT)
    options = {
        "heartbeat_timeout_seconds": typed.get("heartbeat", HEARTBEAT),
        "initialization_timeout": wait,
    }
    if "distributed" in typed:
        if any(name in typed for name in BY_HAND):
            raise UsageError("--distributed finds out what --coordinator, --processes and --process say.")
        try:
            print(WAITING.format(wait=wait, where="named by the cluster"), file=sys.stderr, flush=True)
            jax.distributed.initialize(**options)
        except ValueError as error:  # nothing says which processes there are
            raise UsageError(
                f"--distributed: nothing here says which processes there are ({error}) Start them with srun "
                "or mpirun, or say it by --coordinator, --processes and --process."
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
