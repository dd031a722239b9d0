"""Necks: small intermediate arrays, such as the sums of a norm, through which a step mixes positions.

With the necks `n` held fixed, each element reaches a single position, and

    dh[i]/dp[i] = (dh[i]/dp[i] with n held) + sum_n dh[i]/dn dn/dp[i]

takes one pull-back plus two for each neck, instead of one for each position (50 steps of 256 units with a
layer norm on a CPU: 16 ms instead of 660).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._compiler.graph import TraceGraph
from .._compiler.groups import HiddenGroup
from .._compiler.links import Array as NpArray
from .._compiler.links import numbered
from .._compiler.positions import positions_of
from .._compiler.primitives import REDUCTIONS, WINDOWS
from .._compiler.program import Var
from .._compiler.reach import Reach, SiteReach
from .._compiler.relation import HiddenParamOpRelation, PositionMap
from .._types import DTypeLike, Shape

FedBy = Sequence[tuple[HiddenParamOpRelation, PositionMap]]


@dataclass(frozen=True, eq=False)
class Neck:
    """One neck, with the element of it that each array element affects or depends on (-1: none)."""

    var: Var
    new: list[NpArray]  # for each position of each new state
    old: list[NpArray]  # for each position of each old state
    sites: dict[int, NpArray]  # for each element of the outputs of sites


@dataclass(frozen=True, eq=False)
class Necks:
    """All necks of a group, and whether each element reaches its own position with the necks held fixed."""

    all: list[Neck]
    old: list[NpArray]
    sites: dict[int, NpArray]

    @staticmethod
    def find(graph: TraceGraph, group: HiddenGroup, fed_by: FedBy, varies: set[Var]) -> Necks | None:
        """The necks of a group; None if there are none, or if positions also mix otherwise."""
        program = graph.module_info.program
        own = numbered(group.varshape)
        plain = all(h.num_state == 1 and np.array_equal(h.positions, own) for h in group.hidden)
        if (
            not plain
            or jnp.issubdtype(group.dtype, jnp.complexfloating)
            or any(m.on_hidden for _, m in fed_by)
        ):
            return None
        positions = positions_of(program)
        starts = {v: Reach.at(own) for v in group.hidden_outvars}
        on_the_way, _ = positions.reaches(starts)
        if any(v in on_the_way and v in varies for v in graph.other_outvars(group)):
            return None
        nodes = [n for n in program.nodes if n.primitive in REDUCTIONS | WINDOWS and len(n.outputs) == 1]
        found = [v for n in nodes for v in n.outputs if v in varies and v in on_the_way]
        old, sites = positions.reaches(starts, lambda v: v in found)
        direct = _numbers(old, sites, group, fed_by)
        if not found or direct is None:
            return None
        necks = []
        for var in found:
            number = {var: Reach.identity(var.aval.shape)}
            back = _numbers(*positions.reaches(number), group, fed_by)
            came = positions.sources(number, {}, lambda v: v in found)
            new = [came.get(v) for v in group.hidden_outvars]
            if back is None or _any_several(new):
                return None
            necks.append(Neck(var, [_number(r, group.varshape) for r in new], *back))
        held_sites = {r.site.index: (direct[1][r.site.index] == m.map) & (m.map >= 0) for r, m in fed_by}
        return Necks(necks, [a == own for a in direct[0]], held_sites)


def _number(reach: Reach | None, shape: Shape) -> NpArray:
    """The one position that each element reaches (-1: none)."""
    return np.full(shape, -1) if reach is None else np.where(reach.highest >= 0, reach.lowest, -1)


def _any_several(reached: Iterable[Reach | None]) -> bool:
    """Whether any element reaches several positions."""
    return any(r is not None and r.width > 1 for r in reached)


def _numbers(
    env: dict[Var, Reach], sites: SiteReach, group: HiddenGroup, fed_by: FedBy
) -> tuple[list[NpArray], dict[int, NpArray]] | None:
    """The position that each element of the old states and of the sites reaches; None if several."""
    old = [env.get(h.invar) for h in group.hidden]
    if _any_several([*old, *(sites.get(r.site.index) for r, _ in fed_by)]):
        return None
    at = {r.site.index: _number(sites.get(r.site.index), r.site.shape) for r, _ in fed_by}
    return [_number(r, group.varshape) for r in old], at


def through(
    necks: Necks,
    fed_by: FedBy,
    D: list[list[Array]],
    J: dict[int, list[Array]],
    values: Sequence[Array],
    pull: Callable[[list[Array]], tuple[list[Array], dict[int, Array]]],
    push: Callable[[list[Array]], list[Array]],
) -> tuple[list[list[Array]], dict[int, list[Array]]]:
    """Add the contributions of each neck to the Jacobians `D`, `J` with necks held fixed.

    `pull` takes cotangents of the necks to the old states and sites, `push` takes tangents of the necks to
    the new states; `values` are the values of the necks.
    """
    for k, neck in enumerate(necks.all):
        ones = [jnp.full_like(v, i == k) for i, v in enumerate(values)]
        (dold, dsites), dnew = pull(ones), push(ones)
        for s, (new, at) in enumerate(zip(dnew, neck.new, strict=True)):
            for c, (old, of) in enumerate(zip(dold, neck.old, strict=True)):
                D[s][c] = D[s][c] + _where((at == of) & (of >= 0), new * old, D[s][c].dtype)
            for r, m in fed_by:
                i, places = r.site.index, np.maximum(m.map, 0).ravel()
                same = (
                    (at.ravel()[places].reshape(m.map.shape) == neck.sites[i])
                    & (neck.sites[i] >= 0)
                    & (m.map >= 0)
                )
                there = new.ravel()[places].reshape(m.map.shape)
                J[i][s] = J[i][s] + _where(same, there * dsites[i], J[i][s].dtype)
    return D, J


def _where(kept: NpArray, value: Array, dtype: DTypeLike) -> Array:
    value = value.astype(dtype)
    return value if np.all(kept) else jnp.where(jnp.asarray(kept), value, jnp.zeros_like(value))
