"""Published learning rules as values: each is a kind of trace with its decay, signal and filter.

All are approximate, unless the report on a model says otherwise. The learners of the same names in
`braintrace` have the equations and references.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._executor.trace_recursion import Leak, Own, Recursion
from .._types import ArrayLike, DTypeLike, NumPyArray
from .bounds import Clipped
from .d_rtrl import D_RTRL
from .es_d_rtrl import ES_D_RTRL
from .presynaptic import Presynaptic
from .rule import Rule
from .signal import PROPAGATED, Feedback, Modulator, Signal, TargetProjection, as_key


def EProp(
    feedback: str = "symmetric",
    kappa_filter_decay: float | None = None,
    *,
    key: ArrayLike | None = None,
    feedback_decay: float = 0.0,
    trace_dtype: DTypeLike | None = None,
) -> Rule:
    """e-prop: D-RTRL's traces of the units' outputs, filtered, times a broadcast signal.

    Args:
        feedback: 'symmetric', 'random' or 'adaptive'.
        kappa_filter_decay: Decay of the filter; by default that of the readout, and 0 for none.
        key: Key of the random feedback matrices.
        feedback_decay: Decay of adaptive matrices towards the readout.
        trace_dtype: Type that traces are stored in.
    """
    kappa = None if kappa_filter_decay is None else as_leak("kappa_filter_decay", kappa_filter_decay)
    return D_RTRL(
        trace_dtype=trace_dtype,
        recursion=Recursion(kappa=kappa) if kappa else None,
        signal=_feedback(feedback, key, feedback_decay),
        called="EProp",
        by_readouts=kappa is None,
    )


def RFLO(
    leak: float | None = None,
    feedback: str = "random",
    *,
    key: ArrayLike | None = None,
    feedback_decay: float = 0.0,
    trace_dtype: DTypeLike | None = None,
) -> Rule:
    """Random feedback local online learning: traces that leak, and random feedback.

    Args:
        leak: Decay of the units, `1 - 1/tau`; by default the local Jacobian.
        feedback: 'symmetric', 'random' or 'adaptive'.
        key: Key of the random feedback matrices.
        feedback_decay: Decay of adaptive matrices towards the readout.
        trace_dtype: Type that traces are stored in.
    """
    recursion = None if leak is None else Recursion(Leak(as_leak("leak", leak)))
    signal = _feedback(feedback, key, feedback_decay)
    return D_RTRL(trace_dtype=trace_dtype, recursion=recursion, signal=signal, called="RFLO")


def OSTLRecurrent(*, trace_dtype: DTypeLike | None = None) -> Rule:
    """OSTL of recurrent layers: traces that decay by each unit's own Jacobian, recurrent weights included."""
    return D_RTRL(trace_dtype=trace_dtype, recursion=Recursion(Own()), called="OSTLRecurrent")


def OSTLFeedforward(
    decay_or_rank: float | tuple[float, float] | None = None, *, trace_dtype: DTypeLike | None = None
) -> Rule:
    """OSTL without the recurrent part: D-RTRL or, with `decay_or_rank`, ES-D-RTRL."""
    if decay_or_rank is None:
        return D_RTRL(trace_dtype=trace_dtype, called="OSTLFeedforward")
    return ES_D_RTRL(decay_or_rank, trace_dtype, called="OSTLFeedforward")


def OTTT(leak: float, *, trace_dtype: DTypeLike | None = None) -> Rule:
    """Online training through time: a leaky sum of the inputs, with the `leak` of the units."""
    return Presynaptic(as_leak("leak", leak), called="OTTT", trace_dtype=trace_dtype)


def OTPE(
    leak: float,
    mode: str = "full",
    *,
    trace_clip_abs: float | None = None,
    trace_dtype: DTypeLike | None = None,
) -> Rule:
    """Online training with postsynaptic estimates: the trace, followed into the next layer.

    Args:
        leak: Decay of the units.
        mode: 'full', or 'approx' for a product of two averages.
        trace_clip_abs: Bound of each entry of a trace, of the mode 'full'.
        trace_dtype: Type that traces are stored in.
    """
    _check("mode", mode, ("full", "approx"))
    leak = as_leak("leak", leak)
    if mode == "approx":
        on = Recursion(kappa=0.0, one_layer_on=True)
        return Presynaptic(leak, out=leak, recursion=on, called="OTPE", trace_dtype=trace_dtype)
    bound = None if trace_clip_abs is None else Clipped(trace_clip_abs)
    recursion = Recursion(Leak(leak), kappa=leak, one_layer_on=True)
    return D_RTRL(trace_dtype=trace_dtype, recursion=recursion, bound=bound, called="OTPE")


def OSTTP(
    B_list: Sequence[ArrayLike] | None = None,
    *,
    num_targets: int | None = None,
    key: ArrayLike | None = None,
    trace_dtype: DTypeLike | None = None,
) -> Rule:
    """OSTTP: the traces of OSTL, and a random projection of the `target` as learning signal.

    Args:
        B_list: A matrix for each group of hidden states, (targets, units).
        num_targets: Size of a target, to draw the matrices instead.
        key: Key of the matrices.
        trace_dtype: Type that traces are stored in.
    """
    if (B_list is None) == (num_targets is None):
        raise ValueError("Give either `B_list`, a matrix for each group, or `num_targets`.")
    given = None if B_list is None else tuple(_as_tuple(np.asarray(B)) for B in B_list)
    size = (num_targets if given is None else len(given[0])) or 1
    return D_RTRL(trace_dtype=trace_dtype, signal=TargetProjection(size, as_key(key), given), called="OSTTP")


def S_TLLR(
    lambda_post: float,
    lambda_pre: float,
    alpha_post: float = 1.0,
    alpha_pre: float = 1.0,
    *,
    trace_dtype: DTypeLike | None = None,
) -> Rule:
    """S-TLLR: inputs before an output, and inputs after it.

    Args:
        lambda_post: Decay of the inputs before an output.
        lambda_pre: Decay of the outputs before an input.
        alpha_post: Weight of inputs before outputs.
        alpha_pre: Weight of outputs before inputs.
        trace_dtype: Type that traces are stored in.
    """
    return Presynaptic(
        as_leak("lambda_post", lambda_post),
        before=as_leak("lambda_pre", lambda_pre),
        after=float(alpha_post),
        ahead=float(alpha_pre),
        recursion=Recursion(kappa=0.0),
        called="S_TLLR",
        trace_dtype=trace_dtype,
    )


def ThreeFactor(*, trace_dtype: DTypeLike | None = None) -> Rule:
    """Three-factor learning: the trace of D-RTRL times a `modulator` that is passed to each step."""
    return D_RTRL(trace_dtype=trace_dtype, signal=Modulator(), called="ThreeFactor")


def as_leak(name: str, value: Any) -> float:
    """A decay in [0, 1), checked."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= float(value) < 1:
        raise ValueError(f"`{name}` is a number, at least 0 and less than 1, not {value!r}.")
    return float(value)


def _as_tuple(matrix: NumPyArray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(a) for a in row) for row in matrix)


def _feedback(feedback: str, key: ArrayLike | None, decay: float) -> Signal:
    _check("feedback", feedback, ("symmetric", "random", "adaptive"))
    if feedback == "symmetric":
        return PROPAGATED
    return Feedback(as_key(key), feedback == "adaptive", as_leak("feedback_decay", decay))


def _check(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` is one of {', '.join(map(repr, choices))}, not {value!r}.")
