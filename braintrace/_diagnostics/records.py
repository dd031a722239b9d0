"""Typed findings of the compiler, and the warnings made of them."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .._compat import Primitive
from .._compiler.exactness import RuleKind
from .._compiler.findings import Found
from .._compiler.graph import TraceGraph
from .._compiler.leaky_readouts import decay_of, find_filters
from .._compiler.step import Path, show_path
from .._lines import warn_user
from .._rules.rank import axis_of_samples
from .._types import Options

if TYPE_CHECKING:
    from .sentences import Diagnostics


class DiagnosticLevel(enum.IntEnum):
    """How much a record matters; a `WARNING` is something the user may well not have meant."""

    INFO = 0
    WARNING = 1
    ERROR = 2


class DiagnosticKind(enum.Enum):
    """The kind of a finding."""

    RELATION_INCLUDED = "relation included"
    RELATION_PARTIAL_PATH = "relation with a path left out"
    RELATION_EXCLUDED_WEIGHT_TO_WEIGHT = "reaches the state only through another marked op"
    RELATION_EXCLUDED_NON_TEMPORAL = "reaches no hidden state"
    RELATION_EXCLUDED_SHAPE_MISMATCH = "no position of the state to attach a trace to"
    RELATION_EXCLUDED_NO_PARAMSTATE = "no parameter behind the weight"
    RELATION_EXCLUDED_FROZEN = "frozen by `stop_gradient`"
    TRAINABLE_INVAR_NOT_PARAMSTATE = "the weight depends on more than parameters"
    PYTREE_WEIGHT_LEAF_AMBIGUOUS = "the weight comes from several parameters"
    PRIMITIVE_INSIDE_CONTROL_FLOW = "marked op inside control flow"
    PRIMITIVE_INSIDE_NESTED_JIT = "marked op inside a custom derivative"
    MULTI_OUTPUT_PRIMITIVE_DETECTED = "marked op with several outputs"
    STATE_MISMATCH = "state is not what it seems"
    HIDDEN_GROUP_MERGED = "hidden states coupled unit by unit"
    HIDDEN_STATE_MIXED = "hidden positions reach other positions"
    HIDDEN_STATE_CASCADE = "a state reaches another group's state"
    NO_MARKED_OP = "no marked op in the model"
    PARAMETER_WITHOUT_MARK = "feeds a hidden state without a marked op"
    RULE_NOT_LINEAR = "a derivative rule that is not linear"
    GRADIENT_IS_ZERO = "acts on later losses, and no trace follows it there"
    STATE_WITHOUT_TRACE = "acts on later losses through a state without a trace"


KIND_OF = {
    Found.INCLUDED: DiagnosticKind.RELATION_INCLUDED,
    Found.ALSO_THROUGH_OPS: DiagnosticKind.RELATION_PARTIAL_PATH,
    Found.MIXED_ON_THE_WAY: DiagnosticKind.RELATION_PARTIAL_PATH,
    Found.INDEXED_ON_THE_WAY: DiagnosticKind.RELATION_PARTIAL_PATH,
    Found.SEVERAL_LEAVES: DiagnosticKind.PYTREE_WEIGHT_LEAF_AMBIGUOUS,
    Found.IN_CONTROL_FLOW: DiagnosticKind.PRIMITIVE_INSIDE_CONTROL_FLOW,
    Found.FROZEN: DiagnosticKind.RELATION_EXCLUDED_FROZEN,
    Found.NO_PARAMETER: DiagnosticKind.RELATION_EXCLUDED_NO_PARAMSTATE,
    Found.CHANGES: DiagnosticKind.TRAINABLE_INVAR_NOT_PARAMSTATE,
    Found.UNKNOWN_INDICES: DiagnosticKind.RELATION_EXCLUDED_SHAPE_MISMATCH,
    Found.BEHIND_ANOTHER: DiagnosticKind.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT,
    Found.NO_STATE: DiagnosticKind.RELATION_EXCLUDED_NON_TEMPORAL,
    Found.NO_POSITION: DiagnosticKind.RELATION_EXCLUDED_SHAPE_MISMATCH,
    Found.COUPLED: DiagnosticKind.HIDDEN_GROUP_MERGED,
    Found.MIXED_UNITS: DiagnosticKind.HIDDEN_STATE_MIXED,
    Found.MIXED_PAIRS: DiagnosticKind.HIDDEN_STATE_MIXED,
    Found.THROUGH_WHILE: DiagnosticKind.PRIMITIVE_INSIDE_CONTROL_FLOW,
    Found.CASCADE: DiagnosticKind.HIDDEN_STATE_CASCADE,
    Found.UNLEARNED_CASCADE: DiagnosticKind.HIDDEN_STATE_CASCADE,
    Found.NEVER_READ: DiagnosticKind.STATE_MISMATCH,
    Found.NO_MARKED_OP: DiagnosticKind.NO_MARKED_OP,
    Found.WITHOUT_MARK: DiagnosticKind.PARAMETER_WITHOUT_MARK,
    Found.ALSO_WITHOUT_MARK: DiagnosticKind.PARAMETER_WITHOUT_MARK,
    Found.OWN_DERIVATIVE_UNUSED: DiagnosticKind.PRIMITIVE_INSIDE_NESTED_JIT,
    Found.RULE_NOT_LINEAR: DiagnosticKind.RULE_NOT_LINEAR,
    Found.STATE_WITHOUT_TRACE: DiagnosticKind.STATE_WITHOUT_TRACE,
    Found.NO_GRADIENT: DiagnosticKind.GRADIENT_IS_ZERO,
}


@dataclass(frozen=True)
class CompilationRecord:
    """One finding of the compiler."""

    kind: DiagnosticKind
    level: DiagnosticLevel
    message: str
    primitive: Primitive | None = None
    weight_path: Path | None = None
    hidden_paths: tuple[Path, ...] = ()
    context: Options = field(default_factory=dict)

    def __str__(self) -> str:
        return f"[{self.level.name}] {self.message}"


_SHOWN = 3  # findings in a warning
# which findings a warning names first: those that change the most
_FIRST = [
    DiagnosticKind.RULE_NOT_LINEAR,
    DiagnosticKind.NO_MARKED_OP,
    DiagnosticKind.STATE_WITHOUT_TRACE,
    DiagnosticKind.GRADIENT_IS_ZERO,
    DiagnosticKind.PARAMETER_WITHOUT_MARK,
    DiagnosticKind.TRAINABLE_INVAR_NOT_PARAMSTATE,
    DiagnosticKind.RELATION_EXCLUDED_SHAPE_MISMATCH,
    DiagnosticKind.PRIMITIVE_INSIDE_NESTED_JIT,
    DiagnosticKind.HIDDEN_STATE_MIXED,
    DiagnosticKind.RELATION_PARTIAL_PATH,
    DiagnosticKind.HIDDEN_STATE_CASCADE,
    DiagnosticKind.RELATION_EXCLUDED_NO_PARAMSTATE,
]


def warning_of(name: str, records: Iterable[CompilationRecord]) -> str | None:
    """One message with the most important warnings; None if there is none.

    Kinds take turns: the first finding of each kind comes before the second of any.
    """
    found = [r for r in records if r.level >= DiagnosticLevel.WARNING]
    if not found:
        return None
    turn = Counter[DiagnosticKind]()
    order = []
    for i, r in enumerate(found):
        order.append((turn[r.kind], _FIRST.index(r.kind) if r.kind in _FIRST else len(_FIRST), i))
        turn[r.kind] += 1
    chosen = [found[i] for *_, i in sorted(order)]
    lines = [f"{name}: {chosen[0].message}"] if len(found) == 1 else [f"{name}, {len(found)} findings:"]
    if len(found) > 1:
        lines += [f"{i}. {r.message}" for i, r in enumerate(chosen[:_SHOWN], 1)]
    if len(found) > _SHOWN:
        lines.append(f"And {len(found) - _SHOWN} more in `report.diagnostics`.")
    lines.append("What the gradient misses in all is in `report.exactness`.")
    return "\n".join(lines)


_LEFT_OUT = {  # by traces
    DiagnosticKind.RELATION_PARTIAL_PATH,
    DiagnosticKind.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT,
    DiagnosticKind.RELATION_EXCLUDED_SHAPE_MISMATCH,
    DiagnosticKind.TRAINABLE_INVAR_NOT_PARAMSTATE,
    DiagnosticKind.HIDDEN_STATE_MIXED,
    DiagnosticKind.HIDDEN_STATE_CASCADE,
    DiagnosticKind.NO_MARKED_OP,
    DiagnosticKind.PARAMETER_WITHOUT_MARK,
    DiagnosticKind.GRADIENT_IS_ZERO,
    DiagnosticKind.STATE_WITHOUT_TRACE,
}


def kinds_of(rule: RuleKind | None) -> set[DiagnosticKind]:
    """The findings that matter to a rule; paths without a trace do not, if a correction follows them."""
    if rule is None:
        return set(DiagnosticKind)
    if rule.beyond_traces:
        return set(DiagnosticKind) - _LEFT_OUT
    in_layers = {DiagnosticKind.HIDDEN_STATE_CASCADE, DiagnosticKind.STATE_WITHOUT_TRACE}
    in_time = {DiagnosticKind.GRADIENT_IS_ZERO} if rule.across or rule.windows else set()
    return set(DiagnosticKind) - in_time - (in_layers if rule.across else set())


def warn_of(found: Diagnostics, kinds: Container[DiagnosticKind] = tuple(DiagnosticKind)) -> None:
    """Warn once of the findings that the user may not have meant."""
    message = warning_of(found.step.name, [r for r in found if r.kind in kinds])
    if message is not None:
        warn_user(message, about=found.step.model)


def warn_of_options(graph: TraceGraph, rule: RuleKind) -> None:
    """Warn of options of a rule that do not fit the model."""
    for f in find_filters(graph, exact=False) if rule.filter else ():
        decay = decay_of(graph, f.readout)
        if decay is not None and abs(decay - rule.filter) > 1e-3:  # type: ignore[operator]
            warn_user(
                f"{rule.name} filters traces with a decay of {rule.filter:g}, but the readout "
                f"`{show_path(f.readout.path)}`, which reads these units, decays by {decay:.4g} a step. Pass "
                "that (`EProp` takes it by itself if `kappa_filter_decay` is left out).",
                about=graph.module_info.model,
            )
    if not rule.rank:
        return
    kept = replace(rule, samples=axis_of_samples(graph, rule.samples)).directions(graph)
    if kept is not None and rule.rank > kept[1]:
        warn_user(
            f"`rank={rule.rank}` is above the state size: a sample has {kept[1]} state variables, and "
            f"{rule.name} with `rank={kept[1]}` is exact. That rank is used.",
            about=graph.module_info.model,
        )
