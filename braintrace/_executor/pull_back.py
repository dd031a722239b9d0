"""`jax.vjp` for lists of arrays of which some have no derivative."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._types import Array, ArrayLike, Aval, Function, PyTree


def is_inexact(x: Aval | ArrayLike) -> bool:
    """Whether an array is floating or complex."""
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def pull_back(function: Function, *args: list[Array], has_aux: bool = False) -> tuple[Any, ...]:
    """`jax.vjp` over the inexact leaves of lists of arrays; the others get None.

    `function(*args)` returns a list of arrays or, with `has_aux`, also an auxiliary value, which is the third
    result. Cotangents of arrays that are not inexact are ignored. The pull-back is a pytree, so that it can
    be a residual of a derivative rule.
    """
    keep = [[is_inexact(a) for a in arg] for arg in args]
    live = [[a for a, k in zip(arg, ks, strict=True) if k] for arg, ks in zip(args, keep, strict=True)]

    def inner(*live: list[Array]) -> tuple[list[Array], PyTree]:
        full = []
        for arg, part, ks in zip(args, live, keep, strict=True):
            rest = iter(part)
            full.append([next(rest) if k else a for a, k in zip(arg, ks, strict=True)])
        outs, aux = function(*full) if has_aux else (function(*full), None)
        return [o for o in outs if is_inexact(o)], (outs, aux)

    _, vjp, (outs, aux) = jax.vjp(inner, *live, has_aux=True)
    counted = [is_inexact(o) for o in outs]

    def pull(vjp: Function, cotangents: list[Array]) -> tuple[list[Array | None], ...]:
        grads = vjp([c for c, k in zip(cotangents, counted, strict=True) if k])
        result = []
        for part, ks in zip(grads, keep, strict=True):
            rest = iter(part)
            result.append([next(rest) if k else None for k in ks])
        return tuple(result)

    found = jax.tree_util.Partial(pull, vjp)
    return (outs, found, aux) if has_aux else (outs, found)
