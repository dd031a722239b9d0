"""DNI: truncated BPTT in windows, with a learned estimate of dL/dh at the end of each.

    gradient = sum over windows of d(L in the window + <s(h[end]), h[end]>)/dw        s held fixed

`s` estimates dL/dh[end] of all later losses. If it is exact, the sum is BPTT.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .._compiler.exactness import RuleKind
from .._executor.executor import ETraceGraphExecutor
from .._executor.window import Window
from .._types import Leaves
from .rule import Flags, Rule, Values
from .signal import PROPAGATED, Signal


@dataclass(frozen=True)
class DNI(Rule):
    """Windows with a bootstrapped signal at their end, without traces."""

    signal: Signal = PROPAGATED
    any_window: ClassVar[bool] = False

    def kind(self, windows: bool) -> RuleKind:
        return RuleKind("DNI", windows=True, kept=False)

    def start(self, executor: ETraceGraphExecutor) -> Values:
        return {}

    def advance(self, executor: ETraceGraphExecutor, values: Values, window: Window) -> Values:
        return {}

    def past(self, executor: ETraceGraphExecutor, values: Values, signals: Leaves, window: Window) -> Leaves:
        return [None] * len(window.params)

    def forget(self, executor: ETraceGraphExecutor, values: Values, is_reset: Flags) -> Values:
        return {}
