"""Dense products: matmul, grouped_matmul, lora_matmul, einsum and embedding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .letters import Term
from .primitive import WeightFn, apply, register_primitive


def _plus(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return y if bias is None else y + jnp.reshape(bias, (1,) * (y.ndim - bias.ndim) + bias.shape)


def _matmul(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    return _plus(jnp.matmul(x, weight), bias)


matmul_p = register_primitive("etp_matmul", _matmul, {"weight": "...i,io->...o", "bias": "o->...o"})


def matmul(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    weight_fn: WeightFn | None = None,
    bias_fn: WeightFn | None = None,
) -> Any:
    """`x @ weight + bias`, learned online; x is (..., in), weight (in, out), bias (out,).

    `weight_fn` and `bias_fn` are applied first, to the mantissas.

    >>> import jax.numpy as jnp
    >>> matmul(jnp.ones(3), jnp.ones((3, 2))).shape
    (2,)
    """
    _check_rank("matmul", "weight", weight, 2)
    _check_features("matmul", x, weight, 1)
    return apply(matmul_p, [x], {"weight": (weight, weight_fn)}, (bias, bias_fn))


def _grouped(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    return _plus(jnp.einsum("...gi,gio->...go", x, weight), bias)


grouped_p = register_primitive(
    "etp_grouped_matmul", _grouped, {"weight": "...gi,gio->...go", "bias": "go->...go"}
)


def grouped_matmul(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    weight_fn: WeightFn | None = None,
    bias_fn: WeightFn | None = None,
) -> Any:
    """One product for each group, learned online: `y[..., g, :] = x[..., g, :] @ weight[g] + bias[g]`.

    x is (..., groups, in), weight (groups, in, out), bias (groups, out).

    >>> import jax.numpy as jnp
    >>> grouped_matmul(jnp.ones((16, 4, 8)), jnp.ones((4, 8, 2))).shape
    (16, 4, 2)
    """
    _check_rank("grouped_matmul", "weight", weight, 3)
    _check_features("grouped_matmul", x, weight, 2)
    return apply(grouped_p, [x], {"weight": (weight, weight_fn)}, (bias, bias_fn))


def _lora(
    x: jax.Array, lora_b: jax.Array, lora_a: jax.Array, bias: jax.Array | None = None, *, alpha: float
) -> jax.Array:
    return _plus(alpha * jnp.matmul(jnp.matmul(x, lora_b), lora_a), bias)


def _lora_merge(
    lora_b: jax.Array, lora_a: jax.Array, bias: jax.Array | None = None, *, alpha: float
) -> dict[str, jax.Array]:
    weight = alpha * jnp.matmul(lora_b, lora_a)
    return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}


# The trace is that of the product B A: `bio` numbers instead of the `biro` of B alone.
lora_p = register_primitive(
    "etp_lora_matmul", _lora, {"weight": "...i,io->...o", "bias": "o->...o"}, merge=_lora_merge
)


def lora_matmul(
    x: Any,
    B: Any,
    A: Any,
    *,
    alpha: float = 1.0,
    bias: Any = None,
    b_fn: WeightFn | None = None,
    a_fn: WeightFn | None = None,
    bias_fn: WeightFn | None = None,
) -> Any:
    """`alpha * x @ B @ A + bias`, learned online; x is (..., in), B (in, rank), A (rank, out).

    >>> import jax.numpy as jnp
    >>> lora_matmul(jnp.ones(3), jnp.ones((3, 1)), jnp.ones((1, 2)), alpha=0.5)
    Array([1.5, 1.5], dtype=float32)
    """
    _check_rank("lora_matmul", "B", B, 2)
    _check_rank("lora_matmul", "A", A, 2)
    _check_features("lora_matmul", x, B, 1)
    weights = {"lora_b": (B, b_fn), "lora_a": (A, a_fn)}
    return apply(lora_p, [x], weights, (bias, bias_fn), alpha=float(alpha))


def _einsum(x: jax.Array, weight: jax.Array, *, equation: str) -> jax.Array:
    return jnp.einsum(equation, x, weight)


einsum_p = register_primitive("etp_einsum", _einsum, lambda equation: {"weight": Term(equation)})


def einsum(equation: str, x: Any, weight: Any, *, weight_fn: WeightFn | None = None) -> Any:
    """`jnp.einsum(equation, x, weight)`, learned online; the equation is explicit (`'bi,io->bo'`).

    >>> import jax.numpy as jnp
    >>> einsum("bhd,hde->bhe", jnp.ones((5, 2, 3)), jnp.ones((2, 3, 4))).shape
    (5, 2, 4)
    """
    factor, _, _ = Term(equation).parse()
    if factor is None:
        raise ValueError(f"The equation {equation!r} must have two operands, x and weight.")
    return apply(
        einsum_p, [x], {"weight": (weight, weight_fn)}, equation=equation.replace(" ", "")
    )


def _embedding(indices: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.take(weight, indices, axis=0)


def _embedding_terms(size: int) -> dict[str, Term]:
    return {
        "weight": Term("...i,io->...o", x=lambda indices: jax.nn.one_hot(indices, size))
    }


embedding_p = register_primitive(
    "etp_embedding", lambda indices, weight, size: _embedding(indices, weight), _embedding_terms
)


def embedding(indices: Any, weight: Any, *, weight_fn: WeightFn | None = None) -> Any:
    """`weight[indices]`, learned online; indices are integers of any shape, weight (size, features).

    >>> import jax.numpy as jnp
    >>> embedding(jnp.array([0, 2]), jnp.arange(6.0).reshape(3, 2))
    Array([[0., 1.],
           [4., 5.]], dtype=float32)
    """
    indices = jnp.asarray(indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"`embedding` takes integer indices, not {indices.dtype}.")
    _check_rank("embedding", "weight", weight, 2)
    return apply(embedding_p, [indices], {"weight": (weight, weight_fn)}, size=weight.shape[0])


def _check_rank(op: str, name: str, weight: Any, rank: int) -> None:
    if jnp.ndim(getattr(weight, "mantissa", weight)) != rank:
        raise ValueError(f"`{op}` takes a {name} of {rank} axes, not of shape {jnp.shape(weight)}.")


def _check_features(op: str, x: Any, weight: Any, axes: int) -> None:
    have, want = tuple(jnp.shape(x)), tuple(jnp.shape(weight))[:axes]
    if have[len(have) - axes :] != want:
        raise ValueError(
            f"`{op}` takes x of shape {('...', *want)} for a weight of shape "
            f"{tuple(jnp.shape(weight))}, not {have}."
        )
