"""Findings of the compiler as typed values, without words; `_diagnostics` has the sentence of each kind."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from .program import Node, Site
from .step import Path, Step, show_paths


class Found(enum.Enum):
    """The kind of a finding."""

    # a site with traces
    INCLUDED = enum.auto()  # it feeds these states
    ALSO_THROUGH_OPS = enum.auto()  # it also reaches these states through another marked op
    MIXED_ON_THE_WAY = enum.auto()  # nodes mix its output on the way to a group; the trace keeps one position
    INDEXED_ON_THE_WAY = enum.auto()  # the same, by indices that are known only at run time
    SEVERAL_LEAVES = enum.auto()  # its weight (`detail` is the name) depends on several parameter leaves
    IN_CONTROL_FLOW = enum.auto()  # it is inside control flow, where traces cover it

    # why a site has no trace, or no trace for one group
    FROZEN = enum.auto()  # its weights depend on parameters only through `stop_gradient`
    NO_PARAMETER = enum.auto()
    CHANGES = enum.auto()  # the weight depends on data or on a state; `detail` has these, None for an input
    UNKNOWN_INDICES = enum.auto()  # the op takes indices, and may be in a branch that is not taken
    BEHIND_ANOTHER = enum.auto()  # it reaches states only through another marked op
    NO_STATE = enum.auto()  # it reaches no hidden state
    NO_POSITION = enum.auto()  # no element of its output maps to one position; `detail` is the group's shape

    # hidden states
    COUPLED = enum.auto()  # the states of a group are coupled unit by unit
    MIXED_UNITS = enum.auto()  # units of a group reach other units without a marked op
    MIXED_PAIRS = enum.auto()  # only elements along the last axis do, of length `detail`
    THROUGH_WHILE = enum.auto()  # the states of a group pass through a loop that has no reverse mode
    CASCADE = enum.auto()  # states reach those in `detail`, of another group, not unit by unit
    UNLEARNED_CASCADE = enum.auto()  # the same, where no marked op feeds the first
    NEVER_READ = enum.auto()  # a step reads none of its hidden states

    # parameters
    NO_MARKED_OP = enum.auto()  # a program has no sites; `detail` has the first use of each parameter
    WITHOUT_MARK = enum.auto()  # a parameter feeds states through unmarked operations only
    ALSO_WITHOUT_MARK = enum.auto()  # a parameter with a marked use feeds states through unmarked ones too
    OWN_DERIVATIVE_UNUSED = enum.auto()  # a function with a custom derivative rule contains a site
    RULE_NOT_LINEAR = enum.auto()  # a custom derivative rule is not linear, and parameters act through it
    STATE_WITHOUT_TRACE = enum.auto()  # parameters affect later losses through the state in `detail`
    NO_GRADIENT = enum.auto()  # all paths of a parameter to losses are dropped; `detail` is the first

    # why a path from a parameter to later losses is dropped: the edge at which it leaves the traces
    NO_TRACE = enum.auto()  # a site feeds states without a trace; `detail` is the reason
    LEFT_IN_STATE = enum.auto()  # a site feeds states that have no traces
    THROUGH_OP = enum.auto()  # a site feeds states through another site
    OTHER_POSITIONS = enum.auto()  # a site feeds more positions than its trace keeps
    AVERAGED = enum.auto()  # the trace of a site is factorised into averages
    OTHER_SIGNAL = enum.auto()  # the learning signal is not the back-propagated one
    GIVEN_LEAK = enum.auto()  # the trace of a site has a fixed decay
    FILTERED = enum.auto()  # the trace of a site is low-pass filtered
    BOUNDED = enum.auto()  # the trace of a site is clipped
    ESTIMATED = enum.auto()  # the effect of a parameter beyond a window is estimated
    UNKNOWN_RULE = enum.auto()  # the rule is not one of the library's
    UNMARKED = enum.auto()  # a parameter feeds states through unmarked operations
    RECURRENT_OP = enum.auto()  # a state feeds its own group through a site
    OTHER_UNITS = enum.auto()  # units of a state feed other units
    OTHER_GROUP = enum.auto()  # a state feeds another group
    OTHER_STATE = enum.auto()  # a state feeds a state without a trace
    WHILE = enum.auto()  # a path to the outputs passes a loop without reverse mode
    OWN_DERIVATIVE = enum.auto()  # a function with a custom derivative rule contains a site
    NOT_LINEAR = enum.auto()  # a custom derivative rule is not linear
    OUT_OF_REACH = enum.auto()  # a parameter reaches states only after more steps than the pattern covers
    RANDOM = enum.auto()  # the influence of a parameter is a random estimate


WITHOUT_TRACE = {
    Found.FROZEN,
    Found.NO_PARAMETER,
    Found.CHANGES,
    Found.UNKNOWN_INDICES,
    Found.BEHIND_ANOTHER,
    Found.NO_STATE,
    Found.NO_POSITION,
}


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


@dataclass(frozen=True)
class Finding:
    """One finding: its kind, and what it is about."""

    kind: Found
    params: tuple[Path, ...] = ()
    of: Use | Path | None = None  # the site; of a dropped path, where it starts: a site, parameter or state
    states: tuple[Path, ...] = ()  # of a dropped path, those where it ends
    nodes: tuple[Node, ...] = ()
    by: Use | Node | None = None  # of a dropped path, the op or node on the edge
    detail: Any = None

    @property
    def weight_path(self) -> Path:
        return self.params[0]

    @property
    def use(self) -> Use:
        assert isinstance(self.of, Use)
        return self.of

    @property
    def hidden_paths(self) -> tuple[Path, ...]:
        """The states on a dropped path."""
        keeps = self.kind in (Found.OTHER_GROUP, Found.OTHER_STATE)
        return (self.of, *self.states) if isinstance(self.of, tuple) and keeps else self.states


@dataclass(frozen=True, eq=False)
class Findings:
    """All findings of a compilation."""

    step: Step
    found: tuple[Finding, ...]
