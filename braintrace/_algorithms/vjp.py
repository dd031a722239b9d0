"""Learners with a rule: their gradient is that of `online`."""

from __future__ import annotations

from typing import Any, Literal

import brainstate

from .._compiler import ETraceGraph, compile_etrace_graph
from .base import Compiled, ETraceAlgorithm
from .online import Online
from .rule import Rule, Values

VjpMethod = Literal["single-step", "multi-step"]


class ETraceVjpAlgorithm(ETraceAlgorithm):
    """A learner with a `Rule`, one step at a time or back-propagated through windows of steps."""

    def __init__(
        self,
        model: brainstate.nn.Module,
        rule: Rule,
        *,
        vjp_method: VjpMethod = "single-step",
        name: str | None = None,
    ) -> None:
        super().__init__(model, name=name)
        if vjp_method not in ("single-step", "multi-step"):
            raise ValueError(f"`vjp_method` is 'single-step' or 'multi-step', not {vjp_method!r}.")
        self.rule = rule
        self.vjp_method = vjp_method

    def _compile(self, args: Any, kwargs: Any) -> ETraceGraph:
        return compile_etrace_graph(self.model, *args, **kwargs)

    def _online(self, compiled: Compiled) -> Online:
        return Online(compiled.executor, self.rule)

    def _initial_values(self, compiled: Compiled) -> Values:
        return self._online(compiled).initial_values()

    def _step(self, compiled: Compiled, args: list[Any], consts: list[Any]) -> list[Any]:
        params, rest = self._read(compiled)
        online = self._online(compiled)
        outs, new, values = online.step(params, args, consts, rest, self._values())
        self._write(compiled, new, values, 1)
        return outs

    def _window(
        self, compiled: Compiled, args: list[Any], stepped: list[bool], length: int, consts: list[Any]
    ) -> list[Any]:
        if self.vjp_method == "single-step":
            raise ValueError(
                "This learner takes one step at a time (`vjp_method='single-step'`): pass the array of one "
                "step. `MultiStepData` is for `vjp_method='multi-step'`."
            )
        params, rest = self._read(compiled)
        online = self._online(compiled)
        outs, new, values = online.window(params, args, stepped, consts, rest, self._values())
        self._write(compiled, new, values, length)
        return outs
