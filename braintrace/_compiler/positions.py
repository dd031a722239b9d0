"""Which hidden position does each element of the program reach, and from which does it come?

`reaches` goes backwards from a group's new states; `sources` goes forwards from a site's output. Derivatives
are what is followed: integers and `stop_gradient` end a path, and the derivative rule of a function that has
one of its own is followed instead of the function.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._compat import primitives
from . import links as _links
from .constants import Constants
from .links import Array, Linked
from .own_rules import PullBack
from .program import Atom, Node, Program, Var, read_program
from .reach import Reach, SiteReach, carry


class Positions:
    """The positions of one program; links are found once and serve every question about it."""

    def __init__(self, program: Program, known: Mapping[Var, Array | None] | None = None) -> None:
        self.program = program
        self.constants = Constants(program, known or {})
        self._links: dict[Node, Linked | Positions] = {}
        self._inner: dict[tuple[Node, int, Any], Positions] = {}
        self._rules: dict[Node, _Rule | None] = {}
        self._producer = {v: i for i, node in enumerate(program.nodes) for v in node.outputs}

    @cached_property
    def _readers(self) -> dict[Var, list[int]]:
        found: dict[Var, list[int]] = {}
        for i, node in enumerate(self.program.nodes):
            for atom in node.inputs:
                if isinstance(atom, Var):
                    found.setdefault(atom, []).append(i)
        return found

    @cached_property
    def _holder(self) -> dict[int, int]:
        """The node at or inside which each site is."""
        return {s.index: i for i, node in enumerate(self.program.nodes) for s in node.sites}

    # -- backwards ---------------------------------------------------------------------------------

    def reaches(
        self,
        starts: Mapping[Var, Reach],
        stop: Callable[[Var], bool] = lambda v: False,
        through: bool = False,
    ) -> tuple[dict[Var, Reach], SiteReach]:
        """What every variable, and the output of every site, reaches; paths end at sites and at `stop`."""
        env: dict[Var, Reach] = dict(starts)
        sites: SiteReach = {}
        # last node first: all readers of a variable come before the node that makes it
        waiting = [-self._producer[v] for v in env if v in self._producer]
        heapq.heapify(waiting)
        done = None
        while waiting:
            number = -heapq.heappop(waiting)
            if number == done:
                continue
            done, node = number, self.program.nodes[number]
            outs = [None if stop(v) else env.get(v) for v in node.outputs]
            if all(r is None or r.is_empty for r in outs):
                continue
            if node.site is not None:
                sites[node.site.index] = env[node.outputs[0]]
                continue
            full = [
                Reach.empty(v.aval.shape) if r is None else r for r, v in zip(outs, node.outputs, strict=True)
            ]
            ins, inner_sites = self._back(node, full, through)
            sites.update(inner_sites)
            for atom, reach in zip(node.inputs, ins, strict=True):
                if isinstance(atom, Var) and reach is not None:
                    env[atom] = env[atom].merge(reach) if atom in env else reach
                    if atom in self._producer:
                        heapq.heappush(waiting, -self._producer[atom])
        return env, sites

    def _back(self, node: Node, outs: list[Reach], through: bool) -> tuple[list[Reach | None], SiteReach]:
        if node.primitive is primitives.cond_p:
            return self._back_cond(node, outs, through)
        if node.primitive is primitives.scan_p:
            return self._back_scan(node, outs, through)
        if node.primitive is primitives.while_p:
            return self._back_while(node, outs, through), {}
        if node.inner:
            rule = None if through else self._rule(node)
            return self._program(node, 0).reach_inputs(outs, True) if rule is None else (rule.back(outs), {})
        found = self._find_links(node)
        if isinstance(found, Positions):
            return found.reach_inputs(outs, True)
        ins: list[Reach | None] = [None] * len(node.inputs)
        for i, j, link in found:
            if self._follows(node, i, j, through) and not outs[j].is_empty:
                part = carry(link, outs[j], node.inputs[i].aval.shape, back=True)
                before = ins[i]
                ins[i] = part if before is None else before.merge(part)
        return ins, {}

    def reach_inputs(self, outs: Sequence[Reach], through: bool) -> tuple[list[Reach | None], SiteReach]:
        starts: dict[Var, Reach] = {}
        for atom, reach in zip(self.program.outputs, outs, strict=True):
            if isinstance(atom, Var):
                starts[atom] = starts[atom].merge(reach) if atom in starts else reach
        env, sites = self.reaches(starts, through=through)
        return [env.get(v) for v in self.program.inputs], sites

    def _back_cond(
        self, node: Node, outs: list[Reach], through: bool
    ) -> tuple[list[Reach | None], SiteReach]:
        ins: list[Reach | None] = [None] * (len(node.inputs) - 1)
        sites: SiteReach = {}
        known = self._known(node.inputs[1:])
        for b in range(len(node.inner)):
            found, inside = self._program(node, b, known).reach_inputs(outs, through)
            sites.update(inside)
            ins = [_either(a, b) for a, b in zip(ins, found, strict=True)]
        return [None, *ins], sites

    def _back_scan(
        self, node: Node, outs: list[Reach], through: bool
    ) -> tuple[list[Reach | None], SiteReach]:
        num_consts, num_carry = _compat.scan_counts(node.eqn)
        length = node.params["length"]
        known = self._scan_known(node, num_consts, num_carry)
        consts: list[Reach | None] = [None] * num_consts
        xs: list[list[Reach]] = [[] for _ in node.inputs[num_consts + num_carry :]]
        sites: dict[int, list[Reach]] = {s.index: [] for s in node.sites}
        carried, ys = outs[:num_carry], outs[num_carry:]
        order = range(length) if node.params["reverse"] else range(length - 1, -1, -1)
        previous: Any = None
        for step in order:
            given = [*carried, *(y[step] for y in ys)]
            if previous is None or known[step] is not previous[0] or not _all_same(given, previous[1]):
                found, inside = self._program(node, 0, known[step]).reach_inputs(given, through)
                previous = (known[step], given, found, inside)
            _, _, found, inside = previous
            consts = [_either(a, b) for a, b in zip(consts, found, strict=False)]
            after = [
                Reach.empty(v.aval.shape) if r is None else r
                for r, v in zip(found, node.inner[0].inputs, strict=True)
            ]
            carried = after[num_consts:][:num_carry]
            for parts, r in zip(xs, after[num_consts + num_carry :], strict=True):
                parts.append(r)
            for site in node.sites:
                inner = (*site.loops[len(node.loops) + 1 :], *site.output.aval.shape)
                sites[site.index].append(inside.get(site.index) or Reach.empty(inner))
        flip = 1 if node.params["reverse"] else -1
        return (
            [*consts, *carried, *(Reach.stack(p[::flip]) if p else None for p in xs)],
            {i: Reach.stack(parts[::flip]) for i, parts in sites.items() if length},
        )

    def _back_while(self, node: Node, outs: list[Reach], through: bool) -> list[Reach | None]:
        num_cond, num_body = _compat.while_counts(node.eqn)
        body = self._program(node, 1)
        carried = outs
        found: list[Reach | None] = []
        for _ in range(_FIXPOINT):
            found, _ = body.reach_inputs(carried, through)
            after = [r if f is None else r.merge(f) for r, f in zip(carried, found[num_body:], strict=True)]
            if _all_same(after, carried):
                break
            carried = after
        else:
            merged = _links.all_with_all(
                [a.aval.shape for a in node.inputs], [v.aval.shape for v in node.outputs]
            )
            ins: list[Reach | None] = [None] * len(node.inputs)
            for i, j, link in merged:
                ins[i] = _either(ins[i], carry(link, outs[j], node.inputs[i].aval.shape, back=True))
            return ins
        return [*[None] * num_cond, *found[:num_body], *carried]

    # -- forwards ----------------------------------------------------------------------------------

    def sources(
        self,
        starts: Mapping[Var, Reach],
        origin: SiteReach,
        stop: Callable[[Var], bool] = lambda v: False,
        through: bool = False,
    ) -> dict[Var, Reach]:
        """Where every variable comes from: `starts`, and the outputs of the sites in `origin`."""
        env: dict[Var, Reach] = dict(starts)
        waiting = [i for v in env for i in self._readers.get(v, ())]
        waiting += [self._holder[i] for i in origin if i in self._holder]
        heapq.heapify(waiting)
        done = None
        while waiting:
            number = heapq.heappop(waiting)
            if number == done:
                continue
            done, node = number, self.program.nodes[number]
            if node.site is not None:
                if node.site.index in origin:
                    env[node.outputs[0]] = origin[node.site.index]
                    for i in self._readers.get(node.outputs[0], ()):
                        heapq.heappush(waiting, i)
                continue
            ins = [env.get(a) if isinstance(a, Var) else None for a in node.inputs]
            here = {s.index: origin[s.index] for s in node.sites if s.index in origin}
            if not here and all(r is None for r in ins):
                continue
            for var, reach in zip(node.outputs, self._forth(node, ins, here, through), strict=True):
                if reach is not None and not reach.is_empty and not stop(var):
                    env[var] = reach
                    for i in self._readers.get(var, ()):
                        heapq.heappush(waiting, i)
        return env

    def _forth(
        self, node: Node, ins: list[Reach | None], origin: SiteReach, through: bool
    ) -> list[Reach | None]:
        if node.primitive is primitives.cond_p:
            outs: list[Reach | None] = [None] * len(node.outputs)
            known = self._known(node.inputs[1:])
            for b in range(len(node.inner)):
                found = self._program(node, b, known).source_outputs(ins[1:], origin, through)
                outs = [_either(a, b) for a, b in zip(outs, found, strict=True)]
            return outs
        if node.primitive is primitives.scan_p:
            return self._forth_scan(node, ins, origin, through)
        if node.primitive is primitives.while_p:
            return self._forth_while(node, ins, through)
        if node.inner:
            rule = None if through else self._rule(node)
            return (
                self._program(node, 0).source_outputs(ins, origin, True) if rule is None else rule.forth(ins)
            )
        if not through and not any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in node.outputs):
            return [None] * len(node.outputs)
        found_links = self._find_links(node)
        if isinstance(found_links, Positions):
            return found_links.source_outputs(ins, {}, True)
        outs = [None] * len(node.outputs)
        for i, j, link in found_links:
            reach = ins[i]
            if reach is not None and self._follows(node, i, j, through):
                outs[j] = _either(outs[j], carry(link, reach, node.outputs[j].aval.shape, back=False))
        return outs

    def source_outputs(
        self, ins: Sequence[Reach | None], origin: SiteReach, through: bool
    ) -> list[Reach | None]:
        starts = {v: r for v, r in zip(self.program.inputs, ins, strict=True) if r is not None}
        env = self.sources(starts, origin, through=through)
        return [env.get(a) if isinstance(a, Var) else None for a in self.program.outputs]

    def _forth_scan(
        self, node: Node, ins: list[Reach | None], origin: SiteReach, through: bool
    ) -> list[Reach | None]:
        num_consts, num_carry = _compat.scan_counts(node.eqn)
        length = node.params["length"]
        known = self._scan_known(node, num_consts, num_carry)
        consts, carried, xs = ins[:num_consts], ins[num_consts:][:num_carry], ins[num_consts + num_carry :]
        ys: list[list[Reach]] = [[] for _ in node.outputs[num_carry:]]
        order = range(length - 1, -1, -1) if node.params["reverse"] else range(length)
        for step in order:
            here = {i: r[step] for i, r in origin.items()}
            given = [*consts, *carried, *(None if x is None else x[step] for x in xs)]
            found = self._program(node, 0, known[step]).source_outputs(given, here, through)
            carried = found[:num_carry]
            for parts, r, v in zip(ys, found[num_carry:], node.outputs[num_carry:], strict=True):
                parts.append(Reach.empty(v.aval.shape[1:]) if r is None else r)
        flip = -1 if node.params["reverse"] else 1
        return [*carried, *(Reach.stack(p[::flip]) if p else None for p in ys)]

    def _forth_while(self, node: Node, ins: list[Reach | None], through: bool) -> list[Reach | None]:
        num_cond, num_body = _compat.while_counts(node.eqn)
        body = self._program(node, 1)
        consts, carried = ins[num_cond:][:num_body], ins[num_cond + num_body :]
        for _ in range(_FIXPOINT):
            found = body.source_outputs([*consts, *carried], {}, through)
            after = [_either(a, b) for a, b in zip(carried, found, strict=True)]
            if all(
                a is b or (a is not None and b is not None and a.same_as(b))
                for a, b in zip(after, carried, strict=True)
            ):
                return after
            carried = after
        everything = [*consts, *carried]
        outs: list[Reach | None] = [None] * len(node.outputs)
        for i, j, link in _links.all_with_all(
            [a.aval.shape for a in node.inputs[num_cond:]], [v.aval.shape for v in node.outputs]
        ):
            reach = everything[i]
            if reach is not None:
                outs[j] = _either(outs[j], carry(link, reach, node.outputs[j].aval.shape, back=False))
        return outs

    # -- shared ------------------------------------------------------------------------------------

    def _rule(self, node: Node) -> _Rule | None:
        if node not in self._rules:
            pull = PullBack.of(node)
            self._rules[node] = None if pull is None else _Rule(node, pull, Positions(pull.program))
        return self._rules[node]

    def _find_links(self, node: Node) -> Linked | Positions:
        if node not in self._links:
            ins, outs = [a.aval for a in node.inputs], [v.aval for v in node.outputs]
            found: Linked | Positions | None = _links.links(
                node.primitive, node.params, ins, outs, lambda i: self.constants(node.inputs[i])
            )
            if found is None:
                program = _expand(node)
                shapes = [tuple(a.shape) for a in ins], [tuple(o.shape) for o in outs]
                found = _links.all_with_all(*shapes) if program is None else Positions(program)
            self._links[node] = found
        return self._links[node]

    @staticmethod
    def _follows(node: Node, i: int, j: int, through: bool) -> bool:
        if through:
            return True
        ends = (node.inputs[i].aval.dtype, node.outputs[j].aval.dtype)
        return not node.is_flat and all(jnp.issubdtype(dtype, jnp.inexact) for dtype in ends)

    def _program(self, node: Node, which: int, known: Any = None) -> Positions:
        """The positions of a program inside a node, with what is known of its inputs."""
        program = node.inner[which]
        values = known or [None] * len(program.inputs)
        key = (node, which, tuple(None if v is None else np.asarray(v).tobytes() for v in values))
        if key not in self._inner:
            self._inner[key] = Positions(program, dict(zip(program.inputs, values, strict=True)))
        return self._inner[key]

    def _known(self, atoms: Sequence[Atom]) -> list[Array | None]:
        """The integers among the inputs of a program inside, where they do not depend on data."""
        return [self.constants(a) if jnp.issubdtype(a.aval.dtype, jnp.integer) else None for a in atoms]

    def _scan_known(self, node: Node, num_consts: int, num_carry: int) -> list[Any]:
        """What is known of the body's inputs in each iteration: constants and counters."""
        length, body = node.params["length"], node.inner[0]
        if not _has_indices(body):
            return [None] * length
        first = self._known(node.inputs)
        consts, carried, xs = (
            first[:num_consts],
            first[num_consts:][:num_carry],
            first[num_consts + num_carry :],
        )
        if length > _UNROLL or all(v is None for v in (*carried, *xs)):
            return [[*consts, *[None] * (num_carry + len(xs))]] * length
        result: list[Any] = [None] * length
        order = range(length - 1, -1, -1) if node.params["reverse"] else range(length)
        for step in order:
            result[step] = [*consts, *carried, *(None if x is None else x[step] for x in xs)]
            carried = self._program(node, 0, result[step])._known(body.outputs[:num_carry])
        return result


@dataclass(frozen=True, eq=False)
class _Rule:
    """The positions of a function's own derivative rule: its pull-back, read the other way round."""

    node: Node
    pull: PullBack
    positions: Positions

    def back(self, outs: Sequence[Reach]) -> list[Reach | None]:
        """What the inputs reach: where their cotangents come from."""
        starts = {v: outs[j] for j, v in self.pull.cotangents.items() if not outs[j].is_empty}
        env = self.positions.sources(starts, {}, through=True)
        found = {i: env.get(a) for i, a in self.pull.results.items() if isinstance(a, Var)}
        return [found.get(i) for i in range(len(self.node.inputs))]

    def forth(self, ins: Sequence[Reach | None]) -> list[Reach | None]:
        """Where the outputs come from: what their cotangents reach."""
        starts: dict[Var, Reach] = {}
        for i, atom in self.pull.results.items():
            reach = ins[i]
            if isinstance(atom, Var) and reach is not None:
                starts[atom] = starts[atom].merge(reach) if atom in starts else reach
        env, _ = self.positions.reaches(starts, through=True)
        found = {j: env.get(v) for j, v in self.pull.cotangents.items()}
        return [found.get(j) for j in range(len(self.node.outputs))]


_FIXPOINT = 64  # iterations of a `while` before its carried values are taken to mix
_UNROLL = 256  # iterations of a `scan` whose counters are followed one by one


def _has_indices(program: Program) -> bool:
    return any(
        node.primitive.name in ("gather", "dynamic_slice", "dynamic_update_slice")
        or node.primitive.name.startswith("scatter")
        or any(map(_has_indices, node.inner))
        for node in program.nodes
    )


def _expand(node: Node) -> Program | None:
    """A third party's primitive as the program of its own implementation, if that can be traced."""
    structs = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in node.inputs]
    try:
        program = read_program(jax.make_jaxpr(lambda *a: node.primitive.impl(*a, **node.params))(*structs))
    except Exception:  # whatever an implementation that is not JAX raises when it is traced
        return None
    return None if any(n.primitive is node.primitive for n in program.nodes) else program


def _either(a: Reach | None, b: Reach | None) -> Reach | None:
    if a is None or b is None:
        return a if b is None else b
    return a.merge(b)


def _all_same(a: Sequence[Reach], b: Sequence[Reach]) -> bool:
    return all(x.same_as(y) for x, y in zip(a, b, strict=True))
