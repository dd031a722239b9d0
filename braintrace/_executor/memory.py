"""The kind of a device, its memory, and numbers of bytes as text."""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax


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
