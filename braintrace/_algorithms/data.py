"""How a learner is told what its arguments are: one step, or a window of steps."""

from __future__ import annotations

from typing import Any

import jax


@jax.tree_util.register_pytree_node_class
class SingleStepData:
    """Data of one time step."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.data,), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: tuple[Any]) -> Any:
        return cls(*children)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.data!r})"


@jax.tree_util.register_pytree_node_class
class MultiStepData(SingleStepData):
    """Data of several time steps, along the first axis of each array."""
