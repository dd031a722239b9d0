"""The influence of a matrix, dense rows `V` and its trace `E`, which is written once in several windows.

Since they were written, with sums over rows `r`, states `s` of the trace and pending steps `t`,

    now[q] = sum_r mix[q, r] V[r] + sum_s own[q, s] E[s] + sum_t x[t] d[q, t]

for each sample, where `q` runs over the rows of `V`, and then over the states of `E`, which have no `mix`. A
window multiplies `mix`, `own` and `d`, and adds its steps. A gradient reads `V` and `E` once, and the pending
steps by one matrix product. When `STEPS` are pending, a GPU kernel writes `V` and `E` in place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._meshes import mesh_of, names_of, per_device
from .bases import precise_einsum
from .dense_influence import mixed
from .matrices import Matrix
from .pending_kernels import after_window, follow_window, read_rows, write_rows
from .pending_steps import read_trace
from .sharding import Sharding, Spec
from .trace_math import add_up, times
from .weight_gradients import ROWS, TIME

STEPS = 64  # a product over more takes too much shared memory
_MOST = 36  # rows and states: more do not fit in the registers, however few columns a program holds
_NARROWEST = 16  # rows and columns of a matrix: tensor cores take no fewer

Large = tuple[Float[Array, "sample in row out"], Float[Array, "state sample in out"] | None]


def fits(rows: Array, trace: Array | None = None, ways: Sequence[int] = (1, 1, 1, 1)) -> bool:
    """Whether rows, (B, I, R, O), and the trace, (S, B, I, O), can wait.

    `ways` are the numbers of parts into which devices cut the axes of the rows.
    """
    arrays = [rows, *([] if trace is None else [trace])]
    width, out = rows.shape[1] // ways[1], rows.shape[3] // ways[3]
    return (
        all(jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize <= 4 for a in arrays)
        and rows.shape[2] + (0 if trace is None else len(trace)) <= _MOST
        and all(a.size // math.prod(ways) < 2**31 for a in arrays)
        and min(width, out) >= _NARROWEST
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PendingWindows:
    """The coefficients of the sum above: those of one window, or of all that are pending."""

    x: Float[Array, "sample width step"]
    d: Float[Array, "sample row_or_state step out"]
    mix: Float[Array, "sample row row"]
    own: Float[Array, "sample row_or_state state out"]  # of no states without a trace

    @staticmethod
    def empty(rows: Array, states: int) -> PendingWindows:
        """No steps, on rows and a trace of so many states."""
        samples, width, size, out = rows.shape
        zeros = lambda *shape: jnp.zeros((samples, *shape), jnp.float32)
        num = size + states
        return PendingWindows(
            zeros(width, STEPS), zeros(num, STEPS, out), zeros(size, size), zeros(num, states, out)
        )

    @staticmethod
    def of_window(
        matrix: Matrix,
        x: Array,
        d: Array,
        mix: Array,
        affine: tuple[Array, Array] | None,
        start: Array | None,
    ) -> PendingWindows:
        """The coefficients of one window.

        The trace advances as `E' = P E + sum_t x[t] J[t]`, with `P`, (S, S, *at), and `J`, (S, time, *y), in
        `affine`; `start E`, (rows, S, *at), is added to the rows.
        """
        slot = matrix.slot
        if slot is None or affine is None or start is None:
            own = jnp.zeros((len(d), d.shape[1], 0, d.shape[-1]), d.dtype)
        else:
            P = matrix.by_sample(affine[0], ("new", "old", *slot.at), "new", "old")
            J = matrix.by_sample(affine[1], ("new", TIME, *slot.y), "new", TIME)
            start = matrix.by_sample(start, (ROWS, "state", *slot.at), ROWS, "state")
            own, d = jnp.concatenate([start, P], axis=1), jnp.concatenate([d, J], axis=1)
        return PendingWindows(*(a.astype(jnp.float32) for a in (x, d, mix, own)))

    @staticmethod
    def specs(spec: Spec) -> dict[str, Spec]:
        """The partition specs of the arrays, for those of the rows."""
        b, i, _, o = spec
        return {
            "x": (b, i, None),
            "d": (b, None, None, o),
            "mix": (b, None, None),
            "own": (b, None, None, o),
        }

    def known(self, count: Int[Array, ""]) -> PendingWindows:
        """With the identity as `mix` and `own`, and zero as `d`, if no step is pending."""
        none, size, states = count == 0, self.mix.shape[1], self.own.shape[2]
        identity = partial(jnp.eye, dtype=self.d.dtype)
        own = jnp.concatenate([jnp.zeros((size, states), self.d.dtype), identity(states)])[..., None]
        mix, own = jnp.where(none, identity(size), self.mix), jnp.where(none, own, self.own)
        return replace(self, d=jnp.where(none, 0, self.d), mix=mix, own=own)

    def followed_by(
        self, window: PendingWindows, count: Int[Array, ""], at: Sharding | None, spec: Spec
    ) -> PendingWindows:
        """One more window."""
        now = self.known(count)
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=count)

        given = self.d, window.mix, window.own, count[None]
        if at is None or mesh_of(self.d) is None:
            d = follow_window(*given)
        else:
            specs = self.specs(spec)
            ins = [specs["d"], specs["mix"], specs["own"], (None,)]
            d = per_device(lambda *parts: (follow_window(*parts),), at.mesh, ins, ins[:1])(*given)[0]
        return PendingWindows(
            put(self.x, window.x, axis=2),
            put(d, window.d, axis=2),
            precise_einsum("bqr,brk->bqk", window.mix, now.mix),
            after_window(now.own, window.mix, window.own),
        )

    def kept(self, keep: Bool[Array, " samples"]) -> PendingWindows:
        """With the samples reset for which `keep` is False; `known` comes first."""
        return jax.tree.map(lambda a: jnp.where(keep.reshape(-1, *[1] * (a.ndim - 1)), a, 0), self)  # type: ignore[no-any-return]

    def contract(
        self,
        large: Large,
        along: Float[Array, "sample row"],
        at_trace: Float[Array, "sample state out"],
        count: Int[Array, ""],
        at: Sharding | None,
        spec: Spec,
    ) -> Float[Array, "in out"]:
        """`sum along V + sum at_trace E` over samples, as they are now."""
        now, size = self.known(count), self.mix.shape[1]
        along, at_trace = along.astype(jnp.float32), at_trace.astype(jnp.float32)

        def sums(a: Array) -> Array:
            """Over rows and states, of coefficients (sample, row or state, .., out)."""
            states = [times(at_trace[:, s, None], a[:, size + s]) for s in range(a.shape[1] - size)]
            return add_up([mixed(along[:, None], a[:, :size], 1)[:, 0], *states])

        def of_part(rows: Array, h: Array, x: Array, dy: Array, *of_trace: Array) -> tuple[Array]:
            found = jnp.einsum("bit,bto->io", x, dy, preferred_element_type=jnp.float32) + read_rows(rows, h)
            found = found + read_trace(*of_trace) if of_trace else found
            return (jax.lax.psum(found, summed) if summed else found,)

        rows, trace = large
        given = [rows, precise_einsum("bq,bqr->br", along, now.mix), self.x, sums(now.d)]
        given += [] if trace is None else [trace, jnp.moveaxis(sums(now.own), 1, 0)]
        summed: tuple[str, ...] = ()
        if at is None or mesh_of(rows) is None:
            return of_part(*given)[0]
        b, i, _, o = spec
        summed = tuple(names_of(b))
        specs: list[Spec] = [spec, (b, None), (b, i, None), (b, None, o), (None, b, i, o), (None, b, o)]
        found: Array = per_device(of_part, at.mesh, specs[: len(given)], [(i, o)])(*given)[0]
        return found

    def written(self, large: Large, due: Bool[Array, ""], at: Sharding | None, spec: Spec) -> Sequence[Array]:
        """`V` and `E`, if there is a trace, with the pending steps if that is `due`."""
        arrays = [a for a in large if a is not None]
        given = self.x, self.d, self.mix, self.own, due.astype(jnp.int32)[None], *arrays
        if at is None or mesh_of(large[0]) is None:
            return write_rows(*given)
        b, i, _, o = spec
        outs = [spec, (None, b, i, o)][: len(arrays)]
        specs = [*self.specs(spec).values(), (None,), *outs]
        found: Sequence[Array] = per_device(write_rows, at.mesh, specs, outs)(*given)
        return found
