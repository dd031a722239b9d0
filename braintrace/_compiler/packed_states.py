"""Remove joins that are split again, and split packed states into their parts.

`split(concatenate([v, a]), 2)` is `v` and `a`: readers of a part then read the original array. A part of an
element-wise result is computed from the parts of its operands, so that this also holds behind a mask. A
carried array that a step splits and joins again, `[V | A]`, becomes one hidden state for each part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._types import Array, Function, NumPyArray
from .caching import clear
from .positions import Positions
from .primitives import COPIES, ELEMENT_WISE, INDICES, LAYOUT, PARTS, named
from .program import Atom, Node, Program, Var, read_program, struct
from .reach import Reach
from .slices import needed

_JOINS = named("concatenate stack scatter dynamic_update_slice")
_COPIED = COPIES | LAYOUT | PARTS | _JOINS
_CUTS = PARTS | named("slice gather dynamic_slice")
_ELEMENTS = ELEMENT_WISE - named("optimization_barrier device_put sharding_constraint")


@dataclass(frozen=True, eq=False)
class Part:
    """A part of the carried array `leaf`: a range along one axis, with the variable of its new value."""

    leaf: Var
    axis: int
    range: range
    shape: tuple[int, ...]
    new: Var

    def __str__(self) -> str:
        step = f":{self.range.step}" if self.range.step > 1 else ""
        return f"{self.range.start}:{self.range.stop}{step}"

    def of(self, array: Array) -> Array:
        """Slice an array shaped as the leaf, and reshape it to the part."""
        at = self.range
        return jax.lax.slice_in_dim(array, at.start, at.stop, at.step, self.axis).reshape(self.shape)

    def whole(self, array: Array) -> Array:
        """Reshape an array shaped as the part to that range of the leaf."""
        shape = list(self.leaf.aval.shape)
        shape[self.axis] = len(self.range)
        return array.reshape(shape)


class _Copies:
    """Tracks, for joined arrays and copies of them, which variable each element is a copy of.

    With `lanes`, also through element-wise operations: each element is then a function of that element.
    """

    def __init__(self, program: Program, roots: Sequence[Var] = (), *, lanes: bool = False) -> None:
        self._positions, self._lanes = Positions(program), lanes
        self._starts: list[int] = [0]
        self._sources: list[Var] = []
        self.found: dict[Var, Reach] = {}
        self.found.update({v: self._of(v) for v in roots})

    def _of(self, var: Var) -> Reach:
        if var in self.found:
            return self.found[var]
        self._sources.append(var)
        self._starts.append(self._starts[-1] + var.aval.size)
        return Reach.at(np.arange(*self._starts[-2:]).reshape(var.aval.shape))

    def follow(self, node: Node) -> None:
        """Track elements across a node that copies them, unless its indices depend on data."""
        known = [v for v in node.reads if v in self.found]
        if self._lanes and node.primitive in _ELEMENTS:
            same = [a for a in known if a.aval.shape == node.outputs[0].aval.shape]
            self.found.update({v: self.found[same[0]] for v in node.outputs if same})
            return
        indices = node.inputs[INDICES.get(node.primitive, slice(0))]
        if (
            (known or node.primitive in _JOINS)
            and node.primitive in _COPIED
            and not any(self._positions.constants(a) is None for a in indices)
        ):
            given = [self._of(a) if isinstance(a, Var) else None for a in node.inputs]
            made = self._positions.across(node, given)
            pairs = zip(node.outputs, made, strict=True)
            self.found.update({v: r for v, r in pairs if r and np.array_equal(r.lowest, r.highest)})

    def sources(self, var: Var) -> tuple[NumPyArray, NumPyArray]:
        """For each element, the index of the variable that it is a copy of, and its position there."""
        number = np.searchsorted(self._starts, self.found[var].lowest, side="right") - 1
        return number, self.found[var].lowest - np.asarray(self._starts)[number]

    def is_all(self, numbers: NumPyArray, places: NumPyArray) -> Var | None:
        """The one variable of which these are all elements in order, if there is one."""
        source = self._sources[numbers.flat[0]]
        in_order = np.array_equal(places.ravel(), np.arange(source.aval.size))
        return source if in_order and np.all(numbers == numbers.flat[0]) else None

    def original(self, var: Var) -> Var | None:
        """The variable that this one has all elements of, in order."""
        return self.is_all(*self.sources(var)) if var in self.found else None


def take_apart(program: Program) -> Program:
    """Rewrite a program so that readers of a part of a join read the variable that was joined."""
    return _taken_apart(program)[0]


def _taken_apart(program: Program) -> tuple[Program, dict[Var, Var]]:
    """The rewritten program, and the variables that are read instead of others."""
    copies, lanes = _Copies(program), _Copies(program, lanes=True)
    instead: dict[Var, Var] = {}
    nodes, before = program.nodes, list(program.nodes)
    at = 0
    while at < len(nodes):
        node = nodes[at]
        node.inner = tuple(map(take_apart, node.inner))
        _read_instead(node, instead)
        copies.follow(node)
        lanes.follow(node)
        if node.primitive in _CUTS and (parts := _parts_without_cut(program, node, copies, lanes)):
            del nodes[at]
            _insert_as(program, node.outputs, *parts, at)
            continue
        at += 1
        for v in node.outputs:
            same = copies.original(v)
            if same is not None and same.aval.shape == v.aval.shape:
                instead[v] = instead.get(same, same)
    if not instead and nodes == before:
        return program, {}
    after = replace(program, outputs=_replaced(program.outputs, instead))
    acting = [n for n in program.nodes if n.eqn.effects or n.sites]
    live = {id(n) for n in needed(after, [*after.outputs, *(a for n in acting for a in n.inputs)])}
    live.update(map(id, acting))
    return replace(after, nodes=[n for n in program.nodes if id(n) in live]), instead


def _parts_without_cut(
    program: Program, cut: Node, copies: _Copies, lanes: _Copies
) -> tuple[Callable[..., list[Array]], Sequence[Atom]] | None:
    """A function that computes the outputs of a slice or split, and its operands; None to leave the node.

    A part of a join is the joined array; a part of an element-wise result is computed from parts.
    """
    if not all(map(lanes.original, cut.outputs)):
        return None
    joined = [v for v in map(copies.original, cut.outputs) if v is not None]
    if len(joined) == len(cut.outputs):
        shapes = [v.aval.shape for v in cut.outputs]
        if any(v.aval.shape == shape for v, shape in zip(joined, shapes, strict=True)):
            return None  # its readers read the joined array
        return lambda *vals: [a.reshape(s) for a, s in zip(vals, shapes, strict=True)], joined
    made = program.maker(cut.inputs[0])
    if made is None or made.primitive not in _ELEMENTS:
        return None
    num, shape = len(made.inputs), made.outputs[0].aval.shape

    def parts(*vals: Array) -> list[Array]:
        with _compat.at_line_of(made.eqn):
            operands = [
                _compat.bind(cut.eqn, a, *vals[num:]) if a.shape == shape else [a] * len(cut.outputs)
                for a in vals[:num]
            ]
            return [_compat.bind(made.eqn, *part)[0] for part in zip(*operands, strict=True)]

    return parts, (*made.inputs, *cut.inputs[1:])


def _insert_as(
    program: Program,
    outputs: Sequence[Var],
    function: Callable[..., list[Array]],
    atoms: Sequence[Atom],
    at: int,
) -> None:
    """Insert the nodes of a function that computes variables of the program."""
    before = len(program.nodes)
    own = dict(zip(insert(program, function, atoms, at), outputs, strict=True))
    for node in program.nodes[at : at + len(program.nodes) - before]:
        node.outputs = tuple(own.get(v, v) for v in node.outputs)


def _read_instead(node: Node, instead: Mapping[Var, Atom]) -> None:
    node.inputs = _replaced(node.inputs, instead)
    if node.site is not None:
        node.site.inputs = node.inputs


def _replaced(atoms: Sequence[Atom], instead: Mapping[Var, Atom]) -> tuple[Atom, ...]:
    return tuple(instead.get(a, a) if isinstance(a, Var) else a for a in atoms)


def insert(program: Program, function: Function, atoms: Sequence[Atom], at: int) -> list[Var]:
    """Insert the nodes of `function(*atoms)` into a program at index `at`; returns the results."""
    nodes, results = nodes_of(program, function, atoms)
    program.nodes[at:at] = nodes
    for cached in ("producer", "readers", "holder"):
        vars(program).pop(cached, None)
    clear(program)
    return results


def nodes_of(program: Program, function: Function, atoms: Sequence[Atom]) -> tuple[list[Node], list[Var]]:
    """The nodes of `function(*atoms)`, with variables that the program does not have, and the results."""
    traced = read_program(jax.make_jaxpr(function)(*map(struct, atoms)))
    made = [*program.inputs, *program.consts, *(v for n in program.walk() for v in n.outputs)]
    first = 1 + max(v.index for v in made)
    instead: dict[Var, Atom] = dict(zip(traced.inputs, atoms, strict=True))
    for node in traced.nodes:
        _read_instead(node, instead)
        own = {v: Var(v.aval, first + v.index) for v in node.outputs}
        instead.update(own)
        node.outputs = tuple(own.values())
    return traced.nodes, list(_replaced(traced.outputs, instead))  # type: ignore[arg-type]


def split_states(program: Program, states: Mapping[Var, Var]) -> tuple[Program, dict[Var, Part]]:
    """Split packed states; returns the program, and each part by the variable of its old value.

    `states` maps the old variable of each carried array to the new one.
    """
    lanes = _Copies(program, lanes=True)
    for node in program.nodes:
        lanes.follow(node)
    taken = {*program.inputs, *states.values()}
    parts = {old: found for old, new in states.items() if (found := _parts(program, lanes, old, new, taken))}
    by_old: dict[Var, Part] = {}
    for leaf, found in parts.items():
        olds, program = _join_instead(program, leaf, found, 0)
        after = program.producer[states[leaf]] + 1
        news, program = _join_instead(program, states[leaf], found, after)
        by_old.update({old: replace(part, new=new) for old, part, new in zip(olds, found, news, strict=True)})
    if not parts:
        return program, {}
    program, instead = _taken_apart(program)
    return program, {old: replace(part, new=instead.get(part.new, part.new)) for old, part in by_old.items()}


def _join_instead(program: Program, var: Var, parts: Sequence[Part], at: int) -> tuple[list[Var], Program]:
    """Cut a variable into parts at index `at`; nodes from there on read the join of these instead."""
    axis = parts[0].axis

    def join(*values: Array) -> Array:
        slabs = [part.whole(a) for part, a in zip(parts, values, strict=True)]
        if parts[0].range.step > 1:
            return jnp.stack(slabs, axis + 1).reshape(var.aval.shape)
        return jnp.concatenate(slabs, axis)

    later = program.nodes[at:]
    cut = insert(program, lambda x: [part.of(x) for part in parts], [var], at)
    (joined,) = insert(program, join, cut, len(program.nodes) - len(later))
    for node in later:
        _read_instead(node, {var: joined})
    return cut, replace(program, outputs=_replaced(program.outputs, {var: joined}))


def _parts(program: Program, lanes: _Copies, old: Var, new: Var, taken: set[Var]) -> list[Part]:
    """The parts that a step joins a state from, if it also reads the state in these parts; else empty."""
    if new not in lanes.found:
        return []
    numbers, places = lanes.sources(new)
    for axis, size in enumerate(numbers.shape):
        ranges = _ranges(np.moveaxis(numbers, axis, 0).reshape(size, -1)[:, 0])
        slabs = [(slice(None),) * axis + (slice(r.start, r.stop, r.step),) for r in ranges]
        sources = [lanes.is_all(numbers[s], places[s]) for s in slabs]
        kept = [v for v in dict.fromkeys(sources) if v is not None and v not in taken]
        label = np.zeros(numbers.shape, int)
        for k, s in enumerate(slabs):
            label[s] = k
        if len(kept) == len(ranges) > 1 and _reads_parts(program, old, new, label):
            taken.update(kept)
            pairs = zip(ranges, kept, strict=True)
            return [Part(old, axis, r, tuple(v.aval.shape), v) for r, v in pairs]
    return []


def _ranges(sources: NumPyArray) -> list[range]:
    """The ranges of equal entries, consecutive or, if they repeat one pattern, at a distance."""
    size, num = len(sources), len(np.unique(sources))
    if 1 < num < size and size % num == 0 and np.array_equal(sources, np.resize(sources[:num], size)):
        return [range(k, size, num) for k in range(num)]
    return [range(a, b) for a, b in pairwise([0, *np.flatnonzero(np.diff(sources)) + 1, size])]


def _reads_parts(program: Program, old: Var, new: Var, label: NumPyArray) -> bool:
    """Whether all reads of an array take whole parts, and at least one takes not all of them.

    An element-wise function of the array counts as the array.
    """
    whole = {old: None}
    for node in program.nodes:
        if node.primitive in _ELEMENTS and any(v in whole for v in node.reads):
            whole.update({v: None for v in node.outputs if v.aval.shape == old.aval.shape and v is not new})
    copies = _Copies(program, list(whole))
    for node in program.nodes:
        copies.follow(node)
    sizes, counts = np.bincount(label.ravel()), []
    for var in copies.found:
        numbers, places = copies.sources(var)
        of_old = label.ravel()[np.unique(places[numbers < len(whole)])]
        counts.append(np.bincount(of_old, minlength=len(sizes)))
    partial = [c for c in counts if np.any((c > 0) & (c < sizes))]
    return not partial and any(np.any(c) and not np.all(c) for c in counts)
