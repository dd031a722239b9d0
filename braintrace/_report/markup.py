"""Elements of HTML and SVG. All text that enters a page or a drawing is escaped here."""

from __future__ import annotations

from html import escape
from os import PathLike
from pathlib import Path
from string import Template


class Markup(str):
    """A string of HTML or SVG, which is not escaped again."""


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """Return an element; attributes, and children that are not `Markup`, are escaped.

    An attribute that is None is omitted; underscores in names become hyphens, the last one is dropped.

    >>> tag("td", "a < b ", tag("b", "c"), class_="n", font_size=None)
    '<td class="n">a &lt; b <b>c</b></td>'
    """
    given = {k.rstrip("_").replace("_", "-"): escape(str(v)) for k, v in attributes.items() if v is not None}
    named = "".join(f' {k}="{v}"' for k, v in given.items())
    return Markup(f"<{name}{named}>{join(*children)}</{name}>")


def join(*parts: object) -> Markup:
    """Concatenate parts; those that are not `Markup` are escaped."""
    return Markup("".join(p if isinstance(p, Markup) else escape(str(p)) for p in parts))


def fill(template: Path, **parts: str) -> str:
    """Return a page: a template file with these parts."""
    return Template(template.read_text(encoding="utf-8")).substitute(parts)


def write(path: str | PathLike[str], text: str) -> Path:
    """Write a file, in a folder that may be new."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def svg(label: str, width: float, height: float, *parts: Markup, **attributes: object) -> Markup:
    """Return an SVG document of this size in pixels, with a label for screen readers."""
    size = {"width": f"{width:g}", "height": f"{height:g}", "viewBox": f"0 0 {width:g} {height:g}"}
    return tag(
        "svg", *parts, xmlns="http://www.w3.org/2000/svg", role="img", aria_label=label, **size, **attributes
    )
