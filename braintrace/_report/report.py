"""The compiled graph and its report: how each parameter is learned, and which paths the rule truncates."""

from __future__ import annotations

import io
import os
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from .._compiler.exactness import BY_STEPS, RuleKind, find_dropped
from .._compiler.findings import Finding
from .._compiler.graph import TraceGraph
from .._compiler.groups import HiddenGroup
from .._compiler.layers_above import Across
from .._compiler.reachability import Reachability
from .._compiler.step import Path
from .._diagnostics.records import CompilationRecord, DiagnosticKind, DiagnosticLevel, kinds_of
from .._diagnostics.sentences import Diagnostics
from .._diagnostics.step_warnings import unused_parameters
from .._diagnostics.verdict import Exactness
from .._rules.rank import axis_of_samples
from .markup import write
from .pictures import drawing, page, tree
from .tables import number


class Pictured:
    """Base class of what is shown as the report on a compiled graph: as text, drawing or page."""

    def _report(self) -> CompilationReport:
        raise NotImplementedError

    def __str__(self) -> str:
        return self._report().to_str()

    def to_svg(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return a drawing of the data flow in one step as SVG; write it to `path` if one is given."""
        return _written(drawing.to_svg(self._report()), path)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return a page with the drawing, the verdict, the size of traces and all findings.

        It loads no other file. It is written to `path` if one is given.
        """
        return _written(page.to_html(self._report()), path)

    def to_dot(self) -> str:
        """Return the graph in the DOT language of graphviz."""
        return drawing.to_dot(self._report())

    def _repr_html_(self) -> str:
        return page.to_frame(self._report())


class ETraceGraph(Pictured, TraceGraph):
    """The compiled step: groups of hidden states, and the marked ops (sites) that feed them."""

    diagnostics: Diagnostics

    @staticmethod
    def of(graph: TraceGraph) -> ETraceGraph:
        """The compiled graph, with its findings in words."""
        found = Diagnostics(graph.module_info.step, graph.diagnostics.found)
        return ETraceGraph(*graph._replace(diagnostics=found))

    def __repr__(self) -> str:
        return f"<ETraceGraph of {self.module_info.step.name}: {self._report().in_short()}>"

    def exactness(self, rule: RuleKind | None = None) -> Exactness:
        """Whether the gradient of a rule (by default `D_RTRL`) equals that of BPTT, and what it drops."""
        return self._report(rule).exactness

    def explain(
        self,
        *,
        kind: DiagnosticKind | None = None,
        weight_path: Path | None = None,
        hidden_path: Path | None = None,
    ) -> str | tuple[CompilationRecord, ...]:
        """The tree of groups, sites and parameters as plain text, or the records of one kind or path."""
        if kind is None and weight_path is None and hidden_path is None:
            return str(self)
        return tuple(
            r
            for r in self.diagnostics
            if kind in (None, r.kind)
            and weight_path in (None, r.weight_path)
            and (hidden_path is None or hidden_path in r.hidden_paths)
        )

    def _report(self, rule: RuleKind | None = None) -> CompilationReport:
        return CompilationReport(self, rule)


@dataclass(frozen=True)
class CompilationReport(Pictured):
    """How each parameter is learned: hidden groups, weights with a trace, and weights without one and why."""

    graph: ETraceGraph
    rule: RuleKind | None = None  # D_RTRL

    @cached_property
    def dropped(self) -> list[Finding]:
        """The paths that the rule truncates."""
        return find_dropped(self.graph, self._rule)

    @cached_property
    def exactness(self) -> Exactness:
        """Whether the rule's gradient equals that of BPTT, and which paths it truncates."""
        return Exactness.of(self.graph, self._rule, self.dropped)

    @cached_property
    def _rule(self) -> RuleKind:
        """The rule, with the batch axis that its correction uses."""
        rule = self.rule or BY_STEPS
        return replace(rule, samples=axis_of_samples(self.graph, rule.samples)) if rule.rank else rule

    @property
    def hidden_groups(self) -> list[HiddenGroup]:
        return list(self.graph.hidden_groups)

    @property
    def etrace_weights(self) -> dict[Path, list[Path]]:
        """Each parameter that is learned online, and the hidden states that it feeds."""
        found: dict[Path, list[Path]] = {}
        for relation in self.graph.hidden_param_op_relations:
            for path in relation.param_paths:
                known = found.setdefault(path, [])
                known += [p for p in relation.connected_hidden_paths if p not in known]
        return found

    @cached_property
    def ranked_weights(self) -> dict[Path, str]:
        """Each parameter that learns by the correction alone, and why it has no trace."""
        if self.rule is not None and self.rule.across:
            above = Across(self.graph).followed
            return {path: why for path, why in self._untraced.items() if above.get(path)}
        if self.rule is None or not self.rule.beyond_traces:
            return {}
        acting = Reachability(self.graph).behind([h.outvar for h in self.graph.module_info.hidden])
        return {path: why for path, why in self._untraced.items() if path in acting}

    @property
    def excluded_weights(self) -> dict[Path, str]:
        """Each parameter that gets the gradient within the step only, and why."""
        return {path: why for path, why in self._untraced.items() if path not in self.ranked_weights}

    @property
    def _untraced(self) -> dict[Path, str]:
        """Each parameter without a trace, and why."""
        traced = self.etrace_weights
        reasons: dict[Path, str] = {}
        for record in self.graph.diagnostics:
            # being inside a loop is no reason to have no trace
            why = record.kind is not DiagnosticKind.PRIMITIVE_INSIDE_CONTROL_FLOW
            if why and record.weight_path is not None and record.weight_path not in traced:
                reasons.setdefault(record.weight_path, record.kind.value)
        unused = unused_parameters(self.graph.module_info)
        for entry in self.graph.module_info.params:
            if entry.path not in traced:
                none = "no output or state depends on it" if entry.path in unused else "used by no marked op"
                reasons.setdefault(entry.path, none)
        return reasons

    @property
    def span(self) -> str:
        """The span of a gradient without traces: 'step' or 'window'."""
        return "window" if self.rule is not None and self.rule.windows else "step"

    @property
    def dynamic_states(self) -> list[Path]:
        """States that are carried from step to step but not traced."""
        hidden = {id(h.state) for h in self.graph.module_info.hidden}
        return [
            e.path for e in self.graph.module_info.entries if not e.is_fixed and id(e.state) not in hidden
        ]

    @property
    def kept(self) -> str:
        """How paths without a trace are followed, in a few words; empty if they are not."""
        if self.rule is not None and self.rule.reach:
            return f"as far as {self.rule.reach} steps reach"
        if self.rule is not None and self.rule.estimate:
            return "by random products"
        directions = self.exactness.directions
        return "" if directions is None else "in {} of {} directions".format(*directions)

    @property
    def diagnostics(self) -> list[CompilationRecord]:
        """The findings of the compiler that matter to the rule."""
        kinds = kinds_of(self.rule)
        return [r for r in self.graph.diagnostics if r.kind in kinds]

    @property
    def warnings(self) -> list[CompilationRecord]:
        """The findings that the user may not have intended."""
        return [r for r in self.diagnostics if r.level >= DiagnosticLevel.WARNING]

    @property
    def counts(self) -> dict[str, int]:
        levels = Counter(r.level for r in self.diagnostics)
        return {
            "hidden_groups": len(self.graph.hidden_groups),
            "relations": len(self.graph.hidden_param_op_relations),
            "etrace_weights": len(self.etrace_weights),
            "excluded_weights": len(self.excluded_weights),
            "dynamic_states": len(self.dynamic_states),
            **{level.name.lower(): levels[level] for level in DiagnosticLevel},
        }

    def __repr__(self) -> str:
        model = self.graph.module_info.step.name
        return f"<CompilationReport of {model}: {self.in_short()}; {self.exactness.in_short()}>"

    def in_short(self) -> str:
        """Return the number of groups and of parameters that are learned online, in words."""
        counts, params = self.counts, len(self.graph.module_info.params)
        groups = number(counts["hidden_groups"], "group")
        online = counts["etrace_weights"] + len(self.ranked_weights)
        return f"{groups}, {online} of {number(params, 'parameter')} learned online"

    def _report(self) -> CompilationReport:
        return self

    def to_str(self, level: int = 1) -> str:
        """Return a tree of groups, operations and parameters as text; from level 2 on, with every finding."""
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=_WIDE, color_system=None, force_jupyter=False).print(tree.make_tree(self))
        lines = [line.rstrip() for line in text.getvalue().splitlines()]
        return "\n".join([*lines, *self._details(level)])

    def _details(self, level: int) -> list[str]:
        return [str(r) for r in self.diagnostics if level > 1 and r.level < DiagnosticLevel.WARNING]

    def show(self, level: int = 1) -> None:
        """Print `to_str`, in colour where there is a terminal."""
        from rich.console import Console

        console = Console()
        if console.is_terminal or console.is_jupyter:
            console.print(tree.make_tree(self))
            for line in self._details(level):
                console.print(line, markup=False, highlight=False)
        else:
            print(self.to_str(level))


_WIDE = 160


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        write(path, text)
    return text
