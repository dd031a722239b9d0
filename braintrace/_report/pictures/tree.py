"""The report as a tree: hidden groups with the operations that feed them, then weights without a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._compiler.groups import HiddenGroup
from ..._compiler.relation import HiddenParamOpRelation
from ..._compiler.states_with_memory import remembered
from ..._compiler.step import show_path
from ..tables import show_bytes
from .diagram import marked_by, op_name, show_aval, show_avals
from .sizes import trace_sizes

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from ..report import CompilationReport


def make_tree(report: CompilationReport) -> Tree:
    """Return the tree that `show` prints."""
    from rich.tree import Tree

    graph = report.graph
    root = Tree(_text((graph.module_info.step.name, "bold"), f"  {report.in_short()}"))
    kept, sizes = remembered(graph), trace_sizes(graph)
    for group in graph.hidden_groups:
        branch = root.add(_group(group, kept[group.index]))
        for relation in graph.hidden_param_op_relations:
            if group in relation.hidden_groups:
                branch.add(_site(relation, group, sizes[relation.site.index].d_rtrl))
    shapes = {e.path: show_avals(v.aval for v in e.invars) for e in graph.module_info.params}
    ranked = f"without a trace, {report.kept}, for each sample"
    sections = [(ranked, "bold magenta", "cyan", report.ranked_weights)] if report.kept else []
    if report.excluded_weights:
        within = f"gradient within the {report.span} only"
        sections.append((within, "bold yellow", "yellow", report.excluded_weights))
    for title, style, color, weights in sections:
        branch = root.add(_text((title, style)))
        for path, why in weights.items():
            branch.add(_text((show_path(path), color), (f"  {shapes[path]}", "dim"), f"  {why}"))
    if report.dynamic_states:
        branch = root.add(_text(("carried, not traced", "bold")))
        for path in report.dynamic_states:
            branch.add(_text(show_path(path)))
    notes = [r.message for r in report.warnings]
    if notes:
        branch = root.add(_text(("warnings", "bold red")))
        for note in notes:
            branch.add(_text(note))
    verdict = report.exactness
    root.add(_text((str(verdict), "green" if verdict.exact else "yellow")))
    return root


def _group(group: HiddenGroup, kept: HiddenGroup) -> Text:
    states = "   ".join(
        f"{show_path(h.path)} {show_aval(h.invar.aval)} {h.unit}".rstrip()
        + " (recomputed in each step)" * (h not in kept.hidden)
        for h in group.hidden
    )
    return _text((f"group {group.index}", "bold magenta"), f"  {states}")


def _site(relation: HiddenParamOpRelation, group: HiddenGroup, trace_bytes: int) -> Text:
    site = relation.site
    names = ", ".join(show_path(p) for p in relation.param_paths)
    shapes = ", ".join(show_aval(w.aval) for w in site.weights.values())
    classes = {
        str(relation.path_classification[p]) for p in group.hidden_paths if p in relation.path_classification
    }
    marks = "".join([*(f"  x{n} in a loop" for n in site.loops), "  in a branch" * ("cond" in site.context)])
    if relation.info.step.found:
        marks += f"  {marked_by(site)}"
    return _text(
        (op_name(site), "bold blue"),
        (f" {names}", "cyan"),
        (f"  {shapes} -> {show_aval(site.output.aval)}", "dim"),
        f"  {'/'.join(sorted(classes))}{marks}",
        (f"  trace {show_bytes(trace_bytes)}", "green"),
        (f"  {site.source.rpartition('/')[2]}", "dim"),
    )


def _text(*parts: str | tuple[str, str]) -> Text:
    from rich.text import Text

    return Text.assemble(*parts)
