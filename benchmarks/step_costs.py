"""The time of learning at every step, relative to BPTT over the same steps, in one process.

    python benchmarks/step_costs.py [--repeats 15]        (benchmarks/results/cpu/step_costs.txt)

XLA runs on one core, and CPU time counts, so that other load on the machine matters little. Methods take
turns; the ratio of the best times and the median of the ratios of each turn are printed. Then steps per
second of a jitted loop with batch size 1.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import methods
import nets
import numpy as np
from methods import BPTT, D_AUTO, D_RANK_SGD, D_SGD, D_STEP, ES_SGD, ES_STEP
from nets import Case

NETS = ("GRU", "LSTM", "LIF", "LIF, detached reset")
STREAMS = ((64, 8, D_SGD), (256, 16, D_SGD), (256, 16, D_RANK_SGD))


def cpu_times(runs: list[Callable[[], Any]], repeats: int) -> Any:
    """The CPU time of each run in each turn, (repeats, runs)."""
    found = np.zeros((repeats, len(runs)))
    for turn in range(-1, repeats):  # the first turn compiles
        for i, run in enumerate(runs):
            start = time.process_time()
            jax.block_until_ready(run())
            found[turn, i] = time.process_time() - start
    return found


def compiled(case: Case, method: str) -> tuple[Callable[[], Any], int]:
    run, trace_bytes = methods.make(case, method)
    xs, ys = nets.data(case)
    function = brainstate.transform.jit(run)
    return lambda: function(xs, ys), trace_bytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    # before the first computation: no flag keeps XLA from splitting loops over larger arrays between threads
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    names = (BPTT, D_SGD, D_STEP, D_AUTO, ES_SGD, ES_STEP)
    for net in NETS:
        case = Case(net, 128, 256, 16, 50)
        made = [compiled(case, name) for name in names]
        times = cpu_times([run for run, _ in made], repeats)
        best, middle = times.min(0) / times.min(0)[0], np.median(times / times[:, :1], axis=0)
        print(case.name)
        for name, (_, size), b, m in zip(names, made, best, middle, strict=True):
            print(
                f"  {name:24}{b:7.2f} of BPTT (best){m:7.2f} (median){size / 1e6:9.2f} MB of traces",
                flush=True,
            )
    for units, inputs, method in STREAMS:
        case = Case("GRU", inputs, units, 1, 200)
        best = cpu_times([compiled(case, method)[0]], repeats).min()
        print(f"{case.size}, {method}: {case.steps / best:,.0f} steps per CPU second", flush=True)


if __name__ == "__main__":
    main()
