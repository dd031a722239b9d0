"""Rules with unbiased estimates by random signs, drawn from a key and a step count, so that runs repeat.

A reset keeps the count: estimates are unbiased over draws only, and sequences that all began with the same
signs would share one error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from .._compiler.exactness import RuleKind
from .._executor.executor import ETraceGraphExecutor
from .._types import Array, ArrayLike, DTypeLike, Shape
from .rule import Rule, Values

PerSample = Float[Array, " samples"]
Key = int | tuple[int, ...]
COUNT = "draws so far"


@dataclass(frozen=True)
class Estimate(Rule):
    """A rule whose gradient estimate is unbiased over random signs.

    Args:
        key: Integer or random key of the signs.
        eps: Number added to norms.
        samples: Batch axis of the states; 'auto' finds it, None treats the batch as one sample.
    """

    key: Key = 42
    eps: float = 1e-12
    samples: int | str | None = "auto"
    any_window: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", as_key(self.key))
        if not self.eps > 0:
            raise ValueError(f"`eps` is added to norms that may be zero: it is not {self.eps!r}.")

    def lasting(self, executor: ETraceGraphExecutor) -> Values:
        return {COUNT: jnp.zeros((1,), jnp.int32)}

    def seeded(self, values: Values, key: ArrayLike) -> Values:
        key = jnp.asarray(key)
        if jnp.issubdtype(key.dtype, jnp.integer):
            key = jax.random.wrap_key_data(key) if key.ndim else jax.random.key(key)
        return {**values, COUNT: jax.random.randint(key, (1,), 0, jnp.iinfo(jnp.int32).max, jnp.int32)}

    def kind(self, windows: bool) -> RuleKind:
        return RuleKind(type(self).__name__, windows=windows, estimate=True)

    def balance(self, a: PerSample, b: PerSample) -> PerSample:
        """The factor that makes two sides of a product, of norms `a` and `b`, about as long."""
        return jnp.sqrt(a / (b + self.eps)) + self.eps


def norm(arrays: Iterable[Float[Array, "samples ..."]], dtype: DTypeLike) -> PerSample:
    """The norm of all arrays of each sample together."""
    squares = (jnp.sum(jnp.abs(a).astype(dtype) ** 2, axis=tuple(range(1, a.ndim))) for a in arrays)
    return jnp.sqrt(sum(squares, jnp.zeros((), dtype)))


def scaled(of_samples: PerSample, array: Float[Array, "samples ..."]) -> Float[Array, "samples ..."]:
    """The array times one factor for each sample."""
    real = jnp.finfo(array.dtype).dtype
    found: Array = of_samples.astype(real).reshape(-1, *[1] * (array.ndim - 1)) * array
    return found


def as_key(key: Any) -> Key:
    """A key that can be compared: an integer, or the integers of a JAX key."""
    if isinstance(key, int) and not isinstance(key, bool):
        return key
    if isinstance(key, tuple):
        return tuple(map(int, key))
    array = jnp.asarray(key)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.ndim > 1:
        raise TypeError(f"`key` is a whole number or a random key, not {key!r}.")
    return int(array) if array.ndim == 0 else tuple(map(int, array))


def key_at(key: Key, count: Int[Array, ""]) -> Array:
    """The random key of a step, from the number of steps before it."""
    if isinstance(key, int):
        made = jax.random.key(key)
    else:
        made = jax.random.wrap_key_data(jnp.asarray(key, jnp.uint32))
    return jax.random.fold_in(made, count)


def signs(key: Array, shape: Shape, dtype: DTypeLike) -> Array:
    """Ones with random signs."""
    return jax.random.rademacher(key, shape, dtype)
