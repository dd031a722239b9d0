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
from typing import Any

import jax
import jax.numpy as jnp

from .. import _compat, _meshes
from .._executor.executor import Leaves, Local
from .._executor.pull_back import is_inexact
from .._executor.sharding import plus, whole
from .._executor.window import Record, Window, each_step, where_rows
from .._rules.projection import cross, finite
from .._rules.rule import Values
from .._rules.signal import PROPAGATED
from .call import Call
from .online import differentiated_once
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
    together: bool = False  # run in chunks
    windows: bool = False  # run in windows
    window: int = 0  # window size if a part may hold several windows; 0 if each part is one window
    again: int | None = None  # BPTT: steps per `jax.checkpoint` segment; None stores the values of all steps
    keep: bool = True  # whether the rule's arrays are needed after the sequence
    fresh: bool = False  # whether the traces are known to be zero before the sequence
    begins: tuple[int, ...] = ()  # indices of the leaves that a reset sets to `Given.initial`
    # resets the rule's arrays for the flagged samples of a batch
    forget: Callable[[Values, Any], Values] | None = field(default=None, compare=False)
    turns: int = 1  # `unroll` of the scan over single steps

    def __call__(self, given: Given, sequence: Sequence) -> tuple[Leaves, Leaves, Leaves]:
        """The summed gradients, the losses and other outputs of every step, and the leaves after the last."""
        given, sequence = _meshes.all_on_mesh((given, sequence))
        if self.step.calls:  # else it is BPTT, and all of it can be differentiated
            given, sequence = differentiated_once((given, sequence))
            given = self._begun(given)
        run: Any = self._in_turn
        start: Any = ()
        if self.windows:
            run = self._in_windows
        elif self.together:
            run, start = self._in_chunks, self._no_traced(given)
        carry = Carry([jnp.zeros_like(given.leaves[i]) for i in self.wanted], start, given.moving(self.step))

        def part(carry: Carry, arrays: Any, mask: Any, reset: Any) -> tuple[Carry, Leaves]:
            slices = finite_targets(jax.tree.leaves(arrays), mask, self.step.targets)
            found: tuple[Carry, Leaves] = run(given, carry, Part(slices, mask, reset))
            return found

        # a loss at the end of a sequence has a whole window before it
        carry, outs = over_chunks(part, carry, sequence, self.size, rest_first=self.windows)
        total = carry.total
        if self.together and not self.windows:
            total = self._with_traced(given, total, carry.traced)
        return self._like_params(total), outs, self._laid_out(self._leaves(given, carry.moving))

    def _begun(self, given: Given) -> Given:
        """The values at the start, with what the rule adapts between sequences."""
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
    def spread(self) -> Any:
        """A hashable key of the sharding of the step's arrays, or None if it is unset."""
        at = None if self.step.node is None else self.step.online.executor.spread
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

    def _laid_out(self, leaves: Leaves) -> Leaves:
        """Return all leaves, with the rule's arrays sharded as their initial values are."""
        step = self.step
        if step.node is None:
            return leaves
        found = step.online.laid_out({k: leaves[i] for k, i in step.traces.items()})
        number = {i: found[k] for k, i in step.traces.items()}
        return [number.get(i, a) for i, a in enumerate(leaves)]

    def _like_params(self, total: Leaves) -> Leaves:
        """The gradients, spread over devices as the parameters are."""
        step = self.step
        if step.node is None or step.params is None:
            return total
        at = dict(zip(self.wanted, total, strict=True))
        found = step.online.executor.like_params([at.get(i) for i in step.params])
        at.update({i: g for i, g in zip(step.params, found, strict=True) if g is not None})
        return [at[i] for i in self.wanted]

    # -- parts that all share ----------------------------------------------------------------------

    def _leaves(self, given: Given, moving: Leaves, some: Leaves | None = None) -> Leaves:
        """All leaves, with those that move, and those that are differentiated, as they are now."""
        now = dict(zip(self.step.moving, moving, strict=True))
        now.update(zip(self.wanted, some or (), strict=some is not None))
        return [now.get(i, a) for i, a in enumerate(given.leaves)]

    def _begin_anew(self, given: Given, leaves: Leaves, reset: Any) -> Leaves:
        """Return the leaves before a step, with the samples flagged in `reset` set to initial values."""
        if reset is None:
            return leaves
        result = list(leaves)
        for i, start in zip(self.begins, given.initial, strict=True):
            result[i] = where_rows(reset, start, result[i])
        return result

    # -- step by step ------------------------------------------------------------------------------

    def _in_turn(self, given: Given, carry: Carry, part: Part) -> tuple[Carry, Leaves]:
        step = self.step
        old = self.old_leaves

        def body(carry: Any, now: Any) -> Any:
            (total, moving), (slices, mask, reset) = carry, now
            leaves = self._begin_anew(given, self._leaves(given, moving), reset)
            if reset is not None and self.forget is not None:
                kept = self.forget({k: leaves[i] for k, i in step.traces.items()}, reset)
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
            (grads, signals), (outs, moving, taken) = jax.grad(loss, (0, 1), has_aux=True)(*at)
            if old:  # the loss reads states before the call: traces before the step give this gradient
                by_leaf = dict(zip(old, signals, strict=True))
                grads = self._add_params(grads, self._before_call(taken[0], by_leaf))
            return (add(total, grads), moving), outs

        turns = self.turns if self.spread is None else 1  # XLA moves a single sum over devices out of a loop
        steps = part.slices, part.mask, part.reset
        (total, moving), outs = jax.lax.scan(body, (carry.total, carry.moving), steps, unroll=turns)
        return Carry(total, carry.traced, moving), outs

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

    # -- in chunks ---------------------------------------------------------------------------------

    def _in_chunks(self, given: Given, carry: Carry, part: Part) -> tuple[Carry, Leaves]:
        """Record the steps of a chunk, then do all that concerns traces at once."""
        step, online = self.step, self.step.online
        length = len(part.mask)
        before, ys, moving = self._forward(given, carry.moving, part)
        reads_old = (online.executor.reads_old_states or step.reads_old_states) and online.asks_old
        zeros = [jnp.zeros((length, *d.shape), d.dtype) for d in online.executor.zero_deltas()]
        more = [
            [jnp.zeros((length, *z.shape), z.dtype) for z in some]
            for some in (online.zeros_at_readings(), online.zeros_at_outputs())
        ]
        deltas = (zeros, zeros if reads_old else [], *more)

        def losses(some: Leaves, deltas: Any) -> Any:
            def one(now: Any) -> Any:
                return self._differentiable(given, some, *now)

            outs, local = each_step(one, (deltas, ys, before, part.slices))
            return weighed(outs[0], part.mask), (outs, local)

        some = [given.leaves[i] for i in self.wanted]
        loss, pull, (outs, (local, slopes, taken)) = jax.vjp(losses, some, deltas, has_aux=True)
        grads, (dnew, dold, dread, douts) = pull(jnp.ones_like(loss))
        leaves = self._leaves(given, carry.moving)
        params = [leaves[i] for i in step.params or ()]
        consts = step.fixed_consts(given.consts, leaves)
        values = {k: leaves[i] for k, i in step.traces.items()}
        values = online.rule.signal.prepared(online.executor, params, consts, values)
        by_group = jax.vmap(online.executor.group_signals)
        back = by_group(dnew)
        taken = jax.vmap(online.rule.signal.masked)(taken, part.mask) if taken else taken
        signals = jax.vmap(lambda *each: online.joined(values, *each))(
            back, dnew, dread, douts, slopes, taken
        )
        record = Record(
            Local(local[0], {}, *local[1:]),
            length,
            signals=signals,
            old_signals=jax.vmap(online.executor.widened)(by_group(dold)) if reads_old else None,
            keep=None if part.reset is None else ~part.reset,
        )
        kept, traced = online.chunk(
            params,
            consts,
            values,
            carry.traced,
            record,
            fresh=self.fresh,
            keep=self.keep,
            back=jax.vmap(online.executor.widened)(back),
        )
        values = {**values, **kept}
        number = {i: k for k, i in step.traces.items()}
        moving = [values[number[i]] if i in number else a for i, a in zip(step.moving, moving, strict=True)]
        return Carry(add(carry.total, grads), traced, moving), outs

    def _forward(self, given: Given, moving: Leaves, part: Part) -> tuple[Any, Any, Leaves]:
        """Run the steps of a chunk without traces.

        Returns the moving leaves before each step, the outputs of sites at each step, and the moving leaves
        after the last step.
        """
        step = self.step

        def body(moving: Leaves, now: Any) -> Any:
            slices, reset = now
            found: list[Any] = []

            def at_call(call: Call, operands: Leaves) -> Leaves:
                params, args, consts, rest, values = call.operands(operands)
                outs, new, ys, _ = call.online.executor.outputs(params, args, consts, rest)
                found.append(ys)
                return [*outs, *jax.tree.leaves((new, values))]

            leaves = self._begin_anew(given, self._leaves(given, moving), reset)
            targets = [*(step.new[i] for i in step.moving), *step.node.outputs[:1]]  # type: ignore[union-attr]
            after = step.run(given.consts, slices, leaves, targets, at_call)
            return after[: len(step.moving)], ([leaves[i] for i in step.moving], found[0])

        after, (before, ys) = jax.lax.scan(body, moving, (part.slices, part.reset))
        return before, ys, after

    def _differentiable(
        self, given: Given, some: Leaves, deltas: Any, ys: Any, before: Leaves, slices: Leaves
    ) -> tuple[Leaves, Any]:
        """Evaluate one step with `deltas` added to its states; their cotangents are the learning signals.

        Returns the outputs of the step, and its (local Jacobians, slopes of readings, inputs of the signal).
        """
        step = self.step
        new, old, read, at_outs = deltas
        found: list[Any] = []

        def at_call(call: Call, operands: Leaves) -> Leaves:
            params, args, consts, rest, values = call.operands(operands)
            added = (new, old if call.online.executor.reads_old_states else [])
            outs, after, local = call.online.differentiable(params, args, consts, rest, added, ys, read)
            found.append((local.arrays, local.slopes, jax.lax.stop_gradient(call.online.given(values))))
            more = iter(at_outs)
            outs = [o + next(more) if at_outs and is_inexact(o) else o for o in outs]
            return [*outs, *jax.tree.leaves((after, values))]

        leaves = self._leaves(given, before, some)
        moved = list(leaves)  # what the loss reads of old states; the call adds deltas of its own
        for i, h, delta in zip(step.hidden, step.online.info.hidden, old, strict=bool(old)):
            if i is not None:
                moved[i] = moved[i] + h.in_leaf(delta)
        targets = [*step.outs, *step.node.outputs[:1]]  # type: ignore[union-attr]
        outs = step.run(given.consts, slices, moved, targets, at_call, for_call=leaves)
        return outs[: len(step.outs)], found[0]

    def _no_traced(self, given: Given) -> Any:
        params = [given.leaves[i] for i in self.step.params or ()]
        executor = self.step.online.executor
        weights = executor.weights(params, self.step.fixed_consts(given.consts, given.leaves))
        return executor.no_gradients(weights)

    def _with_traced(self, given: Given, total: Leaves, traced: Any) -> Leaves:
        """The gradients, with those of effective weights carried back to the parameters."""
        params = [given.leaves[i] for i in self.step.params or ()]
        consts = self.step.fixed_consts(given.consts, given.leaves)
        return self._add_params(total, self.step.online.executor.to_parameters(params, consts, traced))

    def _add_params(self, total: Leaves, found: Leaves) -> Leaves:
        total = list(total)
        for i, grad in zip(self.step.params or (), found, strict=True):
            if i in self.wanted and grad is not None:
                at = self.wanted.index(i)
                total[at] = total[at] + whole(grad).astype(total[at].dtype)
        return total

    # -- in windows --------------------------------------------------------------------------------

    def _in_windows(self, given: Given, carry: Carry, part: Part) -> tuple[Carry, Leaves]:
        """One backward pass over the windows of a part.

        Inside a window cotangents follow all paths. At its start, the rule's projection lets one part go on
        to the window before it; the traces account for the rest.
        """
        step = self.step
        starts = [n for n, i in enumerate(step.moving) if i in step.carried and is_inexact(carry.moving[n])]
        start, length = [carry.moving[n] for n in starts], len(part.mask)
        now = self._leaves(given, carry.moving)
        values = {k: now[i] for k, i in step.traces.items()}
        crossing = self._crossing(values) if length > self.window > 0 else None

        def losses(some: Leaves, start: Leaves, rest: Leaves, read: Any, added: dict[int, Any]) -> Any:
            moving = list(carry.moving)
            for n, leaf in zip(starts, start, strict=True):
                moving[n] = leaf
            first = moving, () if crossing is None else crossing.start, jnp.zeros((), part.mask.dtype)
            (moving, crossed, later), (outs, taken) = self._along_windows(
                given, some, first, part, Boundary(starts, crossing, rest, read), added
            )
            loss = weighed(outs[0], part.mask)
            return loss + later.astype(loss.dtype), (outs, moving, jax.lax.stop_gradient((taken, crossed)))

        some = [now[i] for i in self.wanted]
        # cotangents that do not cross a window's start, by the step that follows it
        rest = [jnp.zeros((length, *a.shape), a.dtype) for a in start if length > self.window > 0]
        read = () if crossing is None else crossing.unread
        loss, pull, (outs, moving, (taken, crossed)) = jax.vjp(
            losses, some, start, rest, read, self._nothing_added(length), has_aux=True
        )
        grads, signals, rest, read, dys = pull(jnp.ones_like(loss))
        total = add(carry.total, grads)
        if step.node is None:  # BPTT
            return Carry(total, carry.traced, moving), outs
        if step.online.executor.spread is not None:
            # run the two loops in sequence: CPU devices may match collectives of concurrent loops wrongly
            taken, signals, rest = jax.lax.optimization_barrier((taken, signals, rest))
        window = self._window(given, carry.moving, part, taken)
        executor, rule = step.online.executor, step.online.rule
        found: Leaves = [None] * len(window.params)
        if dys:
            found = executor.of_cotangents(window.params, window.first_consts, window.inputs, dys)
        if self.window:
            rest = rest or [jnp.zeros((length, *a.shape), a.dtype) for a in start]
            rest = [r.at[0].add(s) for r, s in zip(rest, signals, strict=True)]
            full = self._at_carried(dict(zip((step.moving[n] for n in starts), rest, strict=True)), (length,))
            past, after = step.online.trace_rule.over_windows(
                executor,
                values,
                full,
                window,
                self.window,
                None if crossing is None else (crossed, read),
                fresh=self.fresh,
                keep=self.keep,
            )
        else:
            by_leaf = dict(zip((step.moving[n] for n in starts), signals, strict=True))
            past = rule.past(executor, values, self._at_carried(by_leaf), window)
            after = rule.advance(executor, values, window)
        found = list(map(plus, found, past))
        moving = self._with(moving, step.online.laid_out({**values, **after}))
        return Carry(self._add_params(total, found), carry.traced, moving), outs

    def _crossing(self, values: Values) -> Any:
        """The projection along the windows of a part that begins with `values`."""
        online = None if self.step.node is None else self.step.online
        if online is None or not self.window or online.rule.projection is None:
            return None
        return online.rule.projection.crossing(online.executor, jax.lax.stop_gradient(values))

    def _along_windows(
        self,
        given: Given,
        some: Leaves,
        first: tuple[Leaves, Any, Any],
        part: Part,
        at: Boundary,
        added: dict[int, Any],
    ) -> Any:
        """Run the windows of a part.

        The carry, `first`, has the moving leaves, the state of the crossing, and the sum of `_after_window`.
        Returns the carry after the last window and, for each step, its outputs and the operands of the call.
        """
        step = self.step

        def window(carry: Any, arrays: Any, mask: Any, reset: Any) -> Any:
            moving, state, later = carry
            slices, rest, added = arrays
            now = Part(slices, mask, reset)
            if rest:
                moving, state = self._entered(moving, replace(at, rest=[r[0] for r in rest]), state, now)
            before = moving
            moving, (outs, taken) = self._along(given, some, moving, now, added)
            if step.node is not None:
                *taken, given_to = taken
                later = later + self._after_window(moving, jax.tree.map(lambda a: a[-1], given_to), later)
            if at.crossing is not None:
                steps = self._window(given, before, now, jax.lax.stop_gradient(taken)).as_if_begun
                state = jax.lax.stop_gradient(at.crossing.along(state, steps))
            return (moving, state, later), (outs, taken)

        length = len(part.mask)
        sequence = Sequence((part.slices, at.rest, added), length, part.mask, part.reset)
        size = min(self.window or length, length)
        return over_chunks(window, first, sequence, size, rest_first=True, cut=True)

    def _entered(self, moving: Leaves, at: Boundary, state: Any, part: Part) -> tuple[Leaves, Any]:
        """The leaves at a window's start, whose cotangents the projection splits, and its state there."""
        step, crossing, starts = self.step, at.crossing, at.starts
        if crossing is None:
            start = [jax.lax.stop_gradient(moving[n]) + r for n, r in zip(starts, at.rest, strict=True)]
        else:
            per = crossing.per
            state = crossing.entered(state, None if part.reset is None else ~part.reset[0])
            carried = [step.carried.index(step.moving[n]) for n in starts]

            @jax.custom_vjp
            def enter(start: Leaves, rest: Leaves, read: Any, pair: Any) -> Leaves:
                return start

            def backward(pair: Any, cotangents: Leaves) -> Any:
                by_leaf = dict(zip((step.moving[n] for n in starts), cotangents, strict=True))
                vectors = per.whole(finite(per.vectors(self._at_carried(by_leaf), dual=True)))
                through = per.leaves(cross(vectors, pair), dual=True)
                through = [through[i] for i in carried]
                left = [c - t for c, t in zip(cotangents, through, strict=True)]
                return through, left, crossing.read(vectors), jax.tree.map(jnp.zeros_like, pair)

            enter.defvjp(lambda start, rest, read, pair: (start, pair), backward)
            start = enter([moving[n] for n in starts], at.rest, at.read, crossing.pair(state))
        entered = list(moving)
        for n, leaf in zip(starts, start, strict=True):
            entered[n] = leaf
        return entered, state

    def _after_window(self, moving: Leaves, given_to: Values, loss: Any) -> Any:
        """The surrogate loss `<s, h[end]>`, with `s` the signal's estimate of dL/dh[end] of later losses.

        Zero for a signal without such an estimate.
        """
        online, at = self.step.online, dict(zip(self.step.moving, moving, strict=True))
        if online.rule.signal == PROPAGATED or any(i not in at for i in self.step.hidden):
            return jnp.zeros_like(loss)
        pairs = zip(online.info.hidden, self.step.hidden, strict=True)
        hidden = [h.of_leaf(at[i]) for h, i in pairs if i is not None]
        found = online.rule.signal.at_end(online.executor, given_to, hidden)
        terms = [jnp.sum(h * s).astype(loss.dtype) for h, s in zip(hidden, found or [], strict=True)]
        return sum(terms, jnp.zeros_like(loss))

    def _nothing_added(self, length: int) -> dict[int, Any]:
        """Zeros to add to the outputs of sites at every step; their cotangents give the weight gradients.

        Each weight gradient is then one product over time. The derivative of a `scan` would add a full-size
        gradient at every step.
        """
        if self.step.node is None or self.step.params is None:
            return {}
        sites = [w.site for w in self.step.online.executor.weighted]
        return {s.index: jnp.zeros((length, *s.shape), s.output.aval.dtype) for s in sites}

    def _along(
        self,
        given: Given,
        some: Leaves | None,
        moving: Leaves,
        part: Part,
        added: dict[int, Any],
        at_call: AtCall | None = None,
    ) -> Any:
        """Run consecutive steps, differentiable along all paths.

        Returns the moving leaves after the last step and, for each step, its outputs and the call's operands.
        """
        step = self.step

        def body(moving: Leaves, now: Any) -> Any:
            slices, reset, added = now
            found: list[Any] = [()]

            def along(call: Call, operands: Leaves) -> Leaves:
                params, args, consts, rest, values = call.operands(operands)
                outs, new, ys, inputs = call.online.executor.outputs(params, args, consts, rest, added)
                found.append((args, consts, rest, ys, inputs, call.online.given(values)))
                return [*outs, *jax.tree.leaves((new, values))]

            leaves = self._begin_anew(given, self._leaves(given, moving, some), reset)
            targets = [*step.outs, *(step.new[i] for i in step.moving)]
            results = step.run(given.consts, slices, leaves, targets, at_call or along)
            return results[len(step.outs) :], (results[: len(step.outs)], found[-1])

        def several(moving: Leaves, slices: Any, mask: Any, reset: Any) -> Any:
            return jax.lax.scan(body, moving, (slices, reset, added))

        length = len(part.mask)
        if self.again is None or self.again >= length:
            return several(moving, part.slices, part.mask, part.reset)
        sequence = Sequence(part.slices, length, part.mask, part.reset)
        return over_chunks(jax.checkpoint(several), moving, sequence, self.again)

    def _window(self, given: Given, moving: Leaves, part: Part, taken: Any) -> Window:
        leaves = self._leaves(given, moving)
        params = [leaves[i] for i in self.step.params or ()]
        keep = None if part.reset is None else ~part.reset
        args, consts, before, ys, inputs = taken
        executor = self.step.online.executor
        return Window(executor, len(part.mask), params, args, consts, before, ys, keep, inputs)

    def _past(self, window: Window, values: Values, signals: dict[int, Any]) -> Leaves:
        """The gradients of the parameters through the states at a window's start, for signals there."""
        online = self.step.online
        return online.rule.past(online.executor, values, self._at_carried(signals), window)

    def _at_carried(self, signals: dict[int, Any], lead: tuple[int, ...] = ()) -> Leaves:
        """Signals at some of the leaves, at all that are carried; `lead` are axes in front."""
        avals = [v.aval for e in self.step.online.info.carried for v in e.invars]
        return [
            signals[i] if i in signals else jnp.zeros((*lead, *a.shape), a.dtype) if is_inexact(a) else None
            for i, a in zip(self.step.carried, avals, strict=True)
        ]

    def _with(self, moving: Leaves, values: Values) -> Leaves:
        """The leaves that move, with those of the rule."""
        number = {i: values[k] for k, i in self.step.traces.items()}
        return [number.get(i, a) for i, a in zip(self.step.moving, moving, strict=True)]

    # -- without a loss ----------------------------------------------------------------------------

    def evolve(self, given: Given, sequence: Sequence) -> tuple[Leaves, Leaves]:
        """What every step returns, and the leaves after the last, without any gradient."""
        if not (self.together or self.windows) or self.step.node is None:
            return self._evolve_in_turn(given, sequence)

        # its derivative, should anyone ask for it, is that of the steps
        evolve = jax.custom_vjp(self._evolve_together)
        evolve.defvjp(lambda *args: jax.vjp(self._evolve_in_turn, *args), lambda pull, cts: pull(cts))
        return evolve(given, sequence)

    def _evolve_in_turn(self, given: Given, sequence: Sequence) -> tuple[Leaves, Leaves]:
        def part(moving: Leaves, arrays: Any, mask: Any, reset: Any) -> tuple[Leaves, Leaves]:
            now = Part(jax.tree.leaves(arrays), mask, reset)
            moving, (outs, _) = self._along(given, None, moving, now, {}, as_it_is)
            return moving, outs

        moving, outs = over_chunks(part, given.moving(self.step), sequence, sequence.length)
        return outs, self._laid_out(self._leaves(given, moving))

    def _evolve_together(self, given: Given, sequence: Sequence) -> tuple[Leaves, Leaves]:
        def part(moving: Leaves, arrays: Any, mask: Any, reset: Any) -> tuple[Leaves, Leaves]:
            now = Part(jax.tree.leaves(arrays), mask, reset)
            after, (outs, (*taken, _)) = self._along(given, None, moving, now, {})
            values = {k: self._leaves(given, moving)[i] for k, i in self.step.traces.items()}
            window = self._window(given, moving, now, taken)
            advance = lambda values, window: {**values, **self.step.online.advance(values, window)}
            values = window.in_windows(self.window or window.length, advance, values)
            return self._with(after, values), outs

        start = given.moving(self.step)
        moving, outs = over_chunks(part, start, sequence, self.size, rest_first=self.windows)
        return outs, self._laid_out(self._leaves(given, moving))


def _by_samples(spec: Any, shape: tuple[int, ...], slices: Leaves) -> Any:
    """The spec of an array; if it is unsharded, its first axis inherits that of a slice of equal length."""
    if not shape or any(spec or ()):
        return spec
    for a in slices:
        given = _meshes.spec_of(a)
        if given and given[0] is not None and a.shape[0] == shape[0]:
            return (given[0], *[None] * (len(shape) - 1))
    return spec


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Given:
    """The arrays that a drive starts from."""

    consts: Leaves  # the constants that the step closes over
    leaves: Leaves  # the leaves of the states that the step reads or writes
    initial: Leaves  # the reset values of the leaves in `Drive.begins`

    def moving(self, step: UserStep) -> Leaves:
        return [self.leaves[i] for i in step.moving]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Carry:
    """The carry of the loop over the parts of a sequence."""

    total: Leaves  # the sum of the gradients so far
    traced: Any  # the sum of those of effective weights, pulled back to the parameters after the last part
    moving: Leaves


@dataclass(frozen=True, eq=False)
class Boundary:
    """How the cotangents at the start of each window are split."""

    starts: list[int]  # positions of the carried leaves among the moving ones
    crossing: Any  # the projection; None if no cotangent crosses
    rest: Leaves  # zeros, whose cotangents are those that do not cross
    read: Any  # zeros, whose cotangent is what the projection reads


@dataclass(frozen=True)
class Part:
    """Some steps of a sequence."""

    slices: Leaves
    mask: Any
    reset: Any


def finite_targets(slices: Leaves, mask: Any, targets: list[bool]) -> Leaves:
    """The slices, with zeros for NaN and infinite targets of masked steps: 0 * NaN and 0 * inf are NaN."""

    def one(leaf: Any, is_target: bool) -> Any:
        if not is_target or not is_inexact(leaf) or leaf.shape[: mask.ndim] != mask.shape:
            return leaf
        unused = (mask == 0).reshape(*mask.shape, *[1] * (leaf.ndim - mask.ndim))
        return jnp.where(unused & ~jnp.isfinite(leaf), jnp.zeros_like(leaf), leaf)

    return list(map(one, slices, targets))


def masked(losses: Any, mask: Any) -> Any:
    """Multiply losses by the mask; where the mask is zero the result is zero, even if the loss is NaN."""
    mask = mask.astype(losses.dtype) + jnp.zeros_like(losses)  # with the sharding of `losses` in its type
    return jnp.where(mask == 0, jnp.zeros_like(losses), losses * mask)


def weighed(losses: Any, mask: Any) -> Any:
    return jnp.sum(masked(losses, mask))


def add(a: Leaves, b: Leaves) -> Leaves:
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), a, b)  # type: ignore[no-any-return]
