"""How much memory there is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax


def device_memory(devices: Sequence[Any] = ()) -> int:
    """Bytes of the device, or half of the machine's; `devices` of one machine share these.

    Those that are not there, which JAX compiles for, are like the first that is.
    """
    here = jax.local_devices()
    own = [d for d in devices if d in here] or here[:1]
    stats = own[0].memory_stats() or {}
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return int(stats.get("bytes_limit") or half // len(own))
