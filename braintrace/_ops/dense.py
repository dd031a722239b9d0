"""Dense products: matmul, grouped_matmul, lora_matmul, einsum and embedding."""

from __future__ import annotations

import brainunit as u
import jax
import jax.numpy as jnp

from .._types import ArrayLike, DTypeLike, Value
from .axis_labels import Term
from .primitive import WeightFn, bias_of, on_mantissa, register_primitive, shape_of, spikes_as


def _plus(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return y if bias is None else y + jnp.reshape(bias, (1,) * (y.ndim - bias.ndim) + bias.shape)


def _matmul(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    return _plus(jnp.matmul(x, weight), bias)


matmul_p = register_primitive("etp_matmul", _matmul, {"weight": "...i,io->...o", "bias": "o->...o"})


def matmul(
    x: Value,
    weight: Value,
    bias: Value = None,
    *,
    weight_fn: WeightFn | None = None,
    bias_fn: WeightFn | None = None,
) -> Value:
    """Multiply `x` by a weight that is learned online.

    Args:
        x: Input, shape `(..., in)`.
        weight: Weight, shape `(in, out)`.
        bias: Bias, shape `(out,)`; by default none.
        weight_fn: Function applied to the weight first, without its unit: a mask, a sign constraint.
        bias_fn: Function applied to the bias first.

    Returns:
        `x @ weight + bias`, shape `(..., out)`.

    >>> import jax.numpy as jnp
    >>> matmul(jnp.ones(3), jnp.ones((3, 2))).shape
    (2,)
    """
    weight = on_mantissa(weight_fn, weight)
    _check_rank("matmul", "weight", weight, 2)
    _check_features("matmul", x, weight, 1)
    bias = bias_of(shape_of(weight)[1:], on_mantissa(bias_fn, bias))
    return matmul_p(spikes_as(weight, x), weights={"weight": weight, "bias": bias})


def _grouped(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    return _plus(jnp.einsum("...gi,gio->...go", x, weight), bias)


grouped_p = register_primitive(
    "etp_grouped_matmul", _grouped, {"weight": "...gi,gio->...go", "bias": "go->...go"}
)


def grouped_matmul(
    x: Value,
    weight: Value,
    bias: Value = None,
    *,
    weight_fn: WeightFn | None = None,
    bias_fn: WeightFn | None = None,
) -> Value:
    """Multiply each group of features by a weight of its own, learned online.

    Args:
        x: Input, shape `(..., groups, in)`.
        weight: Weights, shape `(groups, in, out)`.
        bias: Biases, shape `(groups, out)`; by default none.
        weight_fn: Function applied to the weights first, without their unit.
        bias_fn: Function applied to the biases first.

    Returns:
        `x[..., g, :] @ weight[g] + bias[g]` for each group `g`, shape `(..., groups, out)`.

    >>> import jax.numpy as jnp
    >>> grouped_matmul(jnp.ones((16, 4, 8)), jnp.ones((4, 8, 2))).shape
    (16, 4, 2)
    """
    weight = on_mantissa(weight_fn, weight)
    _check_rank("grouped_matmul", "weight", weight, 3)
    _check_features("grouped_matmul", x, weight, 2)
    bias = bias_of(shape_of(weight)[::2], on_mantissa(bias_fn, bias))
    return grouped_p(spikes_as(weight, x), weights={"weight": weight, "bias": bias})


def _lora(
    x: jax.Array, lora_b: jax.Array, lora_a: jax.Array, bias: jax.Array | None = None, *, alpha: float
) -> jax.Array:
    return _plus(alpha * jnp.matmul(jnp.matmul(x, lora_b), lora_a), bias)


def _lora_merge(
    lora_b: jax.Array, lora_a: jax.Array, bias: jax.Array | None = None, *, alpha: float
) -> dict[str, jax.Array]:
    weight = alpha * jnp.matmul(lora_b, lora_a)
    return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}


# The trace is that of the product B A, of size `bio`; that of B alone would have size `biro`.
lora_p = register_primitive(
    "etp_lora_matmul", _lora, {"weight": "...i,io->...o", "bias": "o->...o"}, merge=_lora_merge
)


def lora_matmul(
    x: Value,
    B: Value,
    A: Value,
    *,
    alpha: float = 1.0,
    bias: Value = None,
    b_fn: WeightFn | None = None,
    a_fn: WeightFn | None = None,
    bias_fn: WeightFn | None = None,
) -> Value:
    """Multiply `x` by a low-rank weight `B @ A` that is learned online.

    Args:
        x: Input, shape `(..., in)`.
        B: First factor, shape `(in, rank)`.
        A: Second factor, shape `(rank, out)`.
        alpha: Scale of the product.
        bias: Bias, shape `(out,)`; by default none.
        b_fn: Function applied to `B` first, without its unit.
        a_fn: Function applied to `A` first.
        bias_fn: Function applied to the bias first.

    Returns:
        `alpha * x @ B @ A + bias`, shape `(..., out)`.

    >>> import jax.numpy as jnp
    >>> print(lora_matmul(jnp.ones(3), jnp.ones((3, 1)), jnp.ones((1, 2)), alpha=0.5))
    [1.5 1.5]
    """
    B, A = on_mantissa(b_fn, B), on_mantissa(a_fn, A)
    _check_rank("lora_matmul", "B", B, 2)
    _check_rank("lora_matmul", "A", A, 2)
    _check_features("lora_matmul", x, B, 1)
    bias = bias_of(shape_of(A)[1:], on_mantissa(bias_fn, bias))
    return lora_p(spikes_as(B, x), weights={"lora_b": B, "lora_a": A, "bias": bias}, alpha=float(alpha))


def _einsum(x: jax.Array, weight: jax.Array, *, equation: str) -> jax.Array:
    return jnp.einsum(equation, x, weight)


einsum_p = register_primitive("etp_einsum", _einsum, lambda equation: {"weight": Term(equation)})


def einsum(equation: str, x: Value, weight: Value, *, weight_fn: WeightFn | None = None) -> Value:
    """Compute `jnp.einsum(equation, x, weight)` with a weight that is learned online.

    Args:
        equation: Axis labels, `'bi,io->bo'`. Without an arrow, the output has the labels that occur once, in
            alphabetical order.
        x: Input.
        weight: Weight.
        weight_fn: Function applied to the weight first, without its unit.

    Returns:
        The sum of products, with the axes named after the arrow.

    >>> import jax.numpy as jnp
    >>> einsum("bhd,hde->bhe", jnp.ones((5, 2, 3)), jnp.ones((2, 3, 4))).shape
    (5, 2, 4)
    """
    equation = equation.replace(" ", "")
    if "->" not in equation:
        letters = equation.replace("...", "").replace(",", "")
        once = sorted(a for a in letters if letters.count(a) == 1)
        equation = f"{equation}->{'...' * ('...' in equation)}{''.join(once)}"
    factor, _, _ = Term(equation).parse()
    if factor is None:
        raise ValueError(f"The equation {equation!r} must have two operands, x and weight.")
    weight = on_mantissa(weight_fn, weight)
    return einsum_p(spikes_as(weight, x), weights={"weight": weight}, equation=equation)


def _embedding(indices: jax.Array, weight: jax.Array, *, size: int, dtype: DTypeLike) -> jax.Array:
    return jnp.take(weight, indices, axis=0)


def _embedding_terms(size: int, dtype: DTypeLike) -> dict[str, Term]:
    def rows(indices: jax.Array) -> jax.Array:
        # a negative index counts from the end, as in `jnp.take`
        return jax.nn.one_hot(jnp.where(indices < 0, indices + size, indices), size, dtype=dtype)

    return {"weight": Term("...i,io->...o", x=rows)}


embedding_p = register_primitive("etp_embedding", _embedding, _embedding_terms)


def embedding(indices: ArrayLike, weight: Value, *, weight_fn: WeightFn | None = None) -> Value:
    """Look up rows of a table that is learned online.

    Args:
        indices: Integers of any shape; negative ones count from the end.
        weight: Table, shape `(size, features)`.
        weight_fn: Function applied to the table first, without its unit.

    Returns:
        `weight[indices]`, shape `(*indices.shape, features)`.

    >>> import jax.numpy as jnp
    >>> print(embedding(jnp.array([0, 2]), jnp.arange(6.0).reshape(3, 2)))
    [[0. 1.]
     [4. 5.]]
    """
    indices = jnp.asarray(indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"`embedding` takes integer indices, not {indices.dtype}.")
    weight = on_mantissa(weight_fn, weight)
    _check_rank("embedding", "weight", weight, 2)
    return embedding_p(
        indices,
        weights={"weight": weight},
        size=shape_of(weight)[0],
        dtype=jnp.result_type(u.get_mantissa(weight)),
    )


def _check_rank(op: str, name: str, weight: Value, rank: int) -> None:
    if len(shape_of(weight)) != rank:
        raise ValueError(f"`{op}` takes a {name} of {rank} axes, not of shape {shape_of(weight)}.")


def _check_features(op: str, x: Value, weight: Value, axes: int) -> None:
    have, want = shape_of(x), shape_of(weight)[:axes]
    if have[len(have) - axes :] != want:
        raise ValueError(
            f"`{op}` takes x of shape {('...', *want)} for a weight of shape {shape_of(weight)}, not {have}."
        )
