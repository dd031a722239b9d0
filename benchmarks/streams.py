"""Streams: tasks with updates while the stream goes on, next to published numbers.

    python benchmarks/streams.py [--task NAME ...] [--seeds 5] [--quick] [--out FOLDER] [--list]

Each variant of a task and each seed is one row of `NAME.json`: its settings, its score and the time that it
took, written as soon as it is there; a row that is there already is not run again. `README.md` has the table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from stream_agents import conditioning, memory_chain, speed
from stream_sequences import copying, cue, series

RESULTS = Path(__file__).parent / "results" / "streams"
Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A task: a function of seeds and settings to rows, and the settings of each variant.

    `columns` are further entries of a row that the table shows, by their headings; `seeds` is the number of
    seeds of a variant that has fewer than asked for.
    """

    run: Callable[..., list[Row]]
    variants: dict[str, Row]
    score: str
    settings: str
    published: str = "none"
    columns: tuple[str, ...] = ()
    seeds: dict[str, int] = field(default_factory=dict)
    quick: Row = field(default_factory=dict)


def each(run: Callable[..., Row]) -> Callable[..., list[Row]]:
    """Return a function of several seeds that runs one after the other."""
    return lambda seeds, **settings: [run(seed, **settings) for seed in seeds]


CHAIN = {"envs": 1, "units": 32, "rate": 1e-3, "steps": 1_000_000}
CHAIN_SETTINGS = "RTU with 32 units, exact traces, Adam 1e-3, batch 1, an update at every step"
COST = ("us per step, CPU time", "KiB of an update")
CONDITIONING = {
    "RTU": {"cell": "RTU"},
    "RTU, truncated BPTT 10": {"cell": "RTU", "truncated": 10},
    "GRU rank 4": {"cell": "GRUCell", "rank": 4},
    "GRU, truncated BPTT 10": {"cell": "GRUCell", "truncated": 10},
}
# the memory of RTU and LRU at the start is shorter than the delay, so that it has to be learned
SHORT, GATED = {"reach": 0.3, "letters": 3}, {"cell": "GRUCell", "reach": 3.0, "letters": 1}
COPYING = {
    "RTU": {"cell": "RTU", "window": 10, **SHORT},
    "LRU": {"cell": "LRU", "window": 10, **SHORT},
    "RTU, truncated BPTT 20": {"cell": "RTU", "window": 20, "truncated": True, **SHORT},
    "RTU, truncated BPTT 100": {"cell": "RTU", "window": 100, "truncated": True, **SHORT},
    "GRU rank 8": {"window": 10, "rank": 8, **GATED},
    "GRU, truncated BPTT 20": {"window": 20, "truncated": True, **GATED},
    "GRU, truncated BPTT 100": {"window": 100, "truncated": True, **GATED},
}
TASKS = {
    "memory_chain_q": Task(
        each(memory_chain),
        {f"length {n}": {**CHAIN, "length": n, "algorithm": "QRC"} for n in (32, 48, 64, 128)},
        "best mean return of a tenth of the run",
        CHAIN_SETTINGS + "; QRC(lambda), gamma .99, lambda .95, epsilon from 1 to .02 over half of the run",
        "QRC(lambda), RTU with exact RTRL: .99 / .85 / .15 / .12 at 32 / 48 / 64 / 128",
        columns=("last",),
        quick={"steps": 300, "length": 2, "units": 4},
    ),
    "memory_chain_ac": Task(
        each(memory_chain),
        {f"length {n}": {**CHAIN, "length": n, "algorithm": "AC"} for n in (4, 8, 16, 32, 64)},
        "best mean return of a tenth of the run",
        CHAIN_SETTINGS + "; AC(lambda), gamma = lambda = .99, entropy weight .01",
        "AC(lambda), CTRNN with RTRL: 1 / .90 / .61 / .56 / .61 at 4 / 8 / 16 / 32 / 64; RFLO: "
        "1 / 1 / 1 / .77 / .32; up to 50 M steps",
        columns=("last",),
        quick={"steps": 300, "length": 2, "units": 4},
    ),
    "series": Task(
        each(series),
        {
            f"{name}, {kind}": {"name": name, "steps": 15_000, **settings}
            for name in ("mackey_glass", "lorenz", "henon")
            for kind, settings in {
                "rank 4": {"rule": "rank 4"},
                "rank 4, Adam with b2 = .99": {"rule": "rank 4", "decay": 0.99},
                "rank 4, Adam with b2 = .99, clipped": {"rule": "rank 4", "decay": 0.99, "clip": 1.0},
                "diagonal": {"rule": "diagonal"},
                "SnAp-1": {"rule": "SnAp-1"},
            }.items()
        },
        "NMSE of the next value: mean of the last five records, each of 200 steps",
        "64 tanh units, batch 8, Adam 1e-3, an update at every step, state and traces reset every 200 steps. "
        "Rows that name b2 differ from the published protocol; their settings were chosen on the first seeds "
        "of these series, so that the best of the rows for one series is biased. `rank 4` alone is the "
        "published protocol",
        "means over seeds for Mackey-Glass / Lorenz / Henon: exact RTRL .0180 / .0051 / .0052, SnAp-1 "
        ".0050 / .0024 / .0052, sketched rank 4 .0065 / .0038 / .0059, truncated BPTT(25) "
        ".0080 / .0054 / .0311",
        columns=COST,
        quick={"steps": 300, "units": 4, "batch": 2},
    ),
    "conditioning": Task(
        conditioning,
        {
            f"{env}, ISI {isi[0]}-{isi[1]}, {units} units, {name}": {
                "env": env, "isi": isi, "units": units, "steps": 100_000, **settings,
            }
            for units in (16, 4)
            for env in ("TraceConditioning", "TracePatterning")
            for isi in ((7, 13), (14, 26))
            for name, settings in CONDITIONING.items()
        },
        "squared error of the return over its variance, last fifth (0 is perfect, 1 is the mean)",
        "TD(lambda), gamma = lambda = .9, ITI 80-129, 10 distractors, Adam 1e-3, batch 1, an update at every "
        "step; TracePatterning has 6 CSs and 10 activation patterns; truncated BPTT back-propagates through "
        "the last 10 steps at every step",
        "figures only",
        quick={"steps": 2000, "units": 4},
    ),
    "cue": Task(
        each(cue),
        {
            f"delay {delay:,}": {"delay": delay, "steps": 40 * (delay + 40), "units": 1024}
            for delay in (1_000, 4_000, 10_000, 16_000)
        },
        "accuracy at recall, second half of 40 trials (chance .5)",
        "15 inputs, 20 steps of cue, 20 of recall, BRF with 1024 units, 4 trials in parallel, Adam 1e-2, an "
        "update after each trial",
        "figure only",
        columns=COST,
        seeds={"delay 16,000": 1},
        quick={"delay": 50, "steps": 500, "units": 8},
    ),
    "copying": Task(
        each(copying),
        {
            f"delay {delay}, {name}": {"delay": delay, "steps": steps, **settings}
            for delay, steps in ((200, 300_000), (1000, 2_000_000))
            for name, settings in COPYING.items()
        },
        "accuracy, last fifth (chance .25)",
        "64 units, an alphabet of 4, 3 letters (GRU: 1), 8 streams in parallel, no resets, Adam 3e-3, online "
        "in windows of 10 steps, updates where letters are asked for. The longest memory at the start is .3 "
        "of the delay for RTU and LRU; update gates of the GRU are drawn for up to 3 times the delay. GRU "
        "rank 8 was run with one seed at delay 1000 and stays at chance; variants without a row were not "
        "run. Methods differ in memory (column KiB of an update)",
        columns=COST,
        seeds={"delay 1000, GRU rank 8": 1},
        quick={"delay": 4, "steps": 220, "units": 4, "window": 5, "batch": 2},
    ),
    "speed": Task(
        each(speed),
        {
            "RTU 256": {"cell": "RTU", "units": 256, "steps": 1000},
            "GRU 64": {"cell": "GRUCell", "units": 64, "steps": 1000},
        },
        "steps per second of the bare loop, by CPU time, best of 100 runs",
        "batch 1, 3 inputs, 3 outputs, SGD at every step; environment MemoryChain, agent AC(lambda); one "
        "core (`taskset -c 1`)",
        columns=(
            "bare loop with environment", "agent", "agent / bare loop", "agent / bare loop with environment",
        ),
        seeds={"RTU 256": 1, "GRU 64": 1},
        quick={"steps": 200, "units": 4, "rounds": 2},
    ),
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--variant", nargs="+", help="only variants whose names contain one of these")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="number of steps, instead of that of each variant")
    parser.add_argument("--quick", action="store_true", help="toy sizes, one seed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--list", action="store_true", help="list tasks and variants")
    given = parser.parse_args(arguments)
    if given.list:
        for name in given.task:
            print(name, *TASKS[name].variants, sep="\n    ")
        return
    for name in given.task:
        run_task(name, given)
    write_table(given.out)


def run_task(name: str, given: argparse.Namespace) -> None:
    """Run all rows of a task that are not there yet."""
    task, path = TASKS[name], given.out / f"{name}.json"
    rows: list[Row] = json.loads(path.read_text()) if path.exists() else []
    chosen = [v for v in task.variants if not given.variant or any(part in v for part in given.variant)]
    together = task.run is conditioning
    for variant in chosen[: 1 if given.quick else None]:
        settings = {**task.variants[variant], **({"steps": given.steps} if given.steps else {})}
        settings |= task.quick if given.quick else {}
        key = {"variant": variant, "settings": json.loads(json.dumps(settings))}
        there = [row["seed"] for row in rows if key.items() <= row.items()]
        count = 1 if given.quick else min(given.seeds, task.seeds.get(variant, given.seeds))
        seeds = [seed for seed in range(count) if seed not in there]
        for part in [seeds] if together and seeds else [[seed] for seed in seeds]:
            began, cpu = time.monotonic(), time.process_time()
            found = task.run(part, **settings)
            spent = {
                "seconds": (time.monotonic() - began) / len(part),
                "CPU seconds": (time.process_time() - cpu) / len(part),
                "machine": machine(),
            }
            rows += [{**key, "seed": s, **row, **spent} for s, row in zip(part, found, strict=True)]
            scores = ", ".join(f"{row['score']:.4g}" for row in found)
            print(f"{name}: {variant}, seeds {part}: {scores}, {time.monotonic() - began:.0f} s", flush=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(rows, indent=1) + "\n")


def machine() -> str:
    return (
        f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores, {platform.machine()}, JAX {jax.__version__}"
    )


def write_table(out: Path) -> None:
    """Write the rows of all tasks as tables: mean, median and range over seeds, and the time they took."""
    lines = [
        "# Streams",
        "",
        "Written by `benchmarks/streams.py` (`make streams`); the rows are in the JSON files.",
    ]
    lines += ["Times are CPU time of one run, compilation included, on the machine that its rows name."]
    for name, task in TASKS.items():
        path = out / f"{name}.json"
        if not path.exists():
            continue
        lines += ["", f"## {name}", "", f"Score: {task.score}. Settings: {task.settings}."]
        lines += [
            "",
            f"Published: {task.published}. Command: `python benchmarks/streams.py --task {name}`.",
            "",
        ]
        heads = ["variant", "steps", "seeds", "mean", "median", "range", *task.columns, "CPU seconds"]
        lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        groups: dict[tuple[str, int], list[Row]] = {}
        for row in json.loads(path.read_text()):
            groups.setdefault((row["variant"], row["settings"]["steps"]), []).append(row)
        for variant in task.variants:
            for (of, steps), rows in groups.items():
                if of == variant:
                    lines.append(_line(variant, steps, rows, task.columns))
    out.mkdir(parents=True, exist_ok=True)
    (out / "README.md").write_text("\n".join(lines) + "\n")


def _line(variant: str, steps: int, rows: list[Row], columns: tuple[str, ...]) -> str:
    scores = [row["score"] for row in rows]
    more = [_show(float(np.median([row[name] for row in rows]))) for name in columns]
    spent = sum(row["CPU seconds"] for row in rows) / len(rows)
    between = f"{_show(min(scores))} to {_show(max(scores))}"
    middle = [_show(float(np.mean(scores))), _show(float(np.median(scores))), between]
    return "| " + " | ".join([variant, f"{steps:,}", str(len(rows)), *middle, *more, f"{spent:.0f}"]) + " |"


def _show(value: float) -> str:
    return f"{value:,.0f}" if value > 100 else f"{value:.4g}"


if __name__ == "__main__":
    main()
