"""BPTT: nothing is kept, and a gradient goes back through all the steps that it spans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._compiler.exactness import RuleKind
from .rule import Leaves, Rule, Values

if TYPE_CHECKING:
    from .._online.online import Online
    from .._online.window import Window


@dataclass(frozen=True)
class BackRule(Rule):
    """The gradient of `jax.grad` through time, to compare with."""

    back_through_time = True

    def kind(self, windows: bool) -> RuleKind:
        return RuleKind("BPTT", at_once=True)

    def start(self, online: Online) -> Values:
        return {}

    def advance(self, online: Online, values: Values, window: Window) -> Values:
        return values

    def past(self, online: Online, values: Values, signals: Leaves, window: Window) -> Leaves:
        return [None] * len(window.params)

    def forget(self, online: Online, values: Values, rows: Any) -> Values:
        return values
