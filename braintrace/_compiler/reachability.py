"""Reachability within one step, as bit masks: from parameters and states to new states and outputs.

There is one bit for each carried array (hidden states first, by group, then other floating states), one for
the outputs, and one for each site. A path ends at the first new state, whose own bits describe how it goes
on. An array is *live* if the loss of this or a later step depends on its value at the start of the step.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import jax.numpy as jnp

from .caching import cached
from .custom_derivatives import PullBack, not_linear
from .dataflow import Flow, settled, solve, union
from .primitives import ELEMENT_WISE, LAYOUT, named
from .program import Node, Program, Site, Var
from .provenance import Goal, spread
from .slices import has_while
from .step import Path

if TYPE_CHECKING:
    from .graph import TraceGraph

_MOVES = LAYOUT | named("convert_element_type copy slice")


K = TypeVar("K", Var, int)


@dataclass(frozen=True)
class Carried:
    """One floating array that is carried from step to step."""

    bit: int
    path: Path
    group: int | None  # None for a state without a trace
    old: Var
    new: Var


class Reachability:
    """The paths of one compiled step.

    Args:
        graph: The compiled step.
        seen: The hidden states that a loss reads, next to the outputs.
        all_live: Whether every carried array counts as read by some loss.
    """

    def __init__(self, graph: TraceGraph, seen: Container[Path] = (), all_live: bool = False) -> None:
        self.graph, self.info, self._seen, self._all_live = graph, graph.module_info, seen, all_live
        self.program = self.info.program
        hidden = [(h.path, g.index, h.invar, h.outvar) for g in graph.hidden_groups for h in g.hidden]
        known = {h.leaf for g in graph.hidden_groups for h in g.hidden}
        others = [
            (e.path, None, old, new)
            for e in self.info.entries
            if not e.is_param
            for old, new in zip(e.invars, e.outvars, strict=True)
            if isinstance(new, Var)
            and new is not old
            and old not in known
            and jnp.issubdtype(old.aval.dtype, jnp.inexact)
        ]
        self.carried = [Carried(1 << i, *fields) for i, fields in enumerate([*hidden, *others])]
        self.hidden = sum(c.bit for c in self.carried if c.group is not None)  # those with traces
        self.outputs = 1 << len(self.carried)
        self._first_site = len(self.carried) + 1
        self.sites_mask = -(1 << self._first_site)

    def site_bit(self, site: Site) -> int:
        return 1 << (self._first_site + site.index)

    def group_bits(self, index: int) -> int:
        return sum(c.bit for c in self.carried if c.group == index)

    def of(self, bits: int) -> list[Carried]:
        return [c for c in self.carried if c.bit & bits]

    # -- along derivatives, backwards --------------------------------------------------------------

    @cached_property
    def _starts(self) -> dict[Var, Goal]:
        return {c.new: Goal(direct=c.bit) for c in self.carried}

    @cached_property
    def _masks(self) -> dict[Var, int]:
        groups = {c.new: c.group for c in self.carried if c.group is not None}
        return {v: self.sites_mask | self.group_bits(group) for v, group in groups.items()}

    @cached_property
    def whole(self) -> dict[Var, Goal]:
        """The goal of each variable along all paths, including the outputs."""
        return spread(self.program, self._with_outputs(self._starts), {})[0]

    def _with_outputs(self, starts: Mapping[Var, Goal]) -> dict[Var, Goal]:
        found = dict(starts)
        for atom in (*self.info.out_atoms, *(c.new for c in self.carried if c.path in self._seen)):
            if isinstance(atom, Var):
                found[atom] = found.get(atom, Goal()) | Goal(direct=self.outputs)
        return found

    @cached_property
    def from_states(self) -> dict[Var, Goal]:
        """The goal of each variable along paths that pass no new state of another group."""
        return spread(self.program, self._starts, self._masks)[0]

    @cached_property
    def _by_params(self) -> tuple[dict[Var, Goal], dict[int, Goal]]:
        def at_site(site: Site, goal: Goal) -> list[Goal | None]:
            reached = goal.any
            chain = reached & self.sites_mask  # the output is used in another site's weight
            data: Goal | None = Goal(chain, reached & ~self.sites_mask)
            weight: Goal | None = Goal(chain | self.site_bit(site), 0)
            n = site.num_inputs
            return [data] * n + [weight] * (len(site.inputs) - n)

        return spread(self.program, self._starts, self._masks, at_site)

    @property
    def from_params(self) -> dict[Var, Goal]:
        """As `from_states`, but a path that enters a site as its weight ends at the bit of the site."""
        return self._by_params[0]

    @cached_property
    def from_sites(self) -> dict[int, Goal]:
        """The goal of the output of each site, along paths that pass no new state of another group."""
        keep = ~self.sites_mask
        return {i: goal & keep for i, goal in self._by_params[1].items()}

    def site_params(self, site: Site) -> list[Path]:
        """The parameters that the weights of a site depend on, along derivatives."""
        bit = self.site_bit(site)
        return [
            e.path for e in self.info.params if any(self._goal(self.from_params, v) & bit for v in e.invars)
        ]

    @staticmethod
    def _goal(env: Mapping[K, Goal], of: K) -> int:
        return env.get(of, Goal()).any

    # -- what matters ------------------------------------------------------------------------------

    @cached_property
    def live(self) -> int:
        """The bits of the arrays whose old value reaches the outputs of this step or of a later one."""
        if self._all_live:
            return self.outputs - 1
        found = settled(0, lambda bits: self._reaching(self.whole, self.outputs | bits))
        shown = (self._goal(self.whole, c.new) & self.outputs for c in self.of(self.hidden))
        # if no output depends on a hidden state, a loss must read the states themselves
        return found if found & self.hidden or any(shown) else found | self.hidden

    def reached(self, var: Var) -> int:
        """The bits of the carried arrays whose new value depends on a variable, along any path."""
        return self._goal(self.whole, var) & (self.outputs - 1)

    def _reaching(self, env: Mapping[Var, Goal], goal: int) -> int:
        """The bits of the arrays whose old value reaches a goal."""
        return sum(c.bit for c in self.carried if self._goal(env, c.old) & goal)

    @cached_property
    def matters(self) -> int:
        """The bits of the arrays whose new value reaches the outputs of this step, or is live in the next."""
        return self.live | sum(c.bit for c in self.carried if self._goal(self.whole, c.new) & self.outputs)

    # -- which node it is --------------------------------------------------------------------------

    @cached_property
    def _forward(self) -> dict[Var, int]:
        """The old (bit 2i) and new (bit 2i+1) carried arrays and the parameters that a variable depends on.

        Along paths that cross no site and no other new state.
        """
        bits = {c.old: self.tag(c, new=False) for c in self.carried}
        bits.update({v: self.param_tag(e.path) for e in self.info.params for v in e.invars})
        kept = {}
        for group in self.graph.hidden_groups:
            own = self.of(self.group_bits(group.index))
            bits.update({c.new: self.tag(c, new=True) for c in own})
            tags = sum(self.tag(c, new=new) for c in own for new in (False, True))
            kept.update({c.new: tags for c in own})
        flow = Flow[int](
            lambda node, given: None if node.site else union(given),
            beyond=lambda v, bits: bits & kept.get(v, -1),
            derivatives=True,
        )
        return solve(flow, self.program, bits.items())[0]

    def tag(self, carried: Carried, *, new: bool) -> int:
        """The bit of an array in the masks that `crossed` and `passed` take."""
        return 1 << (2 * self.carried.index(carried) + new)

    def param_tag(self, path: Path) -> int:
        return 1 << (
            2 * len(self.carried) + next(i for i, e in enumerate(self.info.params) if e.path == path)
        )

    def _made_of(self, node: Node, tags: int) -> bool:
        return any(self._forward.get(v, 0) & tags for v in node.reads)

    def crossed(self, tags: int, goal: int) -> list[Site]:
        """The first sites on paths from arrays or parameters (`tags`) to `goal`."""
        return [
            site
            for node in self.program.nodes
            if node.sites and self._made_of(node, tags)
            for site in node.sites
            if self._goal(self.from_sites, site.index) & goal
        ]

    def passed(self, tags: int, goal: int, env: dict[Var, Goal]) -> Node | None:
        """The node to name in a message about a path to `goal` that crosses no site."""
        found = [
            node
            for node in self.program.nodes
            if node.site is None
            and self._made_of(node, tags)
            and any(self._goal(env, v) & goal for v in node.outputs)
        ]
        plain = [n for n in found if n.primitive not in _MOVES]
        mixing = [n for n in plain if n.primitive not in ELEMENT_WISE]
        return next(iter([*mixing, *plain, *found]), None)

    # -- states without a trace ---------------------------------------------------------------------

    @cached_property
    def untraced(self) -> list[tuple[Carried, list[Path]]]:
        """States without a trace through which parameters affect later losses, with these parameters.

        Only states whose trace would count, and parameters that learn through no other state.
        """
        found = []
        for c in self.of(self.live & ~self.hidden):
            known = () if self.is_seen(c) else self._learned
            if paths := [p for p in self.behind([c.new]) if p not in known]:
                found.append((c, paths))
        return found

    def is_seen(self, c: Carried) -> bool:
        """Whether the outputs, or a hidden state without a marked op in between, depend on it."""
        to_states = self.from_states.get(c.old, Goal()).direct & self.hidden & self.live
        return bool(self._shows(c) or (c.group is None and to_states))

    def _shows(self, c: Carried) -> bool:
        """Whether outputs depend on its new value, or on its old one other than through new hidden states."""
        return bool((self._goal(self.whole, c.new) | self._goal(self._past, c.old)) & self.outputs)

    def is_read_old(self, c: Carried) -> bool:
        """Whether outputs or states that are not hidden read its old value, through marked ops or not."""
        return bool(self._goal(self._past, c.old) & ~self.hidden)

    @cached_property
    def _past(self) -> dict[Var, Goal]:
        """The goal of each variable, outputs and untraced states, along paths past no new hidden state."""
        others = {c.new: Goal(direct=c.bit) for c in self.carried if c.group is None}
        ends = {c.new: 0 for c in self.of(self.hidden)}
        return spread(self.program, self._with_outputs(others), ends)[0]

    @cached_property
    def _learned(self) -> set[Path]:
        """The parameters with a trace of a state that a loss depends on."""
        shown = {c.group for c in self.carried if c.group is not None and self._shows(c)}
        relations = self.graph.hidden_param_op_relations
        return {p for r in relations if any(g.index in shown for g in r.hidden_groups) for p in r.param_paths}

    @cached_property
    def without_gradient(self) -> list[Path]:
        """Parameters whose gradient is zero although they affect later losses."""
        goals = {e.path: [self._goal(self.whole, v) for v in e.invars] for e in self.info.params}
        return [
            path
            for path, found in goals.items()
            if path not in self._learned
            and any(g & self.live for g in found)
            and not any(g & self.outputs for g in found)
        ]

    # -- derivative rules that are not linear ------------------------------------------------------

    @cached_property
    def not_linear(self) -> list[tuple[Node, list[Path]]]:
        """Functions with a nonlinear pull-back that losses of later steps pass, with their parameters."""
        found = []
        every = sum(c.bit for c in self.carried)
        for holder, node in not_linear(self.program):
            pull = PullBack.of(node)
            fixed = pull is not None and pull.ignores_cotangents
            if any(self._goal(self.whole, v) & (every if fixed else self.live) for v in holder.outputs):
                acting = holder.reads if fixed else []
                found.append((node, self.behind([*holder.outputs, *acting])))
        return found

    def behind(self, variables: Sequence[Var]) -> list[Path]:
        """The parameters that variables depend on, in the same step or in later ones."""
        here = 1 << (self._first_site + len(self.program.sites))
        starts = dict(self._starts)
        for v in variables:
            starts[v] = starts.get(v, Goal()) | Goal(direct=here)
        env = spread(self.program, starts, {})[0]
        ways = settled(here, lambda bits: self._reaching(env, bits))
        return [e.path for e in self.info.params if any(self._goal(env, v) & ways for v in e.invars)]

    # -- loops without a reverse mode --------------------------------------------------------------

    @cached_property
    def loops(self) -> list[Node]:
        return [n for n in self.program.nodes if has_while(n)]

    @cached_property
    def lost_in_loops(self) -> set[Var]:
        """The variables that reach the outputs through a `while`, along paths past no new hidden state."""
        new = {c.new for c in self.of(self.hidden)}
        kept, lost = 1, 2
        flow = Flow[int](
            lambda node, given: lost if has_while(node) else union(given),
            back=True,
            beyond=lambda v, bits: None if v in new else bits,
            derivatives=True,
        )
        env, _ = solve(flow, self.program, ((a, kept) for a in self.info.out_atoms))
        return {v for v, bits in env.items() if bits & lost}


@cached
def find_reachability(
    graph: TraceGraph, seen: tuple[Path, ...] = (), *, all_live: bool = False
) -> Reachability:
    """The paths of a compiled step, computed once."""
    return Reachability(graph, seen, all_live)


def opened_sites(program: Program) -> Iterator[tuple[Node, Site]]:
    """Sites inside a function with a custom derivative rule, which is then not used."""
    for opened in program.opened:
        for node in program.walk():
            if node.site is not None and any(caller is opened.eqn for caller in node.callers):
                yield opened, node.site
