"""Choose how to run a sequence: step by step, in chunks or in windows, and how many steps at once."""

from __future__ import annotations

import jax

from .._compiler.errors import NotSupportedError
from .._executor.memory import on_gpu, record_bytes
from .drive import Drive
from .request import WindowSize
from .rule_step import RuleStep
from .sequence import Sequence, even_chunks
from .user_step import UserStep

_SMALL = 2**27  # bytes of a rule's arrays, whose updates take less than the launches of kernels
_ANY_WINDOW = 16  # default window size of rules whose gradient does not depend on it


def memory_budget() -> int:
    """Bytes for the records of a chunk: 1 GiB, or a 32nd of an accelerator's memory where that is more."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return max(2**30, int(stats.get("bytes_limit", 0)) // 32)


def choose(
    rule_step: RuleStep,
    step: UserStep,
    sequence: Sequence,
    *,
    chunk_size: int | None,
    window: WindowSize,
    keep: bool,
    fresh: bool,
    budget: int,
) -> Drive:
    """Choose the fastest drive that computes the requested gradient.

    `window` is the window size of a learner that back-propagates through windows ('auto' fills the budget),
    `budget` the bytes for the records of a chunk. `fresh` says that the traces are zero before the sequence,
    `keep` that they are needed after it.
    """
    if rule_step.rule.back_through_time:
        return Drive(step, sequence.length, "windows", checkpoint_every=chunk_size)
    obstacle = step.why_step_by_step()
    step_by_step = Drive(step, sequence.pace, unroll=_unroll(rule_step))
    if rule_step.uses_windows:
        any_window = rule_step.rule.any_window
        if window == "auto":
            window = auto_window(rule_step, sequence.length, budget)
        size = (chunk_size or _ANY_WINDOW) if any_window else window
        if obstacle is not None and size > 1 and not any_window:
            raise NotSupportedError(
                f"Windows of {size} steps cannot be taken: {obstacle}. Call the learner once in a step, "
                "outside of control flow and transformations, or take windows of one step."
            )
        if obstacle is not None:
            return step_by_step
        rule = rule_step.rule
        if any_window or not rule.several_windows_per_pass or rule.signal.is_bootstrapped:
            return Drive(step, min(size, sequence.length), "windows")
        num_windows, max_windows = -(-sequence.length // size), -(-(chunk_size or sequence.pace) // size)
        if chunk_size is None:
            affordable = _affordable(rule_step, budget) // size
            if rule.correction is not None and (keep or affordable < num_windows):
                rows = rule.correction.num_rows(rule_step.executor)
                affordable = _affordable(rule_step, budget, rows) // size
            max_windows = even_chunks(num_windows, min(max_windows, affordable))
        part_length = min(max_windows * size, sequence.length)
        is_whole = part_length == sequence.length  # else later parts need traces, and do not start from zero
        keep, fresh = keep or not is_whole, is_whole and fresh
        return Drive(step, part_length, "windows", window_length=size, keep=keep, fresh=fresh)
    best = even_chunks(sequence.length, min(sequence.pace, _affordable(rule_step, budget)))
    size = int(min(chunk_size or best, sequence.length))
    # a loss that reads old states: in a chunk, even of one step, the signals at these come from the same
    # `vjp`; step by step, the step would be evaluated again (`Drive._before_call`)
    if obstacle is not None or (size == 1 and not step.reads_old_states):
        return step_by_step
    is_whole = size == sequence.length
    return Drive(step, size, "chunks", keep=keep or not is_whole, fresh=is_whole and fresh)


def auto_window(rule_step: RuleStep, length: int, budget: int) -> int:
    """The longest window whose activations fit into `budget` bytes."""
    return even_chunks(length, _affordable(rule_step, budget))


def _affordable(rule_step: RuleStep, budget: int, rows: int = 0) -> int:
    """The number of steps whose records fit into `budget` bytes, with `rows` that are pulled through them."""
    return budget // max(1, record_bytes(rule_step.executor, rows))


def _unroll(rule_step: RuleStep) -> int:
    """The `unroll` of a scan over steps: on a GPU, an iteration costs as much as a small kernel."""
    arrays = rule_step.arrays.shapes.values()
    return 2 if on_gpu() and sum(a.size * a.dtype.itemsize for a in arrays) < _SMALL else 1
