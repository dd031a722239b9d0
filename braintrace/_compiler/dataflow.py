"""Data-flow analysis: propagate values from variable to variable, forwards or backwards.

A `Flow` defines an analysis by its transfer function; `solve` runs it, and is the only place that enters
control flow and functions with custom derivative rules. Values form a lattice: `a | b` joins two, `a == b`
is true once a loop has reached its fixed point, and None or a false value is the bottom. Bit masks,
booleans, `Goal` and `Reach` are such values.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from .._compat import primitives
from .program import Atom, Node, Program, Var

if TYPE_CHECKING:
    from .custom_derivatives import PullBack


class Lattice(Protocol):
    """A value that can be joined with another."""

    def __or__(self, other: Self, /) -> Self: ...


V = TypeVar("V", bound=Lattice)
Values = list[V | None]


def union(values: Iterable[V | None]) -> V | None:
    """The join of all values that are not None; None if there are none."""
    found = [v for v in values if v is not None]
    return reduce(or_, found) if found else None


@dataclass(frozen=True, eq=False)
class Flow(Generic[V]):
    """A data-flow analysis.

    `transfer(node, given)` takes the values on one side of a node (its inputs; backwards, its outputs) to
    the other side: a list with one value for each variable there, or one value for all of them.
    `beyond(var, value)` is the part of a value that is propagated past a variable.
    """

    transfer: Callable[[Node, Values[V]], Values[V] | V | None] = lambda node, given: union(given)
    back: bool = False
    beyond: Callable[[Var, V], V | None] = lambda var, value: value
    derivatives: bool = False  # paths end at integers and at operations without a derivative
    enters: bool = False  # whether inner programs are analysed; if not, `transfer` treats the node as a whole
    # the pull-back of a function with a custom derivative rule, analysed instead of the function
    rule: Callable[[Node], PullBack | None] = lambda node: None
    # the flow for an inner program: (node, program, iteration of a `scan`, back, derivatives)
    inside: Callable[[Node, Program, int | None, bool, bool], Flow[V]] | None = None
    # stacks the values of all iterations of a `scan`, given the shape of one; `value[i]` is the inverse.
    # Without it, all iterations share one value
    stack: Callable[[Sequence[V | None], tuple[int, ...]], V | None] | None = None
    most: int = 1 << 30  # iterations to a fixed point; after these, `transfer` treats the loop as a whole

    def takes(self, atom: Atom) -> bool:
        """Whether the atom can have a value."""
        return isinstance(atom, Var) and (atom.inexact or not self.derivatives)

    def across(self, node: Node, given: Values[V]) -> Values[V]:
        """Apply `transfer`, with one value for each variable on the other side."""
        made = self.transfer(node, given)
        return made if isinstance(made, list) else [made] * len(node.inputs if self.back else node.outputs)

    def at(self, node: Node, program: Program, step: int | None, *, back: bool, derivatives: bool) -> Flow[V]:
        if self.inside is None:
            return replace(self, back=back, derivatives=derivatives)
        return self.inside(node, program, step, back, derivatives)


def solve(
    flow: Flow[V],
    program: Program,
    starts: Iterable[tuple[Atom, V | None]],
    sites: Mapping[int, V] | None = None,
    visit: Container[int] = (),
) -> tuple[dict[Var, V], dict[int, V]]:
    """Run a data-flow analysis; returns the values of variables and, backwards, of the outputs of sites.

    Forwards, `sites` are initial values for the outputs of sites, including those inside control flow. Only
    nodes that a value reaches are visited, and those whose index is in `visit`.
    """
    env: dict[Var, V] = {}
    found: dict[int, V] = {}
    nodes, back = program.nodes, flow.back
    waiting: list[int] = [-i if back else i for i in range(len(nodes)) if i in visit] if visit else []

    def put(var: Var, value: V) -> None:
        env[var] = env[var] | value if var in env else value
        if back:
            if var in program.producer:
                heapq.heappush(waiting, -program.producer[var])
        else:
            for i in program.readers.get(var, ()):
                heapq.heappush(waiting, i)

    for atom, value in starts:
        if isinstance(atom, Var) and value:
            put(atom, value)
    given_at = {i: v for i, v in (sites or {}).items() if i in program.holder}
    for i, value in given_at.items():
        holder = nodes[program.holder[i]]
        if holder.site is not None:
            put(holder.outputs[0], value)
        else:
            heapq.heappush(waiting, program.holder[i])
    done = None
    # in program order (backwards: last node first), all inputs of a node are final when it is visited
    while waiting:
        number = heapq.heappop(waiting)
        if number == done:
            continue
        done, node = number, nodes[abs(number)]
        near, far = (node.outputs, node.inputs) if back else (node.inputs, node.outputs)
        given: Values[V] = [env.get(a) if flow.takes(a) else None for a in near]  # type: ignore[arg-type]
        if back:
            given = [g if g is None else flow.beyond(v, g) for v, g in zip(node.outputs, given, strict=True)]
        here = {s.index: given_at[s.index] for s in node.sites if s.index in given_at} if given_at else {}
        if not here and abs(number) not in visit and all(g is None for g in given):
            continue
        if node.site is not None and back:
            found[node.site.index] = given[0]  # type: ignore[assignment]
        if flow.derivatives and (node.is_flat or not any(map(flow.takes, far))):
            continue
        if node.inner and flow.enters:
            made, below = _enter(flow, node, given, here)
            found.update(below)
        else:
            made = flow.across(node, given)
        for atom, value in zip(far, made, strict=True):
            if value is not None and flow.takes(atom):
                value = value if back else flow.beyond(atom, value)  # type: ignore[arg-type]
                if value:
                    put(atom, value)  # type: ignore[arg-type]
    return env, found


def cross(
    flow: Flow[V], program: Program, given: Iterable[V | None], sites: Mapping[int, V] | None = None
) -> tuple[Values[V], dict[int, V]]:
    """Propagate values from the inputs of a program to its outputs or, backwards, from outputs to inputs."""
    near, far = (program.outputs, program.inputs) if flow.back else (program.inputs, program.outputs)
    env, found = solve(flow, program, zip(near, given, strict=True), sites)
    return [env.get(a) if isinstance(a, Var) else None for a in far], found


def _enter(
    flow: Flow[V], node: Node, given: Values[V], sites: Mapping[int, V]
) -> tuple[Values[V], dict[int, V]]:
    """Propagate values across a node with inner programs."""
    kind = {"back": flow.back, "derivatives": flow.derivatives}
    if node.primitive is primitives.cond_p:
        ways = [
            cross(flow.at(node, p, None, **kind), p, given if flow.back else given[1:], sites)
            for p in node.inner
        ]
        either = [union(values) for values in zip(*(far for far, _ in ways), strict=True)]
        # the predicate has no derivative
        return [None, *either] if flow.back else either, {i: v for _, found in ways for i, v in found.items()}
    if node.loop is not None:
        return _iterate(flow, node, given, sites)
    pull = flow.rule(node) if flow.derivatives else None
    if pull is None:  # no custom derivative rule: follow the computation
        inner = flow.at(node, node.inner[0], None, back=flow.back, derivatives=False)
        return cross(inner, node.inner[0], given, sites)
    return along_rule(flow, node, pull, given), {}


def along_rule(flow: Flow[V], node: Node, pull: PullBack, given: Values[V]) -> Values[V]:
    """Propagate values across a node along its pull-back, in which directions are reversed."""
    turned = flow.at(node, pull.program, None, back=not flow.back, derivatives=False)
    near, far = (pull.cotangents, pull.results) if flow.back else (pull.results, pull.cotangents)
    env, _ = solve(turned, pull.program, ((atom, given[i]) for i, atom in near.items()))
    found = {i: env.get(atom) for i, atom in far.items() if isinstance(atom, Var)}
    return [found.get(i) for i in range(len(node.inputs if flow.back else node.outputs))]


def _iterate(
    flow: Flow[V], node: Node, given: Values[V], sites: Mapping[int, V]
) -> tuple[Values[V], dict[int, V]]:
    """Propagate values across a loop: to a fixed point of its carry, or iteration by iteration."""
    loop = node.loop
    assert loop is not None
    carry, body, back = loop.carry, loop.body, flow.back
    # `near` and `far` count the constants on the side that values come from, and on the side that they go
    # to. Constants are inputs of every iteration and outputs of none: forwards, each iteration reads them
    # (near), backwards it contributes to them (far), so that their values are joined over all iterations.
    near, far = (0, loop.consts) if back else (loop.consts, 0)
    head = [None] * loop.before if back else []
    args = given if back else given[loop.before :]
    moving = args[near:][:carry]

    def given_in(step: int | None) -> tuple[Flow[V], Values[V], dict[int, V]]:
        """The flow and the values at the start of one iteration (None: of any iteration)."""

        def at(value: Any) -> Any:
            return value if step is None or value is None else value[step]

        inner = flow.at(node, body, step, back=back, derivatives=flow.derivatives)
        slices = [at(v) for v in args[near + carry :]]
        return inner, [*args[:near], *moving, *slices], {i: at(v) for i, v in sites.items()}

    if flow.stack is None or loop.length is None:
        for _ in range(flow.most):
            inner, values, at_sites = given_in(None)
            made, found = cross(inner, body, values, at_sites)
            after = [union(pair) for pair in zip(moving, made[far:][:carry], strict=True)]
            if after == moving:
                return [*head, *made[:far], *moving, *made[far + carry :]], found
            moving = after
        return flow.across(node, given), {}
    steps = range(loop.length)
    constants: Values[V] = [None] * far
    slices, below = {}, {}
    last: Any = None
    for step in steps if node.params["reverse"] == back else reversed(steps):
        now = given_in(step)
        if now != last:  # most iterations are equal to the one before
            last, (made, found) = now, cross(now[0], body, *now[1:])
        constants = [union(pair) for pair in zip(constants, made, strict=False)]
        moving, slices[step], below[step] = made[far:][:carry], made[far + carry :], found
    ends = (body.inputs if back else body.outputs)[far + carry :]
    stacked = [flow.stack([slices[s][k] for s in steps], a.aval.shape) for k, a in enumerate(ends)]
    depth = len(node.loops) + 1
    by_site = {
        s.index: flow.stack([below[i].get(s.index) for i in steps], (*s.loops[depth:], *s.output.aval.shape))
        for s in node.sites
    }
    return [*head, *constants, *moving, *stacked], {i: v for i, v in by_site.items() if v is not None}


def settled(bits: int, more: Callable[[int], int]) -> int:
    """The smallest set of bits that contains `bits` and `more` of itself."""
    while (after := bits | more(bits)) != bits:
        bits = after
    return bits
