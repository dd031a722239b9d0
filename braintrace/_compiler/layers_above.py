"""Influence across layers: the states above the traces of a parameter (`across='layers'`).

Traces of a parameter cover the states of its groups, unit by unit. A state is *above* if the parameter
affects it on a path that no trace covers, through a state that does not depend on it in turn; states that
depend on it are above, too. A parameter without a trace is placed at the states that its ops read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from .caching import cached
from .custom_derivatives import PullBack
from .dataflow import Flow, settled, solve, union
from .program import Node, Var
from .provenance import Goal, provenance
from .reachability import Carried, find_reachability
from .step import Path

if TYPE_CHECKING:
    from .graph import TraceGraph


@dataclass(frozen=True)
class Above:
    """Carried leaves, and the parameter leaves above whose traces all of them are."""

    states: tuple[int, ...]  # indices into the leaves of the carried states
    params: tuple[int, ...]  # indices into the leaves of `info.fixed`


class Across:
    """The states above the traces of one compiled step."""

    def __init__(self, graph: TraceGraph) -> None:
        self.graph, self.flows = graph, find_reachability(graph)
        info = graph.module_info
        self._params = [(v, e.path, e.is_param) for e in info.fixed for v in e.invars]
        number = {v: i for i, v in enumerate(info.carried_invars)}
        # the parts of a packed array have the index of the array
        self._number = number | {h.invar: number[h.leaf] for h in info.hidden}

    @cached_property
    def above(self) -> list[Above]:
        """The states above traces, grouped by the parameters that they are above."""
        bits = {i: self._above(i) for i, (v, _, is_param) in enumerate(self._params) if is_param}
        found: dict[tuple[int, ...], list[int]] = {}
        for c in self.flows.carried:
            if params := tuple(i for i, b in bits.items() if b & c.bit):
                found.setdefault(params, []).append(self._number[c.old])
        return [Above(tuple(dict.fromkeys(states)), params) for params, states in found.items()]

    def act(self, these: Above, others: Above) -> bool:
        """Whether the states of `others` depend on those of `these`, in one step or several."""
        here, there = (
            sum(c.bit for c in self.flows.carried if self._number[c.old] in a.states) for a in (these, others)
        )
        return bool(settled(self._onto(here), self._onto) & there)

    @cached_property
    def followed(self) -> dict[Path, set[Path]]:
        """For each parameter, the states above its traces."""
        found: dict[Path, set[Path]] = {}
        for i, (v, path, is_param) in enumerate(self._params):
            if is_param and v.inexact:
                above = self._above(i)
                lost = {c.path for c in self.flows.of(self._acted(v) & ~above)}
                states = {c.path for c in self.flows.of(above)} - lost
                found[path] = states & found[path] if path in found else states
        return found

    def _above(self, number: int) -> int:
        param = self._params[number][0]
        own = self._own(param)
        stands = own or self._reads.get(number)
        if stands is None:
            return 0
        found = sum(
            c.bit
            for c in self.flows.of(self.flows.reached(param) & ~own)
            if not any(self._in_one_loop(c, o) for o in self.flows.of(stands))
        )
        for c in self.flows.of(self._acted(param)):
            found |= sum(d.bit for d in self.flows.of(self._unfollowed(c)) if not self._in_one_loop(c, d))
        found = settled(found, self._onto)
        # influence is stored for whole arrays: an array that is only partly above keeps its traces alone
        in_part = any(found & bits and found & bits != bits for bits in self._bits.values())
        return 0 if in_part else found

    @cached_property
    def _bits(self) -> dict[int, int]:
        """The bits of each carried leaf, by its index."""
        found: dict[int, int] = {}
        for c in self.flows.carried:
            found[self._number[c.old]] = found.get(self._number[c.old], 0) | c.bit
        return found

    def _own(self, param: Var) -> int:
        """The bits of the states for which a parameter has traces."""
        goal = self.flows.from_params.get(param, Goal())
        groups = {
            g.index
            for r in self.graph.hidden_param_op_relations
            if goal.any & self.flows.site_bit(r.site)
            for g in r.hidden_groups
        }
        return sum(map(self.flows.group_bits, groups))

    @cached_property
    def _reads(self) -> dict[int, int]:
        """The states that the data of a parameter's ops depend on, for parameters used through ops only."""
        info = self.graph.module_info.marked
        program, params, old = info.program, info.fixed_invars, info.carried_invars
        starts = [(v, self._bits[n]) for n, v in enumerate(old) if n in self._bits]
        made_of = solve(Flow[int](lambda node, given: union(given)), program, starts)[0]
        origin = provenance(program, params)
        found: dict[int, int] = {}
        for site in program.sites:
            node = program.nodes[program.holder[site.index]]
            data = site.inputs[: site.num_inputs] if node.site is site else node.inputs
            bits = union(made_of.get(a) for a in data if isinstance(a, Var)) or 0
            weights = {v for w in site.weights.values() for v in origin.of(w)[0]}
            for i in (i for i, v in enumerate(params) if v in weights):
                found[i] = found.get(i, 0) | bits
        return {i: bits for i, bits in found.items() if not self._acts_otherwise(params[i])}

    def _acts_otherwise(self, param: Var) -> bool:
        """Whether a parameter affects states in other ways than as the weight of an op."""
        info = self.graph.module_info.marked

        def transfer(node: Node, given: list[bool | None]) -> bool | None:
            return union(given[: node.site.num_inputs] if node.site is not None else given)

        flow = Flow[bool](transfer, derivatives=True, enters=True, rule=PullBack.of)
        new = {a for e in info.carried for a in e.outvars}
        return not new.isdisjoint(solve(flow, info.program, [(param, True)])[0])

    def _acted(self, param: Var) -> int:
        """The bits of the states that depend on a parameter, in this step or a later one."""
        return settled(self.flows.reached(param), self._onto)

    @cached
    def _onto(self, bits: int) -> int:
        """The bits of the states that depend on some others after one step."""
        return union(self.flows.reached(c.old) for c in self.flows.of(bits)) or 0

    def _in_one_loop(self, a: Carried, b: Carried) -> bool:
        there, back = (settled(self._onto(c.bit), self._onto) for c in (a, b))
        return bool(a is b or (there & b.bit and back & a.bit))

    def _unfollowed(self, c: Carried) -> int:
        """The bits of the states that depend on one along a path that no trace covers."""
        reached = self.flows.reached(c.old) | self.flows.reached(c.new)
        if c.group is None:
            return reached
        own = self.flows.group_bits(c.group)
        old, new = (self.flows.from_states.get(v, Goal()) for v in (c.old, c.new))
        stays = next(g.stays[c.old] for g in self.graph.hidden_groups if g.index == c.group)
        return reached & (~own | old.crossing | new.crossing | (0 if stays else own))
