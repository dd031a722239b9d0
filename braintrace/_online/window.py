"""Steps that were taken, and what a rule may ask about them; each answer is computed when asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .._executor.executor import Local
from .._rules.chunk import Record

if TYPE_CHECKING:
    from .online import Online

Leaves = list[Any]


@dataclass(frozen=True, eq=False)
class Window:
    """Some steps of a model, one after the other; all but the parameters have time in front."""

    online: Online = field(repr=False)
    length: int
    params: Leaves
    args: Leaves
    consts: Leaves
    before: list[Leaves]  # the carried states before each step
    ys: dict[int, Any]  # the outputs of sites that feed a state
    keep: Any = None  # (time, batch): False where a sample begins anew before the step

    def _of_first(self, given: Any) -> Any:
        return jax.tree.map(lambda a: a[0], given)

    @property
    def first_consts(self) -> Leaves:
        """What the model closes over, at the first step."""
        return self._of_first(self.consts)  # type: ignore[no-any-return]

    @cached_property
    def first(self) -> Local:
        """The local Jacobians of the first step."""
        args, consts, before, ys = self._of_first((self.args, self.consts, self.before, self.ys))
        return self.online.local(self.params, args, consts, before, ys)

    @property
    def inputs_of_first(self) -> Local:
        """The inputs and weights of the sites at the first step, without Jacobians."""
        return Local(self.first.inputs, self.first.weights, {}, {})

    @cached_property
    def record(self) -> Record:
        """The local Jacobians of every step."""

        def one(step: Any) -> Any:
            args, consts, before, ys = step
            return self.online.local(self.params, args, consts, before, ys).arrays

        inputs, D, J = each_step(one, (self.args, self.consts, self.before, self.ys))
        return Record(Local(inputs, self.first.weights, D, J), self.length, keep=self.keep)

    def end(self, params: Leaves, start: list[Leaves]) -> list[Leaves]:
        """The carried states after the window, along all paths, from those before it."""

        def body(rest: list[Leaves], step: Any) -> Any:
            args, consts, initial, keep = step
            if keep is not None:
                rest = self.online.begin_anew(keep, rest, initial)
            return self.online.forward(params, args, consts, rest)[1], None

        initial = (
            None if self.keep is None else self.before
        )  # a sample that begins anew is there, at its start
        steps = (self.args, self.consts, initial, self.keep)
        return jax.lax.scan(body, start, steps, length=self.length)[0]


def each_step(function: Callable[[Any], Any], args: Any) -> Any:
    """`function` of each step, all at once where every operation in it can be mapped."""
    if jax.tree.leaves(args)[0].shape[0] == 1:  # as it is: XLA knows it from the step before
        return jax.tree.map(lambda a: jnp.asarray(a)[None], function(jax.tree.map(lambda a: a[0], args)))
    try:
        return jax.vmap(function)(args)
    except NotImplementedError:
        return jax.lax.map(function, args)
