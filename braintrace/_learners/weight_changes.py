"""Warnings of weights that are made of a constant or a state that changes between steps.

A trace is of the weight as the op sees it, so that it is wrong once that constant or state is another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import brainstate
import jax
import numpy as np

from .. import _compat
from .._lines import warn_user


class WeightChanges:
    """The constants and states in the weights, as they were at the last call since a reset."""

    def __init__(self, model: brainstate.nn.Module) -> None:
        self._model = model
        self._consts: list[Any] | None = None
        self._masks: list[Any] | None = None

    def compare_consts(self, now: list[Any]) -> None:
        """Warn if a weight is made of another constant than at the last call, or may be."""
        traced = any(map(_compat.is_tracer, now))
        before = now if self._consts is None else self._consts
        self._consts = None if traced else now
        if traced or not _are_same(before, now):
            how = "may change" if traced else "has changed"
            self._warn("something that the model closes over", how, "as an argument of the model")

    def compare_masks(self, states: Mapping[str, brainstate.State]) -> None:
        """Warn if a state that a weight is made of is another one than at the last call."""
        now = [leaf for st in states.values() for leaf in jax.tree.leaves(st.value)]
        if any(map(_compat.is_tracer, now)):
            return  # an input of a compiled function: its last value is unknown
        before, self._masks = self._masks or now, now
        if not _are_same(before, now):
            names = ", ".join(f"`{name}`" for name in states)
            self._warn(f"the state {names}", "has changed", "written by the step")

    def _warn(self, what: str, how: str, instead: str) -> None:
        warn_user(
            f"A weight, or the gain of a leaky readout, is made of {what}, which {how} from step to step. A "
            "trace is of the weight as the op sees it and goes back to the parameter with the last value, so "
            "that the gradient is wrong if that changes. Apply it to the input or the output of the op "
            "instead of the weight, or set the traces back when it changes (`learner.reset_state()`); "
            f"{instead}, it leaves the weight without a trace.",
            about=self._model,
        )


def _are_same(before: list[Any], now: list[Any]) -> bool:
    pairs = zip(before, now, strict=False)
    return len(before) == len(now) and all(a is b or np.array_equal(a, b, equal_nan=True) for a, b in pairs)
