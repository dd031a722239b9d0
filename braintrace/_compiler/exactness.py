"""Is the online gradient that of back-propagation through time, and if not, what is dropped?

BPTT follows every path from a parameter through the carried states to a later loss. A trace follows

    parameter -> site -> state -> the same group's state, unit by unit -> ... -> any loss

and the gradient within a step follows everything that stays inside it. The verdict is read off the compiled
structure: a path is dropped where it first leaves what a trace follows, if some loss lies beyond it. What
`stop_gradient` or an integer cuts is no path, for BPTT neither. The loss is taken to read the outputs; only
where no output tells of any hidden state is it taken to read those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .dataflow import settled
from .diagnostics import CompilationRecord, show_path
from .flows import Carried, Flows, opened_sites
from .groups import HiddenGroup
from .program import Node, Site, Var
from .provenance import Goal
from .relation import HiddenParamOpRelation
from .slices import dependents
from .step import Path

if TYPE_CHECKING:
    from .graph import ETraceGraph


@dataclass(frozen=True)
class RuleKind:
    """What a verdict has to know of a rule."""

    name: str = "D_RTRL"
    known: bool = True  # whether it is a rule of the library's, whose traces are as above
    whole: bool = False  # the influence of everything on everything is kept
    at_once: bool = False  # the losses of all steps are pulled back together
    averages: tuple[float, float] | None = None  # decays of input and state averages that make up a trace
    windows: bool = False  # back-propagates through windows; traces stand for what came before


@dataclass(frozen=True)
class DroppedPath:
    """One way in which a parameter acts on later losses that the gradient does not count."""

    weight_path: Path
    what: str  # in words: what is not counted
    way: str  # and through which op or primitive it goes
    primitive: Any  # the op or primitive on the way, or None
    source: str  # the line of code
    hidden_paths: tuple[Path, ...] = ()

    @property
    def reason(self) -> str:
        return f"{self.what} {self.way}".strip() + (f" at {self.source}" if self.source else "")

    @property
    def message(self) -> str:
        return f"`{show_path(self.weight_path)}`: {self.reason}."

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Exactness:
    """Whether a rule's gradient equals that of BPTT, and every path that it drops."""

    rule: str
    dropped: list[DroppedPath]
    num_params: int
    windows: bool = False

    @property
    def exact(self) -> bool:
        return not self.dropped

    @property
    def weights(self) -> dict[Path, list[DroppedPath]]:
        """The parameters whose gradient is approximate, and what each misses."""
        found: dict[Path, list[DroppedPath]] = {}
        for d in self.dropped:
            found.setdefault(d.weight_path, []).append(d)
        return found

    @property
    def reasons(self) -> dict[str, list[Path]]:
        """Each thing that is not counted, and the parameters that miss it."""
        found: dict[str, list[Path]] = {}
        for d in self.dropped:
            paths = found.setdefault(d.reason, [])
            if d.weight_path not in paths:
                paths.append(d.weight_path)
        return found

    def to_str(self, most: int = 5) -> str:
        """The verdict in words, with at most so many reasons."""
        if self.exact:
            return (
                f"{self.rule} is exact here: the gradient of a loss of the model's outputs is that of "
                "back-propagation through time."
            )
        where = " across windows (within one, and in one over the whole sequence, it is exact)"
        lines = [
            f"{self.rule} is approximate here{where if self.windows else ''}: {len(self.weights)} of "
            f"{self.num_params} parameters miss some of their effect on later losses. Not counted:"
        ]
        found: dict[str, list[DroppedPath]] = {}
        for d in self.dropped:
            found.setdefault(d.what, []).append(d)
        for what, several in list(found.items())[:most]:
            ways = _some([d.way for d in several if d.way], 3)
            lines_of = _some([d.source.rsplit("/", 1)[-1] for d in several if d.source], 3)
            at = f" at {', '.join(lines_of)}" if lines_of else ""
            by = ", ".join(_some([f"`{show_path(d.weight_path)}`" for d in several], 4))
            lines.append(f"- {' '.join([what, ', '.join(ways)]).strip()}{at} (missed by {by})")
        if len(found) > most:
            lines.append(f"- and {len(found) - most} more: see `.dropped`")
        return "\n".join(lines)

    def in_short(self) -> str:
        """The verdict in a few words."""
        if self.exact:
            return f"{self.rule} is exact"
        return f"{self.rule} is approximate for {len(self.weights)} of {self.num_params} parameters"

    def __str__(self) -> str:
        return self.to_str()

    def __repr__(self) -> str:
        return f"<Exactness: {self.in_short()}>"

    def _repr_pretty_(self, p: Any, cycle: bool) -> None:
        p.text(str(self))


def find_exactness(graph: ETraceGraph, rule: RuleKind | None = None) -> Exactness:
    """The verdict on a compiled model under a rule (D_RTRL where none is given).

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> cell = braintrace.nn.ValinaRNNCell(2, 3)
    >>> _ = brainstate.nn.init_all_states(cell)
    >>> verdict = find_exactness(braintrace.compile_etrace_graph(cell, jnp.ones(2)))
    >>> verdict.exact, [d.weight_path for d in verdict.dropped]
    (False, [('W', 'weight')])
    """
    rule = rule or RuleKind()
    params = graph.module_info.params
    if rule.at_once:
        return Exactness(rule.name, [], len(params))
    order = {e.path: i for i, e in enumerate(params)}
    verdict = _Verdict(graph, rule)
    found = dict.fromkeys(verdict.not_linear() if rule.whole else verdict.dropped())
    return Exactness(
        rule.name, sorted(found, key=lambda d: order[d.weight_path]), len(params), windows=rule.windows
    )


class _Verdict:
    def __init__(self, graph: ETraceGraph, rule: RuleKind) -> None:
        self.graph, self.rule, self.flows = graph, rule, Flows(graph)
        self.relations = {r.site.index: r for r in graph.hidden_param_op_relations}
        # where a path that is not followed does harm when it ends in a new state
        self.harmful = self.flows.live if rule.windows else self.flows.matters
        self.sites = {s.index: s for s in graph.module_info.program.sites}
        self.behind = {s.index: self.flows.site_params(s) for s in self.sites.values()}

    def dropped(self) -> Iterator[DroppedPath]:
        for site in self.sites.values():
            if self.behind[site.index]:
                yield from self._from_site(site)
        yield from self._without_mark()
        for group in self.graph.hidden_groups:
            yield from self._from_group(group)
        if self.flows.loops:
            yield from self._in_loops()
        for opened, site in opened_sites(self.graph.module_info.program):
            name = opened.primitive.name
            what = f"the derivative rule of a function that holds {self._label(site)}"
            way = f"inside `{name}`"
            yield from _each(self.behind[site.index], what, way, opened.primitive, opened.source, ())
        yield from self.not_linear()

    def not_linear(self) -> Iterator[DroppedPath]:
        what = "what the losses of several steps do together in a derivative rule that is not linear,"
        for node, paths in self.flows.not_linear:
            yield from _each(paths, what, *_named(node, "that of"), ())

    # -- from a parameter to a new state -----------------------------------------------------------

    def _from_site(self, site: Site) -> Iterator[DroppedPath]:
        live, goal = self.flows.live, self.flows.from_sites.get(site.index, Goal())
        relation = self.relations.get(site.index)
        fed = sum(self.flows.group_bits(g.index) for g in relation.hidden_groups) if relation else 0
        label = self._label(site)

        def each(
            what: str, bits: int, way: str = "", primitive: Any = site.primitive, source: str = site.source
        ) -> Any:
            yield from _each(self.behind[site.index], what, way, primitive, source, self._paths(bits))

        hidden = sum(c.bit for c in self.flows.carried if c.group is not None)
        if missed := goal.direct & ~fed & hidden & live:
            why = self._why_excluded(site)
            yield from each(
                f"how {label} acts on {self._states(missed)} beyond the step: it has no trace{why}", missed
            )
        if missed := (goal.direct | goal.crossing) & ~hidden & live:
            names = self._states(missed)
            yield from each(
                f"what {label} leaves in {names}, which is carried from step to step without a trace", missed
            )
        if missed := goal.crossing & hidden & live:
            for other in self._next_sites(site, missed):
                way = f"through {self._label(other)}"
                what = f"how {label} acts on {self._states(missed)} beyond the step"
                yield from each(what, missed, way, other.primitive, other.source)
        if relation is not None:
            yield from self._of_traces(relation, each)

    def _of_traces(self, relation: HiddenParamOpRelation, each: Any) -> Iterator[DroppedPath]:
        label = self._label(relation.site)
        for group, places in zip(relation.hidden_groups, relation.position_maps, strict=True):
            bits = self.flows.group_bits(group.index)
            if not places.complete and bits & self.flows.live:
                record = self._partial_record(relation, group)
                node = next(iter(record.context["nodes"]), None)
                what = f"how {label} acts on other units of {self._states(bits)} beyond the step"
                yield from each(what, bits, *_named(node, "by"))
            if (
                self.rule.averages is not None
                and bits & self.harmful
                and not self._is_average(relation, group)
            ):
                yield from each(
                    f"what inputs and states of {label} do together: their averages are kept, not their "
                    "products",
                    bits,
                )
            if not self.rule.known and bits & self.harmful:
                yield from each(
                    f"whatever the rule {self.rule.name} leaves out in its trace of {label}", bits
                )

    def _is_average(self, relation: HiddenParamOpRelation, group: HiddenGroup) -> bool:
        """Whether averages say what the trace would: nothing is remembered, and nothing to average over."""
        assert self.rule.averages is not None
        inp, out = self.rule.averages
        remembers = not all(r.is_empty for r in group.within)
        constant = all(layout.x is None for layout in relation.layouts.values())
        return not remembers and (inp == out == 0 or (inp == out and constant))

    def _without_mark(self) -> Iterator[DroppedPath]:
        keep = self.flows.live
        for entry in self.graph.module_info.params:
            for var in entry.invars:
                goal = self.flows.from_params.get(var, Goal())
                if missed := (goal.direct | goal.crossing) & keep:
                    tag = self.flows.param_tag(entry.path)
                    node = self.flows.passed(tag, missed, self.flows.from_params)
                    name, states = show_path(entry.path), self._states(missed)
                    what = f"how `{name}` acts on {states} beyond the step, without a mark"
                    yield DroppedPath(entry.path, what, *_named(node, "by"), self._paths(missed))

    # -- from a state to a new state ---------------------------------------------------------------

    def _from_group(self, group: HiddenGroup) -> Iterator[DroppedPath]:
        own = self.flows.group_bits(group.index)
        hidden = sum(c.bit for c in self.flows.carried if c.group is not None)
        for c, within in zip(self.flows.of(own), group.within, strict=True):
            paths = self._learned_through(c, group)
            if not paths:
                continue
            old = self.flows.from_states.get(c.old, Goal())
            new = self.flows.from_states.get(c.new, Goal())
            if missed := old.crossing & own & self.harmful:
                yield from self._through_ops(paths, c, own, missed)
            positions = next(h.positions for h in group.hidden if h.invar is c.old)
            strays = np.any(
                (within.highest >= 0) & ((within.lowest != positions) | (within.highest != positions))
            )
            if strays and own & old.direct & self.harmful:
                node = group.mixers[0] if group.mixers else None
                what = f"how units of `{show_path(c.path)}` act on other units"
                yield from _each(paths, what, *_named(node, "by"), (c.path,))
            beyond = (old.direct | old.crossing) & hidden & ~own & self.harmful
            beyond |= (new.direct | new.crossing) & hidden & ~own & self.flows.live
            kept = (old.direct | old.crossing | new.direct | new.crossing) & ~hidden & self.flows.live
            yield from self._to_others(paths, c, beyond | kept)

    def _through_ops(self, paths: list[Path], c: Carried, own: int, missed: int) -> Iterator[DroppedPath]:
        tags = self.flows.tag(c, new=False)
        for d in self.flows.of(own):
            tags |= self.flows.tag(d, new=True)
        to = "itself" if missed == c.bit else self._states(missed)
        what, states = f"what `{show_path(c.path)}` passes on to {to}", self._paths(missed)
        sites = self.flows.crossed(tags, missed)
        for site in sites:
            yield from _each(paths, what, f"through {self._label(site)}", site.primitive, site.source, states)
        if not sites:
            yield from _each(paths, what, "through marked ops", None, "", states)

    def _to_others(self, paths: list[Path], c: Carried, bits: int) -> Iterator[DroppedPath]:
        apart: dict[Any, int] = {}  # one group, or one state that is not hidden, at a time
        for d in self.flows.of(bits):
            key = d.path if d.group is None else d.group
            apart[key] = apart.get(key, 0) | d.bit
        tags = self.flows.tag(c, new=False) | self.flows.tag(c, new=True)
        for key, missed in apart.items():
            untraced = ", which has no trace," if isinstance(key, tuple) else ""
            what = f"what {self._states(missed)}{untraced} keeps of `{show_path(c.path)}`"
            states = (c.path, *self._paths(missed))
            sites = self.flows.crossed(tags, missed)
            for site in sites:
                way = f"through {self._label(site)}"
                yield from _each(paths, what, way, site.primitive, site.source, states)
            if not sites:
                node = self.flows.passed(tags, missed, self.flows.from_states)
                yield from _each(paths, what, *_named(node, "through"), states)

    def _learned_through(self, c: Carried, group: HiddenGroup) -> list[Path]:
        """The parameters whose traces go through one array of a group."""
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

    def _in_loops(self) -> Iterator[DroppedPath]:
        lost = self.flows.lost_in_loops
        loop = self.flows.loops[0]
        named = _named(loop, "through a loop without reverse mode,")
        what = "what goes to the outputs"
        for entry in self.graph.module_info.params:
            if any(v in lost for v in entry.invars):
                yield DroppedPath(entry.path, what, *named)
        for site in self.sites.values():
            if site.output in lost:
                yield from _each(self.behind[site.index], what, *named, ())
        for group in self.graph.hidden_groups:
            for c in self.flows.of(self.flows.group_bits(group.index)):
                if c.old in lost or c.new in lost:
                    paths = self._learned_through(c, group)
                    yield from _each(paths, what, *named, (c.path,))

    # -- words -------------------------------------------------------------------------------------

    def _next_sites(self, site: Site, missed: int) -> Sequence[Site]:
        """The sites through which a site's output goes on to the states in `missed`."""
        program = self.graph.module_info.program
        holder = program.nodes[program.holder[site.index]]
        after = dependents(program, holder.outputs)
        return [
            other
            for node in program.nodes
            if (node is holder and node.inner) or any(isinstance(a, Var) and a in after for a in node.inputs)
            for other in node.sites
            if (goal := self.flows.from_sites.get(other.index, Goal()))
            and (goal.direct | goal.crossing) & missed
        ] or [site]

    def _why_excluded(self, site: Site) -> str:
        for record in self.graph.diagnostics:
            about = record.weight_path in self.behind[site.index] and record.primitive is site.primitive
            if about and ("EXCLUDED" in record.kind.name or "NOT_PARAMSTATE" in record.kind.name):
                return f", since {record.kind.value}"
        return ""

    def _partial_record(self, relation: HiddenParamOpRelation, group: HiddenGroup) -> CompilationRecord:
        return next(
            r
            for r in self.graph.diagnostics
            if r.context.get("site") is relation.site and r.hidden_paths == tuple(group.hidden_paths)
        )

    def _label(self, site: Site) -> str:
        paths = self.behind[site.index]
        of = f" of {_names(paths)}" if paths else ""
        return f"`{site.primitive.name.removeprefix('etp_')}`{of}"

    def _states(self, bits: int) -> str:
        return _names(self._paths(bits))

    def _paths(self, bits: int) -> tuple[Path, ...]:
        return tuple(c.path for c in self.flows.of(bits))


def _each(
    paths: Sequence[Path], what: str, way: str, primitive: Any, source: str, hidden: tuple[Path, ...]
) -> Iterator[DroppedPath]:
    for path in paths:
        yield DroppedPath(path, what, way, primitive, source, hidden)


def _named(node: Node | None, how: str) -> tuple[str, Any, str]:
    """A way through a node, the node's primitive and its line."""
    if node is None:
        return "", None, ""
    return f"{how} `{node.primitive.name}`", node.primitive, node.source


def _some(words: Iterable[str], most: int) -> list[str]:
    """The first few of them, each once."""
    words = list(dict.fromkeys(words))
    return words if len(words) <= most else [*words[: most - 1], f"{len(words) - most + 1} more"]


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(f"`{show_path(p)}`" for p in dict.fromkeys(paths))
