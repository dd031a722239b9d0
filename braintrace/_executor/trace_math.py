"""Arithmetic on arrays with an axis, or a list, of the states of a group."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._meshes import mesh_of

States = Sequence[Array]  # one array per state of a group
Jacobian = Sequence[States]  # `[new state][old state]`
Product = Callable[[Array, Array], Array]

_WRITTEN_OUT = 64  # terms of a sum up to which it is unrolled
_STORED = 2**17  # bytes of a trace; for smaller ones, another kernel costs more than it saves


def contract_states(g: Array, trace: Array) -> Array:
    """`sum_sm g[s, m] trace[s, m]`."""
    g, by = guarded(g, trace.nbytes)
    on_cpu, fused = partial(_sum_on_cpu, by), partial(_sum_fused, by)
    if mesh_of(g, trace) is not None:  # a loop over the batch would gather one shard after the other
        on_cpu = fused
    found: Array = jax.lax.platform_dependent(g, trace, cpu=on_cpu, default=fused)
    return found if by is times else _with_infinities(found)


def _sum_fused(by: Product, g: Array, trace: Array) -> Array:
    """`sum_sm g[s, m] trace[s, m]`, which a GPU fuses with the update of the trace.

    One sum per state: for a sum over both axes, XLA transposes the whole product first.
    """
    return add_up(jnp.sum(by(a, b), axis=0) for a, b in zip(states(g, 0), states(trace, 0), strict=True))


def _sum_on_cpu(by: Product, g: Array, trace: Array) -> Array:
    """`sum_sm g[s, m] trace[s, m]`, unrolled: XLA's reductions over a leading axis are slow on CPU."""
    g, trace = g.reshape(-1, *g.shape[2:]), trace.reshape(-1, *trace.shape[2:])
    if g.shape[0] > _WRITTEN_OUT:
        zero = jnp.zeros(trace.shape[1:], trace.dtype)
        return jax.lax.scan(lambda total, pair: (total + by(*pair), None), zero, (g, trace))[0]
    one_by_one = ([jax.lax.slice_in_dim(a, m, m + 1) for m in range(len(a))] for a in (g, trace))
    return jnp.squeeze(add_up(map(by, *one_by_one)), 0)


def states(array: Array, axis: int) -> list[Array]:
    """Split an axis of states into a list, which XLA neither stacks nor transposes."""
    return [jax.lax.index_in_dim(array, s, axis, keepdims=False) for s in range(array.shape[axis])]


def stack(D: Jacobian) -> Float[Array, "state state ..."]:
    """A local Jacobian as one array, (new states, old states, ...)."""
    return jnp.stack([jnp.stack(row) for row in D])


def add_up(terms: Iterable[Array]) -> Array:
    """The sum of arrays; unlike `sum`, it adds no zero."""
    return reduce(operator.add, terms)


def times(a: Array, trace: Array) -> Array:
    """`a * trace`, and zero where the trace is zero.

    A zero trace means that nothing has reached the state yet, so that an infinite slope there (of a root or a
    norm of a state that starts from zero) must not make it NaN.
    """
    product = a * trace
    trace = jnp.broadcast_to(trace, product.shape)
    return jax.lax.select(trace == 0, jnp.zeros_like(product), product)


def guarded(a: Array, size: int) -> tuple[Array, Product]:
    """A factor of a trace of `size` bytes, and a product of the two that is zero where the trace is zero.

    On a CPU, a select takes a sixth of a step with large traces. There a factor that is not finite is the
    largest number, once, and gradients that it reaches become infinite (`_with_infinities`).
    """
    if size < _STORED or jnp.iscomplexobj(a) or jax.default_backend() != "cpu":
        return a, times
    return stored(jnp.nan_to_num(a, nan=jnp.finfo(a.dtype).max), size), operator.mul


def _with_infinities(found: Array) -> Array:
    """Infinite where a factor of `guarded` was not finite, or where the square would not be."""
    largest = jnp.finfo(found.dtype).max
    return jnp.where(jnp.abs(found) < largest**0.5, found, found * largest)


def stored(array: Array, size: int, after: Sequence[Array] = ()) -> Array:
    """Make XLA on a CPU compute an array once that is a factor of a trace of `size` bytes; no value changes.

    Otherwise it would compute the array again for each element of the trace. XLA moves no division into a
    loop that repeats it, and removes an `optimization_barrier`. The divisor is one, but XLA cannot tell. It
    depends on `after`, so that these arrays are computed first.
    """

    def divided(array: Array, after: Sequence[Array]) -> Array:
        one = add_up(a.astype(jnp.int32) for a in (array, *(a.real.ravel()[0] for a in after)))
        return array / jnp.clip(one, 1, 1).astype(array.dtype)

    if size < _STORED or jnp.iscomplexobj(array):
        return array
    given = array, [a for a in after if a.size]
    return jax.lax.platform_dependent(*given, cpu=divided, default=lambda array, _: array)  # type: ignore[no-any-return]


def dot(a: States, b: States) -> Array:
    """`sum_s a[s] b[s]`."""
    return add_up(x * y for x, y in zip(a, b, strict=True))


def promoted(*arrays: Array) -> tuple[Any, ...]:
    """Cast arrays to their common type, whatever JAX's promotion setting is."""
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.result_type(*arrays)
    return tuple(a.astype(dtype) for a in arrays)


def finite(a: Any) -> Array:
    """Replace non-finite slopes by zero: a state at its initial value may have one (a root of zero)."""
    found: Array = jnp.where(jnp.isfinite(a), a, 0)
    return found


_BLOCK = 64


def filtered(decay: float, start: Array, x: Float[Array, "time ..."]) -> Float[Array, "time ..."]:
    """`y[t] = decay y[t-1] + x[t]` with `y[-1] = start`: a product with powers of `decay`, block by block."""
    length, block = x.shape[0], min(x.shape[0], _BLOCK)
    start, x = promoted(start, x)
    count = -(-length // block)
    padded = jnp.pad(x.reshape(length, -1), ((0, count * block - length), (0, 0))).reshape(count, block, -1)
    lags = np.arange(block)[:, None] - np.arange(block)
    powers = jnp.asarray(np.where(lags >= 0, float(decay) ** np.maximum(lags, 0), 0), x.dtype)
    # a product for each block: contracted with all blocks at once, XLA transposes them first
    own = jnp.matmul(jnp.broadcast_to(powers, (count, block, block)), padded, precision="highest")
    rise = jnp.asarray(float(decay) ** np.arange(1, block + 1), x.dtype)[:, None]

    def body(before: Array, own: Array) -> tuple[Array, Array]:
        y = own + rise * before[None]
        return y[-1], y

    first = start.reshape(-1)
    _, y = jax.lax.scan(body, first, own) if count > 1 else body(first, own[0])
    return y.reshape(count * block, *x.shape[1:])[:length]
