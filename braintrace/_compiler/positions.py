"""The hidden positions that each array element reaches, and those that it depends on.

`reaches` runs backwards from a group's new states, `sources` forwards from a site's output. Both follow
derivatives: integers and `stop_gradient` end a path. For a function or primitive with a custom derivative
rule (a linear solve, say) they follow the rule, because the value need not show the dependence.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from .._compat import primitives
from .._ops.primitive import ETPPrimitive
from . import links as _links
from .caching import cached
from .constants import Constants, Zeros
from .custom_derivatives import PullBack, implementation
from .dataflow import Flow, along_rule, cross, solve, union
from .links import Array, Linked
from .primitives import INDICES
from .program import Atom, Node, Program, Var
from .reach import Reach, SiteReach

Known = list[Array | None] | None  # the known values of the inputs of a program


class Positions:
    """The positions of one program; links between elements are computed once for all queries.

    Args:
        program: The program.
        known: The values of inputs, as far as they are known.
        through: Whether paths go through sites instead of ending there.
        fine: Whether to resolve the positions of a convolution, the indices of a site and the zeros of
            masked weights, which takes longer.
        zeros: Where inputs may be nonzero, if `fine`.
    """

    def __init__(
        self,
        program: Program,
        known: Mapping[Var, Array | None] | None = None,
        *,
        through: bool = False,
        fine: bool = False,
        zeros: Mapping[Var, Array | None] | None = None,
    ) -> None:
        self.program, self.through, self.fine = program, through, fine
        self.constants = Constants(program, known or {})
        self._zeros = Zeros(program, self.constants, zeros or {})
        self._programs: dict[Hashable, Positions] = {}

    def reaches(
        self, starts: Mapping[Var, Reach], stop: Callable[[Var], bool] | None = None
    ) -> tuple[dict[Var, Reach], SiteReach]:
        """The positions that each variable and each site output reaches; paths end at sites and at `stop`."""
        return solve(self._until(stop, back=True), self.program, starts.items())

    def sources(
        self, starts: Mapping[Var, Reach], origin: SiteReach, stop: Callable[[Var], bool] | None = None
    ) -> dict[Var, Reach]:
        """The positions that each variable depends on: those in `starts`, and of site outputs in `origin`."""
        return solve(self._until(stop, back=False), self.program, starts.items(), origin)[0]

    def across(self, node: Node, given: list[Reach | None]) -> list[Reach | None]:
        """The positions that the outputs of one node depend on, given those of its inputs."""
        return self._carry(node, given, back=False, derivatives=False)

    def _until(self, stop: Callable[[Var], bool] | None, back: bool) -> Flow[Reach]:
        flow = self._flow(back, True)
        return flow if stop is None else replace(flow, beyond=lambda v, r: None if stop(v) else r)

    @cached
    def _flow(self, back: bool, derivatives: bool) -> Flow[Reach]:
        return Flow(
            transfer=lambda node, given: self._carry(node, given, back, derivatives),
            back=back,
            derivatives=derivatives,
            enters=True,
            rule=PullBack.of,
            inside=lambda node, program, step, *kind: self._at(node, program, step)._flow(*kind),
            stack=_stack,
            most=_FIXPOINT,
        )

    def _carry(
        self, node: Node, given: list[Reach | None], back: bool, derivatives: bool
    ) -> list[Reach | None]:
        """Propagate positions across one node, along its links."""
        far = node.inputs if back else node.outputs
        made: list[Reach | None] = [None] * len(far)
        if node.site is not None and not self.through:
            return made
        found, flow = self._find_links(node), self._flow(back, derivatives)
        own = isinstance(node.primitive, ETPPrimitive)  # its derivative is that of its implementation
        if found is None and derivatives and not own and (pull := PullBack.of(node)) is not None:
            return along_rule(flow, node, pull, given)
        if found is None and (own or not derivatives) and (inside := self._expanded(node)) is not None:
            return cross(inside._flow(back, derivatives), inside.program, given)[0]
        if found is None:
            ins, outs = ([tuple(a.aval.shape) for a in ends] for ends in (node.inputs, node.outputs))
            found = _links.all_with_all(ins, outs)
        for i, j, link in found:
            here, there = (j, i) if back else (i, j)
            reach, atom = given[here], far[there]
            if reach is not None and flow.takes(atom):
                made[there] = union((made[there], reach.carry(link, atom.aval.shape, back=back)))
        return made

    @cached
    def _find_links(self, node: Node) -> Linked | None:
        ins, outs = [a.aval for a in node.inputs], [v.aval for v in node.outputs]
        known = lambda i: self.constants(node.inputs[i])
        fine = _links.fine_links(node, self._zeros) if self.fine else None
        return fine or _links.links(node.primitive, node.params, ins, outs, known)

    @cached
    def _expanded(self, node: Node) -> Positions | None:
        """The positions of a primitive's implementation, if that can be traced."""
        program = None if node.inner else implementation(node)
        if program is None:
            return None
        if not self.fine:
            return Positions(program)
        known = dict(zip(program.inputs, self._known(node.inputs), strict=True))
        zeros = dict(zip(program.inputs, map(self._zeros, node.inputs), strict=True))
        return Positions(program, known, fine=True, zeros=zeros)

    # -- inside control flow -----------------------------------------------------------------------

    def _at(self, node: Node, program: Program, step: int | None) -> Positions:
        """The positions of an inner program, with the known values of its inputs."""
        known = None
        if node.primitive is primitives.cond_p:
            known = self._known(node.inputs[1:])
        elif step is not None:
            known = self._known_in(node)[step]
        return self._inner(program, known)

    def _inner(self, program: Program, known: Known) -> Positions:
        key = program, known and tuple(None if v is None else np.asarray(v).tobytes() for v in known)
        if key not in self._programs:
            values = dict(zip(program.inputs, known, strict=True)) if known else {}
            self._programs[key] = Positions(program, values, through=self.through, fine=self.fine)
        return self._programs[key]

    def _known(self, atoms: Sequence[Atom]) -> list[Array | None]:
        """The values of integers that do not depend on data; None for all others."""
        return [self.constants(a) if jnp.issubdtype(a.aval.dtype, jnp.integer) else None for a in atoms]

    @cached
    def _known_in(self, node: Node) -> list[Known]:
        """The known inputs of a scan's body in each iteration: constants and counters."""
        loop = node.loop
        assert loop is not None
        assert loop.length is not None
        if not any(n.primitive in INDICES for n in loop.body.walk()):
            return [None] * loop.length
        first = self._known(node.inputs)
        consts, carried = first[: loop.consts], first[loop.consts :][: loop.carry]
        xs = first[loop.consts + loop.carry :]
        if loop.length > _UNROLL or all(v is None for v in (*carried, *xs)):
            return [[*consts, *[None] * (len(carried) + len(xs))]] * loop.length
        result: list[Known] = [None] * loop.length
        steps = range(loop.length)
        for step in reversed(steps) if node.params["reverse"] else steps:
            result[step] = [*consts, *carried, *(None if x is None else x[step] for x in xs)]
            carried = self._inner(loop.body, result[step])._known(loop.body.outputs[: loop.carry])
        return result


@cached
def positions_of(program: Program, *, through: bool = False, fine: bool = False) -> Positions:
    """The positions of a program, computed once."""
    return Positions(program, through=through, fine=fine)


def _stack(parts: Sequence[Reach | None], shape: tuple[int, ...]) -> Reach | None:
    """Stack values of the given shape; None if none of them reaches a position."""
    first = next((p for p in parts if p is not None), None)
    return None if first is None else first.stack(parts, shape)


_FIXPOINT = 64  # iterations of a `while` before its carried values are assumed to mix
_UNROLL = 256  # iterations of a `scan` up to which counters are evaluated
