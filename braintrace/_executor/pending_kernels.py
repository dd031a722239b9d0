"""GPU kernels for dense influence that is written once in several windows (pending_windows.py).

For each sample, `V` has rows `r`, its trace `E` has states `s`, and `t` are the pending steps:

    new[q] = sum_r mix[q, r] V[r] + sum_s own[q, s] E[s] + sum_t x[t] d[q, t]

where `q` runs over the rows of `V`, and then over the states of `E`, which have no `mix`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .dense_influence import mixed
from .trace_math import add_up, times

# the rows and columns of a matrix that a program holds when it writes up to so many rows of influence
_WRITTEN = ((10, 128, 32), (18, 128, 16), (36, 64, 16))
_READ = (16, 128)  # that it holds when it reads
_FOLLOWED = (32, 32)  # pending steps, and columns
_PARTS = 4  # of the batch, so that there are enough programs


def write_rows(*given: Array) -> tuple[Array, ...]:
    """`write` on a GPU."""
    found: tuple[Array, ...] = jax.lax.platform_dependent(*given, cuda=write, default=_write_plainly)
    return found


def read_rows(rows: Array, h: Array) -> Float[Array, "in out"]:
    """`read` on a GPU."""
    found: Array = jax.lax.platform_dependent(rows, h, cuda=read, default=_read_plainly)
    return found


def follow_window(*given: Array) -> Array:
    """`follow` on a GPU."""
    found: Array = jax.lax.platform_dependent(*given, cuda=follow, default=_follow_plainly)
    return found


def after_window(a: Array, mix: Array, own: Array) -> Array:
    """What a window makes of coefficients (sample, row or state, .., out)."""
    size = mix.shape[1]
    each = [times(own[:, :, s, None], a[:, size + s, None]) for s in range(a.shape[1] - size)]
    rows = add_up([mixed(mix, a[:, :size], 1), *(e[:, :size] for e in each)])
    return jnp.concatenate([rows, add_up(e[:, size:] for e in each)], 1) if each else rows


# -- kernels ---------------------------------------------------------------------------------------


def _follow_plainly(d: Array, mix: Array, own: Array, count: Array) -> Array:
    return jnp.where(count == 0, 0, after_window(d, mix, own))


def _read_plainly(rows: Array, h: Array) -> Array:
    return jnp.sum(_product(h[:, None, :, None], rows.astype(jnp.float32)), (0, 2))


def _write_plainly(
    x: Array, d: Array, mix: Array, own: Array, due: Array, rows: Array, *trace: Array
) -> tuple[Array, ...]:
    old = rows.astype(jnp.float32)
    mine = [e.astype(jnp.float32) for e in (trace[0] if trace else [])]
    size, added = rows.shape[2], jnp.einsum("bit,bqto->biqo", x, d)
    new = [
        add_up(
            [
                added[:, :, q],
                *(_product(mix[:, q, r, None, None], old[:, :, r]) for r in range(size if q < size else 0)),
                *(_product(own[:, q, s, None], e) for s, e in enumerate(mine)),
            ]
        )
        for q in range(d.shape[1])
    ]
    after = [jnp.stack(new[:size], 2), *([jnp.stack(new[size:])] if trace else [])]
    pairs = zip(after, (rows, *trace), strict=True)
    return tuple(jnp.where(due[0] != 0, a.astype(b.dtype), b) for a, b in pairs)


def read(rows: Array, h: Array, *, interpret: bool = False) -> Float[Array, "in out"]:
    """`sum h V`, by a kernel."""
    shape = _Shape.of(rows, 0, *_READ)
    given: Given = [(rows, _ROWS), (h, ("b", ""))]
    out = jax.ShapeDtypeStruct((shape.parts, shape.width, shape.out), jnp.float32)
    found = _call(_read_kernel, shape, given, [(out, ("part", "i", "o"))], {}, 4, interpret)
    return jnp.sum(found[0], 0)


def write(
    x: Array,
    d: Array,
    mix: Array,
    own: Array,
    due: Array,
    rows: Array,
    *trace: Array,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """The rows and the trace with the pending steps, in place, if `due` is not zero; by a kernel."""
    num = d.shape[1]
    block = next((i, o) for most, i, o in _WRITTEN if num <= most)
    shape = _Shape.of(rows, num - rows.shape[2], *block)
    large: Given = [(rows, _ROWS), *((e, ("", "b", "i", "o")) for e in trace)]
    small: Given = [(x, ("b", "i", "")), (d, ("b", "", "", "o")), (mix, ("b", "", "")), (due, ("",))]
    of_trace: Given = [(own, ("b", "", "", "o"))] if trace else []
    outs = [(jax.ShapeDtypeStruct(a.shape, a.dtype), axes) for a, axes in large]
    aliases = {k: k for k in range(len(large))}
    return tuple(_call(_write_kernel, shape, [*large, *small, *of_trace], outs, aliases, 8, interpret))


def follow(d: Array, mix: Array, own: Array, count: Array, *, interpret: bool = False) -> Array:
    """The coefficients of pending steps after a window, in place, by a kernel; zero if `count` is.

    Those of all other steps are zero and stay zero.
    """
    samples, num, steps, out = d.shape
    size, (i, o) = mix.shape[1], _FOLLOWED
    shape = _Shape(size, num - size, 1, samples, steps, out, min(_power(steps), i), min(_power(out), o))
    given: Given = [
        (d, ("b", "", "i", "o")),
        (mix, ("b", "", "")),
        *([(own, ("b", "", "", "o"))] if num > size else []),
        (count, ("",)),
    ]
    outs = [(jax.ShapeDtypeStruct(d.shape, d.dtype), given[0][1])]
    return _call(_follow_kernel, shape, given, outs, {0: 0}, 4, interpret)[0]


@dataclass(frozen=True)
class _Shape:
    """The sizes that a program knows, and its blocks of rows `i` and columns `o` of the matrix."""

    rows: int
    states: int
    samples: int  # of its part of the batch
    parts: int
    width: int
    out: int
    i: int
    o: int

    @staticmethod
    def of(rows: Array, states: int, most_rows: int, most_columns: int) -> _Shape:
        samples, width, size, out = rows.shape
        parts = min(samples & -samples, _PARTS)
        i, o = min(_power(width), most_rows), min(_power(out), most_columns)
        return _Shape(size, states, samples // parts, parts, width, out, i, o)

    def block(self, array: Any, axes: Sequence[str]) -> tuple[int, ...]:
        sizes = {"b": self.samples, "i": self.i, "o": self.o, "part": 1}
        return tuple(sizes.get(a, n) for a, n in zip(axes, array.shape, strict=True))


Given = Sequence[tuple[Any, Sequence[str]]]  # arrays, and which of their axes are cut into blocks


_ROWS = ("b", "i", "", "o")
_NUMBER = {"o": 0, "i": 1, "b": 2, "part": 2}  # of a program, by axis: neighbours read what lies side by side


def _call(
    kernel: Callable[..., None],
    shape: _Shape,
    given: Given,
    outs: Given,
    aliases: dict[int, int],
    warps: int,
    interpret: bool,
) -> Sequence[Array]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    def spec(array: Any, axes: Sequence[str]) -> Any:
        # of each axis: the part of the batch, the row or the column of the block, or all of it
        index = lambda *ids: tuple(ids[_NUMBER[a]] if a else 0 for a in axes)
        return pl.BlockSpec(shape.block(array, axes), index)

    options: dict[str, Any] = {"interpret": True}
    if not interpret:
        options = {"compiler_params": triton.CompilerParams(num_warps=warps, num_stages=2)}
    return pl.pallas_call(  # type: ignore[no-any-return]
        partial(kernel, at=_At(shape, triton.load, triton.store)),
        grid=(-(-shape.out // shape.o), -(-shape.width // shape.i), shape.parts),
        in_specs=[spec(*pair) for pair in given],
        out_specs=[spec(*pair) for pair in outs],
        out_shape=[a for a, _ in outs],
        input_output_aliases=aliases,
        **options,
    )(*(a for a, _ in given))


@dataclass(frozen=True)
class _At:
    """Loads and stores of the block of a program, which may reach out of the matrix."""

    shape: _Shape
    load: Any
    store: Any
    i: Any = None  # which rows of the block are inside of the matrix; None: all
    o: Any = None  # which columns

    def here(self) -> _At:
        """For the present program; not inside of control flow, where a program has no number."""
        s = self.shape
        return replace(self, i=self._inside(s.width, s.i, "i"), o=self._inside(s.out, s.o, "o"))

    def _inside(self, size: int, block: int, axis: str) -> Any:
        from jax.experimental import pallas as pl

        if size % block == 0:
            return None
        return jnp.arange(block, dtype=jnp.int32) < size - pl.program_id(_NUMBER[axis]) * block

    def get(self, ref: Any, *masks: Any) -> Any:
        """A block, with zeros outside of the array."""
        mask = _all(masks, ref.shape)
        return (ref[...] if mask is None else self.load(ref, mask=mask, other=0)).astype(jnp.float32)

    def put(self, ref: Any, value: Any) -> None:
        self.store(ref, value.astype(ref.dtype), mask=_all((self.i, self.o), value.shape))

    def rows(self, large: Sequence[Any], b: Any) -> tuple[list[Any], list[Any]]:
        """The references to the rows and states of one sample; masked loads take no plain numbers."""
        rows = [large[0].at[b, :, jnp.int32(r)] for r in range(self.shape.rows)]
        return rows, [large[1].at[jnp.int32(s), b] for s in range(self.shape.states)]


def _read_kernel(rows: Any, h: Any, total: Any, *, at: _At) -> None:
    at = at.here()

    def one_sample(b: Any, found: Any) -> Any:
        each = [_product(h[b, r], at.get(ref, at.i, at.o)) for r, ref in enumerate(at.rows([rows], b)[0])]
        return add_up([found, *each])

    zero = jnp.zeros(total.shape[1:], jnp.float32)
    at.put(total.at[jnp.int32(0)], jax.lax.fori_loop(0, at.shape.samples, one_sample, zero))


def _write_kernel(*refs: Any, at: _At) -> None:
    from jax.experimental import pallas as pl

    count = 1 + bool(at.shape.states)  # large arrays
    old, (x, d, mix, due, *own), new = refs[:count], refs[count:-count], refs[-count:]
    at, size = at.here(), at.shape.rows

    def one_sample(b: Any, _: None) -> None:
        rows, mine = ([at.get(ref, at.i, at.o) for ref in refs] for refs in at.rows(old, b))
        used = [reduce(operator.or_, (mix[b, q, r] != 0 for q in range(size))) for r in range(size)]
        rows = [jnp.where(is_used, v, 0) for is_used, v in zip(used, rows, strict=True)]
        inputs = at.get(x.at[b], at.i)
        to_rows, to_states = at.rows(new, b)
        for q, ref in enumerate([*to_rows, *to_states]):
            # the product over time comes last: its result is spread over threads in another way than the
            # rows, and each row that is added to it would be moved
            each = [mix[b, q, r] * v for r, v in enumerate(rows if q < size else [])]
            for s, e in enumerate(mine):
                each.append(_product(at.get(own[0].at[b, jnp.int32(q), jnp.int32(s)], at.o)[None], e))
            at.put(ref, add_up(each) + jnp.dot(inputs, at.get(d.at[b, jnp.int32(q)], None, at.o)))

    @pl.when(due[0] != 0)
    def _() -> None:
        jax.lax.fori_loop(0, at.shape.samples, one_sample, None)


def _follow_kernel(d: Any, mix: Any, *rest: Any, at: _At) -> None:
    from jax.experimental import pallas as pl

    *own, count, new = rest
    at, size, num, b = at.here(), at.shape.rows, d.shape[1], jnp.int32(0)
    is_pending = pl.program_id(_NUMBER["i"]) * at.shape.i < count[0]

    @pl.when(count[0] == 0)
    def _() -> None:
        for q in range(num):
            at.put(new.at[b, jnp.int32(q)], jnp.zeros(d.shape[2:], jnp.float32))

    @pl.when(is_pending)
    def _() -> None:
        old = [at.get(d.at[b, jnp.int32(q)], at.i, at.o) for q in range(num)]
        for q in range(num):
            each = [mix[b, q, r] * v for r, v in enumerate(old[:size] if q < size else [])]
            for s, e in enumerate(old[size:]):
                each.append(_product(at.get(own[0].at[b, jnp.int32(q), jnp.int32(s)], at.o)[None], e))
            at.put(new.at[b, jnp.int32(q)], add_up(each))


def _product(a: Array, trace: Array) -> Array:
    """`a * trace`, and zero where either is: what is reset may be infinite until it is written."""
    return jnp.where((a == 0) | (trace == 0), 0, a * trace)


def _all(masks: Sequence[Any], shape: tuple[int, ...]) -> Any:
    """The masks of the axes of a block as one; None where there are none."""
    given = [
        jnp.broadcast_to(jnp.expand_dims(m, [a for a in range(len(shape)) if a != axis]), shape)
        for axis, m in enumerate(masks)
        if m is not None
    ]
    return reduce(operator.and_, given) if given else None


def _power(size: int) -> int:
    """The least power of two that is not below."""
    return 1 << (size - 1).bit_length()
