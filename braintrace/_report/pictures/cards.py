"""Boxes with their sizes, and cards: a hidden group together with the operations that feed it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..._compiler.step import Path, show_path
from ..._types import Aval
from ..tables import shorten
from .diagram import Box, Diagram, Edge, show_aval

TITLE, TEXT, SMALL = 12.0, 11.0, 10.0  # sizes of type, in pixels
LINE = 17.0
PAD = 9.0
LANE = 12.0


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
    """A box with its text, its size and its position within its card."""

    box: Box
    lines: list[Line]
    marks: list[str] = field(default_factory=list)
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0
    depth: int = 0

    def __post_init__(self) -> None:
        marks = sum(len(m) * SMALL * 0.61 + 14 for m in self.marks)
        self.width = max([self.lines[0].width + marks, *(line.width for line in self.lines[1:])]) + 2 * PAD
        self.height = len(self.lines) * LINE + PAD


@dataclass(eq=False)
class Card:
    """A unit of placement: a group with its sites, or a single box.

    `ports[key of an edge]` is the height at which an edge from elsewhere comes in.
    """

    placed: dict[str, Placed]
    title: str = ""
    edges: list[Edge] = field(default_factory=list)  # from elsewhere
    inner: list[Edge] = field(default_factory=list)
    ports: dict[tuple[str, str, bool], float] = field(default_factory=dict)
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0
    column: int = 0
    lane: float = 0.0  # inside, on the left: where the recurrence of the group runs
    stairs: bool = True  # whether sites that feed each other stand like stairs

    @property
    def order(self) -> int:
        return max(p.box.order for p in self.placed.values())

    @property
    def group(self) -> Placed | None:
        return next((p for p in self.placed.values() if p.box.kind == "group"), None)

    @property
    def exit(self) -> float:
        """The height at which edges leave, from the top of the card."""
        return self.last.y + self.last.height / 2

    @property
    def last(self) -> Placed:
        """The box that edges leave from."""
        return self.group or next(iter(self.placed.values()))


def make_cards(diagram: Diagram) -> list[Card]:
    """Assign the boxes of a diagram to cards, in program order, and arrange each card."""
    home = _homes(diagram)
    cards: dict[str, Card] = {}
    for key, box in diagram.boxes.items():
        cards.setdefault(home[key], Card({})).placed[key] = _place(box, _prefix(diagram.boxes[home[key]]))
    for edge in diagram.edges:
        card = cards[home[edge.target]]
        (card.inner if home[edge.source] == home[edge.target] else card.edges).append(edge)
    for card in cards.values():
        _arrange(card)
    return sorted(cards.values(), key=lambda c: c.order)


def _homes(diagram: Diagram) -> dict[str, str]:
    """Return the card of each box; a site that feeds only one group is in the card of that group."""
    home = {key: key for key in diagram.boxes}
    sites = sorted(diagram.of("site"), key=lambda b: -b.order)
    for box in sites:
        targets = {home[e.target] for e in diagram.edges if e.source == box.key}
        if len(targets) != 1:
            continue
        (target,) = targets
        reads_own = any(e.past and e.source == target and e.target == box.key for e in diagram.edges)
        if diagram.boxes[target].kind == "group" and (box.relation is not None or reads_own):
            home[box.key] = target
    return home


def _place(box: Box, prefix: Path) -> Placed:
    marks: list[str] = []
    if box.kind == "group":
        assert box.group is not None
        lines = [
            Line(_name(h.path, prefix), f"{show_aval(h.invar.aval)} {h.unit}".strip())
            for h in box.group.hidden
        ]
        if len(lines) > 6:
            lines = [*lines[:5], Line(f"and {len(lines) - 5} more", style="quiet")]
    elif box.kind == "site":
        assert box.site is not None
        lines = [Line(box.op, box.shape, "title")]
        if box.site.loops:
            marks.append("×" + "×".join(map(str, box.site.loops)))
        if "cond" in box.site.context:
            marks.append("branch")
    elif box.kind == "plain":
        lines = [Line("plain use", "", "title")]
    else:
        lines = [Line(shorten(box.label, 24), "", "title"), Line(box.shape, style="text")]
    style = "tag" if box.online else "quiet"
    params = [Line(_name(p, prefix), _largest(avals), style) for p, avals in box.params.items()]
    if len(params) > 4:
        params = [*params[:3], Line(f"and {len(params) - 3} more", style="quiet")]
    return Placed(box, lines + params, marks)


def _name(path: Path, prefix: Path) -> str:
    """Return a path without the prefix that is in the title of its card."""
    inside = path[: len(prefix)] == prefix
    return shorten(show_path(path[len(prefix) :] if inside else path), 28)


def _prefix(box: Box) -> Path:
    """Return the common prefix of the paths of a group's states."""
    if box.group is None:
        return ()
    first, *rest = box.group.hidden_paths
    common = first[:-1]
    for path in rest:
        while common != path[: len(common)]:
            common = common[:-1]
    return common


def _largest(avals: Sequence[Aval]) -> str:
    """Return the shape of the largest leaf of a parameter, as a short label."""
    return f"[{','.join(map(str, max(avals, key=lambda a: a.size).shape))}]"


def _arrange(card: Card) -> None:
    """Place sites below each other, later ones further right, and the group to the right of all."""
    group = card.group
    sites = [p for p in card.placed.values() if p is not group]
    if group is None:
        (only,) = sites
        card.width, card.height = only.width, only.height
        _distribute(card, [(e, only) for e in card.edges])
        return
    assert group.box.group is not None
    card.title = _title(group.box)
    inside = {p.box.key: p for p in sites}
    for p in sites:
        before = [inside[e.source] for e in card.inner if e.target == p.box.key and e.source in inside]
        p.depth = 1 + max((b.depth for b in before), default=-1)
    past = [e for e in card.inner if e.past]
    left = PAD + (LANE if past else 0)
    card.lane = PAD + 1
    rows = sorted(sites, key=lambda p: p.box.order)
    card.stairs = _are_stairs(card, rows)
    x, depth = left, 0
    while column := [p for p in sites if p.depth == depth]:
        for p in column:
            p.x, p.width = x, max(q.width for q in column)
        x, depth = x + (44 if card.stairs else column[0].width + 28), depth + 1
    x = max((p.x + p.width for p in sites), default=left) + 28
    y = 24.0
    for p in rows:
        p.y, y = y, y + p.height + 8
    wires = [e for e in card.edges if e.target == group.box.key]
    for e in wires:  # straight to the group: a free row for each
        card.ports[e.source, e.target, e.past] = y + 5
        y += 12
    bottom = max(y - 8 if sites else y, 24 + group.height)
    group.x = x + 4 if sites or wires else left
    group.y = 24 + (bottom - 24 - group.height) / 2
    card.width = group.x + group.width + PAD
    card.height = bottom + (LANE + 4 if past else PAD)
    _distribute(card, [(e, inside[e.target]) for e in (*card.edges, *past) if e.target in inside])


def _are_stairs(card: Card, rows: list[Placed]) -> bool:
    """Return whether edges between sites can go down and right without crossing a box."""
    number = {p.box.key: i for i, p in enumerate(rows)}
    for e in card.inner:
        if e.source in number and e.target in number:
            between = rows[number[e.source] + 1 : number[e.target]]
            if any(p.depth <= rows[number[e.source]].depth for p in between):
                return False
    return True


def _distribute(card: Card, incoming: list[tuple[Edge, Placed]]) -> None:
    """Distribute the incoming edges over the left side of their boxes."""
    for placed in card.placed.values():
        own = [e for e, p in incoming if p is placed]
        own.sort(key=lambda e: e.past and e.source in card.placed)
        for i, e in enumerate(own):
            card.ports[e.source, e.target, e.past] = placed.y + placed.height * (i + 1) / (len(own) + 1)


def _title(box: Box) -> str:
    assert box.group is not None
    name, number = show_path(_prefix(box)), f"group {box.group.index}"
    return f"{shorten(name, 30)} \N{MIDDLE DOT} {number}" if name else number
