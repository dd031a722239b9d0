"""Compile a traced step to its trace graph."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from .._types import Options
from .dataflow import union
from .delays import delay_lines
from .errors import CompilationError
from .exactness import find_dropped
from .find_relations import SiteWeights, find_relations
from .findings import Finding, Findings, Found
from .groups import HiddenGroup, find_groups, group_findings
from .module_info import ModuleInfo, StateEntry
from .perturbation import HiddenPerturbation
from .positions import positions_of
from .primitives import ELEMENT_WISE
from .program import Node, Var
from .provenance import Goal, Provenance, goals, provenance
from .reachability import Reachability, find_reachability
from .relation import HiddenParamOpRelation
from .slices import behind, between
from .step import Path, show_path


class _Fields(NamedTuple):
    module_info: ModuleInfo
    hidden_groups: list[HiddenGroup]
    hid_path_to_group: dict[Path, HiddenGroup]
    hidden_param_op_relations: list[HiddenParamOpRelation]
    hidden_perturb: HiddenPerturbation | None
    diagnostics: Findings


class TraceGraph(_Fields):
    """The compiled step: groups of hidden states, and the marked ops (sites) that feed them."""

    # a subclass of the named tuple, because only that has a `__dict__` in which analyses are cached

    def other_outvars(self, group: HiddenGroup) -> list[Var]:
        """The variables of the new states of all groups but one."""
        return [v for g in self.hidden_groups if g is not group for v in g.hidden_outvars]

    def dict(self) -> Options:
        return self._asdict()


def graph_from_info(
    info: ModuleInfo, *, include_hidden_perturb: bool = True, groups: list[HiddenGroup] | None = None
) -> TraceGraph:
    """Compile a traced step, with its hidden groups if they are known.

    Delay lines that affect later losses become hidden states.
    """
    graph = graph_of(info, include_hidden_perturb, groups)
    lines = delay_lines(graph) if groups is None else []
    if lines:
        others = [h for h in info.hidden if not any(h.invar is line.invar for line in lines)]
        graph = graph_of(replace(info, hidden=(*others, *lines)), include_hidden_perturb)
    flows = find_reachability(graph)
    kinds = {e.path: e.of.kind for e in info.entries}
    later = [
        *(Finding(Found.RULE_NOT_LINEAR, tuple(params), nodes=(node,)) for node, params in flows.not_linear),
        *(
            Finding(Found.STATE_WITHOUT_TRACE, tuple(params), states=(c.path,), detail=kinds[c.path])
            for c, params in flows.untraced
        ),
        *_without_gradient(graph, flows),
    ]
    return graph._replace(diagnostics=Findings(info.step, (*graph.diagnostics.found, *later)))


def graph_of(
    info: ModuleInfo, include_hidden_perturb: bool, groups: list[HiddenGroup] | None = None
) -> TraceGraph:
    """Compile a traced step, without delay lines and findings that depend on the whole graph."""
    origin = provenance(info.program, info.param_invars)
    _check(info, origin)
    positions = positions_of(info.program)
    groups = find_groups(info, positions) if groups is None else groups
    new = {h.outvar: i for i, h in enumerate(h for g in groups for h in g.hidden)}
    group_of = [g.index for g in groups for _ in g.hidden]
    var_goals, site_goals = goals(info.program, new, group_of)
    relations, of_sites = find_relations(info, groups, positions, origin, site_goals)
    learned = {g.index for r in relations for g in r.hidden_groups}
    findings = (
        *_of_program(info, var_goals),
        *group_findings(groups, info),
        *_without_mark(info, groups, var_goals, origin),
        *_cascades(info, groups, var_goals, learned),
        *of_sites,
    )
    return TraceGraph(
        module_info=info,
        hidden_groups=groups,
        hid_path_to_group={p: g for g in groups for p in g.hidden_paths},
        hidden_param_op_relations=relations,
        hidden_perturb=HiddenPerturbation(info, tuple(groups)) if include_hidden_perturb else None,
        diagnostics=Findings(info.step, findings),
    )


def _check(info: ModuleInfo, origin: Provenance) -> None:
    pairs = ((e, *pair) for e in info.params for pair in zip(e.invars, e.outvars, strict=True))
    for entry, old, new in pairs:
        if new is not old:
            made = info.program.maker(new)
            users = [s for s in info.program.sites if any(old in origin.of(w)[0] for w in s.weights.values())]
            used = f" It is a weight of {SiteWeights(info, users[0], origin).use}." if users else ""
            raise CompilationError(
                f"The step assigns the parameter `{show_path(entry.path)}`"
                f"{f' at {made.source}' if made else ''}; a trace needs weights that stay as they are within "
                f"a step.{used} Assign it between steps, or keep what changes in a state of its own."
            )
    if not info.hidden:
        states = [f"`{show_path(e.path)}` ({e.of.kind})" for e in info.entries if not e.is_param]
        ops = [str(SiteWeights(info, s, origin).use) for s in info.program.sites]
        raise CompilationError(
            "The model has no hidden state, so there is nothing to trace: none of its states is a floating "
            "`ShortTermState` (such as `HiddenState`), or array of a function's carry, that the step "
            f"writes. States found: {', '.join(states) or 'none'}. Marked ops: "
            f"{', '.join(ops) or 'none'}. Keep the recurrent state in one of these, or train a model without "
            "one by ordinary gradients."
        )


def _feeds(entry: StateEntry, var_goals: dict[Var, Goal]) -> int:
    """The bits of the new states that a parameter reaches without a marked op."""
    return union(var_goals[v].direct for v in entry.invars if v in var_goals) or 0


def _of_program(info: ModuleInfo, var_goals: dict[Var, Goal]) -> list[Finding]:
    found = [Finding(Found.OWN_DERIVATIVE_UNUSED, nodes=(node,)) for node in info.program.opened]
    if behind(info.program, info.program.outputs).isdisjoint(h.invar for h in info.hidden):
        found.append(Finding(Found.NEVER_READ, states=tuple(h.path for h in info.hidden)))
    if not info.program.sites:
        uses = tuple((e.path, _first_use(info, e)) for e in info.params)
        feeding = tuple(e.path for e in info.params if _feeds(e, var_goals))
        found.append(Finding(Found.NO_MARKED_OP, feeding, detail=uses))
    return found


def _first_use(info: ModuleInfo, entry: StateEntry, plain: bool = False) -> Node | None:
    nodes = (n for n in info.program.nodes if not (plain and n.site))
    return next((n for n in nodes if any(v in entry.invars for v in n.reads)), None)


def _without_mark(
    info: ModuleInfo, groups: list[HiddenGroup], var_goals: dict[Var, Goal], origin: Provenance
) -> list[Finding]:
    """Parameters that feed a state through unmarked operations, in a model with marked ones."""
    weights = [w for site in info.program.sites for w in site.weights.values()]
    hidden = [h.path for g in groups for h in g.hidden]
    found: list[Finding] = []
    for entry in info.params if info.program.sites else ():
        if bits := _feeds(entry, var_goals):
            paths = tuple(p for i, p in enumerate(hidden) if bits >> i & 1)
            marked = any(v in origin.of(w)[0] for v in entry.invars for w in weights)
            kind = Found.ALSO_WITHOUT_MARK if marked else Found.WITHOUT_MARK
            node = _first_use(info, entry, plain=True)
            found.append(Finding(kind, (entry.path,), states=paths, nodes=(node,) if node else ()))
    return found


def _cascades(
    info: ModuleInfo, groups: list[HiddenGroup], var_goals: dict[Var, Goal], learned: set[int]
) -> list[Finding]:
    """Groups that reach new states of another group without a marked op: a path that no trace covers.

    No gradient is lost if nothing is learned through the first group (a clock, say).
    """
    group_of = [g for g in groups for _ in g.hidden]
    found: list[Finding] = []
    for group in groups:
        own = [*group.hidden_invars, *group.hidden_outvars]
        reached: dict[int, None] = {}
        for var in own:
            bits = var_goals[var].direct if var in var_goals else 0
            reached |= {g.index: None for i, g in enumerate(group_of) if bits >> i & 1 and g is not group}
        for other in map(groups.__getitem__, reached):
            ways = between(info.program, own, other.hidden_outvars)
            nodes = tuple([*(n for n in ways if n.primitive not in ELEMENT_WISE), *ways][:1])
            kind = Found.CASCADE if group.index in learned else Found.UNLEARNED_CASCADE
            states, others = tuple(group.hidden_paths), tuple(other.hidden_paths)
            found.append(Finding(kind, states=states, nodes=nodes, detail=others))
    return found


def _without_gradient(graph: TraceGraph, flows: Reachability) -> list[Finding]:
    """Parameters without any gradient, although they affect later losses."""
    dropped = find_dropped(graph) if flows.without_gradient and flows.program.sites else []
    first = {d.weight_path: d for d in reversed(dropped)}  # the first entry for each path wins
    return [Finding(Found.NO_GRADIENT, (p,), detail=first[p]) for p in flows.without_gradient if p in first]


def find_hidden_groups_from_minfo(minfo: ModuleInfo) -> tuple[list[HiddenGroup], dict[Path, HiddenGroup]]:
    """The hidden groups of a traced model, and the group of each hidden path."""
    groups = find_groups(minfo, positions_of(minfo.program))
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
