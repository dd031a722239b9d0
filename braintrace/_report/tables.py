"""Tables as plain text, in colour in a terminal, and as HTML in a notebook."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from .._executor.memory import show_bytes as show_bytes
from .._online.request import WindowSize
from .markup import Markup, join, tag

LEAST = 12  # characters of the first column


@dataclass(frozen=True)
class Table:
    """A title, columns with names, rows of strings, and notes below; the first column is left-aligned."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def to_str(self, width: float = math.inf) -> str:
        """Return the table as text; if it is wider than `width`, cells are broken at spaces, header first."""
        rows = [list(self.columns), *map(list, self.rows)]
        for broken in (0, 1, len(rows)):  # rows whose cells are broken at spaces
            cells = [
                [name, *(c.replace(" ", "\n") if i < broken else c for c in rest)]
                for i, (name, *rest) in enumerate(rows)
            ]
            widths = [max(map(len, "\n".join(column).split("\n"))) for column in zip(*cells, strict=True)]
            left = width - sum(w + 2 for w in widths[1:])
            if left >= (LEAST if broken else widths[0]):
                break
        widths[0] = int(min(widths[0], max(left, LEAST)))

        def lines(name: str, *rest: str) -> str:
            split = [textwrap.wrap(name, widths[0]), *(c.split("\n") for c in rest)]
            found = zip_longest(*split, fillvalue="")
            align = lambda i, c: c.rjust(widths[i]) if i else c.ljust(widths[i])
            return "\n".join("  ".join(align(*cell) for cell in enumerate(line)).rstrip() for line in found)

        head, *body = (lines(*row) for row in cells)
        return "\n".join([self.title, head, "  ".join("-" * w for w in widths), *body, *self.notes])

    def show(self) -> None:
        """Print the table, as wide as the terminal."""
        from rich.console import Console

        console = Console(highlight=False)
        known = console.is_terminal or "COLUMNS" in os.environ
        title, _, rest = self.to_str(console.width if known else math.inf).partition("\n")
        console.print(title, style="bold", markup=False, soft_wrap=not known)
        console.print(rest, markup=False, soft_wrap=not known)

    def to_html(self) -> Markup:
        def row(kind: str, cells: Sequence[str]) -> Markup:
            side = ["left"] + ["right"] * (len(cells) - 1)
            style = (f"text-align:{s};padding:2px 8px" for s in side)
            return tag("tr", *(tag(kind, c, style=s) for c, s in zip(cells, style, strict=True)))

        head = tag("caption", self.title, style="text-align:left;font-weight:bold")
        body = tag("tbody", *(row("td", r) for r in self.rows))
        table = tag("table", head, tag("thead", row("th", self.columns)), body)
        return join(table, *(tag("p", n) for n in self.notes))


class Tabled:
    """Base class of results that are shown as a table."""

    @property
    def table(self) -> Table:
        raise NotImplementedError

    def show(self) -> None:
        """Print the table, in colour where there is a terminal."""
        self.table.show()

    def __str__(self) -> str:
        return self.table.to_str()

    def _repr_html_(self) -> str:
        return self.table.to_html()


def title_of(rule: str, window: WindowSize | None, rank: int | None) -> str:
    """
    >>> title_of("D_RTRL", 5, 4)
    'D_RTRL, windows of 5, rank 4'
    """
    windows = f", windows of {window or 1}" if window or rank else ""
    windows = ", longest windows" if window == "auto" else windows
    return rule + windows + (f", rank {rank}" if rank else "")


def show_count(number: float) -> str:
    """Abbreviate a large number: `3.1M`."""
    for suffix in ("", "k", "M", "G", "T"):
        if number < 1000 or suffix == "T":
            return f"{number:.3g}{suffix}"
        number /= 1000
    raise AssertionError


def number(count: int, noun: str) -> str:
    """
    >>> number(2, "group")
    '2 groups'
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def shorten(text: str, length: int) -> str:
    """
    >>> shorten("a.long.path.to.weight", 14)
    '…ath.to.weight'
    """
    return text if len(text) <= length else "…" + text[len(text) - length + 1 :]
