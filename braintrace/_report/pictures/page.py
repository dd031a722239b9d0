"""One page: the verdict, the drawing, what traces cost, how each parameter learns, all findings."""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from string import Template

from ..._compiler.step import show_path
from ..diagnostics import DiagnosticLevel
from ..report import CompilationReport
from ..tables import number, show_bytes
from .details import details
from .diagram import Diagram, read_diagram, show_aval
from .drawing import draw

_SHOWN = 6  # reasons in a verdict


def to_html(report: CompilationReport) -> str:
    """The page; it loads nothing from anywhere."""
    graph = report.graph
    diagram = read_diagram(report)
    counts = report.counts
    said = [
        number(counts["hidden_groups"], "hidden group"),
        number(len(diagram.of("site")), "marked op"),
        number(counts["etrace_weights"] + len(report.ranked_weights), "parameter") + " learned online",
        f"{counts['excluded_weights']} within the {report.span} only",
        number(counts["warning"], "warning"),
    ]
    notes = json.dumps(details(diagram, graph)).replace("<", "\\u003c")
    template = Template(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(graph.module_info.step.name),
        counts=" &middot; ".join(said),
        verdict=_verdict(report),
        span=report.span,
        missed=f"followed {report.kept}" if report.kept else f"not followed beyond the {report.span}",
        drawing=draw(diagram, graph),
        tables="\n".join([_memory(diagram), _parameters(report), _findings(report)]),
        notes=notes,
    )


def to_frame(report: CompilationReport) -> str:
    """The page inside a frame, for notebooks: its style and script stay its own."""
    return (
        f'<iframe srcdoc="{escape(to_html(report))}" style="width: 100%; height: 640px; border: 0" '
        'title="what feeds what in one step"></iframe>'
    )


def _verdict(report: CompilationReport) -> str:
    verdict = report.exactness
    first = escape(verdict.headline)
    if verdict.exact:
        return f'<div class="verdict exact"><b>Exact.</b> {first}</div>'
    items = [f"<li>{_code(item)}</li>" for item in verdict.items()]
    more = ""
    if len(items) > _SHOWN:
        rest = "".join(items[_SHOWN:])
        more = f"<details><summary>and {len(items) - _SHOWN} more</summary><ul>{rest}</ul></details>"
    shown = "".join(items[:_SHOWN])
    return f'<div class="verdict"><b>Approximate.</b> {first}<ul>{shown}</ul>{more}</div>'


def _code(text: str) -> str:
    """Text in which `marks` become code."""
    parts = escape(text.replace("`etp_", "`")).split("`")
    return "".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(parts))


def _memory(diagram: Diagram) -> str:
    sites = [(b, b.sizes) for b in diagram.of("site") if b.sizes is not None]
    if not sites:
        return ""
    most = max(max(s.d_rtrl, s.es_d_rtrl) for _, s in sites)
    rows = []
    for box, sizes in sites:
        assert box.relation is not None
        names = " ".join(f"<code>{escape(show_path(p))}</code>" for p in box.params)
        groups = ", ".join(str(g.index) for g in box.relation.hidden_groups)
        shapes = ", ".join(f"{name} <code>{list(s)}</code>" for (name, _), s in sizes.shapes.items())
        rows.append(
            f"<tr><td>{escape(box.op)}</td><td>{names}</td><td class=n>{groups}</td><td>{shapes}</td>"
            f"<td class=n>{show_bytes(sizes.d_rtrl)}</td><td class=m>{_meter(sizes.d_rtrl, most, '')}"
            f"{_meter(sizes.es_d_rtrl, most, ' es')}</td><td class=n>{show_bytes(sizes.es_d_rtrl)}</td></tr>"
        )
    d, es = sum(s.d_rtrl for _, s in sites), sum(s.es_d_rtrl for _, s in sites)
    rows.append(
        f"<tr class=sum><td>all</td><td></td><td></td><td></td><td class=n>{show_bytes(d)}</td><td></td>"
        f"<td class=n>{show_bytes(es)}</td></tr>"
    )
    return (
        "<h2>What traces cost</h2><div class=scroll><table><tr><th>op</th><th>parameters</th>"
        "<th class=n>group</th><th>trace of D_RTRL</th><th class=n>D_RTRL</th><th></th>"
        f"<th class=n>ES_D_RTRL</th></tr>{''.join(rows)}</table></div>"
    )


def _meter(value: int, most: int, style: str) -> str:
    return f'<div class="meter{style}" style="width:{100 * value / max(most, 1):.1f}%"></div>'


def _parameters(report: CompilationReport) -> str:
    excluded, traced, ranked = report.excluded_weights, report.etrace_weights, report.ranked_weights
    rows = []
    for entry in report.graph.module_info.params:
        shapes = " ".join(f"<code>{show_aval(v.aval)}</code>" for v in entry.invars)
        if entry.path in traced:
            how = "online, through " + ", ".join(
                f"<code>{escape(show_path(p))}</code>" for p in traced[entry.path]
            )
        elif entry.path in ranked:
            how = f"online, {report.kept}"
        else:
            how = f"within the {report.span}: <span class=why>{escape(excluded[entry.path])}</span>"
        rows.append(
            f"<tr><td><code>{escape(show_path(entry.path))}</code></td><td>{shapes}</td><td>{how}</td></tr>"
        )
    carried = ""
    if report.dynamic_states:
        names = ", ".join(f"<code>{escape(show_path(p))}</code>" for p in report.dynamic_states)
        carried = f"<p>Carried from step to step, not traced: {names}</p>"
    return (
        "<h2>How each parameter learns</h2><div class=scroll><table><tr><th>parameter</th><th>shape</th>"
        f"<th>gradient</th></tr>{''.join(rows)}</table></div>{carried}"
    )


def _findings(report: CompilationReport) -> str:
    ordered = sorted(report.diagnostics, key=lambda r: -r.level)
    rows = [
        f'<tr><td><span class="level {r.level.name.lower()}">{r.level.name.lower()}</span></td>'
        f"<td>{_code(r.message)}</td></tr>"
        for r in ordered
    ]
    if not rows:
        return ""
    loud = sum(r.level >= DiagnosticLevel.WARNING for r in ordered)
    table = f"<div class=scroll><table>{''.join(rows)}</table></div>"
    state = " open" if loud or len(rows) <= 12 else ""
    said = f"{number(len(rows), 'finding')}, {number(loud, 'warning')}"
    return f"<h2>Findings</h2><details{state}><summary>{said}</summary>{table}</details>"
