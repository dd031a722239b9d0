"""SnAp(n): the influence of every parameter where it can act within `n` steps.

    P[t] = M * (H[t] P[t-1] + dh[t]/dw)        gradient = within the window + dL/dh[start] P[start]

with `H` = dh[t]/dh[t-1] along all paths, and `M` one where a number of a parameter reaches a carried number
in at most `n` steps. The pattern `M` comes from the structure of the step: sparse and grouped products,
convolutions, layers; a dense recurrence reaches everything in two steps, and `P` is then that of RTRL.

Numbers of parameters that reach the same carried numbers make a block; blocks of about one size are advanced
as one batch of products. `dh/dw` has few numbers in each column, so that several rows are pulled back as one:
rows that no parameter reaches together have one colour, and likewise for `H`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from .._compiler.errors import NotSupportedError
from .._compiler.exactness import RuleKind
from .._compiler.influence_pattern import Reached, find_reached
from .._compiler.links import Array
from .._executor.executor import ETraceGraphExecutor, Leaves
from .._executor.per_sample import PerSample
from .._executor.sharding import Spec, names_of
from .._executor.trace_math import finite, promoted
from .._executor.weight_gradients import row_axis
from .._executor.window import Window, where_rows
from .._meshes import mesh_of, per_device
from .rank import per_sample
from .rule import Rule, Values

MOST = 16777216  # numbers that are kept, of all samples


@dataclass(frozen=True)
class SnAp(Rule):
    """The entries of the influence matrix that a parameter can reach within `n` steps.

    Args:
        n: Number of steps, at least 1.
        most: Largest number of entries; a larger influence matrix is refused.
        samples: Batch axis of the states; 'auto' finds it, None treats the batch as one sample.
    """

    n: int = 2
    most: int = MOST
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
            per = per_sample(executor, self.samples, traces=False)
            executor.per_sample[key] = Pattern.of(per, self._reached(per), self.n)
        found: Pattern = executor.per_sample[key]
        if found.size > self.most:
            raise self._too_large(f"{found.size}", found.size)
        return found

    def _reached(self, per: PerSample) -> Reached:
        numbers = sum(v.aval.size for v in per.samples.carried) // per.samples.count
        leaves = [v for e in per.info.fixed for v in e.invars]
        size = numbers * sum(leaves[i].aval.size for i in per.acting)
        if size > _READABLE:
            raise self._too_large(f"up to {size * per.samples.count}", size * per.samples.count)
        found = find_reached(per.info, per.samples, per.acting)
        per.linear.tell_read()
        return found

    def _too_large(self, words: str, size: int) -> NotSupportedError:
        return NotSupportedError(
            f"What parameters reach in {self.n} steps is {words} numbers, {size / 2**28:.2f} GiB in float32: "
            f"more than `snap_max_jacobian_elements={self.most}`. Take a smaller `n` or batch, a sparser "
            "recurrence, a higher limit, or another rule: `D_RTRL` with a `rank`."
        )

    def start(self, executor: ETraceGraphExecutor) -> Values:
        pattern = self._pattern(executor)
        count = pattern.per.samples.count
        return {b.key: jnp.zeros((count, *b.rows.shape, b.places.shape[1]), b.dtype) for b in pattern.blocks}

    def specs(self, executor: ETraceGraphExecutor, shapes: Values) -> dict[str, Spec]:
        """Over devices: samples as the states', and sets, or numbers in them, over what parameters are."""
        pattern, at = self._pattern(executor), executor.sharding
        assert at is not None
        lead = pattern.per.lead
        parts = [p for i in pattern.offsets for p in at.of_leaf(i) or () if p is not None]
        name = next((p for p in parts if set(names_of(p)).isdisjoint(names_of(lead))), None)

        def of(shape: tuple[int, ...]) -> Spec:
            by_sets = name is not None and at.ways(name, shape[1])
            return at.fitted((lead, name, None, None) if by_sets else (lead, None, None, name), shape)

        return {k: of(a.shape) for k, a in shapes.items()}

    def _advanced(self, executor: ETraceGraphExecutor, block: Block, old: Any, H: Any, terms: Any) -> Any:
        at = executor.sharding
        if at is None or mesh_of(old) is None:
            return block.advanced(old, H, terms)
        spec = self.specs(executor, {block.key: old})[block.key]
        specs = [spec, *[(spec[0], None, None)] * 2, *block.specs(spec)]
        part = lambda old, H, terms, *arrays: (block.part(arrays).advanced(old, H, terms),)
        return per_device(part, at.mesh, specs, [spec])(old, H, terms, *block.arrays)[0]

    def _summed(self, executor: ETraceGraphExecutor, block: Block, signal: Any, kept: Any) -> Any:
        at = executor.sharding
        if at is None or mesh_of(kept) is None:
            return block.summed(signal, kept)
        spec = self.specs(executor, {block.key: kept})[block.key]
        lead, sets, _, places = spec
        specs = [(lead, None), spec, *block.specs(spec)]
        # what devices have is summed outside, with all else that is
        part = lambda signal, kept, *arrays: (block.part(arrays).summed(signal, kept)[None],)
        return jnp.sum(
            per_device(part, at.mesh, specs, [(lead, sets, places)])(signal, kept, *block.arrays)[0], axis=0
        )

    def advance(self, executor: ETraceGraphExecutor, values: Values, window: Window) -> Values:
        pattern = self._pattern(executor)

        def step(values: Values, window: Window) -> tuple[Values, tuple[()]]:
            if window.keep is not None:
                values = self.forget(executor, values, ~window.keep[0])
            H, terms = pattern.jacobian(window), pattern.terms(window)
            after = {
                b.key: self._advanced(executor, b, values[b.key], H, terms[b.dtype]) for b in pattern.blocks
            }
            return after, ()

        return window.in_windows(1, step, values)[0] if values else values

    def past(self, executor: ETraceGraphExecutor, values: Values, signals: Leaves, window: Window) -> Leaves:
        pattern = self._pattern(executor)
        signal = pattern.per.shard_samples(finite(pattern.per.vectors(signals, dual=True)))
        summed = {b.key: self._summed(executor, b, signal, values[b.key]) for b in pattern.blocks}
        found = pattern.gradients(summed)
        return [found.get(i) for i in range(len(window.params))]

    def forget(self, executor: ETraceGraphExecutor, values: Values, rows: Any) -> Values:
        self._pattern(executor).per.check_rows()
        return {k: where_rows(rows, jnp.zeros_like(a), a) for k, a in values.items()}


_READABLE = 2**32  # numbers of a pattern that is looked for: a bit each


@dataclass(frozen=True, eq=False)
class Block:
    """Several sets of carried numbers of one size, each with the numbers of parameters that reach it.

    Beyond the last there is a number that is always zero, which makes the sets of one size.
    """

    key: str
    dtype: Any  # of the parameters
    rows: Array  # (sets, carried numbers)
    places: Array  # (sets, numbers of parameters), among all of that type
    now: Array | None  # where the step itself acts: (sets, carried numbers, numbers of parameters); None: all
    colours: Array  # of the rows

    @property
    def arrays(self) -> list[Any]:
        return [self.rows, self.places, self.colours, *([] if self.now is None else [self.now])]

    def part(self, arrays: Sequence[Any]) -> Block:
        """This block with its arrays replaced by a device's shards."""
        rows, places, colours, *now = arrays
        return replace(self, rows=rows, places=places, colours=colours, now=now[0] if now else None)

    def specs(self, spec: Spec) -> list[Spec]:
        """The partition specs of `arrays`, given that of the influence, (samples, sets, carried, params)."""
        _, sets, _, places = spec
        found: list[Spec] = [(sets, None), (sets, places), (sets, None), (sets, None, places)]
        return found[: len(self.arrays)]

    def advanced(self, old: Any, H: Any, terms: Any) -> Any:
        H = _padded(_padded(H, 1), 2)[:, self.rows[:, :, None], self.rows[:, None, :]]
        new = _padded(terms, 2)[:, self.colours[:, :, None], self.places[:, None, :]]
        if self.now is not None:
            new = jnp.where(self.now[None], new, jnp.zeros_like(new))
        carried = jnp.einsum("bkrs,bksq->bkrq", *promoted(H, old))
        return (carried + new.astype(carried.dtype)).astype(old.dtype)

    def summed(self, signal: Any, kept: Any) -> Any:
        """`sum signal P` over samples and carried numbers: (sets, numbers of parameters)."""
        along = _padded(signal, 1)[:, self.rows]
        return jnp.einsum("bkr,bkrq->kq", *promoted(along, kept))


@dataclass(frozen=True, eq=False)
class Pattern:
    """The sparsity pattern of the stored influence, as blocks."""

    per: PerSample
    blocks: list[Block]
    offsets: dict[int, tuple[Any, int, int]]  # of each leaf: its type, where it begins and its size
    colours: Array  # of carried numbers, of which no parameter reaches two of one colour at once
    state_colours: Array  # of which no carried number reaches two of one colour
    moves: Array

    @staticmethod
    def of(per: PerSample, reached: Reached, n: int) -> Pattern:
        element = _elements(per)
        leaves = [v for e in per.info.fixed for v in e.invars]
        offsets: dict[int, tuple[Any, int, int]] = {}
        sizes: dict[Any, int] = {}
        for i in reached.params:
            dtype, size = leaves[i].aval.dtype, int(leaves[i].aval.size)
            offsets[i] = (dtype, sizes.get(dtype, 0), size)
            sizes[dtype] = sizes.get(dtype, 0) + size
        after = reached.after(n)
        now = [reached.params[i] for i in reached.params]
        bits = np.concatenate(now) if now else np.zeros((0, 1), np.uint8)
        first = _unpack(np.unique(bits, axis=0), reached.labels)
        colours = _colours(first.T)[element]
        state_colours = _colours(reached.moves)[element]
        # a complex number is two, which go together
        colours, state_colours = (_split_complex(c, element) for c in (colours, state_colours))
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

    def jacobian(self, window: Window) -> Any:
        """`H`, (samples, state size, state size)."""
        pulled = self.per.back(window, _rows(self.state_colours, self.per))
        found = pulled[:, self.state_colours]
        return self.per.shard_samples(finite(jnp.where(self.moves[None], found, jnp.zeros_like(found))))

    def terms(self, window: Window) -> dict[Any, Any]:
        """`dh/dw`, rows of one colour together: by type, (samples, colours, numbers of parameters)."""
        rows = _rows(self.colours, self.per)
        added = self.per.pull(window, rows, samples_only=True)[1]
        parts: dict[Any, list[Any]] = {}
        for i, (dtype, _, size) in self.offsets.items():
            shape = (self.per.samples.count, rows.shape[1], size)
            if i in added:
                axis = 1 + row_axis(added[i].ndim - 2)
                flat = jnp.moveaxis(added[i], axis, 1)
                flat = self.per.shard_samples(self.per.shard_samples(flat).reshape(*flat.shape[:2], size))
            one = jnp.broadcast_to(flat, shape) if i in added else jnp.zeros(shape, dtype)
            parts.setdefault(dtype, []).append(self.per.shard_samples(one))
        return {dtype: self.per.shard_samples(jnp.concatenate(found, 2)) for dtype, found in parts.items()}

    def gradients(self, summed: dict[str, Any]) -> dict[int, Any]:
        """The gradient of each parameter leaf, from the sums of all blocks."""
        totals = {}
        for dtype in dict.fromkeys(dtype for dtype, _, _ in self.offsets.values()):
            mine = [b for b in self.blocks if b.dtype == dtype]
            size = max(start + n for d, start, n in self.offsets.values() if d == dtype)
            total = jnp.zeros((size + 1,), dtype)  # the last is of none
            for b in mine:
                each = self.per.replicated(summed[b.key])
                total = total.at[b.places.ravel()].set(each.ravel().astype(dtype))
            totals[dtype] = self.per.replicated(total)
        leaves = [v for e in self.per.info.fixed for v in e.invars]
        return {
            i: self.per.replicated(totals[dtype][start : start + n].reshape(leaves[i].aval.shape))
            for i, (dtype, start, n) in self.offsets.items()
        }


def _blocks(
    dtype: Any, sets: Array, instant: Array, element: Array, labels: int, colours: Array, first: int
) -> list[Block]:
    """The blocks of all parameters of one type; sets of about one size go together."""
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
        result.append(Block(key, dtype, rows, places, None if everywhere else now, of_rows))
    return result


def _elements(per: PerSample) -> Array:
    """The label of each carried number of a sample: a complex element is two numbers."""
    found, first = [], 0
    for v in per.samples.carried:
        size = v.aval.size // per.samples.count
        parts = 2 if jnp.issubdtype(v.aval.dtype, jnp.complexfloating) else 1
        found += [np.arange(first, first + size)] * parts
        first += size
    return np.concatenate(found) if found else np.zeros(0, int)


def _unpack(bits: Array, labels: int) -> Array:
    return np.unpackbits(bits, axis=-1, count=labels).astype(bool)


def _colours(rows: Array) -> Array:
    """A colour for each row, (rows, columns), such that no column has two rows of one colour."""
    taken = np.zeros((0, rows.shape[1]), bool)  # of each colour, the columns that it has
    found = np.zeros(len(rows), int)
    for n, row in enumerate(rows):
        free = np.flatnonzero(~np.any(taken & row, axis=1))
        if not len(free):
            taken, free = np.concatenate([taken, np.zeros((1, rows.shape[1]), bool)]), np.array([len(taken)])
        found[n] = free[0]
        taken[free[0]] |= row
    return found


def _split_complex(colours: Array, element: Array) -> Array:
    """Colours of real entries: the imaginary part of a complex element gets a colour of its own."""
    seen: dict[int, int] = {}
    count = int(colours.max(initial=-1)) + 1
    result = np.array(colours)
    for n, e in enumerate(element):
        result[n] += count * seen.get(e, 0)
        seen[e] = seen.get(e, 0) + 1
    return result


def _rows(colours: Array, per: PerSample) -> Any:
    """Ones where each colour is: (samples, colours, state size)."""
    count = int(colours.max(initial=0)) + 1
    rows = (np.arange(count)[:, None] == colours[None]).astype(per.dtype)
    return jnp.broadcast_to(jnp.asarray(rows), (per.samples.count, *rows.shape))


def _same_length(arrays: Sequence[Array], fill: int) -> Array:
    most = max(map(len, arrays))
    return np.stack([np.concatenate([a, np.full(most - len(a), fill, a.dtype)]) for a in arrays])


def _about(size: int) -> int:
    """The size, rounded up to one of few, two between a power of two and the next: each is a program."""
    step = 2 ** max(0, math.ceil(math.log2(size)) - 2)
    return int(-(-size // step) * step)


def _padded(array: Any, axis: int) -> Any:
    """With a zero beyond the last."""
    return jnp.pad(array, [(0, int(a == axis)) for a in range(array.ndim)])
