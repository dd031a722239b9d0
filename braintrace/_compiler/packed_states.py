"""Remove joins that are split again, and split packed states into their parts.

`split(concatenate([v, a]), 2)` is `v` and `a`: readers of a part then read the original array. A carried
array that a step splits and joins again, `[V | A]`, becomes one hidden state for each part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .caching import clear
from .positions import Positions
from .primitives import COPIES, INDICES, LAYOUT, PARTS, named
from .program import Atom, Node, Program, Var, read_program, struct
from .reach import Reach
from .slices import needed

_JOINS = named("concatenate stack scatter dynamic_update_slice")
_COPIED = COPIES | LAYOUT | PARTS | _JOINS


@dataclass(frozen=True, eq=False)
class Part:
    """A part of the carried array `leaf`: a range along one axis, with the variable of its new value."""

    leaf: Var
    axis: int
    start: int
    stop: int
    new: Var

    def of(self, array: Any) -> Any:
        """Slice an array shaped as the leaf, and reshape it to the part."""
        return jax.lax.slice_in_dim(array, self.start, self.stop, axis=self.axis).reshape(self.new.aval.shape)

    def whole(self, array: Any) -> Any:
        """Reshape an array shaped as the part to that range of the leaf."""
        shape = list(self.leaf.aval.shape)
        shape[self.axis] = self.stop - self.start
        return array.reshape(shape)


class _Copies:
    """Tracks, for joined arrays and copies of them, which variable each element is a copy of."""

    def __init__(self, program: Program, roots: Sequence[Var] = ()) -> None:
        self._positions = Positions(program)
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
        joined = node.primitive in _JOINS or any(isinstance(a, Var) and a in self.found for a in node.inputs)
        indices = node.inputs[INDICES.get(node.primitive, slice(0))]
        if (
            joined
            and node.primitive in _COPIED
            and not any(self._positions.constants(a) is None for a in indices)
        ):
            given = [self._of(a) if isinstance(a, Var) else None for a in node.inputs]
            made = self._positions.across(node, given)
            pairs = zip(node.outputs, made, strict=True)
            self.found.update({v: r for v, r in pairs if r and np.array_equal(r.lowest, r.highest)})

    def sources(self, var: Var) -> tuple[Any, Any]:
        """For each element, the index of the variable that it is a copy of, and its position there."""
        number = np.searchsorted(self._starts, self.found[var].lowest, side="right") - 1
        return number, self.found[var].lowest - np.asarray(self._starts)[number]

    def is_all(self, numbers: Any, places: Any) -> Var | None:
        """The one variable of which these are all elements in order, if there is one."""
        source = self._sources[numbers.flat[0]]
        same = np.all(numbers == numbers.flat[0]) and np.array_equal(
            places.ravel(), np.arange(source.aval.size)
        )
        return source if same else None


def take_apart(program: Program) -> Program:
    """Rewrite a program so that readers of a part of a join read the variable that was joined."""
    copies = _Copies(program)
    instead: dict[Var, Var] = {}
    for node in program.nodes:
        node.inner = tuple(map(take_apart, node.inner))
        _read_instead(node, instead)
        copies.follow(node)
        for v in node.outputs:
            same = copies.is_all(*copies.sources(v)) if v in copies.found else None
            if same is not None and same.aval.shape == v.aval.shape:
                instead[v] = instead.get(same, same)
    if not instead:
        return program
    after = replace(program, outputs=_replaced(program.outputs, instead))
    acting = [n for n in program.nodes if n.eqn.effects or n.sites]
    live = {id(n) for n in needed(after, [*after.outputs, *(a for n in acting for a in n.inputs)])}
    live.update(map(id, acting))
    return replace(after, nodes=[n for n in program.nodes if id(n) in live])


def _read_instead(node: Node, instead: Mapping[Var, Atom]) -> None:
    node.inputs = _replaced(node.inputs, instead)
    if node.site is not None:
        node.site.inputs = node.inputs


def _replaced(atoms: Sequence[Atom], instead: Mapping[Var, Atom]) -> tuple[Atom, ...]:
    return tuple(instead.get(a, a) if isinstance(a, Var) else a for a in atoms)


def insert(program: Program, function: Callable[..., Any], atoms: Sequence[Atom], at: int) -> list[Var]:
    """Insert the nodes of `function(*atoms)` into a program at index `at`; returns the results."""
    structs = [struct(a) for a in atoms]
    traced = read_program(jax.make_jaxpr(function)(*structs))
    made = [*program.inputs, *program.consts, *(v for n in program.nodes for v in n.outputs)]
    first = 1 + max(v.index for v in made)
    instead: dict[Var, Any] = dict(zip(traced.inputs, atoms, strict=True))
    for node in traced.nodes:
        _read_instead(node, instead)
        instead.update({v: Var(v.aval, first + v.index) for v in node.outputs})
        node.outputs = tuple(instead[v] for v in node.outputs)
    program.nodes[at:at] = traced.nodes
    for cached in ("producer", "readers", "holder"):
        vars(program).pop(cached, None)
    clear(program)
    return list(_replaced(traced.outputs, instead))  # type: ignore[arg-type]


def split_states(program: Program, states: Mapping[Var, Var]) -> tuple[Program, dict[Var, Part]]:
    """Split packed states; returns the program, and each part by the variable of its old value.

    `states` maps the old variable of each carried array to the new one.
    """
    copies = _Copies(program, list(states))
    for node in program.nodes:
        copies.follow(node)
    taken = {*program.inputs, *states.values()}
    parts = {old: found for old, new in states.items() if (found := _parts(copies, old, new, taken))}
    by_old: dict[Var, Part] = {}
    for leaf, found in parts.items():
        new, num = states[leaf], len(program.nodes)
        olds = insert(program, lambda x, found=found: [part.of(x) for part in found], [leaf], 0)
        program = _join_instead(program, len(program.nodes) - num, leaf, found, olds)
        made = next(i for i, node in enumerate(program.nodes) if new in node.outputs)
        program = _join_instead(program, made + 1, new, found, [part.new for part in found])
        by_old.update(zip(olds, found, strict=True))
    return (take_apart(program) if parts else program), by_old


def _join_instead(
    program: Program, at: int, var: Var, parts: Sequence[Part], values: Sequence[Var]
) -> Program:
    """Rewrite nodes from index `at` on to read the join of the parts instead of a variable."""

    def join(*values: Any) -> Any:
        slabs = [part.whole(a) for part, a in zip(parts, values, strict=True)]
        return jnp.concatenate(slabs, parts[0].axis)

    later = program.nodes[at:]
    (joined,) = insert(program, join, values, at)
    for node in later:
        _read_instead(node, {var: joined})
    return replace(program, outputs=_replaced(program.outputs, {var: joined}))


def _parts(copies: _Copies, old: Var, new: Var, taken: set[Var]) -> list[Part]:
    """The parts that a step joins a state from, if it also reads the state in these parts; else empty."""
    if new not in copies.found:
        return []
    numbers, places = copies.sources(new)
    for axis, size in enumerate(numbers.shape):
        lines = np.moveaxis(numbers, axis, 0).reshape(size, -1)
        cuts = [0, *np.flatnonzero(np.diff(lines[:, 0])) + 1, size]
        slabs = [(slice(None),) * axis + (slice(a, b),) for a, b in pairwise(cuts)]
        sources = [copies.is_all(numbers[s], places[s]) for s in slabs]
        kept = [v for v in dict.fromkeys(sources) if v is not None and v not in taken]
        label = np.zeros(numbers.shape, int)
        for k, s in enumerate(slabs):
            label[s] = k
        if len(kept) == len(cuts) - 1 > 1 and _reads(copies, old, label):
            taken.update(kept)
            return [Part(old, axis, a, b, v) for (a, b), v in zip(pairwise(cuts), kept, strict=True)]
    return []


def _reads(copies: _Copies, old: Var, label: Any) -> bool:
    """Whether all reads of an array take whole parts, and at least one takes not all of them."""
    root, sizes = copies.sources(old)[0].flat[0], np.bincount(label.ravel())
    counts = []
    for var in copies.found:
        numbers, places = copies.sources(var)
        of_old = label.ravel()[np.unique(places[numbers == root])]
        counts.append(np.bincount(of_old, minlength=len(sizes)))
    partial = [c for c in counts if np.any((c > 0) & (c < sizes))]
    return not partial and any(np.any(c) and not np.all(c) for c in counts)
