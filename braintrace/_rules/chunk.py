"""D-RTRL over a chunk of `K` steps: equal to step by step, but each trace is read and written once.

The inputs, `J`, `D` and signals of each step are recorded, with the same weights for all: `g[s]` on the
states after step `s`, `old[s]` on those before it (of losses that read these, or at the start of a window).
Then, with `q[s] = g[s] + D[s+1]^T q[s+1] + old[s+1]`,

    gradient  = <D[1]^T q[1] + old[1], trace[0]> + sum_s x[s] (J[s] q[s])
    trace[K]  = D[K]..D[1] trace[0]              + sum_s x[s] (D[K]..D[s+1] J[s])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._executor.backward import Backward
from .._executor.executor import Local
from .._executor.partial_sums import full_sum, plus
from .._executor.slots import Slot
from .._executor.trace_math import Jacobian, add_up, promoted, stack
from .._executor.weight_gradients import TIME
from .._executor.window import Record, Signals, unroll
from .._types import PyTree
from .rule import Gradients, TraceRule, Values, add_to


def step_by_step(
    rule: TraceRule, slots: Sequence[Slot], values: Values, record: Record
) -> tuple[Values, Gradients]:
    """The traces after a chunk and its summed gradients, by a scan over steps, for any rule."""

    def gradient(values: Values, signals: Signals | None, local: Local) -> Gradients:
        found = {} if signals is None else rule.gradient(slots, values, signals, local)
        return {k: full_sum(dw) for k, dw in found.items()}

    def body(carry: tuple[Values, Gradients], step: PyTree) -> tuple[tuple[Values, Gradients], None]:
        values, grads = carry
        local, signals, old, keep = record.one(step)
        values = values if keep is None else rule.reset(slots, values, keep)
        found = gradient(values, old, local)
        values = rule.update(slots, values, local)
        for key, value in gradient(values, signals, local).items():
            found[key] = found[key] + value if key in found else value
        return (values, {k: grads[k] + found[k].astype(grads[k].dtype) for k in grads}), None

    first = record.one(jax.tree.map(lambda a: a[0], record.steps))
    shapes = jax.eval_shape(lambda values: gradient(values, first[1], first[0]), values)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    (values, grads), _ = jax.lax.scan(body, (values, zeros), record.steps)
    return values, grads


def chunk_gradient(
    slots: Sequence[Slot], values: Values | None, record: Record, found: dict[int, Backward]
) -> Gradients:
    """The summed gradients of D-RTRL; `values` is None if the traces before the chunk are zero."""
    grads: Gradients = {}
    for slot in slots:
        site, k = slot.relation.site.index, slot.group.index
        inputs, weight = record.local.inputs[site], record.local.weights[site][slot.name]
        q, start = found[k].q, found[k].start
        assert q is not None
        assert start is not None
        sharding = None if values is None else record.local.sharding
        # `sum_s x[s] (J[s] q[s])`, which the within-step gradient joins once for each weight
        within = None if (site, slot.name) in grads else record.dys.get(site)
        dy = slot.to_y(slot.pair(q, record.local.J[site, k], 1), 1)
        dy = dy if within is None else add_up(promoted(dy, within))
        dw = slot.from_cotangent(slot.factor(inputs, (TIME,)), dy, inputs, weight, (TIME,), sharding)
        if values is not None:
            lifted = slot.lift(jnp.stack(start), [a[0] for a in inputs], 1)
            dw = plus(dw, slot.contract(lifted, values[slot.key], sharding))
        add_to(grads, slot, full_sum(dw))
    return grads


def chunk_traces(
    slots: Sequence[Slot],
    values: Values | None,
    record: Record,
    found: dict[int, Backward],
    like: Values,
) -> Values:
    """The traces of D-RTRL after a chunk, in the types of `like`."""
    result = {}
    for slot in slots:
        site, products = slot.relation.site.index, found[slot.group.index].products
        inputs, weight = record.local.inputs[site], record.local.weights[site][slot.name]
        J = record.local.J[site, slot.group.index]
        if products is None:  # without memory, the trace is the instant term of the last step
            last = [a[-1] for a in inputs]
            lifted = slot.lift_instant(jnp.stack([j[-1] for j in J]), last)
            new = slot.instant(slot.factor(last), lifted, weight)
        elif slot.uniform:
            new = _filtered(slot, record, weight, None if values is None else values[slot.key])
        else:
            decay, lifted = affine_terms(slot, record, products)
            new = slot.instant(slot.factor(inputs, (TIME,)), lifted, weight, (TIME,))
            if values is not None:
                new = add_up(promoted(slot.decay(decay, values[slot.key]), new))
        result[slot.key] = new.astype(like[slot.key].dtype)
    return result


def affine_terms(slot: Slot, record: Record, products: tuple[Jacobian, Jacobian]) -> tuple[Array, Array]:
    """`P = D[K]..D[1]`, (S, S, *at), and `d[s] = D[K]..D[s+1] J[s]`, (S, time, *y), of one trace."""
    site = slot.relation.site.index
    inputs, J = record.local.inputs[site], record.local.J[site, slot.group.index]
    decayed_J = jnp.stack([slot.pair(row, J, 1) for row in products[0]])
    lifted = jax.vmap(slot.lift_instant, (1, 0), 1)(decayed_J, list(inputs))
    return slot.lift_decay(stack(products[1]), [a[0] for a in inputs], 2), lifted


def _filtered(slot: Slot, record: Record, weight: Array, before: Array | None) -> Array:
    """Advance a filtered input (`Slot.uniform`) by a scan: it is small, and products would cost more."""
    site, k = slot.relation.site.index, slot.group.index
    inputs, D = record.local.inputs[site], record.local.D[k]
    assert D is not None
    decay = jnp.moveaxis(slot.lift_decay(stack(D), [a[0] for a in inputs], 3), 2, 0)
    J = jax.vmap(slot.lift_instant, (1, 0))(jnp.stack(record.local.J[site, k]), list(inputs))
    x = slot.factor(inputs, (TIME,))

    def now(J: Array, one: Any) -> Array:
        return slot.instant(None if x is None else (one, x[1][1:]), J, weight)

    def body(trace: Array, step: PyTree) -> tuple[Array, None]:
        D, *rest = step
        return add_up(promoted(slot.decay(D, trace), now(*rest))).astype(trace.dtype), None

    steps = (decay, J, None if x is None else x[0])
    if before is None:
        shape = jax.eval_shape(now, *jax.tree.map(lambda a: a[0], steps[1:]))
        before = jnp.zeros(shape.shape, shape.dtype)
    return jax.lax.scan(body, before, steps, unroll=unroll())[0]
