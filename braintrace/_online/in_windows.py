"""A part of a sequence in windows: one backward pass, in which a projection acts at the windows' starts.

With `λ` the cotangent of the carried leaves at the start of a window, along all paths of that window and of
those after it, the projection (`_rules/projection.py`) splits

    λ = u + (λ - u)        u = (λ Tᵀ) S goes on to the window before;  λ - u meets the traces.

`jax.vjp` computes all of it: the function `enter` is the identity at a window's start, and its backward pass
returns `u` for the leaves, `λ - u` for `rest` (zeros, one per step) and the covariance of `λ` for `read`
(zeros). No window is before the first one: there `u`, the cotangent of the part's first leaves, is added to
`rest` again. The rule then turns `rest` into gradients (`TraceRule.over_windows`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .._executor.executor import Leaves
from .._executor.pull_back import is_inexact
from .._executor.sharding import plus
from .._rules.projection import cross, finite
from .._rules.rule import Values
from .._rules.signal import PROPAGATED
from .parts import Carry, Given, Part, add, weighed
from .sequence import Sequence, over_chunks

if TYPE_CHECKING:
    from .drive import Drive


@dataclass(frozen=True, eq=False)
class Boundary:
    """How the cotangents at the start of each window are split."""

    starts: list[int]  # positions of the carried leaves among the moving ones
    crossing: Any  # the projection; None if no cotangent crosses
    rest: Leaves  # zeros, whose cotangents are those that do not cross
    read: Any  # zeros, whose cotangent is what the projection reads


def in_windows(drive: Drive, given: Given, carry: Carry, part: Part) -> tuple[Carry, Leaves]:
    """One backward pass over the windows of a part.

    Inside a window cotangents follow all paths. At its start, the rule's projection lets one part go on
    to the window before it; the traces account for the rest.
    """
    step = drive.step
    starts = [n for n, i in enumerate(step.moving) if i in step.carried and is_inexact(carry.moving[n])]
    start, length = [carry.moving[n] for n in starts], len(part.mask)
    now = drive.leaves_now(given, carry.moving)
    values = {k: now[i] for k, i in step.traces.items()}
    crossing = _crossing(drive, values) if length > drive.window > 0 else None

    def losses(some: Leaves, start: Leaves, rest: Leaves, read: Any, added: dict[int, Any]) -> Any:
        moving = list(carry.moving)
        for n, leaf in zip(starts, start, strict=True):
            moving[n] = leaf
        first = moving, () if crossing is None else crossing.start, jnp.zeros((), part.mask.dtype)
        (moving, crossed, later), (outs, taken) = _along_windows(
            drive, given, some, first, part, Boundary(starts, crossing, rest, read), added
        )
        loss = weighed(outs[0], part.mask)
        return loss + later.astype(loss.dtype), (outs, moving, jax.lax.stop_gradient((taken, crossed)))

    some = [now[i] for i in drive.wanted]
    # cotangents that do not cross a window's start, by the step that follows it
    rest = [jnp.zeros((length, *a.shape), a.dtype) for a in start if length > drive.window > 0]
    read = () if crossing is None else crossing.unread
    loss, pull, (outs, moving, (taken, crossed)) = jax.vjp(
        losses, some, start, rest, read, _nothing_added(drive, length), has_aux=True
    )
    grads, signals, rest, read, dys = pull(jnp.ones_like(loss))
    total = add(carry.total, grads)
    if step.node is None:  # BPTT
        return Carry(total, carry.traced, moving), outs
    if step.online.executor.spread is not None:
        # run the two loops in sequence: CPU devices may match collectives of concurrent loops wrongly
        taken, signals, rest = jax.lax.optimization_barrier((taken, signals, rest))
    window = drive.window_of(given, carry.moving, part, taken)
    executor, rule = step.online.executor, step.online.rule
    found: Leaves = [None] * len(window.params)
    if dys:
        found = executor.of_cotangents(window.params, window.first_consts, window.inputs, dys)
    if drive.window:
        rest = rest or [jnp.zeros((length, *a.shape), a.dtype) for a in start]
        rest = [r.at[0].add(s) for r, s in zip(rest, signals, strict=True)]
        full = drive.at_carried(dict(zip((step.moving[n] for n in starts), rest, strict=True)), (length,))
        past, after = step.online.trace_rule.over_windows(
            executor,
            values,
            full,
            window,
            drive.window,
            None if crossing is None else (crossed, read),
            fresh=drive.fresh,
            keep=drive.keep,
        )
    else:
        by_leaf = dict(zip((step.moving[n] for n in starts), signals, strict=True))
        past = rule.past(executor, values, drive.at_carried(by_leaf), window)
        after = rule.advance(executor, values, window)
    found = list(map(plus, found, past))
    moving = drive.with_values(moving, step.online.laid_out({**values, **after}))
    return Carry(drive.add_params(total, found), carry.traced, moving), outs


def _crossing(drive: Drive, values: Values) -> Any:
    """The projection along the windows of a part that begins with `values`."""
    online = None if drive.step.node is None else drive.step.online
    if online is None or not drive.window or online.rule.projection is None:
        return None
    return online.rule.projection.crossing(online.executor, jax.lax.stop_gradient(values))


def _along_windows(
    drive: Drive,
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
    step = drive.step

    def window(carry: Any, arrays: Any, mask: Any, reset: Any) -> Any:
        moving, state, later = carry
        slices, rest, added = arrays
        now = Part(slices, mask, reset)
        if rest:
            moving, state = _entered(drive, moving, replace(at, rest=[r[0] for r in rest]), state, now)
        before = moving
        moving, (outs, taken) = drive.along(given, some, moving, now, added)
        if step.node is not None:
            *taken, given_to = taken
            later = later + _after_window(drive, moving, jax.tree.map(lambda a: a[-1], given_to), later)
        if at.crossing is not None:
            steps = drive.window_of(given, before, now, jax.lax.stop_gradient(taken)).as_if_begun
            state = jax.lax.stop_gradient(at.crossing.along(state, steps))
        return (moving, state, later), (outs, taken)

    length = len(part.mask)
    sequence = Sequence((part.slices, at.rest, added), length, part.mask, part.reset)
    size = min(drive.window or length, length)
    return over_chunks(window, first, sequence, size, rest_first=True, cut=True)


def _entered(drive: Drive, moving: Leaves, at: Boundary, state: Any, part: Part) -> tuple[Leaves, Any]:
    """The leaves at a window's start, whose cotangents the projection splits, and its state there."""
    step, crossing, starts = drive.step, at.crossing, at.starts
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
            vectors = per.whole(finite(per.vectors(drive.at_carried(by_leaf), dual=True)))
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


def _after_window(drive: Drive, moving: Leaves, given_to: Values, loss: Any) -> Any:
    """The surrogate loss `<s, h[end]>`, with `s` the signal's estimate of dL/dh[end] of later losses.

    Zero for a signal without such an estimate.
    """
    online, at = drive.step.online, dict(zip(drive.step.moving, moving, strict=True))
    if online.rule.signal == PROPAGATED or any(i not in at for i in drive.step.hidden):
        return jnp.zeros_like(loss)
    pairs = zip(online.info.hidden, drive.step.hidden, strict=True)
    hidden = [h.of_leaf(at[i]) for h, i in pairs if i is not None]
    found = online.rule.signal.at_end(online.executor, given_to, hidden)
    terms = [jnp.sum(h * s).astype(loss.dtype) for h, s in zip(hidden, found or [], strict=True)]
    return sum(terms, jnp.zeros_like(loss))


def _nothing_added(drive: Drive, length: int) -> dict[int, Any]:
    """Zeros to add to the outputs of sites at every step; their cotangents give the weight gradients.

    Each weight gradient is then one product over time. The derivative of a `scan` would add a full-size
    gradient at every step.
    """
    if drive.step.node is None or drive.step.params is None:
        return {}
    sites = [w.site for w in drive.step.online.executor.weighted]
    return {s.index: jnp.zeros((length, *s.shape), s.output.aval.dtype) for s in sites}
