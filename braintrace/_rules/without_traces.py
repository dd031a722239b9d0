"""Rules without traces: BPTT over the whole sequence, and DNI in windows.

BPTT:  gradient = dL/dw through all steps
DNI:   gradient = sum over windows of d(L in the window + <s(h[end]), h[end]>)/dw        s held fixed

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


class WithoutTraces(Rule):
    """A rule that learns nothing from the steps before a window."""

    def start(self, executor: ETraceGraphExecutor) -> Values:
        return {}

    def advance(self, executor: ETraceGraphExecutor, values: Values, window: Window) -> Values:
        return {}

    def past(self, executor: ETraceGraphExecutor, values: Values, signals: Leaves, window: Window) -> Leaves:
        return [None] * len(window.params)

    def forget(self, executor: ETraceGraphExecutor, values: Values, is_reset: Flags) -> Values:
        return {}


@dataclass(frozen=True)
class BPTT(WithoutTraces):
    """The gradient of `jax.grad` through time, to compare with."""

    back_through_time = True

    def kind(self, windows: bool) -> RuleKind:
        return RuleKind("BPTT", at_once=True)


@dataclass(frozen=True)
class DNI(WithoutTraces):
    """Windows with a bootstrapped signal at their end, without traces."""

    signal: Signal = PROPAGATED
    any_window: ClassVar[bool] = False

    def kind(self, windows: bool) -> RuleKind:
        return RuleKind("DNI", windows=True, kept=False)
