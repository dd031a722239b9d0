"""Whether the online gradient of a rule equals that of BPTT and, if not, which paths are dropped.

BPTT covers every path from a parameter through the carried states to a later loss. A trace covers

    parameter -> site -> state -> the same group's state, unit by unit -> ... -> any loss

and the gradient within a step covers every path inside that step. The verdict follows from the compiled
structure: a path is dropped at the first edge that no trace covers, if it leads to some loss. The loss is
assumed to read the outputs or, if no output depends on a hidden state, the hidden states.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from .dataflow import settled, union
from .findings import WITHOUT_TRACE, Finding, Found, Use
from .groups import HiddenGroup
from .influence_pattern import find_reached
from .layers_above import Across
from .leaky_readouts import find_readouts, followed_by_filters
from .program import Node, Site
from .provenance import Goal
from .reachability import Carried, find_reachability, opened_sites
from .relation import HiddenParamOpRelation
from .samples import find_samples
from .slices import dependents
from .step import Path

if TYPE_CHECKING:
    from .graph import TraceGraph


@dataclass(frozen=True)
class RuleKind:
    """The properties of a rule that decide whether it is exact."""

    name: str = "D_RTRL"
    known: bool = True  # whether it is one of the library's rules, with traces as above
    whole: bool = False  # the full influence matrix is stored
    at_once: bool = False  # the losses of all steps are back-propagated together (BPTT)
    # decays of the input and state averages of a factorised trace
    averages: tuple[float, float] | None = None
    windows: bool = False  # back-propagates through windows; traces summarise earlier steps
    rank: int = 0  # of the low-rank correction
    samples: int | str | None = "auto"  # the batch axis, along which each sample has its own basis
    reach: int | None = None  # the `n` of SnAp-n: influence is stored on the n-step pattern
    estimate: bool = False  # the influence is estimated by a random product (UORO)
    signal: str = ""  # a description of the learning signal; empty if it is back-propagated
    broadcast: bool = False  # that signal is used for all groups but readouts
    leak: float | None = None  # a fixed decay of the traces, instead of the local Jacobian
    filter: float | None = None  # the decay of a low-pass filter of the traces
    bounded: bool = False  # traces are clipped
    kept: bool = True  # whether there are traces of the steps before a window
    across: bool = False  # the influence on states above traces is stored densely
    filters: bool = False  # traces cover leaky readouts

    @property
    def beyond_traces(self) -> bool:
        """Whether parameters without a trace also learn through time."""
        return bool(self.rank or self.reach or self.estimate)

    def directions(self, graph: TraceGraph) -> tuple[int, int] | None:
        """The rank of the correction and the state size; None without a correction."""
        if not self.rank:
            return None
        samples = find_samples(graph.module_info.marked, self.samples)
        return None if samples.mixed else (min(self.rank, samples.state_size), samples.state_size)


BY_STEPS = RuleKind(filters=True)  # D_RTRL, one step at a time


def find_dropped(graph: TraceGraph, rule: RuleKind | None = None, seen: Iterable[Path] = ()) -> list[Finding]:
    """The paths that the gradient of a rule (by default `D_RTRL`) drops, in the order of parameters.

    The loss reads the outputs, and the hidden states in `seen`.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> cell = braintrace.nn.ValinaRNNCell(2, 3)
    >>> _ = brainstate.nn.init_all_states(cell)
    >>> graph = braintrace.compile_etrace_graph(cell, jnp.ones(2))
    >>> [(d.weight_path, d.kind.name, d.states) for d in find_dropped(graph)]
    [(('W', 'weight'), 'RECURRENT_OP', (('h',),))]
    """
    rule = rule or BY_STEPS
    if rule.at_once:
        return []
    order = {e.path: i for i, e in enumerate(graph.module_info.params)}
    verdict = _Verdict(graph, rule, seen)
    kept = rule.directions(graph)
    whole = rule.whole or (kept is not None and kept[0] == kept[1])
    if whole:
        found = verdict.not_linear()
    elif rule.estimate:
        found = itertools.chain(verdict.estimated(Found.RANDOM), verdict.not_linear())
    elif rule.reach is not None:
        found = verdict.out_of_reach(rule.reach)
    else:
        found = verdict.dropped() if rule.kept else verdict.estimated(Found.ESTIMATED)
    if rule.across:
        found = _not_followed(found, Across(graph).followed)
    if rule.filters:
        found = _not_filtered(found, followed_by_filters(graph))
    return sorted(found, key=lambda d: order[d.weight_path])


def find_unseen(graph: TraceGraph, rule: RuleKind) -> dict[Path, list[Path]]:
    """The hidden states that no output depends on, with parameters that are approximate if a loss reads them.

    The gradient of these parameters is exact for a loss of the outputs.
    """
    flows = find_reachability(graph)
    unseen = [c.path for c in flows.of(flows.hidden & ~flows.matters)]
    known = {d.weight_path for d in find_dropped(graph, rule)} if unseen else set()
    found = {path: [d.weight_path for d in find_dropped(graph, rule, [path])] for path in unseen}
    missed = {path: [w for w in dict.fromkeys(weights) if w not in known] for path, weights in found.items()}
    return {path: weights for path, weights in missed.items() if weights}


def _not_followed(dropped: Iterator[Finding], followed: dict[Path, set[Path]]) -> Iterator[Finding]:
    """Leave out paths to states on which the influence of the parameter is stored densely."""
    for d in dropped:
        states = tuple(s for s in d.states if s not in followed.get(d.weight_path, ()))
        if states or not d.states:
            yield replace(d, states=states)


def _not_filtered(dropped: Iterator[Finding], followed: dict[Path, set[Path]]) -> Iterator[Finding]:
    """Leave out paths to leaky readouts that traces cover."""
    for d in dropped:
        by_filter = d.kind is Found.OTHER_GROUP and isinstance(d.of, tuple) and followed.get(d.of, set())
        if not by_filter or not set(d.states) <= by_filter:
            yield d


class _Verdict:
    def __init__(self, graph: TraceGraph, rule: RuleKind, seen: Iterable[Path]) -> None:
        # a basis spans all states, so that an error in one of them affects the others: all count as live
        self.graph, self.rule = graph, rule
        self.flows = find_reachability(graph, tuple(seen), all_live=bool(rule.rank))
        self.relations = {r.site.index: r for r in graph.hidden_param_op_relations}
        # the states at which a dropped path matters if it ends there
        self.harmful = self.flows.live if rule.windows else self.flows.matters
        self.sites = {s.index: s for s in graph.module_info.program.sites}
        self.behind = {s.index: self.flows.site_params(s) for s in self.sites.values()}
        spares = rule.broadcast or rule.leak is not None or rule.filter is not None
        self.readouts = find_readouts(graph) if spares else set()

    def dropped(self) -> Iterator[Finding]:
        for site in self.sites.values():
            if self.behind[site.index]:
                yield from self._from_site(site)
        yield from self._without_mark()
        for group in self.graph.hidden_groups:
            yield from self._from_group(group)
        if self.flows.loops:
            yield from self._in_loops()
        for opened, site in opened_sites(self.graph.module_info.program):
            yield from _each(self.behind[site.index], Found.OWN_DERIVATIVE, self._use(site), by=opened)
        yield from self.not_linear()

    def estimated(self, kind: Found) -> Iterator[Finding]:
        """All paths from one window to the next."""
        for entry in self.graph.module_info.params:
            goal = union(self.flows.whole.get(v, Goal()) for v in entry.invars) or Goal()
            if missed := goal.any & self.flows.live:
                yield Finding(kind, (entry.path,), entry.path, self._paths(missed))

    def not_linear(self) -> Iterator[Finding]:
        for node, paths in self.flows.not_linear:
            yield from _each(paths, Found.NOT_LINEAR, by=node)

    def out_of_reach(self, steps: int) -> Iterator[Finding]:
        """The parameters that reach further states in one more step than the pattern covers."""
        info = self.graph.module_info.marked
        leaves = [(e, v) for e in info.fixed for v in e.invars]
        learned = [i for i, (e, v) in enumerate(leaves) if e.is_param and v.inexact and v.aval.size]
        samples = find_samples(info, self.rule.samples)
        samples = find_samples(info, None) if samples.mixed else samples
        reached = find_reached(info, samples, learned)
        # a pattern covers carried arrays, of which a hidden state may be a part
        whole = {h.path: h.path[: len(h.path) - (h.part is not None)] for h in self.graph.module_info.hidden}
        live = {whole.get(path, path) for path in self._paths(self.flows.live)}
        for i, sets in reached.after(steps).items():
            kinds = np.unique(sets, axis=0)
            new = np.unpackbits(reached.grown(kinds) & ~kinds, axis=-1, count=reached.labels)
            more = np.flatnonzero(new.any(axis=0))
            states = (reached.state_of[n] for n in more if reached.state_of[n] in live)
            if missed := tuple(dict.fromkeys(states)):
                yield Finding(Found.OUT_OF_REACH, (leaves[i][0].path,), leaves[i][0].path, missed)
        yield from self.not_linear()

    # -- from a parameter to a new state -----------------------------------------------------------

    def _from_site(self, site: Site) -> Iterator[Finding]:
        live, goal = self.flows.live, self.flows.from_sites.get(site.index, Goal())
        relation, use = self.relations.get(site.index), self._use(site)
        fed = sum(self.flows.group_bits(g.index) for g in relation.hidden_groups) if relation else 0
        hidden = self.flows.hidden
        if missed := goal.direct & ~fed & hidden & live:
            findings = self.graph.diagnostics.found
            why = next((f.kind for f in findings if f.kind in WITHOUT_TRACE and f.use.site is site), None)
            yield from _each(use.params, Found.NO_TRACE, use, self._paths(missed), use, why)
        if missed := goal.any & ~hidden & live:
            yield from _each(use.params, Found.LEFT_IN_STATE, use, self._paths(missed), use)
        if missed := goal.crossing & hidden & live:
            for other in self._next_sites(site, missed):
                by = self._use(other)
                yield from _each(use.params, Found.THROUGH_OP, use, self._paths(missed), by)
        if relation is not None:
            yield from self._of_traces(relation, use)

    def _of_traces(self, relation: HiddenParamOpRelation, use: Use) -> Iterator[Finding]:
        for group, places in relation.feeds:
            bits = self.flows.group_bits(group.index)
            states = self._paths(bits)
            if not places.complete and bits & self.flows.live:
                by = self._mixing_node(use.site, group)
                yield from _each(use.params, Found.OTHER_POSITIONS, use, states, by)
            rule, harmful, matters = self.rule, bits & self.harmful, bits & self.flows.matters
            own = group.index in self.readouts  # it uses its own traces and the back-propagated signal
            found = {
                Found.AVERAGED: harmful and rule.averages and not self._is_average(relation, group),
                Found.OTHER_SIGNAL: matters and rule.signal and not (own and rule.broadcast),
                Found.GIVEN_LEAK: harmful and rule.leak is not None and not own,
                Found.FILTERED: matters and rule.filter is not None and not own,
                Found.BOUNDED: matters and rule.bounded,
                Found.UNKNOWN_RULE: harmful and not rule.known,
            }
            for kind in (kind for kind, applies in found.items() if applies):
                by_op = kind in (Found.AVERAGED, Found.UNKNOWN_RULE)
                yield from _each(use.params, kind, use, states, use if by_op else None)

    def _is_average(self, relation: HiddenParamOpRelation, group: HiddenGroup) -> bool:
        """Whether the averages equal the trace: there is no memory, and nothing to average over."""
        assert self.rule.averages is not None
        inp, out = self.rule.averages
        remembers = not all(r.is_empty for r in group.within)
        constant = all(layout.x is None for layout in relation.layouts.values())
        return not remembers and (inp == out == 0 or (inp == out and constant))

    def _without_mark(self) -> Iterator[Finding]:
        for entry in self.graph.module_info.params:
            for var in entry.invars:
                goal = self.flows.from_params.get(var, Goal())
                if missed := goal.any & self.flows.live:
                    tag = self.flows.param_tag(entry.path)
                    node = self.flows.passed(tag, missed, self.flows.from_params)
                    yield Finding(Found.UNMARKED, (entry.path,), entry.path, self._paths(missed), by=node)

    # -- from a state to a new state ---------------------------------------------------------------

    def _from_group(self, group: HiddenGroup) -> Iterator[Finding]:
        own = self.flows.group_bits(group.index)
        hidden = self.flows.hidden
        for c in self.flows.of(own):
            params = self._learned_through(c, group)
            if not params:
                continue
            old = self.flows.from_states.get(c.old, Goal())
            new = self.flows.from_states.get(c.new, Goal())
            if missed := old.crossing & own & self.harmful:
                tags = self.flows.tag(c, new=False)
                for d in self.flows.of(own):
                    tags |= self.flows.tag(d, new=True)
                for by in self._uses(tags, missed) or [None]:
                    yield from _each(params, Found.RECURRENT_OP, c.path, self._paths(missed), by)
            if not group.stays[c.old] and own & old.direct & self.harmful:
                node = next(iter(group.mixers), None)
                yield from _each(params, Found.OTHER_UNITS, c.path, (c.path,), node)
            beyond = old.any & hidden & ~own & self.harmful
            beyond |= new.any & hidden & ~own & self.flows.live
            kept = (old.any | new.any) & ~hidden & self.flows.live
            yield from self._to_others(params, c, beyond | kept)

    def _to_others(self, params: list[Path], c: Carried, bits: int) -> Iterator[Finding]:
        apart: dict[Path | int, int] = {}  # by group, or by state without a trace
        for d in self.flows.of(bits):
            key: Path | int = d.path if d.group is None else d.group
            apart[key] = apart.get(key, 0) | d.bit
        tags = self.flows.tag(c, new=False) | self.flows.tag(c, new=True)
        for key, missed in apart.items():
            kind = Found.OTHER_STATE if isinstance(key, tuple) else Found.OTHER_GROUP
            for by in self._uses(tags, missed) or [self.flows.passed(tags, missed, self.flows.from_states)]:
                yield from _each(params, kind, c.path, self._paths(missed), by)

    def _learned_through(self, c: Carried, group: HiddenGroup) -> list[Path]:
        """The parameters whose traces pass through one array of a group."""
        own = self.flows.of(self.flows.group_bits(group.index))
        into = {d.bit: self.flows.from_states.get(d.old, Goal()).direct for d in own}
        # the arrays of the group from which this one is reached, unit by unit
        sources = settled(c.bit, lambda bits: sum(bit for bit, goal in into.items() if goal & bits))
        found: dict[Path, None] = {}
        for relation in self.graph.hidden_param_op_relations:
            site = relation.site
            if group in relation.hidden_groups and self.flows.from_sites[site.index].direct & sources:
                found.update(dict.fromkeys(self.behind[site.index]))
        return list(found)

    def _in_loops(self) -> Iterator[Finding]:
        lost, loop = self.flows.lost_in_loops, self.flows.loops[0]
        for entry in self.graph.module_info.params:
            if any(v in lost for v in entry.invars):
                yield Finding(Found.WHILE, (entry.path,), by=loop)
        for site in self.sites.values():
            if site.output in lost:
                yield from _each(self.behind[site.index], Found.WHILE, by=loop)
        for group in self.graph.hidden_groups:
            for c in self.flows.of(self.flows.group_bits(group.index)):
                if c.old in lost or c.new in lost:
                    yield from _each(self._learned_through(c, group), Found.WHILE, None, (c.path,), loop)

    # -- what is on the way ------------------------------------------------------------------------

    def _next_sites(self, site: Site, missed: int) -> Sequence[Site]:
        """The next sites on paths from a site's output to the states in `missed`."""
        program = self.graph.module_info.program
        holder = program.nodes[program.holder[site.index]]
        after = dependents(program, holder.outputs)
        return [
            other
            for node in program.nodes
            if (node is holder and node.inner) or not after.isdisjoint(node.reads)
            for other in node.sites
            if (goal := self.flows.from_sites.get(other.index, Goal())) and goal.any & missed
        ] or [site]

    def _mixing_node(self, site: Site, group: HiddenGroup) -> Node | None:
        for f in self.graph.diagnostics.found:
            mixed = f.kind in (Found.MIXED_ON_THE_WAY, Found.INDEXED_ON_THE_WAY)
            if mixed and f.use.site is site and f.states == tuple(group.hidden_paths):
                return next(iter(f.nodes), None)
        return None

    def _uses(self, tags: int, missed: int) -> list[Use | Node | None]:
        return [self._use(site) for site in self.flows.crossed(tags, missed)]

    def _use(self, site: Site) -> Use:
        return Use(site, tuple(self.behind[site.index]))

    def _paths(self, bits: int) -> tuple[Path, ...]:
        return tuple(c.path for c in self.flows.of(bits))


def _each(
    params: Sequence[Path],
    kind: Found,
    of: Use | Path | None = None,
    states: tuple[Path, ...] = (),
    by: Use | Node | None = None,
    why: Found | None = None,
) -> Iterator[Finding]:
    """A dropped path for each parameter."""
    return (Finding(kind, (path,), of, states, by=by, detail=why) for path in params)
