"""Bounds that keep traces from growing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Jacobian = Float[Array, "state state ..."]


class Bound(Protocol):
    """Bounds the local Jacobian, the instant term, and the trace after the step."""

    def jacobian(self, D: Jacobian) -> Jacobian: ...

    def instant(self, added: Array) -> Array: ...

    def trace(self, trace: Array) -> Array: ...


@dataclass(frozen=True)
class Clipped:
    """Clips the entries of a trace to magnitude `most`."""

    most: float

    def __post_init__(self) -> None:
        if not self.most > 0:
            raise ValueError(f"A bound of traces is a positive number, not {self.most!r}.")

    def jacobian(self, D: Jacobian) -> Jacobian:
        return D

    def instant(self, added: Array) -> Array:
        return added

    def trace(self, trace: Array) -> Array:
        return trace / jnp.maximum(jnp.abs(trace) / self.most, 1.0)


@dataclass(frozen=True)
class Normalized:
    """Divides `D` by its spectral radius, and instant term and trace by their largest entry, if above one."""

    def jacobian(self, D: Jacobian) -> Jacobian:
        return D / jnp.maximum(_radius(D), 1.0)[None, None]

    def instant(self, added: Array) -> Array:
        return added / jnp.maximum(jnp.max(jnp.abs(added)), 1.0)

    def trace(self, trace: Array) -> Array:
        return self.instant(trace)


def _radius(D: Jacobian) -> Array:
    """The largest magnitude of an eigenvalue, of each unit."""
    if len(D) == 1:
        return jnp.abs(D[0][0])
    if len(D) == 2:
        (a, b), (c, d) = D
        kind = np.promote_types(a.dtype, np.complex64)
        half = ((a + d) / 2).astype(kind)
        root = jnp.sqrt(half**2 - (a * d - b * c).astype(kind))
        return jnp.maximum(jnp.abs(half + root), jnp.abs(half - root))
    return jnp.max(jnp.abs(jnp.linalg.eigvals(jnp.moveaxis(D, (0, 1), (-2, -1)))), -1)
