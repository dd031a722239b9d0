"""A graph as a drawing: SVG, and the DOT language of graphviz."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING

from ..._compiler.graph import TraceGraph
from ..._compiler.step import show_path
from ..markup import Markup, svg, tag
from .cards import LINE, PAD, SMALL, TEXT, Card, Line, Placed, make_cards
from .details import details
from .diagram import Diagram, Edge, read_diagram
from .placement import Point, place_cards

if TYPE_CHECKING:
    from ..report import CompilationReport

STYLE = resources.files(__package__).joinpath("drawing.css").read_text(encoding="utf-8")
RADIUS = 6.0


def to_svg(report: CompilationReport) -> Markup:
    """Return the drawing of a graph as a standalone SVG document."""
    return draw(read_diagram(report), report.graph)


def draw(diagram: Diagram, graph: TraceGraph) -> Markup:
    placement = place_cards(make_cards(diagram))
    size = round(placement.width), round(placement.height)
    notes = details(diagram, graph)
    parts = [tag("style", Markup(STYLE)), tag("rect", class_="sheet", width="100%", height="100%")]
    for card in placement.cards:
        if card.group is not None:
            parts.append(_rect("card", card.x, card.y, card.width, card.height, 10))
            parts.append(_text("head", card.x + PAD + 2, card.y + 16, card.title))
    # neighbours have different hues, so that parallel lines can be distinguished
    hues = {
        source: i % 4 for i, source in enumerate(dict.fromkeys(e.source for e in placement.routes if e.past))
    }
    parts += [_edge(edge, points, hues.get(edge.source, 0)) for edge, points in placement.routes.items()]
    for card in placement.cards:
        parts += [_edge(edge, points, hues.get(edge.source, 0)) for edge, points in _inner(card)]
        parts += [_box(card, placed, notes[key]) for key, placed in card.placed.items()]
    return svg("data flow of one step", *size, *parts, class_="etrace")


def _rect(style: str, x: float, y: float, width: float, height: float, rx: int) -> Markup:
    size = {"width": f"{width:.1f}", "height": f"{height:.1f}"}
    return tag("rect", class_=style, x=f"{x:.1f}", y=f"{y:.1f}", **size, rx=rx)


def _text(style: str, x: float, y: float, words: str, anchor: str | None = None) -> Markup:
    return tag("text", words, class_=style, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)


def _edge(edge: Edge, points: Sequence[Point], hue: int) -> Markup:
    style = f"edge {f'past past{hue}' if edge.past else 'now'}{' dropped' * edge.dropped}"
    x, y = points[-1]
    line = tag("path", class_="line", d=_rounded([*points[:-1], (x - 4, y)]))
    tip = f"M{x - 7:.1f},{y - 3.4:.1f} L{x:.1f},{y:.1f} L{x - 7:.1f},{y + 3.4:.1f} z"
    ends = {"data_from": edge.source, "data_to": edge.target}
    return tag("g", line, tag("path", class_="head", d=tip), class_=style, **ends)


def _rounded(points: Sequence[Point]) -> str:
    """A line through corners, each of them round."""
    kept = [
        p
        for i, p in enumerate(points)
        if i == 0 or abs(p[0] - points[i - 1][0]) + abs(p[1] - points[i - 1][1]) > 0.5
    ]
    out = [f"M{kept[0][0]:.1f},{kept[0][1]:.1f}"]
    for a, b, c in zip(kept, kept[1:], kept[2:], strict=False):
        r = min(RADIUS, _distance(a, b) / 2, _distance(b, c) / 2)
        p, q = _towards(b, a, r), _towards(b, c, r)
        out.append(f"L{p[0]:.1f},{p[1]:.1f} Q{b[0]:.1f},{b[1]:.1f} {q[0]:.1f},{q[1]:.1f}")
    return " ".join([*out, f"L{kept[-1][0]:.1f},{kept[-1][1]:.1f}"])


def _distance(a: Point, b: Point) -> float:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def _towards(a: Point, b: Point, r: float) -> Point:
    d = _distance(a, b) or 1.0
    return a[0] + (b[0] - a[0]) * r / d, a[1] + (b[1] - a[1]) * r / d


def _inner(card: Card) -> list[tuple[Edge, list[Point]]]:
    """Route the edges inside a card: from sites to the group, between sites, and the recurrence."""
    group = card.group
    if group is None:
        return []
    found: list[tuple[Edge, list[Point]]] = []
    into = [e for e in card.inner if e.target == group.box.key]
    wires = [e for e in card.edges if e.target == group.box.key]
    heights = sorted(
        [(card.placed[e.source].y + card.placed[e.source].height / 2, e.source) for e in into]
        + [(card.ports[e.source, e.target, e.past], e.source) for e in wires]
    )
    order = [source for _, source in heights]
    top, bottom = group.y, group.y + group.height
    for e in into:
        p = card.placed[e.source]
        i = order.index(e.source)
        y0 = card.y + p.y + p.height / 2
        y1 = card.y + top + (bottom - top) * (i + 1) / (len(order) + 1)
        if top + 6 < p.y + p.height / 2 < bottom - 6 and len(order) == 1:
            y1 = y0
        bend = card.x + group.x - 24 + 12 * _share(i, len(order))
        found.append((e, [(card.x + p.x + p.width, y0), (bend, y0), (bend, y1), (card.x + group.x, y1)]))
    for e in card.inner:
        target = card.placed[e.target]
        if e.past:
            y0, x0 = card.y + group.y + group.height, card.x + group.x + group.width / 2
            low, lane = card.y + card.height - 7, card.x + card.lane
            y1 = card.y + card.ports[e.source, e.target, e.past]
            found.append((e, [(x0, y0), (x0, low), (lane, low), (lane, y1), (card.x + target.x, y1)]))
        elif target is not group:
            p = card.placed[e.source]
            y1 = card.y + target.y + target.height * 0.2
            if card.stairs:
                x0, y0 = card.x + p.x + 22, card.y + p.y + p.height
                found.append((e, [(x0, y0), (x0, y1), (card.x + target.x, y1)]))
            else:
                x0, y0 = card.x + p.x + p.width, card.y + p.y + p.height / 2
                found.append((e, [(x0, y0), (x0 + 12, y0), (x0 + 12, y1), (card.x + target.x, y1)]))
    return found


def _share(i: int, count: int) -> float:
    """Return where a line bends: outer lines bend later, so that they do not cross."""
    middle = (count - 1) / 2
    return 0.5 if count == 1 else abs(i - middle) / max(middle, 0.5) * 0.9


def _box(card: Card, placed: Placed, note: list[tuple[str, str]]) -> Markup:
    box = placed.box
    kind = box.kind + (" online" if box.online else " within" if box.kind == "site" else "")
    x, y = card.x + placed.x, card.y + placed.y
    tooltip = "\n".join(f"{name}: {text}" if name else text for name, text in note)
    corner = 6 if box.kind in ("site", "plain", "group") else 12
    parts = [tag("title", tooltip), _rect("body", x, y, placed.width, placed.height, corner)]
    for i, line in enumerate(placed.lines):
        parts += _line(line, x + PAD, y + PAD / 2 + LINE * i, placed.width - 2 * PAD)
    at = x + PAD + placed.lines[0].width - (len(placed.lines[0].aside) * SMALL * 0.61 + 10) + 4
    for mark in placed.marks:
        width = len(mark) * SMALL * 0.61 + 8
        parts.append(_rect("mark", at, y + PAD / 2 + 2, width, 13, 6))
        parts.append(_text("mark mono", at + 4, y + PAD / 2 + 12, mark))
        at += width + 4
    return tag("g", *parts, class_=f"box {kind}", id=box.key, data_key=box.key, tabindex=0)


def _line(line: Line, x: float, y: float, width: float) -> list[Markup]:
    style, tagged = "title" if line.style == "title" else "mono", line.style in ("tag", "quiet")
    parts = [_text(style, x + 6 * tagged, y + 12.5, line.text)]
    if tagged:
        parts.insert(0, _rect(line.style, x, y + 1.5, len(line.text) * TEXT * 0.61 + 10, 14, 4))
    if line.aside:
        parts.append(_text("aside mono", x + width, y + 12.5, line.aside, "end"))
    return parts


def to_dot(report: CompilationReport) -> str:
    """Return the graph in the DOT language of graphviz."""
    diagram = read_diagram(report)
    lines = ["digraph etrace {", "  rankdir=LR; node [shape=box, style=rounded, fontname=Helvetica];"]
    for card in make_cards(diagram):
        inside = []
        for key, placed in card.placed.items():
            box = placed.box
            words = [box.op or card.title, box.shape, *(show_path(p) for p in box.params)]
            if box.group is not None:
                words = [card.title, *(show_path(p) for p in box.group.hidden_paths)]
            label = "\\n".join(_quoted(s) for s in words if s)
            style = "" if box.online or box.kind != "site" else ', style="rounded,dashed"'
            inside.append(f'  "{_quoted(key)}" [label="{label}"{style}];')
        if card.group is not None and len(inside) > 1:
            inside = [f'  subgraph "cluster_{card.group.box.key}" {{', *("  " + s for s in inside), "  }"]
        lines += inside
    for e in diagram.edges:
        style = " [style=dashed, color=crimson]" if e.dropped else ""
        if e.past and not e.dropped:
            style = " [color=darkorange, constraint=false]"
        lines.append(f'  "{_quoted(e.source)}" -> "{_quoted(e.target)}"{style};')
    return "\n".join([*lines, "}", ""])


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
