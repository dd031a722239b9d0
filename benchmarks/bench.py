"""Online rules beside back-propagation through time and release 0.2.6: time, compile time and memory.

    python benchmarks/bench.py [--quick] [--case REGEX] [--only REGEX] [--minutes N] [--name NAME]
    python benchmarks/bench.py --go-on benchmarks/results/h200/results.json
    python benchmarks/bench.py --plots-from benchmarks/results/h200/results.json

Writes results.json, results.md and plots to benchmarks/results/NAME, and compares the results with their
limits: whole sequences, windows and rank on five nets, streams with an update after every ten steps and after
every step, time to compile, and memory. `make bench` runs all of it, on a CPU or a GPU, the most important
cases first. A run that is cut off (`--minutes`) continues with `--go-on`. A machine with matplotlib draws the
results of one without it by `--plots-from`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # two processes share a GPU

import measure
import methods as m
import report
from nets import Case
from targets import (
    COMPILED,
    CPU_GRU,
    CPU_NETS,
    GPU_FILTERED,
    GPU_GRU,
    GPU_LIF,
    GPU_NETS,
    ONE_GRU,
    SMALL_GRU,
    judge,
)
from yardstick import Yardstick

HERE = Path(__file__).parent
ALL = m.OURS + m.YARD
ONCE = (m.D_DROP, m.ES_DROP, m.D_BF16, m.D_SGD_BF16, *m.ONE_PASS, m.ES_WIN, m.FLOOR)
SWEEP = tuple(n for n in ALL if n not in ONCE)
ONE_SAMPLE = (m.D_SGD, m.D_RANK_SGD, *m.STREAMS, m.STREAM_FLOOR)


@dataclass(frozen=True)
class Item:
    """A case to measure, the methods to use, and the plots that it is a point of."""

    case: Case
    names: Sequence[str] = SWEEP
    sweeps: tuple[str, ...] = ()


@dataclass
class Settings:
    """How long to measure. `seconds` are for the timed runs of a case; `slow` ones are not repeated."""

    seconds: float = 8.0
    slow: float = 3.0
    minutes: float = float("inf")
    case: str = ""
    only: str = ""
    yardstick: str | None = None
    start: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self.start > 60 * self.minutes


def cpu_plan(quick: bool) -> list[Item]:
    lengths = (50, 100, 1000) if quick else (50, 100, 1000, 10_000)
    widths = (64, 256) if quick else (64, 128, 256, 512)
    return [
        Item(CPU_GRU, ALL),
        Item(ONE_GRU, ONE_SAMPLE),
        *(Item(c, (m.BPTT, *m.ONE_PASS)) for c in (CPU_NETS[:1] if quick else CPU_NETS)),
        *(Item(Case("GRU", 64, 128, 8, n), sweeps=("length",)) for n in lengths),
        *(Item(Case("GRU", n, n, 16, 50), sweeps=("width",)) for n in widths),
        Item(Case("LIF", 256, 128, 16, 100)),
        Item(Case("ALIF", 256, 128, 16, 100)),
        Item(Case("LSTM", 128, 256, 16, 50)),
    ]


def gpu_plan(quick: bool) -> list[Item]:
    """What matters most comes first: a lent machine's time may run out."""
    lengths = [Item(Case("GRU", 128, 256, 32, n), sweeps=("length",)) for n in (100, 1000, 10_000, 50)]
    widths = [Item(Case("GRU", n, n, 32, 100), sweeps=("width",)) for n in (256, 1024, 2048, 512)]
    nets = [Item(Case("ALIF", 512, 256, 64, 200)), Item(Case("LSTM", 256, 1024, 64, 200))]
    each_step = (m.D_SGD, m.FLOOR)
    rank = [
        *(Item(c, (m.BPTT, *m.ONE_PASS, *each_step)) for c in GPU_NETS),
        Item(SMALL_GRU, (m.BPTT, *m.ONE_PASS)),
        Item(ONE_GRU, ONE_SAMPLE),
    ]
    filtered = Item(GPU_FILTERED, (m.BPTT, m.D_AUTO, m.D_STEP, m.D_SGD, m.ES_STEP, m.ES_SGD))
    streams = [n for n, r in m.STREAMS.items() if r <= 17]  # `V` of rank 32 is too large for this batch
    first = [Item(GPU_GRU, (*ALL, *streams, m.STREAM_FLOOR)), *rank, filtered, Item(GPU_LIF)]
    if quick:
        return [*first, *lengths[:2], *widths[:2]]
    return [*first, *lengths[:3], *widths[:3], *nets, lengths[3], widths[3]]


def run(
    plan: list[Item],
    settings: Settings,
    compiled: Case | None,
    repeats: int = 3,
    before: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Measure what `before` lacks of a plan; the time to compile `compiled` is compared with care."""
    done = {entry["name"]: entry for entry in before.get("cases", [])}
    results: dict[str, Any] = {**before, "about": measure.about(), "cases": [], "skipped": []}
    yardstick = Yardstick(settings.yardstick) if settings.yardstick else None
    results["yardstick"] = yardstick.about() if yardstick else None
    seen: dict[tuple[str, str], float] = {}  # seconds a step, by size and method
    for entry in done.values():
        case = Case(**entry["case"])
        timed = {n: found["seconds"] for n, found in entry["methods"].items() if "seconds" in found}
        seen.update({(case.size, name): seconds / case.steps for name, seconds in timed.items()})
    plan = [i for i in plan if i.case.name in done or re.search(settings.case, i.case.name)]
    for number, item in enumerate(plan, 1):
        if item.case.name in done:
            results["cases"].append(done[item.case.name])
            continue
        if settings.is_over:
            results["skipped"].append(item.case.name)
            continue
        _say(f"{number}/{len(plan)} {item.case.name}")
        entry = _measure(item, settings, yardstick, seen)
        results["cases"].append(entry)
        for line in report.table(entry)[1:]:
            _say("  " + line)
        if item.case == compiled:
            names = [n for n in (m.BPTT, *COMPILED) if re.search(settings.only, n)]
            results["compile"] = measure.compile_times(compiled, names, repeats)
    if yardstick:
        yardstick.close()
    return results


def _measure(
    item: Item, settings: Settings, yardstick: Yardstick | None, seen: dict[tuple[str, str], float]
) -> dict[str, Any]:
    names = [n for n in item.names if re.search(settings.only, n)]
    theirs = [n for n in names if n in m.YARD and yardstick]
    runs: dict[str, Any] = {}
    found: dict[str, Any] = {}
    if yardstick and theirs:
        yardstick.build(item.case, theirs)
    for name in names:
        if name not in m.YARD:
            runs[name], found[name] = measure.build(item.case, name)
    if yardstick and theirs:
        found.update(yardstick.receive())
        runs.update({n: partial(yardstick.run, n) for n in theirs if "error" not in found[n]})
    # what is bound to take long was measured on a shorter sequence: here only its memory counts
    short = {
        n: r for n, r in runs.items() if seen.get((item.case.size, n), 0) * item.case.steps < settings.slow
    }
    for name, times in measure.interleave(short, settings.seconds, settings.slow).items():
        seconds = statistics.median(t for t in times if t)
        found[name].update(seconds=seconds, times=times)
        seen[item.case.size, name] = seconds / item.case.steps
    return {"name": item.case.name, "case": asdict(item.case), "sweeps": item.sweeps, "methods": found}


def write(results: dict[str, Any], folder: Path) -> None:
    """Write the results as JSON and Markdown, and as plots where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "results.md").write_text(report.markdown(results))
    if importlib.util.find_spec("matplotlib"):
        import plots

        plots.draw(results, folder)


def _say(text: str) -> None:
    print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    about = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about.add_argument("--quick", action="store_true", help="fewer and shorter cases")
    about.add_argument("--case", default="", metavar="REGEX", help="only the cases whose name matches")
    about.add_argument("--only", default="", metavar="REGEX", help="only the methods whose name matches")
    about.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after this time")
    about.add_argument("--go-on", type=Path, metavar="JSON", help="measure what these results lack")
    about.add_argument("--name", help="of the folder in benchmarks/results (default: the device's)")
    about.add_argument("--out", type=Path, default=HERE / "results", help="where that folder is")
    about.add_argument(
        "--yardstick",
        default=str(HERE.parent / ".venv-yardstick/bin/python"),
        help="a Python with braintrace 0.2.6; left out where there is none",
    )
    about.add_argument(
        "--plots-from", type=Path, metavar="JSON", help="write the tables and plots of a past run"
    )
    given = about.parse_args(argv)
    if given.plots_from:
        write(json.loads(given.plots_from.read_text()), given.plots_from.parent)
        return
    settings = Settings(case=given.case, only=given.only, minutes=given.minutes)
    if given.quick:
        settings.seconds, settings.slow = 2.0, 1.0
    if shutil.which(shlex.split(given.yardstick)[0]):
        settings.yardstick = given.yardstick
    else:
        _say(f"No yardstick at {given.yardstick}: `make .venv-yardstick/ready` installs it.")
    machine = measure.about()
    on_cpu = machine["platform"] == "cpu"
    plan, compiled = (cpu_plan(given.quick), CPU_GRU) if on_cpu else (gpu_plan(given.quick), GPU_GRU)
    before = json.loads(given.go_on.read_text()) if given.go_on else {}
    repeats = 1 if given.quick else 8 if on_cpu else 3
    results = run(plan, settings, compiled, repeats, before)
    name = given.name or ("cpu" if on_cpu else machine["device"].split()[-1].lower())
    write(results, given.out / name)
    _say(f"\nWhat must hold, on {machine['device']}:")
    for v in judge(results):
        measured = "not measured" if v.measured is None else f"{v.measured:8.2f}"
        _say(
            f"{'    ' if v.holds is None else 'ok  ' if v.holds else 'MISS'} {measured} {v.limit:14} {v.text}"
        )
    _say(f"\nWritten to {given.out / name}.")


if __name__ == "__main__":
    sys.exit(main())
