"""The weights of a site, the parameters that they depend on, and whether the site has a trace."""

from __future__ import annotations

from functools import cached_property

import jax.numpy as jnp

from .errors import CompilationError
from .findings import Finding, Found, Use
from .groups import HiddenGroup, mixing_nodes
from .module_info import ModuleInfo
from .primitives import INDICES
from .program import Atom, Node, Site, Var
from .provenance import Goal, Provenance, provenance
from .reach import Reach
from .relation import HiddenParamOpRelation, PathClassification
from .step import Path, show_path


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
            return Finding(Found.CHANGES, of=self.use, detail=tuple(map(self._state_of, foreign)))
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

    def _state_of(self, var: Var) -> Path | None:
        return next((e.path for e in self.info.entries if var in e.invars), None)


def keeps_one_position(
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
    by_indices = bool(nodes) and any(origin.of(a)[0] for a in _indices(nodes[0]))
    kind = Found.INDEXED_ON_THE_WAY if by_indices else Found.MIXED_ON_THE_WAY
    return Finding(kind, of=use, states=tuple(group.hidden_paths), nodes=nodes)


def _indices(node: Node) -> tuple[Atom, ...]:
    return node.inputs[INDICES.get(node.primitive, slice(0))]


def included(relation: HiddenParamOpRelation, weights: SiteWeights) -> list[Finding]:
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
