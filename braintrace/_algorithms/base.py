"""The learner: the one object that keeps hidden states and traces between calls.

All arithmetic is the executor's and the rule's; this file reads values from `brainstate` states, calls
pure functions and writes the results back.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .. import _compat
from .._compiler import CompilationError, CompilationReport, ETraceGraph
from .._compiler.diagnostics import show_path
from .._compiler.exactness import RuleKind
from .._compiler.module_info import ModuleInfo, Path
from .._executor.executor import ETraceGraphExecutor
from . import pickling
from .data import one_step, time_axes
from .drive import Drive
from .forms import Compiled, Key, NotCompiledError, shapes_of_states, time_first
from .progress import Bar, Progress, Report, unchanged_on_error
from .rule import Values
from .sequence import NeverCalledError, Sequence
from .watch import Watch


class EligibilityTrace(brainstate.ShortTermState):
    """A state that holds an eligibility trace."""


class ETraceAlgorithm(brainstate.nn.Module):
    """A model that learns online: what every learner has, whatever its rule.

    A rule of one's own is a subclass with `_step` (one step) and `init_etrace_state`.
    """

    rule_kind = RuleKind("a rule of one's own", known=False)  # for the verdict on exactness

    def __init__(self, model: brainstate.nn.Module, *, name: str | None = None) -> None:
        super().__init__()
        if isinstance(model, type) or not callable(getattr(model, "update", None)):
            what = f"the class {model.__name__} itself" if isinstance(model, type) else str(type(model))
            raise TypeError(f"A learner takes a `brainstate.nn.Module` with an `update` method, not {what}.")
        if name is not None:
            self._name = name
        self.model = model
        self.traces: dict[str, EligibilityTrace] = {}
        self.steps = brainstate.ShortTermState(jnp.zeros((), jnp.int32))
        self._compiled: dict[Key, Compiled] = {}
        self._examples: dict[Key, Any] = {}  # what each was compiled with
        self._current: Key | None = None
        self._traced_states: list[int] = []  # those of the model when the traces were made
        self._zeros: dict[str, weakref.ref[Any]] = {}
        self._watch: Watch | None = None

    def __pretty_repr_item__(self, name: str, value: Any) -> Any:
        return None if name.startswith("_") else (name, value)

    # -- compiling ---------------------------------------------------------------------------------

    def compile_graph(self, *args: Any, **kwargs: Any) -> None:
        """Trace the model for arguments of these shapes; free if that was done before."""
        args, kwargs = one_step(args, kwargs)
        key = self._key(args, kwargs)
        if key not in self._examples:
            self._compiled[key] = Compiled(self._compile(args, kwargs), self._reduced)
            self._examples[key] = jax.tree.map(_struct, (args, kwargs))
        self._current = key
        states = [id(st) for st in self.model.states().values()]
        if states != self._traced_states:  # else a jitted step knows the traces as they are
            self.traces = {}  # new states, which `vmap_new_states` around this call sees
        self._traced_states = states
        self.init_etrace_state()

    def _adopt(self, graph: ETraceGraph, args: Any) -> Compiled:
        """Take over a graph that was compiled for these arguments; the traces are the caller's affair."""
        key = self._key(args, {})
        self._compiled[key] = Compiled(graph, self._reduced)
        self._examples[key], self._current = (args, {}), key
        return self._compiled[key]

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

    def __reduce__(self) -> Any:
        return pickling.restore, (type(self), pickling.dumps({**vars(self), "_compiled": {}, "_zeros": {}}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        for state in self.states().values():
            memo[id(state)] = pickling.copy_state(state)
        for name, value in copy.deepcopy({**vars(self), "_compiled": {}, "_zeros": {}}, memo).items():
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

    def _lookup(self, args: Any, kwargs: Any) -> Compiled:
        key = self._key(args, kwargs)
        if key not in self._examples:
            raise NotCompiledError(key, self._examples)
        if key != self._current:
            old = self._current
            agree = old is not None and self._agree(self._form(old), self._form(key))
            if old is not None and not agree and old.states == key.states and not self._is_fresh():
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
        shapes = [{k: v.shape for k, v in self._initial_values(c).items()} for c in (old, new)]
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

    @property
    def report(self) -> CompilationReport:
        """What is learned how under this rule, and what is left out."""
        return CompilationReport(self.graph, self.rule_kind)

    def show_graph(self) -> None:
        """Print what is learned how: a tree of groups, sites and parameters."""
        self.report.show()

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
    def running_index(self) -> Any:
        """How many steps were taken since the last reset."""
        return self.steps.value

    def init_etrace_state(self) -> None:
        """Set the traces and the step counter to zero, in the shapes of the compiled graph."""
        self.steps.value = jnp.zeros((), jnp.int32)
        values = self._initial_values(self._compiled_now())
        self._zeros = {k: weakref.ref(v) for k, v in values.items()}
        for key in [k for k in self.traces if k not in values]:
            del self.traces[key]
        for key, value in values.items():
            if key in self.traces:
                self.traces[key].value = value
            else:
                self.traces[key] = EligibilityTrace(value)

    def _is_fresh(self) -> bool:
        """Whether the traces are known to be the zeros that they were set to."""
        known = {k: ref() for k, ref in self._zeros.items()}
        return all(known.get(k) is st.value for k, st in self.traces.items())

    def reset_state(self, batch_size: int | None = None) -> None:
        """Reset the model's states, the traces and the step counter.

        A module that has no `reset_state` of its own gets the values that its `init_state` makes.
        """
        options = {"batch_size": batch_size} if batch_size is not None else {}
        brainstate.nn.reset_all_states(self.model, **options)
        for module in self.model.nodes(brainstate.nn.Module).values():
            _reset_by_init(module, **options)
        self._settle()
        if self._current is not None:
            self.init_etrace_state()

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
            if any(_belongs(key, t) for t in self.executor.traces if path in t.relation.param_paths)
        }
        if not chosen:
            why = self.report.excluded_weights.get(path)
            raise ValueError(
                f"The parameter `{show_path(path)}` has no trace"
                + (
                    f": {why}."
                    if why
                    else "; known: " + ", ".join(map(show_path, self.report.etrace_weights)) + "."
                )
            )
        return chosen

    # -- calling -----------------------------------------------------------------------------------

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Advance the model and its traces; the derivative of the result is the online gradient.

        A bare array, or `SingleStepData`, is one step; `MultiStepData` is a window of steps.
        """
        one_args, one_kwargs = one_step(args, kwargs)
        compiled = self._lookup(one_args, one_kwargs)
        consts = compiled.graph.module_info.retrace(*one_args, **one_kwargs)
        if consts is None:  # the same shapes, but another program: the model closes over something else now
            before, compiled = compiled, Compiled(self._compile(one_args, one_kwargs), self._reduced)
            if not self._agree(before, compiled):
                raise CompilationError(
                    "The model has become another program since `compile_graph`: its marked ops reach other "
                    "places in its states now, so that the traces no longer fit (a flag, an index or a time "
                    "that it closes over has changed). Call `learner.compile_graph(x)` again as the model is "
                    "now. What changes from step to step, such as an index into a buffer, must be an "
                    "argument of the model or a state."
                )
            program = compiled.graph.module_info.program
            consts = list(program.consts.values())
            program.consts.update((v, None) for v, c in program.consts.items() if _compat.is_tracer(c))
            assert self._current is not None
            self._compiled[self._current] = compiled  # so that the report is of the model as it is now
        data, stepped = time_axes(args, kwargs)
        if self._watch is not None:
            self._watch.compare()
        if not any(stepped):
            outs = self._step(compiled, data, consts)
        else:
            lengths = {a.shape[0] for a, s in zip(data, stepped, strict=True) if s}
            if len(lengths) > 1:
                raise ValueError(
                    f"The arrays of a window differ in their number of steps: {sorted(lengths)}."
                )
            outs = self._window(compiled, data, stepped, lengths.pop(), consts)
        if self._watch is not None:
            self._watch.settle()
        return jax.tree.unflatten(compiled.graph.module_info.out_tree, outs)

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
        progress: bool | Report = False,
    ) -> Any:
        """Drive a whole sequence and return the accumulated online gradient, by parameter.

        `step_fn(*slices)` runs the learner once and returns the loss of that step. `chunk_size` steps are
        taken at once (None: as many as memory allows): that changes speed and memory, never the numbers.
        With a multi-step learner it is the window instead: slices have a leading axis of `chunk_size`,
        `step_fn` wraps them in `MultiStepData` and returns as many losses.

        `mask` (one number a step) weighs the losses; states and traces advance at every step. 'mean'
        divides by the sum of the mask. `return_value` adds the losses to what is returned: of each step
        before the mask ('per_step'), after it ('masked'), or as one number ('scalar'); `has_aux` adds
        what `step_fn` returns beside the loss. Without `keep_traces` the traces are not advanced but set
        back to zero, which saves computing them where the sequence is all there is.

        `progress` shows a bar, or calls a function with the steps done and those in all, after each chunk
        or, where those are chosen for you, about twenty times. If the call fails or is interrupted, states
        and traces are what they were before it or, with `progress` and outside of `jit`, after the last
        finished part.
        """
        self._compiled_now()
        if self._settle():
            self.init_etrace_state()
        if not isinstance(progress, bool) and not callable(progress):
            raise TypeError(f"`progress` is True, False or a function of two numbers, not {progress!r}.")
        states = list(self.states().values())
        report = Bar() if progress is True else progress or None
        found = self._by_path()
        hidden = {show_path(p): found.get(p, st) for p, st in self.hidden_states.items()}
        watched = {**hidden, **self._masks()} if self.traces else {}
        watch = Watch(watched, list(self.traces.values()), self.model)
        drive = Drive(
            sequence=Sequence.check(sequences, mask, Progress(report, states) if report else None),
            step_fn=watch.around(step_fn),
            weights=self.param_states if weights is None else weights,
            chunk_size=chunk_size,
            has_aux=has_aux,
            keep=keep_traces,
            reduction=reduction,
            loss_output=loss_output,
            return_value=return_value,
        )
        carried = [k for k, st in drive.weights.items() if any(st is h for h in hidden.values())]
        if carried:
            raise ValueError(f"`weights` has hidden states, which are not parameters: {carried}.")
        around, self._watch = self._watch, watch
        try:
            with contextlib.nullcontext() if report else unchanged_on_error(states):
                before = self.steps.value
                grads, (losses, aux) = self._drive(drive)
                if _is_unchanged(before, self.steps.value):
                    raise NeverCalledError
                if not keep_traces:
                    self.init_etrace_state()
        except BaseException:
            if isinstance(report, Bar):
                report.close()
            raise
        finally:
            self._watch = around
        return drive.result(grads, losses, aux)

    @time_first
    def etrace_evolve(
        self, *sequences: Any, step_fn: Callable[..., Any] | None = None, return_outputs: bool = False
    ) -> Any:
        """Advance states and traces over a sequence, with no loss; `step_fn` is the learner by default."""
        self._compiled_now()
        if self._settle():
            self.init_etrace_state()
        sequence = Sequence.check(sequences, None)
        call = self if step_fn is None else step_fn

        def step(*slices: Any) -> Any:
            out = call(*slices)
            return out if return_outputs else None

        with unchanged_on_error(list(self.states().values())):
            return self._evolve(sequence, step)

    def _evolve(self, sequence: Sequence, step: Any) -> Any:
        """Take all steps of a sequence, and return what each of them does."""
        return brainstate.transform.for_loop(lambda slices: step(*slices), sequence.arrays)

    def _drive(self, drive: Drive) -> tuple[Any, Any]:
        """The summed gradients of a sequence, and the losses and other outputs of every step."""
        return drive.in_turn()

    def _initial_values(self, compiled: Compiled) -> Values:
        """The rule's arrays at the start, by stable names."""
        raise NotImplementedError

    def _step(self, compiled: Compiled, args: list[Any], consts: list[Any]) -> list[Any]:
        """One step: read states and traces, compute, write them back; the outputs' leaves."""
        raise NotImplementedError

    def _window(
        self, compiled: Compiled, args: list[Any], stepped: list[bool], length: int, consts: list[Any]
    ) -> list[Any]:
        """Several steps at once."""
        raise NotImplementedError

    def _masks(self) -> dict[str, brainstate.State]:
        """The states that traced weights are made of, beside the parameters."""
        return {}

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
        for key, value in values.items():
            self.traces[key].value = value


def _reset_by_init(module: brainstate.nn.Module, **options: Any) -> None:
    kind, plain = type(module), brainstate.nn.Module
    if kind.reset_state is not plain.reset_state or kind.init_state is plain.init_state:
        return
    states = {name: st for name, st in vars(module).items() if isinstance(st, brainstate.State)}
    module.init_state(**options)
    for name, state in states.items():
        state.value = getattr(module, name).value
        setattr(module, name, state)  # the same object as before: others may hold it


def _belongs(key: str, trace: Any) -> bool:
    path = ".".join(trace.relation.weight_path)
    return key == trace.key or key.startswith(f"{trace.relation.site.index}:{path}:")


def _struct(leaf: Any) -> Any:
    """An array's shape and type; anything else as it is."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf


def _is_unchanged(before: Any, after: Any) -> bool:
    """Whether a counter is known to be what it was."""
    return before is after or (not any(map(_compat.is_tracer, (before, after))) and bool(before == after))
