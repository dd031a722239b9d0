"""Where each variable comes from, and which hidden states it goes to: one bit per input or state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .._compat import Literal, primitives
from .._ops.primitive import ETPPrimitive
from .caching import cached
from .dataflow import Flow, solve, union
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


@cached
def provenance(program: Program, params: Sequence[Var] = ()) -> Provenance:
    bits = {v: 1 << (i + _FIRST) for i, v in enumerate(program.inputs)}
    cut = sum(bits[v] for v in params)
    found: dict[Var, int] = {}

    def transfer(node: Node, given: list[int | None]) -> int:
        ins = [b or 0 for b in given]
        made: int = union(ins)
        for inner in node.inner:
            follow(inner, zip(inner.inputs, _given(node, inner, ins, made), strict=True))
        made = made & ~cut if node.is_flat else made
        return made | MARKED if isinstance(node.primitive, ETPPrimitive) else made

    def follow(program: Program, starts: Iterable[tuple[Var, int]]) -> None:
        found.update(solve(Flow(transfer), program, starts)[0])

    follow(program, bits.items())
    return Provenance(program.inputs, found)


def _given(node: Node, inner: Program, ins: list[int], union: int) -> list[int]:
    """What the inputs of a program inside a node depend on."""
    loop = node.loop
    if loop is None:
        return ins[1:] if node.primitive is primitives.cond_p else ins
    moving = [union | CARRIED] * loop.carry
    if inner is not loop.body:
        return [*ins[: loop.before], *moving]
    ins = ins[loop.before :]
    return [*ins[: loop.consts], *moving, *(b | SLICED for b in ins[loop.consts + loop.carry :])]


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

    def transfer(node: Node, given: list[Goal | None]) -> Goal | list[Goal]:
        goal: Goal = union(given)
        return goal if node.site is None else at_site(node.site, goal)

    def beyond(var: Var, goal: Goal) -> Goal | None:
        return goal & masks.get(var, -1) or None

    flow = Flow(transfer, back=True, beyond=beyond, derivatives=True, enters=True, rule=PullBack.of)
    return solve(flow, program, starts.items())
