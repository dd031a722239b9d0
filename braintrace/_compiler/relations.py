"""Relations: which site feeds which hidden group, through which parameter, and at which positions."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import brainstate
import jax.numpy as jnp
import numpy as np

from .._compat import ClosedJaxpr
from .._ops.letters import Layout
from .._ops.primitive import ETPPrimitive
from .diagnostics import CompilationRecord, DiagnosticKind, DiagnosticLevel, show_path
from .errors import CompilationError, NotSupportedError
from .groups import HiddenGroup, mixing_nodes
from .links import Array
from .module_info import ModuleInfo, Path
from .positions import Positions, Reach
from .program import Atom, Node, Site, Var
from .provenance import Goal, Provenance, provenance
from .slices import Slice, between, cut_after


class PathClassification(enum.StrEnum):
    """How a site's output gets to a hidden state within the step."""

    ALL_DIRECT = "all_direct"
    ALL_THROUGH_OTHER_ETP = "all_through_other_etp"
    MIXED = "mixed"


@dataclass(frozen=True, eq=False)
class PositionMap:
    """Where the trace of a site lives, and which hidden position belongs to each of its positions.

    On `y`: `map[y position]` is the hidden position that it reaches. On the hidden positions (a
    broadcast): `map[hidden position]` is the position of `y` that it comes from. -1: none.
    `complete` is false where paths to other positions are left out of the trace.
    """

    on_hidden: bool
    map: Array
    complete: bool
    reach: Reach = field(repr=False)
    source_width: int | None = None

    @property
    def is_identity(self) -> bool:
        return bool(np.array_equal(self.map.ravel(), np.arange(self.map.size)))


@dataclass(frozen=True, eq=False)
class HiddenParamOpRelation:
    """One site, the parameters behind its weights and the hidden groups that it feeds."""

    site: Site
    info: ModuleInfo
    hidden_groups: list[HiddenGroup]
    position_maps: list[PositionMap]
    path_classification: dict[Path, PathClassification]
    trainable_paths: dict[str, Path]
    trainable_leaf_indices: dict[str, int]
    trainable_leaves: dict[str, tuple[tuple[Path, int], ...]]  # all that a weight is made of
    varying: tuple[str, ...] = ()

    def __repr__(self) -> str:
        names = [
            ", ".join(map(show_path, paths)) for paths in (self.param_paths, self.connected_hidden_paths)
        ]
        return f"<HiddenParamOpRelation: {self.primitive} of {names[0]} feeds {names[1]}>"

    @property
    def primitive(self) -> ETPPrimitive:
        return self.site.primitive

    @property
    def eqn_params(self) -> dict[str, Any]:
        return self.site.params

    @property
    def x_var(self) -> Atom | None:
        return self.site.inputs[0] if self.site.num_inputs else None

    @property
    def y_var(self) -> Var:
        return self.site.output

    x, y = x_var, y_var

    @property
    def trainable_vars(self) -> dict[str, Atom]:
        return self.site.weights

    @property
    def trainable_param_states(self) -> dict[str, brainstate.State]:
        states = {e.path: e.state for e in self.info.params}
        return {name: states[path] for name, path in self.trainable_paths.items()}

    @cached_property
    def trainable_processing_chains(self) -> dict[str, tuple[Any, ...]]:
        """The primitives that each weight goes through between its parameter and the op."""
        result = {}
        for name, leaves in self.trainable_leaves.items():
            inputs = [v for v, leaf in self.info.invar_to_leaf.items() if leaf in leaves]
            inside = bool(self.site.context)
            nodes = [] if inside else between(self.info.program, inputs, [self.site.weights[name]])
            result[name] = tuple(n.primitive for n in nodes)
        return result

    @property
    def param_paths(self) -> list[Path]:
        """Every parameter that the weights are made of."""
        return list(dict.fromkeys(p for leaves in self.trainable_leaves.values() for p, _ in leaves))

    @property
    def weight_path(self) -> Path:
        return next(iter(self.trainable_paths.values()))

    path = weight_path

    @property
    def connected_hidden_paths(self) -> list[Path]:
        return [p for p, c in self.path_classification.items() if c != "all_through_other_etp"]

    @property
    def complete(self) -> bool:
        """Whether the trace follows every path from the site to its groups within the step."""
        return all(m.complete for m in self.position_maps)

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        return self.site.layouts(self.varying)

    @cached_property
    def _slices(self) -> list[Slice]:
        return [cut_after(self.info.program, self.site, g.hidden_outvars) for g in self.hidden_groups]

    @property
    def y_to_hidden_group_jaxprs(self) -> list[ClosedJaxpr]:
        """For each group, `(y, constants) -> new states`, along paths without another marked op."""
        return [s.jaxpr for s in self._slices]

    @property
    def y_to_hidden_group_constvars(self) -> list[list[Var]]:
        """What each of `y_to_hidden_group_jaxprs` takes after `y`."""
        return [s.constvars for s in self._slices]

    def y_to_hidden_groups(
        self, y: Any, consts: Sequence[Sequence[Any]], concat_hidden_vals: bool = True
    ) -> list[Any]:
        """The new states of each group, given `y` and the constants of each slice."""
        values = [s.call([y], c) for s, c in zip(self._slices, consts, strict=True)]
        if not concat_hidden_vals:
            return values
        return [g.concat_hidden(v) for g, v in zip(self.hidden_groups, values, strict=True)]

    def dict(self) -> dict[str, Any]:
        names = (
            "primitive x_var y_var hidden_groups y_to_hidden_group_jaxprs connected_hidden_paths eqn_params "
            "path_classification trainable_vars trainable_paths trainable_leaf_indices "
            "trainable_param_states trainable_processing_chains"
        )
        return {name: getattr(self, name) for name in names.split()}


def find_relations(
    info: ModuleInfo,
    groups: Sequence[HiddenGroup],
    positions: Positions,
    origin: Provenance,
    site_goals: dict[int, Goal],
) -> tuple[list[HiddenParamOpRelation], list[CompilationRecord]]:
    """One relation for each site that feeds a group and has parameters behind it, in program order."""
    leaves = [(g, h.path) for g in groups for h in g.hidden]
    bits = {g.index: sum(1 << i for i, (other, _) in enumerate(leaves) if other is g) for g in groups}
    stops = [_others(groups, g) for g in groups]
    reached = [
        positions.reaches({h.outvar: Reach.at(h.positions) for h in g.hidden}, stop)
        for g, stop in zip(groups, stops, strict=True)
    ]
    relations: list[HiddenParamOpRelation] = []
    records: list[CompilationRecord] = []
    for site in info.program.sites:
        weights = _Weights(info, site, origin)
        if "while" in site.context:
            raise NotSupportedError(
                f"The marked op `{site.primitive.name}` {weights.label} at {site.source} is inside a `while` "
                "loop, whose number of steps no trace can follow. Use `scan` or `fori_loop` with fixed "
                "bounds, or `x @ w` inside the loop to train the weight without a trace."
            )
        weights.refuse_integers()
        records += _context_records(site, weights)
        goal = site_goals.get(site.index, Goal())
        classes = {}
        for i, (_, path) in enumerate(leaves):
            direct, crossing = goal.direct >> i & 1, goal.crossing >> i & 1
            if direct or crossing:
                classes[path] = (
                    PathClassification.MIXED
                    if direct and crossing
                    else PathClassification.ALL_DIRECT
                    if direct
                    else PathClassification.ALL_THROUGH_OTHER_ETP
                )
        problem = weights.problem() or _unknown_places(site, weights) or _not_reached(site, weights, goal)
        if problem is not None:
            records.append(problem)
            continue
        fed: list[HiddenGroup] = []
        maps: list[PositionMap] = []
        for group, (env, sites), stop in zip(groups, reached, stops, strict=True):
            if not goal.direct & bits[group.index]:
                continue
            found = _position_map(site, group, sites.get(site.index), positions, stop)
            if found is None:
                records.append(_no_map(site, weights, group))
                continue
            fed.append(group)
            maps.append(found[0])
            if not found[0].complete:
                records.append(_partial(info, site, weights, group, found[1], env, sites))
        if not fed:
            continue
        relation = HiddenParamOpRelation(
            site=site,
            info=info,
            hidden_groups=fed,
            position_maps=maps,
            path_classification=classes,
            trainable_paths=weights.paths,
            trainable_leaf_indices=weights.leaf_indices,
            trainable_leaves={name: tuple(leaves) for name, leaves in weights.behind.items()},
            varying=weights.varying,
        )
        relations.append(relation)
        records += _included(relation, weights, classes)
    return relations, records


def _others(groups: Sequence[HiddenGroup], group: HiddenGroup) -> Callable[[Var], bool]:
    """A path ends at the new state of another group: what comes after is that group's affair."""
    others = {v for g in groups if g is not group for v in g.hidden_outvars}
    return lambda v: v in others


def _position_map(
    site: Site,
    group: HiddenGroup,
    reach: Reach | None,
    positions: Positions,
    stop: Callable[[Var], bool],
) -> tuple[PositionMap, dict[Var, Reach]] | None:
    if reach is None or reach.is_empty:
        return None
    if reach.width <= 1:
        return PositionMap(False, np.where(reach.highest < 0, -1, reach.lowest), True, reach), {}
    size = int(np.prod(site.shape, dtype=int))
    numbers = np.arange(size).reshape(site.shape)
    came = positions.sources({}, {site.index: Reach.at(numbers)}, stop=stop)
    merged: Reach | None = None
    for h in group.hidden:
        part = came.get(h.outvar)
        for one in _states(part, h.grouped):
            merged = one if merged is None else merged.merge(one)
    assert merged is not None
    if merged.width <= 1:
        src = np.where(merged.highest < 0, -1, merged.lowest)
        return PositionMap(True, src, True, reach, 1), came
    used = reach.highest >= 0
    if np.all(reach.direct[used] >= 0):
        return PositionMap(False, reach.direct, False, reach, merged.width), came
    if np.all(merged.direct[merged.highest >= 0] >= 0):
        return PositionMap(True, merged.direct, False, reach, merged.width), came
    if tuple(site.shape) == tuple(group.varshape):
        inside = (reach.lowest <= numbers) & (numbers <= reach.highest)
        return PositionMap(False, np.where(inside, numbers, -1), False, reach, merged.width), came
    return None


def _states(reach: Reach | None, grouped: bool) -> list[Reach]:
    if reach is None:
        return []
    if not grouped:
        return [reach]
    return [Reach(reach.low[..., s], reach.high[..., s]) for s in range(reach.shape[-1])]


def name_site(info: ModuleInfo, site: Site, origin: Provenance) -> str:
    """A site in words: its op, the parameters behind it, and where it is."""
    return f"`{site.primitive.name}` {_Weights(info, site, origin).label} at {site.source}"


class _Weights:
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
        for name, (inputs, carried, _) in self.found.items():
            foreign = [v for v in inputs if v not in self.leaf_of]
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


def _unknown_places(site: Site, weights: _Weights) -> CompilationRecord | None:
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


def _not_reached(site: Site, weights: _Weights, goal: Goal) -> CompilationRecord | None:
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


def _no_map(site: Site, weights: _Weights, group: HiddenGroup) -> CompilationRecord:
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


def _partial(
    info: ModuleInfo,
    site: Site,
    weights: _Weights,
    group: HiddenGroup,
    came: dict[Var, Reach],
    env: dict[Var, Reach],
    sites: dict[int, Reach],
) -> CompilationRecord:
    nodes: list[Node] = mixing_nodes(info, came, {**env, site.output: sites[site.index]})
    where = f"`{nodes[0].primitive.name}` at {nodes[0].source}" if nodes else "the step"
    names = ", ".join(f"`{show_path(p)}`" for p in group.hidden_paths)
    return CompilationRecord(
        DiagnosticKind.RELATION_PARTIAL_PATH,
        DiagnosticLevel.WARNING,
        f"Between `{site.primitive.name}` {weights.label} at {site.source} and {names}, {where} mixes "
        "positions; the trace keeps one position for each, and what goes to the others is learned within "
        "the step only.",
        primitive=site.primitive,
        weight_path=next(iter(weights.paths.values())),
        hidden_paths=tuple(group.hidden_paths),
        context={"sources": [n.source for n in nodes], "site": site, "nodes": nodes},
    )


def _included(
    relation: HiddenParamOpRelation, weights: _Weights, classes: dict[Path, PathClassification]
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


def _context_records(site: Site, weights: _Weights) -> list[CompilationRecord]:
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
