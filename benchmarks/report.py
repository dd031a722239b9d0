"""Results as Markdown."""

from __future__ import annotations

from typing import Any

import methods as m
from measure import ratio
from targets import Results, judge

_LEGEND = """\
Times are medians of runs taken in turns with all others of the same table; a ratio is the median of the
ratios of each round. *Memory* is XLA's buffer assignment beside the arguments (parameters and the input
sequence): temporary buffers and outputs. *Traces* are what a rule carries from step to step. *Steps*: one
step at a time; *chunks*: of a fixed size; *automatic*: chunks chosen by the library; *online SGD*: the
weights are updated after every step. The byte floor reads and writes all traces once a step. 0.2.6 is the
release of that name on PyPI, in a process of its own."""


def markdown(results: Results) -> str:
    about = results["about"]
    lines = [f"# Benchmarks: {about['device']}", "", _versions("braintrace", about)]
    if results.get("yardstick"):
        lines.append(_versions("0.2.6", results["yardstick"]))
    lines += ["", _LEGEND, "", "## What must hold", "", "| | limit | measured | |", "|---|---|---:|---|"]
    words = {None: "not measured", True: "holds", False: "**missed**"}
    lines += [
        f"| {v.text} | {v.limit} | {'' if v.measured is None else f'{v.measured:.2f}'} | {words[v.holds]} |"
        for v in judge(results)
    ]
    for entry in results["cases"]:
        lines += ["", f"## {entry['name']}", "", *table(entry)]
    if results.get("skipped"):
        lines += ["", "Not measured for lack of time: " + "; ".join(results["skipped"]) + "."]
    return "\n".join(lines) + "\n"


def _versions(title: str, about: dict[str, Any]) -> str:
    packages = ", ".join(f"{k} {v}" for k, v in about["versions"].items())
    return f"- {title}: {about['date']} UTC, Python {about['python']}, {packages}"


def table(entry: dict[str, Any]) -> list[str]:
    head = f"| | time per step | / BPTT | compile | memory | traces |\n|---|{'---:|' * 5}"
    times = {k: v.get("times", []) for k, v in entry["methods"].items()}
    rows = [head]
    for name, found in entry["methods"].items():
        if "error" in found:
            rows.append(f"| {name} | {found['error']} | | | | |")
            continue
        beside = ratio(times, name, m.BPTT)
        cells = [
            label(name, entry["case"]["chunk"]),
            _time(found["seconds"] / entry["case"]["steps"]) if "seconds" in found else "",
            "" if beside is None else f"{beside:.2f}",
            f"{found['compile_wall']:.1f} s",
            _bytes(found["peak_bytes"]),
            _bytes(found["trace_bytes"]) if found["trace_bytes"] else "",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def label(name: str, chunk: int) -> str:
    return f"{name} of {chunk}" if name in (m.D_CHUNK, m.ES_CHUNK, m.ES_WIN) else name


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _bytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.2f} GiB"
