"""What a learning rule is: pure functions over a dictionary of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax.numpy as jnp

from .._executor.executor import Local
from .._executor.traces import Trace

Values = dict[str, Any]  # the arrays that a rule keeps, by stable names
Signals = dict[int, Any]  # dL/dh of each group, (S, *varshape)
Gradients = dict[tuple[int, str], Any]  # of each effective weight, by site and name


class Rule(Protocol):
    """Which traces a rule keeps, how they advance, and what they make of a learning signal."""

    def init(self, traces: Sequence[Trace], local: Local) -> Values:
        """The arrays at the start; `local` has abstract values, for shapes and types."""
        ...

    def update(self, traces: Sequence[Trace], values: Values, local: Local) -> Values:
        """Advance one step."""
        ...

    def gradient(self, traces: Sequence[Trace], values: Values, signals: Signals, local: Local) -> Gradients:
        """The gradient of the step's loss, from the traces after the step."""
        ...


class ChunkRule(Rule, Protocol):
    """A rule that knows a faster way through many steps with fixed weights than one after the other."""

    def chunk(
        self,
        traces: Sequence[Trace],
        values: Values,
        record: Any,
        total: Gradients,
        *,
        fresh: bool,
        keep: bool,
    ) -> tuple[Values, Gradients]:
        """The traces after the steps in `record`, and their gradients, added to `total`.

        `fresh`: the traces are known to be zero. Unless `keep`, the traces are not wanted any more.
        """
        ...


def add_to(grads: Gradients, trace: Trace, value: Any) -> None:
    """Add what one trace gives to the gradient of its effective weight."""
    key = (trace.relation.site.index, trace.name)
    grads[key] = grads[key] + value if key in grads else value


def add_all(total: Gradients, grads: Gradients) -> Gradients:
    """The gradients, added to those so far, in the types of these."""
    return {
        k: v + (grads[k] if jnp.iscomplexobj(v) else grads[k].real).astype(v.dtype) if k in grads else v
        for k, v in total.items()
    }
