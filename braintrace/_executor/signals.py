"""The step with perturbed states: one pull-back gives learning signals and within-step gradients.

    step(params, args, consts, delta, old delta) -> outputs, new states

`delta` is added to each new state for readers outside its own group, whose coupling is in the traces; its
derivative is the learning signal. `old delta` is added to each old state on paths to the outputs that pass no
new state: the traces before the step give the gradient of an output that reads the old state. If the trace of
a site covers every path to a group, the weight is held fixed on paths to that group, because the trace
includes this step. Everything else is differentiated as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .. import _compat
from .._compiler.evaluation import AtSite, View, World, evaluate
from .._compiler.graph import TraceGraph
from .._compiler.perturbation import worlds
from .._compiler.program import Atom, Node, Site, Var
from .._compiler.slices import behind, has_while
from .._types import Array


def traced_at(graph: TraceGraph) -> set[tuple[int, World]]:
    """The (site, group) pairs whose trace covers every path from the site to the group."""
    return {
        (r.site.index, g.index) for r in graph.hidden_param_op_relations for g, m in r.feeds if m.complete
    }


_INNER = "inside"  # the world of the operands of sites that feed groups: old states are not perturbed there


def reads_old_states(graph: TraceGraph) -> bool:
    """Whether an output depends on an old hidden state along a path that passes no new one."""
    info = graph.module_info
    new = {h.outvar for h in info.hidden}
    read = behind(info.program, [*info.out_atoms, *_others(graph)], stops=new)
    return any(h.invar in read for h in info.hidden)


def _others(graph: TraceGraph) -> list[Atom]:
    """The new values of all states that the step writes."""
    info = graph.module_info
    return [a for e in info.entries for v, a in zip(e.invars, e.outvars, strict=True) if a is not v]


def differentiable_step(
    graph: TraceGraph,
    known: Mapping[Var, Array],
    deltas: Sequence[Array],
    old_deltas: Sequence[Array],
    ys: Mapping[int, KnownOutput],
    more: Mapping[Var, tuple[int, Array]],
    at_sites: Mapping[int, Array],
) -> tuple[list[Array], list[list[Array]]]:
    """Evaluate outputs and new leaves of each carried state, with `deltas` added to the hidden states.

    `old_deltas` may be empty if no output reads an old state; `ys` are known outputs of sites; `more` holds
    (group, perturbation) of other variables, added for readers outside of that group. `at_sites` holds
    perturbations of the outputs of sites, in place of the derivatives in their weights.
    """
    info = graph.module_info
    home = worlds(graph.hidden_groups)
    traced = traced_at(graph)
    added = {h.outvar: d for h, d in zip(info.hidden, deltas, strict=True)}
    # `strict` if there are any: all old states are perturbed, or none
    added_before = {h.invar: d for h, d in zip(info.hidden, old_deltas, strict=bool(old_deltas))}

    def reads(var: Var, world: World) -> tuple[World, Array | None]:
        if world is None and var in added_before:
            return world, added_before[var]
        if var in more and more[var][0] != world:
            return world, more[var][1]
        if var not in home or home[var] == world:
            return world, None
        return home[var], added[var]

    def rule(site: Site, world: World) -> AtSite:
        def at_site(
            site: Site, given: tuple[KnownOutput | None, Array | None] | None, operands: list[Array]
        ) -> tuple[Array, None]:
            known_output, delta = given or (None, None)
            is_traced = (site.index, world) in traced
            if is_traced or delta is not None:
                n = site.num_inputs
                operands = [*operands[:n], *map(jax.lax.stop_gradient, operands[n:])]
            y = output(site, known_output, operands)
            return y if is_traced or delta is None else y + delta, None

        return at_site

    def before(node: Node, vals: list[Array]) -> list[Array]:
        return list(map(jax.lax.stop_gradient, vals)) if has_while(node) else vals

    view = View(
        known={**info.program.consts, **known},
        at_site=rule,
        reads=reads,
        operands=lambda site, world: None if world is None else _INNER,
        before=before,
        site_ins={i: (ys.get(i), at_sites.get(i)) for i in {*ys, *at_sites}},
    )
    states = [list(e.outvars) for e in info.carried]
    targets = [*info.out_atoms, *(a for outs in states for a in outs)]
    values = iter(evaluate(info.program, [(a, None) for a in targets], view))
    return [next(values) for _ in info.out_atoms], [[next(values) for _ in outs] for outs in states]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KnownOutput:
    """Known values at a site: the output and, if it was gathered across devices, the first input."""

    y: Array
    x: Array | None = None

    def operands(self, operands: list[Array]) -> list[Array]:
        """The operands of the site, with the known value of the first."""
        return operands if self.x is None else [_instead(operands[0], self.x), *operands[1:]]


@jax.custom_jvp
def _instead(x: Array, known: Array) -> Array:
    """The known value of `x`, with the derivative of `x`."""
    return known


Pair = tuple[Array, Array]


@_instead.defjvp
def _(primals: Pair, tangents: Pair) -> Pair:
    return primals[1], tangents[0]


def output(site: Site, known_output: KnownOutput | None, operands: list[Array]) -> Array:
    """The output of a site; a known output has the derivative of the op."""

    def op(*operands: Array) -> Array:
        return site.primitive.bind(*operands, **site.params)  # type: ignore[no-any-return]

    if known_output is None:
        return op(*operands)

    @jax.custom_jvp
    def known(y: Array, *operands: Array) -> Array:
        return y

    def tangent(primals: tuple[Array, ...], tangents: tuple[Any, ...]) -> Pair:
        _, *operands = primals
        live = [i for i, t in enumerate(tangents[1:]) if not _is_zero(t)]

        over_live = _compat.with_live(op, operands, live)
        given = [operands[i] for i in live], [tangents[1 + i] for i in live]
        return primals[0], jax.jvp(over_live, *given)[1] if live else jnp.zeros_like(primals[0])

    known.defjvp(tangent, symbolic_zeros=True)
    return known(known_output.y, *known_output.operands(operands))


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero) or tangent.dtype == jax.dtypes.float0
