"""The boxes of a drawing: their text, size and place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..._compiler.step import Path, show_path
from ..tables import shorten
from .diagram import Box, Diagram, Edge, show_aval

TITLE, TEXT, SMALL = 12.0, 11.0, 10.0  # sizes of type, in pixels
LINE = 17.0
PAD = 9.0
PORT = 8.0  # least distance of edges that enter a box
LONGEST = 6  # lines of states or parameters


@dataclass(frozen=True)
class Line:
    """One line of text in a box: the text, a note next to it in grey, and its style."""

    text: str
    aside: str = ""
    style: str = "text"  # title, text, tag, quiet

    @property
    def width(self) -> float:
        size = TITLE * 0.7 if self.style == "title" else TEXT * 0.61
        aside = len(self.aside) * SMALL * 0.61 + 10 if self.aside else 0
        return len(self.text) * size + aside + (12 if self.style in ("tag", "quiet") else 0)


@dataclass(eq=False)
class Placed:
    """A box with its text, its size and its place."""

    box: Box
    lines: list[Line]
    edges: list[Edge]  # that enter it
    marks: list[str] = field(default_factory=list)
    ports: dict[Edge, float] = field(default_factory=dict)  # the height at which each edge enters
    x: float = 0.0
    y: float = 0.0
    column: int = 0

    def __post_init__(self) -> None:
        marks = sum(len(m) * SMALL * 0.61 + 14 for m in self.marks)
        self.width = max([self.lines[0].width + marks, *(line.width for line in self.lines[1:])]) + 2 * PAD
        self.height = max(len(self.lines) * LINE + PAD, PORT * (len(self.edges) + 1))


def make_boxes(diagram: Diagram) -> list[Placed]:
    """Return the boxes of a diagram with their text, in program order."""
    found = []
    for box in sorted(diagram.boxes.values(), key=lambda b: b.order):
        marks = []
        if box.site is not None and box.site.loops:
            marks.append("×" + "×".join(map(str, box.site.loops)))
        if box.site is not None and "cond" in box.site.context:
            marks.append("branch")
        edges = [e for e in diagram.edges if e.target == box.key]
        found.append(Placed(box, _lines(box), edges, marks))
    return found


def _lines(box: Box) -> list[Line]:
    if box.group is not None:
        prefix = _prefix(box.group.hidden_paths)
        name = f"{shorten(show_path(prefix), 30)} \N{MIDDLE DOT} " if prefix else ""
        states = [(h.path[len(prefix) :], f"{show_aval(h.invar.aval)} {h.unit}") for h in box.group.hidden]
        lines = [Line(f"{name}group {box.group.index}", style="title")]
        lines += _first(Line(shorten(show_path(path), 28), note.strip()) for path, note in states)
    elif box.kind in ("site", "plain"):
        lines = [Line(box.op if box.kind == "site" else "plain use", box.shape, "title")]
    else:
        lines = [Line(shorten(box.label, 24), style="title"), Line(box.shape)]
    style = "tag" if box.online else "quiet"
    largest = lambda avals: f"[{','.join(map(str, max(avals, key=lambda a: a.size).shape))}]"
    params = ((shorten(show_path(p), 28), largest(avals)) for p, avals in box.params.items())
    return lines + _first(Line(name, shape, style) for name, shape in params)


def _first(lines: Iterable[Line]) -> list[Line]:
    """Return the lines or, of many, the first and a line that counts the rest."""
    found = list(lines)
    if len(found) <= LONGEST:
        return found
    return [*found[: LONGEST - 1], Line(f"and {len(found) - LONGEST + 1} more", style="quiet")]


def _prefix(paths: list[Path]) -> Path:
    """Return the common prefix of the paths of a group's states."""
    common = paths[0][:-1]
    while any(common != path[: len(common)] for path in paths):
        common = common[:-1]
    return common
