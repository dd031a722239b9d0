"""The tables of scores: Markdown, out of the results as JSON; and the plot of score against memory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean, mean, stdev
from typing import Any

Found = dict[str, dict[str, Any]]  # results by task


@dataclass(frozen=True)
class Column:
    """How gradients are made; `window=None`: one step at a time, or for BPTT the whole sequence."""

    rule: str
    window: int | None = None
    rank: int = 0
    basis: str = "balanced"  # of a rank
    options: dict[str, Any] = field(default_factory=dict)  # of the rule
    tasks: tuple[str, ...] = ()  # that it is run on; none: all

    @property
    def is_dial(self) -> bool:
        """Whether it is D_RTRL in windows, with rank or without."""
        return self.rule == "D_RTRL" and self.window is not None


def write(folder: Path, names: Iterable[str], every: dict[str, Column], longer: int) -> str:
    """Write README.md and the plot beside the results; the table of scores."""
    columns = {name: column for name, column in every.items() if not column.tasks}
    published = {name: column for name, column in every.items() if column.tasks}
    files = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    found = {name: files[name] for name in names if name in files}
    table = "\n".join([*_scores(found, columns), "", *_verdict(found, columns)])
    parts = [
        "# Scores",
        "",
        "Written by `make scores`. The test score of nets trained from the same initial weights and on the "
        "same batches: mean ± standard deviation over seeds. *Truncated k* is BPTT inside windows of k steps "
        "and nothing before them; *D_RTRL* goes step by step; *windows of k* are back-propagated through, "
        "and traces summarise earlier steps; *k, rank r* adds a correction of rank r to the traces, in "
        "windows of k, with a balanced projection or, where said, a pushed basis. In brackets: of how many "
        "seeds, where others have more. Bold: as good as BPTT, no more than its standard deviation behind "
        "its mean.",
        "",
        table,
        "",
    ]
    if number := draw(found, columns, folder / "memory.png", longer):
        parts += [
            "![Score against memory](memory.png)",
            "",
            f"Score against memory, over {number} tasks: the mean score, from chance (0) to BPTT's (1), and "
            "the memory of one gradient beside that of BPTT on the same sequences (geometric mean), traces "
            f"included, as compiled for a CPU; D_RTRL step by step. With sequences {longer} times as long "
            "BPTT goes along the arrow, and the others stay where they are.",
            "",
        ]
    parts += [*_published(found, published), "", *_details(found, columns)]
    if "cosines" in files:
        parts += ["", *_cosines(files["cosines"])]
    (folder / "README.md").write_text("\n".join(parts) + "\n")
    return table


def _scores(found: Found, columns: dict[str, Column]) -> list[str]:
    lines = [
        f"| task | metric | chance | target | {' | '.join(columns)} |",
        f"|---|---|---|---|{'---|' * len(columns)}",
    ]
    for name, result in found.items():
        s = result["settings"]
        arrow = "↑" if s["higher_is_better"] else "↓"
        cells = [_cell(result, column) for column in columns]
        lines.append(
            f"| {name} | {s['metric_name']} {arrow} | {s['chance']:.3g} | {s['target']:.3g} "
            f"| {' | '.join(cells)} |"
        )
    return lines


def _published(found: Found, columns: dict[str, Column]) -> list[str]:
    """A row for each rule and a column for each task that some of them are run on."""
    tasks = [name for name in found if any(name in c.tasks for c in columns.values())]
    lines = [
        "## Published rules",
        "",
        "The same nets and updates, by rules as published, each on tasks of the kind that its paper uses; "
        "step by step, but for UORO and KF_RTRL, in windows of one step.",
        "",
        f"| rule | {' | '.join(tasks)} |",
        f"|---|{'---|' * len(tasks)}",
    ]
    for name in ("BPTT", "D_RTRL", *columns):
        lines.append(f"| {name} | {' | '.join(_cell(found[task], name) for task in tasks)} |")
    return lines if tasks else []


def scores_of(result: dict[str, Any], column: str) -> list[float]:
    return [run["score"] for run in result["rules"].get(column, {}).values()]


def _cell(result: dict[str, Any], column: str) -> str:
    scores = scores_of(result, column)
    if not scores:
        return "-"
    digits = 3 if mean(scores) >= 0.01 else 5
    text = f"{mean(scores):.{digits}f}" + (f" ± {stdev(scores):.{digits}f}" if len(scores) > 1 else "")
    if len(scores) < max(map(len, result["rules"].values())):
        text += f" ({len(scores)})"
    return f"**{text}**" if column != "BPTT" and as_good(result, column) else text


def as_good(result: dict[str, Any], column: str, other: str = "BPTT") -> bool | None:
    """Whether the mean of a column is not behind another's by more than that one's spread; None: unknown."""
    mine, theirs = scores_of(result, column), scores_of(result, other)
    if not mine or not theirs:
        return None
    spread = stdev(theirs) if len(theirs) > 1 else 0.0
    behind = mean(theirs) - mean(mine)
    return (behind if result["settings"]["higher_is_better"] else -behind) <= spread


def _verdict(found: Found, columns: dict[str, Column]) -> list[str]:
    """On how many tasks each column is as good as BPTT, and where one is behind truncated BPTT."""
    lines = ["| as good as BPTT | tasks | not there |", "|---|---|---|"]
    dial = [name for name, column in columns.items() if column.is_dial]

    def row(title: str, some: list[str]) -> str | None:
        known = {n: [g for c in some if (g := as_good(r, c)) is not None] for n, r in found.items()}
        known = {n: goods for n, goods in known.items() if goods}
        behind = [n for n, goods in known.items() if not any(goods)]
        return (
            f"| {title} | {len(known) - len(behind)} of {len(known)} | {', '.join(behind)} |"
            if known
            else None
        )

    rows = [row(name, [name]) for name, c in columns.items() if c != Column("BPTT")]
    lines += [line for line in (*rows, row("the best of windows and rank", dial)) if line]
    truncated = {c.window: name for name, c in columns.items() if c.rule == "BPTT"}
    worse = [
        f"{name} ({column})"
        for name, result in found.items()
        for column in dial
        if as_good(result, column, truncated.get(columns[column].window, "")) is False
    ]
    return [*lines, "", "Behind truncated BPTT of the same windows: " + (", ".join(worse) or "none") + "."]


def _details(found: Found, columns: dict[str, Column]) -> list[str]:
    on_cpu = lambda r, c: [run["seconds"] for run in r["rules"].get(c, {}).values() if run["device"] == "cpu"]
    timed = [c for c in columns if any(on_cpu(r, c) for r in found.values())]
    more = f" seconds a run: {' / '.join(timed)} |" if timed else ""
    lines = [
        f"| task | what | steps | net | batch | updates | rate |{more}",
        "|---|---|---|---|---|---|---|" + ("---|" if timed else ""),
    ]
    machines = dict[str, None]()
    for name, result in found.items():
        s = result["settings"]
        given = ", ".join(f"{k}={v}" for k, v in s["options"].items()) or "defaults"
        seconds = [f"{mean(some):.0f}" if (some := on_cpu(result, c)) else "-" for c in timed]
        machines[_machine(result["about"])] = None
        lines.append(
            f"| {name} | {s['description']} ({given}) | {s['length']} | {s['model']} {s['units']} "
            f"| {s['batch']} | {s['updates']} | {s['rate']:g} |"
            + (f" {' / '.join(seconds)} |" if timed else "")
        )
    return [
        f"Trained with {'; '.join(machines)}. Adam with the same learning rate for all columns, a cosine "
        "schedule, gradients clipped at norm 1. Sizes and lengths were chosen so that BPTT learns most tasks "
        "within seconds." + (" Seconds are of one core, compilation included." if timed else ""),
        "",
        *lines,
    ]


def of_bptt(result: dict[str, Any], column: str) -> float | None:
    """The mean score on a scale from chance, 0, to BPTT, 1."""
    mine, theirs, chance = scores_of(result, column), scores_of(result, "BPTT"), result["settings"]["chance"]
    return (mean(mine) - chance) / (mean(theirs) - chance) if mine and theirs else None


def draw(found: Found, columns: dict[str, Column], path: Path, longer: int) -> int:
    """Draw the mean score against memory beside BPTT's; over how many tasks."""
    known = {n: r for n, r in found.items() if "BPTT" in r.get("memory", {})}
    shown = [c for c in columns if any(c in r["memory"] and scores_of(r, c) for r in known.values())]
    whole = [r for r in known.values() if all(c in r["memory"] and scores_of(r, c) for c in shown)]
    if not whole or "BPTT" not in shown:
        return 0

    def memory(column: str, number: int = 0) -> float:
        return geometric_mean(r["memory"][column][number] / r["memory"]["BPTT"][0] for r in whole)

    points = {c: (memory(c), mean(of_bptt(r, c) or 0.0 for r in whole)) for c in shown}
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    axes.axhline(1, color="#999999", lw=0.8, ls=":")
    labels: dict[tuple[float, float], str] = {}
    for title, some, style in _lines(columns):
        line = [c for c in some if c in points]
        if not line:
            continue
        axes.plot(*zip(*(points[c] for c in line), strict=True), label=title, **style)
        labels.update({points[c]: _short(columns[c]) for c in line})
    for point, label in labels.items():
        # one rank in two windows: their labels go to two sides
        first = next(p for p, other in labels.items() if other == label) == point
        place = {"xytext": (6, -11)} if first or not label.startswith("rank") else _ABOVE
        axes.annotate(label, point, textcoords="offset points", fontsize=8, **place)
    end = memory("BPTT", 1), 1.0
    axes.annotate("", end, points["BPTT"], arrowprops={"arrowstyle": "->", "color": "#000000", "lw": 1.2})
    axes.annotate(f"{longer} x the length", end, (-4, 4), textcoords="offset points", fontsize=8, ha="right")
    axes.plot(*end, "o", color="#000000", mfc="white")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("memory of a gradient beside BPTT's, at the length of the task")
    axes.set_ylabel("score: 0 chance, 1 BPTT's")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return len(whole)


_ABOVE = {"xytext": (-6, 4), "ha": "right"}


def _lines(columns: dict[str, Column]) -> list[tuple[str, list[str], dict[str, Any]]]:
    """What is joined by a line: its title, columns and style (Okabe and Ito's colours)."""
    pick = lambda test: [name for name, c in columns.items() if test(c)]
    ranked = sorted({c.window or 1 for c in columns.values() if c.rank})
    line = lambda color, marker, ls="-": {"color": color, "marker": marker, "ls": ls}
    return [
        ("BPTT", pick(lambda c: c == Column("BPTT")), line("#000000", "o")),
        ("truncated BPTT", pick(lambda c: c.rule == "BPTT" and c.window), line("#999999", "s", "--")),
        ("ES_D_RTRL", pick(lambda c: c.rule == "ES_D_RTRL"), line("#D55E00", "D")),
        ("D_RTRL, single step", pick(lambda c: c == Column("D_RTRL")), line("#56B4E9", "^")),
        ("D_RTRL in windows", pick(lambda c: c.is_dial and not c.rank), line("#0072B2", "o")),
        *(
            (
                f"and rank, in windows of {size}",
                pick(lambda c, size=size: c.is_dial and c.window == size),
                line(color, "v", ":"),
            )
            for size, color in zip(ranked, ("#009E73", "#CC79A7"), strict=False)
        ),
    ]


def _short(column: Column) -> str:
    if column.rank:
        return f"rank {column.rank}" + (" pushed" if column.basis == "pushed" else "")
    return "" if column.window is None else str(column.window)


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
