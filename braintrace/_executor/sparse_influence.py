"""The influence of parameters on the state of each sample, where elements can reach it in some steps.

    P[t] = M * (H[t] P[t-1] + dh[t]/dw)        gradient = sum over samples and state variables of signal P

Parameter elements that reach the same state variables make a set; sets of about one size make a block, which
is advanced as one batch of products. `H` and `dh/dw` are compressed Jacobians: state variables that no
element reaches together have one colour, and are pulled back together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from .._compiler.influence_pattern import Reached
from .._meshes import mesh_of, names_of, per_device
from .._types import Array, NumPyArray, Shape, Values
from .jacobian import earlier
from .per_sample import PerSample, real_parts
from .sharding import Spec
from .trace_math import finite, promoted
from .weight_gradients import row_axis
from .window import Window

DType = np.dtype[Any]
Influence = Float[Array, "samples sets state param"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "places", "colours", "now"],
    meta_fields=["key", "dtype"],
)
@dataclass(frozen=True, eq=False)
class Block:
    """Sets of state variables of about one size, each with the parameter elements that reach it.

    Shorter sets are filled up with the index one past the last, at which arrays are padded with zero.
    """

    key: str
    dtype: DType  # of the parameters
    rows: Int[NumPyArray, "sets state"]
    places: Int[NumPyArray, "sets param"]  # indices among all parameter elements of that type
    colours: Int[NumPyArray, "sets state"]
    now: Bool[NumPyArray, "sets state param"] | None  # where the step itself acts; None for everywhere

    def specs(self, spec: Spec) -> list[Spec]:
        """The partition specs of the arrays, given that of the influence."""
        _, sets, _, places = spec
        found: list[Spec] = [(sets, None), (sets, places), (sets, None), (sets, None, places)]
        return found[: 3 if self.now is None else 4]

    def advanced(
        self, old: Influence, H: Float[Array, "samples n n"], terms: Float[Array, "samples colours params"]
    ) -> Influence:
        """The influence after a step."""
        H = _padded(_padded(H, 1), 2)[:, self.rows[:, :, None], self.rows[:, None, :]]
        new = _padded(terms, 2)[:, self.colours[:, :, None], self.places[:, None, :]]
        if self.now is not None:
            new = jnp.where(self.now[None], new, jnp.zeros_like(new))
        carried = jnp.einsum("bkrs,bksq->bkrq", *promoted(H, old))
        return (carried + new.astype(carried.dtype)).astype(old.dtype)

    def summed(self, kept: Influence, signal: Float[Array, "samples n"]) -> Float[Array, "1 sets param"]:
        """`sum signal P` over samples and state variables; the axis in front is for partial sums."""
        along = _padded(signal, 1)[:, self.rows]
        found: Array = jnp.expand_dims(jnp.einsum("bkr,bkrq->kq", *promoted(along, kept)), 0)
        return found


@dataclass(frozen=True, eq=False)
class SparseInfluence:
    """The influence of all parameters, as blocks."""

    per: PerSample
    blocks: list[Block]
    offsets: dict[int, tuple[DType, int, int]]  # of each leaf: type, first index and size
    colours: Int[NumPyArray, " n"]  # of state variables: no parameter element reaches two of one colour
    state_colours: Int[NumPyArray, " n"]  # no state variable reaches two of one colour
    moves: Bool[NumPyArray, "n n"]

    @staticmethod
    def of(per: PerSample, reached: Reached, n: int) -> SparseInfluence:
        element, leaves = elements(per), per.info.fixed_invars
        offsets: dict[int, tuple[DType, int, int]] = {}
        sizes: dict[DType, int] = {}
        for i in reached.params:
            dtype, size = leaves[i].aval.dtype, int(leaves[i].aval.size)
            offsets[i] = (dtype, sizes.get(dtype, 0), size)
            sizes[dtype] = sizes.get(dtype, 0) + size
        after = reached.after(n)
        bits = np.concatenate([np.zeros((0, -(-reached.labels // 8)), np.uint8), *reached.params.values()])
        first = _unpack(np.unique(bits, axis=0), reached.labels)
        # the imaginary part of a complex element is a state variable of its own, with a colour of its own
        colours, state_colours = (
            of[element] + (of.max(initial=-1) + 1) * earlier(element)
            for of in (_colours(first.T), _colours(reached.moves))
        )
        blocks: list[Block] = []
        for dtype in sizes:
            mine = [i for i in reached.params if offsets[i][0] == dtype]
            sets, instant = (np.concatenate([d[i] for i in mine]) for d in (after, reached.params))
            blocks += _blocks(dtype, sets, instant, element, reached.labels, colours, len(blocks))
        moves = reached.moves[element][:, element]
        return SparseInfluence(per, blocks, offsets, colours, state_colours, moves)

    @property
    def size(self) -> int:
        """The number of stored entries, of all samples."""
        kept = sum(b.rows.size * b.places.shape[1] for b in self.blocks)
        return int(kept * self.per.samples.count)

    def zeros(self) -> Values:
        return {b.key: jnp.zeros(self._shape(b), b.dtype) for b in self.blocks}

    def _shape(self, block: Block) -> Shape:
        return (self.per.samples.count, *block.rows.shape, block.places.shape[1])

    def specs(self) -> dict[str, Spec]:
        """The partition specs: samples as the states', and sets, or elements in them, as the parameters."""
        return {b.key: self._spec(b) for b in self.blocks}

    def _spec(self, block: Block) -> Spec:
        at, lead, shape = self.per.executor.sharding, self.per.lead, self._shape(block)
        assert at is not None
        parts = [p for i in self.offsets for p in at.of_leaf(i) or () if p is not None]
        name = next((p for p in parts if set(names_of(p)).isdisjoint(names_of(lead))), None)
        by_sets = name is not None and at.ways(name, shape[1])
        return at.fitted((lead, name, None, None) if by_sets else (lead, None, None, name), shape)

    def advanced(self, values: Values, window: Window) -> Values:
        """The influence after a window of one step."""
        H, terms = self._jacobian(window), self._terms(window)
        given = {b.key: (values[b.key], (H, terms[b.dtype])) for b in self.blocks}
        return {b.key: self._by_device(b, Block.advanced, *given[b.key]) for b in self.blocks}

    def _by_device(
        self,
        block: Block,
        function: Callable[..., Array],
        kept: Influence,
        given: Sequence[Float[Array, "samples ..."]],
        axes: Sequence[int] = (0, 1, 2, 3),
    ) -> Array:
        """`function(block, kept, *given)`, on each device for its own shard; its axes are those of `kept`.

        XLA would gather the influence, which is indexed by constants.
        """
        at = self.per.executor.sharding
        if at is None or mesh_of(kept) is None:
            return function(block, kept, *given)
        spec, n = self._spec(block), len(given)
        specs = [spec, *((spec[0], *[None] * (a.ndim - 1)) for a in given), *block.specs(spec)]
        arrays, tree = jax.tree.flatten(block)
        part = lambda kept, *rest: (function(jax.tree.unflatten(tree, rest[n:]), kept, *rest[:n]),)
        mapped = per_device(part, at.mesh, specs, [tuple(spec[a] for a in axes)])
        return mapped(kept, *given, *arrays)[0]  # type: ignore[no-any-return]

    def _jacobian(self, window: Window) -> Float[Array, "samples n n"]:
        """The full Jacobian `H` of a step."""
        pulled, _ = self.per.back(window, _rows(self.state_colours, self.per))
        found = pulled[:, self.state_colours]
        return self.per.shard_samples(finite(jnp.where(self.moves[None], found, jnp.zeros_like(found))))

    def _terms(self, window: Window) -> dict[DType, Float[Array, "samples colours params"]]:
        """`dh/dw` by type of the parameters, with the rows of one colour together."""
        rows = _rows(self.colours, self.per)
        added = self.per.pull(window, rows, samples_only=True)[1]
        parts: dict[DType, list[Array]] = {}
        for i, (dtype, _, size) in self.offsets.items():
            if i in added:
                axis = 1 + row_axis(added[i].ndim - 2)
                one = self.per.shard_samples(jnp.moveaxis(added[i], axis, 1))
                one = self.per.shard_samples(one.reshape(*one.shape[:2], size))
            else:
                one = jnp.zeros((1, 1, 1), dtype)
            one = jnp.broadcast_to(one, (*rows.shape[:2], size))
            parts.setdefault(dtype, []).append(self.per.shard_samples(one))
        return {dtype: self.per.shard_samples(jnp.concatenate(found, 2)) for dtype, found in parts.items()}

    def gradients(self, values: Values, signal: Float[Array, "samples n"]) -> dict[int, Array]:
        """`sum signal P` over samples and state variables, by leaf of the parameters."""
        leaves, sizes = self.per.info.fixed_invars, dict[DType, int]()
        for dtype, start, n in self.offsets.values():
            sizes[dtype] = start + n
        totals = {
            dtype: jnp.zeros((n + 1,), dtype) for dtype, n in sizes.items()
        }  # the last takes the padding
        for b in self.blocks:
            summed = self._by_device(b, Block.summed, values[b.key], (signal,), (0, 1, 3))
            each = self.per.replicated(jnp.sum(summed, axis=0)).ravel().astype(b.dtype)
            totals[b.dtype] = totals[b.dtype].at[b.places.ravel()].set(each)
        totals = {dtype: self.per.replicated(total) for dtype, total in totals.items()}
        return {
            i: self.per.replicated(totals[dtype][start : start + n].reshape(leaves[i].aval.shape))
            for i, (dtype, start, n) in self.offsets.items()
        }


def _blocks(
    dtype: DType,
    sets: NumPyArray,
    instant: NumPyArray,
    element: NumPyArray,
    labels: int,
    colours: NumPyArray,
    first: int,
) -> list[Block]:
    """The blocks of all parameters of one type."""
    kinds, which = np.unique(sets, axis=0, return_inverse=True)
    has = _unpack(kinds, labels)[:, element]
    members = np.split(np.argsort(which.ravel(), kind="stable"), np.cumsum(np.bincount(which.ravel()))[:-1])
    together: dict[tuple[int, int], list[int]] = {}
    for k in range(len(kinds)):
        if has[k].any():
            size = (_about(int(has[k].sum())), _about(len(members[k])))
            together.setdefault(size, []).append(k)
    result: list[Block] = []
    for group in together.values():
        rows = _same_length([np.flatnonzero(has[k]) for k in group], len(element))
        places = _same_length([members[k] for k in group], len(sets))
        bits = np.concatenate([instant, np.zeros_like(instant[:1])])
        seen = _unpack(bits[places], labels)[:, :, element]  # (sets, places, carried)
        seen = np.concatenate([seen, np.zeros_like(seen[:, :, :1])], 2)
        now = np.take_along_axis(seen, rows[:, None, :], 2).swapaxes(1, 2)
        of_rows = np.append(colours, 0)[rows]
        everywhere = bool(np.all(now | (rows == len(element))[:, :, None] | (places == len(sets))[:, None]))
        key = f"pattern:{first + len(result)}:{np.dtype(dtype).name}"
        result.append(Block(key, dtype, rows, places, of_rows, None if everywhere else now))
    return result


def elements(per: PerSample) -> Int[NumPyArray, " n"]:
    """The label of each state variable of a sample: both parts of a complex element have one label."""
    found, first = [np.zeros(0, int)], 0
    for v in per.samples.carried:
        size = v.aval.size // per.samples.count
        found += [np.arange(first, first + size)] * real_parts(v)
        first += size
    return np.concatenate(found)


def _unpack(bits: NumPyArray, labels: int) -> NumPyArray:
    return np.unpackbits(bits, axis=-1, count=labels).astype(bool)


def _colours(rows: Bool[NumPyArray, "rows columns"]) -> Int[NumPyArray, " rows"]:
    """A colour for each row, such that no column has two rows of one colour."""
    taken = np.zeros((0, rows.shape[1]), bool)  # of each colour, the columns that it has
    found = np.zeros(len(rows), int)
    for n, row in enumerate(rows):
        free = np.flatnonzero(~np.any(taken & row, axis=1))
        if not len(free):
            taken, free = np.concatenate([taken, np.zeros((1, rows.shape[1]), bool)]), np.array([len(taken)])
        found[n] = free[0]
        taken[free[0]] |= row
    return found


def _rows(colours: NumPyArray, per: PerSample) -> Float[Array, "samples colours n"]:
    """Ones where each colour is."""
    count = int(colours.max(initial=0)) + 1
    rows = (np.arange(count)[:, None] == colours[None]).astype(per.dtype)
    return jnp.broadcast_to(jnp.asarray(rows), (per.samples.count, *rows.shape))


def _same_length(arrays: Sequence[NumPyArray], fill: int) -> NumPyArray:
    most = max(map(len, arrays))
    return np.stack([np.concatenate([a, np.full(most - len(a), fill, a.dtype)]) for a in arrays])


def _about(size: int) -> int:
    """The size, rounded up to one of four per power of two, because each size is a product of its own."""
    step = 2 ** max(0, math.ceil(math.log2(size)) - 2)
    return int(-(-size // step) * step)


def _padded(array: Array, axis: int) -> Array:
    """The array with a zero past the last entry of an axis."""
    return jnp.pad(array, [(0, int(a == axis)) for a in range(array.ndim)])
