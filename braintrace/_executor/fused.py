"""A GPU kernel that updates a trace and contracts it with the signal in a single pass.

    new[s] = sum_r D[s, r] trace[r] + J[s] x        dw = start + sum_s sum_m g[s] new[s]

XLA does this in one pass if a group has one state in float32. For narrower types its reductions are no
faster, and for several states it makes several passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._meshes import mesh_of, per_device
from .._ops.axis_labels import Labels, align
from .sharding import Sharding, names_of
from .slots import Slot
from .trace_math import add_up, times

_LONGEST = (16, 128)  # the block of a trace per program
_SHORTEST = 32  # block along the last axis: smaller loads are inefficient
_TOGETHER = 2  # samples that are loaded before any is stored


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def on_one_gpu(x: Array) -> bool:
    """Whether an array is on a single GPU; XLA would gather a sharded one to change its layout."""
    return on_gpu() and mesh_of(x) is None


def bytes_on_gpu(values: Iterable[Array]) -> int:
    """The bytes that arrays take on each GPU; 0 on other backends."""
    if jax.default_backend() != "gpu":
        return 0
    meshes = [(v.nbytes, mesh_of(v)) for v in values]
    return sum(n if mesh is None else n // mesh.size for n, mesh in meshes)


_MOST_STATES = 8  # groups with more are mostly delay lines, whose `D` is mostly zero


def fits(slot: Slot, value: Array, at: Sharding | None = None) -> bool:
    """Whether the kernel applies: a matrix whose factor has its rows and whose `J` has its columns.

    The sharding of the trace must be known.
    """
    w, x = slot.layout.w, slot.layout.x
    if slot.uniform or slot.columns or (mesh_of(value) is not None and at is None):
        return False
    ways = (
        1 if mesh_of(value) is None or at is None else max(1, at.ways(at.of_trace(slot)[-1], value.shape[-1]))
    )
    if len(w) != 2 or x is None or slot.summed or set(slot.y) & {w[0]} or w[1] not in slot.y:
        return False
    return (
        {a for a in x if a in w or a in slot.y} == {*_lead(slot), w[0]}
        and _block(value.shape[-1] // ways, _LONGEST[1]) >= _SHORTEST
        and jnp.issubdtype(value.dtype, jnp.floating)
        and value.dtype.itemsize <= 4
        and len(value) <= _MOST_STATES
    )


def _lead(slot: Slot) -> Labels:
    return slot.labels[:-2]


def step(
    slot: Slot,
    value: Array,
    D: Any,
    factor: tuple[Array, Labels],
    J: Array,
    g: Array,
    start: Array,
    at: Sharding | None = None,
) -> tuple[Array, Array]:
    """The trace after a step, and `start` plus its gradient; `D`, `J` and `g` are at trace positions.

    If the trace is sharded, each device runs the kernel on its shard.
    """
    rows, out = _lead(slot), (*_lead(slot), slot.labels[-1])
    width = (*rows, slot.labels[-2])

    def aligned(q: Array, lead: int) -> Array:
        names = tuple(f"lead {i}" for i in range(lead))
        return align(q.astype(jnp.float32), (*names, *slot.at), (*names, *out))

    def part(value: Array, D: Array, J: Array, x: Array, g: Array, start: Array) -> tuple[Array, Array]:
        size = value.shape
        flat = [q.reshape(*q.shape[:n], -1, size[-1]) for q, n in ((D, 2), (J, 1), (g, 1))]
        whole = value.reshape(size[0], -1, *size[-2:])
        given = (whole, flat[0], flat[1], x.reshape(-1, size[-2]), flat[2], start)
        new, dw = jax.lax.platform_dependent(*given, cuda=advance, default=_advance_plainly)
        return new.reshape(size), dw

    x, have = factor
    given = (
        value,
        aligned(D, 2),
        aligned(J, 1),
        align(x.astype(jnp.float32), have, width),
        aligned(g, 1),
        start,
    )
    if at is None or mesh_of(value) is None:
        return part(*given)
    _, *lead, i, o = at.fitted(at.of_trace(slot), value.shape)
    summed = tuple(n for name in lead for n in names_of(name))
    state = (None, *lead, o)

    def of_device(value: Array, D: Array, J: Array, x: Array, g: Array, start: Array) -> tuple[Array, Array]:
        new, dw = part(value, D, J, x, g, jnp.zeros_like(start))
        return new, start + (jax.lax.psum(dw, summed) if summed else dw)

    specs = ((None, *lead, i, o), (None, *state), state, (*lead, i), state, (i, o))
    return per_device(of_device, at.mesh, specs, (specs[0], specs[5]))(*given)  # type: ignore[no-any-return]


def _advance_plainly(
    trace: Float[Array, "state sample in out"],
    D: Float[Array, "state state sample out"],
    J: Float[Array, "state sample out"],
    x: Float[Array, "sample in"],
    g: Float[Array, "state sample out"],
    start: Float[Array, "in out"],
) -> tuple[Float[Array, "state sample in out"], Float[Array, "in out"]]:
    """The trace after a step, and `start` plus its gradient, without the kernel."""
    old = trace.astype(D.dtype)
    decayed = jnp.stack([add_up(map(times, row[:, :, None], old)) for row in D])
    new = decayed + J[:, :, None] * x[None, :, :, None]
    return new.astype(trace.dtype), start + jnp.einsum("smo,smio->io", g, new)


def advance(
    trace: Float[Array, "state sample in out"],
    D: Float[Array, "state state sample out"],
    J: Float[Array, "state sample out"],
    x: Float[Array, "sample in"],
    g: Float[Array, "state sample out"],
    start: Float[Array, "in out"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "state sample in out"], Float[Array, "in out"]]:
    """The trace after a step, and `start` plus its gradient, computed by the kernel."""
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
    trace: Array,
    D: Array,
    J: Array,
    x: Array,
    g: Array,
    start: Array,
    new: Array,
    dw: Array,
    *,
    states: int,
    rows: int,
    together: int,
) -> None:
    each = range(states)

    def some_rows(k: Array, total: Array) -> Array:
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
