"""Leaky readouts: states that integrate a fixed linear function of units, with one decay for all elements.

    r[t] = k r[t-1] + W z[t],   z[t] unit by unit of h[t]        is        r = W f,   f[t] = k f[t-1] + z[t]

in terms of derivatives, if `W` is the same at every step. The filter `f` has the shape of `h`, so that it is
one more state of that group, whose traces then cover the memory of the readout. Its value is never needed:
the step uses

    z + (f - its value),  f = k 0 + z

in place of `z`, so that a signal at the readout becomes a signal at `f`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from .._compat import primitives
from .._types import Array
from .caching import cached
from .custom_derivatives import PullBack
from .dataflow import Flow, solve
from .groups import HiddenGroup
from .module_info import Hidden, ModuleInfo
from .packed_states import nodes_of
from .positions import positions_of
from .primitives import (
    ELEMENT_WISE,
    IN_ALL_OPERANDS,
    IN_FIRST_OPERAND,
    IN_ONE_OPERAND,
    NOT_COMPLEX,
    PRODUCTS,
    named,
)
from .program import Atom, Node, Program, Var, is_complex, is_inexact, read_program, zeros
from .provenance import Goal, spread
from .reach import Reach
from .reachability import find_reachability
from .slices import behind, between, computed_from, values_of
from .step import Path

if TYPE_CHECKING:
    from .graph import TraceGraph

_SUMS = IN_ALL_OPERANDS | named("optimization_barrier")
_SCALES = ELEMENT_WISE - named("select_n complex real imag conj")  # linear ones that scale all elements alike


@dataclass(frozen=True, eq=False)
class Filter:
    """A leaky readout, and the group of units that it reads."""

    readout: Hidden
    group: HiddenGroup
    read: Var  # computed unit by unit from the new states of the group
    way: tuple[Node, ...]  # the linear operations from `read` to the new readout
    coefficients: tuple[Atom, ...]  # their coefficients, equal at every step


@cached
def find_filters(graph: TraceGraph, *, exact: bool = True) -> list[Filter]:
    """The leaky readouts of groups whose traces are exact or, with `exact=False`, of any group."""
    search = _Search(graph, exact)
    return [f for group in graph.hidden_groups if (f := search.of(group)) is not None]


def followed_by_filters(graph: TraceGraph) -> dict[Path, set[Path]]:
    """For each state, the readouts that its traces cover."""
    result: dict[Path, set[Path]] = {}
    for f in find_filters(graph):
        for path in f.group.hidden_paths:
            result.setdefault(path, set()).add(f.readout.path)
    return result


def with_filters(graph: TraceGraph, *, exact: bool = True) -> TraceGraph:
    """Compile the step again, with a filter state for each leaky readout."""
    from .graph import graph_of

    found = find_filters(graph, exact=exact)
    if not found:
        return graph
    info = graph.module_info
    for f in found:
        info = _filtered(info, f)
    return graph_of(info, graph.hidden_perturb is not None)._replace(diagnostics=graph.diagnostics)


class _Search:
    def __init__(self, graph: TraceGraph, exact: bool) -> None:
        self.graph, self.exact, self.flows = graph, exact, find_reachability(graph)
        self.info, self.program = graph.module_info, graph.module_info.program

    def of(self, group: HiddenGroup) -> Filter | None:
        """The filter of a group, if it is a leaky readout."""
        r = group.hidden[0]
        if group.num_state != 1 or not self._decays(r):
            return None
        bit = self.flows.group_bits(group.index)
        acting = {c.group for c in self.flows.carried for v in (c.old, c.new) if self.flows.reached(v) & bit}
        units = [g for g in self.graph.hidden_groups if g is not group and g.index in acting]
        if len(units) != 1 or (self.exact and not self._is_exact(units[0])):
            return None
        live = self._made_of([*units[0].hidden_invars, *units[0].hidden_outvars])
        ends, way, coefficients = self._way(r.outvar, live, units[0])
        reads_by_op = any(node.site is not None for node in way)  # otherwise it is not a readout
        if len(ends) != 1 or not reads_by_op or not self._is_of_units(ends[0], units[0]):
            return None
        inner = {v for node in way for v in node.outputs} - {r.outvar}
        if is_complex(r.invar) and not all(map(is_complex, (*inner, *ends))):
            return None  # the decay may be complex, but the filter has the type of `read`
        new = [a for e in self.info.carried for a in e.outvars if a is not r.outvar]
        if not inner.isdisjoint(behind(self.program, [*self.info.out_atoms, *new], stops={r.outvar})):
            return None
        return Filter(r, units[0], ends[0], tuple(way), tuple(coefficients))

    def _decays(self, r: Hidden) -> bool:
        """Whether a state is a scalar times its old value plus an input, and affects no other state."""
        c = next(c for c in self.flows.carried if c.old is r.invar)
        alone = not any(
            self.flows.reached(v) & ~c.bit for v in (c.old, c.new)
        ) and not self.flows.is_read_old(c)
        return alone and r.invar.aval.size > 0 and self._is_scaled(r.outvar, self._made_of([r.invar]))

    def _is_scaled(self, var: Var, live: set[Var]) -> bool:
        node = self.program.maker(var)
        if node is None:
            return True  # the old value
        found = self._coefficients(node, live)
        if found is None or node.primitive not in _SCALES or not all(map(self._is_one_number, found)):
            return False
        return all(self._is_scaled(v, live) for v in node.reads if v in live)

    def _is_one_number(self, atom: Atom) -> bool:
        """Whether all elements of an array are equal, judging by how it is computed."""
        if atom.aval.shape == ():
            return True
        node = self.program.maker(atom)
        alike = node is not None and node.primitive in ELEMENT_WISE | {primitives.broadcast_in_dim_p}
        return alike and all(map(self._is_one_number, node.inputs))  # type: ignore[union-attr]

    def _is_exact(self, group: HiddenGroup) -> bool:
        """Whether the traces of a group are exact: it is coupled unit by unit, and not through an op."""
        relations = self.graph.hidden_param_op_relations
        maps = [m for r in relations for g, m in r.feeds if g is group]
        goals = [self.flows.from_states.get(v, Goal()) for h in group.hidden for v in (h.invar, h.outvar)]
        crossing = any(goal.crossing & self.flows.group_bits(group.index) for goal in goals)
        return bool(maps) and group.is_local and all(m.complete for m in maps) and not crossing

    def _way(self, end: Var, live: set[Var], units: HiddenGroup) -> tuple[list[Var], list[Node], list[Atom]]:
        """Go back from a variable as long as it is linear in live variables.

        Returns the variables where that ends, the linear nodes in between, and their coefficients.
        """
        ends: dict[Var, None] = {}
        way: dict[Node, None] = {}
        coefficients: list[Atom] = []
        stack, first = [end], {*units.hidden_invars, *units.hidden_outvars}
        while stack:
            var = stack.pop()
            node = None if var in first else self.program.maker(var)
            found = None if node is None else self._coefficients(node, live)
            if node is None or found is None:
                ends[var] = None
            elif node not in way:
                way[node] = None
                coefficients += found
                stack += [v for v in node.reads if v in live]
        return list(ends), list(way), coefficients

    def _coefficients(self, node: Node, live: set[Var]) -> list[Atom] | None:
        """The coefficients of the live operands of a node; None if it is not linear, or they vary."""
        on = [i for i, a in enumerate(node.inputs) if isinstance(a, Var) and a in live]
        others = [a for i, a in enumerate(node.inputs) if i not in on]
        if node.site is not None:
            linear = node.site.primitive.is_known and node.site.num_inputs == 1 and on == [0]
        elif node.primitive in _SUMS:
            linear, others = True, [a for a in others if not is_inexact(a)]  # indices and predicates
        else:
            one = node.primitive in IN_ONE_OPERAND and len(on) == 1
            linear = (one or (node.primitive in IN_FIRST_OPERAND and on == [0])) and not node.inner
        conjugates = node.primitive in NOT_COMPLEX and is_complex(node.outputs[0])
        fixed = not any(isinstance(a, Var) and a in self._varying for a in others)
        return others if linear and fixed and not conjugates else None

    @cached_property
    def _varying(self) -> set[Var]:
        """The variables that may change from step to step while parameters are fixed."""
        moving = [*self.info.arg_invars, *self.info.carried_invars]
        moving += [v for node in self.program.nodes if node.eqn.effects for v in node.outputs]
        return computed_from(self.program, moving)

    def _made_of(self, variables: Sequence[Var]) -> set[Var]:
        """The variables that depend on others along derivatives."""
        flow = Flow[bool](derivatives=True, enters=True, rule=PullBack.of)
        return set(solve(flow, self.program, ((v, True) for v in variables))[0])

    def _is_of_units(self, z: Var, group: HiddenGroup) -> bool:
        """Whether a variable depends on the new states of a group only, unit by unit."""
        new = group.hidden_outvars
        if any(z.aval.shape != v.aval.shape or z.aval.dtype != v.aval.dtype for v in new):
            return False
        if any(h.num_state != 1 for h in group.hidden):
            return False
        goals = spread(self.program, {z: Goal(direct=1)}, dict.fromkeys(new, 0))[0]
        others = {v for h in self.info.hidden for v in (h.invar, h.outvar)} - set(new)
        if not others.isdisjoint(goals) or any(goals.get(v, Goal()).crossing for v in new):
            return False
        positions = positions_of(self.program)
        found = [positions.sources({h.outvar: Reach.at(h.positions)}, {}).get(z) for h in group.hidden]
        pairs = zip(group.hidden, found, strict=True)
        return any(found) and all(r.stays_at(h.positions) for h, r in pairs if r is not None)


def _filtered(info: ModuleInfo, f: Filter) -> ModuleInfo:
    """Add one filter to a step."""
    program = info.program
    old, new, read, made = _nodes(program, f)

    def instead(node: Node) -> Node:
        inputs = tuple(read if a is f.read else a for a in node.inputs)
        return replace(node, inputs=inputs, site=node.site and replace(node.site, inputs=inputs))

    # nothing but the readout reads the nodes on the way to it, so that they can follow those of the decay
    last = program.producer[f.readout.outvar]
    first = [n for n in program.nodes[:last] if n not in f.way]
    way = [instead(n) for n in program.nodes[: last + 1] if n in f.way]
    sites = {n.site.index: n.site for n in way if n.site is not None}
    changed = replace(
        program,
        nodes=[*first, *made, *way, *program.nodes[last + 1 :]],
        sites=[sites.get(s.index, s) for s in program.sites],
    )
    hidden = Hidden((*f.readout.path, "filter"), None, old, new, coefficients=f.coefficients)
    return replace(info, program=changed, hidden=(*info.hidden, hidden))


def _nodes(program: Program, f: Filter) -> tuple[Var, Var, Var, list[Node]]:
    """The old and new filter, the variable to read in place of the units, and the nodes that compute them."""
    r, later = f.readout, {v for node in f.way for v in node.outputs}
    nodes = between(program, [r.invar], [r.outvar])
    inner = {r.invar, *(v for node in nodes for v in node.outputs)}
    reads = dict.fromkeys(v for node in nodes for v in node.reads if v not in inner)
    given = [v for v in reads if v not in later]

    def make(z: Array, *values: Array) -> tuple[Array, Array, Array]:
        known = dict(zip(given, values, strict=True))
        # the decay does not depend on the input of the readout, because that is added; so it may be zero
        known |= {v: zeros(v) for v in reads if v in later}

        def readout(old: Array) -> Array:
            return values_of(program, [r.outvar], {**known, r.invar: old})[0]

        zero = zeros(r.invar)
        decays = jax.lax.stop_gradient(jax.jvp(readout, (zero,), (jnp.ones_like(zero),))[1])
        decay = jax.lax.index_in_dim(decays.ravel(), 0, keepdims=False).astype(z.dtype)
        old = jnp.zeros_like(z)
        new = old * jnp.broadcast_to(decay, z.shape) + z
        return old, new, jax.lax.stop_gradient(z) + (new - jax.lax.stop_gradient(new))

    made, (old, new, read) = nodes_of(program, make, (f.read, *given))
    return old, new, read, made


@cached
def find_readouts(graph: TraceGraph) -> set[int]:
    """The indices of the groups that are output units, such as a leaky readout.

    The loss reads such a unit directly, and no other state depends on it. So its own trace and the
    back-propagated signal give its exact gradient, whatever signal a rule uses for other groups.
    """
    return {g.index for g in graph.hidden_groups if _is_readout(graph, g)}


def decay_of(graph: TraceGraph, readout: Hidden) -> float | None:
    """The decay of a leaky readout; None if it depends on parameters."""
    program, old = graph.module_info.program, readout.invar

    def decay(*values: Array) -> Array:
        known = {**program.consts, **dict(zip(program.inputs, values, strict=True))}

        def new(value: Array) -> Array:
            return values_of(program, [readout.outvar], {**known, old: value})[0]

        slope: Array = jax.jvp(new, (known[old],), (jnp.ones_like(known[old]),))[1]
        return slope.ravel()[0]

    inputs = [zeros(v) for v in program.inputs]
    made = read_program(jax.make_jaxpr(decay)(*inputs))
    return float(decay(*inputs)) if behind(made, made.outputs).isdisjoint(made.inputs) else None


def _is_readout(graph: TraceGraph, group: HiddenGroup) -> bool:
    info, program = graph.module_info, graph.module_info.program
    new, own = set(group.hidden_outvars), {*group.hidden_invars, *group.hidden_outvars}
    others = {v for g in graph.hidden_groups if g is not group for v in (*g.hidden_invars, *g.hidden_outvars)}
    carried = {a for e in info.carried for a in e.outvars if isinstance(a, Var)} - new
    after = computed_from(program, own)
    at_once = behind(program, info.out_atoms, stops=new)
    reads = not others.isdisjoint(behind(program, new))
    if not reads or not after.isdisjoint(carried) or new.isdisjoint(at_once):
        return False
    if not at_once.isdisjoint(group.hidden_invars):  # an output reads the old state
        return False
    params = set(info.param_invars)
    on_the_way = after & behind(program, [*info.out_atoms, *new])
    ways = [n for n in program.nodes if not on_the_way.isdisjoint(n.outputs)]
    products = [
        n for n in ways if n.primitive in PRODUCTS and not params.isdisjoint(behind(program, n.inputs))
    ]
    return not products and not any(n.sites for n in ways)
