"""From a model to its trace graph."""

from __future__ import annotations

import os
from collections.abc import Container
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .._lines import is_users
from .delays import LONGEST, delay_lines
from .diagnostics import CompilationRecord, DiagnosticKind, DiagnosticLevel, show_path, warn_user, warning_of
from .errors import CompilationError
from .exactness import Exactness, RuleKind, find_exactness
from .flows import Flows
from .groups import HiddenGroup, find_groups, group_records
from .module_info import ModuleInfo, StateEntry
from .perturbation import HiddenPerturbation
from .positions import Positions
from .primitives import ELEMENT_WISE
from .program import Var
from .provenance import Goal, Provenance, goals, provenance
from .relation import HiddenParamOpRelation
from .relations import find_relations
from .site_weights import name_site
from .slices import between
from .step import Path

if TYPE_CHECKING:
    from .report import CompilationReport


class ETraceGraph(NamedTuple):
    """What the compiler found: groups of hidden states, and the sites that feed them."""

    module_info: ModuleInfo
    hidden_groups: list[HiddenGroup]
    hid_path_to_group: dict[Path, HiddenGroup]
    hidden_param_op_relations: list[HiddenParamOpRelation]
    hidden_perturb: HiddenPerturbation | None
    diagnostics: list[CompilationRecord]

    def __str__(self) -> str:
        return self._report().to_str()

    def __repr__(self) -> str:
        return f"<ETraceGraph of {self.module_info.step.name}: {self._report().in_short()}>"

    def dict(self) -> dict[str, Any]:
        return self._asdict()

    def exactness(self, rule: RuleKind | None = None) -> Exactness:
        """Whether the gradient of a rule (D_RTRL where none is given) is that of BPTT, and what it drops."""
        return find_exactness(self, rule)

    def explain(
        self,
        *,
        kind: DiagnosticKind | None = None,
        weight_path: Path | None = None,
        hidden_path: Path | None = None,
    ) -> str | tuple[CompilationRecord, ...]:
        """A tree of groups, sites and parameters, as plain text; or the findings of one kind or path."""
        if kind is None and weight_path is None and hidden_path is None:
            return self._report().to_str()
        return tuple(
            r
            for r in self.diagnostics
            if kind in (None, r.kind)
            and weight_path in (None, r.weight_path)
            and (hidden_path is None or hidden_path in r.hidden_paths)
        )

    def to_svg(self, path: str | os.PathLike[str] | None = None) -> str:
        """A drawing of what feeds what; written to `path` if one is given."""
        return self._report().to_svg(path)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """A page that needs no network: the drawing, the verdict, what traces cost and every finding."""
        return self._report().to_html(path)

    def to_dot(self) -> str:
        """The graph in the language of graphviz."""
        return self._report().to_dot()

    def _repr_html_(self) -> str:
        return self._report()._repr_html_()

    def _report(self) -> CompilationReport:
        from .report import CompilationReport

        return CompilationReport(self)


def graph_from_info(
    info: ModuleInfo, *, include_hidden_perturb: bool = True, groups: list[HiddenGroup] | None = None
) -> ETraceGraph:
    """The graph of a traced model, with its hidden groups where they are known.

    Delay lines that a loss asks about are hidden states, too.
    """
    graph = _graph_of(info, include_hidden_perturb, groups)
    lines = delay_lines(graph) if groups is None else []
    if lines:
        others = [h for h in info.hidden if not any(h.invar is line.invar for line in lines)]
        graph = _graph_of(replace(info, hidden=(*others, *lines)), include_hidden_perturb)
    flows = Flows(graph)
    graph.diagnostics.extend([*_not_linear(flows), *_untraced(flows)])
    graph.diagnostics.extend(_unheard(graph, flows))
    return graph


def _graph_of(
    info: ModuleInfo, include_hidden_perturb: bool, groups: list[HiddenGroup] | None = None
) -> ETraceGraph:
    origin = provenance(info.program, [v for e in info.params for v in e.invars])
    _check(info, origin)
    positions = Positions(info.program)
    groups = find_groups(info, positions) if groups is None else groups
    new = {h.outvar: i for i, h in enumerate(h for g in groups for h in g.hidden)}
    group_of = [g.index for g in groups for _ in g.hidden]
    var_goals, site_goals = goals(info.program, new, group_of)
    relations, records = find_relations(info, groups, positions, origin, site_goals)
    learned = {g.index for r in relations for g in r.hidden_groups}
    records = [
        *_program_records(info, var_goals),
        *group_records(groups, info),
        *_without_mark(info, groups, var_goals, origin),
        *_cascades(info, groups, var_goals, learned),
        *records,
    ]
    return ETraceGraph(
        module_info=info,
        hidden_groups=groups,
        hid_path_to_group={p: g for g in groups for p in g.hidden_paths},
        hidden_param_op_relations=relations,
        hidden_perturb=HiddenPerturbation(info, tuple(groups)) if include_hidden_perturb else None,
        diagnostics=records,
    )


def _check(info: ModuleInfo, origin: Provenance) -> None:
    for entry in info.params:
        for invar, atom in zip(entry.invars, entry.outvars, strict=True):
            if atom is not invar:
                made = [n for n in info.program.nodes if atom in n.outputs]
                users = [
                    s for s in info.program.sites if any(invar in origin.of(w)[0] for w in s.weights.values())
                ]
                used = f" It is a weight of {name_site(info, users[0], origin)}." if users else ""
                raise CompilationError(
                    f"The step assigns the parameter `{show_path(entry.path)}`"
                    f"{f' at {made[0].source}' if made else ''}; a trace needs weights that stay as they are "
                    f"within a step.{used} Assign it between steps, or keep what changes in a state of its "
                    "own."
                )
    if not info.hidden:
        states = [f"`{show_path(e.path)}` ({e.of.kind})" for e in info.entries if not e.is_param]
        ops = [name_site(info, s, origin) for s in info.program.sites]
        raise CompilationError(
            "The model has no hidden state, so there is nothing to trace: none of its states is a floating "
            "`ShortTermState` (such as `HiddenState`) that the step both reads and writes. States found: "
            f"{', '.join(states) or 'none'}. Marked ops: {', '.join(ops) or 'none'}. Keep the recurrent "
            "state in a `brainstate.HiddenState`, or train a model without one by ordinary gradients."
        )


def _feeds(entry: StateEntry, var_goals: dict[Var, Goal]) -> int:
    """The new states that a parameter reaches without a marked op."""
    bits = 0
    for var in entry.invars:
        bits |= var_goals[var].direct if var in var_goals else 0
    return bits


def _program_records(info: ModuleInfo, var_goals: dict[Var, Goal]) -> list[CompilationRecord]:
    records = []
    if not info.program.sites:
        names = ", ".join(f"`{show_path(e.path)}`{_first_use(info, e)}" for e in info.params) or "none"
        records.append(
            CompilationRecord(
                DiagnosticKind.NO_MARKED_OP,
                DiagnosticLevel.WARNING,
                f"The model has no marked op, so no weight is learned online (parameters: {names}); each "
                "gets the gradient within the step only. "
                + (
                    info.step.unmarked([e.path for e in info.params if _feeds(e, var_goals)])
                    or "Use `braintrace.matmul(x, w)` instead of `x @ w`, or the layers of `braintrace.nn`."
                ),
            )
        )
    for node in info.program.opened:
        records.append(
            CompilationRecord(
                DiagnosticKind.PRIMITIVE_INSIDE_NESTED_JIT,
                DiagnosticLevel.WARNING,
                f"A function with a derivative rule of its own (`{node.primitive.name}` at {node.source}) "
                "holds a marked op; it is read through, and its own rule is not used. Move the op out of the "
                "function.",
                primitive=node.primitive,
            )
        )
    return records


def _first_use(info: ModuleInfo, entry: StateEntry, plain: bool = False) -> str:
    for node in info.program.nodes:
        if any(v is a for v in entry.invars for a in node.inputs) and not (plain and node.site):
            # of a layer of a library the hint says more than the line
            return f", used by `{node.primitive.name}` at {node.source}" if is_users(node.source) else ""
    return ""


def _without_mark(
    info: ModuleInfo, groups: list[HiddenGroup], var_goals: dict[Var, Any], origin: Provenance
) -> list[CompilationRecord]:
    """Parameters that feed a state by ordinary operations, in a model that marks others."""
    weights = [w for site in info.program.sites for w in site.weights.values()]
    leaves = [h.path for g in groups for h in g.hidden]
    records = []
    for entry in info.params if info.program.sites else ():
        if bits := _feeds(entry, var_goals):
            paths = tuple(p for i, p in enumerate(leaves) if bits >> i & 1)
            names = ", ".join(f"`{show_path(p)}`" for p in paths)
            use = _first_use(info, entry, plain=True)
            marked = any(v in origin.of(w)[0] for v in entry.invars for w in weights)
            gets = (
                "this use gets the gradient within the step only (the marked one is learned online)"
                if marked
                else "it gets the gradient within the step only"
            )
            records.append(
                CompilationRecord(
                    DiagnosticKind.PARAMETER_WITHOUT_MARK,
                    DiagnosticLevel.WARNING,
                    f"`{show_path(entry.path)}`{f'{use},' if use else ''} feeds {names} without a marked op; "
                    f"{gets}. "
                    + (
                        info.step.unmarked([entry.path])
                        or "Use `braintrace.matmul(x, w, b)`, `braintrace.element_wise(w)` or a layer of "
                        "`braintrace.nn` to learn it online."
                    ),
                    weight_path=entry.path,
                    hidden_paths=paths,
                )
            )
    return records


def _cascades(
    info: ModuleInfo, groups: list[HiddenGroup], var_goals: dict[Var, Any], learned: set[int]
) -> list[CompilationRecord]:
    """States that reach another group's new state without a marked op: a path that no trace follows.

    Nothing is missed where nothing is learned through the first state (a clock, say).
    """
    leaves = [(g, h.path) for g in groups for h in g.hidden]
    records = []
    for group in groups:
        reached: dict[int, None] = {}
        for var in (*group.hidden_invars, *group.hidden_outvars):
            goal = var_goals.get(var)
            bits = goal.direct if goal else 0
            for i, (g, _) in enumerate(leaves):
                if bits >> i & 1 and g is not group:
                    reached[g.index] = None
        for index in reached:
            other = groups[index]
            ways = between(info.program, [*group.hidden_invars, *group.hidden_outvars], other.hidden_outvars)
            at = next((n for n in ways if n.primitive not in ELEMENT_WISE), ways[0] if ways else None)
            where = f" (`{at.primitive.name}` at {at.source})" if at else ""
            names, others = (", ".join(f"`{show_path(p)}`" for p in g.hidden_paths) for g in (group, other))
            records.append(
                CompilationRecord(
                    DiagnosticKind.HIDDEN_STATE_CASCADE,
                    DiagnosticLevel.WARNING if group.index in learned else DiagnosticLevel.INFO,
                    f"The state {names} reaches {others} without a marked op, and not unit by unit{where}; "
                    + (
                        f"what is learned through {names} does not count what {others} remembers of it."
                        if group.index in learned
                        else f"no marked op feeds {names}, so that no trace misses it."
                    ),
                    primitive=at.primitive if at else None,
                    hidden_paths=(*group.hidden_paths, *other.hidden_paths),
                    context={"sources": [at.source] if at else []},
                )
            )
    return records


def _untraced(flows: Flows) -> list[CompilationRecord]:
    """States without a trace through which parameters act on later losses: delays, above all."""
    kinds = {e.path: e.of.kind for e in flows.info.entries}
    records = []
    for c, paths in flows.untraced:
        names = ", ".join(f"`{show_path(p)}`" for p in paths)
        records.append(
            CompilationRecord(
                DiagnosticKind.STATE_WITHOUT_TRACE,
                DiagnosticLevel.WARNING,
                f"Losses depend on what {names} did in earlier steps through `{show_path(c.path)}` "
                f"({kinds[c.path]}), which has no trace: that part of the gradient is missing, which may be "
                f"all of it. A delay line of up to {LONGEST} places has traces by itself. Keep anything else "
                "in a `brainstate.HiddenState` that is updated unit by unit, or train by `braintrace.RTRL`; "
                "in windows (`vjp_method='multi-step'`), what stays in one counts.",
                weight_path=paths[0],
                hidden_paths=(c.path,),
                context={"weight_paths": paths},
            )
        )
    return records


def _unheard(graph: ETraceGraph, flows: Flows) -> list[CompilationRecord]:
    """Parameters without any gradient that nothing else was said about."""
    known = {r.weight_path for r in graph.diagnostics if r.level >= DiagnosticLevel.WARNING}
    known.update(p for r in graph.diagnostics for p in r.context.get("weight_paths", ()))
    silent = [p for p in flows.unheard if p not in known]
    dropped = find_exactness(graph).weights if silent and flows.program.sites else {}
    return [
        CompilationRecord(
            DiagnosticKind.GRADIENT_IS_ZERO,
            DiagnosticLevel.WARNING,
            f"Step by step, the gradient of `{show_path(path)}` is zero: it acts on losses of later steps "
            f"only, and not counted is {dropped[path][0].reason}. Let what comes after read the states as "
            "the step leaves them, not as it finds them, or train with `braintrace.RTRL` or in windows "
            "(`vjp_method='multi-step'`).",
            weight_path=path,
        )
        for path in silent
        if path in dropped
    ]


def _not_linear(flows: Flows) -> list[CompilationRecord]:
    return [
        CompilationRecord(
            DiagnosticKind.RULE_NOT_LINEAR,
            DiagnosticLevel.WARNING,
            f"The function called at {node.source} has a derivative rule (`custom_vjp`) that is not linear "
            "in the gradient it is given, as clipping is not. BPTT gives it what the losses of all steps "
            "sum up to, and no online rule can: the gradient of "
            f"{', '.join(f'`{show_path(p)}`' for p in paths)} is approximate. Clip the gradients of "
            "parameters instead, or train with `braintrace.BPTT`.",
            primitive=node.primitive,
            context={"sources": [node.source], "weight_paths": paths},
        )
        for node, paths in flows.not_linear
    ]


def warn_of(graph: ETraceGraph, kinds: Container[DiagnosticKind] = tuple(DiagnosticKind)) -> None:
    """One warning, with what the user may well not have meant."""
    model = graph.module_info.model
    records = [r for r in graph.diagnostics if r.kind in kinds]
    message = warning_of(graph.module_info.step.name, records)
    if message is not None:
        warn_user(message, about=model)


def find_hidden_groups_from_minfo(minfo: ModuleInfo) -> tuple[list[HiddenGroup], dict[Path, HiddenGroup]]:
    """The hidden groups of a traced model, and the group of each hidden path."""
    groups = find_groups(minfo, Positions(minfo.program))
    return groups, {p: g for g in groups for p in g.hidden_paths}


def find_hidden_param_op_relations_from_minfo(
    minfo: ModuleInfo, hid_path_to_group: dict[Path, HiddenGroup] | None = None
) -> list[HiddenParamOpRelation]:
    """The relations of a traced model, to its hidden groups where they are known."""
    groups = None
    if hid_path_to_group is not None:
        groups = list({g.index: g for g in hid_path_to_group.values()}.values())
        if [v for g in groups for v in g.hidden_invars if v not in minfo.hidden_path_to_invar.values()]:
            raise ValueError("The hidden groups are of another trace of the model than the `ModuleInfo`.")
    return graph_from_info(minfo, include_hidden_perturb=False, groups=groups).hidden_param_op_relations


def add_hidden_perturbation_from_minfo(minfo: ModuleInfo) -> HiddenPerturbation:
    """The perturbed step of a traced model."""
    return HiddenPerturbation(minfo, tuple(find_hidden_groups_from_minfo(minfo)[0]))
