"""BPTT: no traces, and one backward pass through all steps."""

from __future__ import annotations

from dataclasses import dataclass

from .._compiler.exactness import RuleKind
from .._executor.executor import ETraceGraphExecutor
from .._executor.window import Window
from .._types import Leaves
from .rule import Flags, Rule, Values


@dataclass(frozen=True)
class BPTT(Rule):
    """The gradient of `jax.grad` through time, to compare with."""

    back_through_time = True

    def kind(self, windows: bool) -> RuleKind:
        return RuleKind("BPTT", at_once=True)

    def start(self, executor: ETraceGraphExecutor) -> Values:
        return {}

    def advance(self, executor: ETraceGraphExecutor, values: Values, window: Window) -> Values:
        return values

    def past(self, executor: ETraceGraphExecutor, values: Values, signals: Leaves, window: Window) -> Leaves:
        return [None] * len(window.params)

    def forget(self, executor: ETraceGraphExecutor, values: Values, is_reset: Flags) -> Values:
        return values
