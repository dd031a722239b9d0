"""Where each variable comes from, and which hidden states it goes to: one bit per input or state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from .. import _compat
from .._compat import Literal, primitives
from .._ops.primitive import ETPPrimitive
from .own_rules import PullBack
from .program import Atom, Node, Program, Site, Var

CARRIED = 1  # changes from one iteration of a loop to the next
SLICED = 2  # another slice in each iteration of a loop
MARKED = 4  # made of what a marked op gives
_FIRST = 3


@dataclass(frozen=True, eq=False)
class Provenance:
    """For every variable, also inside control flow, the program inputs that it depends on.

    What `stop_gradient` cuts off is no parameter of what comes after; it is still data.
    """

    inputs: tuple[Var, ...]
    bits: dict[Var, int]

    def of(self, atom: Atom) -> tuple[list[Var], bool, bool]:
        """The inputs behind a variable; whether it is carried by a loop; whether it is sliced by one."""
        bits = 0 if isinstance(atom, Literal) else self.bits.get(atom, 0)
        found = [v for i, v in enumerate(self.inputs) if bits >> (i + _FIRST) & 1]
        return found, bool(bits & CARRIED), bool(bits & SLICED)


def provenance(program: Program, params: Sequence[Var] = ()) -> Provenance:
    bits = {v: 1 << (i + _FIRST) for i, v in enumerate(program.inputs)}
    _forward(program, bits, sum(bits[v] for v in params))
    return Provenance(program.inputs, bits)


def _forward(program: Program, bits: dict[Var, int], params: int) -> None:
    def of(atom: Atom) -> int:
        return 0 if isinstance(atom, Literal) else bits.get(atom, 0)

    for node in program.nodes:
        ins = [of(a) for a in node.inputs]
        union = 0
        for b in ins:
            union |= b
        for which, inner in enumerate(node.inner):
            given = _given(node, which, ins, union)
            bits.update(zip(inner.inputs, given, strict=True))
            _forward(inner, bits, params)
        if node.is_flat:
            union &= ~params
        if isinstance(node.primitive, ETPPrimitive):
            union |= MARKED
        for v in node.outputs:
            bits[v] = union


def _given(node: Node, which: int, ins: list[int], union: int) -> list[int]:
    """What the inputs of a program inside a node depend on."""
    if node.primitive is primitives.cond_p:
        return ins[1:]
    if node.primitive is primitives.scan_p:
        num_consts, num_carry = _compat.scan_counts(node.eqn)
        xs = ins[num_consts + num_carry :]
        return [*ins[:num_consts], *[union | CARRIED] * num_carry, *(b | SLICED for b in xs)]
    if node.primitive is primitives.while_p:
        num_cond, num_body = _compat.while_counts(node.eqn)
        consts = ins[num_cond:][:num_body] if which == 1 else ins[:num_cond]
        return [*consts, *[union | CARRIED] * (len(ins) - num_cond - num_body)]
    return ins


@dataclass(frozen=True)
class Goal:
    """The states that a variable reaches: without crossing another marked op, and by crossing one."""

    direct: int = 0
    crossing: int = 0

    def __or__(self, other: Goal) -> Goal:
        return Goal(self.direct | other.direct, self.crossing | other.crossing)

    def __and__(self, mask: int) -> Goal:
        return Goal(self.direct & mask, self.crossing & mask)

    def __bool__(self) -> bool:
        return bool(self.direct | self.crossing)


def goals(
    program: Program, new: Mapping[Var, int], group_of: Sequence[int]
) -> tuple[dict[Var, Goal], dict[int, Goal]]:
    """Which new states each variable, and each site's output, reaches within the step.

    `new` numbers the variables of the new states. A path ends at the new state of another group, so the
    bits that pass such a variable are those of its own group only.
    """
    masks = {v: sum(1 << j for j, g in enumerate(group_of) if g == group_of[i]) for v, i in new.items()}
    return spread(program, {v: Goal(direct=1 << i) for v, i in new.items()}, masks)


AtSite = Callable[[Site, Goal], list[Goal]]


def cross(site: Site, goal: Goal) -> list[Goal]:
    """What the operands of a site reach: the same, by crossing it."""
    return [Goal(0, goal.direct | goal.crossing)] * len(site.inputs)


def spread(
    program: Program, starts: Mapping[Var, Goal], masks: Mapping[Var, int], at_site: AtSite = cross
) -> tuple[dict[Var, Goal], dict[int, Goal]]:
    """Carry goals backwards, along derivatives: of every variable, and of every site's output.

    `masks` are the bits that go on beyond a variable, and `at_site` is what a site makes of its goal.
    """
    env, sites = dict(starts), dict[int, Goal]()
    _backward(program, env, sites, lambda v: masks.get(v, -1), False, at_site)
    return env, sites


def _backward(
    program: Program,
    env: dict[Var, Goal],
    sites: dict[int, Goal],
    mask: Callable[[Var], int],
    through: bool,
    at_site: AtSite,
) -> None:
    for node in reversed(program.nodes):
        goal = Goal()
        for v in node.outputs:
            if v in env and (through or jnp.issubdtype(v.aval.dtype, jnp.inexact)):
                goal = goal | (env[v] & mask(v))
        if not goal or (node.is_flat and not through):
            continue
        if node.site is not None:
            i = node.site.index
            sites[i] = sites.get(i, Goal()) | goal
            ins = at_site(node.site, goal)
        elif node.inner:
            outs = [env.get(v, Goal()) & mask(v) for v in node.outputs]
            ins = _backward_inner(node, outs, sites, through, at_site)
        else:
            ins = [goal] * len(node.inputs)
        for atom, g in zip(node.inputs, ins, strict=True):
            if isinstance(atom, Var) and g and (through or jnp.issubdtype(atom.aval.dtype, jnp.inexact)):
                env[atom] = env.get(atom, Goal()) | g


def _backward_inner(
    node: Node, outs: list[Goal], sites: dict[int, Goal], through: bool, at_site: AtSite
) -> list[Goal]:
    def enter(program: Program, outs: Sequence[Goal], through: bool) -> list[Goal]:
        inside: dict[Var, Goal] = {}
        for atom, goal in zip(program.outputs, outs, strict=True):
            if isinstance(atom, Var) and goal:
                inside[atom] = inside.get(atom, Goal()) | goal
        _backward(program, inside, sites, lambda v: -1, through, at_site)
        return [inside.get(v, Goal()) for v in program.inputs]

    if node.primitive is primitives.cond_p:
        found = [enter(program, outs, through) for program in node.inner]
        return [Goal(), *(_union(goals) for goals in zip(*found, strict=True))]
    if node.primitive is primitives.scan_p:
        num_consts, num_carry = _compat.scan_counts(node.eqn)
        before, body = 0, node.inner[0]
    elif node.primitive is primitives.while_p:
        before, num_consts = _compat.while_counts(node.eqn)
        num_carry, body = len(outs), node.inner[1]
    else:  # a function with a derivative rule of its own
        pull = None if through else PullBack.of(node)
        if pull is None:
            return enter(node.inner[0], outs, True)
        reached = pull.sources()
        return [_union([outs[j] for j in reached.get(i, ())]) for i in range(len(node.inputs))]
    carried, ys = outs[:num_carry], outs[num_carry:]
    while True:
        ins = enter(body, [*carried, *ys], through)
        after = [a | b for a, b in zip(carried, ins[num_consts:], strict=False)]
        if after == carried:
            xs = ins[num_consts + num_carry :]
            return [*[Goal()] * before, *ins[:num_consts], *carried, *xs]
        carried = after


def _union(goals: Sequence[Goal]) -> Goal:
    result = Goal()
    for g in goals:
        result = result | g
    return result
