"""A GPU kernel that advances the trace `E` of a matrix and its low-rank correction `V` in a single pass.

For each sample, with sums over rows `r`, states `s` of the trace and steps `t`:

    new[q]   = sum_r mix[q, r] V[r] + sum_s own[q, s] E[s] + sum_t x[t] d[q, t]
    gradient = sum_r along[r] V[r] + sum_s g[s] E[s]

`q` runs over the rows of `V`, and then over the states of `E`, which have no `mix`. Without the kernel, XLA
writes the product over time to memory and reads it again, and copies arrays that could be updated in place.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp

from .._meshes import mesh_of, per_device
from .per_sample import Matrix
from .sharding import Sharding, Spec
from .trace_math import add_up, times
from .weight_gradients import ROWS, TIME

_BLOCK = (16, 64)  # what a program holds of each of up to eight rows; of more rows it holds fewer columns
_WARPS, _STAGES = 2, 2
_SHORTEST, _LONGEST = 16, 32  # a product over time: tensor cores take none that is shorter
_PARTS = 4  # of the batch, so that there are enough programs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Coefficients:
    """The coefficients of the two sums that the kernel computes (see above)."""

    x: Any  # (B, I, T)
    d: Any  # (B, R + S, T, O)
    mix: Any  # (B, R, R)
    along: Any  # (B, R)
    own: Any = None  # (B, R + S, S, O); None without a trace
    g: Any = None  # (B, S, O)


def kernel_coefficients(
    matrix: Matrix,
    x: Any,
    d: Any,
    mix: Any,
    along: Any,
    P: Any = None,
    J: Any = None,
    start: Any = None,
    signal: Any = None,
) -> Coefficients:
    """Return the coefficients of the kernel for one window.

    The trace advances as `E' = P E + sum_t x[t] J[t]`, and `start E` is added to the rows. `P` is
    (S, S, *at), `J` (S, time, *y), and the signals `start` and `signal` are (rows, S, *at).
    """
    slot = matrix.slot
    if slot is None:
        return Coefficients(x, d, mix, along)
    P = matrix.by_sample(P, ("new", "old", *slot.at), "new", "old")
    J = matrix.by_sample(J, ("new", TIME, *slot.y), "new", TIME)
    start, signal = (matrix.by_sample(a, (ROWS, "state", *slot.at), ROWS, "state") for a in (start, signal))
    own, d = jnp.concatenate([start, P], axis=1), jnp.concatenate([d, J], axis=1)
    return Coefficients(x, d, mix, along, own, signal[:, 0])


def fits(length: int, rows: Any, trace: Any = None, ways: Sequence[int] = (1, 1, 1, 1)) -> bool:
    """Whether the kernel can advance rows, (B, I, R, O), and the trace, (S, B, I, O), over `length` steps.

    For one step XLA stores no product, and many steps do not fit in shared memory. `ways` are the numbers of
    parts into which devices cut the axes of the rows.
    """
    arrays = [rows, *([] if trace is None else [trace])]
    width, out = rows.shape[1] // ways[1], rows.shape[3] // ways[3]
    return (
        all(jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize <= 4 for a in arrays)
        and rows.shape[2] + (0 if trace is None else len(trace)) <= _MOST
        and all(a.size // math.prod(ways) < 2**31 for a in arrays)
        and min(width, out) >= _SHORTEST
        and 1 < length <= _LONGEST
    )


_MOST = 36  # rows and states: more do not fit in the registers, however few columns a program holds


def step(
    rows: Any, trace: Any, by: Coefficients, at: Sharding | None = None, spec: Spec = ()
) -> tuple[Any, Any, Any]:
    """The rows and the trace after a window, and the gradient, (I, O).

    Where rows are sharded, by `spec`, each device runs the kernel on its part.
    """
    if at is None or mesh_of(rows) is None:
        return _step(rows, trace, by)
    b, i, _, o = spec
    specs = Coefficients(
        *((b, i, None), (b, None, None, o), (b, None, None), (b, None)), (b, None, None, o), (b, None, o)
    )
    kept = [spec, *([] if trace is None else [(None, b, i, o)])]
    given, tree = jax.tree.flatten((rows, trace, by))
    names = [f.name for f in fields(Coefficients) if getattr(by, f.name) is not None]

    def part(*arrays: Any) -> tuple[Any, ...]:
        after, traces, grad = _step(*jax.tree.unflatten(tree, arrays))
        return (after, *([] if trace is None else [traces]), grad[None])

    # per-device partial sums of the gradient are added outside, with all others
    mapped = per_device(part, at.mesh, [*kept, *(getattr(specs, n) for n in names)], [*kept, (b, i, o)])
    after, *traces, grads = mapped(*given)
    return after, traces[0] if traces else None, jnp.sum(grads, axis=0)


def _step(rows: Any, trace: Any, by: Coefficients) -> tuple[Any, Any, Any]:
    return jax.lax.platform_dependent(  # type: ignore[no-any-return]
        rows, trace, by, cuda=advance, default=_advance_plainly
    )


def _advance_plainly(rows: Any, trace: Any, by: Coefficients) -> tuple[Any, Any, Any]:
    kept, d, (x, mix, along) = rows.astype(jnp.float32), by.d, (by.x, by.mix, by.along)
    num = kept.shape[2]
    new = jnp.einsum("bqr,biro->biqo", mix, kept) + jnp.einsum("bit,bqto->biqo", x, d[:, :num])
    grad = jnp.einsum("br,biro->io", along, kept)
    if trace is None:
        return new.astype(rows.dtype), None, grad
    mine = trace.astype(jnp.float32)
    own = jnp.einsum("bqso,sbio->biqo", by.own, mine)
    traces = own[:, :, num:] + jnp.einsum("bit,bqto->biqo", x, d[:, num:])
    grad = grad + jnp.einsum("bso,sbio->io", by.g, mine)
    after = (new + own[:, :, :num]).astype(rows.dtype)
    return after, jnp.moveaxis(traces, 2, 0).astype(trace.dtype), grad


def advance(rows: Any, trace: Any, by: Coefficients, *, interpret: bool = False) -> tuple[Any, Any, Any]:
    """Advance rows and trace by the kernel, in place."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    samples, width, size, out = rows.shape
    states, length = 0 if trace is None else len(trace), by.x.shape[-1]
    num = size + states
    most = max(_SHORTEST, _BLOCK[1] * 8 // max(8, _power(num)))
    i, o = min(_power(width), _BLOCK[0]), min(_power(out), most)
    parts = min(samples & -samples, _PARTS)
    some = samples // parts
    shape = _Shape(size, states, some, width, out)
    options: dict[str, Any] = {"interpret": True}
    if not interpret:
        options = {"compiler_params": triton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES)}

    def spec(block: tuple[int, ...], *at: str) -> Any:
        # of each axis: the sample, the row or the column of the block, or all of it
        return pl.BlockSpec(block, lambda *ids: tuple(ids["iob".index(a)] if a else 0 for a in at))

    def padded(a: Any, axis: int) -> Any:
        pads = [(0, 0)] * a.ndim
        pads[axis] = (0, steps - length)
        return jnp.pad(a, pads)

    steps = max(_power(length), _SHORTEST)
    large = [(rows, spec((some, i, size, o), "b", "i", "", "o"))]
    if states:
        large += [(trace, spec((states, some, i, o), "", "b", "i", "o"))]
    small = [
        (padded(by.x, 2), spec((some, i, steps), "b", "i", "")),
        (padded(by.d, 2), spec((some, num, steps, o), "b", "", "", "o")),
        (by.mix, spec((some, size, size), "b", "", "")),
        (by.along, spec((some, size), "b", "")),
    ]
    if states:
        small += [
            (by.own, spec((some, num, states, o), "b", "", "", "o")),
            (by.g, spec((some, states, o), "b", "", "o")),
        ]
    given = [(a.astype(jnp.float32), s) for a, s in small]
    *after, grads = pl.pallas_call(
        partial(_kernel, shape=shape, load=triton.load, store=triton.store),
        grid=(-(-width // i), -(-out // o), parts),
        in_specs=[s for _, s in (*large, *given)],
        out_specs=[*(s for _, s in large), spec((1, i, o), "b", "i", "o")],
        out_shape=[
            *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a, _ in large),
            jax.ShapeDtypeStruct((parts, width, out), jnp.float32),
        ],
        input_output_aliases={k: k for k in range(len(large))},
        **options,
    )(*(a for a, _ in (*large, *given)))
    return after[0], after[1] if states else None, jnp.sum(grads, axis=0)


@dataclass(frozen=True)
class _Shape:
    """The sizes that a program knows."""

    rows: int
    states: int
    samples: int  # of its part of the batch
    width: int
    out: int


def _kernel(*refs: Any, shape: _Shape, load: Any, store: Any) -> None:
    from jax.experimental import pallas as pl

    count = 1 + bool(shape.states)
    old, (x, d, mix, along, *rest), new = refs[:count], refs[count : -count - 1], refs[-count - 1 : -1]
    own, g = rest or (x, x)  # of no use without a trace
    grads = refs[-1]
    i, o = grads.shape[1:]

    def inside(size: int, block: int, axis: int) -> Any:
        """Where a block is inside the array; None: everywhere."""
        if size % block == 0:
            return None
        return jnp.arange(block, dtype=jnp.int32) < size - pl.program_id(axis) * block

    at_i, at_o = inside(shape.width, i, 0), inside(shape.out, o, 1)

    def get(ref: Any, *masks: Any) -> Any:
        """A block, with zeros outside of the array."""
        mask = _all(masks, ref.shape)
        return ref[...] if mask is None else load(ref, mask=mask, other=0)

    def put(ref: Any, value: Any) -> None:
        store(ref, value.astype(ref.dtype), mask=_all((at_i, at_o), value.shape))

    number = [jnp.int32(n) for n in range(shape.rows + shape.states)]  # masked loads take no plain numbers

    def row(ref: Any, b: Any, r: int) -> Any:
        return ref.at[b, :, number[r]]

    def one_sample(b: Any, total: Any) -> Any:
        rows = [get(row(old[0], b, r), at_i, at_o).astype(jnp.float32) for r in range(shape.rows)]
        mine = [get(old[1].at[number[s], b], at_i, at_o).astype(jnp.float32) for s in range(shape.states)]
        inputs = get(x.at[b], at_i)
        for q in range(shape.rows + shape.states):
            # the product over time comes last: its result is spread over threads in another way than the
            # rows, and each row that is added to it would be moved
            each = [mix[b, q, r] * v for r, v in enumerate(rows if q < shape.rows else [])]
            each += [times(get(own.at[b, number[q], number[s]], at_o)[None], e) for s, e in enumerate(mine)]
            now = add_up(each) + jnp.dot(inputs, get(d.at[b, number[q]], None, at_o))
            put(row(new[0], b, q) if q < shape.rows else new[1].at[number[q - shape.rows], b], now)
        for r, v in enumerate(rows):
            total = total + along[b, r] * v
        for s, e in enumerate(mine):
            total = total + times(get(g.at[b, number[s]], at_o)[None], e)
        return total

    total = jax.lax.fori_loop(0, shape.samples, one_sample, jnp.zeros((i, o), jnp.float32))
    put(grads.at[number[0]], total)


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
