"""RTRL: the full influence matrix of the parameters on the carried state. Exact, for small models.

    P = dh/dw, for each sample: (state size, parameters)
    P' = H P + A        gradient = dL/dw within the window + dL/dh[start] P

with `H` = d(state at the window's end)/d(state at its start), and `A` = d(state at its end)/dw for a fixed
state at its start. The result does not depend on the length of the window. Over several steps, `P` is read
and written once: each state variable at the end is pulled back to the outputs of ops at every step, and `A`
is one product with their inputs over time.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Float

from .._compiler.exactness import RuleKind
from .._compiler.program import Var
from .._compiler.samples import find_samples
from .._compiler.step import name_of
from .._executor.executor import ETraceGraphExecutor
from .._executor.marked_step import MarkedStep
from .._executor.per_sample import PerSample
from .._executor.sharding import Spec
from .._executor.trace_math import promoted
from .._executor.weight_gradients import in_front
from .._executor.window import Window, where_rows
from .._meshes import mesh_of, per_device
from .._types import Array, Aval, Leaves
from .rule import Flags, Rule, Shapes, Values

Rows = Float[Array, "samples rows n"]


@dataclass(frozen=True)
class RTRL(Rule):
    """The full influence matrix dh/dw of all parameters on all carried states, for each sample."""

    def kind(self, windows: bool) -> RuleKind:
        return RuleKind("RTRL", whole=True)

    def start(self, executor: ETraceGraphExecutor) -> Values:
        per = _per_sample(executor)
        lead = (per.samples.count, per.state_size)
        with jax.numpy_dtype_promotion("standard"):  # parameters may have fewer bits than states
            return {
                name: jnp.zeros((*lead, *aval.shape), jnp.result_type(aval.dtype, per.dtype))
                for name, aval in _names(per).values()
            }

    def specs(self, executor: ETraceGraphExecutor, shapes: Shapes) -> dict[str, Spec]:
        """The partition specs: samples as the states', parameters as these."""
        per, at = _per_sample(executor), executor.sharding
        assert at is not None
        return {
            name: (per.lead, None, *(at.of_leaf(i) or [None] * aval.ndim))
            for i, (name, aval) in _names(per).items()
        }

    def advance(self, executor: ETraceGraphExecutor, values: Values, window: Window) -> Values:
        if not values:
            return values
        per = _per_sample(executor)
        if window.keep is not None:  # reset states do not depend on the state before
            values = self.forget(executor, values, ~window.keep[0])
        H, added = per.pull(window, per.unit_rows, in_front)
        carried = self._carry(executor, H, values)
        return {
            name: (carried[name] + added[i]).astype(values[name].dtype)
            for i, (name, _) in _names(per).items()
        }

    def past(self, executor: ETraceGraphExecutor, values: Values, signals: Leaves, window: Window) -> Leaves:
        per = _per_sample(executor)
        found: Leaves = [None] * len(window.params)
        if values:
            each = self._carry(executor, per.vectors(signals, dual=True)[:, None], values)
            for i, (name, aval) in _names(per).items():
                found[i] = per.summed(i, each[name].astype(aval.dtype), 1)
        return found

    def _carry(self, executor: ETraceGraphExecutor, rows: Rows, values: Values) -> Values:
        """`rows @ P` for each sample, on each device for its own shard."""
        at = executor.sharding
        if at is None or mesh_of(*values.values()) is None:
            return _carry(rows, values)
        keys, found = list(values), self.specs(executor, values)
        specs = [at.fitted(found[k], values[k].shape) for k in keys]
        lead = specs[0][0]
        part = lambda rows, *kept: tuple(_carry(rows, dict(zip(keys, kept, strict=True))).values())
        mapped = per_device(part, at.mesh, [(lead, None, None), *specs], specs)
        return dict(zip(keys, mapped(rows, *values.values()), strict=True))

    def forget(self, executor: ETraceGraphExecutor, values: Values, is_reset: Flags) -> Values:
        per = _per_sample(executor)

        def of(v: Var) -> Array:
            """Nonzero where a state is reset, in its real and imaginary part."""
            parts = 1 + 1j if jnp.issubdtype(v.aval.dtype, jnp.complexfloating) else 1
            none, all_ = (jnp.full(v.aval.shape, a, v.aval.dtype) for a in (0, parts))
            return where_rows(is_reset, all_, none) if v.aval.shape[:1] == is_reset.shape else none

        leaves = [of(v) if v.inexact else None for v in per.info.carried_invars]
        gone = per.vectors(leaves, dual=False) != 0
        return {k: jnp.where(gone.reshape(*gone.shape, *[1] * (p.ndim - 2)), 0, p) for k, p in values.items()}


def _per_sample(executor: ETraceGraphExecutor) -> PerSample:
    """The cached `PerSample` of a step; the batch is one sample if its entries depend on each other."""
    if RTRL not in executor.per_sample:
        linear = MarkedStep(executor)
        samples = find_samples(linear.info)
        executor.per_sample[RTRL] = PerSample(
            linear, find_samples(linear.info, None) if samples.mixed else samples
        )
    return executor.per_sample[RTRL]  # type: ignore[no-any-return]


def _names(per: PerSample) -> dict[int, tuple[str, Aval]]:
    """The name and type of each parameter leaf that affects carried states, by leaf index."""
    leaves = [(e, i, v.aval) for e in per.info.fixed for i, v in enumerate(e.invars)]
    return {n: (f"{name_of(e.path)}:{i}", aval) for n in per.acting for e, i, aval in [leaves[n]]}


def _carry(rows: Rows, values: Values) -> Values:
    """`rows @ P` for each sample, where zero rows of `P` give zero even if the slopes are infinite."""

    def cleared() -> Values:
        reached = {k: jnp.any(p != 0, axis=tuple(range(2, p.ndim))) for k, p in values.items()}
        return {k: jnp.where(r[:, None], rows, 0) for k, r in reached.items()}

    # finding the rows that are zero takes a pass over all of `P`
    finite = jnp.all(jnp.isfinite(rows))
    given = jax.lax.cond(finite, lambda: dict.fromkeys(values, rows), cleared)
    return {k: _product(given[k], p) for k, p in values.items()}


def _product(rows: Rows, kept: Float[Array, "samples n ..."]) -> Float[Array, "samples rows ..."]:
    if jnp.iscomplexobj(kept):  # rows are real numbers
        return jax.lax.complex(_product(rows, kept.real), _product(rows, kept.imag))
    found: Array = jnp.einsum("bqn,bn...->bq...", *promoted(rows, kept))
    return found
