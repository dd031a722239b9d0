"""Whether the index letters of a user's own marked op say what its implementation does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler import CompilationError
from .slots import Slot
from .weighted import as_weight

_TOLERANCE = 1e-3


def check_own_ops(slots: Sequence[Slot]) -> None:
    """Compare on random numbers what the letters give each weight with the derivative of the op.

    An op of this package is not looked at, nor one inside a loop or with merged weights.
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
        f"The letters of `{slot.name}` of the marked op `{site.primitive.name}` at {site.source} {what}. "
        "An op must be linear in each weight, and its letters must name the axes of its inputs, of the "
        "weight and of the output (`Term` holds a view, where the factor is not the input itself). What is "
        "not linear, such as `w ** 2`, is done to the weight before the op."
    )


def _error(slot: Slot) -> float:
    site, numbers = slot.relation.site, np.random.default_rng(0)

    def random(aval: Any) -> Any:
        if not jnp.issubdtype(aval.dtype, jnp.inexact):
            return jnp.asarray(numbers.integers(0, 2, aval.shape), aval.dtype)
        return jnp.asarray(numbers.standard_normal(aval.shape), np.promote_types(aval.dtype, np.float32))

    operands = [random(a.aval) for a in site.inputs]
    at = site.num_inputs + site.weight_names.index(slot.name)
    inputs, weight = operands[: site.num_inputs], operands[at]

    def op(w: Any) -> Any:
        return site.primitive.plain(*operands[:at], w, *operands[at + 1 :], **site.params)

    y, pull = jax.vjp(op, weight)
    dy = random(y)
    want = pull(dy)[0]
    found = as_weight(slot.layout, slot.from_cotangent(slot.factor(inputs), dy, inputs, weight), weight)
    return float(jnp.max(jnp.abs(want - found)) / jnp.maximum(jnp.max(jnp.abs(want)), 1e-30))
