"""Learners of `brainstate` models: a module that keeps hidden states and traces between calls.

It reads the values of states, calls the pure functions of a `CompiledStep`, and writes the results back.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref

import brainstate
import jax.numpy as jnp

from .. import _meshes
from .._compiler.step import Path
from .._diagnostics.records import warn_of_options
from .._executor.executor import ETraceGraphExecutor
from .._frontends.modules import Mark, check_mark
from .._online.arguments import one_step, split_static
from .._online.choose import memory_budget
from .._online.request import Request, WindowSize, check_chunk_size, check_window
from .._online.sequence import Sequence
from .._report.report import CompilationReport, ETraceGraph
from .._rules.rule import Rule, Values
from .._types import Array, ArrayLike, Function, Key, Options, PyTree, RuleLike
from . import pickling
from .calling import VjpMethod, call, called_with, calling_model, read_method, split_call
from .compiled_step import CompiledStep
from .config import ETraceConfig
from .guards import Guards, WeightChanges
from .model_states import hidden_of, leaves_of, reset_model, reset_rows, strengthen, values_now
from .sequences import Report, Task, check_weights, reporting, run
from .step_cache import StepCache, time_first
from .trace_states import EligibilityTrace, StepCounter, traces_of


class ETraceAlgorithm(brainstate.nn.Module):
    """A `brainstate` model that learns online by a rule.

    `D_RTRL`, `EProp` and the other learners are this class with a rule of their own. A rule of one's own is
    a `braintrace.rules.TraceRule`, passed as `rule`.

    Args:
        model: The model that learns, with an `update` method.
        rule: A value of `braintrace.rules`; by default the rule of `config`.
        vjp_method: With 'multi-step', a call is a window of one step, or of the steps in `MultiStepData`.
        window: Back-propagate through windows of this many steps in `etrace_grad`; 'auto' takes as many
            as the memory budget allows.
        mark: 'auto' marks the ops that use a parameter; with 'ops' the model marks them.
        name: Name of the module.
        config: Chooses the rule, if `rule` is not given.
        random_feedback_key: Key of the random feedback matrices of `config`.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = inspect.signature(cls.__init__)
        parameters = [*own.parameters.values()][1:]
        # the metaclass of modules has a `__call__`, which `inspect` would show instead
        cls.__signature__ = own.replace(parameters=parameters)

    def __init__(
        self,
        model: brainstate.nn.Module,
        rule: Rule | None = None,
        *,
        vjp_method: VjpMethod | None = None,
        window: WindowSize | None = None,
        mark: Mark = "ops",
        name: str | None = None,
        config: ETraceConfig | None = None,
        random_feedback_key: Key | int | None = None,
    ) -> None:
        super().__init__()
        if isinstance(model, type) or not callable(getattr(model, "update", None)):
            what = f"the class {model.__name__} itself" if isinstance(model, type) else str(type(model))
            raise TypeError(f"A learner takes a `brainstate.nn.Module` with an `update` method, not {what}.")
        if name is not None:
            self._name = name
        if rule is None:
            if config is None:
                raise TypeError("A learner has a `rule`, such as `braintrace.rules.D_RTRL()`, or a `config`.")
            rule = config.rule(random_feedback_key)
        if config is not None and config.window_size is not None and window is None:
            window = config.window_size
        check_mark(mark)
        self.model, self.rule, self.config, self.mark = model, rule, config, mark
        self.vjp_method: VjpMethod = read_method(rule, vjp_method, window)
        self.window: WindowSize = window or 1
        # as in 0.2.x, where the size of a chunk is the window
        self._chunk_is_window = vjp_method == "multi-step" and window is None
        self.memory_budget = memory_budget()
        self.standing: Options = {}  # inputs of the rule's signal, for calls that are given none
        self.traces: dict[str, EligibilityTrace] = {}
        self.steps = StepCounter(jnp.zeros((), jnp.int32))
        self._start = values_now(model)  # a reset falls back on these
        self._cache = StepCache(model, rule, mark, self._window)
        self._inputs: list[PyTree] = []  # shapes of the inputs compiled for, and their shardings
        self._traced_states: list[int] = []  # the `id` of the model's states when the traces were made
        self._zeros: dict[str, weakref.ref[Array]] = {}  # the initial traces
        self._is_tracing = False  # a user's step is being traced
        self._guards = Guards(model)

    def __pretty_repr_item__(self, name: str, value: object) -> tuple[str, object] | None:
        return None if name.startswith("_") else (name, value)

    def _attributes(self) -> Options:
        """The attributes of a copy; it compiles its own functions when it is first used."""
        own = {"_inputs": [], "_zeros": {}, "_is_tracing": False, "_guards": Guards(self.model)}
        return {**vars(self), **own}

    def __reduce__(self) -> tuple[Function, tuple[type, bytes]]:
        return pickling.restore, (type(self), pickling.dumps(self._attributes()))

    def __deepcopy__(self, memo: dict[int, object]) -> ETraceAlgorithm:
        return pickling.copy_of(self, self._attributes(), memo)

    # -- compiling ---------------------------------------------------------------------------------

    @property
    def _window(self) -> WindowSize | None:
        """Steps of a window; None for single steps."""
        return self.window if self.vjp_method == "multi-step" else None

    def compile_graph(self, *args: PyTree, **kwargs: PyTree) -> None:
        """Trace the model for arguments of these shapes; free if that was done before."""
        args, kwargs = one_step(args, split_call(self, (), kwargs)[2])
        strengthen(self.model)
        self._cache.compile(args, kwargs)
        self._inputs = [_meshes.shape_of(a) for a in split_static(args, kwargs)[0]]
        states = [id(st) for st in self.model.states().values()]
        if states != self._traced_states:  # else a jitted step knows the traces as they are
            # new states, which `vmap_new_states` around this call sees
            self.traces = {k: EligibilityTrace(v) for k, v in self._lasting_values().items()}
        self._traced_states = states
        self.init_etrace_state()
        self._guards.before_call(self, keep=True)

    def take_windows(
        self,
        window: WindowSize | None = None,
        rank: int | None = None,
        basis: str | None = None,
        across: str | None = None,
    ) -> None:
        """Back-propagate through windows of `window` steps from now on, with these options of the rule.

        An option that is None stays as it is. If other traces are needed, they start from zero.
        """
        rule: RuleLike = self.rule
        if rule.any_window:
            raise ValueError(
                f"{type(self).__name__} has neither `window` nor `rank`, which are for traces of weights: "
                "`braintrace.D_RTRL` has them."
            )
        options = {"rank": rank, "basis": basis, "across": across}
        given = {k: v for k, v in options.items() if v is not None}
        for option in given:
            if not hasattr(rule, option):
                raise ValueError(f"{type(self).__name__} has no `{option}`; `braintrace.D_RTRL` has.")
        rule = dataclasses.replace(rule, **given) if given else rule
        check_window(window)
        before = self.rule, self.vjp_method
        self.window = window or self.window
        self._chunk_is_window = self._chunk_is_window and window is None
        if window is not None or rule.always_windows:
            self.vjp_method = "multi-step"
        changed = before != (rule, self.vjp_method)
        if changed and self.is_compiled:
            warn_of_options(self.graph, rule.kind(rule.always_windows or self._window is not None))
        self._change_rule(rule, reset=changed)

    def _change_rule(self, rule: Rule, *, reset: bool) -> None:
        """Compile again for another rule; `reset`: it has other traces, which start from zero."""
        self.rule = rule
        self._cache = self._cache.with_rule(rule, self._window)
        if reset and self.is_compiled:
            self.init_etrace_state()

    @property
    def is_compiled(self) -> bool:
        """Whether `compile_graph` was called."""
        return bool(self._cache.examples)

    @property
    def graph(self) -> ETraceGraph:
        """The compiled graph of the shapes used last."""
        return self._cache.now.graph

    @property
    def executor(self) -> ETraceGraphExecutor:
        """The pure functions of that graph."""
        return self._cache.now.executor

    graph_executor = executor

    @property
    def report(self) -> CompilationReport:
        """How each parameter is learned under this rule, and which paths through time it truncates."""
        return self._cache.now.report

    def show_graph(self, verbose: bool = True, return_msg: bool = False) -> str | None:
        """Print the report, a tree of groups, sites and parameters; or return it, or both."""
        if verbose:
            self.report.show()
        return self.report.to_str() if return_msg else None

    def _repr_html_(self) -> str | None:
        return self.report._repr_html_() if self.is_compiled else None

    # -- states ------------------------------------------------------------------------------------

    @property
    def param_states(self) -> PyTree:
        """The model's parameters, by path."""
        return self.model.states(brainstate.ParamState)

    @property
    def hidden_states(self) -> dict[Path, brainstate.State]:
        """The states that traces follow, by path."""
        return {h.path: h.state for h in self.graph.module_info.hidden}

    @property
    def other_states(self) -> dict[Path, brainstate.State]:
        """The states that are carried but not traced, by path."""
        hidden = {id(h.state) for h in self.graph.module_info.hidden}
        entries = self.graph.module_info.entries
        return {e.path: e.state for e in entries if not e.is_param and id(e.state) not in hidden}

    @property
    def etrace_states(self) -> dict[str, EligibilityTrace]:
        """The states that hold the traces, by name."""
        self._bring_up_to_date()
        return dict(self.traces)

    @property
    def running_index(self) -> StepCounter:
        """The number of steps since the last reset: a state that compares as a number."""
        return self.steps

    @property
    def modulator(self) -> PyTree:
        """The modulator of calls that are given none, for rules with a modulator."""
        return self.standing.get("modulator")

    @modulator.setter
    def modulator(self, value: PyTree) -> None:
        self.standing["modulator"] = value

    get_etrace_of = traces_of
    reset_model = reset_model

    def init_etrace_state(self) -> None:
        """Set the traces and the step counter to zero, in the shapes of the compiled graph."""
        compiled = self._cache.now
        with self._guards.reads.paused():  # so that a function being traced writes them before the counter
            _ = [st.value for st in hidden_of(compiled).values()]
        self.steps.value = jnp.zeros((), jnp.int32)
        values = compiled.initial_traces(leaves_of(compiled), self._inputs_of(compiled))
        as_stored = lambda a: (a.shape, a.dtype)
        for key, value in self._lasting_values().items():
            if as_stored(value) == as_stored(values[key]):
                values[key] = value
        self._zeros = {k: weakref.ref(v) for k, v in values.items()}
        for key in [k for k in self.traces if k not in values]:
            del self.traces[key]
        for key, value in values.items():
            if key in self.traces:
                self.traces[key].value = value
            else:
                self.traces[key] = EligibilityTrace(value)
        self._guards.weights = WeightChanges(self.model)  # whose traces were reset

    def _lasting_values(self) -> Values:
        """The rule's arrays that a reset does not set back: random feedback, the count of random signs."""
        compiled = self._cache.now
        lasting = [] if compiled.rule.back_through_time else compiled.rule_step.arrays.lasting
        return {k: self.traces[k].value for k in lasting if k in self.traces}

    def _is_fresh(self) -> bool:
        """Whether the traces are known to be the zeros that they were set to."""
        known, lasting = {k: ref() for k, ref in self._zeros.items()}, self._lasting_values()
        return all(known.get(k) is vars(st)["_value"] for k, st in self.traces.items() if k not in lasting)

    def reset_state(self, batch_size: int | None = None, *, rows: ArrayLike | None = None) -> None:
        """Reset the model's states, the traces and the step counter.

        A module's states are reset by its `reset_state` or, if it has none, to the values that its
        `init_state` makes; a short-term state of a module with neither (made in `__init__`) gets the value
        that it had when the learner was made. With `rows`, a boolean for each sample of the batch, only the
        states and traces of those samples are reset.
        """
        if rows is not None:
            reset_rows(self, jnp.asarray(rows))
            return
        self.reset_model(**({"batch_size": batch_size} if batch_size is not None else {}))
        self._cache.follow_states()
        if self._cache.current is not None:
            self.init_etrace_state()

    def _bring_up_to_date(self) -> None:
        """Write traces that are not written at each step (on a GPU), for users to read."""
        if self.traces and not self._cache.now.rule.back_through_time:
            step, values = self._cache.now.rule_step, self._values()
            written = step.rule.up_to_date(step.executor, values)
            if written is not values:
                self._store(written)

    def _values(self) -> Values:
        return {k: st.value for k, st in self.traces.items()}

    def _inputs_of(self, compiled: CompiledStep) -> list[PyTree]:
        """The shapes and shardings of the inputs of a step, as far as they are known."""
        num = compiled.function.step.num_args
        return self._inputs if len(self._inputs) == num else [None] * num

    def _store(self, values: Values) -> None:
        for key, state in self.traces.items():
            state.value = values[key]

    # -- calls and sequences -----------------------------------------------------------------------

    def update(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Advance the model and its traces; the derivative of the result is the online gradient.

        A bare array, or `SingleStepData`, is one step; `MultiStepData` is a window of steps.
        """
        return call(self, args, kwargs)

    _calling_model = calling_model
    _called_with = called_with

    @time_first
    def etrace_grad(
        self,
        *sequences: PyTree,
        step_fn: Function,
        mask: ArrayLike | None = None,
        chunk_size: int | None = None,
        weights: PyTree = None,
        reduction: str = "mean",
        loss_output: str = "per_step",
        has_aux: bool = False,
        return_value: bool = False,
        keep_traces: bool = True,
        reset: ArrayLike | None = None,
        progress: bool | Report = False,
    ) -> PyTree:
        """Drive a whole sequence and return the accumulated online gradient, by parameter.

        Args:
            *sequences: Arrays or pytrees with time as the first axis.
            step_fn: Calls the learner once on `step_fn(*slices)` and returns the loss of that step.
            mask: Weights of the losses, of shape (time,), or (time, batch) if `step_fn` returns one loss for
                each sample. States and traces advance at every step.
            chunk_size: Steps that are taken at once, rounded up to whole windows; by default as many as
                memory allows. Changes speed and memory, not the numbers. With a balanced `rank`, the basis of
                later sequences depends on it, because its averages are taken per chunk. For a learner that
                was made as in 0.2.x, with `vjp_method='multi-step'` and no `window`, it is the window: slices
                have a leading axis of that size, `step_fn` wraps them in `MultiStepData` and returns as many
                losses.
            weights: States whose gradient is returned, a dictionary; the model's parameters by default.
            reduction: 'mean' divides by the sum of the mask, 'sum' does not.
            loss_output: The losses that `return_value` adds: of each step before the mask ('per_step'), after
                it ('masked'), or as one number ('scalar').
            has_aux: Whether `step_fn` returns a pair; adds its second value to the result.
            return_value: Adds the losses to the result.
            keep_traces: Without, the traces are zero after the call, which saves computing them.
            reset: Flags of shape (time, batch). A sample whose flag is set is reset before that step.
            progress: True for a bar, or a function of the steps done and in all, called after each chunk.

        Returns:
            The gradients, by the keys of `weights`, with losses and second values if asked for.

        If the call fails or is interrupted, states and traces are those before it or, with `progress` and
        outside of `jit`, those after the last report.
        """
        self._begin_sequence(chunk_size, keep_traces)
        with reporting(progress) as report:
            sequence = Sequence.check(sequences, mask, reset, report and (lambda *now: report(*now[:2])))
            request = Request(sequence, has_aux, reduction, loss_output, return_value)
            weights = check_weights(self, self.param_states if weights is None else weights)
            self._guards.weights.compare_masks(self)
            task = Task(self, step_fn, request.split, weights, keep=keep_traces)
            grads, (losses, aux) = run(task, sequence, chunk_size)
        return request.result(grads, losses, aux)

    @time_first
    def etrace_evolve(
        self,
        *sequences: PyTree,
        step_fn: Function | None = None,
        chunk_size: int | None = None,
        return_outputs: bool = False,
    ) -> PyTree:
        """Advance states and traces over a sequence, with no loss; `step_fn` is the learner by default.

        `chunk_size` is that of `etrace_grad`.
        """
        self._begin_sequence(chunk_size, keep=True)
        sequence = Sequence.check(sequences, None)

        def step(*slices: PyTree) -> PyTree:
            out = (step_fn or self)(*slices)
            return out if return_outputs else None

        self._guards.weights.compare_masks(self)
        return run(Task(self, step, alone=step_fn is None), sequence, chunk_size)[1]

    def _begin_sequence(self, chunk_size: int | None, keep: bool) -> None:
        _ = self._cache.now
        check_chunk_size(chunk_size)
        self._guards.before_call(self, keep=keep)
        if self._cache.follow_states():
            self.init_etrace_state()

    def steps_at_once(self, chunk_size: int | None) -> int | None:
        """The number of steps that `step_fn` takes at once for this `chunk_size`; None for one step."""
        return chunk_size if self._chunk_is_window else None


# the name in 0.2.x of learners whose gradient is that of a `vjp`; here all are
ETraceVjpAlgorithm = ETraceAlgorithm
