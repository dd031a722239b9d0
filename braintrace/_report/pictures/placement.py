"""Boxes in columns and bands, and edges on tracks between them.

A box stands one column to the right of the last box that feeds it; a band of columns that is full goes on
in the next band below, like a line of text. Edges run only where no box is: in the gutters between
columns, the channels between bands and the margin on the left. All edges of one source share its tracks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .boxes import Placed
from .diagram import Edge

Point = tuple[float, float]
Net = tuple[str, bool]  # the source of edges, and whether they come from the step before

MAX_WIDTH = 1560.0
GAP = 22.0  # between boxes of a column
TRACK = 8.0
EDGE = 14.0  # from the side of a box to the first track


@dataclass(eq=False)
class Passage:
    """A gutter, a channel or the margin: one track for each net that runs along it."""

    nets: dict[Net, float] = field(default_factory=dict)  # and what orders them
    start: float = 0.0

    def use(self, net: Net, rank: float) -> None:
        self.nets.setdefault(net, rank)

    def size(self, empty: float = 8.0) -> float:
        return 2 * EDGE + TRACK * (len(self.nets) - 1) if self.nets else empty

    def at(self, net: Net) -> float:
        ordered = sorted(self.nets, key=lambda n: (self.nets[n], n))
        return self.start + EDGE + TRACK * ordered.index(net)


@dataclass(frozen=True, eq=False)
class Placement:
    """Where every box is, and the corners of every edge."""

    boxes: list[Placed]
    routes: dict[Edge, list[Point]]
    width: float
    height: float


def place_boxes(boxes: list[Placed]) -> Placement:
    """Place boxes and route the edges between them."""
    home = {p.box.key: p for p in boxes}
    _set_columns(boxes, home)
    columns = [[p for p in boxes if p.column == i] for i in range(1 + max(p.column for p in boxes))]
    for _ in range(3):
        _order(columns, home)
    for placed in boxes:
        source = lambda e: home[e.source]
        placed.edges.sort(
            key=lambda e: (e.past, source(e).column, columns[source(e).column].index(source(e)))
        )
        step = placed.height / (len(placed.edges) + 1)
        placed.ports = {e: step * i for i, e in enumerate(placed.edges, 1)}
    router = _Router(columns, _bands(columns), home)
    edges = [edge for placed in boxes for edge in placed.edges]
    for edge in edges:
        router.plan(edge)
    router.place()
    return Placement(boxes, {edge: router.route(edge) for edge in edges}, router.width, router.height)


def _set_columns(boxes: list[Placed], home: dict[str, Placed]) -> None:
    number = {p.box.key: i for i, p in enumerate(boxes)}
    feeds: dict[str, list[Placed]] = {}
    for placed in boxes:
        placed.column = 0 if placed.box.kind == "input" else 1
        for edge in placed.edges:
            if not edge.past and number[edge.source] < number[placed.box.key]:
                placed.column = max(placed.column, home[edge.source].column + 1)
                feeds.setdefault(edge.source, []).append(placed)
    for placed in boxes:
        if placed.box.key in feeds and all(e.past for e in placed.edges):
            placed.column = min(p.column for p in feeds[placed.box.key]) - 1
    used = sorted({p.column for p in boxes})
    for placed in boxes:
        placed.column = used.index(placed.column)


def _order(columns: list[list[Placed]], home: dict[str, Placed]) -> None:
    """Sort each column by the mean position of the boxes that a box is connected to."""
    rank = {p.box.key: (i + 0.5) / len(column) for column in columns for i, p in enumerate(column)}
    ties: dict[str, list[str]] = {}
    for edge in (e for placed in home.values() for e in placed.edges if not e.past):
        for one, other in ((edge.source, edge.target), (edge.target, edge.source)):
            if len(columns[home[other].column]) > 1:
                ties.setdefault(one, []).append(other)
    for column in columns:

        def middle(placed: Placed) -> float:
            near = [rank[key] for key in ties.get(placed.box.key, [placed.box.key])]
            return round(sum(near) / len(near), 6)

        column.sort(key=lambda p: (middle(p), p.box.order))
        rank.update({p.box.key: (i + 0.5) / len(column) for i, p in enumerate(column)})


def _bands(columns: list[list[Placed]]) -> list[list[int]]:
    """Split the columns into bands of about equal width."""
    widths = [max(p.width for p in column) + 2 * EDGE + 10 for column in columns]
    count = max(1, -(-int(sum(widths)) // int(MAX_WIDTH)))
    target = max(sum(widths) / count, max(widths))
    bands: list[list[int]] = [[]]
    filled = 0.0
    for i, width in enumerate(widths):
        full = filled + width > MAX_WIDTH or (filled + width / 2 > target and len(widths) - i > 1)
        if bands[-1] and full:
            bands.append([])
            filled = 0.0
        bands[-1].append(i)
        filled += width
    return bands


class _Router:
    """Chooses the passages of each edge; then, with all sizes known, its corners."""

    def __init__(self, columns: list[list[Placed]], bands: list[list[int]], home: dict[str, Placed]) -> None:
        self.columns, self.bands, self.home = columns, bands, home
        self.band_of = {i: b for b, band in enumerate(bands) for i in band}
        self.before = [Passage() for _ in columns]  # the gutter to the left of each column
        self.end = [Passage() for _ in bands]  # that to the right of each band
        self.channels = [Passage() for _ in range(len(bands) + 1)]
        self.margin = Passage()
        self.width = self.height = 0.0

    def after(self, column: int) -> Passage:
        """The gutter to the right of a column."""
        band = self.band_of[column]
        return self.end[band] if column == self.bands[band][-1] else self.before[column + 1]

    def way(self, edge: Edge) -> tuple[str, list[Passage]]:
        """Return the kind of a route: to the 'next' column, 'round' its own box, or through channels."""
        source, target = self.home[edge.source], self.home[edge.target]
        b, c = self.band_of[source.column], self.band_of[target.column]
        if b == c and target.column == source.column + 1:
            return "next", []
        if target.column == source.column:
            return "round", []
        if b == c:
            return "channel", [self.channels[b if target.column > source.column else b + 1]]
        leave, arrive = (b + 1, c) if c > b else (b, c + 1)
        return "channel", [self.channels[i] for i in dict.fromkeys((leave, arrive))]

    def plan(self, edge: Edge) -> None:
        net = edge.source, edge.past
        source, target = self.home[edge.source], self.home[edge.target]
        kind, channels = self.way(edge)
        rank = (-1.0 if edge.past else 1.0) * (self.columns[source.column].index(source) + 1)
        if kind != "round":
            self.after(source.column).use(net, -rank if kind == "channel" else rank)
        if kind != "next":
            self.before[target.column].use(net, rank)
        for channel in channels:
            channel.use(net, -rank)
        if len(channels) > 1:
            self.margin.use(net, rank)

    def place(self) -> None:
        y = 4.0
        for band, indices in enumerate(self.bands):
            self.channels[band].start = y
            y += self.channels[band].size()
            x = self.margin.size()
            for i in indices:
                self.before[i].start = x
                x += self.before[i].size(0.0 if i == indices[0] else 2 * EDGE - TRACK)
                for placed in self.columns[i]:
                    placed.x = x
                x += max(p.width for p in self.columns[i]) + TRACK
            self.end[band].start = x
            self.width = max(self.width, x + self.end[band].size())
            y += self.stack(indices, y)
        self.channels[-1].start = y
        self.height = y + self.channels[-1].size()

    def stack(self, indices: list[int], top: float) -> float:
        """Set the heights within a band, each column so that its edges come in straight."""
        for i in indices:
            y = 0.0
            for placed in self.columns[i]:
                placed.y, y = y, y + placed.height + GAP
            near = [
                source.y + source.height / 2 - placed.y - placed.ports[e]
                for placed in self.columns[i]
                for e in placed.edges
                if not e.past and (source := self.home[e.source]).column in range(indices[0], i)
            ]
            for placed in self.columns[i]:
                placed.y += sum(near) / max(len(near), 1)
        placed_here = [p for i in indices for p in self.columns[i]]
        shift = top - min(p.y for p in placed_here)
        for placed in placed_here:
            placed.y += shift
        return max(p.y + p.height + GAP for p in placed_here) - top

    def route(self, edge: Edge) -> list[Point]:
        net = edge.source, edge.past
        source, target = self.home[edge.source], self.home[edge.target]
        kind, channels = self.way(edge)
        x0, y0 = source.x + source.width, source.y + source.height * (0.75 if edge.past else 0.5)
        x1, y1 = target.x, target.y + target.ports[edge]
        lane = self.before[target.column]
        if kind == "round":
            right, low = x0 + TRACK, source.y + source.height + GAP / 2
            at = lane.at(net)
            return [(x0, y0), (right, y0), (right, low), (at, low), (at, y1), (x1, y1)]
        out = self.after(source.column).at(net)
        if kind == "next":
            return [(x0, y0), (out, y0), (out, y1), (x1, y1)]
        points = [(x0, y0), (out, y0), (out, channels[0].at(net))]
        if len(channels) > 1:
            left = self.margin.at(net)
            points += [(left, channels[0].at(net)), (left, channels[1].at(net))]
        return [*points, (lane.at(net), channels[-1].at(net)), (lane.at(net), y1), (x1, y1)]
