"""Leaky readouts: states that add up what an op makes of units, with one decay for all.

    r[t] = k r[t-1] + W z[t],   z[t] unit by unit of h[t]        is        r = W f,   f[t] = k f[t-1] + z[t]

as far as derivatives go. So the filter `f`, which has the units of `h`, is one more state of its group, and
what it remembers of the past is in the traces of that group. Its value is never wanted: the step is given

    z + (f - its value),  f = k 0 + z

in place of `z`, and a signal at the readout is one at `f`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compat import Literal, primitives
from .flows import Flows
from .groups import HiddenGroup
from .module_info import Hidden, ModuleInfo
from .positions import Positions
from .primitives import named
from .program import Atom, Node, Program, Site, Var, is_inexact, read_program
from .reach import Reach
from .slices import behind, between
from .step import Path

if TYPE_CHECKING:
    from .graph import ETraceGraph

_AS_IT_IS = named("convert_element_type copy optimization_barrier")


@dataclass(frozen=True)
class Product:
    """`sign * times / over`."""

    sign: int
    times: tuple[Atom, ...] = ()
    over: tuple[Atom, ...] = ()


Number = list[Product]  # their sum


@dataclass(frozen=True, eq=False)
class Filter:
    """A readout with memory, the group that it reads, where, and its decay."""

    readout: Hidden
    group: HiddenGroup
    site: Site
    decay: Number


def find_filters(graph: ETraceGraph, *, exact: bool = True) -> list[Filter]:
    """The leaky readouts of groups that traces follow exactly; or, unless `exact`, of any groups."""
    found = _Search(graph, exact)
    return [f for group in graph.hidden_groups if (f := found.of(group)) is not None]


def followed_by_filters(graph: ETraceGraph) -> dict[Path, set[Path]]:
    """Of each state, the readouts that its traces follow."""
    result: dict[Path, set[Path]] = {}
    for f in find_filters(graph):
        for path in f.group.hidden_paths:
            result.setdefault(path, set()).add(f.readout.path)
    return result


def with_filters(graph: ETraceGraph, *, exact: bool = True) -> ETraceGraph:
    """The graph of the step that has a filter for each leaky readout."""
    from .graph import graph_of

    found = find_filters(graph, exact=exact)
    if not found:
        return graph
    info = graph.module_info
    for f in found:
        info = _filtered(info, f)
    return graph_of(info, graph.hidden_perturb is not None)._replace(diagnostics=graph.diagnostics)


class _Search:
    def __init__(self, graph: ETraceGraph, exact: bool) -> None:
        self.graph, self.info, self.exact = graph, graph.module_info, exact
        self.program = self.info.program
        self._behind: dict[Var, set[Var]] = {}

    @cached_property
    def _positions(self) -> Positions:
        return Positions(self.program)

    @cached_property
    def _exact(self) -> set[int]:
        """The groups, by number, that traces follow exactly: unit by unit, without an op."""
        flows, found = Flows(self.graph), set()
        for group in self.graph.hidden_groups:
            maps = [
                m
                for r in self.graph.hidden_param_op_relations
                for g, m in zip(r.hidden_groups, r.position_maps, strict=True)
                if g is group
            ]
            states = [v for h in group.hidden for v in (h.invar, h.outvar)]
            crossing = any(
                flows.from_states[v].crossing & flows.group_bits(group.index)
                for v in states
                if v in flows.from_states
            )
            if maps and group.is_local and all(m.complete for m in maps) and not crossing:
                found.add(group.index)
        return found

    def of(self, group: HiddenGroup) -> Filter | None:
        """The filter of a readout, if it is one."""
        r = group.hidden[0]
        if group.num_state != 1 or r.split:
            return None
        decay = self._factor(r.outvar, r.invar)
        if decay is None or not self._ends_in(group):
            return None
        sites = [s for s in self._sites(r) if self._groups_behind(s.inputs[: s.num_inputs], group)]
        if len(sites) != 1 or not sites[0].primitive.is_known:
            return None
        site = sites[0]
        if site.num_inputs != 1 or not isinstance(site.inputs[0], Var):
            return None
        groups = self._groups_behind(site.inputs[:1], group)
        if len(groups) != 1 or (self.exact and groups[0].index not in self._exact):
            return None
        even = self._factor(r.outvar, site.output) is not None
        return Filter(r, groups[0], site, decay) if even and self._is_apart(r, groups[0], site) else None

    def _ends_in(self, group: HiddenGroup) -> bool:
        """Whether a state acts on itself alone, and what it was is told by what it is."""
        if group.hidden[0].invar in behind(
            self.program, self.info.out_atoms, stops=set(group.hidden_outvars)
        ):
            return False
        own = {*group.hidden_invars, *group.hidden_outvars}
        others = [
            a
            for e in self.info.carried
            for a in e.outvars
            if isinstance(a, Var) and a not in own and not own.isdisjoint(behind(self.program, [a]))
        ]
        return not others

    def _sites(self, r: Hidden) -> list[Site]:
        """The sites from which a new state comes without another between."""
        ends = {r.outvar, *self._behind_without_sites(r.outvar)}
        return [s for s in self.program.sites if s.output in ends]

    def _behind_without_sites(self, var: Var) -> set[Var]:
        seen: set[Var] = set()
        stack = [var]
        while stack:
            node = self._maker(stack.pop())
            if node is None or node.site is not None:
                continue
            new = [a for a in node.inputs if isinstance(a, Var) and a not in seen]
            seen.update(new)
            stack += new
        return seen

    def _groups_behind(self, atoms: Sequence[Atom], but: HiddenGroup) -> list[HiddenGroup]:
        made_of = behind(self.program, atoms)
        own = lambda g: {*g.hidden_invars, *g.hidden_outvars}
        return [g for g in self.graph.hidden_groups if g is not but and not own(g).isdisjoint(made_of)]

    def _is_apart(self, r: Hidden, group: HiddenGroup, site: Site) -> bool:
        """Whether units act on the readout by what the site reads alone, unit by unit and at once."""
        z = site.inputs[0]
        assert isinstance(z, Var)
        new = group.hidden_outvars
        ways = between(self.program, new, [z])
        if tuple(z.aval.shape) != tuple(new[0].aval.shape) or z.aval.dtype != new[0].aval.dtype:
            return False
        if any(h.num_state != 1 or h.split for h in group.hidden) or any(n.sites for n in ways):
            return False
        for h in group.hidden:
            came = self._positions.sources({h.outvar: Reach.at(h.positions)}, {}).get(z)
            if came is not None and np.any((came.highest >= 0) & ~_at_home(came, h)):
                return False
        # no way but through new states, and none around the site
        states = {*group.hidden_invars}
        if not states.isdisjoint(behind(self.program, [z], stops=set(new))) or z in group.hidden_invars:
            return False
        return set(new).isdisjoint(self._around(r, site)) and states.isdisjoint(self._around(r, site))

    def _around(self, r: Hidden, site: Site) -> set[Var]:
        """What the readout is made of, but for what the site reads."""
        seen: set[Var] = set()
        stack: list[Atom] = [r.outvar]
        while stack:
            atom = stack.pop()
            node = self._maker(atom) if isinstance(atom, Var) else None
            if node is None:
                continue
            given = node.inputs[1:] if node.site is site else node.inputs
            new = [a for a in given if isinstance(a, Var) and a not in seen]
            seen.update(new)
            stack += new
        return seen

    # -- one number for all ------------------------------------------------------------------------

    def _factor(self, end: Atom, start: Var) -> Number | None:
        """The number by which `start` goes into `end`, which is linear in it; None: there is none."""
        if end is start:
            return [Product(1)]
        node = self._maker(end) if isinstance(end, Var) else None
        if node is None or node.site is not None:
            return None
        on = [i for i, a in enumerate(node.inputs) if isinstance(a, Var) and self._depends(a, start)]
        terms = {i: self._factor(node.inputs[i], start) for i in on}
        if not on or any(t is None for t in terms.values()):
            return None
        op, given = node.primitive, {i: t for i, t in terms.items() if t is not None}
        if op in _AS_IT_IS and is_inexact(node.outputs[0]):
            return given[0]
        if op in (primitives.add_p, primitives.sub_p):
            signs = (1, -1 if op is primitives.sub_p else 1)
            return [replace(t, sign=t.sign * signs[i]) for i, several in given.items() for t in several]
        if op is primitives.neg_p:
            return [replace(t, sign=-t.sign) for t in given[0]]
        number = self._number(node.inputs[1 - on[0]]) if len(on) == 1 and len(node.inputs) == 2 else None
        if number is None:
            return None
        if op is primitives.mul_p:
            return [replace(t, times=(*t.times, number)) for t in given[on[0]]]
        if op is primitives.div_p and on == [0]:
            return [replace(t, over=(*t.over, number)) for t in given[0]]
        return None

    def _depends(self, var: Var, start: Var) -> bool:
        if var not in self._behind:
            self._behind[var] = behind(self.program, [var])
        return var is start or start in self._behind[var]

    def _number(self, atom: Atom) -> Atom | None:
        """The one number, made of constants alone, that an array is full of."""
        if isinstance(atom, Literal):
            return atom if np.ndim(atom.val) == 0 else None
        if atom.aval.shape == ():
            return atom if self._moving.isdisjoint({atom, *behind(self.program, [atom])}) else None
        node = self._maker(atom)
        if node is not None and node.primitive in (primitives.broadcast_in_dim_p, *_AS_IT_IS):
            return self._number(node.inputs[0])
        return None

    @cached_property
    def _moving(self) -> set[Var]:
        return set(self.program.inputs)

    def _maker(self, atom: Atom) -> Node | None:
        number = self.program.producer.get(atom) if isinstance(atom, Var) else None
        return None if number is None else self.program.nodes[number]


def _at_home(came: Reach, hidden: Hidden) -> Any:
    """Where each position comes from the same one alone."""
    return (came.lowest == hidden.positions) & (came.highest == hidden.positions)


def _filtered(info: ModuleInfo, f: Filter) -> ModuleInfo:
    """The step with one filter more."""
    program = info.program
    site = next(s for s in program.sites if s.index == f.site.index)
    z = site.inputs[0]
    start, end, read, nodes = _nodes(program, z, f.decay)
    at = program.holder[site.index]
    new = replace(site, inputs=(read, *site.inputs[1:]))
    holder = replace(program.nodes[at], inputs=new.inputs, site=new)
    changed = Program(
        program.inputs,
        program.outputs,
        [*program.nodes[:at], *nodes, holder, *program.nodes[at + 1 :]],
        program.consts,
        [new if s is site else s for s in program.sites],
        program.opened,
        program.read,
    )
    hidden = Hidden((*f.readout.path, "filter"), None, start, end)
    return replace(info, program=changed, hidden=(*info.hidden, hidden))


def _nodes(program: Program, z: Atom, decay: Number) -> tuple[Var, Var, Var, list[Node]]:
    """The old filter, the new one, what the site reads instead, and how they are made."""

    atoms = [a for term in decay for a in (*term.times, *term.over)]

    def make(z: Any, *numbers: Any) -> Any:
        given = (jax.lax.convert_element_type(a, z.dtype) for a in numbers)
        factor = jnp.zeros((), z.dtype)
        for term in decay:
            one = jnp.asarray(term.sign, z.dtype)
            for _ in term.times:
                one = one * next(given)
            for _ in term.over:
                one = one / next(given)
            factor = factor + one
        old = jnp.zeros_like(z)
        new = old * jnp.broadcast_to(factor, z.shape) + z
        return old, new, jax.lax.stop_gradient(z) + (new - jax.lax.stop_gradient(new))

    structs = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in (z, *atoms)]
    made = read_program(jax.make_jaxpr(make)(*structs))
    known: dict[Var, Atom] = dict(zip(made.inputs, (z, *atoms), strict=True))
    count = 1 + max(v.index for v in (*program.inputs, *program.consts, *_made(program)))

    def now(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else known[atom]

    nodes = []
    for node in made.nodes:
        inputs = tuple(map(now, node.inputs))
        for v in node.outputs:
            known[v] = Var(v.aval, count)
            count += 1
        nodes.append(replace(node, inputs=inputs, outputs=tuple(known[v] for v in node.outputs)))  # type: ignore[misc]
    old, new, read = (now(a) for a in made.outputs)
    assert isinstance(old, Var)
    assert isinstance(new, Var)
    assert isinstance(read, Var)
    return old, new, read, nodes


def _made(program: Program) -> Iterator[Var]:
    return (v for node in program.walk() for v in node.outputs)
