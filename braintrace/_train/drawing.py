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


@dataclass
class Drawing:
    """Lines, circles and words, in pixels from the upper left corner."""

    label: str
    width: float
    height: float
    items: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def line(self, points: Sequence[Point], color: str = "", width: float = 1.0, **style: Any) -> None:
        self.items.append(("line", {"points": points, "color": color, "width": width, **style}))

    def circle(self, x: float, y: float, r: float, color: str, **style: Any) -> None:
        self.items.append(("circle", {"x": x, "y": y, "r": r, "color": color, **style}))

    def text(self, x: float, y: float, words: str, **style: Any) -> None:
        self.items.append(("text", {"x": x, "y": y, "words": words, **style}))

    def to_svg(self, *, in_page: bool = False) -> Markup:
        """The picture on white; for a page, without a background and in the colour of the text around it."""
        ink = "currentColor" if in_page else INK
        size = {"width": self.width, "height": self.height}
        parts = [] if in_page else [tag("rect", **size, fill="white")]
        parts += [_SVG[kind](ink, **item) for kind, item in self.items]
        font = {"font_family": "system-ui, sans-serif", "font_size": 11}
        box = {"viewBox": f"0 0 {self.width:g} {self.height:g}", "role": "img", "aria_label": self.label}
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
        for kind, item in self.items:
            _MATPLOTLIB[kind](axes, **item)
        figure.savefig(path, dpi=150)


def _svg_line(
    ink: str, points: Sequence[Point], color: str, width: float, opacity: float = 1, dashed: bool = False
) -> Markup:
    shown = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    stroke = {"stroke": color or ink, "stroke_width": width, "stroke_opacity": opacity}
    return tag("polyline", points=shown, fill="none", **stroke, stroke_dasharray="5 4" if dashed else None)


def _svg_circle(
    ink: str, x: float, y: float, r: float, color: str, fill: bool = True, title: str = ""
) -> Markup:
    style = {"fill": color if fill else "none", "stroke": color, "stroke_width": 1.4}
    return tag(
        "circle", *([tag("title", title)] if title else []), cx=f"{x:.1f}", cy=f"{y:.1f}", r=r, **style
    )


def _svg_text(
    ink: str,
    x: float,
    y: float,
    words: str,
    anchor: str = "start",
    color: str = "",
    size: float = 11,
    bold: bool = False,
    turned: bool = False,
) -> Markup:
    style = {"text_anchor": anchor, "fill": color or ink, "font_size": size}
    style |= {"font_weight": 600} if bold else {}
    style |= {"transform": f"rotate(-90 {x:.1f} {y:.1f})"} if turned else {}
    return tag("text", words, x=f"{x:.1f}", y=f"{y:.1f}", **style)


_SVG: dict[str, Callable[..., Markup]] = {"line": _svg_line, "circle": _svg_circle, "text": _svg_text}


def _plot_line(
    axes: Any, points: Any, color: str, width: float, opacity: float = 1, dashed: bool = False
) -> None:
    x, y = zip(*points, strict=True) if points else ((), ())
    axes.plot(x, y, "--" if dashed else "-", color=color or INK, linewidth=width, alpha=opacity)


def _plot_circle(
    axes: Any, x: float, y: float, r: float, color: str, fill: bool = True, title: str = ""
) -> None:
    face = color if fill else "none"
    axes.plot([x], [y], "o", markersize=2 * r, markerfacecolor=face, markeredgecolor=color)


def _plot_text(axes: Any, x: float, y: float, words: str, **style: Any) -> None:
    axes.text(
        x,
        y,
        words.replace("$", r"\$"),
        ha={"start": "left", "middle": "center", "end": "right"}[style.get("anchor", "start")],
        va="baseline",
        rotation=90 if style.get("turned") else 0,
        rotation_mode="anchor",
        color=style.get("color") or INK,
        fontsize=style.get("size", 11) * 0.92,  # its own font is wider than those of browsers
        fontweight="bold" if style.get("bold") else "normal",
    )


_MATPLOTLIB: dict[str, Callable[..., None]] = {"line": _plot_line, "circle": _plot_circle, "text": _plot_text}


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
