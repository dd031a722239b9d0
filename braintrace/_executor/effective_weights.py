"""Compute the effective weights of sites from the parameters, also inside control flow.

A weight may be pre-processed in any way before it reaches its op. Traces are those of the effective weight,
and the derivative of this function takes their gradient back to the parameters. A branch of a `cond` is
always evaluated, because the trace may come from earlier steps that took it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .. import _compat
from .._compat import primitives
from .._compiler.module_info import ModuleInfo
from .._compiler.program import Atom, Node, Program, Site, Var
from .._compiler.relation import HiddenParamOpRelation
from .._compiler.slices import behind, values_of
from .._ops.axis_labels import Layout, over_levels

Names = tuple[str, ...]
Effective = dict[int, dict[str, Array]]  # by site, by name


@dataclass(frozen=True, eq=False)
class Weighted:
    """A site whose weights depend on parameters alone."""

    site: Site
    varying: tuple[str, ...]  # the weights that a loop around it slices
    layouts: dict[str, Layout]


OfWeights = HiddenParamOpRelation | Weighted


def known_params(info: ModuleInfo, params: Sequence[Array], consts: Sequence[Array]) -> dict[Var, Array]:
    """The values of the parameters and of the constants, by variable."""
    known = dict(zip(info.fixed_invars, params, strict=True))
    known.update(zip(info.program.consts, consts, strict=True))
    return known


def effective_weights(
    program: Program, known: Mapping[Var, Array], relations: Sequence[OfWeights]
) -> Effective:
    """The effective weights of each relation's site, given the values of the parameters."""
    result: Effective = {}
    for relation in relations:
        site, varying = relation.site, relation.varying
        names = site.made_from(relation.layouts)
        raw = _site_weights(program, known, site, names, set(varying))
        loops = [tuple(name in varying for name in names)] * len(site.loops)

        def effective(*weights: Array, site: Site = site, names: Names = names) -> dict[str, Array]:
            if not site.primitive.merges:
                return dict(zip(names, weights, strict=True))
            return site.primitive.effective(weights, site.params)

        result[site.index] = over_levels(effective, loops)(*raw)
    return result


def _site_weights(
    program: Program, known: Mapping[Var, Array], site: Site, names: Names, varying: set[str]
) -> list[Array]:
    """Weight operands of a site; those that vary in a loop have its axis in front."""
    node = program.nodes[program.holder[site.index]]
    known = {**program.consts, **known}
    if node.site is site:
        return values_of(program, [site.weights[name] for name in names], known)
    inner = next(p for p in node.inner if any(s is site for s in p.sites))
    wanted = needs(inner, site, names)
    atoms = _operands(node)
    given = [i for i, v in enumerate(inner.inputs) if v in wanted]
    values = dict(zip(given, values_of(program, [atoms[i] for i in given], known), strict=True))

    def enter(values: Mapping[int, Array]) -> list[Array]:
        return _site_weights(inner, {inner.inputs[i]: v for i, v in values.items()}, site, names, varying)

    if node.primitive is not primitives.scan_p:
        return enter(values)
    num_consts, num_carry = _compat.scan_counts(node.eqn)
    sliced = {i: v for i, v in values.items() if i >= num_consts + num_carry}
    fixed = {i: v for i, v in values.items() if i < num_consts}
    if not sliced:
        length = node.params["length"]
        return [
            jnp.broadcast_to(w, (length, *w.shape)) if name in varying else w
            for name, w in zip(names, enter(fixed), strict=True)
        ]
    flags = [0 if name in varying else None for name in names]
    return jax.vmap(lambda s: enter({**fixed, **s}), out_axes=flags)(sliced)


def _operands(node: Node) -> list[Atom]:
    """The operands of a node in the order of its inner program's inputs."""
    return list(node.inputs[1:] if node.primitive is primitives.cond_p else node.inputs)


def needs(program: Program, site: Site, names: Names) -> set[Var]:
    """The variables that weights of a site, which may be inside control flow, depend on."""
    holder = program.nodes[program.holder[site.index]]
    if holder.site is site:
        wanted = [site.weights[name] for name in names]
    else:
        inner = next(p for p in holder.inner if any(s is site for s in p.sites))
        below = needs(inner, site, names)
        pairs = zip(_operands(holder), inner.inputs, strict=True)
        wanted = [a for a, v in pairs if v in below]
    return behind(program, wanted)
