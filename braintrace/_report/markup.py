"""Elements of HTML and SVG, the one place where text is escaped."""

from __future__ import annotations

from html import escape


class Markup(str):
    """A string that is HTML or SVG already."""


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """An element; attributes, and children that are not `Markup`, are escaped.

    An attribute that is None is left out; underscores in names become hyphens, the last one is dropped.

    >>> tag("td", "a < b ", tag("b", "c"), class_="n", font_size=None)
    '<td class="n">a &lt; b <b>c</b></td>'
    """
    given = {k.rstrip("_").replace("_", "-"): escape(str(v)) for k, v in attributes.items() if v is not None}
    named = "".join(f' {k}="{v}"' for k, v in given.items())
    return Markup(f"<{name}{named}>{join(*children)}</{name}>")


def join(*parts: object) -> Markup:
    """Parts side by side, those that are not `Markup` escaped."""
    return Markup("".join(p if isinstance(p, Markup) else escape(str(p)) for p in parts))
