"""Sharding: the partition specs of traces, averages and gradients, by axis label.

A trace axis inherits the partition of the weight axis with the same label, and all other axes that of the
hidden states. States without a sharding inherit that of the inputs of the step. Specs affect speed only,
never values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat, _meshes
from .._compiler.groups import HiddenGroup
from .._compiler.module_info import ModuleInfo
from .._compiler.program import Site, Var
from .._compiler.relation import HiddenParamOpRelation
from .._compiler.samples import counting
from .._meshes import MeshAxes, names_of
from .._ops.axis_labels import Labels, Layout
from .._types import Array, Mesh, PyTree, Shape
from .partial_sums import DeviceSplit, PartialSums

if TYPE_CHECKING:
    from .slots import Slot

AnyMesh = Mesh | jax.sharding.AbstractMesh
Spec = tuple[MeshAxes, ...]  # a `PartitionSpec`: an entry for each array axis
Names = dict[str, MeshAxes]  # the mesh axes of each axis label


@dataclass(frozen=True, eq=False)
class Sharding:
    """The partition specs of the arrays of a compiled step."""

    info: ModuleInfo
    mesh: AnyMesh
    specs: dict[Var, Spec]  # of the inputs of the step
    # for each slot: the mesh axes of the labels of its weight, and of its trace. Computed eagerly, because
    # the probes that find them cannot run inside a derivative
    _names: dict[str, tuple[Names, Names]] = field(default_factory=dict)
    _groups: dict[int, Spec] = field(default_factory=dict)
    # of inputs that are gathered for column-sharded weights
    _sent: dict[Var, Spec] = field(default_factory=dict)

    @staticmethod
    def find(
        info: ModuleInfo,
        slots: Sequence[Slot],
        params: Sequence[Array],
        args: Sequence[Array],
        carried: PyTree,
        before: Sharding | None,
    ) -> Sharding | None:
        """The sharding of a step with these inputs; None if all of them are on one device.

        `before` is returned if it still applies, or if the sharding of traced inputs is unknown.
        """
        fixed = info.fixed_invars
        variables = [*fixed, *info.arg_invars, *info.carried_invars]
        arrays = [*params, *args, *jax.tree.leaves(carried)]
        set_now = _meshes.mesh_of(*filter(_compat.is_tracer, arrays))
        if before is not None and set_now is not None and not _alike(set_now, before.mesh):
            before = None
        pairs = zip(variables, map(_sharding, variables, arrays), strict=True)
        # a replicated array counts as sharded only if it is a parameter
        found = {v: s for v, s in pairs if s is not None and (v in fixed or any(s[1]))}
        if before is not None and found:  # for traced inputs, use the specs that were known before
            unknown = [v for v, a in zip(variables, arrays, strict=True) if _compat.is_tracer(a)]
            known = {v: (before.mesh, before.specs[v]) for v in unknown if v in before.specs}
            found = {**known, **found}
        if not found:
            return before if any(map(_compat.is_tracer, arrays)) else None
        mesh = next(mesh for mesh, _ in found.values())
        sharding = Sharding(
            info, mesh, {v: spec for v, (m, spec) in found.items() if m.shape_tuple == mesh.shape_tuple}
        )
        if before is not None and sharding.key == before.key:
            return before
        sharding._names.update({t.key: sharding._find_names(t) for t in slots})
        for slot in slots:
            sharding._groups[slot.group.index] = sharding._with_weight(slot)
        sharding._find_sent(slots)
        return sharding

    @property
    def key(self) -> Hashable:
        """A key for caching compiled programs."""
        inputs = self.info.program.inputs
        return self.mesh, tuple(self.specs.get(v) for v in inputs)

    # -- mesh axes of labels -------------------------------------------------------------------------

    def names(self, slot: Slot) -> Names:
        """The mesh axes of each label of a trace."""
        return self._names[slot.key][1]

    def _find_names(self, slot: Slot) -> tuple[Names, Names]:
        axes = [a for a, name in enumerate(self.of_group(slot.group)) if name is not None]
        states = {_label_of(slot, a): self.of_group(slot.group)[a] for a in axes}
        # a weight that is sharded over the mesh axis of the batch is gathered for use, not the batch
        samples = [name for label, name in states.items() if label is None or label not in slot.layout.w]
        weight = self._of_weight(slot.relation, slot.name, slot.layout)
        weight = {a: name for a, name in weight.items() if not _used(samples, name)}
        found = dict(weight)
        for label, name in states.items():
            if label is not None and found.get(label) is None and not _used(found.values(), name):
                found[label] = name
        return weight, found

    def of_group(self, group: HiddenGroup) -> Spec:
        """The spec of a group's positions, from its states, the inputs of the step, or weights."""
        if group.index in self._groups:
            return self._groups[group.index]
        result: list[MeshAxes] = [None] * len(group.varshape)
        for h in group.hidden:
            spec, gone = self.specs.get(h.leaf), [h.axis]
            if h.part is not None and h.leaf.aval.ndim != h.invar.aval.ndim:
                gone = [h.part.axis]
            kept = () if spec is None else [n for a, n in enumerate(spec) if a not in gone]
            result = [a if a is not None else b for a, b in zip(result, kept or result, strict=True)]
        for v in self.info.arg_invars:  # the batch is sharded, but the states are not
            spec = self.specs.get(v)
            if spec and result and result[0] is None and v.aval.shape[0] == group.varshape[0]:
                result[0] = None if _used(result, spec[0]) else spec[0]
        return tuple(result)

    def _with_weight(self, slot: Slot) -> Spec:
        """The spec of a slot's group, with unspecified axes taken from its weight."""
        result = list(self.of_group(slot.group))
        weight = self._names[slot.key][0]
        for axis, name in enumerate(result):
            label = _label_of(slot, axis) if name is None and weight else None
            new = weight.get(label) if label is not None else None
            result[axis] = name if new is None or _used(result, new) else new
        return tuple(result)

    def _of_weight(self, relation: HiddenParamOpRelation, name: str, layout: Layout) -> Names:
        """The mesh axes of each label of an effective weight, if it has the shape of its parameter."""
        leaves = relation.trainable_leaves.get(name, ())
        variables = [v for v, leaf in self.info.invar_to_leaf.items() if leaf in leaves]
        atom = relation.site.weights.get(name)
        if len(variables) != 1 or atom is None or relation.varying:
            return {}
        same = variables[0].aval.shape == atom.aval.shape
        return self.labels(self.specs.get(variables[0]), atom.aval.shape, layout) if same else {}

    def labels(self, spec: Spec | None, shape: Shape, layout: Layout) -> Names:
        """The mesh axes of each label of a weight with this spec and shape."""
        found: Names = {}
        for axis, part in enumerate(spec or ()):
            if part is not None:
                label = _counted(layout.view_w, shape, axis, layout.w)
                if label is not None:
                    found[label] = part
        return found

    # -- arrays ------------------------------------------------------------------------------------

    def of_trace(self, slot: Slot) -> Spec:
        """The spec of a trace: (states, *labels)."""
        names = self.names(slot)
        return (None, *(names.get(a) for a in slot.labels))

    def of_instant(self, slot: Slot) -> Spec:
        """The spec of an array shaped as `J`: (states, *positions)."""
        if not slot.positions.on_hidden and not slot.layout.y_is_viewed:
            names = self.names(slot)
            return (None, *(names.get(a) for a in slot.layout.y))
        if slot.positions.on_hidden or slot.site_shape == slot.group.varshape:
            return (None, *self.of_group(slot.group))
        return (None, *_first_axis(self.of_group(slot.group), slot.group.varshape, slot.site_shape))

    def of_input(self, slot: Slot, shape: Shape) -> Spec:
        """The spec of an array shaped as the first input, or the factor, of a slot's op."""
        x = slot.layout.x
        if x is not None and not slot.layout.x_is_viewed and len(x) == len(shape):
            names = self.names(slot)
            return tuple(names.get(a) for a in x)
        return _first_axis(self.of_group(slot.group), slot.group.varshape, shape)

    @cached_property
    def batch(self) -> MeshAxes:
        """The mesh axes of the batch, if all groups agree on them."""
        found = {spec[0] for spec in self._groups.values() if spec and spec[0] is not None}
        return found.pop() if len(found) == 1 else None

    def parts(
        self, layout: Layout, labels: Labels, shape: Shape, names: Names | None = None
    ) -> DeviceSplit | None:
        """How the batch axis of an array with these labels is split over devices; None if it is not.

        `names` are the mesh axes of the labels of the weight, if known.
        """
        samples = next((a for a in layout.y if a not in layout.w), None)
        if self.batch is None or samples not in labels:
            return None
        ways = self.ways(self.batch, shape[labels.index(samples)])
        spec = None if names is None else tuple(names.get(a) for a in layout.w)
        sums = partial(self.partial_sums, lead=self.batch, spec=spec)
        return DeviceSplit(samples, ways, sums) if ways > 1 else None

    def partial_sums(self, parts: Array, lead: MeshAxes, spec: Spec | None) -> PartialSums:
        """A gradient as partial sums along the mesh axes `lead`; `spec` is that of the gradient, if known."""
        return PartialSums(parts if spec is None else self.put(parts, (lead, *spec)))

    def of_leaf(self, number: int) -> Spec | None:
        """The spec of a parameter leaf, by its index."""
        return self.specs.get(self.info.fixed_invars[number])

    def samples(self, axis: int | None, count: int) -> MeshAxes:
        """The mesh axes of the batch axis of the carried states, from the states or the inputs."""
        if axis is None:
            return None
        states = [(v, axis) for v in self.info.carried_invars]
        for v, at in (*states, *((v, 0) for v in self.info.arg_invars)):
            spec = self.specs.get(v)
            if spec is not None and at < len(spec) and v.aval.shape[at] == count and spec[at] is not None:
                return spec[at]
        return None

    def sent(self, site: Site, operands: Sequence[Array]) -> Array | None:
        """The first input of a site, gathered once for column-sharded weights; None if it need not be."""
        x = site.inputs[0] if site.num_inputs else None
        spec = self._sent.get(x) if isinstance(x, Var) else None
        return None if spec is None else self.put(operands[0], spec)

    def _find_sent(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            x, labels = slot.relation.site.inputs[0], slot.layout.x
            if not isinstance(x, Var) or labels is None or slot.layout.x_is_viewed:
                continue
            fits = len(labels) == len(x.aval.shape) and jnp.issubdtype(x.aval.dtype, jnp.inexact)
            if fits and self._names[slot.key][0] and x not in self._sent:
                self._sent[x] = self.of_input(slot, x.aval.shape)

    def put(self, x: Array, spec: Spec) -> Array:
        """Constrain an array to a spec."""
        return _meshes.constrain(x, self.mesh, self.fitted(spec, x.shape))

    def named(self, spec: Spec, shape: Shape) -> jax.sharding.NamedSharding:
        """The sharding of an array of this shape."""
        return _meshes.named(self.mesh, self.fitted(spec, shape))

    def ways(self, part: MeshAxes, size: int) -> int:
        """The number of shards of an axis of this size; 0 if they do not divide it evenly."""
        ways = _meshes.ways(self.mesh, part)
        return ways if size % ways == 0 else 0

    def fitted(self, spec: Spec, shape: Shape) -> Spec:
        """Drop mesh axes that do not divide an array axis evenly, or that occur twice."""
        return _meshes.fitted(self.mesh, spec, shape)


def _sharding(v: Var, array: Array) -> tuple[AnyMesh, Spec] | None:
    """The mesh and the spec of an input; leading axes that `vmap` added are dropped."""
    found, shape = _meshes.sharding_of(array), v.aval.shape
    lead = 0 if found is None else len(found[1]) - len(shape)
    if found is None or array.shape[lead:] != shape:
        return None
    return found[0], found[1][lead:]  # type: ignore[return-value]  # arrays have no `UNCONSTRAINED` axis


def _alike(a: AnyMesh, b: AnyMesh) -> bool:
    return bool(a.shape_tuple == b.shape_tuple and a.axis_types == b.axis_types)


def _used(parts: Iterable[MeshAxes], part: MeshAxes) -> bool:
    return not set(names_of(part)).isdisjoint(n for p in parts for n in names_of(p))


def _label_of(slot: Slot, axis: int) -> str | None:
    """The trace label of an axis of the hidden positions."""
    shape = slot.group.varshape
    return slot.label_along(np.indices(shape)[axis] + 1, shape[axis])


def _counted(view: Callable[[Array], Array], shape: Shape, axis: int, labels: Labels) -> str | None:
    """The label of an axis of the viewed array."""
    numbers = np.indices(shape, sparse=True)[axis]
    with jax.ensure_compile_time_eval():
        seen = np.asarray(view(jnp.asarray(np.broadcast_to(numbers, shape))))
    return counting(seen, labels, shape[axis])


def _first_axis(spec: Spec, of: Shape, shape: Shape) -> Spec:
    """The spec of an array whose first axis is the batch axis of states of shape `of`, if lengths agree."""
    same = bool(spec) and bool(shape) and of[0] == shape[0]
    return (spec[0] if same else None, *[None] * (len(shape) - 1)) if shape else ()
