"""A picture of rules side by side: the error of the gradient against time and memory, and what was learned.

Rules are numbered as in the table, so that labels stay small enough never to lie upon each other. What is
drawn is a list of lines, circles and words, which becomes SVG by hand, or a file of matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from .._report.tables import show_bytes
from .comparison import GOOD, Compared, Comparison, show_seconds
from .curves import COLORS, smooth
from .svg import ticks

PANEL, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 336, 330, 58, 14, 40, 46
LEGEND, LINE = 270, 19
FLOOR = 1e-4  # errors below are drawn as exact
INK = "#475569"

Point = tuple[float, float]


@dataclass
class Drawing:
    """Lines, circles and words, in pixels from the upper left corner."""

    width: float
    height: float
    items: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def line(self, points: Sequence[Point], color: str = INK, width: float = 1.0, **style: Any) -> None:
        self.items.append(("line", {"points": list(points), "color": color, "width": width, **style}))

    def circle(self, x: float, y: float, r: float, color: str, fill: bool = True, title: str = "") -> None:
        self.items.append(("circle", {"x": x, "y": y, "r": r, "color": color, "fill": fill, "title": title}))

    def text(self, x: float, y: float, words: str, **style: Any) -> None:
        self.items.append(("text", {"x": x, "y": y, "words": words, **style}))

    def to_svg(self) -> str:
        size = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" height="{self.height:g}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="rules side by side" '
            'font-family="system-ui, sans-serif" font-size="11">'
            f'<rect width="{self.width:g}" height="{self.height:g}" fill="white"/>'
        )
        return head + "".join(_SVG[kind](item) for kind, item in self.items) + "</svg>\n"

    def save(self, path: Path) -> None:
        """Write it; the format is that of the file's name."""
        if path.suffix == ".svg":
            path.write_text(self.to_svg(), encoding="utf-8")
            return
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                f"To write {path.name} install matplotlib (`pip install 'braintrace[plot]'`), or an .svg."
            ) from error
        figure = Figure(figsize=(self.width / 72, self.height / 72))  # a point is a pixel
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, self.width), ylim=(self.height, 0))
        axes.axis("off")
        for kind, item in self.items:
            _MATPLOTLIB[kind](axes, item)
        figure.savefig(path, dpi=150)


def _svg_line(item: dict[str, Any]) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in item["points"])
    dash = ' stroke-dasharray="5 4"' if item.get("dashed") else ""
    return (
        f'<polyline points="{points}" fill="none" stroke="{item["color"]}" stroke-width="{item["width"]:g}" '
        f'stroke-opacity="{item.get("opacity", 1):g}"{dash}/>'
    )


def _svg_circle(item: dict[str, Any]) -> str:
    fill = item["color"] if item["fill"] else "none"
    title = f"<title>{escape(item['title'])}</title>" if item["title"] else ""
    return (
        f'<circle cx="{item["x"]:.1f}" cy="{item["y"]:.1f}" r="{item["r"]:g}" fill="{fill}" '
        f'stroke="{item["color"]}" stroke-width="1.4">{title}</circle>'
    )


def _svg_text(item: dict[str, Any]) -> str:
    turned = f' transform="rotate(-90 {item["x"]:.1f} {item["y"]:.1f})"' if item.get("turned") else ""
    bold = ' font-weight="600"' if item.get("bold") else ""
    return (
        f'<text x="{item["x"]:.1f}" y="{item["y"]:.1f}" text-anchor="{item.get("anchor", "start")}" '
        f'fill="{item.get("color", INK)}" font-size="{item.get("size", 11):g}"{bold}{turned}>'
        f"{escape(item['words'])}</text>"
    )


_SVG: dict[str, Callable[[dict[str, Any]], str]] = {
    "line": _svg_line,
    "circle": _svg_circle,
    "text": _svg_text,
}


def _plot_line(axes: Any, item: dict[str, Any]) -> None:
    x, y = zip(*item["points"], strict=True) if item["points"] else ((), ())
    style = "--" if item.get("dashed") else "-"
    alpha = item.get("opacity", 1)
    axes.plot(x, y, style, color=item["color"], linewidth=item["width"], alpha=alpha)


def _plot_circle(axes: Any, item: dict[str, Any]) -> None:
    face = item["color"] if item["fill"] else "none"
    style = {"markersize": 2 * item["r"], "markerfacecolor": face, "markeredgecolor": item["color"]}
    axes.plot([item["x"]], [item["y"]], "o", **style)


def _plot_text(axes: Any, item: dict[str, Any]) -> None:
    axes.text(
        item["x"],
        item["y"],
        item["words"].replace("$", r"\$"),
        ha={"start": "left", "middle": "center", "end": "right"}[item.get("anchor", "start")],
        va="baseline",
        rotation=90 if item.get("turned") else 0,
        rotation_mode="anchor",
        color=item.get("color", INK),
        fontsize=item.get("size", 11) * 0.92,  # its own font is wider than those of browsers
        fontweight="bold" if item.get("bold") else "normal",
    )


_MATPLOTLIB: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "line": _plot_line,
    "circle": _plot_circle,
    "text": _plot_text,
}


def draw(found: Comparison) -> Drawing:
    """The error against time, against memory, and the learning curves where there are some."""
    numbered = [(i, row) for i, row in enumerate(found.rows, 1) if row.ok]
    panels = 3 if found.updates else 2
    height = max(HEIGHT, TOP + LINE * (len(numbered) + 1) + 10)
    drawing = Drawing(panels * PANEL + LEGEND, height)
    best = found.recommended
    costs: list[tuple[str, Callable[[Compared], float], Callable[[float], str], Sequence[float]]] = [
        ("time a step", lambda r: r.step_seconds, show_seconds, _decades()),
        ("memory", lambda r: max(r.total_bytes, 1.0), show_bytes, [4.0**k for k in range(26)]),
    ]
    for i, (name, cost, shown, places) in enumerate(costs):
        _frontier(drawing, i * PANEL, numbered, best, name, cost, shown, places)
    if found.updates:
        _curves(drawing, 2 * PANEL, numbered)
    _legend(drawing, panels * PANEL + 8, numbered, best)
    return drawing


def _frontier(
    drawing: Drawing,
    at: float,
    numbered: list[tuple[int, Compared]],
    best: Compared | None,
    name: str,
    cost: Callable[[Compared], float],
    shown: Callable[[float], str],
    places: Sequence[float],
) -> None:
    errors = {i: _error(row) for i, row in numbered}
    costs = {i: cost(row) for i, row in numbered}
    low, high = 0.75 * min(costs.values()), 1.35 * max(costs.values())
    worst = max(1.0, 1.3 * max(errors.values()))
    px = _scale(at + LEFT, at + PANEL - RIGHT, math.log(low), math.log(high))
    py = _scale(HEIGHT - BOTTOM - 12, TOP, math.log(FLOOR), math.log(worst))
    x = lambda value: px(math.log(value))
    y = lambda value: py(math.log(max(value, FLOOR)))
    _frame(drawing, at, f"error against {name}", name)
    drawing.text(
        at + 12, (TOP + HEIGHT - BOTTOM) / 2, "1 - cosine to the exact gradient", anchor="middle", turned=True
    )
    for error in (1.0, 0.1, 0.01, 0.001, FLOOR):
        _across(drawing, at, y(error), "exact" if error == FLOOR else f"{error:g}")
    for place in _spread([p for p in places if low <= p <= high], x, 52) or [math.sqrt(low * high)]:
        drawing.text(x(place), HEIGHT - BOTTOM + 16, shown(place), anchor="middle")
    level = y(1 - GOOD)
    drawing.line([(at + LEFT, level), (at + PANEL - RIGHT, level)], opacity=0.6, dashed=True)
    right = at + PANEL - RIGHT
    near = any(x(costs[i]) > right - 90 and abs(y(errors[i]) - level) < 30 for i in costs)
    drawing.text(
        at + LEFT + 2 if near else right,
        level - 4,
        f"cosine {GOOD}",
        anchor="start" if near else "end",
        size=10,
    )
    edge: list[Point] = []
    for i in sorted(costs, key=lambda i: (costs[i], errors[i])):  # down a stair, from the cheapest
        if not edge or y(errors[i]) > edge[-1][1]:
            edge += [(x(costs[i]), edge[-1][1])] if edge else []
            edge.append((x(costs[i]), y(errors[i])))
    if len(edge) > 1:
        drawing.line(edge, opacity=0.35, width=1.5)
    points = {i: (x(costs[i]), y(errors[i])) for i in costs}
    for i, row in numbered:
        title = f"{row.rule}: cosine {row.cosine:.4f}, {shown(costs[i])}"
        drawing.circle(*points[i], 4.5, _color(i), title=title)
        if row is best:
            drawing.circle(*points[i], 8, _color(i), fill=False)
    box = (at + LEFT, TOP, at + PANEL, HEIGHT - BOTTOM + 2)
    for i, (lx, ly) in place_labels(points, box).items():
        away = math.hypot(lx - points[i][0], ly - points[i][1])
        if away > 18:  # a line leads from the point to its number
            a, b = points[i]
            drawing.line([(a, b), (lx + 6 * (a - lx) / away, ly + 6 * (b - ly) / away)], _color(i), 0.7)
        drawing.text(lx, ly + 4, str(i), anchor="middle", color=_color(i), bold=True)


def place_labels(
    points: dict[int, Point], box: tuple[float, float, float, float], size: float = 13
) -> dict[int, Point]:
    """The middle of a label for each point, near it, clear of points and of other labels."""
    left, top, right, bottom = box
    placed: dict[int, Point] = {}
    apart = lambda a, b, d: max(abs(a[0] - b[0]), abs(a[1] - b[1])) >= d
    for i, (x, y) in points.items():
        around = [
            (x + r * math.cos(a), y + r * math.sin(a))
            for r in (15, 21, 28, 37, 47, 58, 70)
            for a in np.arange(-8, 8) * math.pi / 8 - math.pi / 4
        ]
        inside = [p for p in around if left + 6 <= p[0] <= right - 6 and top <= p[1] <= bottom - 6]
        clear = [
            p
            for p in inside
            if all(apart(p, q, size / 2 + 6) for q in points.values())
            and all(apart(p, q, size) for q in placed.values())
        ]
        placed[i] = (clear or inside or around)[0]
    return placed


def _curves(drawing: Drawing, at: float, numbered: list[tuple[int, Compared]]) -> None:
    lines = {i: np.array(row.losses) for i, row in numbered if row.losses}
    values = np.concatenate([v[np.isfinite(v)] for v in lines.values()] or [np.zeros(1)])
    low, high = float(values.min()), float(np.quantile(values, 0.99))
    marks = ticks(low, high)
    low, high = min(low, marks[0]), max(high, marks[-1])
    most = max([len(v) for v in lines.values()] or [1])
    px = _scale(at + LEFT, at + PANEL - RIGHT, 0, most)
    py = _scale(HEIGHT - BOTTOM - 12, TOP, low, high if high > low else low + 1)
    _frame(drawing, at, "loss", "updates")
    for mark in marks:
        _across(drawing, at, py(mark), f"{mark:g}")
    for mark in ticks(0, most):
        drawing.text(px(mark), HEIGHT - BOTTOM + 16, f"{mark:g}", anchor="middle")
    for i, losses in lines.items():
        x, y = smooth(np.arange(1, len(losses) + 1), losses)
        kept = [(px(a), py(min(b, high))) for a, b in zip(x, y, strict=True) if math.isfinite(b)]
        drawing.line(kept, _color(i), 1.8)


def _legend(drawing: Drawing, at: float, numbered: list[tuple[int, Compared]], best: Compared | None) -> None:
    for n, (i, row) in enumerate(numbered):
        y = TOP + 12 + n * LINE
        drawing.circle(at + 6, y - 4, 4.5, _color(i))
        if row is best:
            drawing.circle(at + 6, y - 4, 8, _color(i), fill=False)
        words = row.rule if len(row.rule) <= 33 else row.rule[:32] + "..."
        drawing.text(at + 19, y, f"{i} {words}", bold=row is best)
    if best is not None:
        drawing.text(at + 19, TOP + 12 + len(numbered) * LINE, "in a ring: recommended", size=10)


def _frame(drawing: Drawing, at: float, title: str, below: str) -> None:
    drawing.text(at + LEFT, 22, title, size=13, bold=True, color="#1e293b")
    drawing.text(at + (LEFT + PANEL - RIGHT) / 2, HEIGHT - BOTTOM + 34, below, anchor="middle")
    drawing.line([(at + LEFT, HEIGHT - BOTTOM + 2), (at + PANEL - RIGHT, HEIGHT - BOTTOM + 2)], opacity=0.6)


def _across(drawing: Drawing, at: float, y: float, words: str) -> None:
    drawing.line([(at + LEFT, y), (at + PANEL - RIGHT, y)], opacity=0.15)
    drawing.text(at + LEFT - 6, y + 4, words, anchor="end")


def _error(row: Compared) -> float:
    return FLOOR if row.exact else max(FLOOR, 1 - row.cosine)


def _color(number: int) -> str:
    return COLORS[(number - 1) % len(COLORS)]


def _scale(first: float, last: float, low: float, high: float) -> Callable[[float], float]:
    return lambda value: first + (last - first) * (value - low) / ((high - low) or 1)


def _decades() -> list[float]:
    return [m * 10.0**k for k in range(-9, 4) for m in (1, 2, 5)]


def _spread(places: list[float], x: Callable[[float], float], apart: float) -> list[float]:
    """Those places that leave room for the words of each."""
    kept: list[float] = []
    for place in places:
        if not kept or x(place) - x(kept[-1]) >= apart:
            kept.append(place)
    return kept
