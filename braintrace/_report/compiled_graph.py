"""The compiled graph as users see it: with its verdict, findings, text and drawings."""

from __future__ import annotations

from .._compiler.exactness import RuleKind
from .._compiler.graph import TraceGraph
from .._diagnostics.records import CompilationRecord, DiagnosticKind
from .._diagnostics.sentences import Diagnostics
from .._diagnostics.verdict import Exactness
from .._types import Path
from .report import CompilationReport, Pictured


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
