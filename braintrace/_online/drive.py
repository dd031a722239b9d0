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

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from .. import _compat, _meshes
from .._executor.partial_sums import full_sum
from .._executor.pull_back import is_inexact
from .._executor.window import Window, scan_once, unroll_of_steps, where_rows
from .._meshes import Spec
from .._rules.rule import Flags, Gradients, Values
from .._types import Array, Leaves, PyTree, Shape
from .call import Call, Operands
from .guarded_derivatives import differentiated_once
from .in_chunks import in_chunks
from .in_windows import Boundary, Edge, back_through_time, in_windows
from .parts import Carry, Part, Recorded, Start, add, finite_targets, masked_sum
from .sequence import Sequence, scan_parts
from .user_step import AtCall, UserStep, as_it_is


@dataclass(frozen=True)
class Drive:
    """How to run a user's step over a sequence, part by part. `Programs` caches compiled drives by value.

    `step` is not part of the comparison: the cache compares its jaxpr.
    """

    step: UserStep = field(compare=False)
    part_length: int  # number of steps of a part: one chunk, one window or several windows
    mode: Literal["steps", "chunks", "windows"] = "steps"
    window_length: int | None = None  # if a part may hold several windows; None if each part is one window
    wanted: tuple[int, ...] = ()  # indices of the leaves to differentiate; all are inexact
    checkpoint_every: int | None = None  # BPTT: steps per `jax.checkpoint` segment; None stores all values
    keep: bool = True  # whether the rule's arrays are needed after the sequence
    fresh: bool = False  # whether the traces are known to be zero before the sequence
    reset_leaves: tuple[int, ...] = ()  # indices of the leaves that a reset sets to `Start.initial`
    # resets the rule's arrays for the flagged samples of a batch
    reset_traces: Callable[[Values, Flags], Values] | None = field(default=None, compare=False)
    unroll: int = 1  # `unroll` of the scan over single steps

    def __call__(self, start: Start, sequence: Sequence) -> tuple[Leaves, Leaves, Leaves]:
        """The summed gradients, the losses and other outputs of every step, and the leaves after the last."""
        start, sequence = _meshes.all_on_mesh((start, sequence))
        if self.step.calls:  # else it is BPTT, and all of it can be differentiated
            start, sequence = differentiated_once((start, sequence))
            start = self._adapted(start)
        run: Callable[[Start, Carry, Part], tuple[Carry, Leaves]]
        run = partial(self._step_by_step, sequence.has_mask and self._follows_loss)
        weight_grads: Gradients = {}
        if self.mode == "windows":
            run = partial(back_through_time if self.step.node is None else in_windows, self)
        elif self.mode == "chunks":
            run, weight_grads = partial(in_chunks, self), self.no_weight_grads(start)
        zeros = [jnp.zeros_like(start.leaves[i]) for i in self.wanted]
        carry = Carry(zeros, weight_grads, start.moving(self.step))

        def part(carry: Carry, arrays: PyTree, mask: Array, reset: Array | None) -> tuple[Carry, Leaves]:
            slices = finite_targets(jax.tree.leaves(arrays), mask, self.step.targets)
            return run(start, carry, Part(slices, mask, reset))

        # windows: the remainder comes first, so that a loss at the end of the sequence has a full window
        rest_first = self.mode == "windows"
        carry, outs = scan_parts(part, carry, sequence, self.part_length, rest_first=rest_first)
        total = carry.total
        if self.mode == "chunks":
            total = self.add_weight_grads(start, total, carry.weight_grads)
        return self._like_params(total), outs, self.with_trace_sharding(self.leaves_now(start, carry.moving))

    def _adapted(self, start: Start) -> Start:
        """Let the rule adapt its arrays at the start of a sequence: a balanced basis is renewed here."""
        step = self.step
        if step.node is None or self.mode != "windows":
            return start
        rule, executor = step.rule_step.rule, step.rule_step.executor
        traces = rule.begin(executor, step.traces_in(start.leaves), fresh=self.fresh)
        return replace(start, leaves=step.with_traces(start.leaves, traces))

    @property
    def sharding_key(self) -> Hashable:
        """A hashable key of the sharding of the step's arrays, or None if it is unset."""
        sharding = None if self.step.node is None else self.step.rule_step.executor.sharding
        return None if sharding is None else sharding.key

    def specs(self, start: Start, sequence: Sequence) -> tuple[list[Spec | None], ...]:
        """The partition specs of the gradients, step outputs and final leaves, from the types of arrays."""
        step = self.step
        before: list[Spec | None] = [_meshes.spec_of(a) for a in start.leaves]
        slices = [_meshes.slice_of(a) for a in jax.tree.leaves(sequence.arrays)]
        by_type = _meshes.typed(_compat.jaxpr_as_fun(step.closed), *slices, *start.leaves)
        num = len(step.outs)
        found: list[Spec | None] = [*[None] * num, *before] if by_type is None else by_type
        found = _meshes.by_samples(found, [*(a.aval for a in step.outs), *start.leaves], slices)
        outs: list[Spec | None] = [None if s is None else (None, *s) for s in found[:num]]
        moving = {*step.moving} - {*step.traces.values()}
        after = [found[num + i] if i in moving else s for i, s in enumerate(before)]
        return [before[i] for i in self.wanted], outs, after

    def with_trace_sharding(self, leaves: Leaves) -> Leaves:
        """Return all leaves, with the rule's arrays sharded as their initial values are."""
        step = self.step
        if step.node is None:
            return leaves
        return step.with_traces(leaves, step.rule_step.arrays.constrained(step.traces_in(leaves)))

    def _like_params(self, total: Leaves) -> Leaves:
        """Shard the gradients as the parameters."""
        step = self.step
        if step.node is None or step.params is None:
            return total
        by_leaf = dict(zip(self.wanted, total, strict=True))
        grads = step.rule_step.executor.like_params([by_leaf.get(i) for i in step.params])
        by_leaf.update({i: g for i, g in zip(step.params, grads, strict=True) if g is not None})
        return [by_leaf[i] for i in self.wanted]

    # -- shared by all modes -----------------------------------------------------------------------

    def leaves_now(self, start: Start, moving: Leaves, wanted: Leaves | None = None) -> Leaves:
        """All leaves, with new values of the moving ones and of those to differentiate."""
        now = dict(zip(self.step.moving, moving, strict=True))
        now.update(zip(self.wanted, wanted or (), strict=wanted is not None))
        return [now.get(i, a) for i, a in enumerate(start.leaves)]

    def with_resets(self, start: Start, leaves: Leaves, reset: Flags | None) -> Leaves:
        """Return the leaves before a step, with the samples flagged in `reset` set to initial values."""
        if reset is None:
            return leaves
        result = list(leaves)
        for i, initial in zip(self.reset_leaves, start.initial, strict=True):
            result[i] = where_rows(reset, initial, result[i])
        return result

    # -- step by step ------------------------------------------------------------------------------

    @property
    def _follows_loss(self) -> bool:
        """Whether the gradient of a step is zero if its loss has weight zero."""
        return not any(node.params["call"].rule_step.rule.signal.takes for node in self.step.calls)

    def _step_by_step(self, skips: bool, start: Start, carry: Carry, part: Part) -> tuple[Carry, Leaves]:
        """Run step by step; with `skips`, no gradient is computed of a step whose loss has weight zero."""
        step = self.step
        old = self.old_leaves

        def body(
            carry: tuple[Leaves, Leaves], now: tuple[Leaves, Array, Flags | None]
        ) -> tuple[tuple[Leaves, Leaves], Leaves]:
            (total, moving), (slices, mask, reset) = carry, now
            leaves = self.with_resets(start, self.leaves_now(start, moving), reset)
            if reset is not None and self.reset_traces is not None:
                leaves = step.with_traces(leaves, self.reset_traces(step.traces_in(leaves), reset))

            def loss(wanted: Leaves, before: Leaves) -> tuple[Array, tuple[Leaves, Leaves, list[Operands]]]:
                values = dict(zip((*self.wanted, *old), (*wanted, *before), strict=True))
                live = [values.get(i, a) for i, a in enumerate(leaves)]
                call_operands: list[Operands] = []

                def at_call(call: Call, operands: Leaves) -> Leaves:
                    operands = call.masked(operands, mask)
                    call_operands.append(jax.lax.stop_gradient(call.operands(operands)))
                    return as_it_is(call, operands)

                targets = [*step.outs, *(step.new[i] for i in step.moving)]
                results = step.run(start.consts, slices, live, targets, at_call)
                outs, after = results[: len(step.outs)], results[len(step.outs) :]
                return masked_sum(outs[0], mask), (outs, after, call_operands)

            at = [leaves[i] for i in self.wanted], [leaves[i] for i in old]
            value, pull, (outs, moving, call_operands) = jax.vjp(loss, *at, has_aux=True)

            def add_gradient(total: Leaves) -> Leaves:
                grads, signals = pull(jnp.ones_like(value))
                if old:  # the loss reads states before the call: traces before the step give this gradient
                    by_leaf = dict(zip(old, signals, strict=True))
                    grads = self.add_params(grads, self._before_call(call_operands[0], by_leaf))
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
        if step.node is None or step.params is None or not step.rule_step.has_signals_at_old_states:
            return []
        return [
            i
            for i in step.carried
            if i is not None and i in step.read_otherwise and is_inexact(step.leaves[i].aval)
        ]

    def _before_call(self, call_operands: Operands, signals: dict[int, Array]) -> Leaves:
        """The gradients of the parameters through the states before a step, for signals there."""
        params, args, consts, carried, values = call_operands
        rule, executor = self.step.rule_step.rule, self.step.rule_step.executor
        ys = executor.outputs(params, args, consts, carried)[2]
        first = jax.tree.map(lambda a: jnp.asarray(a)[None], (args, consts, carried, ys))
        window = Window(executor, 1, params, *first)
        return rule.past(executor, values, self.at_carried(signals), window)

    def no_weight_grads(self, start: Start) -> Gradients:
        """Zeros for the gradients of effective weights, by site and name."""
        params = [start.leaves[i] for i in self.step.params or ()]
        executor = self.step.rule_step.executor
        weights = executor.weights(params, self.step.fixed_consts(start.consts, start.leaves))
        return executor.no_gradients(weights)

    def add_weight_grads(self, start: Start, total: Leaves, grads: Gradients) -> Leaves:
        """Add gradients of effective weights, pulled back to the parameters."""
        params = [start.leaves[i] for i in self.step.params or ()]
        consts = self.step.fixed_consts(start.consts, start.leaves)
        return self.add_params(total, self.step.rule_step.executor.to_parameters(params, consts, grads))

    def add_params(self, total: Leaves, grads: Leaves) -> Leaves:
        """Add gradients of the model's parameters to those of the wanted leaves."""
        total = list(total)
        for i, grad in zip(self.step.params or (), grads, strict=True):
            if i in self.wanted and grad is not None:
                at = self.wanted.index(i)
                total[at] = total[at] + full_sum(grad).astype(total[at].dtype)
        return total

    # -- steps without traces, differentiable along all paths -----------------------------------------

    def scan_steps(
        self,
        start: Start,
        wanted: Leaves | None,
        carry: tuple[Leaves, PyTree],
        part: Part,
        at_sites: dict[int, Array],
        at_call: AtCall | None = None,
        boundary: Boundary | None = None,
        before_steps: Leaves | None = None,
    ) -> tuple[tuple[Leaves, PyTree], tuple[Leaves, Recorded]]:
        """Scan over steps without traces, differentiable along all paths; `boundary` forms windows.

        Returns the carry (the moving leaves, and the projection's pairs) after the last step and, for each
        step, its outputs, and what the call of the learner read and computed.
        """
        step = self.step

        def body(
            carry: tuple[Leaves, PyTree], now: tuple[Leaves, Flags | None, dict[int, Array], Edge]
        ) -> tuple[tuple[Leaves, PyTree], PyTree]:
            slices, reset, at_sites, edge = now
            recorded: list[Recorded] = []

            def outputs_only(call: Call, operands: Leaves) -> Leaves:
                params, args, consts, carried, values = call.operands(operands)
                executor, signal_inputs = call.rule_step.executor, call.rule_step.signal_inputs(values)
                outs, new, ys, inputs = executor.outputs(params, args, consts, carried, at_sites)
                varying = [c if v else None for c, v in zip(consts, step.varying_consts, strict=True)]
                recorded.append(Recorded(args, varying, carried, ys, inputs, signal_inputs))
                return [*outs, *jax.tree.leaves((new, values))]

            moving, pairs = carry if boundary is None else boundary.enter(carry, edge)
            leaves = self.with_resets(start, self.leaves_now(start, moving, wanted), reset)
            targets = [*step.outs, *(step.new[i] for i in step.moving)]
            results = step.run(start.consts, slices, leaves, targets, at_call or outputs_only)
            found = recorded[-1] if recorded else None
            return (results[len(step.outs) :], pairs), (results[: len(step.outs)], found)

        def several(
            carry: tuple[Leaves, PyTree], arrays: PyTree, mask: Array, reset: Array | None
        ) -> tuple[tuple[Leaves, PyTree], PyTree]:
            slices, at_sites, edges = arrays
            times = 1 if step.node is None else unroll_of_steps(step.rule_step.executor)
            stores_all = boundary is None or step.is_complex  # `jax.checkpoint` takes no complex values
            return scan_once(body, carry, (slices, reset, at_sites, edges), times, stores_all=stores_all)

        length = len(part.mask)
        arrays = part.slices, at_sites, () if boundary is None else boundary.edges(before_steps or [])
        if self.checkpoint_every is None or self.checkpoint_every >= length:
            return several(carry, arrays, part.mask, part.reset)
        sequence = Sequence(arrays, length, part.mask, part.reset)
        return scan_parts(jax.checkpoint(several), carry, sequence, self.checkpoint_every)

    def window_of(self, start: Start, moving: Leaves, part: Part, recorded: Recorded) -> Window:
        """The recorded steps of a part, which began with these moving leaves."""
        leaves = self.leaves_now(start, moving)
        params = [leaves[i] for i in self.step.params or ()]
        keep = None if part.reset is None else ~part.reset
        args, consts, before, ys, inputs, _ = recorded
        executor = self.step.rule_step.executor
        fixed = self.step.fixed_consts(start.consts, leaves)
        return Window(executor, len(part.mask), params, args, consts, before, ys, keep, inputs, fixed)

    def at_carried(self, signals: dict[int, Array], lead: Shape = ()) -> Leaves:
        """Signals by leaf index, as a list over all carried leaves, with zeros for the others."""
        avals = [v.aval for e in self.step.rule_step.info.carried for v in e.invars]
        return [
            signals[i] if i in signals else jnp.zeros((*lead, *a.shape), a.dtype) if is_inexact(a) else None
            for i, a in zip(self.step.carried, avals, strict=True)
        ]

    def with_values(self, moving: Leaves, values: Values) -> Leaves:
        """The moving leaves, with new values of the rule's arrays."""
        number = {i: values[k] for k, i in self.step.traces.items()}
        return [number.get(i, a) for i, a in zip(self.step.moving, moving, strict=True)]

    # -- without a loss ----------------------------------------------------------------------------

    def evolve(self, start: Start, sequence: Sequence) -> tuple[Leaves, Leaves]:
        """The outputs of every step and the leaves after the last, without a gradient."""
        if self.mode == "steps" or self.step.node is None:
            return self._evolve_step_by_step(start, sequence)

        # if it is differentiated, single steps are taken, whose derivative is the online gradient
        evolve = jax.custom_vjp(self._evolve_together)
        evolve.defvjp(lambda *args: jax.vjp(self._evolve_step_by_step, *args), lambda pull, cts: pull(cts))
        return evolve(start, sequence)

    def _evolve_step_by_step(self, start: Start, sequence: Sequence) -> tuple[Leaves, Leaves]:
        def part(moving: Leaves, arrays: PyTree, mask: Array, reset: Array | None) -> tuple[Leaves, Leaves]:
            now = Part(jax.tree.leaves(arrays), mask, reset)
            (moving, _), (outs, _) = self.scan_steps(start, None, (moving, ()), now, {}, as_it_is)
            return moving, outs

        moving, outs = scan_parts(part, start.moving(self.step), sequence, sequence.length)
        return outs, self.with_trace_sharding(self.leaves_now(start, moving))

    def _evolve_together(self, start: Start, sequence: Sequence) -> tuple[Leaves, Leaves]:
        step, rule = self.step, self.step.rule_step.rule

        def part(moving: Leaves, arrays: PyTree, mask: Array, reset: Array | None) -> tuple[Leaves, Leaves]:
            now = Part(jax.tree.leaves(arrays), mask, reset)
            (after, _), (outs, recorded) = self.scan_steps(start, None, (moving, ()), now, {})
            values = step.traces_in(self.leaves_now(start, moving))
            window = self.window_of(start, moving, now, recorded)

            def advance(values: Values, window: Window) -> tuple[Values, tuple[()]]:
                values = rule.with_room(step.rule_step.executor, values, window.length)
                return {**values, **step.rule_step.advance(values, window)}, ()

            values, _ = window.scan_windows(self.window_length or window.length, advance, values)
            return self.with_values(after, values), outs

        rest_first, moving = self.mode == "windows", start.moving(step)
        moving, outs = scan_parts(part, moving, sequence, self.part_length, rest_first=rest_first)
        return outs, self.with_trace_sharding(self.leaves_now(start, moving))
