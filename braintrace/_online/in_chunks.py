"""A part of a sequence in chunks: record all steps, then touch each trace once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from .._executor.executor import Local, sites_with_traces
from .._executor.pull_back import is_inexact
from .._executor.signals import KnownOutput
from .._executor.window import Record, each_step
from .._types import Array, Leaves, PyTree
from .call import Call
from .parts import Carry, Part, Start, add, masked_sum

if TYPE_CHECKING:
    from .drive import Drive

Outputs = dict[int, KnownOutput]  # by site
# zeros that are added to new states, old states, readings, outputs of the model and outputs of sites;
# their cotangents are the learning signals
Deltas = tuple[Leaves, Leaves, Leaves, Leaves, dict[int, Array]]


def in_chunks(drive: Drive, start: Start, carry: Carry, part: Part) -> tuple[Carry, Leaves]:
    """Record the steps of a chunk, then contract and advance each trace once."""
    step, rule_step = drive.step, drive.step.rule_step
    rule, executor = rule_step.rule, rule_step.executor
    before, ys, moving = _forward(drive, start, carry.moving, part)
    reads_old = executor.reads_old_states or step.reads_old_states
    reads_old = reads_old and rule_step.has_signals_at_old_states

    def losses(wanted: Leaves, deltas: Deltas) -> tuple[Array, PyTree]:
        def one(now: tuple[Deltas, Outputs, Leaves, Leaves]) -> tuple[Leaves, PyTree]:
            return _differentiable(drive, start, wanted, *now)

        outs, local = each_step(one, (deltas, ys, before, part.slices))
        return masked_sum(outs[0], part.mask), (outs, local)

    wanted, deltas = [start.leaves[i] for i in drive.wanted], _zero_deltas(drive, len(part.mask), reads_old)
    loss, pull, (outs, (local, slopes, signal_inputs)) = jax.vjp(losses, wanted, deltas, has_aux=True)
    grads, (dnew, dold, dread, douts, dys) = pull(jnp.ones_like(loss))
    leaves = drive.leaves_now(start, carry.moving)
    params = [leaves[i] for i in step.params or ()]
    consts = step.fixed_consts(start.consts, leaves)
    values = rule.signal.prepared(executor, params, consts, step.traces_in(leaves))
    by_group, widened = jax.vmap(executor.group_signals), jax.vmap(executor.widened)
    back = by_group(dnew)
    signal_inputs = jax.vmap(rule.signal.masked)(signal_inputs, part.mask) if signal_inputs else signal_inputs
    signals = jax.vmap(lambda *each: rule_step.signals_of_step(values, *each))(
        back, dnew, dread, douts, slopes, signal_inputs
    )
    record = Record(
        Local(local[0], {}, *local[1:]),
        len(part.mask),
        signals=signals,
        old_signals=widened(by_group(dold)) if reads_old else None,
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
        back=widened(back),
    )
    moving = drive.with_values(moving, {**values, **kept})
    return Carry(add(carry.total, grads), weight_grads, moving), outs


def _zero_deltas(drive: Drive, length: int, reads_old: bool) -> Deltas:
    """Zeros for the perturbations of every step; there are none of old states that no loss reads."""
    rule_step, executor = drive.step.rule_step, drive.step.rule_step.executor
    each = executor.zero_deltas(), rule_step.zeros_at_readings(), rule_step.zeros_at_outputs()
    new, read, outs = ([jnp.zeros((length, *z.shape), z.dtype) for z in zeros] for zeros in each)
    sites = sites_with_traces(executor) if rule_step.trace_rule.joins_within_step(length) else []
    at_sites = {s.index: jnp.zeros((length, *s.shape), s.output.aval.dtype) for s in sites}
    return new, new if reads_old else [], read, outs, at_sites


def _forward(drive: Drive, start: Start, moving: Leaves, part: Part) -> tuple[Leaves, Outputs, Leaves]:
    """Run the steps of a chunk without traces.

    Returns the moving leaves before each step, the outputs of sites at each step, and the moving leaves
    after the last step.
    """
    step = drive.step

    def body(moving: Leaves, now: tuple[Leaves, Array | None]) -> tuple[Leaves, tuple[Leaves, Outputs]]:
        slices, reset = now
        found: list[Outputs] = []

        def at_call(call: Call, operands: Leaves) -> Leaves:
            params, args, consts, carried, values = call.operands(operands)
            outs, new, ys, _ = call.rule_step.executor.outputs(params, args, consts, carried)
            found.append(ys)
            return [*outs, *jax.tree.leaves((new, values))]

        leaves = drive.with_resets(start, drive.leaves_now(start, moving), reset)
        targets = [*(step.new[i] for i in step.moving), *step.node.outputs[:1]]  # type: ignore[union-attr]
        after = step.run(start.consts, slices, leaves, targets, at_call)
        return after[: len(step.moving)], ([leaves[i] for i in step.moving], found[0])

    after, (before, ys) = jax.lax.scan(body, moving, (part.slices, part.reset))
    return before, ys, after


def _differentiable(
    drive: Drive, start: Start, wanted: Leaves, deltas: Deltas, ys: Outputs, before: Leaves, slices: Leaves
) -> tuple[Leaves, PyTree]:
    """Evaluate one step with `deltas` added to its states; their cotangents are the learning signals.

    Returns the outputs of the step, and its (local Jacobians, slopes of readings, inputs of the signal).
    """
    step = drive.step
    new, old, read, at_outs, at_sites = deltas
    found: list[PyTree] = []

    def at_call(call: Call, operands: Leaves) -> Leaves:
        params, args, consts, carried, values = call.operands(operands)
        rule_step = call.rule_step
        at_states = (new, old if rule_step.executor.reads_old_states else [])
        outs, after, local = rule_step.differentiable(
            params, args, consts, carried, at_states, ys, read, at_sites
        )
        signal_inputs = jax.lax.stop_gradient(rule_step.signal_inputs(values))
        found.append((local.arrays, local.slopes, signal_inputs))
        more = iter(at_outs)
        outs = [o + next(more) if at_outs and is_inexact(o) else o for o in outs]
        return [*outs, *jax.tree.leaves((after, values))]

    leaves = drive.leaves_now(start, before, wanted)
    # old states as the loss reads them; the call reads `leaves` and adds the deltas itself
    moved = list(leaves)
    # `strict` if there are any: all old states are perturbed, or none
    for i, h, delta in zip(step.hidden, step.rule_step.info.hidden, old, strict=bool(old)):
        if i is not None:
            moved[i] = moved[i] + h.in_leaf(delta)
    targets = [*step.outs, *step.node.outputs[:1]]  # type: ignore[union-attr]
    outs = step.run(start.consts, slices, moved, targets, at_call, for_call=leaves)
    return outs[: len(step.outs)], found[0]
