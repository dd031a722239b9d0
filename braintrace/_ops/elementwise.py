"""A weight used element by element: gains, leaks, thresholds."""

from __future__ import annotations

from typing import Any

import jax

from .letters import Term
from .primitive import WeightFn, on_mantissa, register_primitive, shape_of

_AXES = "abcdefghijklmnop"


def _identity(weight: jax.Array, *, ndim: int) -> jax.Array:
    return weight


def _terms(ndim: int) -> dict[str, Term]:
    return {"weight": Term(f"{_AXES[:ndim]}->{_AXES[:ndim]}")}


element_wise_p = register_primitive("etp_element_wise", _identity, _terms)


def element_wise(weight: Any, fn: WeightFn | None = None, *, weight_fn: WeightFn | None = None) -> Any:
    """`fn(weight)`, learned online: a weight that acts on the state element by element.

    Any shape that broadcasts against the state will do, `()` and `(1,)` included. `fn` (`weight_fn` is
    another name for it) is applied to the mantissa.

    >>> import jax, jax.numpy as jnp
    >>> print(element_wise(jnp.zeros(3), jax.nn.sigmoid))
    [0.5 0.5 0.5]
    """
    if fn is not None and weight_fn is not None:
        raise TypeError("`element_wise` takes `fn` or `weight_fn`, which mean the same, not both.")
    weight = on_mantissa(fn or weight_fn, weight)
    return element_wise_p(weights={"weight": weight}, ndim=len(shape_of(weight)))
