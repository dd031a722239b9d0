"""Drawings of lines, circles and text, written as SVG or with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .._report.markup import Markup, svg, tag, write
from .._types import Options

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#475569"
Point = tuple[float, float]
Marks = dict[float, str]  # labels by their place in pixels
Area = tuple[float, float, float, float]  # left, top, right and bottom of the axes of a panel


@dataclass(frozen=True)
class Drawing:
    """Lines, circles and text, in pixels from the upper left corner: SVG elements and matplotlib calls."""

    label: str
    width: float
    height: float
    elements: list[Markup] = field(default_factory=list)
    plots: list[Callable[[Axes], object]] = field(default_factory=list)  # functions of matplotlib axes

    def line(
        self,
        points: Sequence[Point],
        color: str = "",
        width: float = 1.0,
        opacity: float = 1.0,
        dashed: bool = False,
    ) -> None:
        """Add a line through points."""
        shown = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        stroke = {"stroke": color or "currentColor", "stroke_width": width, "stroke_opacity": opacity}
        stroke["stroke_dasharray"] = "5 4" if dashed else None
        self.elements.append(tag("polyline", points=shown, fill="none", **stroke))
        x, y = zip(*points, strict=True) if points else ((), ())
        style: Options = {"color": color or INK, "linewidth": width, "alpha": opacity}
        self.plots.append(lambda axes: axes.plot(x, y, "--" if dashed else "-", **style))

    def circle(self, x: float, y: float, r: float, color: str, fill: bool = True, title: str = "") -> None:
        """Add a disc, or a ring, with a tooltip."""
        face = color if fill else "none"
        style = {"fill": face, "stroke": color, "stroke_width": 1.4}
        self.elements.append(tag("circle", tag("title", title), cx=f"{x:.1f}", cy=f"{y:.1f}", r=r, **style))
        marker: Options = {"markersize": 2 * r, "markerfacecolor": face, "markeredgecolor": color}
        self.plots.append(lambda axes: axes.plot([x], [y], "o", **marker))

    def text(
        self,
        x: float,
        y: float,
        words: str,
        anchor: str = "start",
        color: str = "",
        size: float = 11,
        bold: bool = False,
        turned: bool = False,
    ) -> None:
        """Add text that starts at, is centred on or ends at a point."""
        style = {"text_anchor": anchor, "fill": color or "currentColor", "font_size": size}
        style["font_weight"] = 600 if bold else None
        style["transform"] = f"rotate(-90 {x:.1f} {y:.1f})" if turned else None
        self.elements.append(tag("text", words, x=f"{x:.1f}", y=f"{y:.1f}", **style))
        plain, side = words.replace("$", r"\$"), {"start": "left", "middle": "center", "end": "right"}[anchor]
        font: Options = {"fontsize": size * 0.92, "weight": "bold" if bold else "normal"}  # wider than in SVG
        font |= {"ha": side, "color": color or INK, "rotation": 90 * turned, "rotation_mode": "anchor"}
        self.plots.append(lambda axes: axes.text(x, y, plain, **font))

    def to_svg(self, *, in_page: bool = False) -> Markup:
        """Return SVG on white or, for a page, without a background and in the colour of the page's text."""
        back = [] if in_page else [tag("rect", width=self.width, height=self.height, fill="white")]
        font = {"font_family": "system-ui, sans-serif", "font_size": 11, "color": None if in_page else INK}
        return svg(self.label, self.width, self.height, *back, *self.elements, **font)

    def save(self, path: str | Path) -> None:
        """Write a file; its suffix is the format."""
        path = Path(path)
        if path.suffix == ".svg":
            write(path, f"{self.to_svg()}\n")
            return
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                f"To write {path.name} install matplotlib (`pip install 'braintrace[plot]'`), or an .svg."
            ) from error
        path.parent.mkdir(parents=True, exist_ok=True)
        figure = Figure(figsize=(self.width / 72, self.height / 72))  # a point is a pixel
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, self.width), ylim=(self.height, 0))
        axes.axis("off")
        for plot in self.plots:
            plot(axes)
        figure.savefig(path, dpi=150)


def draw_axes(drawing: Drawing, area: Area, title: str, below: str, x: Marks, y: Marks) -> None:
    """Draw the title and the scales of a panel: labels below, and lines across."""
    left, top, right, bottom = area
    drawing.text(left, top - 16, title, size=14, bold=True)
    for at, words in y.items():
        drawing.line([(left, at), (right, at)], opacity=0.15)
        drawing.text(left - 8, at + 4, words, anchor="end")
    for at, words in x.items():
        drawing.text(at, bottom + 17, words, anchor="middle")
    drawing.text((left + right) / 2, bottom + 34, below, anchor="middle")


def scale(first: float, last: float, low: float, high: float) -> Callable[[float], float]:
    """Return the linear map from `low` to `first` and from `high` to `last`."""
    return lambda value: first + (last - first) * (value - low) / ((high - low) or 1)


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers in a range."""
    if high <= low:
        return [low]
    rough = (high - low) / 5
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]
