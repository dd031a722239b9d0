"""What the compiler found: records that say what was included, what was left out and why."""

from __future__ import annotations

import enum
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .._lines import is_users

Path = tuple[str, ...]


class DiagnosticLevel(enum.IntEnum):
    """How much a record matters; a `WARNING` is something the user may well not have meant."""

    INFO = 0
    WARNING = 1
    ERROR = 2


class DiagnosticKind(enum.Enum):
    """What a record is about."""

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


@dataclass(frozen=True)
class CompilationRecord:
    """One finding of the compiler."""

    kind: DiagnosticKind
    level: DiagnosticLevel
    message: str
    primitive: Any = None
    weight_path: Path | None = None
    hidden_paths: tuple[Path, ...] = ()
    context: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"[{self.level.name}] {self.message}"


# which findings a warning names first: those that change the most
_IMPORTANCE = {
    kind: i
    for i, kind in enumerate(
        [
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
    )
}


def warning_of(name: str, records: Iterable[CompilationRecord], most: int = 3) -> str | None:
    """One message with the most important of what the user may well not have meant; None if all is well.

    Of several findings of one kind one is told first, then one of the next kind.
    """
    found = [r for r in records if r.level >= DiagnosticLevel.WARNING]
    if not found:
        return None
    turn = Counter[DiagnosticKind]()
    order = []
    for r in found:
        order.append((turn[r.kind], _IMPORTANCE.get(r.kind, len(_IMPORTANCE))))
        turn[r.kind] += 1
    chosen = [r for _, r in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]
    lines = [f"{name}: {chosen[0].message}"] if len(found) == 1 else [f"{name}, {len(found)} findings:"]
    if len(found) > 1:
        lines += [f"{i}. {r.message}" for i, r in enumerate(chosen[:most], 1)]
    if len(found) > most:
        lines.append(f"And {len(found) - most} more in `learner.report.diagnostics`.")
    lines.append("What the gradient misses in all is in `learner.report.exactness`.")
    return "\n".join(lines)


# what was said of a model, which is compiled again for each batch size and traced again in each loop
_said: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def warn_user(message: str, category: type[Warning] = UserWarning, *, about: Any = None) -> None:
    """A warning that points at the user's own line, not at a line of a library; once of each model."""
    if about is not None:
        said = _said.setdefault(about, set())
        if message in said:
            return
        said.add(message)
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def show_path(path: Iterable[str]) -> str:
    """A path as users write it: `rnn.h`."""
    return ".".join(path)


def number(count: int, noun: str) -> str:
    """
    >>> number(2, "group")
    '2 groups'
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"
