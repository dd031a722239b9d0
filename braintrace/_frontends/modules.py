"""A `brainstate` module as a `Step`, and as a pure function `step(params, carry, x) -> (carry, y)`.

`params` and `carry` of that function are dictionaries of the values of the module's states, by path.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp

from .. import _compat, _meshes, nn
from .._compiler.errors import CompilationError
from .._compiler.graph import (
    add_hidden_perturbation_from_minfo,
    find_hidden_groups_from_minfo,
    find_hidden_param_op_relations_from_minfo,
    graph_from_info,
)
from .._compiler.groups import HiddenGroup
from .._compiler.marking import mark_found
from .._compiler.module_info import ModuleInfo, read_step
from .._compiler.perturbation import HiddenPerturbation
from .._compiler.relation import HiddenParamOpRelation
from .._compiler.step import Path, Role, State, Step, show_path
from .._diagnostics.records import warn_of
from .._lines import raising_line
from .._online.arguments import split_static
from .._ops.primitive import StateGivenError
from .._report.report import ETraceGraph
from .._types import Array, Function, Options, PyTree
from .functions import Function as PureFunction
from .functions import Tree
from .pure import traced_with

Values = dict[Path, PyTree]  # by the path of a state
Mark = Literal["ops", "auto"]
Rebuild = Callable[[Sequence[Array]], tuple[Sequence[PyTree], Options]]  # from leaves to `(args, kwargs)`
# the jaxpr of a call, the structure of its output, and the states that it touches
Traced = tuple[_compat.ClosedJaxpr, jax.tree_util.PyTreeDef, tuple[brainstate.State, ...]]


def extract_module_info(
    model: brainstate.nn.Module, *args: PyTree, mark: Mark = "ops", **kwargs: PyTree
) -> ModuleInfo:
    """Trace `model(*args, **kwargs)` once, with abstract values of the shapes given.

    With `mark='auto'`, the operations that combine parameters with other values are marked.
    """
    check_mark(mark)
    step = step_of(model, args, kwargs)
    return read_step(mark_found(step) if mark == "auto" else step)


def check_mark(mark: str) -> None:
    if mark not in ("ops", "auto"):
        raise ValueError(f"`mark` is 'ops' (marks written by hand) or 'auto' (found as well), not {mark!r}.")


def step_of(
    model: brainstate.nn.Module, args: Sequence[PyTree], kwargs: Options, function: Function | None = None
) -> Step:
    """One call of a module, or of a `function` that calls it, as a step."""
    data, rebuild, _ = split_static(args, kwargs)
    closed, out_tree, states = _trace(model, rebuild, data, function)
    paths = {id(st): _as_path(path) for path, st in model.states().items()}
    return Step(
        closed_jaxpr=_meshes.without_types(closed),
        specs=tuple(map(_meshes.spec_of, closed.out_avals)),
        num_args=len(data),
        out_tree=out_tree,
        states=tuple(_state(paths.get(id(st)) or _outside(st, i), st) for i, st in enumerate(states)),
        name=type(model).__name__,
        arg_names=tuple(inspect.signature(model.update).parameters),
        model=model,
        unmarked=partial(_marked_layers, model),
    )


def traced_again(model: brainstate.nn.Module, args: Sequence[PyTree], kwargs: Options) -> _compat.ClosedJaxpr:
    """The jaxpr of a call as the model is now."""
    data, rebuild, _ = split_static(args, kwargs)
    return _meshes.without_types(_trace(model, rebuild, data)[0])


def compile_etrace_graph(
    model: brainstate.nn.Module,
    *args: PyTree,
    include_hidden_perturb: bool = True,
    mark: Mark = "ops",
    **kwargs: PyTree,
) -> ETraceGraph:
    """Trace `model(*args, **kwargs)` and find its hidden groups and the sites that feed them.

    Args:
        model: The model, with an `update` method; its states must be initialised.
        *args: Inputs of one step.
        include_hidden_perturb: Whether to derive `hidden_perturb`, the step with perturbed states, too.
        mark: 'ops' takes the marked ops of the model as sites; 'auto' also finds other uses of parameters.
        **kwargs: Keyword inputs of one step.

    Returns:
        The compiled graph.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> class Leaky(brainstate.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = brainstate.ParamState(jnp.ones((2, 3)))
    ...         self.h = brainstate.HiddenState(jnp.zeros(3))
    ...     def update(self, x):
    ...         self.h.value = 0.9 * self.h.value + braintrace.matmul(x, self.w.value)
    ...         return self.h.value
    >>> graph = compile_etrace_graph(Leaky(), jnp.ones(2))
    >>> [(r.weight_path, r.connected_hidden_paths) for r in graph.hidden_param_op_relations]
    [(('w',), [('h',)])]
    """
    info = extract_module_info(model, *args, mark=mark, **kwargs)
    graph = ETraceGraph.of(graph_from_info(info, include_hidden_perturb=include_hidden_perturb))
    warn_of(graph.diagnostics)
    return graph


def find_hidden_groups_from_module(
    model: brainstate.nn.Module, *args: PyTree, **kwargs: PyTree
) -> tuple[list[HiddenGroup], dict[Path, HiddenGroup]]:
    """The hidden groups of a model, and the group of each hidden path."""
    return find_hidden_groups_from_minfo(extract_module_info(model, *args, **kwargs))


def find_hidden_param_op_relations_from_module(
    model: brainstate.nn.Module, *args: PyTree, **kwargs: PyTree
) -> list[HiddenParamOpRelation]:
    """The relations of a model."""
    return find_hidden_param_op_relations_from_minfo(extract_module_info(model, *args, **kwargs))


def add_hidden_perturbation_in_module(
    model: brainstate.nn.Module, *args: PyTree, **kwargs: PyTree
) -> HiddenPerturbation:
    """The perturbed step of a model."""
    return add_hidden_perturbation_from_minfo(extract_module_info(model, *args, **kwargs))


def read_module(
    model: brainstate.nn.Module,
    args: Sequence[PyTree],
    kwargs: Options | None = None,
    function: Function | None = None,
) -> PureFunction:
    """Trace `model(*args, **kwargs)` as a function of the values of its states.

    Args:
        model: The module. Its states have shapes as in training; shapes may stand for arrays.
        args: The arguments of one step. `x` of the function is the only argument, or a tuple of several.
        kwargs: Arguments by name; with some, `x` is the pair `(args, kwargs)`.
        function: Called in place of the model, which it may call: a step with its loss, say.
    """
    kwargs = kwargs or {}
    step = step_of(model, args, kwargs, function)
    x = (tuple(args), kwargs) if kwargs else args[0] if len(args) == 1 else tuple(args)
    params, carry = _split(step.states)
    as_array = lambda leaf: leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
    values = lambda states: {st.path: jax.tree.map(as_array, st.handle.value) for st in states}
    trees = Tree.of("params", values(params)), Tree.of("carry", values(carry)), Tree.of("x", x)
    by_path = [sorted(some, key=lambda st: st.path) for some in (params, carry)]  # as a pytree is flattened
    untraced = [
        not isinstance(st.handle, brainstate.ShortTermState)
        for st in by_path[1]
        for _ in range(st.tree.num_leaves)
    ]
    positions = [
        tuple(i for st in some for i, owner in enumerate(step.owners) if owner is st) for some in by_path
    ]
    return PureFunction(function or model, step, *trees, tuple(untraced), *positions)


def read_states(function: PureFunction) -> tuple[Values, Values]:
    """The parameters and the carry of a module's function, as the module's states are now."""
    params, carry = _split(function.step.states)
    found = states_of(function)
    values = lambda states: {st.path: found[st.path].value for st in states}
    return values(params), values(carry)


def by_path(model: brainstate.nn.Module) -> dict[Path, brainstate.State]:
    """The model's states as they are now."""
    return {tuple(map(str, path)): st for path, st in model.states().items()}


def states_of(function: PureFunction) -> dict[Path, brainstate.State]:
    """The states of a module by path: those that it has now, which may be others than were traced."""
    now = by_path(function.step.model)
    return {st.path: now.get(st.path, st.handle) for st in function.step.states}


def _split(states: Sequence[State]) -> tuple[list[State], list[State]]:
    """The parameters, and the other states."""
    is_param = lambda st: st.role is Role.PARAMETER
    return [st for st in states if is_param(st)], [st for st in states if not is_param(st)]


def _state(path: Path, state: brainstate.State) -> State:
    short = isinstance(state, brainstate.ShortTermState) and not isinstance(state, brainstate.DelayState)
    role = Role.HIDDEN if short else Role.OTHER
    return State(
        path=path,
        role=Role.PARAMETER if isinstance(state, brainstate.ParamState) else role,
        tree=jax.tree.structure(state.value),
        kind=type(state).__name__,
        unit=_unit(state.value),
        grouped=isinstance(state, brainstate.HiddenGroupState),
        handle=state,
    )


def _unit(value: PyTree) -> str:
    unit = str(value.unit) if isinstance(value, u.Quantity) else ""
    return "" if unit == "1" else unit


def _outside(state: brainstate.State, number: int) -> Path:
    """The path of a state that the step uses and that is not part of the model."""
    if state is brainstate.random.DEFAULT:
        return ("brainstate.random.DEFAULT",)
    return "<outside the model>", f"{type(state).__name__} {number}"


def _as_path(path: object) -> Path:
    return tuple(str(p) for p in (path if isinstance(path, tuple) else (path,)))


def _trace(
    model: brainstate.nn.Module, rebuild: Rebuild, data: list[Array], function: Function | None = None
) -> Traced:
    """Trace a call of a module, or of a `function` that calls it."""

    def step(*data: Array) -> PyTree:
        args, kwargs = rebuild(data)
        return (function or model)(*args, **kwargs)

    def trace(data: list[Array]) -> Traced:
        stateful = brainstate.transform.StatefulFunction(step, return_only_write=False)
        try:
            stateful.make_jaxpr(*data)
        except Exception as e:
            cause = _cause(e)
            if said := _explained(cause, model, data):
                raise CompilationError(said) from cause
            raise cause from cause.__cause__
        out_tree = jax.tree.structure(stateful.get_out_shapes(*data)[0])
        return stateful.get_jaxpr(*data), out_tree, tuple(stateful.get_states(*data))

    return traced_with(model.states().values(), trace, data)


def _cause(error: BaseException) -> BaseException:
    """The error of a layer, without the printed layer that `brainstate.nn.Sequential` puts around it."""
    while isinstance(error, brainstate.BrainStateError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _explained(e: BaseException, model: brainstate.nn.Module, data: list[Array]) -> str | None:
    """The reason and place of a failure in a model's step; None if the error is clear by itself."""
    if isinstance(e, StateGivenError):
        return str(e)
    failed = f"The model's step failed while it was traced{_at(e, model)}"
    if isinstance(e, KeyError) and "'dt'" in str(e):
        return f"{failed}: no time step is set. Call `brainstate.environ.set(dt=1.0 * brainunit.ms)` first."
    if isinstance(e, AttributeError):
        return f"{failed}: {e}. If that is a state, call `brainstate.nn.init_all_states(model)` first."
    traced = any(map(_compat.is_tracer, jax.tree.leaves([st.value for st in model.states().values()])))
    if not isinstance(e, TypeError | ValueError) or isinstance(e, CompilationError) or traced:
        return None
    states = {
        ".".join(map(str, path)): [tuple(leaf.shape) for leaf in jax.tree.leaves(st.value)]
        for path, st in model.states().items()
        if isinstance(st, brainstate.ShortTermState)
    }
    shapes = [tuple(jnp.shape(d)) for d in data]
    return (
        f"{failed}, with arrays of shapes {shapes}: {e} Its states have the shapes {states}. Check the "
        "feature size, that the arrays are those of one step and not of a sequence, and that inputs and "
        "states agree about a batch axis (`brainstate.nn.init_all_states(model, batch_size=...)`); what is "
        "not a number or an array, such as a string, is passed to the model as it is."
    )


def _at(error: BaseException, model: brainstate.nn.Module) -> str:
    """The place where a step failed: the innermost layer, by its path, and the user's line."""
    paths = {id(node): ".".join(map(str, path)) for path, node in model.nodes().items() if path}
    called = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    layer = next((f", in `{paths[id(a)]}` ({type(a).__name__})" for a in called[::-1] if id(a) in paths), "")
    line = raising_line(error)
    return f"{layer}, at {line}" if line else layer


def _marked_layers(model: brainstate.nn.Module, params: Sequence[Path]) -> str:
    """Which layers to use instead of those that hold these parameters; nothing where there are none."""
    modules = {tuple(map(str, p)): m for p, m in model.nodes(brainstate.nn.Module).items()}
    found: dict[str, list[str]] = {}
    for path in params:
        for end in range(len(path)):  # the outermost layer: a cell, not the products inside it
            kind = type(modules.get(path[:end]))
            own = getattr(brainstate.nn, kind.__name__, None) is kind
            if own and kind.__name__ in vars(nn):
                where = f"`{show_path(path[:end])}`" if end else "the model"
                names = found.setdefault(kind.__name__, [])
                names += [where] if where not in names else []
                break
    return " ".join(
        f"Use `braintrace.nn.{name}` instead of `brainstate.nn.{name}` for {', '.join(where)}."
        for name, where in found.items()
    )
