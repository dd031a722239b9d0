"""Pictures as lists of lines, circles and words, which become SVG, or a file of matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._report.markup import Markup, tag

INK = "#475569"
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A line through points."""

    points: Sequence[Point]
    color: str = ""
    width: float = 1.0
    opacity: float = 1.0
    dashed: bool = False

    def to_svg(self, ink: str) -> Markup:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points)
        stroke = {"stroke": self.color or ink, "stroke_width": self.width, "stroke_opacity": self.opacity}
        dashes = "5 4" if self.dashed else None
        return tag("polyline", points=points, fill="none", **stroke, stroke_dasharray=dashes)

    def plot(self, axes: Any) -> None:
        x, y = zip(*self.points, strict=True) if self.points else ((), ())
        style = {"color": self.color or INK, "linewidth": self.width, "alpha": self.opacity}
        axes.plot(x, y, "--" if self.dashed else "-", **style)


@dataclass(frozen=True)
class Circle:
    """A disc, or a ring, with a title for those who point at it."""

    x: float
    y: float
    r: float
    color: str
    fill: bool = True
    title: str = ""

    def to_svg(self, ink: str) -> Markup:
        style = {"fill": self.color if self.fill else "none", "stroke": self.color, "stroke_width": 1.4}
        return tag(
            "circle", tag("title", self.title), cx=f"{self.x:.1f}", cy=f"{self.y:.1f}", r=self.r, **style
        )

    def plot(self, axes: Any) -> None:
        face = self.color if self.fill else "none"
        style = {"markersize": 2 * self.r, "markerfacecolor": face, "markeredgecolor": self.color}
        axes.plot([self.x], [self.y], "o", **style)


@dataclass(frozen=True)
class Text:
    """Words, from, around or up to a point."""

    x: float
    y: float
    words: str
    anchor: str = "start"
    color: str = ""
    size: float = 11
    bold: bool = False
    turned: bool = False

    def to_svg(self, ink: str) -> Markup:
        style = {"text_anchor": self.anchor, "fill": self.color or ink, "font_size": self.size}
        style |= {"font_weight": 600 if self.bold else None}
        style |= {"transform": f"rotate(-90 {self.x:.1f} {self.y:.1f})" if self.turned else None}
        return tag("text", self.words, x=f"{self.x:.1f}", y=f"{self.y:.1f}", **style)

    def plot(self, axes: Any) -> None:
        side = {"start": "left", "middle": "center", "end": "right"}[self.anchor]
        turn = {"rotation": 90 if self.turned else 0, "rotation_mode": "anchor"}
        font = {"fontsize": self.size * 0.92, "fontweight": "bold" if self.bold else "normal"}  # it is wide
        words = self.words.replace("$", r"\$")
        axes.text(self.x, self.y, words, ha=side, va="baseline", color=self.color or INK, **turn, **font)


@dataclass(frozen=True)
class Drawing:
    """Lines, circles and words, in pixels from the upper left corner."""

    label: str
    width: float
    height: float
    items: list[Line | Circle | Text] = field(default_factory=list)

    def line(self, *args: Any, **style: Any) -> None:
        self.items.append(Line(*args, **style))

    def circle(self, *args: Any, **style: Any) -> None:
        self.items.append(Circle(*args, **style))

    def text(self, *args: Any, **style: Any) -> None:
        self.items.append(Text(*args, **style))

    def to_svg(self, *, in_page: bool = False) -> Markup:
        """The picture on white; for a page, without a background and in the colour of the text around it."""
        ink = "currentColor" if in_page else INK
        size = {"width": self.width, "height": self.height}
        parts = [] if in_page else [tag("rect", **size, fill="white")]
        font = {"font_family": "system-ui, sans-serif", "font_size": 11}
        box = {"viewBox": f"0 0 {self.width:g} {self.height:g}", "role": "img", "aria_label": self.label}
        parts += [item.to_svg(ink) for item in self.items]
        return tag("svg", *parts, xmlns="http://www.w3.org/2000/svg", **box, **size, **font)

    def save(self, path: Path) -> None:
        """Write it; the format is that of the file's name."""
        if path.suffix == ".svg":
            path.write_text(f"{self.to_svg()}\n", encoding="utf-8")
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
        for item in self.items:
            item.plot(axes)
        figure.savefig(path, dpi=150)


def scale(first: float, last: float, low: float, high: float) -> Callable[[float], float]:
    """The linear map of `low` to `first` and `high` to `last`."""
    return lambda value: first + (last - first) * (value - low) / ((high - low) or 1)


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers in a range."""
    if high <= low:
        return [low]
    rough = (high - low) / 5
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]
