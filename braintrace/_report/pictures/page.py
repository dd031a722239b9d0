"""The report as a page: verdict, drawing, size of traces, how each parameter is learned, all findings."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path as File
from typing import TYPE_CHECKING

from ..._compiler.step import Path, show_path
from ..._diagnostics.records import DiagnosticLevel
from ..markup import Markup, fill, join, tag
from ..tables import number, show_bytes
from .details import details
from .diagram import Diagram, read_diagram, show_aval
from .drawing import draw

if TYPE_CHECKING:
    from ..report import CompilationReport

_SHOWN = 6  # reasons in a verdict


def to_html(report: CompilationReport) -> str:
    """Return the page, which loads no other file."""
    graph = report.graph
    diagram = read_diagram(report)
    counts = report.counts
    facts = [
        number(counts["hidden_groups"], "hidden group"),
        number(len(diagram.of("site")), "marked op"),
        number(counts["etrace_weights"] + len(report.ranked_weights), "parameter") + " learned online",
        f"{counts['excluded_weights']} within the {report.span} only",
        number(counts["warning"], "warning"),
    ]
    notes = json.dumps(details(diagram, graph)).replace("<", "\\u003c")
    return fill(
        File(__file__).with_name("page.html"),
        title=join(graph.module_info.step.name),
        counts=join(" · ".join(facts)),
        verdict=_verdict(report),
        span=join(report.span),
        missed=join(f"followed {report.kept}" if report.kept else f"not followed beyond the {report.span}"),
        drawing=draw(diagram, graph),
        tables=join(_memory(diagram), _parameters(report), _findings(report)),
        notes=notes,
    )


def to_frame(report: CompilationReport) -> str:
    """Return the page inside a frame, for notebooks and reports: its style and script stay its own."""
    style = "width: 100%; height: 640px; border: 0"
    # as high as its content; where scripts of the outer page are not run, the frame scrolls
    grow = "this.style.height = this.contentDocument.documentElement.scrollHeight + 'px'"
    title = "the graph of one step"
    return tag("iframe", srcdoc=to_html(report), style=style, title=title, onload=grow)


def _verdict(report: CompilationReport) -> Markup:
    verdict = report.exactness
    if verdict.exact:
        return tag("div", tag("b", "Exact."), " ", verdict.headline, class_="verdict exact")
    items = [tag("li", _code(item)) for item in verdict.items()]
    shown = [tag("b", "Approximate."), " ", verdict.headline, tag("ul", *items[:_SHOWN])]
    if len(items) > _SHOWN:
        more = tag("summary", f"and {len(items) - _SHOWN} more")
        shown.append(tag("details", more, tag("ul", *items[_SHOWN:])))
    return tag("div", *shown, class_="verdict")


def _code(text: str) -> Markup:
    """Return text with words in backquotes as code."""
    parts = text.replace("`etp_", "`").split("`")
    return join(*(tag("code", p) if i % 2 else p for i, p in enumerate(parts)))


def _names(paths: Iterable[Path], between: str) -> Markup:
    """Return paths as code, joined by a separator."""
    found = [part for p in paths for part in (between, tag("code", show_path(p)))]
    return join(*found[1:])


def _row(kind: str, *cells: object, class_: str | None = None) -> Markup:
    """Return a row of a table; a pair is a cell and its class."""
    pairs = [c if isinstance(c, tuple) else (c, None) for c in cells]
    return tag("tr", *(tag(kind, c, class_=name) for c, name in pairs), class_=class_)


def _memory(diagram: Diagram) -> Markup:
    sites = [(b, b.sizes) for b in diagram.of("site") if b.sizes is not None]
    if not sites:
        return join()
    most = max(max(s.d_rtrl, s.es_d_rtrl) for _, s in sites)
    head = ["op", "parameters", ("group", "n"), "trace of D_RTRL", ("D_RTRL", "n"), "", ("ES_D_RTRL", "n")]
    rows = [_row("th", *head)]
    for box, sizes in sites:
        assert box.relation is not None
        groups = ", ".join(str(g.index) for g in box.relation.hidden_groups)
        shapes = [p for (name, _), s in sizes.shapes.items() for p in (", ", f"{name} ", tag("code", [*s]))]
        meters = join(_meter(sizes.d_rtrl, most, "meter"), _meter(sizes.es_d_rtrl, most, "meter es"))
        costs = (show_bytes(sizes.d_rtrl), "n"), (meters, "m"), (show_bytes(sizes.es_d_rtrl), "n")
        rows.append(_row("td", box.op, _names(box.params, " "), (groups, "n"), join(*shapes[1:]), *costs))
    d, es = (show_bytes(sum(getattr(s, rule) for _, s in sites)) for rule in ("d_rtrl", "es_d_rtrl"))
    rows.append(_row("td", "all", "", "", "", (d, "n"), "", (es, "n"), class_="sum"))
    return join(tag("h2", "Size of traces"), _table(rows))


def _table(rows: Iterable[Markup]) -> Markup:
    return tag("div", tag("table", *rows), class_="scroll")


def _meter(value: int, most: int, style: str) -> Markup:
    return tag("div", class_=style, style=f"width:{100 * value / max(most, 1):.1f}%")


def _parameters(report: CompilationReport) -> Markup:
    excluded, traced, ranked = report.excluded_weights, report.etrace_weights, report.ranked_weights
    rows = [_row("th", "parameter", "shape", "gradient")]
    for entry in report.graph.module_info.params:
        shapes = [part for v in entry.invars for part in (" ", tag("code", show_aval(v.aval)))]
        if entry.path in traced:
            how = join("online, through ", _names(traced[entry.path], ", "))
        elif entry.path in ranked:
            how = join(f"online, {report.kept}")
        else:
            how = join(f"within the {report.span}: ", tag("span", excluded[entry.path], class_="why"))
        rows.append(_row("td", tag("code", show_path(entry.path)), join(*shapes[1:]), how))
    found = [tag("h2", "How each parameter is learned"), _table(rows)]
    if report.dynamic_states:
        names = _names(report.dynamic_states, ", ")
        found.append(tag("p", "Carried from step to step, not traced: ", names))
    return join(*found)


def _findings(report: CompilationReport) -> Markup:
    ordered = sorted(report.diagnostics, key=lambda r: -r.level)
    levels = [(r.level.name.lower(), r.message) for r in ordered]
    rows = [_row("td", tag("span", n, class_=f"level {n}"), _code(message)) for n, message in levels]
    if not rows:
        return join()
    loud = sum(r.level >= DiagnosticLevel.WARNING for r in ordered)
    is_open = "" if loud or len(rows) <= 12 else None
    summary = tag("summary", f"{number(len(rows), 'finding')}, {number(loud, 'warning')}")
    return join(tag("h2", "Findings"), tag("details", summary, _table(rows), open=is_open))
