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

from .._compiler.exactness import RuleKind
from .._compiler.program import Var
from .._executor.dense_influence import DenseInfluence
from .._executor.executor import ETraceGraphExecutor
from .._executor.per_sample import find_per_sample
from .._executor.sharding import Spec
from .._executor.weight_gradients import in_front
from .._executor.window import Window, where_rows
from .._types import Array, Leaves
from .rule import Flags, Rule, Shapes, Values


@dataclass(frozen=True)
class RTRL(Rule):
    """The full influence matrix dh/dw of all parameters on all carried states, for each sample."""

    def kind(self, windows: bool) -> RuleKind:
        return RuleKind("RTRL", whole=True)

    def _influence(self, executor: ETraceGraphExecutor) -> DenseInfluence:
        # the batch is one sample if its entries depend on each other
        per = find_per_sample(executor, "auto", traces=False, mixed=True)
        return DenseInfluence(per, per.state_size, DenseInfluence.names_of(per), axis=in_front)

    def start(self, executor: ETraceGraphExecutor) -> Values:
        influence = self._influence(executor)
        with jax.numpy_dtype_promotion("standard"):  # parameters may have fewer bits than states
            zeros = influence.zeros().items()
            return {k: a.astype(jnp.result_type(a.dtype, influence.per.dtype)) for k, a in zeros}

    def specs(self, executor: ETraceGraphExecutor, shapes: Shapes) -> dict[str, Spec]:
        return self._influence(executor).specs()

    def advance(self, executor: ETraceGraphExecutor, values: Values, window: Window) -> Values:
        if not values:
            return values
        influence = self._influence(executor)
        if window.keep is not None:  # reset states do not depend on the state before
            values = self.forget(executor, values, ~window.keep[0])
        H, added = influence.per.pull(window, influence.per.unit_rows, in_front)
        return influence.advanced(values, added, [(influence, influence.where_reached(values, H))])

    def past(self, executor: ETraceGraphExecutor, values: Values, signals: Leaves, window: Window) -> Leaves:
        influence = self._influence(executor)
        if not values:
            return [None] * len(window.params)
        signal = influence.where_reached(values, influence.per.vectors(signals, dual=True))
        found = influence.gradients(values, signal)
        return [found.get(i) for i in range(len(window.params))]

    def forget(self, executor: ETraceGraphExecutor, values: Values, is_reset: Flags) -> Values:
        per = self._influence(executor).per

        def of(v: Var) -> Array:
            """Nonzero where a state is reset, in its real and imaginary part."""
            parts = 1 + 1j if jnp.issubdtype(v.aval.dtype, jnp.complexfloating) else 1
            none, all_ = (jnp.full(v.aval.shape, a, v.aval.dtype) for a in (0, parts))
            return where_rows(is_reset, all_, none) if v.aval.shape[:1] == is_reset.shape else none

        leaves = [of(v) if v.inexact else None for v in per.info.carried_invars]
        gone = per.vectors(leaves, dual=False) != 0
        return {k: jnp.where(gone.reshape(*gone.shape, *[1] * (p.ndim - 2)), 0, p) for k, p in values.items()}
