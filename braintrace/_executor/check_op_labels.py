"""Verify the axis labels of user-defined ops against the derivative of their implementation."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler import CompilationError
from .._types import Array, Aval
from .partial_sums import full_sum
from .slots import Slot
from .weight_gradients import as_weight

_TOLERANCE = 1e-3


def check_own_ops(slots: Sequence[Slot]) -> None:
    """Compare the gradient that axis labels give for random input with the derivative of the op.

    Skips ops of this package, ops inside loops and ops with merged weights.
    """
    for slot in slots:
        site = slot.relation.site
        op, shapes = site.primitive, tuple((tuple(a.aval.shape), str(a.aval.dtype)) for a in site.inputs)
        case = (slot.name, str(site.params), shapes)
        if op.is_known or op.merges or site.loops or case in op.checked:
            continue
        with jax.ensure_compile_time_eval():
            try:
                error = _error(slot)
            except (TypeError, ValueError, IndexError) as e:
                raise CompilationError(_message(slot, f"do not fit shapes {[s for s, _ in shapes]}")) from e
        if not error < _TOLERANCE:
            words = (
                f"give another derivative than its implementation has (off by {error:.0%} on random numbers)"
            )
            raise CompilationError(_message(slot, words))
        op.checked.add(case)


def _message(slot: Slot, what: str) -> str:
    site = slot.relation.site
    return (
        f"The axis labels of `{slot.name}` of the marked op `{site.primitive.name}` at {site.source} {what}. "
        "An op must be linear in each weight, and its labels must name the axes of its inputs, of the "
        "weight and of the output (use a `Term` with a view if the factor is not the input itself). Apply "
        "nonlinear functions, such as `w ** 2`, to the weight before the op."
    )


def _error(slot: Slot) -> float:
    site, numbers = slot.relation.site, np.random.default_rng(0)

    def random(aval: Aval) -> Array:
        if not jnp.issubdtype(aval.dtype, jnp.inexact):
            return jnp.asarray(numbers.integers(0, 2, aval.shape), aval.dtype)
        return jnp.asarray(numbers.standard_normal(aval.shape), np.promote_types(aval.dtype, np.float32))

    operands = [random(a.aval) for a in site.inputs]
    at = site.num_inputs + site.weight_names.index(slot.name)
    inputs, weight = operands[: site.num_inputs], operands[at]

    def op(w: Array) -> Array:
        found: Array = site.primitive.plain(*operands[:at], w, *operands[at + 1 :], **site.params)
        return found

    y, pull = jax.vjp(op, weight)
    dy = random(y)
    want = pull(dy)[0]
    dw = full_sum(slot.from_cotangent(slot.factor(inputs), dy, inputs, weight))
    found = as_weight(slot.layout, dw, weight)
    return float(jnp.max(jnp.abs(want - found)) / jnp.maximum(jnp.max(jnp.abs(want)), 1e-30))
