"""What the benchmarks measured, read from their results when the pages are built, as Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
CAPTIONS = {
    "length": "Time per step and memory, by the length of the sequence.",
    "width": "Time per step and memory, by the number of hidden units.",
    "nets": "Time relative to BPTT, by network.",
}


def table(
    file: str, columns: Mapping[str, str], heading: str | None = None, *, deviations: bool = True
) -> None:
    """Print columns of the first table of a file that has the first of them, under new names.

    With a heading, only the text below it counts. Without `deviations`, only means are printed.
    """
    text = (RESULTS / file).read_text()
    if heading is not None:
        text = text.split(f"## {heading}\n", 1)[1]
    tables = [found.splitlines() for found in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]
    lines = next(lines for lines in tables if lines[0].startswith(f"| {next(iter(columns))} |"))
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    chosen = [(head.index(name), shown) for name, shown in columns.items()]
    print("| " + " | ".join(shown for _, shown in chosen) + " |\n|" + "---|" * len(chosen))
    for row in rows:
        cells = [row[i] if deviations else re.sub(r" ± [\d.]+", "", row[i]) for i, _ in chosen]
        print("| " + " | ".join(map(_readable, cells)) + " |")


def _readable(cell: str) -> str:
    """Keep a number and its deviation on one line, and name windows in full."""
    return re.sub(r"^(\d+), rank", r"windows of \1, rank", cell.replace(" ± ", "\u00a0±\u00a0"))


def speed(machine: str) -> None:
    """Print a table of one network measured on a machine, and the plots; nothing if there are none."""
    path = RESULTS / machine / "results.json"
    if not path.exists():
        return
    results = json.loads(path.read_text())
    entry = next((e for e in results["cases"] if not e["sweeps"]), None)
    print(f"### {results['about']['device']}\n\nMeasured on {results['about']['date'][:10]}.\n")
    if entry is not None:
        _speed_table(entry)
    for name, caption in CAPTIONS.items():
        if (picture := path.with_name(f"{name}.png")).exists():
            print(f"\n![{caption}](../benchmarks/results/{machine}/{picture.name})\n\n*{caption}*")


def _speed_table(entry: dict[str, Any]) -> None:
    print(f"{entry['name']}; memory in addition to parameters and inputs:\n")
    print(
        "| method | time per step | relative to BPTT | memory | of which traces |\n|---|---:|---:|---:|---:|"
    )
    chunk, steps = entry["case"]["chunk"], entry["case"]["steps"]
    names = {
        "BPTT": "`BPTT`",
        "D_RTRL automatic": "`D_RTRL`, automatic chunks",
        "D_RTRL chunks": f"`D_RTRL`, chunks of {chunk}",
        "D_RTRL steps": "`D_RTRL`, step by step",
        "ES_D_RTRL automatic": "`ES_D_RTRL`, automatic chunks",
        "ES_D_RTRL chunks": f"`ES_D_RTRL`, chunks of {chunk}",
        "ES_D_RTRL steps": "`ES_D_RTRL`, step by step",
    }
    base = entry["methods"]["BPTT"]["seconds"]
    for key, name in names.items():
        found = entry["methods"].get(key, {})
        if "seconds" not in found:
            continue
        each = found["seconds"] / steps
        time = f"{each * 1e6:.0f} us" if each < 1e-3 else f"{each * 1e3:.1f} ms"
        memory, traces = (f"{found[k] / 2**20:,.0f} MiB" for k in ("peak_bytes", "trace_bytes"))
        traces = traces if found["trace_bytes"] else ""
        print(f"| {name} | {time} | {found['seconds'] / base:.2f} | {memory} | {traces} |")
