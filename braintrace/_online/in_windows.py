"""A part of a sequence in windows: one backward pass, in which a projection acts at the windows' starts.

With `λ` the cotangent of the carried leaves at the start of a window, along all paths of that window and of
those after it, the projection (`_rules/projection.py`) splits

    λ = u + (λ - u)        u = (λ Tᵀ) S goes on to the window before;  λ - u meets the traces.

`jax.vjp` computes `λ`: the function `enter` is the identity before each step. At the start of a window, its
backward pass returns `u` for the leaves, and it returns `λ` for `before_steps` (zeros, one per step). The
first window of a part has none before it: its `λ` is the cotangent of the part's first leaves. The rule then
turns these cotangents into gradients (`TraceRule.over_windows`).

The projection at the starts (`pairs`) may depend on the steps, so it is computed after the forward pass. It
reaches `enter` as the cotangent of zeros that are carried along with the state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from .._executor.pull_back import is_inexact
from .._executor.window import BackwardPass, starts_of
from .._types import Array, Leaves, PyTree, Shape
from .parts import Carry, Part, Start, add, masked_sum

if TYPE_CHECKING:
    from .drive import Drive


class Edge(NamedTuple):
    """The start of a window at a step; of all steps of a part, with a leading time axis."""

    before_step: Leaves  # zeros whose cotangents are `λ` before the step
    start: Int[Array, "*time"]  # the number of a window's start among `starts[1:]`; -1 at all other steps


@dataclass(frozen=True, eq=False)
class Boundary:
    """The starts of the windows of a part."""

    drive: Drive
    length: int  # number of steps of the part
    carried: list[int]  # positions of the inexact carried leaves among the moving ones

    @cached_property
    def starts(self) -> list[int]:
        """The first steps of all windows."""
        return starts_of(self.length, self.drive.window_length or self.length)

    def edges(self, before_steps: Leaves) -> Edge:
        """The `Edge` of every step."""
        starts = np.full(self.length, -1)
        starts[self.starts[1:]] = np.arange(len(self.starts) - 1)
        return Edge(before_steps, starts)  # type: ignore[arg-type]

    def enter(self, carry: tuple[Leaves, PyTree], edge: Edge) -> tuple[Leaves, PyTree]:
        """The leaves before a step; at the start of a window the projection splits their cotangents.

        `pairs` goes forward as zeros. The backward pass is given the real pairs as the cotangent of its final
        value, and each `enter` hands it on unchanged.
        """
        moving, pairs = carry
        if not edge.before_step:
            return carry

        @jax.custom_vjp
        def enter(leaves: Leaves, pairs: PyTree, edge: Edge) -> tuple[Leaves, PyTree]:
            return leaves, pairs

        def backward(start: Array, cotangents: tuple[Leaves, PyTree]) -> tuple[Leaves, PyTree, Edge]:
            found, pairs = cotangents
            through = self.crossing(found, pairs, jnp.maximum(start, 0))
            on = [jnp.where(start >= 0, u, c) for c, u in zip(found, through, strict=True)]
            return on, pairs, Edge(found, None)  # type: ignore[arg-type]

        enter.defvjp(lambda leaves, pairs, edge: ((leaves, pairs), edge.start), backward)
        leaves, pairs = enter([moving[n] for n in self.carried], pairs, edge)
        entered = list(moving)
        for n, leaf in zip(self.carried, leaves, strict=True):
            entered[n] = leaf
        return entered, pairs

    def crossing(self, cotangents: Leaves, pairs: PyTree, index: Int[Array, ""]) -> Leaves:
        """The part `u` of cotangents at a window's start; zero for rules without a correction."""
        rule_step, step = self.drive.step.rule_step, self.drive.step
        correction = rule_step.rule.correction
        if correction is None:
            return [jnp.zeros_like(c) for c in cotangents]
        found = correction.cross(rule_step.executor, self.at_leaves(cotangents), pairs, index)
        return [found[step.carried.index(step.moving[n])] for n in self.carried]

    def at_starts(self, first: Leaves, whole: Leaves, pairs: PyTree) -> tuple[Leaves, Leaves]:
        """The parts of cotangents that do not cross, by step, and the whole of those at windows' starts.

        `first` are the cotangents before the first step, `whole` those before every step.
        """
        found = [s[None] for s in first]
        if len(self.starts) == 1:
            return found, found
        later = np.array(self.starts[1:])
        others = [a[later[0] :: self.drive.window_length] for a in whole]
        through = jax.vmap(self.crossing, (0, None, 0))(others, pairs, jnp.arange(len(later)))
        left = jax.tree.map(jnp.subtract, others, through)
        each = zip(map(jnp.zeros_like, whole), first, left, strict=True)
        signals = [z.at[0].set(s).at[later].set(a) for z, s, a in each]
        return signals, [jnp.concatenate(pair) for pair in zip(found, others, strict=True)]

    def at_leaves(self, cotangents: Leaves, lead: Shape = ()) -> Leaves:
        """Cotangents of the inexact carried leaves, as a list over all carried leaves (see `at_carried`)."""
        step = self.drive.step
        by_leaf = dict(zip((step.moving[n] for n in self.carried), cotangents, strict=True))
        return self.drive.at_carried(by_leaf, lead)


def back_through_time(drive: Drive, start: Start, carry: Carry, part: Part) -> tuple[Carry, Leaves]:
    """BPTT: one backward pass without boundaries, for a step that calls no learner."""

    def losses(wanted: Leaves) -> tuple[Array, tuple[Leaves, Leaves]]:
        (moving, _), (outs, _) = drive.scan_steps(start, wanted, (carry.moving, ()), part, {})
        return masked_sum(outs[0], part.mask), (outs, moving)

    now = drive.leaves_now(start, carry.moving)
    grads, (outs, moving) = jax.grad(losses, has_aux=True)([now[i] for i in drive.wanted])
    return Carry(add(carry.total, grads), carry.weight_grads, moving), outs


def in_windows(drive: Drive, start: Start, carry: Carry, part: Part) -> tuple[Carry, Leaves]:
    """One backward pass over the windows of a part.

    Inside a window cotangents follow all paths. At its start, the rule's projection lets one part go on
    to the window before it; the traces account for the rest.
    """
    step, length = drive.step, len(part.mask)
    rule, executor = step.rule_step.rule, step.rule_step.executor
    carried = [n for n, i in enumerate(step.moving) if i in step.carried and is_inexact(carry.moving[n])]
    carried_at_start = [carry.moving[n] for n in carried]
    now = drive.leaves_now(start, carry.moving)
    boundary = Boundary(drive, length, carried)
    num_windows, size = len(boundary.starts), drive.window_length or length
    values = rule.with_room(executor, step.traces_in(now), length if num_windows == 1 else None)
    correction = rule.correction

    def losses(
        wanted: Leaves,
        carried_at_start: Leaves,
        before_steps: Leaves,
        pairs: PyTree,
        at_sites: dict[int, Array],
    ) -> PyTree:
        moving = list(carry.moving)
        for n, leaf in zip(carried, carried_at_start, strict=True):
            moving[n] = leaf
        (moving, pairs), (outs, recorded) = drive.scan_steps(
            start, wanted, (moving, pairs), part, at_sites, boundary=boundary, before_steps=before_steps
        )
        loss = masked_sum(outs[0], part.mask)
        # an estimate `s` of dL/dh of later losses adds the term `<s, h>` at the end of the only window
        by_leaf = dict(zip(step.moving, moving, strict=True))
        end = [None if i is None else by_leaf.get(i) for i in step.carried]
        signal_inputs = jax.tree.map(lambda a: a[-1], recorded.signal_inputs)
        estimated = step.rule_step.at_end(signal_inputs, end) or [None] * len(end)
        terms = [jnp.sum(h * s).real for h, s in zip(end, estimated, strict=True) if s is not None]
        loss = sum((term.astype(loss.dtype) for term in terms), loss)
        recorded = recorded._replace(signal_inputs={})
        return (loss, pairs), (outs, moving, jax.lax.stop_gradient(recorded))

    wanted = [now[i] for i in drive.wanted]
    zeros = [jnp.zeros((length, *a.shape), a.dtype) for a in carried_at_start] if num_windows > 1 else []
    pairs = correction.no_pairs(executor, values, num_windows) if correction and num_windows > 1 else ()
    (loss, pairs), pull, (outs, moving, recorded) = jax.vjp(
        losses, wanted, carried_at_start, zeros, pairs, _zero_site_deltas(drive, length), has_aux=True
    )
    window = drive.window_of(start, carry.moving, part, recorded)
    passed = BackwardPass(window, size, fresh=drive.fresh)
    each, of_param = [pairs], dict[int, int]()
    if correction is not None:
        passed, crossings, numbers = correction.crossings(executor, values, passed)
        if num_windows > 1:
            each, of_param = crossings, numbers
    by_pass: list[Leaves] = []
    for n, pairs in enumerate(each):
        if by_pass and executor.sharding is not None:
            # run loops in sequence: CPU devices may match collectives of concurrent loops wrongly
            pairs, _ = jax.lax.optimization_barrier((pairs, by_pass))
        grads, first, whole, _, dys = pull((jnp.ones_like(loss), pairs))
        if executor.sharding is not None:
            recorded, first, whole = jax.lax.optimization_barrier((recorded, first, whole))
            passed = replace(passed, window=drive.window_of(start, carry.moving, part, recorded))
        signals, read = boundary.at_starts(first, whole, pairs)
        signals = boundary.at_leaves(signals, (len(signals[0]) if signals else 1,))
        passed = replace(passed, signals=signals, dys=dys, keep=drive.keep and n == len(each) - 1)
        if correction is not None:
            passed = replace(passed, read=boundary.at_leaves(read, (num_windows,)))
        found, after = rule.over_windows(executor, values, passed)
        by_pass.append(drive.add_params(grads, found))
    of_leaf = {i: of_param.get(n, 0) for n, i in enumerate(step.params or ())}
    total = add(carry.total, [by_pass[of_leaf.get(i, 0)][n] for n, i in enumerate(drive.wanted)])
    moving = drive.with_values(moving, step.rule_step.arrays.constrained({**values, **after}))
    return Carry(total, carry.weight_grads, moving), outs


def _zero_site_deltas(drive: Drive, length: int) -> dict[int, Array]:
    """Zeros to add to the outputs of sites at every step; their cotangents give the weight gradients.

    Each weight gradient is then one product over time. The derivative of a `scan` would add a full-size
    gradient at every step.
    """
    if drive.step.params is None:
        return {}
    sites = [w.site for w in drive.step.rule_step.executor.weighted]
    return {s.index: jnp.zeros((length, *s.shape), s.output.aval.dtype) for s in sites}
