"""The steps of a chunk, before its traces: forward in turn, then everything else at once.

Only the states have to be computed one step after the other. With the states before each step known, the
losses, learning signals, local Jacobians and within-step gradients of all steps are one mapped computation,
in which a product with a weight is one large product and the sum over steps is part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._executor.executor import Local, is_inexact
from .online import Added, Leaves, Online
from .pure import Pure
from .sequence import NeverCalledError

_ADVANCE, _STEP = np.zeros(2, np.int32), np.zeros(3, np.int32)  # what `mode` is while each is traced


class TakeInTurnError(Exception):
    """The steps of a chunk cannot be taken together."""


@dataclass
class Recorder:
    """Stands in for the learner's own derivative rule while a chunk is recorded.

    Without `deltas` a step goes forward only, and the outputs of its sites are kept. With them it is run in
    its differentiable form, with `deltas` added to its new and old states.
    """

    deltas: Added | None = None
    ys: dict[int, Any] = field(default_factory=dict)
    local: Local | None = None
    online: Online | None = None
    consts: Leaves = field(default_factory=list)
    out: Any = None

    def record(
        self, online: Online, params: Leaves, args: Leaves, consts: Leaves, rest: list[Leaves]
    ) -> tuple[Leaves, list[Leaves]]:
        """One step: its outputs and new states; what the traces need of it is kept here."""
        if self.online is not None:
            raise TakeInTurnError("`step_fn` calls the learner more than once")
        self.online, self.consts = online, consts
        if self.deltas is None:
            outs, new, self.ys = online.outputs(params, args, consts, rest)
        else:
            outs, new, self.local = online.differentiable(params, args, consts, rest, self.deltas, self.ys)
        return outs, new

    def check(self) -> Recorder:
        if self.online is None:
            raise NeverCalledError
        return self


@dataclass(frozen=True, eq=False)
class Steps:
    """A user's step as two pure functions.

    `advance(*slices)` goes forward and returns the outputs of the sites; `step(deltas, outputs, *slices)`
    returns the loss, what else the user's function returns, and the arrays that traces need.
    """

    advance: Pure
    step: Pure
    mode: Any
    deltas: Any
    online: Online
    consts: Leaves

    @staticmethod
    def trace(run: Callable[[Recorder, Any], Recorder], mode: Any, deltas: Any, first: Any) -> Steps:
        """Trace both; `TakeInTurnError` if the learner is called otherwise than once, at the top.

        `mode` is a state whose shape is another one in each of the two.
        """
        called: list[tuple[Online, Leaves]] = []

        def advance(*slices: Any) -> Any:
            return run(Recorder(), slices).ys

        def step(deltas: Any, ys: Any, *slices: Any) -> Any:
            recorder = run(Recorder(deltas, ys), slices)
            assert recorder.local is not None
            assert recorder.online is not None
            called.append((recorder.online, recorder.consts))
            return recorder.out, recorder.local.arrays

        try:
            mode.value = _ADVANCE
            forward = Pure.trace(advance, *first)
            mode.value = _STEP
            pure = Pure.trace(step, deltas, forward.shapes, *first)
        except jax.errors.UnexpectedTracerError as e:
            raise TakeInTurnError("`step_fn` calls the learner inside a transformation") from e
        return Steps(forward, pure, mode, deltas, *called[-1])

    def check(self, fixed: Sequence[Any], traces: Sequence[Any]) -> None:
        """`TakeInTurnError` if a step prints, calls back, changes a weight, or reads or writes a trace."""
        moving = {id(st) for st in self._moving}
        touched = {id(st) for st in (*self.advance.states, *self.step.states)}
        if self.step.effects:
            raise TakeInTurnError("`step_fn` prints or calls back")
        if any(id(st) in moving for st in fixed):
            raise TakeInTurnError("`step_fn` changes a parameter")
        if any(id(st) in touched for st in traces):
            raise TakeInTurnError("`step_fn` reads or writes a trace")
        if any(map(_compat.is_tracer, self.online.consts_of_weights(self.consts))):
            raise TakeInTurnError("a weight may change from step to step")

    @property
    def _moving(self) -> list[Any]:
        return [st for st, written in zip(self.advance.states, self.advance.written, strict=True) if written]

    def _values(self, pure: Pure, mode: Any) -> list[Leaves]:
        values = zip(pure.states, pure.values(), strict=True)
        return [[jnp.asarray(mode)] if st is self.mode else leaves for st, leaves in values]

    def _in_turn(self, arrays: Any) -> tuple[Any, Any, list[Leaves]]:
        """The states before each step, the outputs of its sites, and the states after the last."""
        start = self._values(self.advance, _ADVANCE)
        numbers = [i for i, written in enumerate(self.advance.written) if written]

        def forward(carry: list[Leaves], slices: Any) -> Any:
            now = dict(zip(numbers, carry, strict=True))
            ys, new = self.advance([now.get(i, leaves) for i, leaves in enumerate(start)], *slices)
            return [new[i] for i in numbers], (carry, ys)

        end, (before, ys) = jax.lax.scan(forward, [start[i] for i in numbers], arrays)
        after = dict(zip(numbers, end, strict=True))
        return before, ys, [after.get(i, leaves) for i, leaves in enumerate(start)]

    def _each(self, given: dict[int, Leaves], deltas: Any, ys: Any, before: Any, arrays: Any) -> Any:
        """What each step gives, for weights `given` by the identity of their states."""
        moving, fixed = [id(st) for st in self._moving], self._values(self.step, _STEP)

        def one(args: Any) -> Any:
            deltas, ys, before, slices = args
            now = {**given, **dict(zip(moving, before, strict=True))}
            values = [now.get(id(st), f) for st, f in zip(self.step.states, fixed, strict=True)]
            return self.step(values, deltas, ys, *slices)[0]

        return _each_step(one, (deltas, ys, before, arrays))

    def _no_deltas(self, length: int) -> Any:
        return jax.tree.map(lambda d: jnp.zeros((length, *d.shape), d.dtype), self.deltas)

    def without_loss(self, length: int, arrays: Any) -> tuple[Any, Any, list[Leaves]]:
        """What each step gave, signals of zero, and the states after the last."""
        before, ys, after = self._in_turn(arrays)
        none = self._no_deltas(length)
        return self._each({}, none, ys, before, arrays), none, after

    def at_once(self, weights: Any, arrays: Any, mask: Any) -> tuple[Any, Any, Any, list[Leaves]]:
        """Within-step gradients of `weights`, signals, what each step gave, and the states after the last.

        All but the gradients and the states have an axis of time in front.
        """
        before, ys, after = self._in_turn(arrays)
        leaves, tree = jax.tree.flatten({k: st.value for k, st in weights.items()})
        live = [is_inexact(leaf) for leaf in leaves]

        def losses(some: Leaves, deltas: Any) -> Any:
            items = iter(some)
            full = jax.tree.unflatten(
                tree, [next(items) if k else a for a, k in zip(leaves, live, strict=True)]
            )
            given = {id(st): jax.tree.leaves(full[k]) for k, st in weights.items()}
            out = self._each(given, deltas, ys, before, arrays)
            loss = out[0][0]
            return jnp.sum(loss * mask.astype(loss.dtype)), out

        some = [leaf for leaf, k in zip(leaves, live, strict=True) if k]
        total, pull, out = jax.vjp(losses, some, self._no_deltas(len(mask)), has_aux=True)
        found, deltas = pull(jnp.ones_like(total))
        items = iter(found)
        grads = jax.tree.unflatten(
            tree, [next(items) if k else jnp.zeros_like(a) for a, k in zip(leaves, live, strict=True)]
        )
        return grads, deltas, out, after


def _each_step(function: Callable[[Any], Any], args: Any) -> Any:
    """`function` of each step, all at once where every operation in it can be mapped."""
    if jax.tree.leaves(args)[0].shape[0] == 1:  # as it is: XLA knows it from the step before
        return jax.tree.map(lambda a: jnp.asarray(a)[None], function(jax.tree.map(lambda a: a[0], args)))
    try:
        return jax.vmap(function)(args)
    except NotImplementedError:
        return jax.lax.map(function, args)
