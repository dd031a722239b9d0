"""The compiled graph as users see it: with its verdict, findings, text and drawings."""

from __future__ import annotations

import os

from .._compiler.exactness import RuleKind
from .._compiler.graph import TraceGraph
from .._diagnostics.records import CompilationRecord, DiagnosticKind
from .._diagnostics.sentences import Diagnostics
from .._diagnostics.verdict import Exactness
from .._types import Path
from .report import CompilationReport


class ETraceGraph(TraceGraph):
    """The compiled step: groups of hidden states, and the marked ops (sites) that feed them."""

    diagnostics: Diagnostics

    @staticmethod
    def of(graph: TraceGraph) -> ETraceGraph:
        """The compiled graph, with its findings in words."""
        found = Diagnostics(graph.module_info.step, graph.diagnostics.found)
        return ETraceGraph(*graph._replace(diagnostics=found))

    def __str__(self) -> str:
        return self._report().to_str()

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

    def to_svg(self, path: str | os.PathLike[str] | None = None) -> str:
        """A diagram of sites, groups and parameters as SVG; written to `path` if given."""
        return self._report().to_svg(path)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """A self-contained HTML page with the diagram, the verdict, trace sizes and all findings."""
        return self._report().to_html(path)

    def to_dot(self) -> str:
        """The graph as Graphviz source."""
        return self._report().to_dot()

    def _repr_html_(self) -> str:
        return self._report()._repr_html_()

    def _report(self, rule: RuleKind | None = None) -> CompilationReport:
        return CompilationReport(self, rule)
