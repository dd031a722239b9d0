"""Cards in columns and bands, and edges on tracks between them.

A card stands one column to the right of the last card that feeds it; a band of columns that is full goes on
in the next band below, like a line of text. Edges run only where no card is: in the gutters between
columns, the channels between bands and the margin on the left. All edges of one source share its tracks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .cards import Card
from .diagram import Edge

Point = tuple[float, float]
Net = tuple[str, bool]  # the source of edges, and whether they come from the step before

MAX_WIDTH = 1560.0
GAP = 22.0  # between cards of a column
TRACK = 8.0
EDGE = 14.0  # from the side of a card to the first track


@dataclass(eq=False)
class Passage:
    """A gutter, a channel or the margin: one track for each net that runs along it."""

    nets: dict[Net, float] = field(default_factory=dict)  # and what orders them
    start: float = 0.0

    def use(self, net: Net, rank: float) -> None:
        self.nets.setdefault(net, rank)

    @property
    def size(self) -> float:
        return 2 * EDGE + TRACK * max(len(self.nets) - 1, 0)

    def at(self, net: Net) -> float:
        ordered = sorted(self.nets, key=lambda n: (self.nets[n], n))
        return self.start + EDGE + TRACK * ordered.index(net)


@dataclass(frozen=True, eq=False)
class Placement:
    """Where every card is, and the corners of every edge between cards."""

    cards: list[Card]
    routes: dict[Edge, list[Point]]
    width: float
    height: float


def place_cards(cards: list[Card]) -> Placement:
    """Place cards and route the edges between them."""
    home = {key: card for card in cards for key in card.placed}
    _columns(cards, home)
    columns = [[c for c in cards if c.column == i] for i in range(1 + max(c.column for c in cards))]
    for column in columns:
        for card in column:
            _widen(card, max(c.width for c in column))
    for _ in range(3):
        _order(columns, home)
    bands = _bands(columns)
    band_of = {i: b for b, band in enumerate(bands) for i in band}
    router = _Router(columns, bands, band_of, home)
    for card in cards:
        for edge in card.edges:
            router.plan(edge)
    router.place()
    routes = {edge: router.route(edge) for card in cards for edge in card.edges}
    return Placement(cards, routes, router.width, router.height)


def _columns(cards: list[Card], home: dict[str, Card]) -> None:
    number = {id(c): i for i, c in enumerate(cards)}
    feeds: dict[int, list[Card]] = {}
    for card in cards:
        card.column = 0 if card.last.box.kind == "input" else 1
        for edge in card.edges:
            source = home[edge.source]
            if not edge.past and number[id(source)] < number[id(card)]:
                card.column = max(card.column, source.column + 1)
                feeds.setdefault(id(source), []).append(card)
    for card in cards:
        fed = any(not e.past for e in card.edges)
        if id(card) in feeds and not fed and card.group is None:
            card.column = min(c.column for c in feeds[id(card)]) - 1
    used = sorted({c.column for c in cards})
    for card in cards:
        card.column = used.index(card.column)


def _widen(card: Card, width: float) -> None:
    """Give a card the width of its column; a group or an input moves to the right."""
    if card.group is not None or card.last.box.kind == "input":
        card.last.x += width - card.width
    card.width = width


def _order(columns: list[list[Card]], home: dict[str, Card]) -> None:
    """Sort each column by the mean position of the cards that a card is connected to."""
    rank = {id(c): (i + 0.5) / len(column) for column in columns for i, c in enumerate(column)}
    ties: dict[int, list[int]] = {}
    for column in columns:
        for card in column:
            for edge in card.edges:
                source = home[edge.source]
                if not edge.past and len(columns[source.column]) > 1:
                    ties.setdefault(id(card), []).append(id(source))
                if not edge.past and len(column) > 1:
                    ties.setdefault(id(source), []).append(id(card))
    for column in columns:

        def middle(card: Card) -> float:
            near = [rank[i] for i in ties.get(id(card), [])]
            return sum(near) / len(near) if near else rank[id(card)]

        column.sort(key=lambda c: (round(middle(c), 6), c.order))
        rank.update({id(c): (i + 0.5) / len(column) for i, c in enumerate(column)})


def _bands(columns: list[list[Card]]) -> list[list[int]]:
    """Split the columns into bands of about equal width."""
    widths = [column[0].width + 2 * EDGE + 10 for column in columns]
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

    def __init__(
        self,
        columns: list[list[Card]],
        bands: list[list[int]],
        band_of: dict[int, int],
        home: dict[str, Card],
    ) -> None:
        self.columns, self.bands, self.band_of, self.home = columns, bands, band_of, home
        self.before = [Passage() for _ in columns]  # the gutter to the left of each column
        self.end = [Passage() for _ in bands]  # that to the right of each band
        self.channels = [Passage() for _ in range(len(bands) + 1)]
        self.margin = Passage()
        self.loops: set[int] = set()  # cards with an edge that goes round them
        self.width = self.height = 0.0

    def after(self, column: int) -> Passage:
        """The gutter to the right of a column."""
        band = self.band_of[column]
        return self.end[band] if column == self.bands[band][-1] else self.before[column + 1]

    def way(self, edge: Edge) -> tuple[str, list[Passage]]:
        """Return the kind of a route: to the 'next' column, 'round' its own card, or through channels."""
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
        rows = self.columns[source.column]
        rank = (-1.0 if edge.past else 1.0) * (rows.index(source) + 1)
        if kind == "round":
            self.loops.add(id(source))
        else:
            self.after(source.column).use(net, -rank if kind == "channel" else rank)
        if kind != "next":
            self.before[target.column].use(net, rank)
        for channel in channels:
            channel.use(net, -rank)
        if len(channels) > 1:
            self.margin.use(net, rank)

    def place(self) -> None:
        left = self.margin.size if self.margin.nets else 8.0
        self.margin.start = 0.0
        y = 4.0
        for band, indices in enumerate(self.bands):
            channel = self.channels[band]
            channel.start = y
            y += channel.size if channel.nets else 8.0
            x = left
            for i in indices:
                gutter = self.before[i]
                gutter.start = x
                x += gutter.size if gutter.nets or i != indices[0] else 0.0
                for card in self.columns[i]:
                    card.x = x
                x += self.columns[i][0].width
                if any(id(c) in self.loops for c in self.columns[i]):
                    x += TRACK
            self.end[band].start = x
            self.width = max(self.width, x + (self.end[band].size if self.end[band].nets else 8.0))
            y += self.stack(indices, y)
        self.channels[-1].start = y
        self.height = y + (self.channels[-1].size if self.channels[-1].nets else 8.0)

    def stack(self, indices: list[int], top: float) -> float:
        """Set the heights within a band, each column so that its edges come in straight."""
        for i in indices:
            y = 0.0
            for card in self.columns[i]:
                card.y, y = y, y + card.height + GAP
            near = [
                self.home[e.source].y
                + self.home[e.source].exit
                - card.y
                - card.ports[e.source, e.target, e.past]
                for card in self.columns[i]
                for e in card.edges
                if not e.past and self.home[e.source].column in indices and self.home[e.source].column < i
            ]
            shift = sum(near) / len(near) if near else 0.0
            tops = [self.columns[j][0].y for j in indices if j < i and self.columns[j][0].group]
            closest = min(tops, key=lambda t: abs(t - shift), default=shift)
            if self.columns[i][0].group and abs(closest - shift) < 24:
                shift = closest  # a row of cards looks better in line
            for card in self.columns[i]:
                card.y += shift
        cards = [c for i in indices for c in self.columns[i]]
        shift = top - min(c.y for c in cards)
        for card in cards:
            card.y += shift
        return max(c.y + c.height + (GAP if id(c) in self.loops else 6) for c in cards) - top

    def route(self, edge: Edge) -> list[Point]:
        net = edge.source, edge.past
        source, target = self.home[edge.source], self.home[edge.target]
        kind, channels = self.way(edge)
        y0 = source.y + source.exit
        x0 = source.x + source.last.x + source.last.width
        y1 = target.y + target.ports[edge.source, edge.target, edge.past]
        x1 = target.x + target.placed[edge.target].x
        if kind == "round":
            lane, low = self.before[target.column].at(net), source.y + source.height + GAP / 2
            right = source.x + source.width + TRACK
            return [(x0, y0), (right, y0), (right, low), (lane, low), (lane, y1), (x1, y1)]
        out = self.after(source.column).at(net)
        if kind == "next":
            return [(x0, y0), (out, y0), (out, y1), (x1, y1)]
        lane = self.before[target.column].at(net)
        points = [(x0, y0), (out, y0), (out, channels[0].at(net))]
        if len(channels) > 1:
            left = self.margin.at(net)
            points += [(left, channels[0].at(net)), (left, channels[1].at(net))]
        return [*points, (lane, channels[-1].at(net)), (lane, y1), (x1, y1)]
