"""The weights of a site, what lies behind them, and what the report says of the site."""

from __future__ import annotations

import jax.numpy as jnp

from .diagnostics import CompilationRecord, DiagnosticKind, DiagnosticLevel, show_path
from .errors import CompilationError
from .groups import HiddenGroup, mixing_nodes
from .module_info import ModuleInfo
from .primitives import INDICES
from .program import Atom, Node, Site, Var
from .provenance import Goal, Provenance, provenance
from .reach import Reach
from .relation import HiddenParamOpRelation, PathClassification
from .step import Path


def name_site(info: ModuleInfo, site: Site, origin: Provenance) -> str:
    """A site in words: its op, the parameters behind it, and where it is."""
    return f"`{site.primitive.name}` {SiteWeights(info, site, origin).label} at {site.source}"


class SiteWeights:
    """The weights of a site and what lies behind them."""

    def __init__(self, info: ModuleInfo, site: Site, origin: Provenance) -> None:
        self.info, self.site, self.origin = info, site, origin
        self.found = {name: origin.of(atom) for name, atom in site.weights.items()}
        self.leaf_of = info.invar_to_leaf
        self.behind = {
            name: [self.leaf_of[v] for v in inputs if v in self.leaf_of]
            for name, (inputs, _, _) in self.found.items()
        }

    @property
    def paths(self) -> dict[str, Path]:
        return {name: leaves[0][0] for name, leaves in self.behind.items() if leaves}

    @property
    def leaf_indices(self) -> dict[str, int]:
        return {name: leaves[0][1] for name, leaves in self.behind.items() if leaves}

    @property
    def varying(self) -> tuple[str, ...]:
        return tuple(name for name, (_, _, sliced) in self.found.items() if sliced)

    @property
    def label(self) -> str:
        paths = dict.fromkeys(p for leaves in self.behind.values() for p, _ in leaves)
        return "of " + ", ".join(f"`{show_path(p)}`" for p in paths) if paths else "with no parameter"

    def refuse_integers(self) -> None:
        for leaves in self.behind.values():
            for path, i in leaves:
                entry = next(e for e in self.info.params if e.path == path)
                dtype = entry.invars[i].aval.dtype
                if not jnp.issubdtype(dtype, jnp.inexact):
                    raise CompilationError(
                        f"The parameter `{show_path(path)}` of `{self.site.primitive.name}` at "
                        f"{self.site.source} has type {dtype}, which has no gradient. Make it floating."
                    )

    def problem(self) -> CompilationRecord | None:
        site = self.site
        if not self.paths and (frozen := self._frozen()):
            names = ", ".join(f"`{show_path(p)}`" for p in frozen)
            return CompilationRecord(
                DiagnosticKind.RELATION_EXCLUDED_FROZEN,
                DiagnosticLevel.INFO,
                f"`{site.primitive.name}` of {names} at {site.source} is frozen by `stop_gradient`, and not "
                "learned.",
                primitive=site.primitive,
                weight_path=frozen[0],
            )
        if not self.paths:
            return CompilationRecord(
                DiagnosticKind.RELATION_EXCLUDED_NO_PARAMSTATE,
                DiagnosticLevel.WARNING,
                f"`{site.primitive.name}` at {site.source} has no `ParamState` behind its weight, so there "
                "is nothing to learn there.",
                primitive=site.primitive,
            )
        fixed = {v for e in self.info.fixed for v in e.invars}
        for name, (inputs, carried, _) in self.found.items():
            foreign = [v for v in inputs if v not in fixed]
            if (foreign or carried) and self.behind[name]:
                what = (
                    ", ".join(dict.fromkeys(self._name(v) for v in foreign)) or "a value that a loop carries"
                )
                return CompilationRecord(
                    DiagnosticKind.TRAINABLE_INVAR_NOT_PARAMSTATE,
                    DiagnosticLevel.WARNING,
                    f"The weight {self.label} of `{site.primitive.name}` at {site.source} also depends on "
                    f"{what}, so it changes from step to step and no trace can be kept for it; it gets the "
                    "gradient within the step only.",
                    primitive=site.primitive,
                    weight_path=next(iter(self.paths.values())),
                )
        return None

    def _frozen(self) -> list[Path]:
        """The parameters that `stop_gradient` cuts off from the site."""
        behind = provenance(self.info.program)
        found = [v for w in self.site.weights.values() for v in behind.of(w)[0] if v in self.leaf_of]
        return list(dict.fromkeys(self.leaf_of[v][0] for v in found))

    def _name(self, var: Var) -> str:
        for entry in self.info.entries:
            if var in entry.invars:
                return f"the state `{show_path(entry.path)}`"
        return "the input"


def unknown_places(site: Site, weights: SiteWeights) -> CompilationRecord | None:
    """An op whose trace depends on indices (a sparse one) has none to go by in a branch not taken."""
    if "cond" not in site.context or site.num_inputs < 2:
        return None
    return CompilationRecord(
        DiagnosticKind.RELATION_EXCLUDED_SHAPE_MISMATCH,
        DiagnosticLevel.WARNING,
        f"`{site.primitive.name}` {weights.label} at {site.source} is inside a `cond` and takes "
        "indices, which are not known while the branch is not taken; it gets the gradient within the "
        "step, and no trace. Move "
        "the op out of the `cond`.",
        primitive=site.primitive,
        weight_path=next(iter(weights.paths.values())),
    )


def not_reached(site: Site, weights: SiteWeights, goal: Goal) -> CompilationRecord | None:
    if goal.direct:
        return None
    path = next(iter(weights.paths.values()))
    if goal.crossing:
        return CompilationRecord(
            DiagnosticKind.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT,
            DiagnosticLevel.INFO,
            f"`{site.primitive.name}` {weights.label} at {site.source} reaches the state only through "
            "another marked op; it gets the gradient within the step, and no trace.",
            primitive=site.primitive,
            weight_path=path,
        )
    return CompilationRecord(
        DiagnosticKind.RELATION_EXCLUDED_NON_TEMPORAL,
        DiagnosticLevel.INFO,
        f"`{site.primitive.name}` {weights.label} at {site.source} feeds no hidden state (a readout, say); "
        "the gradient within the step is all there is.",
        primitive=site.primitive,
        weight_path=path,
    )


def no_map(site: Site, weights: SiteWeights, group: HiddenGroup) -> CompilationRecord:
    names = ", ".join(f"`{show_path(p)}`" for p in group.hidden_paths)
    return CompilationRecord(
        DiagnosticKind.RELATION_EXCLUDED_SHAPE_MISMATCH,
        DiagnosticLevel.WARNING,
        f"The output {tuple(site.shape)} of `{site.primitive.name}` {weights.label} at {site.source} is "
        f"mixed on its way to {names} {tuple(group.varshape)} so that no position of it belongs to one of "
        "the state; it gets the gradient within the step, and no trace.",
        primitive=site.primitive,
        weight_path=next(iter(weights.paths.values())),
        hidden_paths=tuple(group.hidden_paths),
    )


def partial_path(
    info: ModuleInfo,
    site: Site,
    weights: SiteWeights,
    group: HiddenGroup,
    came: dict[Var, Reach],
    env: dict[Var, Reach],
    sites: dict[int, Reach],
) -> CompilationRecord:
    nodes: list[Node] = mixing_nodes(info, came, {**env, site.output: sites[site.index]})
    where = f"`{nodes[0].primitive.name}` at {nodes[0].source}" if nodes else "the step"
    origin = provenance(info.program)
    how = (
        "goes by indices that are known only as it runs, so that any position may reach any other"
        if nodes and any(origin.of(a)[0] for a in _indices(nodes[0]))
        else "mixes positions"
    )
    names = ", ".join(f"`{show_path(p)}`" for p in group.hidden_paths)
    return CompilationRecord(
        DiagnosticKind.RELATION_PARTIAL_PATH,
        DiagnosticLevel.WARNING,
        f"Between `{site.primitive.name}` {weights.label} at {site.source} and {names}, {where} "
        f"{how}; the trace keeps one position for each, and what goes to the others is learned within the "
        "step only.",
        primitive=site.primitive,
        weight_path=next(iter(weights.paths.values())),
        hidden_paths=tuple(group.hidden_paths),
        context={"sources": [n.source for n in nodes], "site": site, "nodes": nodes},
    )


def _indices(node: Node) -> tuple[Atom, ...]:
    return node.inputs[INDICES.get(node.primitive, slice(0))]


def included(
    relation: HiddenParamOpRelation, weights: SiteWeights, classes: dict[Path, PathClassification]
) -> list[CompilationRecord]:
    site = relation.site
    paths = tuple(relation.connected_hidden_paths)
    names = ", ".join(f"`{show_path(p)}`" for p in paths)
    records = [
        CompilationRecord(
            DiagnosticKind.RELATION_INCLUDED,
            DiagnosticLevel.INFO,
            f"`{site.primitive.name}` {weights.label} at {site.source} feeds {names} and is learned online.",
            primitive=site.primitive,
            weight_path=relation.weight_path,
            hidden_paths=paths,
        )
    ]
    mixed = tuple(p for p, c in classes.items() if c != PathClassification.ALL_DIRECT)
    if mixed:
        names = ", ".join(f"`{show_path(p)}`" for p in mixed)
        records.append(
            CompilationRecord(
                DiagnosticKind.RELATION_PARTIAL_PATH,
                DiagnosticLevel.INFO,
                f"`{site.primitive.name}` {weights.label} at {site.source} also reaches {names} through "
                "another marked op; the trace does not follow that path, which is learned within the step "
                "only.",
                primitive=site.primitive,
                weight_path=relation.weight_path,
                hidden_paths=mixed,
            )
        )
    for name, leaves in weights.behind.items():
        if len(leaves) > 1:
            several = ", ".join(f"`{show_path(p)}`" for p in dict.fromkeys(p for p, _ in leaves))
            records.append(
                CompilationRecord(
                    DiagnosticKind.PYTREE_WEIGHT_LEAF_AMBIGUOUS,
                    DiagnosticLevel.INFO,
                    f"The {name} of `{site.primitive.name}` at {site.source} is made of several leaves of "
                    f"{several}; each gets its share of the gradient.",
                    primitive=site.primitive,
                    weight_path=leaves[0][0],
                )
            )
    return records


def context_records(site: Site, weights: SiteWeights) -> list[CompilationRecord]:
    if not site.context:
        return []
    return [
        CompilationRecord(
            DiagnosticKind.PRIMITIVE_INSIDE_CONTROL_FLOW,
            DiagnosticLevel.INFO,
            f"`{site.primitive.name}` {weights.label} at {site.source} is inside "
            f"`{'`, `'.join(site.context)}`; it is followed there.",
            primitive=site.primitive,
            weight_path=next(iter(weights.paths.values()), None),
            context={"context": site.context, "loops": site.loops},
        )
    ]
