"""Learners with a rule: their gradient is that of `online`."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._compiler import ETraceGraph, NotSupportedError
from .._compiler.exactness import RuleKind, find_unseen
from .._compiler.graph import graph_from_info
from .._compiler.step import show_path
from .._executor.own_ops import check_own_ops
from .._executor.slots import find_slots
from .._frontends.modules import Mark, check_mark, extract_module_info
from .._lines import warn_user
from .._online.call import bind
from .._online.choose import choose, memory_budget
from .._online.drive import Drive
from .._online.online import Online
from .._online.request import check_window
from .._online.sequence import Sequence, is_traced
from .._online.user_step import UserStep
from .._report.diagnostics import DiagnosticKind, kinds_of, warn_of, warn_of_options
from .._rules.rule import Rule, TraceRule, Values
from .base import ETraceAlgorithm
from .config import ETraceConfig
from .driving import Driver
from .forms import Compiled

VjpMethod = Literal["single-step", "multi-step"]


class ETraceVjpAlgorithm(ETraceAlgorithm):
    """A learner with a `Rule`, one step at a time or back-propagated through windows of steps.

    With `vjp_method='multi-step'` a call is a window of one step, or of the steps in `MultiStepData`, and
    `etrace_grad` takes windows of `window` steps. With `mark='auto'`, weights that enter by ordinary
    operations are learned online, too. Where there is no `rule`, `config` says which; `random_feedback_key`
    is for its matrices.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        rule: Rule | None = None,
        *,
        vjp_method: VjpMethod | None = None,
        window: int | None = None,
        mark: Mark = "ops",
        name: str | None = None,
        config: ETraceConfig | None = None,
        random_feedback_key: Any = None,
    ) -> None:
        super().__init__(model, name=name)
        if rule is None:
            if config is None:
                raise TypeError("A learner has a `rule`, such as `braintrace.rules.D_RTRL()`, or a `config`.")
            rule = config.rule(random_feedback_key)
        self.config = config
        if config is not None and config.window_size is not None and window is None:
            window = config.window_size
        check_mark(mark)
        self.rule = rule
        self.vjp_method: VjpMethod = read_method(rule, vjp_method, window)
        self.window = window or 1
        # as in 0.2.x, where the size of a chunk is the window
        self._chunk_is_window = vjp_method == "multi-step" and window is None
        self.mark = mark
        self.memory_budget = memory_budget()
        self.standing: Values = {}  # what calls are given for the signal, unless they say otherwise
        self._made_of: list[Any] | None = None  # constants in the weights that the traces are of
        self._masked_by: list[Any] | None = None  # the same of states, as far as they could be seen

    @property
    def _in_windows(self) -> bool:
        return self.rule.windows or self.vjp_method == "multi-step"

    def take_windows(self, window: int | None = None, rank: int | None = None) -> None:
        if self.rule.any_window:
            super().take_windows(window, rank)
        rule: Any = self.rule
        if rank is not None:
            if not hasattr(rule, "rank"):
                raise ValueError(f"{type(self).__name__} has no `rank`; `braintrace.D_RTRL` has.")
            rule = dataclasses.replace(rule, rank=rank)
        check_window(window)
        before = self.rule, self.vjp_method
        self.rule, self.window = rule, window or self.window
        self._chunk_is_window = self._chunk_is_window and window is None
        self.vjp_method = "multi-step" if window is not None or rule.windows else self.vjp_method
        if before != (self.rule, self.vjp_method) and self.is_compiled:  # for other traces
            warn_of_options(self.graph, self.rule_kind)
            self._compiled, self._forms, self._driver = {}, [], Driver()
            self.init_etrace_state()

    @property
    def rule_kind(self) -> RuleKind:
        """What the rule is, for the verdict on exactness."""
        return self.rule.kind(self._in_windows)

    def _compile(self, args: Any, kwargs: Any) -> ETraceGraph:
        if not isinstance(self.rule, TraceRule):
            graph = graph_from_info(extract_module_info(self.model, *args, **kwargs))
            warn_of(graph, [DiagnosticKind.RULE_NOT_LINEAR])
            return graph
        graph = graph_from_info(extract_module_info(self.model, *args, mark=self.mark, **kwargs))
        warn_of(graph, kinds_of(self.rule_kind))
        warn_of_options(graph, self.rule_kind)
        check_own_ops(find_slots(graph.hidden_param_op_relations))
        return graph

    def _reduced(self, graph: ETraceGraph) -> ETraceGraph:
        return self.rule.seen(graph, self._in_windows)

    def _online(self, compiled: Compiled) -> Online:
        if compiled.online is None:
            unseen = find_unseen(compiled.graph, self.rule_kind)
            compiled.online = Online(compiled.executor, self.rule, windows=self._in_windows, unseen=unseen)
        return compiled.online

    def _initial_values(self, compiled: Compiled) -> Values:
        self._spread_like(compiled)
        return self._online(compiled).initial_values(jax.tree.leaves(self._read(compiled.executor.info)))

    def _spread_like(self, compiled: Compiled) -> None:
        """Spread arrays over devices as the states and inputs are."""
        executor = self._online(compiled).executor
        info = executor.info
        known = self._inputs if len(self._inputs) == len(info.arg_invars) else [None] * len(info.arg_invars)
        params, rest = self._read(info)
        executor.spread_like(params, known, rest)

    def _forget(self, values: Values, rows: Any) -> Values:
        online = self._online(self._compiled_now())
        if any(values[k].shape != v.shape for k, v in online.initial_shapes.items()):
            raise NotSupportedError(
                "The learner is mapped (`vmap`): its traces have an axis of samples that it does not know. "
                "Let samples begin anew by what `braintrace.compile(..., vmap=True)` returns."
            )
        return {**values, **self.rule.forget(online.executor, values, rows)}

    def _agree(self, old: Compiled, new: Compiled) -> bool:
        if not isinstance(self.rule, TraceRule):
            return super()._agree(old, new)
        traces = [{t.key: t for t in c.executor.slots} for c in (old, new)]
        return (
            super()._agree(old, new)
            and traces[0].keys() == traces[1].keys()
            and all(t.means_the_same_as(traces[1][key]) for key, t in traces[0].items())
        )

    @property
    def lasting(self) -> list[str]:
        return self._online(self._compiled_now()).lasting

    def init_etrace_state(self) -> None:
        super().init_etrace_state()
        self._made_of = self._masked_by = None

    # -- what a call is given for the signal -------------------------------------------------------

    @property
    def modulator(self) -> Any:
        """What stands for calls that are given no modulator."""
        return self.standing.get("modulator")

    @modulator.setter
    def modulator(self, value: Any) -> None:
        self.standing["modulator"] = value

    def _taken(self, args: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], Any, dict[str, Any]]:
        signal = self.rule.signal
        names = {*signal.takes, *signal.spellings}
        given = signal.named({k: v for k, v in kwargs.items() if k in names})
        compiled_for = max((len(a) for a, _ in self._examples.values()), default=len(args))
        if signal.comes_last and not given and len(args) == compiled_for + 1:
            *args, given[signal.takes[0]] = args
        return given, tuple(args), {k: v for k, v in kwargs.items() if k not in names}

    def _for_signal(self) -> Values:
        """What this call was given, or what stands for it."""
        found = {}
        for name in self.rule.signal.takes:
            value = self._given.get(name, self.standing.get(name))
            if value is None:
                raise ValueError(
                    f"{type(self).__name__} takes its signal from the call: `learner(x, {name}=...)`, or set "
                    f"`learner.{name}` for all calls."
                )
            found[name] = jax.tree.map(jnp.asarray, value() if callable(value) else u.get_mantissa(value))
        return found

    def _compare_weights(self, online: Online, consts: list[Any]) -> None:
        """Warn if a weight is made with another constant than the traces so far, or may be."""
        now = online.consts_of_weights(consts)
        traced = any(map(_compat.is_tracer, now))
        before = now if self._made_of is None else self._made_of
        self._made_of = None if traced else now
        if traced or not _are_same(before, now):
            how = "may change" if traced else "has changed"
            _warn_of_change(
                "something that the model closes over", how, "as an argument of the model", self.model
            )

    def _compare_masks(self) -> None:
        """Warn if a state that a weight is made of is not what it was for the traces so far."""
        found = self._by_path()
        masks = {show_path(e.path): found.get(e.path, e.state) for e in self.executor.masks}
        now = [leaf for st in masks.values() for leaf in jax.tree.leaves(st.value)]
        if any(map(_compat.is_tracer, now)):
            return  # an input of a compiled function: nobody can see what it was before
        before, self._masked_by = self._masked_by or now, now
        if not _are_same(before, now):
            names = ", ".join(f"`{name}`" for name in masks)
            _warn_of_change(f"the state {names}", "has changed", "written by the step", self.model)

    def _call(
        self,
        compiled: Compiled,
        args: list[Any],
        consts: list[Any],
        stepped: tuple[bool, ...] | None,
        length: int,
    ) -> list[Any]:
        if stepped is not None and not self._in_windows:
            raise ValueError(
                "This learner takes one step at a time (`vjp_method='single-step'`): pass the array of one "
                "step. `MultiStepData` is for `vjp_method='multi-step'`."
            )
        params, rest = self._read(compiled.graph.module_info)
        online = self._online(compiled)
        self._spread_like(compiled)
        self._compare_weights(online, consts)
        self._compare_masks()
        values = {**self._values(), **self._for_signal()}
        outs, new, values = bind(online, params, args, consts, rest, values, stepped)
        self._write(compiled, new, values, length)
        return outs

    # -- sequences ---------------------------------------------------------------------------------

    def steps_at_once(self, chunk_size: int | None) -> int | None:
        return chunk_size if self._chunk_is_window else None

    def _how(
        self, step: UserStep, sequence: Sequence, chunk_size: int | None, keep: bool, *, is_window: bool
    ) -> Drive:
        if is_window:
            return Drive(step, size=sequence.pace, turns=self.rule.turns)
        values = self._values()
        self._spread_like(self._compiled_now())
        return choose(
            self._online(self._compiled_now()),
            step,
            sequence,
            values=values,
            chunk_size=chunk_size,
            window=self.window,
            keep=keep,
            # outside of `jit`, traces that are kept are zero in the first call only: two programs for one
            fresh=self.is_fresh() and (not keep or is_traced(values)),
            budget=self.memory_budget,
        )


def read_method(rule: Rule, vjp_method: VjpMethod | None, window: int | None) -> VjpMethod:
    """Whether a learner with these options takes single steps, or windows."""
    if vjp_method not in ("single-step", "multi-step", None):
        raise ValueError(f"`vjp_method` is 'single-step' or 'multi-step', not {vjp_method!r}.")
    check_window(window)
    in_windows = window is not None or (not rule.any_window and rule.windows)
    if in_windows and vjp_method == "single-step" and (window or isinstance(rule, TraceRule)):
        raise ValueError(
            f"{'The low-rank correction is' if window is None else f'Windows of {window} steps are'} "
            "back-propagated through: leave `vjp_method` out, or pass 'multi-step'."
        )
    return vjp_method or ("multi-step" if in_windows else "single-step")


def _warn_of_change(what: str, how: str, instead: str, model: Any) -> None:
    warn_user(
        f"A weight, or the gain of a leaky readout, is made of {what}, which {how} from step to step. A "
        "trace is of the weight as the op sees it and goes back to the parameter with the last value, so "
        "that the gradient is wrong if that changes. Apply it to the input or the output of the op instead "
        f"of the weight, or set the traces back when it changes (`learner.reset_state()`); {instead}, it "
        "leaves the weight without a trace.",
        about=model,
    )


def _are_same(before: list[Any], now: list[Any]) -> bool:
    pairs = zip(before, now, strict=False)
    return len(before) == len(now) and all(a is b or np.array_equal(a, b, equal_nan=True) for a, b in pairs)
