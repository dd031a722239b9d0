"""The tables of scores: Markdown, out of the results as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any


def write(folder: Path, names: Iterable[str], rules: Iterable[str]) -> None:
    """Write README.md beside the results."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    parts = [
        "# Scores",
        "",
        "Written by `make scores`. The test score of nets trained by each rule, from the same initial "
        "weights and on the same batches: mean ± standard deviation over seeds. Bold: as good "
        "as the task's target.",
        "",
        *_scores({name: found[name] for name in names if name in found}, list(rules)),
    ]
    if "cosines" in found:
        parts += ["", *_cosines(found["cosines"])]
    (folder / "README.md").write_text("\n".join(parts) + "\n")


def _scores(found: dict[str, Any], rules: list[str]) -> list[str]:
    lines = [
        f"| task | metric | chance | target | {' | '.join(rules)} | s per run |",
        f"|---|---|---|---|{'---|' * len(rules)}---|",
    ]
    total, details = 0.0, []
    for name, result in found.items():
        s = result["settings"]
        arrow = "↑" if s["higher_is_better"] else "↓"
        cells = []
        seconds = []
        for rule in rules:
            runs = list(result["rules"].get(rule, {}).values())
            cells.append(_cell([r["score"] for r in runs], s["target"], s["higher_is_better"]))
            seconds.append(f"{mean(r['seconds'] for r in runs):.0f}" if runs else "-")
            total += sum(r["seconds"] for r in runs)
        lines.append(
            f"| {name} | {s['metric_name']} {arrow} | {s['chance']:.3g} | {s['target']:.3g} "
            f"| {' | '.join(cells)} | {' / '.join(seconds)} |"
        )
        given = ", ".join(f"{k}={v}" for k, v in s["options"].items()) or "defaults"
        details.append(
            f"| {name} | {s['description']} ({given}) | {s['length']} | {s['model']} {s['units']} "
            f"| {s['batch']} | {s['updates']} | {s['rate']:g} |"
        )
    about = next(iter(found.values()))["about"] if found else {}
    return [
        *lines,
        "",
        f"Training took {total / 60:.0f} core-minutes in all, compilation included ({_machine(about)}). "
        "Adam with the same learning rate for all rules, a cosine schedule, gradients clipped at norm 1. "
        "Sizes and lengths were chosen so that BPTT learns most tasks within seconds. Seconds are of a run, "
        "and depend on what else the machine does.",
        "",
        "| task | what | steps | net | batch | updates | rate |",
        "|---|---|---|---|---|---|---|",
        *details,
    ]


def _cell(scores: list[float], target: float, higher: bool) -> str:
    if not scores:
        return "-"
    digits = 3 if mean(scores) >= 0.01 else 5
    text = f"{mean(scores):.{digits}f}" + (f" ± {stdev(scores):.{digits}f}" if len(scores) > 1 else "")
    good = mean(scores) >= target if higher else mean(scores) <= target
    return f"**{text}**" if good else text


def _cosines(result: dict[str, Any]) -> list[str]:
    rows = result["cosines"]["rows"]
    names = list(rows)
    rules = list(next(iter(rows.values()))["cosines"])
    lines = [
        "## Gradients beside exact ones",
        "",
        result["cosines"]["about"],
        "",
        f"| task | {' | '.join(rules)} | SnAp-1, published |",
        f"|---|{'---|' * len(rules)}---|",
    ]
    for name in names:
        row = rows[name]
        cells = [
            f"{mean(v):.3f} ± {stdev(v):.3f}" if len(v) > 1 else f"{v[0]:.3f}"
            for v in row["cosines"].values()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {row['published']} |")
    return [
        *lines,
        "",
        f"It took {result['cosines']['seconds'] / 60:.1f} core-minutes ({_machine(result['about'])}).",
    ]


def _machine(about: dict[str, Any]) -> str:
    return (
        f"Python {about['python']}, JAX {about['jax']}, {about['cores']} cores, {about['device']}"
        if about
        else "-"
    )
