"""Find the relations of a step: the sites that feed hidden groups, and at which positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .errors import NotSupportedError
from .findings import Finding, Found
from .groups import HiddenGroup
from .links import numbered
from .module_info import ModuleInfo
from .positions import Positions
from .program import Site, Var
from .provenance import Goal, Provenance
from .reach import Reach
from .relation import HiddenParamOpRelation, PathClassification, PositionMap
from .site_weights import SiteWeights, included, keeps_one_position


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
                findings.append(keeps_one_position(info, weights.use, group, found[1], env, sites))
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
        findings += included(relation, weights)
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
    merged: Reach | None = None
    for h in group.hidden:
        part = came.get(h.outvar)
        for one in _states(part, h.axis):
            merged = one if merged is None else merged | one
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
