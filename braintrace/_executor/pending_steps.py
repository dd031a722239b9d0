"""The trace of a matrix that is written once in a number of steps, `PENDING`, and read at each.

Since the trace was written, with sums over states `r` and pending steps `k`,

    trace[s] = sum_r P[s, r] written[r] + sum_k x[k] d[k, s]

A step multiplies `P` and `d` by its local Jacobian, and adds its `x` and `J` as one more pending step. A
gradient reads the written trace once, and the pending steps by one matrix product. After `PENDING` steps a
GPU kernel writes the trace in place.

Pending steps are arrays of their own beside the trace. With a `count` of zero, what they hold has no meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._meshes import mesh_of, names_of, per_device
from .._ops.axis_labels import Labels, align
from .sharding import Sharding, Spec
from .slots import Slot
from .trace_math import add_up, times

PENDING = 16  # steps; a product over fewer takes no tensor cores, and more are read more slowly
_NARROWEST = 64  # rows of a matrix; for fewer, the pending steps are as large as the trace
_ROWS, _COLUMNS = 16, 32  # that divide a matrix: its products need the rows, and its loads the columns
_MOST_STATES = 8  # groups with more are mostly delay lines, whose `D` is mostly zero
_READ, _WRITTEN = (128, 2048), (64, 1024)  # columns and elements of a matrix per program
_SAMPLES = 64  # of a program that writes, at most: programs that have nothing to write take time, too
_TOGETHER = 4  # samples that are loaded before any is used


def fits(slot: Slot, trace: Array, at: Sharding | None) -> bool:
    """Whether a trace can wait: that of a matrix, if its factor has its rows and its `J` its columns."""
    w, x = slot.layout.w, slot.layout.x
    if slot.uniform or len(w) != 2 or x is None or slot.summed or (at is not None and slot.columns):
        return False
    has_rows_and_columns = w[0] not in slot.y and w[1] in slot.y
    if not has_rows_and_columns or {a for a in x if a in w or a in slot.y} != {*slot.labels[:-1]}:
        return False
    width, out = _part_of_device(slot, trace, at)[-2:]
    return (
        jnp.issubdtype(trace.dtype, jnp.floating)
        and trace.dtype.itemsize <= 4
        and len(trace) <= _MOST_STATES
        and width >= _NARROWEST
        and _block(width, _ROWS) == min(_ROWS, _NARROWEST)
        and _block(out, _COLUMNS) == _COLUMNS
    )


def bytes_on_device(slot: Slot, trace: Array, at: Sharding | None) -> int:
    """The bytes of a trace on each device."""
    return math.prod(_part_of_device(slot, trace, at)) * trace.dtype.itemsize


def _part_of_device(slot: Slot, trace: Array, at: Sharding | None) -> tuple[int, ...]:
    """The shape of the part of a trace that a device holds."""
    if at is None:
        return trace.shape
    ways = (max(1, at.ways(part, n)) for part, n in zip(at.of_trace(slot), trace.shape, strict=True))
    return tuple(n // k for n, k in zip(trace.shape, ways, strict=True))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pending:
    """The trace of one slot: as it was written, and the steps since."""

    trace: Array  # (S, *samples, in, out)
    P: Array  # (S, S, *samples, out)
    d: Array  # (steps, S, *samples, out)
    x: Array  # (steps, *samples, in)

    @staticmethod
    def empty(trace: Array) -> Pending:
        """No steps, on a trace."""
        states, *rows, width, out = trace.shape
        zeros = lambda *shape: jnp.zeros(shape, jnp.float32)
        x = jnp.zeros((PENDING, *rows, width), trace.dtype)
        return Pending(trace, zeros(states, states, *rows, out), zeros(PENDING, states, *rows, out), x)

    def specs(self, slot: Slot, at: Sharding) -> dict[str, Spec]:
        """The partition specs of the arrays."""
        spec = at.fitted(at.of_trace(slot), self.trace.shape)
        _, *rows, i, o = spec
        of_state: Spec = (None, None, *rows, o)
        return {"trace": spec, "P": of_state, "d": of_state, "x": (None, *rows, i)}

    def known(self, count: Int[Array, ""]) -> Pending:
        """With the identity as `P`, and zero as `d`, if no step is pending."""
        identity = jnp.eye(len(self.P)).reshape(self.P.shape[:2] + (1,) * (self.P.ndim - 2))
        P, d = jnp.where(count == 0, identity, self.P), jnp.where(count == 0, 0, self.d)
        return replace(self, P=P, d=d)

    def followed_by(
        self, slot: Slot, D: Array, factor: tuple[Array, Labels], J: Array, count: Int[Array, ""]
    ) -> Pending:
        """One more step; `D` and `J` are at the positions of the trace."""
        x, have = factor
        D, J = _aligned(slot, D, 2), _aligned(slot, J, 1)
        x = align(x.astype(self.x.dtype), have, slot.labels[:-1])
        now = self.known(count)
        P = jnp.stack([add_up(map(times, row[:, None], now.P)) for row in D])
        d = jnp.stack([add_up(map(times, row[:, None], jnp.moveaxis(now.d, 1, 0))) for row in D], 1)
        is_this = jnp.arange(len(d)).reshape(-1, *[1] * (d.ndim - 1)) == count
        x = jax.lax.dynamic_update_index_in_dim(self.x, x, count, 0)
        return replace(self, P=P, d=jnp.where(is_this, J[None], d), x=x)

    def written(self, slot: Slot, due: Bool[Array, ""], at: Sharding | None) -> Array:
        """The trace, with the pending steps if that is `due`."""
        given = self.trace, self.P, self.d, self.x, due.astype(jnp.int32)[None]
        specs = None if at is None else self.specs(slot, at)
        by = None if specs is None else ([*specs.values(), (None,)], specs["trace"])
        return _per_device(_write, given, at, by)

    def kept(self, slot: Slot, keep: Array) -> Pending:
        """With the samples reset for which `keep` is False; at least one step has to be pending."""
        ones = jnp.ones((1, *self.P.shape[2:]))[..., None, :]
        kept = slot.where(keep, ones)[..., 0, :] != 0
        of_x = jnp.any(kept, -1, keepdims=True)
        return replace(
            self,
            P=jnp.where(kept[None], self.P, 0),
            d=jnp.where(kept[None], self.d, 0),
            x=jnp.where(of_x, self.x, 0),  # or a step that was not finite would stay
        )

    def contract(self, slot: Slot, g: Array, count: Int[Array, ""], at: Sharding | None) -> Array:
        """`sum g trace`, with the axes of the weight; `g` is (S, *varying(at))."""
        g, now = _aligned(slot, g, 1), self.known(count)
        h = add_up(map(times, g[:, None], now.P))
        dy = add_up(map(times, g[:, None], jnp.moveaxis(now.d, 1, 0))).astype(self.x.dtype)
        given = self.trace, h, self.x, dy
        if at is None or mesh_of(self.trace) is None:
            return slot.uncovered(_contract(*given))
        specs = self.specs(slot, at)
        _, *rows, i, o = specs["trace"]
        summed = tuple(n for name in rows for n in names_of(name))

        def of_part(*parts: Array) -> Array:
            dw = _contract(*parts)
            return jax.lax.psum(dw, summed) if summed else dw

        specs_of = specs["trace"], (None, *rows, o), specs["x"], (None, *rows, o)
        return _per_device(of_part, given, at, (specs_of, (i, o)))


def _per_device(
    function: Callable[..., Array],
    given: Sequence[Array],
    at: Sharding | None,
    specs: tuple[Sequence[Spec], Spec] | None,
) -> Array:
    """`function(*given)`, each device on its part; `specs` are of `given` and of the result."""
    if at is None or specs is None or mesh_of(given[0]) is None:
        return function(*given)
    found: Array = per_device(lambda *parts: (function(*parts),), at.mesh, specs[0], [specs[1]])(*given)[0]
    return found


def _aligned(slot: Slot, q: Array, lead: int) -> Array:
    """An array at the positions of a trace, in its order of axes, after `lead` axes of states."""
    names = tuple(f"lead {i}" for i in range(lead))
    out = (*slot.labels[:-2], slot.labels[-1])
    return align(q.astype(jnp.float32), (*names, *slot.at), (*names, *out))


def _contract(trace: Array, h: Array, x: Array, dy: Array) -> Array:
    states, width, out = len(trace), *trace.shape[-2:]
    x, dy = x.reshape(-1, width), dy.reshape(-1, out)
    pending = jnp.einsum("ni,no->io", x, dy, preferred_element_type=jnp.float32)
    return pending + read_trace(trace.reshape(states, -1, width, out), h.reshape(states, -1, out))


def _write(trace: Array, P: Array, d: Array, x: Array, due: Array) -> Array:
    states, width, out = len(trace), *trace.shape[-2:]
    given = (
        trace.reshape(states, -1, width, out),
        P.reshape(states, states, -1, out),
        d.reshape(len(d), states, -1, out),
        x.reshape(len(x), -1, width),
        due,
    )
    new: Array = jax.lax.platform_dependent(*given, cuda=write, default=_write_plainly)
    return new.reshape(trace.shape)


def read_trace(trace: Array, h: Array) -> Array:
    """`sum_sm h[s, m] trace[s, m]`."""
    found: Array = jax.lax.platform_dependent(trace, h, cuda=read, default=_read_plainly)
    return found


def _write_plainly(
    trace: Float[Array, "state sample in out"],
    P: Float[Array, "state state sample out"],
    d: Float[Array, "step state sample out"],
    x: Float[Array, "step sample in"],
    due: Array,
) -> Float[Array, "state sample in out"]:
    old = trace.astype(jnp.float32)
    decayed = jnp.stack([add_up(map(_product, row[:, :, None], old)) for row in P])
    new = decayed + jnp.einsum("kmi,ksmo->smio", x.astype(jnp.float32), d)
    return jnp.where(due[0], new.astype(trace.dtype), trace)


def _read_plainly(
    trace: Float[Array, "state sample in out"], h: Float[Array, "state sample out"]
) -> Float[Array, "in out"]:
    return jnp.sum(_product(h[:, :, None], trace.astype(jnp.float32)), (0, 1))


def write(trace: Array, P: Array, d: Array, x: Array, due: Array, *, interpret: bool = False) -> Array:
    """`P trace + sum_k x[k] d[k]` in place if `due` is not zero, else the trace, untouched; by a kernel."""
    from jax.experimental import pallas as pl

    states, rows, width, out = trace.shape
    i, o = _blocks(width, out, *_WRITTEN)
    part = _block(rows, _SAMPLES)
    of_trace = pl.BlockSpec((states, part, i, o), lambda a, b, c: (0, c, a, b))
    return pl.pallas_call(  # type: ignore[no-any-return]
        partial(_write_kernel, states=states, rows=part),
        grid=(width // i, out // o, rows // part),
        in_specs=[
            of_trace,
            pl.BlockSpec((states, states, part, o), lambda a, b, c: (0, 0, c, b)),
            pl.BlockSpec((len(d), states, part, o), lambda a, b, c: (0, 0, c, b)),
            pl.BlockSpec((len(x), part, i), lambda a, b, c: (0, c, a)),
            pl.BlockSpec((1,), lambda a, b, c: (0,)),
        ],
        out_specs=of_trace,
        out_shape=jax.ShapeDtypeStruct(trace.shape, trace.dtype),
        input_output_aliases={0: 0},
        **_options(interpret, 4),
    )(trace, P, d, x, due)


def _write_kernel(
    trace: Array, P: Array, d: Array, x: Array, due: Array, new: Array, *, states: int, rows: int
) -> None:
    from jax.experimental import pallas as pl

    def one_row(m: Array, _: None) -> None:
        old = [trace[s, m].astype(jnp.float32) for s in range(states)]
        inputs = x[:, m].astype(jnp.float32).T
        for s in range(states):
            decayed = add_up(_product(P[s, r, m][None], old[r]) for r in range(states))
            pending = jnp.dot(inputs, d[:, s, m], precision=jax.lax.Precision.HIGHEST)
            new[s, m] = (decayed + pending).astype(new.dtype)

    @pl.when(due[0] != 0)
    def _() -> None:
        jax.lax.fori_loop(0, rows, one_row, None)


def read(trace: Array, h: Array, *, interpret: bool = False) -> Array:
    """`sum_sm h[s, m] trace[s, m]`, by a kernel: XLA's is slower for types narrower than float32."""
    from jax.experimental import pallas as pl

    states, rows, width, out = trace.shape
    i, o = _blocks(width, out, *_READ)
    return pl.pallas_call(  # type: ignore[no-any-return]
        partial(_read_kernel, states=states, rows=rows, together=_block(rows, _TOGETHER)),
        grid=(width // i, out // o),
        in_specs=[
            pl.BlockSpec((states, rows, i, o), lambda a, b: (0, 0, a, b)),
            pl.BlockSpec((states, rows, o), lambda a, b: (0, 0, b)),
        ],
        out_specs=pl.BlockSpec((i, o), lambda a, b: (a, b)),
        out_shape=jax.ShapeDtypeStruct((width, out), jnp.float32),
        **_options(interpret, 8),
    )(trace, h)


def _read_kernel(trace: Array, h: Array, total: Array, *, states: int, rows: int, together: int) -> None:
    def some_rows(k: Array, found: Array) -> Array:
        each = [(s, k * together + n) for n in range(together) for s in range(states)]
        loaded = [(h[s, m][None], trace[s, m]) for s, m in each]
        return add_up([found, *(_product(q, row.astype(jnp.float32)) for q, row in loaded)])

    zero = jnp.zeros(total.shape, jnp.float32)
    total[...] = jax.lax.fori_loop(0, rows // together, some_rows, zero)


def _product(a: Array, trace: Array) -> Array:
    """`a * trace`, and zero where either is: a trace that is reset may be infinite until it is written."""
    product = a * trace
    return jnp.where((a == 0) | (trace == 0), 0, product)


def _options(interpret: bool, warps: int) -> dict[str, Any]:
    if interpret:
        return {"interpret": True}
    from jax.experimental.pallas import triton

    return {"compiler_params": triton.CompilerParams(num_warps=warps)}


def _blocks(width: int, out: int, columns: int, elements: int) -> tuple[int, int]:
    """The rows and columns of a matrix that a program takes."""
    o = _block(out, columns)
    return _block(width, max(1, elements // o)), o


def _block(size: int, most: int) -> int:
    """The largest power of two that divides `size`, up to `most`."""
    return min(size & -size, most)
