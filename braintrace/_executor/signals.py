"""The differentiable form of a step: learning signals and within-step gradients from one pull-back.

    step(params, args, consts, delta) -> outputs, new states

`delta` is added to each new state and seen only outside the state's own group, whose coupling is in the
traces; its derivative is the learning signal. At a site whose trace follows every path to a group, the
weight is held fixed on the way to that group: the trace stands for it, this step included. Everything
else is differentiated as it stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .._compiler.graph import ETraceGraph
from .._compiler.perturbation import worlds
from .._compiler.program import Node, Site, Var, View, World, evaluate
from .._compiler.slices import has_while


def traced_at(graph: ETraceGraph) -> set[tuple[int, World]]:
    """The (site, group) pairs whose trace stands for the whole of the site's effect on the group."""
    return {
        (r.site.index, g.index)
        for r in graph.hidden_param_op_relations
        for g, m in zip(r.hidden_groups, r.position_maps, strict=True)
        if m.complete
    }


def differentiable_step(
    graph: ETraceGraph, known: Mapping[Var, Any], deltas: Sequence[Any]
) -> tuple[list[Any], list[list[Any]]]:
    """The outputs, and the new values of each state's leaves, with `deltas` added to the hidden ones."""
    info = graph.module_info
    home = worlds(graph.hidden_groups)
    traced = traced_at(graph)
    added = {h.outvar: d for h, d in zip(info.hidden, deltas, strict=True)}

    def reads(var: Var, world: World) -> tuple[World, Any]:
        if var not in home or home[var] == world:
            return world, None
        return home[var], added[var]

    def rule(site: Site, world: World) -> Any:
        def at_site(site: Site, site_in: Any, operands: list[Any]) -> tuple[Any, None]:
            if (site.index, world) in traced:
                n = site.num_inputs
                operands = [*operands[:n], *map(jax.lax.stop_gradient, operands[n:])]
            return site.primitive.bind(*operands, **site.params), None

        return at_site

    def before(node: Node, vals: list[Any]) -> list[Any]:
        return list(map(jax.lax.stop_gradient, vals)) if has_while(node) else vals

    view = View(
        known={**info.program.consts, **known},
        at_site=rule,
        reads=reads,
        operands=lambda site, world: None,
        before=before,
    )
    states = [list(e.outvars) for e in info.entries]
    targets = [*info.out_atoms, *(a for outs in states for a in outs)]
    values = iter(evaluate(info.program, [(a, None) for a in targets], view))
    return [next(values) for _ in info.out_atoms], [[next(values) for _ in outs] for outs in states]
