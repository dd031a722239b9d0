"""A picture of a comparison of rules: the error of the gradient against time and memory, and the loss.

Rules are numbered as in the table, so that labels are small enough not to overlap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from .._report.tables import show_bytes
from .canvas import Area, Drawing, Point, draw_axes, scale
from .comparison import GOOD, Compared, Comparison, show_seconds
from .curves import COLORS, Line, draw_panel, smooth

PANEL, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 336, 330, 58, 14, 40, 46
LEGEND, LINE, LABEL = 270, 19, 13
FLOOR = 1e-4  # smaller errors are drawn as exact


def draw(found: Comparison) -> Drawing:
    """Draw the error against time, against memory, and the learning curves, if there are some."""
    numbered = [(i, row) for i, row in enumerate(found.rows, 1) if row.ok]
    panels = 3 if found.updates else 2
    height = max(HEIGHT, TOP + LINE * (len(numbered) + 1) + 10)
    drawing = Drawing("comparison of learning rules", panels * PANEL + LEGEND, height)
    best = found.recommended
    decades = [m * 10.0**k for k in range(-9, 4) for m in (1, 2, 5)]
    costs: list[tuple[str, Callable[[Compared], float], Callable[[float], str], Sequence[float]]] = [
        ("time a step", lambda r: r.step_seconds, show_seconds, decades),
        ("memory", lambda r: max(r.total_bytes, 1.0), show_bytes, [4.0**k for k in range(26)]),
    ]
    for i, (name, cost, shown, places) in enumerate(costs):
        _frontier(drawing, i * PANEL, numbered, best, name, cost, shown, places)
    if found.updates:
        losses = {i: np.array(row.losses) for i, row in numbered if row.losses}
        high = np.nanquantile(np.concatenate([*losses.values(), np.zeros(1)]), 0.99)  # cuts off divergence
        curves = {i: smooth(np.arange(1, len(v) + 1), np.minimum(v, high)) for i, v in losses.items()}
        lines = [Line("", i - 1, x, y) for i, (x, y) in curves.items()]
        draw_panel(drawing, (2 * PANEL, 0, 3 * PANEL, HEIGHT), lines, "loss", "updates")
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
    errors = {i: FLOOR if row.exact else max(FLOOR, 1 - row.cosine) for i, row in numbered}
    costs = {i: cost(row) for i, row in numbered}
    low, high = 0.75 * min(costs.values()), 1.35 * max(costs.values())
    worst = max(1.0, 1.3 * max(errors.values()))
    left, right, bottom = at + LEFT, at + PANEL - RIGHT, HEIGHT - BOTTOM
    px = scale(left, right, math.log(low), math.log(high))
    py = scale(bottom - 12, TOP, math.log(FLOOR), math.log(worst))
    x = lambda value: px(math.log(value))
    y = lambda value: py(math.log(max(value, FLOOR)))
    marks: dict[float, str] = {}
    for place in [p for p in places if low <= p <= high] or [math.sqrt(low * high)]:
        if not marks or x(place) - max(marks) >= 52:  # far enough apart for labels
            marks[x(place)] = shown(place)
    levels = {y(error): "exact" if error == FLOOR else f"{error:g}" for error in (1, 0.1, 0.01, 0.001, FLOOR)}
    draw_axes(drawing, (left, TOP, right, bottom), f"error against {name}", name, marks, levels)
    middle = (TOP + bottom) / 2
    drawing.text(at + 12, middle, "1 - cosine to the exact gradient", anchor="middle", turned=True)
    level = y(1 - GOOD)
    drawing.line([(left, level), (right, level)], opacity=0.6, dashed=True)
    near = any(x(costs[i]) > right - 90 and abs(y(errors[i]) - level) < 30 for i in costs)
    where, anchor = (left + 2, "start") if near else (right, "end")
    drawing.text(where, level - 4, f"cosine {GOOD}", anchor=anchor, size=10)
    edge: list[Point] = []
    for i in sorted(costs, key=lambda i: (costs[i], errors[i])):  # a staircase, from the cheapest
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
    for i, (lx, ly) in place_labels(points, (left, TOP, at + PANEL, bottom + 2)).items():
        away = math.hypot(lx - points[i][0], ly - points[i][1])
        if away > 18:  # connect the point with its number
            a, b = points[i]
            drawing.line([(a, b), (lx + 6 * (a - lx) / away, ly + 6 * (b - ly) / away)], _color(i), 0.7)
        drawing.text(lx, ly + 4, str(i), anchor="middle", color=_color(i), bold=True)


def place_labels(points: dict[int, Point], box: Area) -> dict[int, Point]:
    """Return the centre of a label for each point, which overlaps neither points nor other labels."""
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
            if all(apart(p, q, LABEL / 2 + 6) for q in points.values())
            and all(apart(p, q, LABEL) for q in placed.values())
        ]
        placed[i] = (clear or inside or around)[0]
    return placed


def _legend(drawing: Drawing, at: float, numbered: list[tuple[int, Compared]], best: Compared | None) -> None:
    for n, (i, row) in enumerate(numbered):
        y = TOP + 12 + n * LINE
        drawing.circle(at + 6, y - 4, 4.5, _color(i))
        if row is best:
            drawing.circle(at + 6, y - 4, 8, _color(i), fill=False)
        words = row.rule if len(row.rule) <= 33 else row.rule[:32] + "..."
        drawing.text(at + 19, y, f"{i} {words}", bold=row is best)
    if best is not None:
        drawing.text(at + 19, TOP + 12 + len(numbered) * LINE, "ring: recommended", size=10)


def _color(number: int) -> str:
    return COLORS[(number - 1) % len(COLORS)]
