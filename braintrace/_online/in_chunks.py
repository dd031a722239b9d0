"""A part of a sequence in chunks: record all steps, then touch each trace once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .._executor.executor import Leaves, Local, sites_with_traces
from .._executor.pull_back import is_inexact
from .._executor.window import Record, each_step
from .call import Call
from .parts import Carry, Given, Part, add, masked_sum

if TYPE_CHECKING:
    from .drive import Drive


def in_chunks(drive: Drive, given: Given, carry: Carry, part: Part) -> tuple[Carry, Leaves]:
    """Record the steps of a chunk, then contract and advance each trace once."""
    step, rule_step = drive.step, drive.step.rule_step
    length = len(part.mask)
    before, ys, moving = _forward(drive, given, carry.moving, part)
    reads_old = (
        rule_step.executor.reads_old_states or step.reads_old_states
    ) and rule_step.has_signals_at_old_states
    zeros = [jnp.zeros((length, *d.shape), d.dtype) for d in rule_step.executor.zero_deltas()]
    more = [
        [jnp.zeros((length, *z.shape), z.dtype) for z in some]
        for some in (rule_step.zeros_at_readings(), rule_step.zeros_at_outputs())
    ]
    sites = sites_with_traces(rule_step.executor) if rule_step.trace_rule.joins_within_step(length) else []
    at_sites = {s.index: jnp.zeros((length, *s.shape), s.output.aval.dtype) for s in sites}
    deltas = (zeros, zeros if reads_old else [], *more, at_sites)

    def losses(some: Leaves, deltas: Any) -> Any:
        def one(now: Any) -> Any:
            return _differentiable(drive, given, some, *now)

        outs, local = each_step(one, (deltas, ys, before, part.slices))
        return masked_sum(outs[0], part.mask), (outs, local)

    some = [given.leaves[i] for i in drive.wanted]
    loss, pull, (outs, (local, slopes, taken)) = jax.vjp(losses, some, deltas, has_aux=True)
    grads, (dnew, dold, dread, douts, dys) = pull(jnp.ones_like(loss))
    leaves = drive.leaves_now(given, carry.moving)
    params = [leaves[i] for i in step.params or ()]
    consts = step.fixed_consts(given.consts, leaves)
    values = {k: leaves[i] for k, i in step.traces.items()}
    values = rule_step.rule.signal.prepared(rule_step.executor, params, consts, values)
    by_group = jax.vmap(rule_step.executor.group_signals)
    back = by_group(dnew)
    taken = jax.vmap(rule_step.rule.signal.masked)(taken, part.mask) if taken else taken
    signals = jax.vmap(lambda *each: rule_step.signals_of_step(values, *each))(
        back, dnew, dread, douts, slopes, taken
    )
    record = Record(
        Local(local[0], {}, *local[1:]),
        length,
        signals=signals,
        old_signals=jax.vmap(rule_step.executor.widened)(by_group(dold)) if reads_old else None,
        keep=None if part.reset is None else ~part.reset,
        dys=dys,
    )
    kept, weight_grads = rule_step.chunk(
        params,
        consts,
        values,
        carry.weight_grads,
        record,
        fresh=drive.fresh,
        keep=drive.keep,
        back=jax.vmap(rule_step.executor.widened)(back),
    )
    values = {**values, **kept}
    number = {i: k for k, i in step.traces.items()}
    moving = [values[number[i]] if i in number else a for i, a in zip(step.moving, moving, strict=True)]
    return Carry(add(carry.total, grads), weight_grads, moving), outs


def _forward(drive: Drive, given: Given, moving: Leaves, part: Part) -> tuple[Any, Any, Leaves]:
    """Run the steps of a chunk without traces.

    Returns the moving leaves before each step, the outputs of sites at each step, and the moving leaves
    after the last step.
    """
    step = drive.step

    def body(moving: Leaves, now: Any) -> Any:
        slices, reset = now
        found: list[Any] = []

        def at_call(call: Call, operands: Leaves) -> Leaves:
            params, args, consts, carried, values = call.operands(operands)
            outs, new, ys, _ = call.rule_step.executor.outputs(params, args, consts, carried)
            found.append(ys)
            return [*outs, *jax.tree.leaves((new, values))]

        leaves = drive.with_resets(given, drive.leaves_now(given, moving), reset)
        targets = [*(step.new[i] for i in step.moving), *step.node.outputs[:1]]  # type: ignore[union-attr]
        after = step.run(given.consts, slices, leaves, targets, at_call)
        return after[: len(step.moving)], ([leaves[i] for i in step.moving], found[0])

    after, (before, ys) = jax.lax.scan(body, moving, (part.slices, part.reset))
    return before, ys, after


def _differentiable(
    drive: Drive, given: Given, some: Leaves, deltas: Any, ys: Any, before: Leaves, slices: Leaves
) -> tuple[Leaves, Any]:
    """Evaluate one step with `deltas` added to its states; their cotangents are the learning signals.

    Returns the outputs of the step, and its (local Jacobians, slopes of readings, inputs of the signal).
    """
    step = drive.step
    new, old, read, at_outs, at_sites = deltas
    found: list[Any] = []

    def at_call(call: Call, operands: Leaves) -> Leaves:
        params, args, consts, carried, values = call.operands(operands)
        state_deltas = (new, old if call.rule_step.executor.reads_old_states else [])
        outs, after, local = call.rule_step.differentiable(
            params, args, consts, carried, state_deltas, ys, read, at_sites
        )
        found.append(
            (local.arrays, local.slopes, jax.lax.stop_gradient(call.rule_step.signal_inputs(values)))
        )
        more = iter(at_outs)
        outs = [o + next(more) if at_outs and is_inexact(o) else o for o in outs]
        return [*outs, *jax.tree.leaves((after, values))]

    leaves = drive.leaves_now(given, before, some)
    moved = list(
        leaves
    )  # old states as the loss reads them; the call reads `leaves` and adds the deltas itself
    for i, h, delta in zip(step.hidden, step.rule_step.info.hidden, old, strict=bool(old)):
        if i is not None:
            moved[i] = moved[i] + h.in_leaf(delta)
    targets = [*step.outs, *step.node.outputs[:1]]  # type: ignore[union-attr]
    outs = step.run(given.consts, slices, moved, targets, at_call, for_call=leaves)
    return outs[: len(step.outs)], found[0]
