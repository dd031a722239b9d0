"""Dependence between variables, and the part of a program between some variables as a function or jaxpr."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax

from .._compat import ClosedJaxpr, primitives
from .._types import Array, PyTree
from .custom_derivatives import PullBack, has_own_rule
from .dataflow import Flow, solve
from .evaluation import View, evaluate
from .program import Atom, Node, Program, Site, Var


def plain_site(site: Site, site_in: PyTree, operands: list[Array]) -> tuple[Array, None]:
    """Evaluate a site as an ordinary operation (an `AtSite`)."""
    return site.primitive.bind(*operands, **site.params), None


@dataclass(frozen=True, eq=False)
class Slice:
    """The part of a program from some variables (or a site) to others, along paths that cross no site.

    With a `site`, the only input is the output of the site, stacked over enclosing loops.
    """

    program: Program
    inputs: tuple[Var, ...]
    constvars: list[Var]
    outputs: tuple[Atom, ...]
    site: Site | None = None

    def call(self, values: Sequence[Array], consts: Sequence[Array]) -> list[Array]:
        known = {**self.program.consts, **dict(zip(self.constvars, consts, strict=True))}
        site_ins: dict[int, Array] = {}
        if self.site is None:
            known.update(zip(self.inputs, values, strict=True))
        else:
            site_ins[self.site.index] = values[0]

        def given(site: Site, site_in: PyTree, operands: list[Array]) -> tuple[Array, None]:
            if site is self.site:
                return site_in, None
            # another site inside a loop: no derivative passes it
            return plain_site(site, site_in, [jax.lax.stop_gradient(v) for v in operands])

        view = View(
            known=known,
            at_site=lambda site, world: given,
            site_ins=site_ins,
            leaf=lambda site, world: site_ins.get(site.index),
        )
        return evaluate(self.program, [(a, None) for a in self.outputs], view)

    @cached_property
    def jaxpr(self) -> ClosedJaxpr:
        shapes = [(v.aval.shape, v.aval.dtype) for v in self.inputs]
        if self.site is not None:
            shapes = [(self.site.shape, self.site.output.aval.dtype)]
        n = len(shapes)
        shapes += [(v.aval.shape, v.aval.dtype) for v in self.constvars]
        structs = [jax.ShapeDtypeStruct(*s) for s in shapes]
        return jax.make_jaxpr(lambda *a: self.call(a[:n], a[n:]))(*structs)


def values_of(program: Program, atoms: Sequence[Atom], known: Mapping[Var, Array]) -> list[Array]:
    """Evaluate variables of a program from the values that are known."""
    view = View(known=known, at_site=lambda site, world: plain_site)
    return evaluate(program, [(a, None) for a in atoms], view)


def computed_from(program: Program, sources: Iterable[Var]) -> set[Var]:
    """The variables that depend on `sources` in any way, also across sites; `sources` included."""
    return set(solve(Flow[bool](), program, ((v, True) for v in sources))[0])


def dependents(program: Program, sources: Iterable[Var], stops: Container[Var] = ()) -> set[Var]:
    """The variables that depend on `sources` without crossing a site, and without going past `stops`."""
    flow = Flow[bool](
        lambda node, given: node.site is None, beyond=lambda v, reached: reached and v not in stops
    )
    return set(solve(flow, program, ((v, True) for v in sources))[0])


def behind(program: Program, targets: Iterable[Atom], stops: Container[Var] = ()) -> set[Var]:
    """The variables that `targets` depend on, also across sites, without going past `stops`."""
    flow = Flow[bool](back=True, beyond=lambda v, wanted: v not in stops or None)
    return set(solve(flow, program, ((a, True) for a in targets))[0])


def needed(program: Program, targets: Iterable[Atom]) -> list[Node]:
    """The nodes that `targets` depend on."""
    return _makers(program, behind(program, targets))


def between(program: Program, sources: Sequence[Var], targets: Iterable[Atom]) -> list[Node]:
    """The nodes on paths from `sources` to `targets` that cross no site."""
    return _makers(program, on_the_way(program, sources, targets))


def on_the_way(
    program: Program, sources: Sequence[Var], targets: Iterable[Atom], stops: Container[Var] = ()
) -> set[Var]:
    """The variables on paths from `sources` to `targets` that cross no site; without the sources."""
    after = dependents(program, sources, stops) - set(sources)
    flow = Flow[bool](back=True, beyond=lambda v, wanted: v in after or None)
    return after & set(solve(flow, program, ((a, True) for a in targets))[0])


def _makers(program: Program, made: Container[Var]) -> list[Node]:
    return [node for node in program.nodes if any(v in made for v in node.outputs)]


def cut(program: Program, sources: Sequence[Var], targets: Sequence[Atom]) -> Slice:
    """The slice from `sources` to `targets`; all other variables that it reads become its constants."""
    nodes = between(program, sources, targets)
    made = {v for node in nodes for v in node.outputs} | set(sources) | set(program.consts)
    reads = [a for node in nodes for a in node.inputs] + list(targets)
    consts = dict.fromkeys(a for a in reads if isinstance(a, Var) and a not in made)
    return Slice(program, tuple(sources), list(consts), tuple(targets))


def cut_after(program: Program, site: Site, targets: Sequence[Atom]) -> Slice:
    """The slice from a site, which may be inside control flow, to `targets`."""
    node = program.nodes[program.holder[site.index]]
    part = cut(program, node.outputs, targets)
    if node.site is None:
        extra = [v for v in node.reads if v not in program.consts]
        part = dataclasses.replace(part, constvars=list(dict.fromkeys([*extra, *part.constvars])))
    return dataclasses.replace(part, site=site)


def uses_while(program: Program, sources: Sequence[Var], targets: Sequence[Atom]) -> bool:
    """Whether a path from `sources` to `targets` goes through a loop that has no reverse mode."""
    return any(has_while(node) for node in between(program, sources, targets))


def has_while(node: Node) -> bool:
    """Whether a node is or contains a `while` loop that no custom derivative rule replaces."""
    if has_own_rule(node) and PullBack.of(node) is not None:
        return False
    inside = (n for program in node.inner for n in program.nodes)
    return node.primitive is primitives.while_p or any(map(has_while, inside))
