"""The compiler's findings, for people."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import brainstate

from .diagnostics import CompilationRecord, DiagnosticLevel, show_path
from .exactness import Exactness, RuleKind
from .graph import ETraceGraph
from .groups import HiddenGroup
from .module_info import Path


@dataclass(frozen=True)
class CompilationReport:
    """What is learned how: groups, traced weights, weights without a trace and why."""

    graph: ETraceGraph
    rule: RuleKind | None = None  # D_RTRL

    @cached_property
    def exactness(self) -> Exactness:
        """Whether the rule's gradient is that of BPTT, and every path that it drops."""
        return self.graph.exactness(self.rule)

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

    @property
    def excluded_weights(self) -> dict[Path, str]:
        """Each parameter that gets the gradient within the step only, and why."""
        traced = self.etrace_weights
        reasons: dict[Path, str] = {}
        for record in self.graph.diagnostics:
            if record.weight_path is not None and record.weight_path not in traced:
                reasons.setdefault(record.weight_path, record.kind.value)
        for entry in self.graph.module_info.params:
            if entry.path not in traced:
                reasons.setdefault(entry.path, "used by no marked op")
        return reasons

    @property
    def dynamic_states(self) -> list[Path]:
        """States that are carried from step to step but not traced."""
        hidden = {id(h.state) for h in self.graph.module_info.hidden}
        return [
            e.path for e in self.graph.module_info.entries if not e.is_param and id(e.state) not in hidden
        ]

    @property
    def diagnostics(self) -> list[CompilationRecord]:
        return list(self.graph.diagnostics)

    @property
    def counts(self) -> dict[str, int]:
        levels = Counter(r.level for r in self.graph.diagnostics)
        return {
            "hidden_groups": len(self.graph.hidden_groups),
            "relations": len(self.graph.hidden_param_op_relations),
            "etrace_weights": len(self.etrace_weights),
            "excluded_weights": len(self.excluded_weights),
            "dynamic_states": len(self.dynamic_states),
            **{level.name.lower(): levels[level] for level in DiagnosticLevel},
        }

    def to_str(self) -> str:
        lines = []
        for group in self.graph.hidden_groups:
            states = ", ".join(_state_line(h) for h in group.hidden)
            lines.append(f"group {group.index}: {states}")
            for relation in self.graph.hidden_param_op_relations:
                if group in relation.hidden_groups:
                    names = ", ".join(show_path(p) for p in relation.param_paths)
                    classes = {str(relation.path_classification.get(p)) for p in group.hidden_paths} - {
                        "None"
                    }
                    lines.append(
                        f"  {relation.primitive.name} {names} -> y{list(relation.site.shape)}, "
                        f"{'/'.join(sorted(classes))}  ({relation.site.source})"
                    )
        if self.excluded_weights:
            lines.append("gradient within the step only:")
            lines += [f"  {show_path(p)}: {why}" for p, why in self.excluded_weights.items()]
        if self.dynamic_states:
            lines.append("carried, not traced: " + ", ".join(show_path(p) for p in self.dynamic_states))
        notes = [r for r in self.graph.diagnostics if r.level >= DiagnosticLevel.WARNING]
        lines += [str(r) for r in notes]
        return "\n".join(lines)

    def show(self) -> None:
        print(self.to_str())


def _state_line(hidden: Any) -> str:
    value = hidden.state.value
    unit = f" {value.unit}" if hasattr(value, "unit") else ""
    dtype = brainstate.environ and hidden.invar.aval.str_short()
    return f"{show_path(hidden.path)} {dtype}{unit}"
