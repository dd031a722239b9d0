"""Pull signals back through the local Jacobians of a chunk of steps."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .trace_math import Jacobian, States, dot, promoted, states
from .window import Record, unroll


@dataclass(frozen=True)
class Backward:
    """The result of one reverse scan over a chunk, for one group."""

    q: States | None  # of every step; None if there are no signals
    start: States | None  # dL/dh of the states before the chunk
    # `D[K]..D[s+1]` of every step `s`, and `D[K]..D[1]`; None if the group has no memory
    products: tuple[Jacobian, Jacobian] | None


def backward(record: Record, group: int, *, products: bool) -> Backward:
    """Pull the signals of a group back through a chunk; `products` of `D` are for the traces after it."""
    D = record.local.D[group]
    if not record.has_signals:
        return Backward(None, None, None if D is None else _products(D))
    old: Any = None if record.old_signals is None else record.old_signals[group]
    g = jnp.zeros_like(old) if record.signals is None else record.signals[group]
    if D is None:
        if old is None:
            return Backward(states(g, 1), states(jnp.zeros_like(g[0]), 0), None)
        later = jnp.concatenate([old[1:], jnp.zeros_like(old[:1])])
        return Backward(states(g + later, 1), states(old[0], 0), None)
    num = range(len(D))

    def body(carry: tuple[States, Jacobian], step: Any) -> Any:
        (later, product), (g, D, old) = carry, step
        q = list(map(operator.add, g, later))
        columns = list(zip(*D, strict=True))
        back = [dot(column, q) for column in columns]
        if old is not None:
            back = list(map(operator.add, back, old))
        return (back, [[dot(row, column) for column in columns] for row in product]), (q, product)

    steps = _promoted((states(g, 1), D, None if old is None else states(old, 1)))
    zero = [jnp.zeros_like(one[0]) for one in steps[0]]
    # without `products`, this stays an empty list and nothing is computed
    one = [[jnp.full_like(zero[s], s == r) for r in num] for s in num] if products else []
    (start, total), (q, each) = jax.lax.scan(body, (zero, one), steps, reverse=True, unroll=unroll())
    return Backward(q, start, (each, total))


def _products(D: Jacobian) -> tuple[Jacobian, Jacobian]:
    """`D[K]..D[s+1]` of every step `s`, and `D[K]..D[1]`."""

    def body(product: Jacobian, D: Jacobian) -> Any:
        columns = list(zip(*D, strict=True))
        return [[dot(row, column) for column in columns] for row in product], product

    D = _promoted(D)
    one = [[jnp.full_like(d[0], s == r) for r, d in enumerate(row)] for s, row in enumerate(D)]
    total, each = jax.lax.scan(body, one, D, reverse=True, unroll=unroll())
    return each, total


def _promoted(arrays: Any) -> Any:
    leaves, tree = jax.tree.flatten(arrays)
    return jax.tree.unflatten(tree, promoted(*leaves))
