"""The arrays that a rule keeps on one compiled graph: initial values, shapes and partition specs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import jax
import jax.numpy as jnp

from .. import _meshes
from .._executor.executor import ETraceGraphExecutor
from .._executor.pull_back import is_inexact
from .._executor.sharding import Spec
from .._rules.rule import Rule, Values
from .._types import Array, Aval


class RuleArrays:
    """Initial values, shapes and sharding of a rule's arrays, by name."""

    def __init__(self, executor: ETraceGraphExecutor, rule: Rule) -> None:
        self.executor, self.rule = executor, rule

    def initial(self, among: Sequence[Array] = ()) -> Values:
        """The arrays before the first step, sharded by `specs`.

        Under `vmap` they are mapped if arrays in `among`, those of the step, are.
        """
        sharding, specs = self.executor.sharding, self.specs
        lasting = self.rule.lasting(self.executor)
        zero = _meshes.zero_of(among)
        shapes = {k: s for k, s in self.shapes.items() if k not in lasting}
        if sharding is None and zero is None:
            return {**dict(zip(shapes, _zeros(tuple(shapes.values())), strict=True)), **lasting}

        def zeros(key: str, like: jax.ShapeDtypeStruct) -> Array:
            found = None
            if zero is not None and is_inexact(like):
                found = jnp.broadcast_to(zero.astype(like.dtype), like.shape)
            if sharding is None or key not in specs:
                return jnp.zeros(like.shape, like.dtype) if found is None else found
            if found is not None:
                return sharding.put(found, specs[key])
            return jnp.zeros(like.shape, like.dtype, device=sharding.named(specs[key], like.shape))

        if sharding is not None:
            lasting = {k: jax.device_put(a, sharding.named(specs[k], a.shape)) for k, a in lasting.items()}
        return {**{k: zeros(k, s) for k, s in shapes.items()}, **lasting}

    @cached_property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shape and type of each array."""
        executor, rule = self.executor, self.rule
        with _meshes.no_types():
            found: dict[str, jax.ShapeDtypeStruct] = jax.eval_shape(
                lambda: {**rule.start(executor), **rule.lasting(executor)}
            )
        return found

    @cached_property
    def lasting(self) -> list[str]:
        """The names of the arrays that a reset does not set back."""
        return list(jax.eval_shape(lambda: self.rule.lasting(self.executor)))

    @property
    def specs(self) -> dict[str, Spec]:
        """The partition specs of the arrays, as far as they are known."""
        if self.executor.sharding is None:
            return {}
        shapes = self.shapes
        kept = {k: s for k, s in shapes.items() if k in self.lasting}
        return {
            **self.rule.specs(self.executor, shapes),
            **{k: (None,) * len(s.shape) for k, s in kept.items()},
            **self.rule.signal.specs(self.executor, kept),
        }

    @property
    def sharded_shapes(self) -> dict[str, Aval]:
        """The shape, type and sharding of each array."""
        sharding, specs = self.executor.sharding, self.specs
        if sharding is None:
            return {**self.shapes}
        named = {k: sharding.named(spec, self.shapes[k].shape) for k, spec in specs.items()}
        return {k: s.update(sharding=named[k]) if k in named else s for k, s in self.shapes.items()}

    def constrained(self, values: Values) -> Values:
        """The arrays, each with the sharding of its initial value."""
        sharding, specs = self.executor.sharding, self.specs
        if sharding is None:
            return values
        return {k: sharding.put(v, specs[k]) if k in specs else v for k, v in values.items()}


@partial(jax.jit, static_argnums=0)
def _zeros(shapes: tuple[jax.ShapeDtypeStruct, ...]) -> list[Array]:
    """Zeros of all shapes; eager `jnp.zeros` would compile a program for each."""
    return [jnp.zeros(s.shape, s.dtype) for s in shapes]
