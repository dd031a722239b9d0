"""What the benchmarks measured, read from their results when the pages are built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
CAPTIONS = {
    "length": "Time per step and memory, by the length of the sequence.",
    "width": "Time per step and memory, by the number of hidden units.",
    "nets": "Time beside BPTT, by net.",
}


def show(machine: str) -> None:
    """A table of one net measured on a machine and the plots, as Markdown; nothing if there are none."""
    path = RESULTS / machine / "results.json"
    if not path.exists():
        return
    results = json.loads(path.read_text())
    entry = next((e for e in results["cases"] if not e["sweeps"]), None)
    print(f"### {results['about']['device']}\n")
    if entry is not None:
        _table(entry)
    for name, caption in CAPTIONS.items():
        if (picture := path.with_name(f"{name}.png")).exists():
            print(f"\n![{caption}](../benchmarks/results/{machine}/{picture.name})\n\n*{caption}*")


def _table(entry: dict[str, Any]) -> None:
    print(f"{entry['name']}; memory is what comes beside parameters and inputs:\n")
    print("| | time per step | beside BPTT | memory | of it traces |\n|---|---:|---:|---:|---:|")
    chunk, steps = entry["case"]["chunk"], entry["case"]["steps"]
    names = {
        "BPTT": "`BPTT`",
        "D_RTRL automatic": "`D_RTRL`, chunks chosen by the library",
        "D_RTRL chunks": f"`D_RTRL`, chunks of {chunk}",
        "D_RTRL steps": "`D_RTRL`, step by step",
        "ES_D_RTRL automatic": "`ES_D_RTRL`, chunks chosen by the library",
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
