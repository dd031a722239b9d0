"""A kernel for GPUs: advance a trace and contract it, in a single pass.

    new[s] = sum_r D[s, r] trace[r] + J[s] x        dw = start + sum_s sum_m g[s] new[s]

XLA makes one pass of this where a group has one state and numbers have 32 bits. Its reductions take as long
for a narrower type, and with several states it makes several passes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .._ops.letters import Letters, align
from .slots import Slot, add_up, times

_LONGEST = (16, 128)  # the block of a trace that a program holds
_SHORTEST = 32  # of the last axis: below, loads are narrow
_TOGETHER = 2  # rows of the batch that are loaded before any is stored


def on_one_gpu() -> bool:
    """Whether there is one GPU: what is spread over several, XLA would gather for a kernel or a layout."""
    return jax.default_backend() == "gpu" and jax.device_count() == 1


_MOST_STATES = 8  # more are mostly a delay line, which is mostly zeros in `D`


def fits(slot: Slot, value: Any) -> bool:
    """Whether the kernel takes a trace: that of a matrix, whose factor has its rows, and `J` its columns."""
    w, x = slot.layout.w, slot.layout.x
    if len(w) != 2 or x is None or slot.summed or set(slot.y) & {w[0]} or w[1] not in slot.y:
        return False
    return (
        {a for a in x if a in w or a in slot.y} == {*_lead(slot), w[0]}
        and _block(value.shape[-1], _LONGEST[1]) >= _SHORTEST
        and jnp.issubdtype(value.dtype, jnp.floating)
        and value.dtype.itemsize <= 4
        and len(value) <= _MOST_STATES
    )


def _lead(slot: Slot) -> Letters:
    return slot.letters[:-2]


def step(
    slot: Slot, value: Any, D: Any, factor: tuple[Any, Letters], J: Any, g: Any, start: Any
) -> tuple[Any, Any]:
    """The trace after a step, and what it gives to the weight, added; `D`, `J` and `g` are lifted."""
    rows, out = _lead(slot), (*_lead(slot), slot.letters[-1])
    size, states = value.shape, value.shape[0]
    width = (*rows, slot.letters[-2])

    def flat(q: Any, lead: int) -> Any:
        names = tuple(f"lead {i}" for i in range(lead))
        q = align(q.astype(jnp.float32), (*names, *slot.at), (*names, *out))
        return q.reshape(*q.shape[:lead], -1, size[-1])

    x, have = factor
    given = (
        value.reshape(states, -1, *size[-2:]),
        flat(D, 2),
        flat(J, 1),
        align(x.astype(jnp.float32), have, width).reshape(-1, size[-2]),
        flat(g, 1),
        start,
    )
    new, dw = jax.lax.platform_dependent(*given, cuda=advance, default=_advance_plainly)
    return new.reshape(size), dw


def _advance_plainly(trace: Any, D: Any, J: Any, x: Any, g: Any, start: Any) -> tuple[Any, Any]:
    old = trace.astype(D.dtype)
    decayed = jnp.stack([add_up(map(times, row[:, :, None], old)) for row in D])
    new = decayed + J[:, :, None] * x[None, :, :, None]
    return new.astype(trace.dtype), start + jnp.einsum("smo,smio->io", g, new)


def advance(
    trace: Any, D: Any, J: Any, x: Any, g: Any, start: Any, *, interpret: bool = False
) -> tuple[Any, Any]:
    """The trace after a step, and what it gives to the weight, added to `start`.

    `trace` is (S, M, I, O), `D` (S, S, M, O), `J` and `g` (S, M, O), `x` (M, I), `start` (I, O).
    """
    from jax.experimental import pallas as pl

    states, rows, width, out = trace.shape
    i, o = _block(width, _LONGEST[0]), _block(out, _LONGEST[1])
    options: dict[str, Any] = {"interpret": True}
    if not interpret:
        from jax.experimental.pallas import triton

        options = {"compiler_params": triton.CompilerParams(num_warps=4)}
    of_trace = pl.BlockSpec((states, rows, i, o), lambda a, b: (0, 0, a, b))
    of_state = pl.BlockSpec((states, rows, o), lambda a, b: (0, 0, b))
    of_pair = pl.BlockSpec((states, states, rows, o), lambda a, b: (0, 0, 0, b))
    of_input = pl.BlockSpec((rows, i), lambda a, b: (0, a))
    of_weight = pl.BlockSpec((i, o), lambda a, b: (a, b))
    together = _block(rows, _TOGETHER)
    new, dw = pl.pallas_call(
        partial(_kernel, states=states, rows=rows, together=together),
        grid=(width // i, out // o),
        in_specs=[of_trace, of_pair, of_state, of_input, of_state, of_weight],
        out_specs=[of_trace, of_weight],
        out_shape=[
            jax.ShapeDtypeStruct(trace.shape, trace.dtype),
            jax.ShapeDtypeStruct((width, out), jnp.float32),
        ],
        input_output_aliases={0: 0, 5: 1},
        **options,
    )(trace, D, J, x, g, start)
    return new, dw


def _kernel(
    trace: Any,
    D: Any,
    J: Any,
    x: Any,
    g: Any,
    start: Any,
    new: Any,
    dw: Any,
    *,
    states: int,
    rows: int,
    together: int,
) -> None:
    each = range(states)

    def some_rows(k: Any, total: Any) -> Any:
        at = [k * together + n for n in range(together)]
        old = [[trace[s, m] for s in each] for m in at]
        rest = [
            (
                [[D[s, r, m] for r in each] for s in each],
                [J[s, m] for s in each],
                x[m],
                [g[s, m] for s in each],
            )
            for m in at
        ]
        for m, row, (d, j, f, q) in zip(at, old, rest, strict=True):
            row = [t.astype(jnp.float32) for t in row]
            for s in each:
                now = j[s][None] * f[:, None]
                for r in each:
                    now = now + times(d[s][r][None], row[r])
                total = total + q[s][None] * now
                new[s, m] = now.astype(new.dtype)
        return total

    dw[...] = jax.lax.fori_loop(0, rows // together, some_rows, start[...])


def _block(size: int, most: int) -> int:
    """The largest power of two that divides `size`, up to `most`."""
    return min(size & -size, most)
