"""The kind of a device, its memory, what a step takes of it, and numbers of bytes as text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

from .._compiler.dataflow import Flow, solve
from .._types import Aval

if TYPE_CHECKING:
    from .executor import ETraceGraphExecutor


def device_memory(devices: Sequence[jax.Device] = ()) -> int:
    """Bytes of device memory, or half of the host memory, which local `devices` share.

    Devices that are not attached (JAX can compile for them) count as the first local one.
    """
    here = jax.local_devices()
    own = [d for d in devices if d in here] or here[:1]
    stats = own[0].memory_stats() or {}
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return int(stats.get("bytes_limit") or half // len(own))


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def show_bytes(count: float) -> str:
    """Format a number of bytes.

    >>> show_bytes(1536)
    '1.5 KiB'
    """
    size, units = float(count), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:.0f} {unit}" if size >= 100 or size == int(size) else f"{size:.1f} {unit}"


def record_bytes(executor: ETraceGraphExecutor, rows: int = 0) -> int:
    """A rough estimate of the bytes per step of a chunk: activations, and inputs of the trace update.

    With `rows`, so many rows of cotangents of the states are pulled back through the steps, too.
    """
    program = executor.info.program
    moving = {
        *executor.info.arg_invars,
        *(v for e in executor.info.entries if not e.is_fixed for v in e.invars),
    }
    computed, _ = solve(Flow[bool](), program, ((v, True) for v in moving))
    size = sum(_bytes(v.aval) for v in computed if v not in program.inputs)
    needed = 0  # times 3: recorded, propagated through time, and transposed for the product over time
    for local in executor.groups:
        each = local.group.num_state * _bytes(local.group.hidden_outvars[0].aval)
        needed += each * max(local.group.num_state, local.num_pulled)
    for relation in executor.graph.hidden_param_op_relations:
        site = relation.site
        needed += sum(_bytes(a.aval) for a in site.inputs[: site.num_inputs])
        for group, at in zip(relation.hidden_groups, relation.position_maps, strict=True):
            needed += group.num_state * at.map.size * site.output.aval.dtype.itemsize
    per_row = sum(_bytes(v.aval) for v in (*executor.info.carried_invars, *(s.output for s in program.sites)))
    return int(size + 3 * needed + rows * per_row)


def _bytes(aval: Aval) -> int:
    return int(aval.size * aval.dtype.itemsize)
