"""A learning rule on one traced step function, over lists of leaves: the arithmetic behind every learner.

`Learner` puts pytrees around it, and the learners of `brainstate` models put states around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import jax

from .. import _compat, _meshes
from .._compiler.errors import NotSupportedError
from .._compiler.exactness import RuleKind, find_unseen
from .._compiler.graph import graph_from_info
from .._compiler.marking import mark_found
from .._compiler.module_info import ModuleInfo, read_step
from .._diagnostics.records import DiagnosticKind, kinds_of, warn_of, warn_of_options
from .._diagnostics.step_warnings import unused_parameters, warn_of_no_effect
from .._executor.check_op_labels import check_own_ops
from .._executor.executor import ETraceGraphExecutor
from .._executor.slots import find_slots
from .._executor.window import where_rows
from .._frontends.functions import Function
from .._frontends.modules import Mark
from .._online.call import bind
from .._online.drive import Drive
from .._online.parts import Start
from .._online.programs import Programs
from .._online.request import WindowSize
from .._online.rule_step import RuleStep
from .._online.sequence import Sequence
from .._report.report import CompilationReport, ETraceGraph
from .._rules.rule import Rule, TraceRule, Values
from .._types import Array, Leaves, Option, PyTree

Shape = Callable[[Array], Array]


@dataclass(frozen=True, eq=False)
class CompiledStep:
    """A compiled step function and a learning rule, as functions over flat lists of leaves.

    `leaves` are those of the step's states: parameters and carry, in the order of `function.step.states`.
    """

    function: Function = field(repr=False)
    rule: Rule
    mark: Mark
    window: WindowSize | None  # steps of a window; None for single steps
    complete: bool = True  # parameters are used in the step only, not by a user's loss
    programs: Programs = field(default_factory=Programs, repr=False)

    @cached_property
    def graph(self) -> ETraceGraph:
        """The hidden groups, and the operations that feed them; warns of truncated paths."""
        step = self.function.step
        with _meshes.no_types():
            graph = ETraceGraph.of(
                graph_from_info(read_step(mark_found(step) if self.mark == "auto" else step))
            )
        if self.complete:
            warn_of_no_effect(unused_parameters(graph.module_info))
        if isinstance(self.rule, TraceRule):
            warn_of(graph.diagnostics, kinds_of(self.rule_kind))
        elif not self.rule.back_through_time:
            warn_of(graph.diagnostics, [DiagnosticKind.RULE_NOT_LINEAR])
        return graph

    @property
    def info(self) -> ModuleInfo:
        return self.graph.module_info

    @property
    def uses_windows(self) -> bool:
        """Whether gradients are back-propagated through windows."""
        return self.rule.always_windows or self.window is not None

    @property
    def rule_kind(self) -> RuleKind:
        """The properties of the rule that decide whether its gradient is exact."""
        return self.rule.kind(self.uses_windows)

    @property
    def report(self) -> CompilationReport:
        """How each parameter is learned, and which paths through time the rule truncates."""
        return CompilationReport(self.graph, self.rule_kind)

    @cached_property
    def executor(self) -> ETraceGraphExecutor:
        """Evaluates steps of the graph as the rule sees it: `Rule.seen` may add filter states to it."""
        return ETraceGraphExecutor(self.rule.seen(self.graph, self.uses_windows))

    @cached_property
    def rule_step(self) -> RuleStep:
        """Steps and windows whose derivative is the online gradient of the rule."""
        with _meshes.no_types():
            if isinstance(self.rule, TraceRule):
                check_own_ops(find_slots(self.graph.hidden_param_op_relations))
            warn_of_options(self.graph, self.rule_kind)
            unseen = find_unseen(self.graph, self.rule_kind)
            rule_step = RuleStep(self.executor, self.rule, windows=self.uses_windows, unseen=unseen)
        fixed, carried = self.split(self.function.like)
        rule_step.executor.shard_like(fixed, self.function.x.like, carried)
        return rule_step

    def with_rule(self, rule: Rule, window: WindowSize | None) -> CompiledStep:
        """A copy with the same graph and another rule."""
        return self._changed(rule=rule, window=window)

    def sharded(self, param: Shape, state: Shape, x: Shape) -> CompiledStep:
        """A copy with the same graph, for arrays sharded as these functions of their shapes return."""
        f = self.function
        params, carry, x_ = (
            replace(t, like=list(map(g, t.like)))
            for t, g in zip((f.params, f.carry, f.x), (param, state, x), strict=True)
        )
        return self._changed(function=replace(f, params=params, carry=carry, x=x_))

    def _changed(self, **changes: Option) -> CompiledStep:
        other = replace(self, **changes, programs=Programs())
        # fills the `cached_property`, so that the copy does not analyse the step, and warn, again: the graph
        # depends on the function and the marks alone
        other.__dict__["graph"] = self.graph
        return other

    # -- one step ----------------------------------------------------------------------------------

    def split(self, leaves: Leaves) -> tuple[Leaves, list[Leaves]]:
        """The leaves that a step does not change, and those of each state that it does."""
        items = iter(leaves)
        fixed: Leaves = []
        carried: list[Leaves] = []
        for entry in self.info.entries:
            some = [next(items) for _ in entry.invars]
            fixed.extend(some) if entry.is_fixed else carried.append(some)
        return fixed, carried

    def shard_like(self, leaves: Leaves, x: list[PyTree]) -> None:
        """Shard the rule's arrays as the leaves of states and inputs are."""
        fixed, carried = self.split(leaves)
        self.rule_step.executor.shard_like(fixed, x, carried)

    def initial_traces(self, leaves: Leaves, x: list[PyTree]) -> Values:
        """The traces before the first step."""
        if self.rule.back_through_time:
            return {}
        self.shard_like(leaves, x)
        return self.rule_step.arrays.initial(leaves)

    def __call__(
        self,
        leaves: Leaves,
        traces: Values,
        x: Leaves,
        signal: Values,
        consts: Leaves | None = None,
        stepped: tuple[bool, ...] | None = None,
    ) -> tuple[Leaves, Leaves, Values]:
        """Take a step or a window; returns the leaves of outputs and new states, and the new traces.

        `signal` has the inputs of the rule's learning signal, `consts` the values that the step closes over.
        With `stepped`, the call is a window: a flag for each leaf of `x`, whether its first axis is time.
        """
        if self.rule.back_through_time:  # the function itself
            step = self.function.step
            outs = _meshes.in_auto(
                _compat.jaxpr_as_fun(step.closed_jaxpr), (*x, *leaves), lambda: step.specs or ()
            )
            num = len(outs) - len(leaves)
            return list(outs[:num]), list(outs[num:]), traces
        fixed, carried = self.split(leaves)
        consts = list(self.rule_step.info.program.consts.values()) if consts is None else consts
        outs, new, after = bind(self.rule_step, fixed, x, consts, carried, {**traces, **signal}, stepped)
        unchanged, changed = iter(fixed), (a for some in new for a in some)
        states = [next(unchanged if e.is_fixed else changed) for e in self.info.entries for _ in e.invars]
        return outs, states, {k: after[k] for k in traces}

    # -- sequences ---------------------------------------------------------------------------------

    def run(
        self,
        drive: Drive,
        leaves: Leaves,
        sequence: Sequence,
        initial: Iterable[Array] = (),
        *,
        evolve: bool = False,
    ) -> PyTree:
        """Run a drive over a sequence, compiled and cached; `initial` are the values of reset samples."""
        start = Start(list(drive.step.program.consts.values()), leaves, list(initial))
        drive = replace(drive, reset_traces=self.reset_traces)
        return self.programs.run(Drive.evolve if evolve else Drive.__call__, drive, start, sequence)

    # -- resets ------------------------------------------------------------------------------------

    def reset_traces(self, traces: Values, rows: Array) -> Values:
        """The traces, with those of the samples flagged in `rows` set to zero."""
        if self.rule.back_through_time:
            return traces
        if any(traces[k].shape != v.shape for k, v in self.rule_step.arrays.shapes.items()):
            raise NotSupportedError(
                "The learner is mapped (`vmap`): its traces have a batch axis that it does not know. Reset "
                "samples by the object that `braintrace.compile(..., vmap=True)` returns."
            )
        return {**traces, **self.rule_step.rule.forget(self.rule_step.executor, traces, rows)}

    def reset_samples(self, rows: Array, start: PyTree, old: PyTree, traces: Values) -> tuple[PyTree, Values]:
        """States and traces, with the samples flagged in `rows` reset to `start` and to zero."""

        choose = lambda rows, new, old: jax.tree.map(partial(where_rows, rows), new, old)
        reset = lambda rows, start, old, traces: (choose(rows, start, old), self.reset_traces(traces, rows))
        specs = lambda: [_meshes.spec_of(a) for a in jax.tree.leaves((old, traces))]
        found: tuple[PyTree, Values] = _meshes.in_auto(reset, (rows, start, old, traces), specs)
        return found
