"""The learner: the one object that keeps hidden states and traces between calls.

All arithmetic is the executor's and the rule's; this file reads values from `brainstate` states, calls
pure functions and writes the results back.
"""

from __future__ import annotations

import copy
import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import brainstate
import jax
import jax.numpy as jnp

from .. import _compat, _meshes
from .._compiler import CompilationError, ETraceGraph, NotSupportedError
from .._compiler.exactness import RuleKind
from .._compiler.module_info import ModuleInfo
from .._compiler.step import Path, show_path
from .._executor.executor import ETraceGraphExecutor
from .._executor.window import where_rows
from .._frontends.modules import traced_again
from .._lines import warn_user
from .._online.arguments import as_shape, split_static
from .._online.data import one_step, time_axes
from .._online.drive import Drive
from .._online.request import Request, check_chunk_size
from .._online.sequence import NeverCalledError, Sequence
from .._online.user_step import UserStep
from .._rules.rule import Values
from . import pickling
from .count import Count
from .driving import Driver, Task
from .forms import Compiled, Key, NotCompiledError, shapes_of_states, time_first
from .progress import Bar, Report, unchanged_on_error
from .reads import Reads
from .resets import initial_states, reset, strengthen, values_now
from .seen import Seen

if TYPE_CHECKING:
    from .._report.report import CompilationReport


_FORMS = 8


class EligibilityTrace(brainstate.ShortTermState):
    """A state that holds an eligibility trace."""


class ETraceAlgorithm(brainstate.nn.Module):
    """A model that learns online: what every learner has, whatever its rule.

    A rule of one's own is no subclass, but a `braintrace.rules.TraceRule` for `ETraceVjpAlgorithm`.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = inspect.signature(cls.__init__)
        parameters = [*own.parameters.values()][1:]
        # the metaclass of modules has a `__call__`, which `inspect` would show instead
        cls.__signature__ = own.replace(parameters=parameters)

    def __init__(self, model: brainstate.nn.Module, *, name: str | None = None) -> None:
        super().__init__()
        if isinstance(model, type) or not callable(getattr(model, "update", None)):
            what = f"the class {model.__name__} itself" if isinstance(model, type) else str(type(model))
            raise TypeError(f"A learner takes a `brainstate.nn.Module` with an `update` method, not {what}.")
        if name is not None:
            self._name = name
        self.model = model
        self._start = values_now(model)  # what a reset falls back on
        self.traces: dict[str, EligibilityTrace] = {}
        self.steps = Count(jnp.zeros((), jnp.int32))
        self._compiled: dict[Key, Compiled] = {}
        # others of the same shapes: the model closed over something else
        self._forms: list[Compiled] = []
        self._examples: dict[Key, Any] = {}  # what each was compiled with
        self._current: Key | None = None
        self._inputs: list[Any] = []  # shapes of those compiled for, and how they were spread over devices
        self._traced_states: list[int] = []  # those of the model when the traces were made
        self._zeros: dict[str, weakref.ref[Any]] = {}
        self._seen: Seen | None = None
        self._driver = Driver()
        self._reads = Reads()
        self._given: dict[str, Any] = {}  # what a call was given for the rule

    def __pretty_repr_item__(self, name: str, value: Any) -> Any:
        return None if name.startswith("_") else (name, value)

    # -- compiling ---------------------------------------------------------------------------------

    def compile_graph(self, *args: Any, **kwargs: Any) -> None:
        """Trace the model for arguments of these shapes; free if that was done before."""
        args, kwargs = one_step(args, self._taken((), kwargs)[2])
        strengthen(self.model)
        key = self._key(args, kwargs)
        if key not in self._examples:
            with _meshes.no_types():
                self._compiled[key] = Compiled(self._compile(args, kwargs), self._reduced)
            self._examples[key] = jax.tree.map(as_shape, (args, kwargs))
        self._current = key
        self._inputs = [_meshes.shape_of(a) for a in split_static(args, kwargs)[0]]
        states = [id(st) for st in self.model.states().values()]
        if states != self._traced_states:  # else a jitted step knows the traces as they are
            # new states, which `vmap_new_states` around this call sees
            self.traces = {k: EligibilityTrace(v) for k, v in self.lasting_values().items()}
        self._traced_states = states
        self.init_etrace_state()
        self._compare_states(keep=True)

    def adopt(self, graph: ETraceGraph, args: Any) -> None:
        """Take over a graph that was compiled for these arguments, with shapes instead of traces."""
        key = self._key(args, {})
        compiled = self._compiled[key] = Compiled(graph, self._reduced)
        self._examples[key], self._current = (args, {}), key
        self._inputs = [_meshes.shape_of(a) for a in split_static(args, {})[0]]
        shapes = jax.eval_shape(lambda: self._initial_values(compiled))
        shapes = shapes if compiled.online is None else compiled.online.spread_shapes
        self.traces = {k: EligibilityTrace(s) for k, s in shapes.items()}
        self.steps.value = jax.ShapeDtypeStruct((), jnp.int32)

    def _reduced(self, graph: ETraceGraph) -> ETraceGraph:
        """The graph with only the states that the rule needs traces of."""
        return graph

    def _form(self, key: Any) -> Compiled:
        """The compiled form for a key; a copy or a restored learner makes its own when it is first used."""
        if key not in self._compiled:
            args, kwargs = self._examples[key]
            with warnings.catch_warnings(action="ignore"):
                self._compiled[key] = Compiled(self._compile(args, kwargs), self._reduced)
        return self._compiled[key]

    def _kept(self) -> dict[str, Any]:
        """The attributes of a copy; it compiles its own functions when it is first used."""
        return {
            **vars(self),
            "_compiled": {},
            "_forms": [],
            "_inputs": [],
            "_zeros": {},
            "_seen": None,
            "_driver": Driver(),
            "_reads": Reads(),
            "_given": {},
        }

    def __reduce__(self) -> Any:
        return pickling.restore, (type(self), pickling.dumps(self._kept()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        for state in self.states().values():
            memo[id(state)] = pickling.copy_state(state)
        for name, value in copy.deepcopy(self._kept(), memo).items():
            object.__setattr__(new, name, value)
        return new

    def _compile(self, args: Any, kwargs: Any) -> ETraceGraph:
        """Trace the model and say what its traces leave out."""
        raise NotImplementedError

    def _key(self, args: Any, kwargs: Any) -> Key:
        return Key.of(self.model, args, kwargs)

    def _settle(self) -> bool:
        """Go on with a form that was compiled for the states as they are now; whether it is another one."""
        now, current = shapes_of_states(self.model), self._current
        fitting = [key for key in self._examples if key.states == now]
        if current is None or current.states == now or not fitting:
            return False
        alike = [key for key in fitting if key.static == current.static]
        self._current = (alike or fitting)[-1]
        return True

    def is_set_for(self, args: Any, kwargs: Any) -> bool:
        """Whether the form in use is that for these arguments and the states as they are."""
        return self._key(args, kwargs) == self._current

    def set_for(self, args: Any, kwargs: Any) -> Compiled:
        """Go on with the form for these arguments and the states as they are; it must be compiled."""
        key = self._key(args, kwargs)
        if key not in self._examples:
            raise NotCompiledError(key, self._examples)
        if key != self._current:
            old = self._current
            agree = old is not None and self._agree(self._form(old), self._form(key))
            if old is not None and not agree and old.states == key.states and not self.is_fresh():
                raise CompilationError(
                    "The learner was called with other static arguments or types than before, for which the "
                    "model keeps other traces, and nothing says what becomes of those of the steps before. "
                    "Call `learner.compile_graph` with these arguments first, outside of `jit`: traces start "
                    "from zero then."
                )
            self._current = key
            if not agree:
                self.init_etrace_state()
        return self._form(key)

    def _agree(self, old: Compiled, new: Compiled) -> bool:
        """Whether the traces of one compiled form mean the same in the other."""
        values = [jax.eval_shape(lambda c=c: self._initial_values(c)) for c in (old, new)]
        shapes = [{k: v.shape for k, v in found.items()} for found in values]
        return shapes[0] == shapes[1]

    @property
    def is_compiled(self) -> bool:
        """Whether `compile_graph` was called."""
        return bool(self._examples)

    def _compiled_now(self) -> Compiled:
        if self._current is None:
            raise CompilationError(
                "The learner's graph is not compiled yet: call `learner.compile_graph(x)` first."
            )
        return self._form(self._current)

    @property
    def graph(self) -> ETraceGraph:
        """The graph of the shapes used last."""
        return self._compiled_now().graph

    @property
    def executor(self) -> ETraceGraphExecutor:
        """The pure functions of that graph."""
        return self._compiled_now().executor

    graph_executor = executor

    @property
    def rule_kind(self) -> RuleKind:
        """What the rule is, for the verdict on exactness."""
        return RuleKind("a rule of one's own", known=False)

    @property
    def report(self) -> CompilationReport:
        """What is learned how under this rule, and what is left out."""
        from .._report.report import CompilationReport

        return CompilationReport(self.graph, self.rule_kind)

    def show_graph(self, verbose: bool = True, return_msg: bool = False) -> str | None:
        """Print what is learned how, a tree of groups, sites and parameters; or return it, or both."""
        if verbose:
            self.report.show()
        return self.report.to_str() if return_msg else None

    def _repr_html_(self) -> str | None:
        return self.report._repr_html_() if self.is_compiled else None

    # -- states ------------------------------------------------------------------------------------

    @property
    def param_states(self) -> Any:
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
        return dict(self.traces)

    @property
    def running_index(self) -> Count:
        """How many steps were taken since the last reset: a state that compares as a number."""
        return self.steps

    @property
    def lasting(self) -> list[str]:
        """The names of the rule's arrays that a reset does not set back."""
        return []

    def lasting_values(self) -> Values:
        """The rule's arrays that a reset does not set back: random feedback, the count of random signs."""
        return {k: self.traces[k].value for k in self.lasting if k in self.traces}

    def keep_lasting(self, values: Values) -> None:
        """Go on with such arrays, where they fit the shapes compiled for."""
        for key, value in values.items():
            now = self.traces[key].value
            if (value.shape, value.dtype) == (now.shape, now.dtype):
                self.traces[key].value = value
                self._zeros[key] = weakref.ref(value)

    def init_etrace_state(self) -> None:
        """Set the traces and the step counter to zero, in the shapes of the compiled graph."""
        with self._reads.paused():  # a function that is being traced then writes them before the counter
            _ = [st.value for st in self._hidden_now(self._compiled_now()).values()]
        self.steps.value = jnp.zeros((), jnp.int32)
        lasting = self.lasting_values()
        values = self._initial_values(self._compiled_now())
        self._zeros = {k: weakref.ref(v) for k, v in values.items()}
        for key in [k for k in self.traces if k not in values]:
            del self.traces[key]
        for key, value in values.items():
            if key in self.traces:
                self.traces[key].value = value
            else:
                self.traces[key] = EligibilityTrace(value)
        self.keep_lasting(lasting)

    def is_fresh(self) -> bool:
        """Whether the traces are known to be the zeros that they were set to."""
        known, lasting = {k: ref() for k, ref in self._zeros.items()}, self.lasting
        return all(known.get(k) is vars(st)["_value"] for k, st in self.traces.items() if k not in lasting)

    def _compare_states(self, *, keep: bool) -> None:
        """Warn if a hidden state was set since the last call and the traces were not: see `Seen`."""
        compiled = None if self._current is None else self._compiled.get(self._current)
        if compiled is not None and self.traces and not self._driver.is_driving:
            hidden = self._hidden_now(compiled)
            self._reads.watch(hidden)
            self._seen = self._seen or Seen(self)
            self._seen.watch(hidden)
            self._seen.before_call(self._reads, keep=keep)

    def reset_state(self, batch_size: int | None = None, *, rows: Any = None) -> None:
        """Reset the model's states, the traces and the step counter.

        A module's states are reset by its `reset_state` or, if it has none, to the values that its
        `init_state` makes; a short-term state of a module with neither (made in `__init__`) gets the value
        that it had when the learner was made. With `rows`, a boolean for each sample of the batch, only the
        states and traces of those samples are reset.
        """
        if rows is not None:
            self._reset_rows(jnp.asarray(rows))
            return
        options = {"batch_size": batch_size} if batch_size is not None else {}
        self.reset_model(**options)
        self._settle()
        if self._current is not None:
            self.init_etrace_state()

    def reset_model(self, **options: Any) -> None:
        """Reset the model's states, not the traces; warn of hidden states that nothing resets."""
        done = reset(self.model, self._start, **options)
        compiled = None if self._current is None else self._compiled.get(self._current)
        hidden = {} if compiled is None else self._hidden_now(compiled)
        left = ", ".join(f"`{name}`" for name, st in hidden.items() if id(st) not in done)
        if left:
            warn_user(
                f"A reset leaves {left} as it is, so that a sequence begins with what is left of the one "
                "before. Set it in the `reset_state` of its module. A module without `reset_state` is reset "
                "by its `init_state` or, without either, to the values when the learner was made.",
                about=self.model,
            )

    def _reset_rows(self, rows: Any) -> None:
        hidden = self._compiled_now().graph.module_info.hidden
        if rows.ndim != 1 or rows.dtype != bool:
            raise ValueError(
                f"`rows` has a boolean for each sample of the batch, not {rows.dtype}{list(rows.shape)}."
            )
        found, start = self._by_path(), initial_states(self, len(rows), hidden)
        old = {path: found[path].value for path in start}, self._values()

        def begun(rows: Any, start: Any, states: Any, traces: Values) -> Any:
            return jax.tree.map(partial(where_rows, rows), start, states), self._forget(traces, rows)

        states, traces = _meshes.in_auto_like(old, begun, rows, start, *old)
        for path, value in states.items():
            found[path].value = value
        self._store(traces)
        self.steps.value = self.steps.value  # for `Seen`: the learner has set the states itself

    def _forget(self, values: Values, rows: Any) -> Values:
        """What the rule keeps, with nothing left of some samples."""
        raise NotSupportedError(f"{type(self).__name__} does not know how samples of a batch begin anew.")

    def get_etrace_of(self, weight: Any) -> dict[str, Any]:
        """The traces of one parameter, given as its state or its path."""
        if isinstance(weight, brainstate.State):
            found = [e.path for e in self.graph.module_info.params if e.state is weight]
            if not found:
                raise ValueError("The weight is not a parameter that the compiled model uses.")
            (path,) = found
        else:
            path = tuple(weight) if isinstance(weight, tuple | list) else tuple(str(weight).split("."))
        chosen = {
            key: st.value
            for key, st in self.traces.items()
            if any(_belongs(key, t) for t in self.executor.slots if path in t.relation.param_paths)
        }
        if not chosen:
            known = f"; known: {', '.join(map(show_path, self.report.etrace_weights))}"
            reasons = {p: f": {why}" for p, why in self.report.excluded_weights.items()}
            raise ValueError(f"The parameter `{show_path(path)}` has no trace{reasons.get(path, known)}.")
        return chosen

    # -- calling -----------------------------------------------------------------------------------

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Advance the model and its traces; the derivative of the result is the online gradient.

        A bare array, or `SingleStepData`, is one step; `MultiStepData` is a window of steps.
        """
        self._given, args, kwargs = self._taken(args, kwargs)
        with self._reads.paused():
            return self._update(args, kwargs)

    def _taken(self, args: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], Any, dict[str, Any]]:
        """Of what a call is given: what is for the rule, and what is for the model."""
        return {}, args, kwargs

    def for_model(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """What the model is given, of a call."""
        return self._taken(args, kwargs)[1:]

    def _update(self, args: Any, kwargs: Any) -> Any:
        self._compare_states(keep=True)
        one_args, one_kwargs = one_step(args, kwargs)
        compiled = self.set_for(one_args, one_kwargs)
        closed = traced_again(self.model, one_args, one_kwargs)
        consts = compiled.graph.module_info.constants_of(closed)
        if consts is None:  # the same shapes, but another program: the model closes over something else now
            before, (compiled, consts) = compiled, self._other_form(closed, one_args, one_kwargs)
            if not self._agree(before, compiled):
                raise CompilationError(
                    "The model has become another program since `compile_graph`: its marked ops reach other "
                    "places in its states now, so that the traces no longer fit (a flag, an index or a time "
                    "that it closes over has changed). Call `learner.compile_graph(x)` again as the model is "
                    "now. What changes from step to step, such as an index into a buffer, must be an "
                    "argument of the model or a state."
                )
            assert self._current is not None
            self._compiled[self._current] = compiled  # so that the report is of the model as it is now
        data, stepped = time_axes(args, kwargs)
        hidden = self._hidden_now(compiled) if self.traces else {}
        self._compare_reads(hidden)
        lengths = {a.shape[0] for a, s in zip(data, stepped, strict=True) if s}
        if len(lengths) > 1:
            raise ValueError(f"The arrays of a window differ in their number of steps: {sorted(lengths)}.")
        window = tuple(stepped) if lengths else None
        outs = self._call(compiled, data, consts, window, *lengths or {1})
        return jax.tree.unflatten(compiled.graph.module_info.out_tree, outs)

    def _other_form(self, closed: Any, args: Any, kwargs: Any) -> tuple[Compiled, list[Any]]:
        """The form of the model as it is now, and what it closes over; those used last are known."""
        for form in self._forms:
            consts = form.graph.module_info.constants_of(closed)
            if consts is not None:
                return form, consts
        form = Compiled(self._compile(args, kwargs), self._reduced)
        self._forms = [form, *self._forms[: _FORMS - 1]]
        program = form.graph.module_info.program
        consts = list(program.consts.values())
        # no value of a step that is being traced outlives it
        program.consts.update((v, None) for v, c in program.consts.items() if _compat.is_tracer(c))
        return form, consts

    def _hidden_now(self, compiled: Compiled) -> dict[str, brainstate.State]:
        found = self._by_path()
        entries = {e.path: e.state for e in compiled.carried}
        hidden = {id(h.state) for h in compiled.graph.module_info.hidden}
        return {show_path(p): found.get(p, st) for p, st in entries.items() if id(st) in hidden}

    def _compare_reads(self, hidden: Mapping[str, brainstate.State]) -> None:
        """Warn if the function that is being traced has read a hidden state."""
        read = self._reads.before_call(hidden)
        if read and not self._driver.is_driving:
            warn_user(
                f"{', '.join(f'`{name}`' for name in read)} is read before the learner is called. Should the "
                "loss depend on it, what parameters did to it in earlier steps is not in the gradient. In "
                "`learner.etrace_grad` it is; or read the state inside of the model and return it.",
                about=self.model,
            )

    @time_first
    def etrace_grad(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        mask: Any = None,
        chunk_size: int | None = None,
        weights: Any = None,
        reduction: str = "mean",
        loss_output: str = "per_step",
        has_aux: bool = False,
        return_value: bool = False,
        keep_traces: bool = True,
        reset: Any = None,
        progress: bool | Report = False,
    ) -> Any:
        """Drive a whole sequence and return the accumulated online gradient, by parameter.

        `step_fn(*slices)` runs the learner once and returns the loss of that step. `chunk_size` steps are
        taken at once (None: as many as memory allows), rounded up to whole windows if the learner has a
        `window`: that changes speed and memory, never the numbers. Only for a learner that was made as in
        0.2.x, with `vjp_method='multi-step'` and no `window`, is `chunk_size` the window instead: slices have
        a leading axis of that size, `step_fn` wraps them in `MultiStepData` and returns as many losses.

        `mask` (one number a step) weighs the losses; states and traces advance at every step. With a number
        for each step and sample, `step_fn` returns a loss for each sample. 'mean' divides by the sum of the
        mask. `return_value` adds the losses to what is returned: of each step before the mask ('per_step'),
        after it ('masked'), or as one number ('scalar'); `has_aux` adds what `step_fn` returns beside the
        loss. Without `keep_traces` the traces are not advanced but set back to zero, which saves computing
        them where the sequence is all there is.

        `reset`, flags of shape (time, batch): a sample whose flag is set begins anew before that step.

        `progress` shows a bar, or calls a function with the steps done and those in all, after each chunk
        or, where those are chosen for you, about twenty times. If the call fails or is interrupted, states
        and traces are what they were before it or, with `progress` and outside of `jit`, after the last
        finished part.
        """
        self._begin_sequence(chunk_size, keep_traces)
        if not isinstance(progress, bool) and not callable(progress):
            raise TypeError(f"`progress` is True, False or a function of two numbers, not {progress!r}.")
        report = Bar() if progress is True else progress or None
        sequence = Sequence.check(
            sequences, mask, reset, report and (lambda done, total, _: report(done, total))
        )
        request = Request(sequence, has_aux, reduction, loss_output, return_value)
        weights = self._check_weights(self.param_states if weights is None else weights)
        self._compare_masks()
        try:
            before = self.steps.value
            # with a report, states are up to date after each part, and stay so
            kept = [] if report is not None else list(self.states().values())
            with unchanged_on_error(kept):
                task = Task(self, request, step_fn, weights, keep_traces)
                grads, losses, aux = self._driver.gradient(task, chunk_size)
                if _is_unchanged(before, self.steps.value):
                    raise NeverCalledError
                if not keep_traces:
                    self.init_etrace_state()
        except BaseException:
            if isinstance(report, Bar):
                report.close()
            raise
        return request.result(grads, losses, aux)

    def _begin_sequence(self, chunk_size: int | None, keep: bool) -> None:
        self._compiled_now()
        check_chunk_size(chunk_size)
        self._compare_states(keep=keep)
        if self._settle():
            self.init_etrace_state()

    def _check_weights(self, weights: Any) -> Any:
        if not isinstance(weights, Mapping):
            raise TypeError(
                "`weights` is a dictionary of states, such as `model.states(brainstate.ParamState)`, not "
                f"{type(weights).__name__}."
            )
        if not weights:
            raise ValueError("There is no weight to take the gradient of: `weights` is empty.")
        hidden = self._hidden_now(self._compiled_now()).values()
        carried = [k for k, st in weights.items() if any(st is h for h in hidden)]
        if carried:
            raise ValueError(f"`weights` has hidden states, which are not parameters: {carried}.")
        return weights

    @time_first
    def etrace_evolve(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any] | None = None,
        chunk_size: int | None = None,
        return_outputs: bool = False,
    ) -> Any:
        """Advance states and traces over a sequence, with no loss; `step_fn` is the learner by default.

        `chunk_size` is as in `etrace_grad`: how many steps are taken at once, or a window.
        """
        self._begin_sequence(chunk_size, keep=True)
        sequence = Sequence.check(sequences, None)
        call = self if step_fn is None else step_fn

        def step(*slices: Any) -> Any:
            out = call(*slices)
            return out if return_outputs else None

        self._compare_masks()
        with unchanged_on_error(list(self.states().values())):
            return self._driver.evolve(self, sequence, step, chunk_size, alone=step_fn is None)

    def _initial_values(self, compiled: Compiled) -> Values:
        """The rule's arrays at the start, by stable names."""
        raise NotImplementedError

    def _call(
        self,
        compiled: Compiled,
        args: list[Any],
        consts: list[Any],
        stepped: tuple[bool, ...] | None,
        length: int,
    ) -> list[Any]:
        """A step, or a window of `length`: read states and traces, compute, write them; the outputs' leaves.

        `stepped`: of a window, which arguments have time in front.
        """
        raise NotImplementedError

    def take_windows(self, window: int | None = None, rank: int | None = None) -> None:
        """Go back through windows of `window` steps from now on, with traces of `rank` more directions.

        None: as it is. Where that makes other traces, they begin from zero.
        """
        raise ValueError(
            f"{type(self).__name__} has neither `window` nor `rank`, which are for traces of weights: "
            "`braintrace.D_RTRL` has them."
        )

    def steps_at_once(self, chunk_size: int | None) -> int | None:
        """How many steps `step_fn` takes at once for this `chunk_size`; None: one, whatever it is."""
        return None

    def _how(
        self, step: UserStep, sequence: Sequence, chunk_size: int | None, keep: bool, *, is_window: bool
    ) -> Drive:
        """How to drive a step over a sequence."""
        return Drive(step, size=sequence.pace)

    def _compare_masks(self) -> None:
        """Warn if a state that a weight is made of is not what it was for the traces so far."""

    def _values(self) -> Values:
        return {k: st.value for k, st in self.traces.items()}

    def _by_path(self) -> dict[Path, brainstate.State]:
        """The model's states as they are now."""
        return {tuple(map(str, path)): st for path, st in self.model.states().items()}

    def _read(self, info: ModuleInfo) -> tuple[list[Any], list[list[Any]]]:
        """The leaves of the parameters and other fixed states, and of each carried state, found by path."""
        found = self._by_path()
        params: list[Any] = []
        rest: list[list[Any]] = []
        for entry in info.entries:
            leaves = jax.tree.leaves(found.get(entry.path, entry.state).value)
            params.extend(leaves) if entry.is_fixed else rest.append(leaves)
        return params, rest

    def _write(self, compiled: Compiled, leaves: list[list[Any]], values: Values, steps: int) -> None:
        """Store the new values of the carried states, of the traces and the counter."""
        found = self._by_path()
        info = compiled.graph.module_info
        trees = [t for e, t in zip(info.entries, info.state_trees, strict=True) if not e.is_fixed]
        for entry, tree, new in zip(compiled.carried, trees, leaves, strict=True):
            found.get(entry.path, entry.state).value = jax.tree.unflatten(tree, new)
        self._store(values)
        self.steps.value = self.steps.value + steps

    def _store(self, values: Values) -> None:
        for key, state in self.traces.items():
            state.value = values[key]


def _belongs(key: str, trace: Any) -> bool:
    path = ".".join(trace.relation.weight_path)
    return key == trace.key or key.startswith(f"{trace.relation.site.index}:{path}:")


def _is_unchanged(before: Any, after: Any) -> bool:
    """Whether a counter is known to be what it was."""
    return before is after or (not any(map(_compat.is_tracer, (before, after))) and bool(before == after))
