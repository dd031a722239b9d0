"""Evaluate one step of a compiled model: values, local Jacobians, learning signals and weight gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from .._compat import Literal
from .._compiler.evaluation import read, run
from .._compiler.graph import TraceGraph
from .._compiler.module_info import StateEntry
from .._compiler.program import Site, Var, zeros
from .._compiler.slices import behind, needed
from .._ops.axis_labels import Labels, Layout
from .._types import Array
from .._types import Leaves as Leaves
from .effective_weights import Effective, Weighted, effective_weights, known_params, needs
from .group_readings import find_readings, slopes
from .jacobian import LocalGroup
from .partial_sums import Gradient, PartialSums, full_sum
from .sharding import Sharding, Spec
from .signals import KnownOutput, differentiable_step, output, reads_old_states
from .slots import Slot, find_slots
from .trace_math import Jacobian, States, stack
from .trace_recursion import Recursion
from .weight_gradients import factors_over_time, find_weighted, product, pull_weights

Arrays = list[Array]
Signals = dict[int, Float[Array, "state ..."]]  # dL/dh by group, at its positions
Ys = Mapping[int, KnownOutput]  # outputs of sites from an earlier evaluation of the step, by site
SiteDeltas = Mapping[int, Array]  # perturbations of the outputs of sites, by site


@dataclass(frozen=True, eq=False)
class Local:
    """The quantities of one step that rules use: inputs of sites, local Jacobians and effective weights."""

    inputs: dict[int, Arrays]  # the operands of each site that are not weights
    weights: Effective
    # in a `Record`, all arrays but the weights have time in front
    D: dict[int, Jacobian | None]  # `D[group][new][old]`: (*varshape); None if the group has no memory
    J: dict[tuple[int, int], States]  # `J[site, group][state]`: shape of y, or (*varshape) if `on_hidden`
    # derivatives of each group's readings, if requested
    slopes: dict[int, list[States]] = field(default_factory=dict)
    sharding: Sharding | None = None  # the partition specs of the step, if any

    @property
    def arrays(self) -> tuple[dict[int, Arrays], dict[int, Jacobian | None], dict[tuple[int, int], States]]:
        """The arrays that change from step to step."""
        return self.inputs, self.D, self.J

    def at(self, slot: Slot) -> tuple[Array | None, tuple[Array, Labels] | None, Array]:
        """`D`, the factor `x` and `J` of one slot, with `D` and `J` at the positions of its trace."""
        i, inputs = slot.relation.site.index, self.inputs[slot.relation.site.index]
        D = self.D[slot.group.index]
        return (
            None if D is None else slot.lift_decay(stack(D), inputs, 2),
            slot.factor(inputs),
            slot.lift_instant(jnp.stack(self.J[i, slot.group.index]), inputs),
        )


class ETraceGraphExecutor:
    """The pure functions of one compiled graph, over flat lists of arrays in the order of its program.

    The inputs of a step are `params` (leaves of parameters and of other states that no step writes), `args`,
    `consts` (the constants that the model closes over) and `carried` (the leaves of each carried state).
    """

    def __init__(
        self, graph: TraceGraph, recursion: Recursion | None = None, *, with_slopes: bool = False
    ) -> None:
        self.graph, self.info = graph, graph.module_info
        self.recursion = recursion
        self.wants_slopes = with_slopes or bool(recursion and recursion.kappa is not None)
        self.per_sample: dict[Hashable, Any] = {}  # caches of `PerSample`, and of `Layers`' blocks
        self.planned: dict[str, Any] = {}  # cache of plans that other modules compute for this executor
        self.sharding: Sharding | None = None  # the partition specs of the step, if any

    def shard_like(self, params: Arrays, args: Arrays, carried: list[Arrays]) -> None:
        """Shard all arrays from now on as the given inputs of a step are sharded."""
        self.sharding = Sharding.find(self.info, self.slots, params, args, carried, self.sharding)

    def spec_of_state(self, leaf: Var) -> Spec | None:
        """The partition spec of a carried state, its own or that of its group; None if it is unknown."""
        at, groups = self.sharding, self.graph.hidden_groups
        if at is None:
            return None
        of_group = (at.of_group(g) for g in groups for h in g.hidden if h.invar is leaf and h.axis is None)
        spec = at.specs.get(leaf) or next(of_group, None)
        return None if spec is None else at.fitted(spec, leaf.aval.shape)

    def like_params(self, grads: Leaves) -> Leaves:
        """Shard gradients as their parameters."""
        at = self.sharding
        if at is None:
            return grads
        specs = [at.of_leaf(i) for i in range(len(grads))]
        return [g if s is None or g is None else at.put(g, s) for g, s in zip(grads, specs, strict=True)]

    def _sent(self, site: Site, operands: Arrays) -> Array | None:
        """The first input of a site, gathered across devices; None if it need not be."""
        return None if self.sharding is None else self.sharding.sent(site, operands)

    @cached_property
    def groups(self) -> list[LocalGroup]:
        return [LocalGroup(self.graph, g) for g in self.graph.hidden_groups]

    @cached_property
    def slots(self) -> list[Slot]:
        """The slots of all traces, in program order."""
        found = find_slots(self.graph.hidden_param_op_relations)
        more = self.filters
        return [
            replace(t, group=replace(t.group, filtered=more[t.group.index])) if more.get(t.group.index) else t
            for t in found
        ]

    @cached_property
    def filters(self) -> dict[int, int]:
        """The number of filtered readings of each group."""
        return {} if self.recursion is None else self.recursion.filters(self)

    def _known(self, params: Arrays, args: Arrays, consts: Arrays, carried: list[Arrays]) -> dict[Var, Array]:
        known = known_params(self.info, params, consts)
        known.update(zip(self.info.arg_invars, args, strict=True))
        for entry, leaves in zip(self.info.carried, carried, strict=True):
            known.update(zip(entry.invars, leaves, strict=True))
        return known

    def _results(self, env: Mapping[Var, Array]) -> tuple[Arrays, list[Arrays]]:
        outs = [read(env, a) for a in self.info.out_atoms]
        return outs, [[read(env, a) for a in e.outvars] for e in self.info.carried]

    def forward(
        self, params: Arrays, args: Arrays, consts: Arrays, carried: list[Arrays], ys: Ys | None = None
    ) -> tuple[Arrays, list[Arrays], dict[Var, Array], dict[int, Arrays]]:
        """Evaluate a step: outputs, new states, the value of every variable, and the operands of each site.

        `ys` are known outputs of sites, which are not computed again.
        """

        def at_site(site: Site, known_output: KnownOutput | None, operands: Arrays) -> tuple[Array, Arrays]:
            x = self._sent(site, operands) if known_output is None else known_output.x
            operands = operands if x is None else [x, *operands[1:]]
            return output(site, known_output, operands), operands

        known, program = self._known(params, args, consts, carried), self.info.program
        _, operands, env = run(program, [known[v] for v in program.inputs], at_site, ys, consts=known)
        return *self._results(env), env, operands

    def outputs(
        self,
        params: Arrays,
        args: Arrays,
        consts: Arrays,
        carried: list[Arrays],
        at_sites: SiteDeltas | None = None,
        ys: Ys | None = None,
    ) -> tuple[Arrays, list[Arrays], dict[int, KnownOutput], dict[int, Arrays]]:
        """Evaluate a step: outputs, new states, outputs of sites for later evaluations, inputs of sites.

        Of the inputs, only those of sites perturbed in `at_sites` are returned; their weights are held fixed.
        `ys` are known outputs of sites, which are not computed again.
        """
        kept, at_sites, ys = self._sites_of_states, at_sites or {}, ys or {}

        def at_site(
            site: Site, given: tuple[KnownOutput | None, Array | None] | None, operands: Arrays
        ) -> tuple[Array, tuple[KnownOutput | None, Arrays | None]]:
            y, more = given or (None, None)
            operands = operands if more is None else _weights_fixed(site, operands)
            x = self._sent(site, operands) if y is None else None
            operands = operands if x is None else [x, *operands[1:]]
            out = output(site, y, operands)
            out = out if more is None else out + more
            inputs = None if more is None else operands[: site.num_inputs]
            return out, (KnownOutput(out, x) if site.index in kept else None, inputs)

        known, program = self._known(params, args, consts, carried), self.info.program
        ins = {i: (ys.get(i), at_sites.get(i)) for i in {*ys, *at_sites}}
        _, given, env = run(program, [known[v] for v in program.inputs], at_site, ins, consts=known)
        found = {i: y for i, (y, _) in given.items() if i in kept}
        return *self._results(env), found, {i: x for i, (_, x) in given.items() if x is not None}

    @cached_property
    def _sites_of_states(self) -> set[int]:
        """The sites with inputs that a new state depends on."""
        nodes = needed(self.info.program, [a for e in self.info.entries for a in e.outvars])
        return {s.index for node in nodes for s in node.sites if s.num_inputs}

    def local(
        self, params: Arrays, args: Arrays, consts: Arrays, carried: list[Arrays], ys: Ys | None
    ) -> Local:
        """The local Jacobians of a step; `ys` are known outputs of sites."""
        _, _, env, operands = self.forward(params, args, consts, carried, ys)
        return self.jacobians(env, operands)

    def example_local(self) -> Local:
        """The local Jacobians of a step on zeros, to get their shapes."""
        fixed, args, consts = self.info.fixed_invars, self.info.arg_invars, self.info.program.consts
        params, inputs, closed_over = ([*map(zeros, variables)] for variables in (fixed, args, consts))
        carried = [[*map(zeros, e.invars)] for e in self.info.carried]
        return self.local(params, inputs, closed_over, carried, None)

    def jacobians(self, env: Mapping[Var, Array], operands: Mapping[int, Arrays]) -> Local:
        """The local Jacobians of a step from the values of its variables."""
        D: dict[int, Jacobian | None] = {}
        J: dict[tuple[int, int], States] = {}
        for planned in self.groups:
            k = planned.group.index
            D[k], found = planned.jacobians(env)
            J.update({(i, k): v for i, v in found.items()})
        relations = self.graph.hidden_param_op_relations
        inputs = {r.site.index: operands[r.site.index][: r.site.num_inputs] for r in relations}
        read = slopes(self.graph, env) if self.wants_slopes else {}
        if self.recursion is not None:
            D, J = self.recursion.of(self, env, D, J, read)
        return Local(inputs, self._weights(env), D, J, read, self.sharding)

    @cached_property
    def made_of(self) -> set[Var]:
        """The variables that effective weights and the coefficients of leaky readouts depend on."""
        program, gains = self.info.program, [a for h in self.info.hidden for a in h.coefficients]
        relations = self.graph.hidden_param_op_relations
        weights = {v for r in relations for v in needs(program, r.site, r.site.made_from(r.layouts))}
        return weights | behind(program, gains)

    def consts_of_weights(self, consts: Leaves) -> Leaves:
        """The constants and literals of the model that effective weights and gains of readouts depend on."""
        program = self.info.program
        weights = [w for t in self.slots for w in t.relation.site.weights.values()]
        weights += [a for h in self.info.hidden for a in h.coefficients]
        atoms = [*weights, *(a for node in needed(program, weights) for a in node.inputs)]
        numbers = [a.val for a in atoms if isinstance(a, Literal)]
        return [*(c for v, c in zip(program.consts, consts, strict=True) if v in self.made_of), *numbers]

    def weights(self, params: Arrays, consts: Arrays) -> Effective:
        """The effective weights."""
        return self._weights(known_params(self.info, params, consts))

    def _weights(self, known: Mapping[Var, Array]) -> Effective:
        fixed = [*self.info.program.consts, *self.info.fixed_invars]
        relations = self.graph.hidden_param_op_relations
        return effective_weights(self.info.program, {v: known[v] for v in fixed}, relations)

    def no_gradients(self, weights: Effective) -> dict[tuple[int, str], Array]:
        """Zeros for the gradients of effective weights, by site and name."""
        result = {}
        for t in self.slots:
            key = (t.relation.site.index, t.name)
            weight = weights[key[0]][key[1]]
            dtype = np.promote_types(weight.dtype, np.float32)
            result[key] = jnp.zeros(t.layout.view_w(weight).shape, dtype)
        return result

    @cached_property
    def weighted(self) -> list[Weighted]:
        """The sites whose weight gradients follow from their axis labels."""
        return find_weighted(self.info, [r.site for r in self.graph.hidden_param_op_relations])

    def of_cotangents(
        self, params: Arrays, consts: Arrays, inputs: Mapping[int, Arrays], dys: Mapping[int, Array]
    ) -> Leaves:
        """The parameter gradients from cotangents of the outputs of weighted sites at several steps."""
        terms = {
            (w.site.index, name): self._term(layout, inputs[w.site.index], dys[w.site.index])
            for w in self.weighted
            if w.site.index in dys
            for name, layout in w.layouts.items()
        }
        if not terms:
            return [None] * len(params)
        back = pull_weights(self.info, params, consts, self.weighted, list(terms))
        return self._pull_partial_sums(back, list(terms.values()))

    def _term(self, layout: Layout, inputs: Arrays, dy: Array) -> Gradient:
        """The gradient of one weight from the cotangents of all steps."""
        factors, at = factors_over_time(layout, inputs, dy, rows=False), self.sharding
        dy, labels = factors[-1]
        parts = None if at is None else at.parts(layout, labels, dy.shape)
        found = product(factors, layout.w, parts)
        return found if parts is None else parts.sums(found)

    def _pull_partial_sums(self, pull: Callable[[Arrays], Leaves], given: list[Gradient]) -> Leaves:
        """Pull gradients back to the parameters, as per-device partial sums if all of them are."""
        at, parts = self.sharding, [g.parts for g in given if isinstance(g, PartialSums)]
        if at is None or not parts or len(parts) < len(given):
            return pull([full_sum(g) for g in given])
        found = jax.vmap(pull)(parts)
        return [
            None if a is None else at.partial_sums(a, at.batch, at.of_leaf(i)) for i, a in enumerate(found)
        ]

    def to_parameters(
        self, params: Arrays, consts: Arrays, grads: Mapping[tuple[int, str], Gradient]
    ) -> Leaves:
        """Pull gradients of effective weights back to the parameters."""
        keys = list(dict.fromkeys((t.relation.site.index, t.name) for t in self.slots))
        relations = self.graph.hidden_param_op_relations
        back = pull_weights(self.info, params, consts, relations, keys)
        return self._pull_partial_sums(back, [grads[k] for k in keys])

    def signals(
        self,
        params: Arrays,
        args: Arrays,
        consts: Arrays,
        carried: list[Arrays],
        deltas: tuple[Arrays, Arrays],
        ys: Ys | None = None,
        at_readings: Sequence[Array] = (),
        at_sites: SiteDeltas | None = None,
    ) -> tuple[Arrays, list[Arrays]]:
        """Evaluate the step with perturbations of new and old states: outputs and new states.

        `at_readings` are perturbations of the readings of filtered groups, and `at_sites` of the outputs of
        sites, whose weights are held fixed.
        """
        # `strict` if there are any: all readings are perturbed, or none
        pairs = zip(self.filtered_readings.items(), at_readings, strict=bool(at_readings))
        more = {v: (k, delta) for (v, k), delta in pairs}
        known = self._known(params, args, consts, carried)
        return differentiable_step(self.graph, known, *deltas, ys or {}, more, at_sites or {})

    @cached_property
    def filtered_readings(self) -> dict[Var, int]:
        """The readings of filtered groups that are not states themselves, with the index of the group."""
        hidden = {h.outvar for h in self.info.hidden}
        return {v: k for k in self.filters for v in find_readings(self.graph)[k] if v not in hidden}

    def signals_at_readings(self, deltas: Sequence[Array], at_readings: Sequence[Array]) -> dict[int, Arrays]:
        """The signals at the readings of each filtered group."""
        by_var = {h.outvar: d for h, d in zip(self.info.hidden, deltas, strict=True)}
        by_var.update(zip(self.filtered_readings, at_readings, strict=True))
        return {k: [by_var[v] for v in find_readings(self.graph)[k]] for k in self.filters}

    @cached_property
    def reads_old_states(self) -> bool:
        return reads_old_states(self.graph)

    def zero_deltas(self) -> Arrays:
        """Zeros for each hidden state."""
        return [zeros(h.outvar) for h in self.info.hidden]

    def group_signals(self, deltas: Sequence[Array]) -> Signals:
        """Stack the derivatives of hidden arrays by group."""
        by_var = {h.outvar: d for h, d in zip(self.info.hidden, deltas, strict=True)}
        return {
            g.index: g.stack_hidden([by_var[v] for v in g.hidden_outvars], dual=True)
            for g in self.graph.hidden_groups
        }

    def widened(self, signals: Signals) -> Signals:
        """Append zeros for filter states to the signals of groups."""
        more = self.filters
        return {
            k: jnp.concatenate([g, jnp.zeros((more[k], *g.shape[1:]), g.dtype)]) if more.get(k) else g
            for k, g in signals.items()
        }

    def at_groups(self, signals: Arrays) -> Signals:
        """Stack signals at the carried leaves before the step to one array for each group."""
        by_var = dict(zip(self.info.carried_invars, signals, strict=True))
        none = self.zero_deltas()  # a filter state is not among the carried leaves
        pairs = zip(self.info.hidden, none, strict=True)
        return self.group_signals(
            [h.of_leaf(by_var[h.leaf]) if h.leaf in by_var else zero for h, zero in pairs]
        )


ETraceVjpGraphExecutor = ETraceGraphExecutor


def masks_of_weights(executor: ETraceGraphExecutor) -> list[StateEntry]:
    """The states other than parameters that effective weights depend on, such as masks."""
    entries = executor.info.fixed
    return [e for e in entries if not e.is_param and not executor.made_of.isdisjoint(e.invars)]


def sites_with_traces(executor: ETraceGraphExecutor) -> list[Site]:
    """The sites all of whose weights have traces."""
    traced = {t.relation.site.index: t.relation.layouts for t in executor.slots}
    return [w.site for w in executor.weighted if traced.get(w.site.index) == w.layouts]


def _weights_fixed(site: Site, operands: Arrays) -> Arrays:
    n = site.num_inputs
    return [*operands[:n], *map(jax.lax.stop_gradient, operands[n:])]
