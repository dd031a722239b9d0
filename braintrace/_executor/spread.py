"""How arrays are spread over the devices of a mesh: what a rule keeps inherits it by letters.

The letters of a weight have it from the weight, all others from the hidden states, and these, where nothing
says how they are spread, from the inputs of the step. It is a promise about where numbers are, never about
what they are: with another layout a program is slower, not wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat, _meshes
from .._compiler.groups import HiddenGroup
from .._compiler.module_info import ModuleInfo
from .._compiler.program import Site, Var
from .._compiler.relation import HiddenParamOpRelation
from .._compiler.samples import counting
from .._ops.letters import Layout, Letters
from .slots import Parts, Slot, add_up, promoted

Spec = tuple[Any, ...]  # of each axis of an array: None, or the axes of the mesh that it is spread over
Names = dict[str, Any]  # the same of letters


@dataclass(frozen=True, eq=False)
class Spread:
    """How the arrays of a compiled step are spread."""

    info: ModuleInfo
    mesh: Any
    specs: dict[Var, Spec]  # of those that a step is given
    # of each slot, found once, outside of any derivative: the letters of its weight, and all of its trace
    _names: dict[str, tuple[Names, Names]] = field(default_factory=dict)
    _groups: dict[int, Spec] = field(default_factory=dict)
    _sent: dict[Var, Spec] = field(default_factory=dict)  # of what devices send, for columns of weights

    @staticmethod
    def find(
        executor: Any, params: Sequence[Any], args: Sequence[Any], rest: Any, before: Spread | None
    ) -> Spread | None:
        """As the arrays that a step is given are; None: all are on one device.

        It is as `before` where arrays are the same, or nobody knows how they are.
        """
        info: ModuleInfo = executor.info
        fixed = info.fixed_invars
        variables = [*fixed, *info.arg_invars, *info.carried_invars]
        arrays = [*params, *args, *jax.tree.leaves(rest)]
        set_now = _meshes.mesh_of(*filter(_compat.is_tracer, arrays))
        if before is not None and set_now is not None and not _alike(set_now, before.mesh):
            before = None
        pairs = zip(variables, map(_sharding, variables, arrays), strict=True)
        # what a mesh holds as a whole is so by default, unless it is a parameter
        found = {v: s for v, s in pairs if s is not None and (v in fixed or any(s[1]))}
        if before is not None and found:  # of what is traced, as far as it was known
            unknown = [v for v, a in zip(variables, arrays, strict=True) if _compat.is_tracer(a)]
            known = {v: (before.mesh, before.specs[v]) for v in unknown if v in before.specs}
            found = {**known, **found}
        if not found:
            return before if any(map(_compat.is_tracer, arrays)) else None
        mesh = next(mesh for mesh, _ in found.values())
        spread = Spread(info, mesh, {v: spec for v, (m, spec) in found.items() if _same(m, mesh)})
        if before is not None and spread.key == before.key:
            return before
        spread._names.update({t.key: spread._find_names(t) for t in executor.slots})
        for slot in executor.slots:
            spread._groups[slot.group.index] = spread._with_weight(slot)
        spread._find_sent(executor.slots)
        return spread

    @property
    def key(self) -> Any:
        """What programs go by."""
        inputs = self.info.program.inputs
        return self.mesh, tuple(self.specs.get(v) for v in inputs)

    # -- what is known of letters ------------------------------------------------------------------

    def names(self, slot: Slot) -> Names:
        """Of each letter of a trace."""
        return self._names[slot.key][1]

    def _find_names(self, slot: Slot) -> tuple[Names, Names]:
        axes = [a for a, name in enumerate(self.of_group(slot.group)) if name is not None]
        states = {_letter_of(slot, a): self.of_group(slot.group)[a] for a in axes}
        # a weight that is spread over the devices of a batch is gathered where it is used: the batch is not
        samples = [name for letter, name in states.items() if letter is None or letter not in slot.layout.w]
        weight = self._of_weight(slot.relation, slot.name, slot.layout)
        weight = {a: name for a, name in weight.items() if not _used(samples, name)}
        found = dict(weight)
        for letter, name in states.items():
            if letter is not None and found.get(letter) is None and not _used(found.values(), name):
                found[letter] = name
        return weight, found

    def of_group(self, group: HiddenGroup) -> Spec:
        """Of each axis of a group's positions: from its states, from the step's inputs, from weights."""
        if group.index in self._groups:
            return self._groups[group.index]
        result: list[Any] = [None] * len(group.varshape)
        for h in group.hidden:
            spec, gone = self.specs.get(h.leaf), [h.axis]
            if h.part is not None and h.leaf.aval.ndim != h.invar.aval.ndim:
                gone = [h.part.axis]
            kept = () if spec is None else [n for a, n in enumerate(spec) if a not in gone]
            result = [a if a is not None else b for a, b in zip(result, kept or result, strict=True)]
        for v in self.info.arg_invars:  # a batch that states were not laid out for
            spec = self.specs.get(v)
            if spec and result and result[0] is None and v.aval.shape[0] == group.varshape[0]:
                result[0] = None if _used(result, spec[0]) else spec[0]
        return tuple(result)

    def _with_weight(self, slot: Slot) -> Spec:
        """Of the positions of a slot's group, with what its weight says of axes that nothing else does."""
        result = list(self.of_group(slot.group))
        weight = self._names[slot.key][0]
        for axis, name in enumerate(result):
            letter = _letter_of(slot, axis) if name is None and weight else None
            new = weight.get(letter) if letter is not None else None
            result[axis] = name if new is None or _used(result, new) else new
        return tuple(result)

    def _of_weight(self, relation: HiddenParamOpRelation, name: str, layout: Layout) -> Names:
        """Of each letter of an effective weight that has the shape of its parameter."""
        leaves = relation.trainable_leaves.get(name, ())
        variables = [v for v, leaf in self.info.invar_to_leaf.items() if leaf in leaves]
        atom = relation.site.weights.get(name)
        if len(variables) != 1 or atom is None or relation.varying:
            return {}
        same = variables[0].aval.shape == atom.aval.shape
        return self.letters(self.specs.get(variables[0]), atom.aval.shape, layout) if same else {}

    def letters(self, spec: Spec | None, shape: tuple[int, ...], layout: Layout) -> Names:
        """Of each letter of a weight of this shape, which is spread so."""
        found = {}
        for axis, part in enumerate(spec or ()):
            if part is not None:
                letter = _counted(layout.view_w, shape, axis, layout.w)
                if letter is not None:
                    found[letter] = part
        return found

    # -- arrays ------------------------------------------------------------------------------------

    def of_trace(self, slot: Slot) -> Spec:
        """Of the trace of a weight: states, then its letters."""
        names = self.names(slot)
        return (None, *(names.get(a) for a in slot.letters))

    def of_instant(self, slot: Slot) -> Spec:
        """Of an array with states and then the positions where `J` is."""
        if not slot.positions.on_hidden and not slot.layout.y_is_viewed:
            names = self.names(slot)
            return (None, *(names.get(a) for a in slot.layout.y))
        if slot.positions.on_hidden or slot.site_shape == slot.group.varshape:
            return (None, *self.of_group(slot.group))
        return (None, *_first_axis(self.of_group(slot.group), slot.group.varshape, slot.site_shape))

    def of_input(self, slot: Slot, shape: tuple[int, ...]) -> Spec:
        """Of an array like the first input of the op of a slot, or its factor."""
        x = slot.layout.x
        if x is not None and not slot.layout.x_is_viewed and len(x) == len(shape):
            names = self.names(slot)
            return tuple(names.get(a) for a in x)
        return _first_axis(self.of_group(slot.group), slot.group.varshape, shape)

    def of_result(self, old: Var | None, shape: tuple[int, ...], groups: Sequence[HiddenGroup]) -> Spec:
        """Of what a step returns: a new state as the old one (`old`), anything else by its samples."""
        if old in self.specs:
            return self.specs[old]
        for group in groups:
            if any(h.invar is old and h.axis is None for h in group.hidden):
                return self.fitted(self.of_group(group), shape)
        for group in groups:
            if shape and shape[0] == group.varshape[0]:
                return self.fitted(_first_axis(self.of_group(group), group.varshape, shape), shape)
        return (None,) * len(shape)

    @cached_property
    def batch(self) -> Any:
        """The axes of the mesh that the samples of a batch are spread over, if all groups agree on them."""
        found = {spec[0] for spec in self._groups.values() if spec and spec[0] is not None}
        return found.pop() if len(found) == 1 else None

    def parts(self, layout: Layout, letters: Letters, shape: tuple[int, ...]) -> Parts | None:
        """The parts of a batch that devices have of an array with these letters; None: nobody knows them."""
        samples = next((a for a in layout.y if a not in layout.w), None)
        if self.batch is None or samples not in letters:
            return None
        ways = self.ways(self.batch, shape[letters.index(samples)])
        return Parts(samples, ways) if ways > 1 else None

    def of_leaf(self, number: int) -> Spec | None:
        """Of a leaf of the parameters, by its number."""
        return self.specs.get(self.info.fixed_invars[number])

    def samples(self, axis: int | None, count: int) -> Any:
        """How so many samples, along an axis of the carried states, are spread: as these, or as inputs."""
        if axis is None:
            return None
        states = [(v, axis) for v in self.info.carried_invars]
        for v, at in (*states, *((v, 0) for v in self.info.arg_invars)):
            spec = self.specs.get(v)
            if spec is not None and at < len(spec) and v.aval.shape[at] == count and spec[at] is not None:
                return spec[at]
        return None

    def sent(self, site: Site, operands: Sequence[Any]) -> Any:
        """The first input of a site as the columns of weights need it, gathered once for all; else None."""
        x = site.inputs[0] if site.num_inputs else None
        spec = self._sent.get(x) if isinstance(x, Var) else None
        return None if spec is None else self.put(operands[0], spec)

    def _find_sent(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            x, letters = slot.relation.site.inputs[0], slot.layout.x
            if not isinstance(x, Var) or letters is None or slot.layout.x_is_viewed:
                continue
            fits = len(letters) == len(x.aval.shape) and jnp.issubdtype(x.aval.dtype, jnp.inexact)
            if fits and self._names[slot.key][0] and x not in self._sent:
                self._sent[x] = self.of_input(slot, x.aval.shape)

    def put(self, x: Any, spec: Spec) -> Any:
        """An array, spread so."""
        return _meshes.spread_as(x, self.mesh, self.fitted(spec, x.shape))

    def place(self, x: Any, spec: Spec) -> Any:
        """An array that is on no mesh yet, spread so."""
        return _meshes.place(x, self.mesh, self.fitted(spec, x.shape))

    def zeros(self, shape: tuple[int, ...], dtype: Any, spec: Spec) -> Any:
        return _meshes.zeros(shape, dtype, self.mesh, self.fitted(spec, shape))

    def shape(self, of: Any, spec: Spec) -> Any:
        return _meshes.spread_shape(of, self.mesh, self.fitted(spec, of.shape))

    def ways(self, part: Any, size: int) -> int:
        """Into how many parts an axis of so many numbers is cut; 0 if it cannot be, evenly."""
        ways = int(np.prod([self.mesh.shape[n] for n in names_of(part)], dtype=int))
        return ways if size % ways == 0 else 0

    def fitted(self, spec: Spec, shape: tuple[int, ...]) -> Spec:
        """Without what does not divide an axis evenly, and each axis of the mesh once."""
        result: list[Any] = []
        for part, size in zip(spec, shape, strict=True):
            keeps = part is not None and self.ways(part, size) > 0 and not _used(result, part)
            result.append(part if keeps else None)
        return tuple(result)


@dataclass(frozen=True, eq=False)
class Apart:
    """A gradient as the devices that share a batch have it, each its part: along the first axis."""

    parts: Any
    at: Spread
    spec: Spec | None = None  # how they are spread; None: nobody knows

    @property
    def whole(self) -> Any:
        """The sum over the devices."""
        return jnp.sum(self.parts if self.spec is None else self.at.put(self.parts, self.spec), 0)


def plus(a: Any, b: Any) -> Any:
    """The sum of two gradients, apart as long as both are; None is nothing."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, Apart) and isinstance(b, Apart) and a.parts.shape == b.parts.shape:
        return replace(a, parts=add_up(promoted(a.parts, b.parts)))
    return whole(a) + whole(b)


def whole(a: Any) -> Any:
    """A gradient as such."""
    return a.whole if isinstance(a, Apart) else a


def _sharding(v: Var, array: Any) -> tuple[Any, Spec] | None:
    """The mesh of an array and how it is spread; of one that `vmap` maps, as each of what is first in it."""
    found, shape = _meshes.sharding_of(array), v.aval.shape
    lead = 0 if found is None else len(found[1]) - len(shape)
    return None if found is None or array.shape[lead:] != shape else (found[0], found[1][lead:])


def _same(a: Any, b: Any) -> bool:
    return bool(a.shape_tuple == b.shape_tuple)


def _alike(a: Any, b: Any) -> bool:
    return _same(a, b) and bool(a.axis_types == b.axis_types)


def names_of(part: Any) -> tuple[str, ...]:
    """The axes of a mesh that an axis of an array is spread over."""
    return () if part is None else part if isinstance(part, tuple) else (part,)


def _used(parts: Iterable[Any], part: Any) -> bool:
    return not set(names_of(part)).isdisjoint(n for p in parts for n in names_of(p))


def _letter_of(slot: Slot, axis: int) -> str | None:
    """The letter of a trace along which an axis of the hidden positions lies."""
    shape = slot.group.varshape
    numbers = np.arange(1, shape[axis] + 1).reshape([-1 if a == axis else 1 for a in range(len(shape))])
    numbers = np.broadcast_to(numbers, shape)
    with jax.ensure_compile_time_eval():
        inputs = slot.relation.site.no_inputs
        seen = np.asarray(slot.lift(jnp.asarray(numbers, jnp.float32)[None], inputs, 1)[0])
    # a place of the output that reaches no state has a zero there
    return counting(seen.astype(int) - 1, slot.at, shape[axis])


def _counted(view: Any, shape: tuple[int, ...], axis: int, letters: Letters) -> str | None:
    """The letter along which an axis of what is viewed lies."""
    numbers = np.arange(shape[axis]).reshape([-1 if a == axis else 1 for a in range(len(shape))])
    with jax.ensure_compile_time_eval():
        seen = np.asarray(view(jnp.asarray(np.broadcast_to(numbers, shape))))
    return counting(seen, letters, shape[axis])


def _first_axis(spec: Spec, of: tuple[int, ...], shape: tuple[int, ...]) -> Spec:
    """Of an array whose first axis is that of states of shape `of`, where they agree in length."""
    same = bool(spec) and bool(shape) and of[0] == shape[0]
    return (spec[0] if same else None, *[None] * (len(shape) - 1)) if shape else ()
