"""SnAp(n): the influence of every parameter where it can act within `n` steps.

    P[t] = M * (H[t] P[t-1] + dh[t]/dw)        gradient = within the window + dL/dh[start] P[start]

with `H` = dh[t]/dh[t-1] along all paths, and `M` one where an element of a parameter reaches a state variable
in at most `n` steps. The pattern `M` comes from the structure of the step: sparse and grouped products,
convolutions, layers. A dense recurrence reaches everything in two steps, and `P` is then that of RTRL.

Parameter elements that reach the same state variables make a set; sets of about one size make a block, which
is advanced as one batch of products. `H` and `dh/dw` are compressed Jacobians: state variables that no
element reaches together have one colour, and are pulled back together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from .._compiler.errors import NotSupportedError
from .._compiler.exactness import RuleKind
from .._compiler.influence_pattern import Reached, find_reached
from .._executor.executor import ETraceGraphExecutor
from .._executor.jacobian import earlier
from .._executor.per_sample import PerSample, find_per_sample, real_parts
from .._executor.sharding import Spec, names_of
from .._executor.trace_math import finite, promoted
from .._executor.weight_gradients import row_axis
from .._executor.window import Window
from .._meshes import mesh_of, per_device
from .._types import Array, Leaves, NumPyArray
from .rule import Flags, Rule, Shapes, Values

DType = np.dtype[Any]
Influence = Float[Array, "samples sets state param"]

MOST = 16777216  # stored entries, of all samples


@dataclass(frozen=True)
class SnAp(Rule):
    """The entries of the influence matrix that a parameter can reach within `n` steps.

    Args:
        n: Number of steps, at least 1.
        max_jacobian_elements: Largest number of entries; a larger influence matrix is refused.
        samples: Batch axis of the states; 'auto' finds it, None treats the batch as one sample.
    """

    n: int = 2
    max_jacobian_elements: int = MOST
    samples: int | str | None = "auto"
    any_window: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or isinstance(self.n, bool) or self.n < 1:
            raise ValueError(f"`n` is a number of steps, from 1 on, not {self.n!r}.")

    def kind(self, windows: bool) -> RuleKind:
        return RuleKind(f"SnAp({self.n})", windows=windows, reach=self.n, samples=self.samples)

    def _pattern(self, executor: ETraceGraphExecutor) -> Pattern:
        key = (type(self), self.n, self.samples)
        if key not in executor.per_sample:
            per = find_per_sample(executor, self.samples, traces=False)
            executor.per_sample[key] = Pattern.of(per, self._reached(per), self.n)
        found: Pattern = executor.per_sample[key]
        if found.size > self.max_jacobian_elements:
            raise self._too_large(f"{found.size}", found.size)
        return found

    def _reached(self, per: PerSample) -> Reached:
        leaves = per.info.fixed_invars
        size = len(set(_elements(per))) * sum(leaves[i].aval.size for i in per.acting)
        if size > _READABLE:
            raise self._too_large(f"up to {size * per.samples.count}", size * per.samples.count)
        found = find_reached(per.info, per.samples, per.acting)
        per.linear.tell_read()
        return found

    def _too_large(self, words: str, size: int) -> NotSupportedError:
        return NotSupportedError(
            f"What parameters reach in {self.n} steps is {words} numbers, {size / 2**28:.2f} GiB in float32: "
            f"more than `max_jacobian_elements={self.max_jacobian_elements}`. Take a smaller `n` or batch, a "
            "sparser recurrence, a higher limit, or another rule: `D_RTRL` with a `rank`."
        )

    def start(self, executor: ETraceGraphExecutor) -> Values:
        pattern = self._pattern(executor)
        count = pattern.per.samples.count
        return {b.key: jnp.zeros((count, *b.rows.shape, b.places.shape[1]), b.dtype) for b in pattern.blocks}

    def specs(self, executor: ETraceGraphExecutor, shapes: Shapes) -> dict[str, Spec]:
        """The partition specs: samples as the states', and sets, or elements in them, as the parameters."""
        pattern, at = self._pattern(executor), executor.sharding
        assert at is not None
        lead = pattern.per.lead
        parts = [p for i in pattern.offsets for p in at.of_leaf(i) or () if p is not None]
        name = next((p for p in parts if set(names_of(p)).isdisjoint(names_of(lead))), None)

        def of(shape: tuple[int, ...]) -> Spec:
            by_sets = name is not None and at.ways(name, shape[1])
            return at.fitted((lead, name, None, None) if by_sets else (lead, None, None, name), shape)

        return {k: of(a.shape) for k, a in shapes.items()}

    def _by_device(
        self,
        executor: ETraceGraphExecutor,
        block: Block,
        function: Callable[..., Array],
        kept: Influence,
        given: Sequence[Float[Array, "samples ..."]],
        axes: Sequence[int] = (0, 1, 2, 3),
    ) -> Array:
        """`function(block, kept, *given)`, on each device for its own shard; its axes are those of `kept`."""
        at = executor.sharding
        if at is None or mesh_of(kept) is None:
            return function(block, kept, *given)
        spec, n = self.specs(executor, {block.key: kept})[block.key], len(given)
        specs = [spec, *((spec[0], *[None] * (a.ndim - 1)) for a in given), *block.specs(spec)]
        arrays, tree = jax.tree.flatten(block)
        part = lambda kept, *rest: (function(jax.tree.unflatten(tree, rest[n:]), kept, *rest[:n]),)
        mapped = per_device(part, at.mesh, specs, [tuple(spec[a] for a in axes)])
        return mapped(kept, *given, *arrays)[0]  # type: ignore[no-any-return]

    def advance(self, executor: ETraceGraphExecutor, values: Values, window: Window) -> Values:
        pattern = self._pattern(executor)

        def step(values: Values, window: Window) -> tuple[Values, tuple[()]]:
            if window.keep is not None:
                values = self.forget(executor, values, ~window.keep[0])
            H, terms = pattern.jacobian(window), pattern.terms(window)
            after = {
                b.key: self._by_device(executor, b, Block.advanced, values[b.key], (H, terms[b.dtype]))
                for b in pattern.blocks
            }
            return after, ()

        return window.scan_windows(1, step, values)[0] if values else values

    def past(self, executor: ETraceGraphExecutor, values: Values, signals: Leaves, window: Window) -> Leaves:
        pattern = self._pattern(executor)
        signal = pattern.per.shard_samples(finite(pattern.per.vectors(signals, dual=True)))
        summed = lambda b: self._by_device(executor, b, Block.summed, values[b.key], (signal,), (0, 1, 3))
        found = pattern.gradients({b.key: jnp.sum(summed(b), axis=0) for b in pattern.blocks})
        return [found.get(i) for i in range(len(window.params))]

    def forget(self, executor: ETraceGraphExecutor, values: Values, is_reset: Flags) -> Values:
        return self._pattern(executor).per.reset(values, is_reset)


_READABLE = 2**32  # largest pattern that is computed: one bit per entry


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
class Pattern:
    """The sparsity pattern of the stored influence, as blocks."""

    per: PerSample
    blocks: list[Block]
    offsets: dict[int, tuple[DType, int, int]]  # of each leaf: type, first index and size
    colours: Int[NumPyArray, " n"]  # of state variables: no parameter element reaches two of one colour
    state_colours: Int[NumPyArray, " n"]  # no state variable reaches two of one colour
    moves: Bool[NumPyArray, "n n"]

    @staticmethod
    def of(per: PerSample, reached: Reached, n: int) -> Pattern:
        element, leaves = _elements(per), per.info.fixed_invars
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
        return Pattern(per, blocks, offsets, colours, state_colours, moves)

    @property
    def size(self) -> int:
        """The number of stored entries, of all samples."""
        kept = sum(b.rows.size * b.places.shape[1] for b in self.blocks)
        return int(kept * self.per.samples.count)

    def jacobian(self, window: Window) -> Float[Array, "samples n n"]:
        """The full Jacobian `H` of a step."""
        pulled, _ = self.per.back(window, _rows(self.state_colours, self.per))
        found = pulled[:, self.state_colours]
        return self.per.shard_samples(finite(jnp.where(self.moves[None], found, jnp.zeros_like(found))))

    def terms(self, window: Window) -> dict[DType, Float[Array, "samples colours params"]]:
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

    def gradients(self, summed: dict[str, Float[Array, "sets param"]]) -> dict[int, Array]:
        """The gradient of each parameter leaf, from the sums of all blocks."""
        leaves, sizes = self.per.info.fixed_invars, dict[DType, int]()
        for dtype, start, n in self.offsets.values():
            sizes[dtype] = start + n
        totals = {}
        for dtype, size in sizes.items():
            total = jnp.zeros((size + 1,), dtype)  # the last entry takes the padding
            for b in self.blocks:
                if b.dtype == dtype:
                    each = self.per.replicated(summed[b.key])
                    total = total.at[b.places.ravel()].set(each.ravel().astype(dtype))
            totals[dtype] = self.per.replicated(total)
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


def _elements(per: PerSample) -> Int[NumPyArray, " n"]:
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
