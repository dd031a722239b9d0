"""A step as a program, with the variables of each state before and after the step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._compat import Literal
from .._types import Array, Handle, Model, NumPyArray, Options
from .errors import CompilationError, NotSupportedError
from .fingerprint import fingerprint
from .links import numbered
from .marking import mark_found
from .packed_states import Part, insert, split_states, take_apart
from .program import Atom, Program, UnreadableSite, Var, read_program
from .provenance import provenance
from .slices import behind
from .step import Path, Role, State, Step, show_path, show_paths


@dataclass(frozen=True, eq=False)
class StateEntry:
    """One state of the step, with its variables before and after the step."""

    of: State
    invars: tuple[Var, ...]
    outvars: tuple[Atom, ...]

    def __repr__(self) -> str:
        return f"<{self.of.kind} {show_path(self.path)}: {_show(self.invars)}>"

    @property
    def path(self) -> Path:
        return self.of.path

    @property
    def state(self) -> Handle:
        """The front end's object."""
        return self.of.handle

    @property
    def is_param(self) -> bool:
        return self.of.role is Role.PARAMETER

    @property
    def written(self) -> bool:
        return any(a is not b for a, b in zip(self.invars, self.outvars, strict=True))

    @property
    def is_fixed(self) -> bool:
        """Whether the step leaves it unchanged: a parameter, or a state that is only read (a mask, say)."""
        return self.is_param or not self.written


@dataclass(frozen=True, eq=False)
class Hidden:
    """One array of hidden state, with `num_state` states (along `axis`, if it is given) at each position.

    A complex array with `split` counts as two real ones: all real parts, then all imaginary parts.
    """

    path: Path
    state: Handle
    invar: Var
    outvar: Var
    axis: int | None = None  # the axis that enumerates its states; None if there is one
    split: bool = False
    unit: str = ""
    coefficients: tuple[Atom, ...] = ()  # of a filter: variables that must be equal at every step
    part: Part | None = None  # if it is a part of a packed array

    def __repr__(self) -> str:
        return f"<Hidden {show_path(self.path)}: {_show([self.invar])}>"

    @property
    def leaf(self) -> Var:
        """The carried array that it is or is a part of."""
        return self.invar if self.part is None else self.part.leaf

    def of_leaf(self, array: Array) -> Array:
        """Slice its elements from an array shaped as the leaf."""
        return array if self.part is None else self.part.of(array)

    def in_leaf(self, array: Array) -> Array:
        """The transpose of `of_leaf`: an array shaped as the leaf, zero elsewhere."""
        whole: Array = jax.linear_transpose(self.of_leaf, self.leaf.aval)(array)[0]
        return whole

    @property
    def varshape(self) -> tuple[int, ...]:
        shape = tuple(self.invar.aval.shape)
        return tuple(n for a, n in enumerate(shape) if a != self.axis)

    @property
    def num_state(self) -> int:
        each = 1 if self.axis is None else int(self.invar.aval.shape[self.axis])
        return 2 * each if self.split else each

    @property
    def positions(self) -> NumPyArray:
        """The position of each element of the array."""
        numbers = numbered(self.varshape)
        if self.axis is not None:
            numbers = np.broadcast_to(np.expand_dims(numbers, self.axis), self.invar.aval.shape)
        return numbers

    def states_at(self, array: Array, axis: int) -> Array:
        """Move the axis of states of an array shaped as the state to `axis`; add one if there is none."""
        if self.axis is None:
            return jnp.expand_dims(array, axis)
        return array if self.axis == axis % array.ndim else jnp.moveaxis(array, self.axis, axis)


@dataclass(frozen=True, eq=False)
class ModuleInfo:
    """A model's step as a program, with the states it reads and writes."""

    step: Step
    program: Program
    entries: tuple[StateEntry, ...]
    hidden: tuple[Hidden, ...]

    @property
    def model(self) -> Model:
        """The front end's object."""
        return self.step.model

    @property
    def closed_jaxpr(self) -> _compat.ClosedJaxpr:
        return self.step.closed_jaxpr

    @property
    def arg_invars(self) -> tuple[Var, ...]:
        return self.program.inputs[: self.step.num_args]

    @property
    def out_atoms(self) -> tuple[Atom, ...]:
        """The outputs of the step, without the new states."""
        num_states = sum(len(e.invars) for e in self.entries)
        return self.program.outputs[: len(self.program.outputs) - num_states]

    @property
    def out_tree(self) -> jax.tree_util.PyTreeDef:
        return self.step.out_tree

    @cached_property
    def fingerprint(self) -> Hashable:
        return fingerprint(self.closed_jaxpr)

    def constants_of(self, closed: _compat.ClosedJaxpr) -> list[Array] | None:
        """The constants (a time, a step size) of the step traced again; None if it is another program.

        Constants are inputs of a program, except for those that an analysis has used (indices, shifts).
        """
        if self.step.found:
            closed = mark_found(replace(self.step, closed_jaxpr=closed)).closed_jaxpr
        if fingerprint(closed) != self.fingerprint:
            return None
        consts = list(read_program(closed).consts.values())
        pairs = zip(self.program.consts.items(), consts, strict=True)
        read = [(known, now) for (var, known), now in pairs if any(var is atom for atom in self.program.read)]
        return consts if all(_is_same(*pair) for pair in read) else None

    def __repr__(self) -> str:
        counts = {"parameter": self.params, "hidden state": self.hidden, "operation": self.program.nodes}
        shown = ", ".join(f"{len(found)} {noun}{'s' * (len(found) != 1)}" for noun, found in counts.items())
        return f"<ModuleInfo of {self.step.name}: {shown}>"

    @property
    def jaxpr(self) -> _compat.Jaxpr:
        """The jaxpr of the step."""
        return _compat.parts(self.closed_jaxpr)[0]

    @cached_property
    def marked(self) -> ModuleInfo:
        """The step with a mark at every use of a parameter."""
        from .marking import mark_uses

        return self if self.step.found else read_step(mark_uses(self.step))

    @cached_property
    def params(self) -> tuple[StateEntry, ...]:
        return tuple(e for e in self.entries if e.is_param)

    @cached_property
    def fixed(self) -> tuple[StateEntry, ...]:
        """The states that effective weights may depend on: parameters, and states that no step writes."""
        return tuple(e for e in self.entries if e.is_fixed)

    @cached_property
    def carried(self) -> tuple[StateEntry, ...]:
        """The states that are carried from step to step."""
        return tuple(e for e in self.entries if not e.is_fixed)

    @cached_property
    def param_invars(self) -> list[Var]:
        return [v for e in self.params for v in e.invars]

    @cached_property
    def fixed_invars(self) -> list[Var]:
        return [v for e in self.fixed for v in e.invars]

    @cached_property
    def carried_invars(self) -> list[Var]:
        return [v for e in self.carried for v in e.invars]

    @cached_property
    def invar_to_leaf(self) -> dict[Var, tuple[Path, int]]:
        """The path and the leaf index of each parameter variable."""
        return {v: (e.path, i) for e in self.params for i, v in enumerate(e.invars)}

    @property
    def weight_path_to_invars(self) -> dict[Path, list[Var]]:
        return {e.path: list(e.invars) for e in self.params}

    @property
    def hidden_path_to_invar(self) -> dict[Path, Var]:
        return {h.path: h.invar for h in self.hidden}

    def dict(self) -> Options:
        names = ("closed_jaxpr", "program", "entries", "hidden", "weight_path_to_invars")
        return {name: getattr(self, name) for name in names}


def _show(variables: Sequence[Var]) -> str:
    return ", ".join(v.aval.str_short() for v in variables)


def read_step(step: Step) -> ModuleInfo:
    """Read a step as a program with its states."""
    try:
        program = take_apart(read_program(step.closed_jaxpr))
    except UnreadableSite as e:
        raise _refusal(e, step) from None
    hidden = [e for e in _entries(step, program) if e.of.role is Role.HIDDEN and not e.of.grouped]
    pairs = [pair for e in hidden for pair in zip(e.invars, e.outvars, strict=True)]
    states = {old: new for old, new in pairs if old.inexact and isinstance(new, Var)}
    program, parts = split_states(program, states)
    entries = _with_own_outputs(program, _entries(step, program))
    return ModuleInfo(step, program, tuple(entries), tuple(_hidden_states(program, entries, parts)))


def _entries(step: Step, program: Program) -> list[StateEntry]:
    num_out = len(program.outputs) - len(step.owners)
    ins, outs = iter(program.inputs[step.num_args :]), iter(program.outputs[num_out:])
    entries = []
    for state in step.states:
        num = range(state.tree.num_leaves)
        entries.append(StateEntry(state, tuple(next(ins) for _ in num), tuple(next(outs) for _ in num)))
        _check_that_it_stays(entries[-1])
    return entries


def _check_that_it_stays(entry: StateEntry) -> None:
    """Raise if the step changes the shape or type of a state, so that there could be no second step."""
    for old, new in zip(entry.invars, entry.outvars, strict=True):
        was, now = ((tuple(v.aval.shape), v.aval.dtype) for v in (old, new))
        if was != now:
            raise CompilationError(
                f"The state `{show_path(entry.path)}` is {was[1]}{list(was[0])} before the step and "
                f"{now[1]}{list(now[0])} after it: there could be no second step. If it lacks a batch axis, "
                "initialise it with one (`brainstate.nn.init_all_states(model, batch_size=...)`); if the "
                "input is a whole sequence, give one step of it; if its type differs, give it the one that "
                "the step computes."
            )


def _refusal(e: UnreadableSite, step: Step) -> NotSupportedError:
    """The error for an op inside a primitive that is not read, with the parameters that enter there."""
    origin = provenance(e.program)
    behind = {v for atom in e.node.inputs for v in origin.of(atom)[0]}
    leaves = zip(e.program.inputs[step.num_args :], step.owners, strict=False)
    of = [st.path for var, st in leaves if var in behind and st.role is Role.PARAMETER]
    names = f" of {show_paths(of)}" if of else ""
    return NotSupportedError(
        f"The marked op `{e.op.name}`{names} is inside `{e.node.primitive.name}` at {e.node.source}, which "
        "the compiler does not read. Move the op out, or use `x @ w` inside to train the weight without a "
        "trace."
    )


def _is_same(known: Array | None, now: Array) -> bool:
    """Whether a constant is unchanged; one that was unknown before has not been used."""
    unknown = known is None or _compat.is_tracer(known)
    return unknown or (not _compat.is_tracer(now) and np.array_equal(np.asarray(known), np.asarray(now)))


def _hidden_states(
    program: Program, entries: Sequence[StateEntry], parts: Mapping[Var, Part]
) -> list[Hidden]:
    """The hidden arrays that a step reads (all, if it reads none), with packed ones split into parts."""
    found = []
    for h in (h for e in entries if e.of.role is Role.HIDDEN for h in hidden_arrays(e)):
        mine = [
            replace(h, path=(*h.path, str(p)), invar=old, outvar=p.new, part=p)
            for old, p in parts.items()
            if p.leaf is h.invar
        ]
        found += mine or [h]
    used = behind(program, program.outputs)  # an array that is only printed is not used
    return [h for h in found if h.invar in used] or found


def hidden_arrays(entry: StateEntry) -> list[Hidden]:
    """The floating arrays of a state that the step writes, as `Hidden`."""
    numbered = jax.tree.unflatten(entry.of.tree, range(len(entry.invars)))
    keys = [k for k, _ in jax.tree_util.tree_flatten_with_path(numbered)[0]]
    found = []
    for key, invar, outvar in zip(keys, entry.invars, entry.outvars, strict=True):
        if not jnp.issubdtype(invar.aval.dtype, jnp.inexact) or outvar is invar:
            continue
        name = jax.tree_util.keystr(key).strip(".[]'") if len(keys) > 1 else ""
        path = (*entry.path, name) if name else entry.path
        assert isinstance(outvar, Var)
        axis = invar.aval.ndim - 1 if entry.of.grouped else None
        found.append(Hidden(path, entry.state, invar, outvar, axis, unit=entry.of.unit))
    return found


def _with_own_outputs(program: Program, entries: Sequence[StateEntry]) -> list[StateEntry]:
    """Give every written state an output variable of its own.

    After `self.a.value = self.b.value` two states share a variable; one of them gets a copy.
    """
    taken: set[Var] = set(program.inputs)
    replaced = []
    for entry in entries:
        outvars: list[Atom] = []
        for invar, atom in zip(entry.invars, entry.outvars, strict=True):
            if atom is not invar and (isinstance(atom, Literal) or atom in taken):
                (atom,) = insert(program, jax.lax.optimization_barrier, [atom], len(program.nodes))
            if isinstance(atom, Var):
                taken.add(atom)
            outvars.append(atom)
        replaced.append(StateEntry(entry.of, entry.invars, tuple(outvars)))
    return replaced
