"""How much memory there is."""

from __future__ import annotations

import os

import jax


def device_memory() -> int:
    """Bytes of the device, or half of the machine's."""
    stats = jax.devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
