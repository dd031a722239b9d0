"""Time and memory against the length of the sequence and against width, and the nets beside BPTT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import methods as m
import report
from measure import ratio
from targets import Results

# Okabe and Ito's colours, which the colour-blind can tell apart; markers and dashes tell the same
STYLES: dict[str, tuple[str, str, str]] = {
    m.FORWARD: ("#999999", "x", ":"),
    m.BPTT: ("#000000", "o", "-"),
    m.CHECKPOINT: ("#000000", "s", "--"),
    m.D_AUTO: ("#0072B2", "o", "-"),
    m.D_CHUNK: ("#0072B2", "s", "--"),
    m.D_STEP: ("#0072B2", "^", ":"),
    m.D_TEN: ("#009E73", "o", "-"),
    m.D_RANK: ("#009E73", "s", "--"),
    m.D_SGD: ("#0072B2", "v", ":"),
    m.ES_AUTO: ("#D55E00", "o", "-"),
    m.ES_CHUNK: ("#D55E00", "s", "--"),
    m.ES_STEP: ("#D55E00", "^", ":"),
    m.YARD_D: ("#56B4E9", "D", "-"),
    m.YARD_ES: ("#E69F00", "D", "-"),
}
AXES = {"length": ("steps", "steps in the sequence"), "width": ("width", "hidden units")}
BARS = (
    m.FORWARD,
    m.CHECKPOINT,
    m.D_AUTO,
    m.D_CHUNK,
    m.D_TEN,
    m.D_RANK,
    m.D_STEP,
    m.D_SGD,
    m.YARD_D,
    m.ES_AUTO,
    m.ES_CHUNK,
    m.ES_STEP,
    m.YARD_ES,
)


def draw(results: Results, folder: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    for sweep in AXES:
        _lines(results, sweep, folder / f"{sweep}.png")
    _bars(results, folder / "nets.png")


def _lines(results: Results, sweep: str, path: Path) -> None:
    """Time per step and memory, side by side, against one size."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    key, title = AXES[sweep]
    entries = sorted((e for e in results["cases"] if sweep in e["sweeps"]), key=lambda e: e["case"][key])
    if len(entries) < 2:
        return
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    case = entries[0]["case"]
    for name, (color, marker, dash) in STYLES.items():
        found = [(e["case"][key], e["case"]["steps"], e["methods"].get(name, {})) for e in entries]
        if not any(methods for *_, methods in found):
            continue
        style: dict[str, Any] = {"color": color, "marker": marker, "linestyle": dash, "markersize": 5}
        style["label"] = report.label(name, case["chunk"])
        times = [(x, f["seconds"] / steps * 1e6) for x, steps, f in found if "seconds" in f]
        panels[0].plot(*zip(*times, strict=True) if times else ([], []), **style)
        memory = [(x, f["peak_bytes"] / 2**20) for x, _, f in found if "peak_bytes" in f]
        panels[1].plot(*zip(*memory, strict=True) if memory else ([], []), **style)
    for panel, label in zip(
        panels, ("time per step (us)", "memory beside parameters and inputs (MiB)"), strict=True
    ):
        panel.set(xscale="log", yscale="log", xlabel=title, ylabel=label)
        panel.set_xticks([e["case"][key] for e in entries])
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.10g}"))
            axis.set_minor_formatter(NullFormatter())
        panel.grid(which="major", color="#dddddd", linewidth=0.7)
    fixed = f"T={case['steps']}" if sweep == "width" else f"{case['inputs']} inputs, {case['width']} units"
    figure.suptitle(
        f"{case['net']}, batch {case['batch']}, {fixed}; {results['about']['device']}", fontsize=11
    )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _bars(results: Results, path: Path) -> None:
    """Time beside BPTT, for one case of each net: dots on a line."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    chosen = {e["case"]["net"]: e for e in reversed(results["cases"]) if not e["sweeps"]}
    if not chosen:
        return
    entries = list(chosen.values())[::-1]
    figure, panel = plt.subplots(figsize=(9, 1.2 + 1.1 * len(entries)), layout="constrained")
    for name in BARS:
        color, marker, _ = STYLES[name]
        points = []
        for row, entry in enumerate(entries):
            times = {k: v.get("times", []) for k, v in entry["methods"].items()}
            beside = ratio(times, name, m.BPTT)
            if beside is not None:
                points.append((beside, row + 0.6 * (BARS.index(name) / (len(BARS) - 1) - 0.5)))
        if points:
            panel.plot(
                *zip(*points, strict=True), color=color, marker=marker, linestyle="", markersize=6, label=name
            )
    panel.axvline(1, color="#000000", linewidth=1)
    panel.set(xscale="log", xlabel="time / BPTT's (less is faster)", ylim=(len(entries) - 0.5, -0.5))
    panel.set_yticks(range(len(entries)), [e["name"].replace(", batch", ",\nbatch") for e in entries])
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.grid(axis="x", which="both", color="#e5e5e5", linewidth=0.7)
    panel.set_title(results["about"]["device"], fontsize=11)
    figure.legend(loc="outside right center", frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
