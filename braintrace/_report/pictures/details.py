"""The details of a box, shown when the pointer is on it."""

from __future__ import annotations

from ..._compiler.findings import WITHOUT_TRACE
from ..._compiler.graph import TraceGraph
from ..._compiler.step import show_path
from ..._diagnostics.records import KIND_OF
from ..tables import show_bytes
from .diagram import Box, Diagram, marked_by, show_aval, show_avals

Note = list[tuple[str, str]]


def details(diagram: Diagram, graph: TraceGraph) -> dict[str, Note]:
    """Return the names and values to show for each box, by its key."""
    why: dict[int, str] = {}
    for f in graph.diagnostics.found:
        if f.kind in WITHOUT_TRACE:
            why.setdefault(f.use.site.index, KIND_OF[f.kind].value)
    return {key: _note(box, why) for key, box in diagram.boxes.items()}


def _note(box: Box, why: dict[int, str]) -> Note:
    params = [("parameter", f"{show_path(p)}  {show_avals(avals)}") for p, avals in box.params.items()]
    if box.kind == "group":
        return _of_group(box, params)
    if box.kind == "site":
        return _of_site(box, params, why)
    if box.kind == "plain":
        note = [("", f"Used without a marked op: {box.how}")]
        return [*note, *params, *([("line", box.label)] if box.label else [])]
    names = {"input": "Input", "output": "Output", "state": "Carried from step to step, not traced"}
    return [("", names[box.kind]), ("name", box.label), ("shape", box.shape)]


def _of_group(box: Box, params: Note) -> Note:
    group = box.group
    assert group is not None
    states = [
        ("state", f"{show_path(h.path)}  {show_aval(h.invar.aval)} {h.unit}".strip()) for h in group.hidden
    ]
    local = "unit by unit" if group.is_local else "reaches other positions; traces keep the diagonal"
    note = [("", f"Hidden group {group.index}"), *states]
    note += [("positions", str(list(group.varshape))), ("states at each", str(group.num_state))]
    note += [("memory", local)]
    if box.remembered is not None and len(box.remembered.hidden) < len(group.hidden):
        names = ", ".join(map(show_path, box.remembered.hidden_paths))
        note += [("traces of", f"{names}; the rest is recomputed in each step (D_RTRL by single steps)")]
    return [*note, *((f"within-step {name}", text) for name, text in params)]


def _of_site(box: Box, params: Note, why: dict[int, str]) -> Note:
    site = box.site
    assert site is not None
    note = [("", f"{box.op}: {box.how}"), *params]
    if site.num_inputs:
        note.append(("x", ", ".join(show_aval(a.aval) for a in site.inputs[: site.num_inputs])))
    note.append(("y", box.shape))
    if site.loops:
        note.append(("loop", f"{' x '.join(map(str, site.loops))} applications a step"))
    if site.context:
        note.append(("inside", ", ".join(site.context)))
    if box.relation is not None and box.sizes is not None:
        classes = {str(c) for p, c in box.relation.path_classification.items()}
        note.append(("path", ", ".join(sorted(classes))))
        for (name, group), shape in box.sizes.shapes.items():
            note.append((f"trace of {name}", f"{list(shape)} for group {group}"))
        note.append(("D_RTRL", show_bytes(box.sizes.d_rtrl)))
        note.append(("ES_D_RTRL", show_bytes(box.sizes.es_d_rtrl)))
    elif site.index in why:
        note.append(("why", why[site.index]))
    note += [("mark", marked_by(site))] * site.found
    return [*note, *([("line", site.source)] if site.source else [])]
