"""What a learner's states and traces were after its last call: has anyone set them since?"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import brainstate
import jax

from .. import _compat


@dataclass(frozen=True)
class Seen:
    """The values of hidden states and traces after the last call, to know them again."""

    states: dict[str, list[Any]]
    traces: list[Any]

    @staticmethod
    def of(states: Mapping[str, brainstate.State], traces: Mapping[str, brainstate.State]) -> Seen | None:
        leaves = {k: jax.tree.leaves(st.value) for k, st in states.items()}
        kept = [st.value for st in traces.values()]
        if not kept or any(map(_compat.is_tracer, jax.tree.leaves((leaves, kept)))):
            return None  # no value of a step that is being traced outlives it
        return Seen({k: list(map(weakref.ref, v)) for k, v in leaves.items()}, list(map(weakref.ref, kept)))

    def traces_differ(self, traces: Mapping[str, brainstate.State]) -> bool:
        now = [vars(st)["_value"] for st in traces.values()]
        return len(now) != len(self.traces) or any(
            ref() is not v for ref, v in zip(self.traces, now, strict=True)
        )

    def assigned(self, states: Mapping[str, brainstate.State]) -> list[str]:
        """The states that someone gave other values."""
        now = {k: jax.tree.leaves(st.value) for k, st in states.items() if k in self.states}
        if any(map(_compat.is_tracer, jax.tree.leaves(now))):
            return []
        return [
            k
            for k, v in now.items()
            if any(ref() is not a for ref, a in zip(self.states[k], v, strict=False))
        ]
