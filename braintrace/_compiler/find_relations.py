"""Find the relations of a step: the weights of its sites, and the groups and positions that these feed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import jax.numpy as jnp
import numpy as np

from .dataflow import union
from .errors import CompilationError, NotSupportedError
from .findings import Finding, Found, Use
from .groups import HiddenGroup, mixing_nodes
from .links import numbered
from .module_info import ModuleInfo
from .positions import Positions
from .primitives import INDICES
from .program import Site, Var
from .provenance import Goal, Provenance, provenance
from .reach import Reach
from .relation import HiddenParamOpRelation, PathClassification, PositionMap
from .step import Path, show_path

_CLASSES = {  # by whether a path crosses no other marked op, and whether one does
    (1, 0): PathClassification.ALL_DIRECT,
    (0, 1): PathClassification.ALL_THROUGH_OTHER_ETP,
    (1, 1): PathClassification.MIXED,
}


def find_relations(
    info: ModuleInfo,
    groups: Sequence[HiddenGroup],
    positions: Positions,
    origin: Provenance,
    site_goals: dict[int, Goal],
) -> tuple[list[HiddenParamOpRelation], list[Finding]]:
    """One relation for each site that feeds a group and has parameters behind it, in program order."""
    leaves = [(g, h.path) for g in groups for h in g.hidden]
    bits = {g.index: sum(1 << i for i, (other, _) in enumerate(leaves) if other is g) for g in groups}
    stops = [_others(groups, g) for g in groups]
    reached = [
        positions.reaches({h.outvar: Reach.at(h.positions) for h in g.hidden}, stop)
        for g, stop in zip(groups, stops, strict=True)
    ]
    relations: list[HiddenParamOpRelation] = []
    findings: list[Finding] = []
    for site in info.program.sites:
        weights = SiteWeights(info, site, origin)
        if "while" in site.context:
            raise NotSupportedError(
                f"The marked op {weights.use} is inside a `while` loop, whose number of steps no trace can "
                "follow. Use `scan` or `fori_loop` with fixed bounds, or `x @ w` inside the loop to train "
                "the weight without a trace."
            )
        weights.refuse_integers()
        if site.context:
            findings.append(Finding(Found.IN_CONTROL_FLOW, of=weights.use))
        goal = site_goals.get(site.index, Goal())
        ways = {path: (goal.direct >> i & 1, goal.crossing >> i & 1) for i, (_, path) in enumerate(leaves)}
        classes = {path: _CLASSES[way] for path, way in ways.items() if any(way)}
        if (why_not := weights.why_not(goal)) is not None:
            findings.append(why_not)
            continue
        fed: list[HiddenGroup] = []
        maps: list[PositionMap] = []
        for group, (env, sites), stop in zip(groups, reached, stops, strict=True):
            if not goal.direct & bits[group.index]:
                continue
            found = _position_map(site, group, sites.get(site.index), positions, stop)
            if found is None:
                paths, shape = tuple(group.hidden_paths), tuple(group.varshape)
                findings.append(Finding(Found.NO_POSITION, of=weights.use, states=paths, detail=shape))
                continue
            fed.append(group)
            maps.append(found[0])
            if not found[0].complete:
                findings.append(_keeps_one_position(info, weights.use, group, found[1], env, sites))
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
        findings += _included(relation, weights)
    return relations, findings


def _others(groups: Sequence[HiddenGroup], group: HiddenGroup) -> Callable[[Var], bool]:
    """A predicate for the new states of other groups, at which paths end."""
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
    # the cheapest exact map first, because the forward analysis is another pass over the program
    if reach.width <= 1:
        return PositionMap(False, np.where(reach.highest < 0, -1, reach.lowest), True, reach), {}
    numbers = numbered(site.shape)
    came = positions.sources({}, {site.index: Reach.at(numbers)}, stop=stop)
    merged = union(one for h in group.hidden for one in _states(came.get(h.outvar), h.axis))
    assert merged is not None
    if merged.width <= 1:  # a broadcast
        src = np.where(merged.highest < 0, -1, merged.lowest)
        return PositionMap(True, src, True, reach, 1), came
    # from here on no map is exact; take the one direct path to each position, if there is one
    used = reach.highest >= 0
    if np.all(reach.direct[used] >= 0):
        return PositionMap(False, reach.direct, False, reach, merged.width), came
    if np.all(merged.direct[merged.highest >= 0] >= 0):
        return PositionMap(True, merged.direct, False, reach, merged.width), came
    # everything is mixed, as in a layer norm; with equal shapes, each position is mapped to itself
    if tuple(site.shape) == tuple(group.varshape):
        inside = (reach.lowest <= numbers) & (numbers <= reach.highest)
        return PositionMap(False, np.where(inside, numbers, -1), False, reach, merged.width), came
    return None


def _states(reach: Reach | None, axis: int | None) -> list[Reach]:
    if reach is None:
        return []
    if axis is None:
        return [reach]
    at = axis + 1  # after that of the two kinds of reach
    return [Reach(reach.low.take(s, at), reach.high.take(s, at)) for s in range(reach.shape[axis])]


class SiteWeights:
    """The weights of a site and the parameters that they depend on."""

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

    @cached_property
    def use(self) -> Use:
        return Use(self.site, tuple(dict.fromkeys(p for leaves in self.behind.values() for p, _ in leaves)))

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

    def why_not(self, goal: Goal) -> Finding | None:
        """Why a site that reaches `goal` has no trace; None if it has one."""
        if not self.paths:
            if frozen := self._frozen():
                return Finding(Found.FROZEN, of=Use(self.site, frozen))
            return Finding(Found.NO_PARAMETER, of=self.use)
        if (foreign := self.changed_by()) is not None:
            state_of = {v: e.path for e in self.info.entries for v in e.invars}
            return Finding(Found.CHANGES, of=self.use, detail=tuple(map(state_of.get, foreign)))
        # the trace of an op with index inputs (a sparse one) depends on them: unknown in a branch not taken
        if "cond" in self.site.context and self.site.num_inputs > 1:
            return Finding(Found.UNKNOWN_INDICES, of=self.use)
        if goal.direct:
            return None
        return Finding(Found.BEHIND_ANOTHER if goal.crossing else Found.NO_STATE, of=self.use)

    def changed_by(self) -> list[Var] | None:
        """The inputs of the step that change a weight from step to step; None if no input does.

        A weight that is not learned, such as a bias, may depend on data.
        """
        fixed = set(self.info.fixed_invars)
        learned = self.site.made_from(self.paths)
        for name, (inputs, carried, _) in self.found.items():
            harmless = fixed if name in learned else fixed.union(self.info.arg_invars)
            foreign = [v for v in inputs if v not in harmless]
            if foreign or carried:
                return foreign
        return None

    def _frozen(self) -> tuple[Path, ...]:
        """The parameters that the weights depend on only through `stop_gradient`."""
        behind = provenance(self.info.program)
        found = [v for w in self.site.weights.values() for v in behind.of(w)[0] if v in self.leaf_of]
        return tuple(dict.fromkeys(self.leaf_of[v][0] for v in found))


def _keeps_one_position(
    info: ModuleInfo,
    use: Use,
    group: HiddenGroup,
    came: dict[Var, Reach],
    env: dict[Var, Reach],
    sites: dict[int, Reach],
) -> Finding:
    """The nodes that mix the output of a site on its way to a group."""
    site = use.site
    nodes = tuple(mixing_nodes(info, came, {**env, site.output: sites[site.index]}))
    origin = provenance(info.program)
    indices = nodes[0].inputs[INDICES.get(nodes[0].primitive, slice(0))] if nodes else ()
    by_indices = any(origin.of(a)[0] for a in indices)
    kind = Found.INDEXED_ON_THE_WAY if by_indices else Found.MIXED_ON_THE_WAY
    return Finding(kind, of=use, states=tuple(group.hidden_paths), nodes=nodes)


def _included(relation: HiddenParamOpRelation, weights: SiteWeights) -> list[Finding]:
    """The findings about a site that has traces."""
    use, classes = weights.use, relation.path_classification
    crossing = tuple(p for p, c in classes.items() if c != PathClassification.ALL_DIRECT)
    return [
        Finding(Found.INCLUDED, of=use, states=tuple(relation.connected_hidden_paths)),
        *([Finding(Found.ALSO_THROUGH_OPS, of=use, states=crossing)] if crossing else []),
        *(
            Finding(Found.SEVERAL_LEAVES, tuple(p for p, _ in leaves), use, detail=name)
            for name, leaves in weights.behind.items()
            if len(leaves) > 1
        ),
    ]
