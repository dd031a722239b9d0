"""Hidden perturbations: the step with a perturbation added to each new state.

The derivative of a loss in the perturbation is the learning signal of the state. Readers inside the group of
the state read it unperturbed, because their coupling is in the traces already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax

from .._compat import ClosedJaxpr
from .._types import Array
from .evaluation import View, World, evaluate
from .groups import HiddenGroup
from .module_info import ModuleInfo
from .program import Atom, Var, struct, zeros
from .slices import plain_site
from .step import Path


def worlds(groups: Sequence[HiddenGroup]) -> dict[Var, int]:
    """The index of the group of each new state; it is also the world in which the state is computed."""
    return {v: g.index for g in groups for v in g.hidden_outvars}


@dataclass(frozen=True, eq=False)
class HiddenPerturbation:
    """The perturbed step, as a function and as a jaxpr."""

    info: ModuleInfo
    groups: tuple[HiddenGroup, ...]

    @property
    def perturb_vars(self) -> list[Var]:
        return [h.outvar for h in self.info.hidden]

    @property
    def perturb_hidden_paths(self) -> list[Path]:
        return [h.path for h in self.info.hidden]

    def init_perturb_data(self) -> list[Array]:
        """Zeros, one array for each new state."""
        return [zeros(v) for v in self.perturb_vars]

    def call(self, inputs: Sequence[Array], perturbations: Sequence[Array]) -> list[Array]:
        """Evaluate the outputs and new states of the step from its inputs and the perturbations."""
        program, home = self.info.program, worlds(self.groups)
        deltas: Mapping[Var, Array] = dict(zip(self.perturb_vars, perturbations, strict=True))

        def reads(var: Var, world: World) -> tuple[World, Array | None]:
            if var not in home or home[var] == world:
                return world, None
            return home[var], deltas[var]

        targets: list[Atom] = [*self.info.out_atoms, *(a for e in self.info.entries for a in e.outvars)]
        view = View(
            known={**program.consts, **dict(zip(program.inputs, inputs, strict=True))},
            at_site=lambda site, world: plain_site,
            reads=reads,
            operands=lambda site, world: None,
        )
        return evaluate(program, [(a, None) for a in targets], view)

    @cached_property
    def perturb_jaxpr(self) -> ClosedJaxpr:
        structs = [struct(v) for v in (*self.info.program.inputs, *self.perturb_vars)]
        n = len(self.info.program.inputs)
        return jax.make_jaxpr(lambda *a: self.call(a[:n], a[n:]))(*structs)
