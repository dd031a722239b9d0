"""A slot: the layout of the trace of one weight at one site for one group, and the arithmetic on it.

Axis labels (`_ops.axis_labels`) define the axes of a trace, and the position map assigns a hidden position to
each of its elements. A trace has one more axis in front, for the states of the group:

    update    trace <- D trace + J x          D (S, S, *hidden), J (S, *positions), x the op's factor
    contract  dL/dw = sum g trace             g (S, *hidden)
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._compiler.errors import NotSupportedError
from .._compiler.groups import HiddenGroup
from .._compiler.links import Array as NpArray
from .._compiler.links import numbered
from .._compiler.relation import HiddenParamOpRelation, PositionMap
from .._compiler.samples import counting
from .._meshes import mesh_of
from .._ops.axis_labels import Labels, Layout, align
from .partial_sums import DeviceSplit, Gradient
from .sharding import Sharding
from .take_at import take_at
from .trace_math import States, add_up, contract_states, guarded, promoted, states, times
from .weight_gradients import (
    factor_over_time,
    floating_factor,
    merge_leading_axes,
    product,
)


@dataclass(frozen=True, eq=False)
class Slot:
    """The layout of one trace and its arithmetic; holds no arrays."""

    relation: HiddenParamOpRelation
    name: str  # name of the effective weight
    group: HiddenGroup
    positions: PositionMap
    uniform: Labels = ()  # axes of the weight along which the trace is the same, which it therefore lacks
    # start and stop of the weight's last axis that the trace covers; None for all, the others have no trace
    columns: tuple[int, int] | None = None

    @property
    def key(self) -> str:
        """A stable name from the index of the op, the parameter, the weight and the group."""
        path = ".".join(self.relation.weight_path)
        return f"{self.relation.site.index}:{path}:{self.name}->{self.group.index}"

    @property
    def layout(self) -> Layout:
        return self.relation.layouts[self.name]

    @property
    def site_shape(self) -> tuple[int, ...]:
        return self.relation.site.shape

    def means_the_same_as(self, other: Slot) -> bool:
        """Whether traces of both slots have the same layout and refer to the same states."""
        a, b = self.positions, other.positions
        return (
            self.labels == other.labels
            and a.on_hidden == b.on_hidden
            and np.array_equal(a.map, b.map)
            and self.group.hidden_paths == other.group.hidden_paths
        )

    def factor(self, inputs: Sequence[Array], over: Labels = ()) -> tuple[Array, Labels] | None:
        """The factor `x` of the op with its labels, which begin with `over` (time); None if it has none."""
        find = factor_over_time if over else floating_factor
        return find(self.layout, inputs, self.relation.site.output.aval.dtype)

    @cached_property
    def _broadcast_axes(self) -> tuple[int, ...] | None:
        """For a broadcast, the hidden axis of each axis of `y`; None if it is not a plain broadcast."""
        shape, hidden = self.site_shape, self.group.varshape
        numbers = numbered(shape)
        for axes in itertools.combinations(range(len(hidden)), len(shape)):
            fits = all(n in (1, hidden[a]) for n, a in zip(shape, axes, strict=True))
            expanded = [1] * len(hidden)
            for n, a in zip(shape, axes, strict=True):
                expanded[a] = n
            if fits and np.array_equal(
                np.broadcast_to(numbers.reshape(expanded), hidden), self.positions.map
            ):
                return axes
        return None

    @cached_property
    def _extra(self) -> Labels:
        """Labels of the hidden axes that `y` lacks."""
        if not self.positions.on_hidden:
            return ()
        if self._broadcast_axes is None:
            return ("+all",)
        return tuple(f"+{a}" for a in self._extra_axes)

    @property
    def _extra_axes(self) -> list[int]:
        assert self._broadcast_axes is not None
        sizes = dict(zip(self._broadcast_axes, self.site_shape, strict=True))
        return [a for a, n in enumerate(self.group.varshape) if sizes.get(a, 1) != n]

    @cached_property
    def summed(self) -> Labels:
        """Labels of `y` that the weight lacks and along which the hidden position is constant.

        The trace is summed over these axes at once (a reduction, or a loop that accumulates).
        """
        if self.positions.on_hidden or self.layout.y_is_viewed:
            return ()
        places = self.positions.map
        return tuple(
            label
            for axis, label in enumerate(self.layout.y)
            if label not in self.layout.w and np.all(places == places.take([0], axis))
        )

    @property
    def y(self) -> Labels:
        """The labels of `J`."""
        return self._extra + self.layout.y

    @property
    def at(self) -> Labels:
        """The labels of `D` and `g` at the positions of the trace."""
        return tuple(a for a in self.y if a not in self.summed)

    @property
    def labels(self) -> Labels:
        """The labels of the trace."""
        return tuple(a for a in self.at if a not in self.layout.w) + self._varying(self.layout.w)

    def _varying(self, labels: Labels) -> Labels:
        """The labels of axes along which the trace varies."""
        return tuple(a for a in labels if a not in self.uniform)

    def _narrow(self, q: Array, labels: Labels, lead: int) -> Array:
        """Drop uniform axes and uncovered columns; `labels` are those of the axes after the first `lead`."""
        q = self._covered(q, labels, lead)
        for axis, label in reversed(list(enumerate(labels))):
            if label in self.uniform:
                q = jax.lax.index_in_dim(q, 0, lead + axis, keepdims=False)
        return q

    def _covered(self, q: Array, labels: Labels, lead: int) -> Array:
        """The columns that the trace covers; `labels` are those of the axes after the first `lead`."""
        if self.columns is None:
            return q
        return jax.lax.slice_in_dim(q, *self.columns, axis=lead + labels.index(self.layout.w[-1]))

    def uncovered(self, dw: Array) -> Array:
        """A gradient of the covered columns, with zeros for the others."""
        if self.columns is None:
            return dw
        (start, stop), layout = self.columns, self.layout
        num = self.site_shape[layout.y.index(layout.w[-1])]
        return jnp.pad(dw, [*[(0, 0)] * (dw.ndim - 1), (start, num - stop)])

    @cached_property
    def _map(self) -> NpArray:
        places = self.positions.map
        for axis, label in reversed(list(enumerate(self.layout.y))):
            if label in self.summed:
                places = places.take(0, axis)
        return places

    def lift(self, q: Array, inputs: Sequence[Array], lead: int) -> Array:
        """Take an array (`lead` axes, *hidden axes) to the positions of the trace."""
        if self.positions.on_hidden:
            return self._lift_broadcast(q, inputs, lead)
        q = take_at(q, self._map, lead, self.group.varshape)
        return self._view(q, inputs, lead) if not self.summed else q

    def _to_site(self, q: Array, lead: int) -> Array:
        """Take an array (`lead` axes, *hidden axes) to the positions of `J`."""
        if self.positions.on_hidden:
            return q
        return take_at(q, self.positions.map, lead, self.group.varshape)

    def pair(
        self, q: States, p: States, lead: int = 0, by: Callable[[Array, Array], Array] = operator.mul
    ) -> Array:
        """`sum_s q[s] p[s]` with `q` at hidden positions and `p` at those of `J`, after `lead` axes."""
        return add_up(by(*promoted(self._to_site(a, lead), b)) for a, b in zip(q, p, strict=True))

    def to_y(self, q: Array, lead: int = 0) -> Array:
        """Take a cotangent at the positions of `J` to a cotangent of `y`."""
        if not self.positions.on_hidden:
            return q
        if lead:
            return jax.vmap(lambda one: self.to_y(one, lead - 1))(q)
        size, places = int(np.prod(self.site_shape, dtype=int)), self.positions.map.ravel()
        kept = np.flatnonzero(places >= 0)  # an index of -1 would be the last element
        y = jnp.zeros(size, q.dtype).at[places[kept]].add(q.ravel()[kept])
        return y.reshape(self.site_shape)

    def from_cotangent(
        self,
        factor: tuple[Array, Labels] | None,
        dy: Array,
        inputs: Sequence[Array],
        weight: Array,
        over: Labels = (),
        sharding: Sharding | None = None,
    ) -> Gradient:
        """The weight gradient `sum x dy` from a cotangent of `y`, with the axes of the weight.

        `over` are labels of leading axes of `dy`, `inputs` and the factor (time), which are summed over. With
        `sharding`, it is per-device partial sums if the batch is sharded.
        """
        view = self.layout.view_y
        for _ in over:
            view = jax.vmap(view)
        dy, y = view(dy, inputs), over + self.layout.y
        parts, operands = self._parts(sharding, y, dy.shape), [(dy, y)]
        if factor is not None:
            x, have = factor
            if mesh_of(x, dy) is None:  # a batch axis merged with time would have to be gathered
                x, have, dy, y = merge_leading_axes(x, have, dy, y, self.layout.w)
            operands = [(x, have), (dy, y)]
        found, shape = product(operands, self.layout.w, parts), self.layout.view_w(weight).shape
        if parts is None:
            return jnp.broadcast_to(found, shape)
        return parts.sums(jnp.broadcast_to(found, (parts.ways, *shape)))

    def _parts(self, sharding: Sharding | None, labels: Labels, shape: tuple[int, ...]) -> DeviceSplit | None:
        """How the batch axis of an array with these labels is split over devices; None if it is not."""
        return None if sharding is None else sharding.parts(self.layout, labels, shape, sharding.names(self))

    def _lift_broadcast(self, q: Array, inputs: Sequence[Array], lead: int) -> Array:
        head = q.shape[:lead]
        if self._broadcast_axes is None:
            size = int(np.prod(self.site_shape, dtype=int))
            # no axis of `y` is one of the state: use a one-hot table of positions
            hit = np.arange(size) == self.positions.map.reshape(*[1] * lead, -1, 1)
            q = q.reshape(*head, -1, 1) * jnp.asarray(hit, q.dtype)
            return self._view(q.reshape(*head, -1, *self.site_shape), inputs, lead + 1)
        extra = self._extra_axes
        order = [*extra, *(a for a in range(len(self.group.varshape)) if a not in extra)]
        q = jnp.transpose(q, [*range(lead), *(lead + a for a in order)])
        return self._view(
            q.reshape(*q.shape[: lead + len(extra)], *self.site_shape), inputs, lead + len(extra)
        )

    def _view(self, q: Array, inputs: Sequence[Array], lead: int) -> Array:
        if not self.layout.y_is_viewed:
            return q

        def view(one: Array) -> Array:
            return self.layout.view_y(one, inputs)

        for _ in range(lead):
            view = jax.vmap(view)
        return view(q)

    def lift_instant(
        self, J: Float[Array, "state ..."], inputs: Sequence[Array]
    ) -> Float[Array, "state ..."]:
        """Take the `J` of a site, (S, *positions), to the axes `varying(y)`."""
        J = self._lift_broadcast(J, inputs, 1) if self.positions.on_hidden else self._view(J, inputs, 1)
        return self._narrow(J, self.y, 1)

    def lift_decay(self, D: Array, inputs: Sequence[Array], lead: int) -> Array:
        """Take a local Jacobian (`lead` axes, *hidden axes) to the axes `varying(at)`."""
        return self._narrow(self.lift(D, inputs, lead), self.at, lead)

    def instant(
        self, factor: tuple[Array, Labels] | None, J: Array, weight: Array, over: Labels = ()
    ) -> Array:
        """The instant term `J x`, broadcast to the trace; `J` has the axes `varying(y)`.

        `over` are labels of axes (time) after the states in `J`, and first in the factor, that are summed.
        """
        y, labels, summed = over + self._varying(self.y), self.labels, over + self.summed
        if factor is None:
            q = jnp.sum(J, axis=tuple(1 + i for i, a in enumerate(y) if a in summed))
            result = _align_states(q, tuple(a for a in y if a not in summed), labels)
        elif not summed:
            x, have = factor
            x, J = promoted(x, J)
            result = _align_states(J, y, labels) * align(x, have, labels)[None]
        else:
            # one product per state: with the states as an axis, XLA would transpose the whole trace
            result = jnp.stack([product([factor, (one, y)], labels) for one in J])
        sizes = dict(zip(self.layout.w, self.layout.view_w(weight).shape, strict=True))
        if self.columns is not None:
            sizes[self.layout.w[-1]] = self.columns[1] - self.columns[0]
        full = tuple(sizes.get(a, n) for a, n in zip(labels, result.shape[1:], strict=True))
        return jnp.broadcast_to(result, (result.shape[0], *full))

    def decay(
        self,
        D: Float[Array, "state state ..."] | None,
        trace: Float[Array, "state ..."],
        coupled: NpArray | None = None,
    ) -> Float[Array, "state ..."]:
        """`D trace`; `D` is (S, S, *varying(at)), zero except where `coupled`; None if there is no memory."""
        if D is None:
            return jnp.zeros_like(trace)
        D, trace = promoted(D, trace)
        D, by = guarded(D, trace.nbytes)
        n, at = self.group.num_state, self._varying(self.at)
        blocks = [[align(D[s, r], at, self.labels) for r in range(n)] for s in range(n)]
        if n == 1:
            return by(blocks[0][0][None], trace)
        each = states(trace, 0)
        kept = [[r for r in range(n) if coupled is None or coupled[s, r]] for s in range(n)]
        return jnp.stack(
            [
                add_up(by(blocks[s][r], each[r]) for r in kept[s]) if kept[s] else jnp.zeros_like(each[0])
                for s in range(n)
            ]
        )

    def contract(
        self, g: Float[Array, "state ..."], trace: Float[Array, "state ..."], sharding: Sharding | None = None
    ) -> Gradient:
        """`sum g trace`, with the axes of the weight; `g` is (S, *at).

        With `sharding`, it is per-device partial sums if the batch is sharded.
        """
        parts = self._parts(sharding, self.labels, trace.shape[1:])
        if self.uniform:
            pairs = [(g, ("states", *self.at)), (trace, ("states", *self.labels))]
            found = product(pairs, self.layout.w, parts)
            return found if parts is None else parts.sums(found)
        g, trace = promoted(_align_states(self._covered(g, self.at, 1), self.at, self.labels), trace)
        if parts is None:
            return self.uncovered(self._contract(g, trace))
        axis = 1 + self.labels.index(parts.label)
        g, trace = (parts.split(a, axis) for a in (g, trace))
        return parts.sums(self.uncovered(jax.vmap(self._contract, axis)(g, trace)))

    def _contract(self, g: Array, trace: Array) -> Array:
        lead = 1 + len(self.labels) - len(self.layout.w)
        num = self.group.num_state
        if g.size == trace.size:  # a bias, for which the order of the sum does not matter
            return jnp.sum(times(g, trace), axis=tuple(range(lead)))
        g = g.reshape(num, -1, *g.shape[lead:])
        trace = trace.reshape(num, -1, *trace.shape[lead:])
        return contract_states(g, trace)

    def label_along(self, numbers: NpArray, count: int) -> str | None:
        """The label of the trace axis along which numbers at the hidden positions count from 1 to `count`."""
        with jax.ensure_compile_time_eval():
            q = jnp.asarray(numbers, jnp.float32)[None]
            seen = np.asarray(self.lift(q, self.relation.site.no_inputs, 1)[0])
        # elements of the output that reach no state are zero
        return counting(seen.astype(int) - 1, self.at, count)

    # -- reset of samples --------------------------------------------------------------------------

    def where(self, keep: Array, trace: Float[Array, "state ..."]) -> Float[Array, "state ..."]:
        """Reset the trace of the samples (the first hidden axis) for which `keep` is False."""
        kept = self.lift_decay(self._of_samples(keep)[None], self.relation.site.no_inputs, 1)
        kept = jnp.broadcast_to(_align_states(kept, self._varying(self.at), self.labels), trace.shape)
        return jax.lax.select(kept != 0, trace, jnp.zeros_like(trace))

    def where_instant(self, keep: Array, J: Array) -> Array:
        """Reset samples of an array shaped as `J`, (S, *positions)."""
        kept = jnp.broadcast_to(self._to_site(self._of_samples(keep)[None], 1), J.shape)
        return jax.lax.select(kept != 0, J, jnp.zeros_like(J))

    def where_input(self, keep: Array, x: Array) -> Array:
        """Reset samples of an array shaped as the first input of the op, or as its factor."""
        axis = self._sample_axis
        if axis is None:
            raise NotSupportedError(
                f"Samples of the batch cannot be reset separately: the input of the op at "
                f"{self.relation.site.source} has no batch axis. Reset all of them."
            )
        shape = [-1 if a == axis else 1 for a in range(x.ndim)]
        return jnp.where(keep.reshape(shape), x, jnp.zeros_like(x))

    @cached_property
    def _sample_axis(self) -> int | None:
        """The batch axis of the first input or, if that is not floating, of the factor."""
        num = self.group.varshape[0]
        with jax.ensure_compile_time_eval():
            first, *rest = self.relation.site.no_inputs
            wanted = self.lift(
                self._of_samples(jnp.arange(1, num + 1))[None], self.relation.site.no_inputs, 1
            )[0]
            is_input = jnp.issubdtype(first.dtype, jnp.inexact)
            given = first if is_input else self.factor(self.relation.site.no_inputs)[0]  # type: ignore[index]
            for axis in (a for a, n in enumerate(given.shape) if n == num):
                probe = jnp.asarray(np.indices(given.shape)[axis] + 1, given.dtype)
                x, have = self.factor([probe, *rest] if is_input else self.relation.site.no_inputs)  # type: ignore[misc]
                x = x if is_input else probe
                labels = tuple(dict.fromkeys((*self.at, *have)))
                x, want = promoted(align(x, have, labels), align(wanted, self.at, labels))
                if bool(jnp.all((x == want) | (x == 0) | (want == 0))):
                    return axis
        return None

    def _of_samples(self, q: Array) -> Array:
        """Broadcast one number for each sample to the hidden positions."""
        shape, real = self.group.varshape, jnp.finfo(self.group.dtype).dtype
        return jnp.broadcast_to(q.reshape(-1, *[1] * (len(shape) - 1)), shape).astype(real)


def _align_states(q: Array, have: Labels, want: Labels) -> Array:
    return align(q, ("states", *have), ("states", *want))


def find_slots(relations: Sequence[HiddenParamOpRelation]) -> list[Slot]:
    """A slot for every trace of a graph, in program order."""
    return [
        Slot(relation, name, group, positions, relation.uniform.get(at, ()), relation.columns.get(at))
        for relation in relations
        for name in relation.layouts
        for group, positions in relation.feeds
        for at in [(name, group.index)]
    ]
