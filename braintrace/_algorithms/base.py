"""The learner: the one object that keeps hidden states and traces between calls.

All arithmetic is the executor's and the rule's; this file reads values from `brainstate` states, calls
pure functions and writes the results back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._compiler import CompilationError, CompilationReport, ETraceGraph, compile_etrace_graph
from .._compiler.diagnostics import show_path
from .._compiler.module_info import Path, StateEntry, split_static
from .._executor.executor import ETraceGraphExecutor, Local, StepInputs, pull_back
from .data import MultiStepData, SingleStepData
from .rule import Rule, Values


class EligibilityTrace(brainstate.ShortTermState):  # type: ignore[misc]
    """A state that holds an eligibility trace."""


@dataclass(eq=False)
class Compiled:
    """One compiled form of a model: its graph and the functions made from it."""

    graph: ETraceGraph

    @cached_property
    def executor(self) -> ETraceGraphExecutor:
        return ETraceGraphExecutor(self.graph)

    @property
    def carried(self) -> list[StateEntry]:
        """The states that are not parameters."""
        return [e for e in self.graph.module_info.entries if not e.is_param]


class ETraceAlgorithm(brainstate.nn.Module):  # type: ignore[misc]
    """A model that learns online: what every learner has, whatever its rule.

    A rule of one's own is a subclass with `_step` (one step) and `init_etrace_state`.
    """

    def __init__(self, model: brainstate.nn.Module, *, name: str | None = None) -> None:
        super().__init__()
        if not callable(getattr(model, "update", None)):
            raise TypeError(f"A learner takes a `brainstate.nn.Module` with an `update` method, not {type(model)}.")
        if name is not None:
            self._name = name
        self.model = model
        self.traces: dict[str, EligibilityTrace] = {}
        self.steps = brainstate.ShortTermState(jnp.zeros((), jnp.int32))
        self._compiled: dict[Any, Compiled] = {}
        self._current: Any = None

    # -- compiling ---------------------------------------------------------------------------------

    def compile_graph(self, *args: Any, **kwargs: Any) -> None:
        """Trace the model for arguments of these shapes; free if that was done before."""
        args, kwargs = _one_step(args, kwargs)
        key = self._key(args, kwargs)
        if key not in self._compiled:
            self._compiled[key] = Compiled(compile_etrace_graph(self.model, *args, **kwargs))
        self._current = key
        self.init_etrace_state()

    def _key(self, args: Any, kwargs: Any) -> Any:
        data, _, static = split_static(args, kwargs)
        states = tuple(
            (".".join(map(str, path)), *map(_shape, jax.tree.leaves(st.value)))
            for path, st in self.model.states().items()
        )
        try:
            hash(static)
        except TypeError:
            static = (static[0], repr(static[1]))
        return (*map(_shape, data), static, states)

    def _lookup(self, args: Any, kwargs: Any) -> Compiled:
        key = self._key(args, kwargs)
        if key not in self._compiled:
            raise CompilationError(self._why_missing(args, kwargs))
        if key != self._current:
            self._current = key
            self.init_etrace_state()
        return self._compiled[key]

    def _why_missing(self, args: Any, kwargs: Any) -> str:
        shapes = [s for s, _ in map(_shape, split_static(args, kwargs)[0])]
        if not self._compiled:
            return (
                "The learner's graph is not compiled yet. Call `learner.compile_graph(x)` first, with one "
                f"step's input, after the states are initialised. This call has inputs of shapes {shapes}."
            )
        known = [[s for s, _ in key[:-2]] for key in self._compiled]
        states = {show_path(h.path): h.invar.aval.shape for h in self.graph.module_info.hidden}
        return (
            f"The learner is not compiled for inputs of shapes {shapes} with the states as they are now; it is "
            f"compiled for inputs {known}, with states {states}. Check the batch and feature sizes; for "
            "another batch size, initialise the states for it and call `learner.compile_graph(x)` again."
        )

    @property
    def is_compiled(self) -> bool:
        return bool(self._compiled)

    def _compiled_now(self) -> Compiled:
        if self._current is None:
            raise CompilationError(
                "The learner's graph is not compiled yet: call `learner.compile_graph(x)` first."
            )
        return self._compiled[self._current]

    @property
    def graph(self) -> ETraceGraph:
        """The graph of the shapes used last."""
        return self._compiled_now().graph

    @property
    def executor(self) -> ETraceGraphExecutor:
        return self._compiled_now().executor

    @property
    def report(self) -> CompilationReport:
        return CompilationReport(self.graph)

    def show_graph(self) -> None:
        """Print what is learned how."""
        self.report.show()

    # -- states ------------------------------------------------------------------------------------

    @property
    def param_states(self) -> Any:
        return self.model.states(brainstate.ParamState)

    @property
    def hidden_states(self) -> dict[Path, brainstate.State]:
        return {h.path: h.state for h in self.graph.module_info.hidden}

    @property
    def other_states(self) -> dict[Path, brainstate.State]:
        hidden = {id(h.state) for h in self.graph.module_info.hidden}
        return {e.path: e.state for e in self._compiled_now().carried if id(e.state) not in hidden}

    @property
    def etrace_states(self) -> dict[str, EligibilityTrace]:
        return dict(self.traces)

    @property
    def running_index(self) -> Any:
        """How many steps were taken since the last reset."""
        return self.steps.value

    def init_etrace_state(self, *args: Any, **kwargs: Any) -> None:
        """Set the traces and the step counter to zero, in the shapes of the compiled graph."""
        self.steps.value = jnp.zeros((), jnp.int32)
        values = self._initial_values(self._compiled_now())
        for key in [k for k in self.traces if k not in values]:
            del self.traces[key]
        for key, value in values.items():
            if key in self.traces:
                self.traces[key].value = value
            else:
                self.traces[key] = EligibilityTrace(value)

    def reset_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Reset the model's states, the traces and the step counter."""
        brainstate.nn.reset_all_states(self.model, **({"batch_size": batch_size} if batch_size is not None else {}))
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
        mine = {
            t.key
            for t in self.executor.traces
            if path in t.relation.trainable_paths.values()
        }
        prefixes = {k.rsplit(":", 1)[0].rsplit(":", 0)[0] for k in mine}
        del prefixes
        chosen = {
            key: st.value
            for key, st in self.traces.items()
            if any(_belongs(key, t) for t in self.executor.traces if path in t.relation.trainable_paths.values())
        }
        if not chosen:
            why = self.report.excluded_weights.get(path)
            raise ValueError(
                f"The parameter `{show_path(path)}` has no trace"
                + (f": {why}." if why else "; known: " + ", ".join(map(show_path, self.report.etrace_weights)) + ".")
            )
        return chosen

    def _initial_values(self, compiled: Compiled) -> Values:
        raise NotImplementedError

    # -- calling -----------------------------------------------------------------------------------

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Advance the model and its traces; its gradient is the online one."""
        raise NotImplementedError

    def _read(self, compiled: Compiled) -> list[list[Any]]:
        """The leaves of every state that the program touches, found by path."""
        found = {tuple(map(str, p)): st for p, st in self.model.states().items()}
        return [
            jax.tree.leaves(found.get(e.path, e.state).value) for e in compiled.graph.module_info.entries
        ]

    def _write(self, compiled: Compiled, leaves: Sequence[Sequence[Any]]) -> None:
        """Store the new values of the states that are not parameters."""
        found = {tuple(map(str, p)): st for p, st in self.model.states().items()}
        info = compiled.graph.module_info
        trees = [t for e, t in zip(info.entries, info.state_trees, strict=True) if not e.is_param]
        for entry, tree, new in zip(compiled.carried, trees, leaves, strict=True):
            if entry.written:
                found.get(entry.path, entry.state).value = jax.tree.unflatten(tree, new)


def _belongs(key: str, trace: Any) -> bool:
    path = ".".join(trace.relation.weight_path)
    return key == trace.key or key.startswith(f"{trace.relation.site.index}:{path}:")


def _shape(leaf: Any) -> tuple[tuple[int, ...], str]:
    return tuple(jnp.shape(leaf)), str(jnp.result_type(leaf))


def _one_step(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments of a single step: the first of a window, the data of `SingleStepData`."""

    def first(arg: Any) -> Any:
        if isinstance(arg, MultiStepData):
            return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) if hasattr(a, "shape") else a, arg.data)
        return arg.data if isinstance(arg, SingleStepData) else arg

    return tuple(first(a) for a in args), {k: first(v) for k, v in kwargs.items()}
