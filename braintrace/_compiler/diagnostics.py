"""What the compiler found: records that say what was included, what was left out and why."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

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


def show_path(path: Iterable[str]) -> str:
    """A path as users write it: `rnn.h`."""
    return ".".join(path)
