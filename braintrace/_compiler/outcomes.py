"""What the compiler found, as values; `_report` puts it into words."""

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
    """A site, and the parameters that its weights are made of."""

    site: Site
    params: tuple[Path, ...]

    def __str__(self) -> str:
        return f"`{self.site.primitive.name}` {self.of} at {self.site.source}"

    @property
    def of(self) -> str:
        return f"of {show_paths(self.params)}" if self.params else "with no parameter"


class Outcome:
    """One thing that the compiler found."""


class WhyNot(enum.Enum):
    """Why a site has no trace."""

    FROZEN = enum.auto()  # `stop_gradient` cuts it off from its parameters
    NO_PARAMETER = enum.auto()
    CHANGES = enum.auto()  # the weight is made of more than parameters
    UNKNOWN_INDICES = enum.auto()  # in a branch that is not taken
    BEHIND_ANOTHER = enum.auto()  # it reaches states only through another marked op
    NO_STATE = enum.auto()  # it reaches none
    NO_POSITION = enum.auto()  # no position of its output belongs to one of the state


@dataclass(frozen=True)
class NoTrace(Outcome):
    """A site has no trace, or none for one group."""

    use: Use
    why: WhyNot
    made_of: tuple[Path | None, ...] = ()  # the states in a weight that changes; None: an input
    group: HiddenGroup | None = None


@dataclass(frozen=True)
class Included(Outcome):
    """A site is learned online, through these states."""

    use: Use
    hidden_paths: tuple[Path, ...]


@dataclass(frozen=True)
class AlsoThroughOps(Outcome):
    """A site that has traces reaches these states through another marked op as well."""

    use: Use
    hidden_paths: tuple[Path, ...]


@dataclass(frozen=True)
class KeepsOnePosition(Outcome):
    """The output of a site is mixed on its way to a group, by these nodes; its trace keeps one position."""

    use: Use
    group: HiddenGroup
    nodes: tuple[Node, ...]
    by_indices: bool  # that are known only as the step runs


@dataclass(frozen=True)
class SeveralLeaves(Outcome):
    """A weight of a site is made of several leaves of parameters."""

    use: Use
    name: str  # of the weight
    params: tuple[Path, ...]


@dataclass(frozen=True)
class InControlFlow(Outcome):
    """A site is inside control flow, and followed there."""

    use: Use


@dataclass(frozen=True)
class Coupled(Outcome):
    """The states of a group are coupled unit by unit."""

    group: HiddenGroup


@dataclass(frozen=True)
class MixedUnits(Outcome):
    """Units of a group reach other units without a marked op."""

    group: HiddenGroup
    width: int | None  # of the last axis, where only the numbers along it reach each other


@dataclass(frozen=True)
class ThroughWhile(Outcome):
    """The states of a group go through a loop that has no reverse mode."""

    group: HiddenGroup


@dataclass(frozen=True)
class Cascade(Outcome):
    """The states of a group reach those of another, and not unit by unit, at a node."""

    group: HiddenGroup
    other: HiddenGroup
    node: Node | None
    learned: bool  # whether a marked op feeds the first


@dataclass(frozen=True)
class NeverRead(Outcome):
    """Hidden states that a step writes and, like all others, does not read."""

    hidden_paths: tuple[Path, ...]


@dataclass(frozen=True)
class NoMarkedOp(Outcome):
    """A program without sites: its parameters, with the first use of each, and those that feed a state."""

    params: tuple[tuple[Path, Node | None], ...]
    feeding: tuple[Path, ...]


@dataclass(frozen=True)
class WithoutMark(Outcome):
    """A parameter feeds states by ordinary operations, in a model that marks others."""

    path: Path
    hidden_paths: tuple[Path, ...]
    node: Node | None  # the first that uses it
    marked: bool  # whether it also has a marked use


@dataclass(frozen=True)
class OwnDerivativeUnused(Outcome):
    """A function with a derivative of its own holds a site, and is read through."""

    node: Node


@dataclass(frozen=True)
class NotLinear(Outcome):
    """A derivative of a user's own is not linear, and behind it are these parameters."""

    node: Node
    params: tuple[Path, ...]


@dataclass(frozen=True)
class StateWithoutTrace(Outcome):
    """Parameters act on later losses through a state that has no trace."""

    state: State
    params: tuple[Path, ...]


@dataclass(frozen=True)
class NoGradient(Outcome):
    """A parameter acts on later losses only, and by nothing that counts; the first thing that is dropped."""

    path: Path
    dropped: Dropped


@dataclass(frozen=True, eq=False)
class Findings(Sequence["CompilationRecord"]):
    """All outcomes of a compilation; as a sequence, the records that tell of them in words."""

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
