"""The findings of the compiler as typed values; `_report` turns them into messages."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .program import Node, Site
from .step import Path, State, Step, show_paths

if TYPE_CHECKING:
    from .._diagnostics.records import CompilationRecord
    from .exactness import Dropped
    from .groups import HiddenGroup


@dataclass(frozen=True)
class Use:
    """A site, and the parameters that its weights depend on."""

    site: Site
    params: tuple[Path, ...]

    def __str__(self) -> str:
        return f"`{self.site.primitive.name}` {self.of} at {self.site.source}"

    @property
    def of(self) -> str:
        return f"of {show_paths(self.params)}" if self.params else "with no parameter"


class Outcome:
    """Base class of the findings of the compiler."""


class WhyNot(enum.Enum):
    """Why a site has no trace."""

    FROZEN = enum.auto()  # its weights depend on parameters only through `stop_gradient`
    NO_PARAMETER = enum.auto()
    CHANGES = enum.auto()  # the weight depends on data or on a state
    UNKNOWN_INDICES = enum.auto()  # the op takes indices, and may be in a branch that is not taken
    BEHIND_ANOTHER = enum.auto()  # it reaches states only through another marked op
    NO_STATE = enum.auto()  # it reaches no hidden state
    NO_POSITION = enum.auto()  # no element of its output maps to one position of the state


@dataclass(frozen=True)
class NoTrace(Outcome):
    """A site has no trace, or no trace for one group."""

    use: Use
    why: WhyNot
    made_of: tuple[Path | None, ...] = ()  # the states that a changing weight depends on; None for an input
    group: HiddenGroup | None = None


@dataclass(frozen=True)
class Included(Outcome):
    """A site has traces for these states."""

    use: Use
    hidden_paths: tuple[Path, ...]


@dataclass(frozen=True)
class AlsoThroughOps(Outcome):
    """A site with traces also reaches these states through another marked op."""

    use: Use
    hidden_paths: tuple[Path, ...]


@dataclass(frozen=True)
class KeepsOnePosition(Outcome):
    """These nodes mix the output of a site on its way to a group; its trace keeps one position."""

    use: Use
    group: HiddenGroup
    nodes: tuple[Node, ...]
    by_indices: bool  # because of indices that are known only at run time


@dataclass(frozen=True)
class SeveralLeaves(Outcome):
    """A weight of a site depends on several parameter leaves."""

    use: Use
    name: str  # of the weight
    params: tuple[Path, ...]


@dataclass(frozen=True)
class InControlFlow(Outcome):
    """A site is inside control flow, where traces cover it."""

    use: Use


@dataclass(frozen=True)
class Coupled(Outcome):
    """The states of a group are coupled unit by unit."""

    group: HiddenGroup


@dataclass(frozen=True)
class MixedUnits(Outcome):
    """Units of a group reach other units without a marked op."""

    group: HiddenGroup
    width: int | None  # of the last axis, if only elements along it mix


@dataclass(frozen=True)
class ThroughWhile(Outcome):
    """The states of a group pass through a loop that has no reverse mode."""

    group: HiddenGroup


@dataclass(frozen=True)
class Cascade(Outcome):
    """The states of a group reach those of another group at a node, not unit by unit."""

    group: HiddenGroup
    other: HiddenGroup
    node: Node | None
    learned: bool  # whether a marked op feeds the first


@dataclass(frozen=True)
class NeverRead(Outcome):
    """A step reads none of its hidden states."""

    hidden_paths: tuple[Path, ...]


@dataclass(frozen=True)
class NoMarkedOp(Outcome):
    """A program has no sites: its parameters with the first use of each, and those that feed a state."""

    params: tuple[tuple[Path, Node | None], ...]
    feeding: tuple[Path, ...]


@dataclass(frozen=True)
class WithoutMark(Outcome):
    """A parameter feeds states through unmarked operations, in a model with marked ones."""

    path: Path
    hidden_paths: tuple[Path, ...]
    node: Node | None  # the first that uses it
    marked: bool  # whether it also has a marked use


@dataclass(frozen=True)
class OwnDerivativeUnused(Outcome):
    """A function with a custom derivative rule contains a site, so that its rule is not used."""

    node: Node


@dataclass(frozen=True)
class NotLinear(Outcome):
    """A custom derivative rule is not linear, and these parameters act through it."""

    node: Node
    params: tuple[Path, ...]


@dataclass(frozen=True)
class StateWithoutTrace(Outcome):
    """Parameters affect later losses through a state without a trace."""

    state: State
    params: tuple[Path, ...]


@dataclass(frozen=True)
class NoGradient(Outcome):
    """A parameter has a zero gradient because all its paths to losses are dropped; the first of these."""

    path: Path
    dropped: Dropped


@dataclass(frozen=True, eq=False)
class Findings(Sequence["CompilationRecord"]):
    """All findings of a compilation; as a sequence, their records with messages."""

    step: Step
    outcomes: tuple[Outcome, ...]

    @cached_property
    def _records(self) -> list[CompilationRecord]:
        from .._diagnostics.sentences import records

        return records(self.outcomes, self.step)

    def __getitem__(self, index: Any) -> Any:
        return self._records[index]

    def __len__(self) -> int:
        return len(self._records)
