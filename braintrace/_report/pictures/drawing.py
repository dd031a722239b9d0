"""A graph as a drawing: SVG, and the DOT language of graphviz."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from itertools import pairwise

from ..._compiler.graph import ETraceGraph
from ..._compiler.step import show_path
from ..markup import Markup, svg, tag
from ..report import CompilationReport
from .boxes import LINE, PAD, SMALL, TEXT, Line, Placed, make_boxes
from .details import Note, details
from .diagram import Diagram, Edge, read_diagram
from .placement import Point, place_boxes

STYLE = resources.files(__package__).joinpath("drawing.css").read_text(encoding="utf-8")
RADIUS = 6.0


def to_svg(report: CompilationReport) -> Markup:
    """Return the drawing of a graph as a standalone SVG document."""
    return draw(read_diagram(report), report.graph)


def draw(diagram: Diagram, graph: ETraceGraph) -> Markup:
    """Return the drawing of a diagram."""
    placement = place_boxes(make_boxes(diagram))
    notes = details(diagram, graph)
    # neighbours have different hues, so that parallel lines can be distinguished
    past = dict.fromkeys(e.source for e in placement.routes if e.past)
    hues = {source: i % 4 for i, source in enumerate(past)}
    parts = [tag("style", Markup(STYLE)), tag("rect", class_="sheet", width="100%", height="100%")]
    parts += [_edge(edge, points, hues.get(edge.source, 0)) for edge, points in placement.routes.items()]
    parts += [_box(placed, notes[placed.box.key]) for placed in placement.boxes]
    size = round(placement.width), round(placement.height)
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
    kept = [points[0], *(b for a, b in pairwise(points) if _distance(a, b) > 0.5)]
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


def _box(placed: Placed, note: Note) -> Markup:
    box, x, y = placed.box, placed.x, placed.y
    kind = box.kind + (" online" if box.online else " within" if box.kind == "site" else "")
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
    for placed in make_boxes(diagram):
        box, words = placed.box, [placed.lines[0].text, placed.box.shape]
        words += [show_path(p) for p in (*(box.group.hidden_paths if box.group else ()), *box.params)]
        label = "\\n".join(_quoted(s) for s in words if s)
        style = "" if box.online or box.kind != "site" else ', style="rounded,dashed"'
        lines.append(f'  "{_quoted(box.key)}" [label="{label}"{style}];')
    for e in diagram.edges:
        style = " [style=dashed, color=crimson]" if e.dropped else ""
        if e.past and not e.dropped:
            style = " [color=darkorange, constraint=false]"
        lines.append(f'  "{_quoted(e.source)}" -> "{_quoted(e.target)}"{style};')
    return "\n".join([*lines, "}", ""])


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
