"""Sequence driver: the gradient over a sequence as a pure function, step by step, in chunks or in windows.

All three modes evaluate the same traced program of the user's step (`UserStep`):

- *Step by step*: a `scan` whose body differentiates the loss of one step.
- In *chunks*: a `scan` computes the states only. Given the states before each step, a `vmap` over the steps
  computes losses, learning signals, local Jacobians and within-step gradients. Each trace is read and written
  once per chunk.
- In *windows*: the losses of a window are back-propagated through its steps along all paths. The rule's
  traces give the gradient through the states at the start of the window.

`leaves` are the arrays of all states: parameters, carry and the rule's arrays. *Moving* leaves are those that
a step changes; *carried* leaves are those of the model's own carry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .. import _compat, _meshes
from .._executor.executor import Leaves
from .._executor.pull_back import is_inexact
from .._executor.sharding import full_sum
from .._executor.window import Window, scan_once, where_rows
from .._rules.rule import Values
from .call import Call
from .in_chunks import in_chunks
from .in_windows import Boundary, back_through_time, in_windows
from .parts import Carry, Given, Part, add, finite_targets, weighed
from .rule_step import differentiated_once
from .sequence import Sequence, over_chunks
from .user_step import AtCall, UserStep, as_it_is


@dataclass(frozen=True)
class Drive:
    """How to run a user's step over a sequence, part by part. `Programs` caches compiled drives by value.

    `step` is not part of the comparison: the cache compares its jaxpr.
    """

    step: UserStep = field(compare=False)
    size: int  # number of steps of a part: one chunk, one window or several windows
    wanted: tuple[int, ...] = ()  # indices of the leaves to differentiate; all are inexact
    chunked: bool = False  # run in chunks
    windows: bool = False  # run in windows
    window: int = 0  # window size if a part may hold several windows; 0 if each part is one window
    checkpoint_every: int | None = None  # BPTT: steps per `jax.checkpoint` segment; None stores all values
    keep: bool = True  # whether the rule's arrays are needed after the sequence
    fresh: bool = False  # whether the traces are known to be zero before the sequence
    reset_leaves: tuple[int, ...] = ()  # indices of the leaves that a reset sets to `Given.initial`
    # resets the rule's arrays for the flagged samples of a batch
    reset_traces: Callable[[Values, Any], Values] | None = field(default=None, compare=False)
    unroll: int = 1  # `unroll` of the scan over single steps

    def __call__(self, given: Given, sequence: Sequence) -> tuple[Leaves, Leaves, Leaves]:
        """The summed gradients, the losses and other outputs of every step, and the leaves after the last."""
        given, sequence = _meshes.all_on_mesh((given, sequence))
        if self.step.calls:  # else it is BPTT, and all of it can be differentiated
            given, sequence = differentiated_once((given, sequence))
            given = self._adapted(given)
        run: Any = partial(self._in_turn, sequence.has_mask and self._follows_loss)
        start: Any = ()
        if self.windows:
            run = partial(back_through_time if self.step.node is None else in_windows, self)
        elif self.chunked:
            run, start = partial(in_chunks, self), self.no_weight_grads(given)
        carry = Carry([jnp.zeros_like(given.leaves[i]) for i in self.wanted], start, given.moving(self.step))

        def part(carry: Carry, arrays: Any, mask: Any, reset: Any) -> tuple[Carry, Leaves]:
            slices = finite_targets(jax.tree.leaves(arrays), mask, self.step.targets)
            found: tuple[Carry, Leaves] = run(given, carry, Part(slices, mask, reset))
            return found

        # windows: the remainder comes first, so that a loss at the end of the sequence has a full window
        carry, outs = over_chunks(part, carry, sequence, self.size, rest_first=self.windows)
        total = carry.total
        if self.chunked and not self.windows:
            total = self.add_weight_grads(given, total, carry.weight_grads)
        return self._like_params(total), outs, self.with_trace_sharding(self.leaves_now(given, carry.moving))

    def _adapted(self, given: Given) -> Given:
        """Let the rule adapt its arrays at the start of a sequence: a balanced basis is renewed here."""
        step = self.step
        if step.node is None or not self.windows:
            return given
        online, leaves = step.online, list(given.leaves)
        values = {k: leaves[i] for k, i in step.traces.items()}
        after = online.rule.begin(online.executor, values, fresh=self.fresh)
        for k, i in step.traces.items():
            leaves[i] = after[k]
        return replace(given, leaves=leaves)

    @property
    def sharding_key(self) -> Any:
        """A hashable key of the sharding of the step's arrays, or None if it is unset."""
        at = None if self.step.node is None else self.step.online.executor.sharding
        return None if at is None else at.key

    def specs(self, given: Given, sequence: Sequence) -> tuple[Leaves, Leaves, Leaves]:
        """The partition specs of the gradients, step outputs and final leaves, from the types of arrays."""
        step, before = self.step, list(map(_meshes.spec_of, given.leaves))
        slices = [_meshes.without_axis(a) for a in jax.tree.leaves(sequence.arrays)]
        found = _meshes.typed(_compat.jaxpr_as_fun(step.closed), *slices, *given.leaves)
        num = len(step.outs)
        found = [*[None] * num, *before] if found is None else found
        shapes = [*(a.aval.shape for a in step.outs), *(a.shape for a in given.leaves)]
        found = [_by_samples(s, shape, slices) for s, shape in zip(found, shapes, strict=True)]
        outs = [None if s is None else (None, *s) for s in found[:num]]
        moving = {*step.moving} - {*step.traces.values()}
        after = [found[num + i] if i in moving else s for i, s in enumerate(before)]
        return [before[i] for i in self.wanted], outs, after

    def with_trace_sharding(self, leaves: Leaves) -> Leaves:
        """Return all leaves, with the rule's arrays sharded as their initial values are."""
        step = self.step
        if step.node is None:
            return leaves
        found = step.online.arrays.constrained({k: leaves[i] for k, i in step.traces.items()})
        number = {i: found[k] for k, i in step.traces.items()}
        return [number.get(i, a) for i, a in enumerate(leaves)]

    def _like_params(self, total: Leaves) -> Leaves:
        """Shard the gradients as the parameters."""
        step = self.step
        if step.node is None or step.params is None:
            return total
        at = dict(zip(self.wanted, total, strict=True))
        found = step.online.executor.like_params([at.get(i) for i in step.params])
        at.update({i: g for i, g in zip(step.params, found, strict=True) if g is not None})
        return [at[i] for i in self.wanted]

    # -- shared by all modes -----------------------------------------------------------------------

    def leaves_now(self, given: Given, moving: Leaves, some: Leaves | None = None) -> Leaves:
        """All leaves, with new values of the moving ones and, in `some`, of the differentiated ones."""
        now = dict(zip(self.step.moving, moving, strict=True))
        now.update(zip(self.wanted, some or (), strict=some is not None))
        return [now.get(i, a) for i, a in enumerate(given.leaves)]

    def with_resets(self, given: Given, leaves: Leaves, reset: Any) -> Leaves:
        """Return the leaves before a step, with the samples flagged in `reset` set to initial values."""
        if reset is None:
            return leaves
        result = list(leaves)
        for i, start in zip(self.reset_leaves, given.initial, strict=True):
            result[i] = where_rows(reset, start, result[i])
        return result

    # -- step by step ------------------------------------------------------------------------------

    @property
    def _follows_loss(self) -> bool:
        """Whether the gradient of a step is zero if its loss has weight zero."""
        return not any(node.params["call"].online.rule.signal.takes for node in self.step.calls)

    def _in_turn(self, skips: bool, given: Given, carry: Carry, part: Part) -> tuple[Carry, Leaves]:
        """Run step by step; with `skips`, no gradient is computed of a step whose loss has weight zero."""
        step = self.step
        old = self.old_leaves

        def body(carry: Any, now: Any) -> Any:
            (total, moving), (slices, mask, reset) = carry, now
            leaves = self.with_resets(given, self.leaves_now(given, moving), reset)
            if reset is not None and self.reset_traces is not None:
                kept = self.reset_traces({k: leaves[i] for k, i in step.traces.items()}, reset)
                for k, i in step.traces.items():
                    leaves[i] = kept[k]

            def loss(some: Leaves, start: Leaves) -> Any:
                now = dict(zip((*self.wanted, *old), (*some, *start), strict=True))
                live = [now.get(i, a) for i, a in enumerate(leaves)]
                taken: list[Any] = []

                def at_call(call: Call, operands: Leaves) -> Leaves:
                    operands = call.masked(operands, mask)
                    taken.append(jax.lax.stop_gradient(call.operands(operands)))
                    return as_it_is(call, operands)

                targets = [*step.outs, *(step.new[i] for i in step.moving)]
                found = step.run(given.consts, slices, live, targets, at_call)
                outs = found[: len(step.outs)]
                return weighed(outs[0], mask), (outs, found[len(step.outs) :], taken)

            at = [leaves[i] for i in self.wanted], [leaves[i] for i in old]
            value, pull, (outs, moving, taken) = jax.vjp(loss, *at, has_aux=True)

            def add_gradient(total: Leaves) -> Leaves:
                grads, signals = pull(jnp.ones_like(value))
                if old:  # the loss reads states before the call: traces before the step give this gradient
                    by_leaf = dict(zip(old, signals, strict=True))
                    grads = self.add_params(grads, self._before_call(taken[0], by_leaf))
                return add(total, grads)

            if skips:
                total = jax.lax.cond(jnp.any(mask != 0), add_gradient, lambda total: total, total)
            else:
                total = add_gradient(total)
            return (total, moving), outs

        # not unrolled on several devices: XLA moves the sum over them out of the loop if it is a single one
        unroll = self.unroll if self.sharding_key is None else 1
        steps = part.slices, part.mask, part.reset
        (total, moving), outs = jax.lax.scan(body, (carry.total, carry.moving), steps, unroll=unroll)
        return Carry(total, carry.weight_grads, moving), outs

    @property
    def old_leaves(self) -> list[int]:
        """Indices of the inexact carried leaves that the loss reads as they are before the call.

        Empty if the rule's signal is not back-propagated, because it then has no value at these leaves.
        """
        step = self.step
        if step.node is None or step.params is None or not step.online.asks_old:
            return []
        return [
            i
            for i in step.carried
            if i is not None and i in step.read_otherwise and is_inexact(step.leaves[i].aval)
        ]

    def _before_call(self, taken: Any, signals: dict[int, Any]) -> Leaves:
        """The gradients of the parameters through the states before a step, for signals there."""
        params, args, consts, rest, values = taken
        executor = self.step.online.executor
        ys = executor.outputs(params, args, consts, rest)[2]
        first = jax.tree.map(lambda a: jnp.asarray(a)[None], (args, consts, rest, ys))
        return self._past(Window(executor, 1, params, *first), values, signals)

    def no_weight_grads(self, given: Given) -> Any:
        """Zeros for the gradients of effective weights, by site and name."""
        params = [given.leaves[i] for i in self.step.params or ()]
        executor = self.step.online.executor
        weights = executor.weights(params, self.step.fixed_consts(given.consts, given.leaves))
        return executor.no_gradients(weights)

    def add_weight_grads(self, given: Given, total: Leaves, found: Any) -> Leaves:
        """Add gradients of effective weights, pulled back to the parameters."""
        params = [given.leaves[i] for i in self.step.params or ()]
        consts = self.step.fixed_consts(given.consts, given.leaves)
        return self.add_params(total, self.step.online.executor.to_parameters(params, consts, found))

    def add_params(self, total: Leaves, found: Leaves) -> Leaves:
        total = list(total)
        for i, grad in zip(self.step.params or (), found, strict=True):
            if i in self.wanted and grad is not None:
                at = self.wanted.index(i)
                total[at] = total[at] + full_sum(grad).astype(total[at].dtype)
        return total

    # -- full Jacobian -----------------------------------------------------------------------------

    def scan_steps(
        self,
        given: Given,
        some: Leaves | None,
        carry: tuple[Leaves, Any],
        part: Part,
        added: dict[int, Any],
        at_call: AtCall | None = None,
        boundary: Boundary | None = None,
        at_starts: Any = (),
    ) -> Any:
        """Scan over steps without traces, differentiable along all paths; `boundary` forms windows.

        Returns the carry (the moving leaves, and the projection's pairs) after the last step and, for each
        step, its outputs, the call's operands and the boundary's loss.
        """
        step = self.step

        def body(carry: Any, now: Any) -> Any:
            slices, reset, added, at = now
            found: list[Any] = [()]

            def outputs_only(call: Call, operands: Leaves) -> Leaves:
                params, args, consts, rest, values = call.operands(operands)
                outs, new, ys, inputs = call.online.executor.outputs(params, args, consts, rest, added)
                found.append((args, consts, rest, ys, inputs, call.online.given(values)))
                return [*outs, *jax.tree.leaves((new, values))]

            moving, pairs = carry if boundary is None else boundary.enter(carry, at)
            leaves = self.with_resets(given, self.leaves_now(given, moving, some), reset)
            targets = [*step.outs, *(step.new[i] for i in step.moving)]
            results = step.run(given.consts, slices, leaves, targets, at_call or outputs_only)
            moving, taken = results[len(step.outs) :], found[-1]
            later = () if boundary is None else boundary.later(moving, taken[-1], at)
            return (moving, pairs), (results[: len(step.outs)], taken, later)

        def several(carry: Any, arrays: Any, mask: Any, reset: Any) -> Any:
            slices, added, at = arrays
            return scan_once(body, carry, (slices, reset, added, at))

        length = len(part.mask)
        arrays = part.slices, added, () if boundary is None else boundary.steps(at_starts)
        if self.checkpoint_every is None or self.checkpoint_every >= length:
            return several(carry, arrays, part.mask, part.reset)
        sequence = Sequence(arrays, length, part.mask, part.reset)
        return over_chunks(jax.checkpoint(several), carry, sequence, self.checkpoint_every)

    def window_of(self, given: Given, moving: Leaves, part: Part, taken: Any) -> Window:
        leaves = self.leaves_now(given, moving)
        params = [leaves[i] for i in self.step.params or ()]
        keep = None if part.reset is None else ~part.reset
        args, consts, before, ys, inputs = taken
        executor = self.step.online.executor
        return Window(executor, len(part.mask), params, args, consts, before, ys, keep, inputs)

    def _past(self, window: Window, values: Values, signals: dict[int, Any]) -> Leaves:
        """The gradients of the parameters through the states at a window's start, for signals there."""
        online = self.step.online
        return online.rule.past(online.executor, values, self.at_carried(signals), window)

    def at_carried(self, signals: dict[int, Any], lead: tuple[int, ...] = ()) -> Leaves:
        """Signals by leaf index, as a list over all carried leaves, with zeros for the others."""
        avals = [v.aval for e in self.step.online.info.carried for v in e.invars]
        return [
            signals[i] if i in signals else jnp.zeros((*lead, *a.shape), a.dtype) if is_inexact(a) else None
            for i, a in zip(self.step.carried, avals, strict=True)
        ]

    def with_values(self, moving: Leaves, values: Values) -> Leaves:
        """The moving leaves, with new values of the rule's arrays."""
        number = {i: values[k] for k, i in self.step.traces.items()}
        return [number.get(i, a) for i, a in zip(self.step.moving, moving, strict=True)]

    # -- without a loss ----------------------------------------------------------------------------

    def evolve(self, given: Given, sequence: Sequence) -> tuple[Leaves, Leaves]:
        """The outputs of every step and the leaves after the last, without a gradient."""
        if not (self.chunked or self.windows) or self.step.node is None:
            return self._evolve_in_turn(given, sequence)

        # if it is differentiated, single steps are taken, whose derivative is the online gradient
        evolve = jax.custom_vjp(self._evolve_together)
        evolve.defvjp(lambda *args: jax.vjp(self._evolve_in_turn, *args), lambda pull, cts: pull(cts))
        return evolve(given, sequence)

    def _evolve_in_turn(self, given: Given, sequence: Sequence) -> tuple[Leaves, Leaves]:
        def part(moving: Leaves, arrays: Any, mask: Any, reset: Any) -> tuple[Leaves, Leaves]:
            now = Part(jax.tree.leaves(arrays), mask, reset)
            (moving, _), (outs, *_) = self.scan_steps(given, None, (moving, ()), now, {}, as_it_is)
            return moving, outs

        moving, outs = over_chunks(part, given.moving(self.step), sequence, sequence.length)
        return outs, self.with_trace_sharding(self.leaves_now(given, moving))

    def _evolve_together(self, given: Given, sequence: Sequence) -> tuple[Leaves, Leaves]:
        def part(moving: Leaves, arrays: Any, mask: Any, reset: Any) -> tuple[Leaves, Leaves]:
            now = Part(jax.tree.leaves(arrays), mask, reset)
            (after, _), (outs, (*taken, _), _) = self.scan_steps(given, None, (moving, ()), now, {})
            values = {k: self.leaves_now(given, moving)[i] for k, i in self.step.traces.items()}
            window = self.window_of(given, moving, now, taken)
            advance = lambda values, window: ({**values, **self.step.online.advance(values, window)}, ())
            values, _ = window.in_windows(self.window or window.length, advance, values)
            return self.with_values(after, values), outs

        start = given.moving(self.step)
        moving, outs = over_chunks(part, start, sequence, self.size, rest_first=self.windows)
        return outs, self.with_trace_sharding(self.leaves_now(given, moving))


def _by_samples(spec: Any, shape: tuple[int, ...], slices: Leaves) -> Any:
    """The spec of an array; if it is unsharded, its first axis inherits that of a slice of equal length."""
    if not shape or any(spec or ()):
        return spec
    for a in slices:
        given = _meshes.spec_of(a)
        if given and given[0] is not None and a.shape[0] == shape[0]:
            return (given[0], *[None] * (len(shape) - 1))
    return spec
