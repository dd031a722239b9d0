"""The program inputs that each variable depends on, and the hidden states that it reaches, as bit masks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .._compat import Literal, primitives
from .._ops.primitive import ETPPrimitive
from .caching import cached
from .custom_derivatives import PullBack
from .dataflow import Flow, solve, union
from .program import Atom, Node, Program, Site, Var

CARRIED = 1  # changes from one iteration of a loop to the next
SLICED = 2  # another slice in each iteration of a loop
MARKED = 4  # depends on the output of a marked op
_FIRST = 3


@dataclass(frozen=True, eq=False)
class Provenance:
    """The program inputs that each variable depends on, including variables inside control flow.

    A dependence on a parameter ends at `stop_gradient`; a dependence on data does not.
    """

    inputs: tuple[Var, ...]
    bits: dict[Var, int]

    def of(self, atom: Atom) -> tuple[list[Var], bool, bool]:
        """The inputs that a variable depends on, whether a loop carries it, and whether a loop slices it."""
        bits = 0 if isinstance(atom, Literal) else self.bits.get(atom, 0)
        found = [v for i, v in enumerate(self.inputs) if bits >> (i + _FIRST) & 1]
        return found, bool(bits & CARRIED), bool(bits & SLICED)


@cached
def provenance(program: Program, params: Sequence[Var] = ()) -> Provenance:
    """The dependence of each variable on the program inputs; that on `params` ends at `stop_gradient`."""
    bits = {v: 1 << (i + _FIRST) for i, v in enumerate(program.inputs)}
    cut = sum(bits[v] for v in params)
    found: dict[Var, int] = {}

    def transfer(node: Node, given: list[int | None]) -> int:
        ins = [b or 0 for b in given]
        made = union(ins) or 0
        for inner in node.inner:
            follow(inner, zip(inner.inputs, _given(node, inner, ins, made), strict=True))
        made = made & ~cut if node.is_flat else made
        return made | MARKED if isinstance(node.primitive, ETPPrimitive) else made

    def follow(program: Program, starts: Iterable[tuple[Var, int]]) -> None:
        found.update(solve(Flow(transfer), program, starts)[0])

    follow(program, bits.items())
    return Provenance(program.inputs, found)


def _given(node: Node, inner: Program, ins: list[int], union: int) -> list[int]:
    """The dependence of the inputs of an inner program."""
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
    """The states that a variable reaches, as bits: without crossing a marked op, and by crossing one."""

    direct: int = 0
    crossing: int = 0

    @property
    def any(self) -> int:
        """The states that are reached in either way."""
        return self.direct | self.crossing

    def __or__(self, other: Goal) -> Goal:
        return Goal(self.direct | other.direct, self.crossing | other.crossing)

    def __and__(self, mask: int) -> Goal:
        return Goal(self.direct & mask, self.crossing & mask)

    def __bool__(self) -> bool:
        return bool(self.any)


def goals(
    program: Program, new: Mapping[Var, int], group_of: Sequence[int]
) -> tuple[dict[Var, Goal], dict[int, Goal]]:
    """The new states that each variable and each site's output reaches within the step.

    `new` numbers the new states. A path ends at a new state of another group: only the bits of its own
    group are propagated past a new state.
    """
    masks = {v: sum(1 << j for j, g in enumerate(group_of) if g == group_of[i]) for v, i in new.items()}
    return spread(program, {v: Goal(direct=1 << i) for v, i in new.items()}, masks)


AtSite = Callable[[Site, Goal], list[Goal | None]]


def cross(site: Site, goal: Goal) -> list[Goal | None]:
    """The goal of a site's operands: that of its output, reached by crossing the site."""
    return [Goal(0, goal.any)] * len(site.inputs)


def spread(
    program: Program, starts: Mapping[Var, Goal], masks: Mapping[Var, int], at_site: AtSite = cross
) -> tuple[dict[Var, Goal], dict[int, Goal]]:
    """Propagate goals backwards along derivatives, to all variables and to the outputs of all sites.

    `masks` are the bits that are propagated past a variable; `at_site` gives the goals of a site's operands.
    """

    def transfer(node: Node, given: list[Goal | None]) -> Goal | list[Goal | None]:
        goal = union(given) or Goal()
        return goal if node.site is None else at_site(node.site, goal)

    def beyond(var: Var, goal: Goal) -> Goal | None:
        return goal & masks.get(var, -1) or None

    flow = Flow(transfer, back=True, beyond=beyond, derivatives=True, enters=True, rule=PullBack.of)
    return solve(flow, program, starts.items())
