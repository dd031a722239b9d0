"""A small table for people: plain text, colours in a terminal, HTML in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .markup import Markup, join, tag


@dataclass(frozen=True)
class Table:
    """A title, named columns and rows of words, and sentences below; the first column is a name."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def to_str(self) -> str:
        cells = [list(self.columns), *map(list, self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]

        def line(row: Sequence[str]) -> str:
            first, *rest = (
                c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
            )
            return "  ".join([first, *rest]).rstrip()

        rule = "  ".join("-" * w for w in widths)
        return "\n".join([self.title, line(self.columns), rule, *map(line, self.rows), *self.notes])

    def show(self) -> None:
        """Print it, in colour where there is a terminal."""
        from rich.console import Console
        from rich.table import Table as Rich

        console = Console()
        if not console.is_terminal:
            print(self.to_str())
            return
        table = Rich(title=self.title, title_justify="left", title_style="bold")
        for i, name in enumerate(self.columns):
            table.add_column(name, justify="right" if i else "left", style=None if i else "cyan")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for note in self.notes:
            console.print(note, markup=False, highlight=False)

    def to_html(self) -> Markup:
        def row(kind: str, cells: Sequence[str]) -> Markup:
            side = ["left"] + ["right"] * (len(cells) - 1)
            style = (f"text-align:{s};padding:2px 8px" for s in side)
            return tag("tr", *(tag(kind, c, style=s) for c, s in zip(cells, style, strict=True)))

        head = tag("caption", self.title, style="text-align:left;font-weight:bold")
        body = tag("tbody", *(row("td", r) for r in self.rows))
        table = tag("table", head, tag("thead", row("th", self.columns)), body)
        return join(table, *(tag("p", n) for n in self.notes))


def show_bytes(count: float) -> str:
    """
    >>> show_bytes(1536)
    '1.5 KiB'
    """
    size, units = float(count), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:.0f} {unit}" if size >= 100 or size == int(size) else f"{size:.1f} {unit}"


def show_count(number: float) -> str:
    """A large number with a letter: `3.1M`."""
    for letter in ("", "k", "M", "G", "T"):
        if number < 1000 or letter == "T":
            return f"{number:.3g}{letter}"
        number /= 1000
    raise AssertionError


def number(count: int, noun: str) -> str:
    """
    >>> number(2, "group")
    '2 groups'
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"
