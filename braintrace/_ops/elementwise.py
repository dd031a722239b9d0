"""A weight used element by element: gains, leaks, thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters

import jax
from jax import lax

from .._types import Value
from .axis_labels import Term
from .primitive import WeightFn, on_mantissa, register_primitive, shape_of


def _broadcast(weight: jax.Array, *, axes: Sequence[int], shape: Sequence[int] | None) -> jax.Array:
    return weight if shape is None else lax.broadcast_in_dim(weight, shape, axes)


def _terms(axes: Sequence[int], shape: Sequence[int] | None) -> dict[str, Term]:
    """The equation of a weight broadcast along `axes` of an output of `shape` (None: not broadcast)."""
    y = ascii_letters[: len(axes if shape is None else shape)]
    return {"weight": Term(f"{''.join(y[a] for a in axes)}->{y}")}


element_wise_p = register_primitive("etp_element_wise", _broadcast, _terms)


def element_wise(weight: Value, fn: WeightFn | None = None, *, weight_fn: WeightFn | None = None) -> Value:
    """Mark a weight that acts on the state element by element, such as a gain, a leak or a threshold.

    Args:
        weight: Weight of any shape that broadcasts against the state, `()` and `(1,)` included.
        fn: Function applied to the weight, without its unit.
        weight_fn: Another name for `fn`.

    Returns:
        `fn(weight)`, to be used in ordinary JAX operations.

    >>> import jax, jax.numpy as jnp
    >>> print(element_wise(jnp.zeros(3), jax.nn.sigmoid))
    [0.5 0.5 0.5]
    """
    if fn is not None and weight_fn is not None:
        raise TypeError("`element_wise` takes `fn` or `weight_fn`, which mean the same, not both.")
    weight = on_mantissa(fn or weight_fn, weight)
    return element_wise_p(weights={"weight": weight}, axes=tuple(range(len(shape_of(weight)))), shape=None)
