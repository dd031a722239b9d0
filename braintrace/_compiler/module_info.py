"""Trace a model's step: its program, and which variable belongs to which state."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._compat import Literal
from .._lines import raising_line
from .._ops.primitive import StateGivenError
from .diagnostics import number, show_path
from .errors import CompilationError, NotSupportedError
from .links import Array
from .program import Atom, Node, Program, UnreadableSite, Var, read_program
from .provenance import provenance

Path = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class StateEntry:
    """One state that the step touches: where it is, and its variables before and after the step."""

    path: Path
    state: brainstate.State
    invars: tuple[Var, ...]
    outvars: tuple[Atom, ...]

    def __repr__(self) -> str:
        return f"<{type(self.state).__name__} {show_path(self.path)}: {_show(self.invars)}>"

    @property
    def is_param(self) -> bool:
        return isinstance(self.state, brainstate.ParamState)

    @property
    def written(self) -> bool:
        return any(a is not b for a, b in zip(self.invars, self.outvars, strict=True))

    @property
    def is_fixed(self) -> bool:
        """Whether it is as it was after the step: a parameter, or a state that is only read (a mask, say)."""
        return self.is_param or not self.written


@dataclass(frozen=True, eq=False)
class Hidden:
    """One array of hidden state: `num_state` numbers (along an axis of their own, if any) at each position.

    A complex array that is `split` counts as two real ones: all real parts, then all imaginary ones.
    """

    path: Path
    state: brainstate.State
    invar: Var
    outvar: Var
    axis: int | None = None  # the axis of its states; None: there is one
    split: bool = False

    def __repr__(self) -> str:
        return f"<Hidden {show_path(self.path)}: {_show([self.invar])}>"

    @property
    def varshape(self) -> tuple[int, ...]:
        shape = tuple(self.invar.aval.shape)
        return tuple(n for a, n in enumerate(shape) if a != self.axis)

    @property
    def num_state(self) -> int:
        each = 1 if self.axis is None else int(self.invar.aval.shape[self.axis])
        return 2 * each if self.split else each

    @property
    def positions(self) -> Array:
        """The position of each element of the array."""
        numbers = np.arange(np.prod(self.varshape, dtype=int)).reshape(self.varshape)
        if self.axis is not None:
            numbers = np.broadcast_to(np.expand_dims(numbers, self.axis), self.invar.aval.shape)
        return numbers

    def states_at(self, array: Any, axis: int) -> Any:
        """An array of the state's shape with the axis of its states elsewhere, made if there is none."""
        if self.axis is None:
            return jnp.expand_dims(array, axis)
        return array if self.axis == axis % array.ndim else jnp.moveaxis(array, self.axis, axis)


@dataclass(frozen=True, eq=False)
class Traced:
    """A model's step, traced once more: the program as it is now, and what it closes over."""

    closed_jaxpr: _compat.ClosedJaxpr
    consts: list[Any]


@dataclass(frozen=True, eq=False)
class ModuleInfo:
    """A model's step as a program, with the states it reads and writes."""

    model: brainstate.nn.Module
    closed_jaxpr: _compat.ClosedJaxpr
    program: Program
    entries: tuple[StateEntry, ...]
    hidden: tuple[Hidden, ...]
    arg_invars: tuple[Var, ...]
    out_atoms: tuple[Atom, ...]
    out_tree: Any
    state_trees: tuple[Any, ...]
    retrace: Callable[..., Traced | None]

    def __repr__(self) -> str:
        counts = {"parameter": self.params, "hidden state": self.hidden, "operation": self.program.nodes}
        shown = ", ".join(number(len(found), noun) for noun, found in counts.items())
        return f"<ModuleInfo of {type(self.model).__name__}: {shown}>"

    @property
    def jaxpr(self) -> Any:
        """The step as JAX traced it."""
        return _compat.parts(self.closed_jaxpr)[0]

    @property
    def num_var_out(self) -> int:
        """How many outputs of the jaxpr are the model's own; those that follow are new states."""
        return len(self.out_atoms)

    @property
    def num_var_state(self) -> int:
        return len(self.jaxpr.outvars) - self.num_var_out

    @cached_property
    def params(self) -> tuple[StateEntry, ...]:
        return tuple(e for e in self.entries if e.is_param)

    @cached_property
    def fixed(self) -> tuple[StateEntry, ...]:
        """What effective weights are made of: the parameters, and states that no step writes."""
        return tuple(e for e in self.entries if e.is_fixed)

    @cached_property
    def carried(self) -> tuple[StateEntry, ...]:
        """The states that a step hands to the next."""
        return tuple(e for e in self.entries if not e.is_fixed)

    @cached_property
    def invar_to_leaf(self) -> dict[Var, tuple[Path, int]]:
        """The parameter of each of its variables, and which of its leaves it is."""
        return {v: (e.path, i) for e in self.params for i, v in enumerate(e.invars)}

    @property
    def invar_to_weight_path(self) -> dict[Var, Path]:
        return {v: e.path for e in self.params for v in e.invars}

    @property
    def weight_path_to_invars(self) -> dict[Path, list[Var]]:
        return {e.path: list(e.invars) for e in self.params}

    @property
    def hidden_path_to_invar(self) -> dict[Path, Var]:
        return {h.path: h.invar for h in self.hidden}

    @property
    def hidden_path_to_outvar(self) -> dict[Path, Var]:
        return {h.path: h.outvar for h in self.hidden}

    @property
    def state_id_to_path(self) -> dict[int, Path]:
        return {id(e.state): e.path for e in self.entries}

    @property
    def compiled_model_states(self) -> tuple[brainstate.State, ...]:
        return tuple(e.state for e in self.entries)

    def dict(self) -> dict[str, Any]:
        names = ("closed_jaxpr", "program", "entries", "hidden", "weight_path_to_invars")
        return {name: getattr(self, name) for name in names}


def _show(variables: Sequence[Var]) -> str:
    return ", ".join(v.aval.str_short() for v in variables)


def split_static(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], Callable[..., Any], Any]:
    """The array leaves of a call, a function that puts them back, and a key for all the rest.

    What is not a number or an array (a string, a flag, a function) is static: part of the program.
    """
    leaves, tree = jax.tree.flatten((tuple(args), kwargs))
    dynamic = [_is_data(leaf) for leaf in leaves]
    static = tuple(None if d else leaf for d, leaf in zip(dynamic, leaves, strict=True))

    def rebuild(data: Sequence[Any]) -> Any:
        rest = iter(data)
        return jax.tree.unflatten(
            tree, [next(rest) if d else s for d, s in zip(dynamic, static, strict=True)]
        )

    return [leaf for leaf, d in zip(leaves, dynamic, strict=True) if d], rebuild, (tree, static)


def _is_data(leaf: Any) -> bool:
    return not isinstance(leaf, bool | str | bytes) and (
        isinstance(leaf, int | float | complex | np.generic | np.ndarray)
        or hasattr(leaf, "aval")
        or hasattr(leaf, "dtype")
    )


def extract_module_info(model: brainstate.nn.Module, *args: Any, **kwargs: Any) -> ModuleInfo:
    """Trace `model(*args, **kwargs)` once, with abstract values of the shapes given."""
    data, rebuild, _ = split_static(args, kwargs)
    closed, out_tree, states = _trace(model, rebuild, data)
    paths = {id(st): _as_path(path) for path, st in model.states().items()}
    try:
        program = read_program(closed)
    except UnreadableSite as e:
        raise _refusal(e, len(data), [(paths.get(id(st), ()), st) for st in states]) from None
    num_out = len(program.outputs) - sum(len(jax.tree.leaves(st.value)) for st in states)
    ins, outs = iter(program.inputs[len(data) :]), iter(program.outputs[num_out:])
    entries, trees = [], []
    for i, state in enumerate(states):
        leaves, tree = jax.tree.flatten(state.value)
        path = paths.get(id(state)) or _outside(state, i)
        invars = tuple(next(ins) for _ in leaves)
        outvars = tuple(next(outs) for _ in leaves)
        entries.append(StateEntry(path, state, invars, outvars))
        trees.append(tree)
    for entry in entries:
        _check_that_it_stays(entry)
    entries = _with_own_outputs(program, entries)

    def retrace(*args: Any, **kwargs: Any) -> Traced | None:
        """Trace again, since what the model closes over may have changed (a time, a step size).

        The constants as they are now, with the program brought up to date; None if it is another program.
        """
        data, rebuild, _ = split_static(args, kwargs)
        closed = _trace(model, rebuild, data)[0]
        again = read_program(closed)
        if not _same_form(program, again):
            return None
        _bring_up_to_date(program, again)
        return Traced(closed, list(again.consts.values()))

    return ModuleInfo(
        model=model,
        closed_jaxpr=closed,
        program=program,
        entries=tuple(entries),
        hidden=tuple(_hidden_states(program, entries)),
        arg_invars=program.inputs[: len(data)],
        out_atoms=program.outputs[:num_out],
        out_tree=out_tree,
        state_trees=tuple(trees),
        retrace=retrace,
    )


def _outside(state: brainstate.State, number: int) -> Path:
    """A name for a state that the step uses and the model does not hold."""
    if state is brainstate.random.DEFAULT:
        return ("brainstate.random.DEFAULT",)
    return "<outside the model>", f"{type(state).__name__} {number}"


def _check_that_it_stays(entry: StateEntry) -> None:
    """A step leaves a state in the shape and type in which it found it: else there is no next step."""
    for old, new in zip(entry.invars, entry.outvars, strict=True):
        was, now = ((tuple(v.aval.shape), v.aval.dtype) for v in (old, new))
        if was != now:
            raise CompilationError(
                f"The state `{show_path(entry.path)}` is {was[1]}{list(was[0])} before the step and "
                f"{now[1]}{list(now[0])} after it: there could be no second step. If it lacks a batch axis, "
                "initialise it with one, by `brainstate.nn.init_all_states(model, batch_size=...)`; if the "
                "input is a whole sequence, give one step of it; if its type differs, give it the one that "
                "the step computes."
            )


def _refusal(
    e: UnreadableSite, num_args: int, states: Sequence[tuple[Path, brainstate.State]]
) -> NotSupportedError:
    """An op that the compiler cannot get at, with the parameters that go where it is."""
    owners = [(path, st) for path, st in states for _ in jax.tree.leaves(st.value)]
    origin = provenance(e.program)
    behind = {v for atom in e.node.inputs for v in origin.of(atom)[0]}
    of = dict.fromkeys(
        f"`{show_path(path)}`"
        for var, (path, st) in zip(e.program.inputs[num_args:], owners, strict=False)
        if var in behind and isinstance(st, brainstate.ParamState)
    )
    names = f" of {', '.join(of)}" if of else ""
    return NotSupportedError(
        f"The marked op `{e.op.name}`{names} is inside `{e.node.primitive.name}` at {e.node.source}, which "
        "the compiler does not read. Move the op out, or use `x @ w` inside to train the weight without a "
        "trace."
    )


def _same_form(a: Program, b: Program) -> bool:
    """Whether two programs differ in numbers and functions only, not in what is computed from what.

    So the numbers must be the same by which that was found out: indices, the lengths of shifts.
    """

    def form(atom: Atom) -> tuple[Any, ...]:
        name = None if isinstance(atom, Literal) else atom.index
        return name, atom.aval.shape, atom.aval.dtype

    def same(old: Atom, value: Any) -> bool:
        if not any(old is atom for atom in a.read):
            return True
        known = old.val if isinstance(old, Literal) else a.consts[old]
        if known is None or _compat.is_tracer(known):
            return True  # not used, then
        return not _compat.is_tracer(value) and np.array_equal(np.asarray(known), np.asarray(value))

    nodes = a.nodes[: len(b.nodes)]  # `a` may have copies of outputs after them
    return (
        [form(v) for v in (*a.inputs, *a.consts)] == [form(v) for v in (*b.inputs, *b.consts)]
        and len(nodes) == len(b.nodes)
        and all(same(var, value) for var, value in zip(a.consts, b.consts.values(), strict=True))
        and all(
            n.primitive is m.primitive
            and [form(v) for v in (*n.inputs, *n.outputs)] == [form(v) for v in (*m.inputs, *m.outputs)]
            and _plain_params(n) == _plain_params(m)
            and all(same(v, w.val) for v, w in zip(n.inputs, m.inputs, strict=True) if isinstance(w, Literal))
            and len(n.inner) == len(m.inner)
            and all(_same_form(p, q) for p, q in zip(n.inner, m.inner, strict=True))
            for n, m in zip(nodes, b.nodes, strict=True)
        )
    )


def _plain_params(node: Node) -> dict[str, Any]:
    """What an operation is told beside its inputs, as far as it is plain data: not functions, not numbers."""

    def is_plain(value: Any) -> bool:
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return all(map(is_plain, value))
        return isinstance(value, int | str | None | np.dtype | enum.Enum) or "DimensionNumbers" in str(
            type(value)
        )

    return {k: v for k, v in node.params.items() if is_plain(v)}


def _bring_up_to_date(a: Program, b: Program) -> None:
    """Take over the numbers and functions of a program of the same form."""
    for var, value in zip(a.consts, b.consts.values(), strict=True):
        if not _compat.is_tracer(value):
            a.consts[var] = value
    for n, m in zip(a.nodes, b.nodes, strict=False):
        n.eqn = m.eqn
        n.inputs = tuple(
            new if isinstance(new, Literal) and not any(old is known for known in a.read) else old
            for old, new in zip(n.inputs, m.inputs, strict=True)
        )
        if n.site is not None:
            n.site.params, n.site.inputs = m.eqn.params, n.inputs
        for p, q in zip(n.inner, m.inner, strict=True):
            _bring_up_to_date(p, q)


def _as_path(path: Any) -> Path:
    return tuple(str(p) for p in (path if isinstance(path, tuple) else (path,)))


def _trace(model: Any, rebuild: Callable[..., Any], data: list[Any]) -> tuple[Any, Any, tuple[Any, ...]]:
    def step(*data: Any) -> Any:
        args, kwargs = rebuild(data)
        return model(*args, **kwargs)

    function = brainstate.transform.StatefulFunction(step, return_only_write=False)
    try:
        function.make_jaxpr(*data)
    except StateGivenError as e:
        raise CompilationError(str(e)) from e
    except AttributeError as e:
        raise CompilationError(
            f"The model's step failed while it was traced{_at(e)}: {e}. If the missing attribute is a state, "
            "call `brainstate.nn.init_all_states(model)` first."
        ) from e
    except (TypeError, ValueError) as e:
        if isinstance(e, CompilationError) or any(_is_traced(st.value) for st in model.states().values()):
            raise
        states = {
            ".".join(map(str, path)): [tuple(leaf.shape) for leaf in jax.tree.leaves(st.value)]
            for path, st in model.states().items()
            if isinstance(st, brainstate.ShortTermState)
        }
        shapes = [tuple(jnp.shape(d)) for d in data]
        raise CompilationError(
            f"The model's step failed while it was traced with arrays of shapes {shapes}{_at(e)}: {e} Its "
            f"states have the shapes {states}. Check the feature size, that the arrays are those of one step "
            "and not of a sequence, and that inputs and states agree about a batch axis "
            "(`brainstate.nn.init_all_states(model, batch_size=...)`); what is not a number or an array, "
            "such as a string, is passed to the model as it is."
        ) from e
    closed = function.get_jaxpr(*data)
    out_tree = jax.tree.structure(function.get_out_shapes(*data)[0])
    return closed, out_tree, tuple(function.get_states(*data))


def _at(error: Exception) -> str:
    line = raising_line(error)
    return f", at {line}" if line else ""


def _is_traced(value: Any) -> bool:
    return any(_compat.is_tracer(leaf) for leaf in jax.tree.leaves(value))


def _hidden_states(program: Program, entries: Sequence[StateEntry]) -> list[Hidden]:
    used = {a for node in program.nodes for a in node.inputs if isinstance(a, Var)}
    used.update(a for a in program.outputs if isinstance(a, Var))
    return [
        h
        for entry in entries
        if isinstance(entry.state, brainstate.ShortTermState)
        and not isinstance(entry.state, brainstate.DelayState)
        for h in hidden_arrays(entry)
        if h.invar in used
    ]


def hidden_arrays(entry: StateEntry) -> list[Hidden]:
    """The floating arrays of a state that the step writes, as hidden ones."""
    keys = [k for k, _ in jax.tree_util.tree_flatten_with_path(entry.state.value)[0]]
    found = []
    for key, invar, outvar in zip(keys, entry.invars, entry.outvars, strict=True):
        if not jnp.issubdtype(invar.aval.dtype, jnp.inexact) or outvar is invar:
            continue
        name = jax.tree_util.keystr(key).strip(".[]'") if len(keys) > 1 else ""
        path = (*entry.path, name) if name else entry.path
        assert isinstance(outvar, Var)
        grouped = isinstance(entry.state, brainstate.HiddenGroupState)
        found.append(Hidden(path, entry.state, invar, outvar, invar.aval.ndim - 1 if grouped else None))
    return found


def _with_own_outputs(program: Program, entries: Sequence[StateEntry]) -> list[StateEntry]:
    """Give every written state an output variable that is no other state's and no input's.

    `self.a.value = self.b.value` makes two states share one; a copy of it tells them apart.
    """
    taken: set[Var] = set(program.inputs)
    replaced = []
    for entry in entries:
        outvars: list[Atom] = []
        for invar, atom in zip(entry.invars, entry.outvars, strict=True):
            if atom is not invar and (isinstance(atom, Literal) or atom in taken):
                atom = _copy(program, atom)
            if isinstance(atom, Var):
                taken.add(atom)
            outvars.append(atom)
        replaced.append(StateEntry(entry.path, entry.state, entry.invars, tuple(outvars)))
    return replaced


def _copy(program: Program, atom: Atom) -> Var:
    struct = jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
    (eqn,) = _compat.parts(jax.make_jaxpr(jax.lax.optimization_barrier)(struct))[0].eqns
    last = max((v.index for node in program.nodes for v in node.outputs), default=len(program.inputs))
    out = Var(atom.aval, max(last, max((v.index for v in program.inputs), default=0)) + 1)
    program.nodes.append(Node(eqn, (atom,), (out,)))
    return out
