"""Published learning rules, each by four choices: the kind of trace, its decay, the signal, the filter.

Every learner here is approximate unless its report says otherwise.
"""

from __future__ import annotations

import numbers
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from .. import _rules as rules
from .._executor.recursion import Leak, Own, Recursion
from .._online.request import check_choice
from .._rules.bounds import Clipped
from .._rules.presynaptic import Presynaptic
from .._rules.signal import PROPAGATED, Feedback, Modulator, Signal, TargetProjection, as_key
from .config import ETraceConfig
from .options import Choice, OptionsLearner


class EProp(OptionsLearner):
    """e-prop (Bellec et al. 2020): the trace of what is read of a unit, filtered, times a broadcast signal.

        trace[t] = D[t] trace[t-1] + J[t] x[t]        e[t] = kappa e[t-1] + slope[t] trace[t]
        gradient = sum_t L[t] e[t]

    `slope` is the derivative of what others read of the states (a spike of a voltage). A
    `kappa_filter_decay` of 0 means no filter. `L` is, by `feedback`: 'symmetric', the back-propagated signal
    there; 'random', the outputs' errors through fixed random matrices; 'adaptive', through matrices that
    change as the readout does, and whose difference to it decays by `feedback_decay` each time (as if both
    decayed, as in the paper). A readout with memory (`nn.LeakyRateReadout`) has neither filter nor matrix:
    its own trace and the back-propagated signal give its exact gradient.
    """

    takes = (
        "feedback kappa_filter_decay random_feedback_key name vjp_method (fast_solve) trace_dtype "
        "(chunked_trace) (control_flow) (snap_max_jacobian_elements) * feedback_decay mark "
        "normalize_matrix_spectrum"
    )

    @classmethod
    def choose(cls, options: Any) -> Choice:
        given = options.kappa_filter_decay
        kappa = None if given is None else _decay("kappa_filter_decay", given)
        rule = rules.D_RTRL(
            options.trace_dtype,
            recursion=Recursion(kappa=kappa) if kappa else None,
            signal=_feedback(options),
            called="EProp",
            by_readouts=kappa is None,
        )
        kind = "symmetric" if options.feedback == "symmetric" else "random_feedback"
        filters: dict[str, Any] = {"trace_filter": "kappa", "kappa": kappa} if kappa else {}
        return Choice(rule, ETraceConfig(learning_signal=kind, **filters))


class RFLO(OptionsLearner):
    """Random feedback local online learning (Murray 2019): traces that leak, and random feedback.

        trace[t] = leak trace[t-1] + J[t] x[t]        gradient = sum_t (dL/dy B) slope[t] trace[t]

    `leak` is that of the units, `1 - 1/tau`; None: the local Jacobian, which on a leaky net is its leak.
    `feedback` is as in `EProp`, and so is how a readout with memory learns.
    """

    takes = "leak feedback random_feedback_key * feedback_decay name mark trace_dtype"
    defaults: ClassVar = {"leak": None, "feedback": "random"}

    @classmethod
    def choose(cls, options: Any) -> Choice:
        recursion = None if options.leak is None else Recursion(Leak(_decay("leak", options.leak)))
        signal = _feedback(options)
        return Choice(rules.D_RTRL(options.trace_dtype, recursion=recursion, signal=signal, called="RFLO"))


class OSTLRecurrent(OptionsLearner):
    """OSTL (Bohnstingl et al. 2022) of recurrent layers: traces by the unit's own Jacobian.

        trace[t] = O[t] trace[t-1] + J[t] x[t]        O = diagonal of dh[t]/dh[t-1], marked ops open

    Signals go back through the layers of a step. How units act on *other* units of their layer is left out
    (the paper keeps it for a single layer, at the price of `RTRL`).
    """

    regime = "with-H"
    takes = (
        "name vjp_method (fast_solve) trace_dtype (chunked_trace) (control_flow) config "
        "random_feedback_key snap_max_jacobian_elements * mark normalize_matrix_spectrum"
    )

    @classmethod
    def choose(cls, options: Any) -> Choice:
        rule = rules.D_RTRL(options.trace_dtype, recursion=Recursion(Own()), called="OSTLRecurrent")
        config = options.config or ETraceConfig(recurrence_scope="coupled")
        return Choice(cls.configured(options, "per_param") or rule, config)


class OSTLFeedforward(OptionsLearner):
    """OSTL (Bohnstingl et al. 2022) without the recurrent part: traces by the local Jacobian.

        trace[t] = D[t] trace[t-1] + J[t] x[t]        D = dh[t]/dh[t-1] with marked ops closed

    Exact for one layer without recurrent weights, as the paper says. With `decay_or_rank`, `ES_D_RTRL`.
    """

    regime = "without-H"
    takes = (
        "decay_or_rank name vjp_method (fast_solve) (control_flow) config random_feedback_key * mark "
        "trace_dtype"
    )
    defaults: ClassVar = {"decay_or_rank": None}

    @classmethod
    def choose(cls, options: Any) -> Choice:
        dtype, called = options.trace_dtype, "OSTLFeedforward"
        rule: rules.Rule = rules.D_RTRL(dtype, called=called)
        if options.decay_or_rank is not None:
            rule = rules.ES_D_RTRL(options.decay_or_rank, dtype, called=called)
        return Choice(cls.configured(options, "io_factorized") or rule, options.config)


class OTTT(OptionsLearner):
    """Online training through time (Xiao et al. 2022): a leaky sum of the inputs.

        x'[t] = leak x'[t-1] + x[t]        gradient = sum_t x'[t] (dL[t]/dh J[t])

    `leak` is that of the units. `mode` says when the user updates the weights, at the end of a sequence ('A')
    or at every step ('O'); the gradient of a step is the same.
    """

    takes = "mode * leak name vjp_method mark trace_dtype"
    defaults: ClassVar = {"mode": "A"}

    @classmethod
    def choose(cls, options: Any) -> Choice:
        check_choice("mode", options.mode, ("A", "O"))
        rule = Presynaptic(_decay("leak", options.leak), called="OTTT", dtype=options.trace_dtype)
        return Choice(rule, attributes={"mode": options.mode})


class OTPE(OptionsLearner):
    """Online training with postsynaptic estimates (Summe et al. 2023): the trace, carried one layer on.

        trace[t] = leak trace[t-1] + J[t] x[t]        R[t] = leak R[t-1] + slope[t] trace[t]
        gradient = sum_t dL[t]/dread R[t]

    `R` estimates what a layer's weights did to the next layer, whose units leak alike. A layer that no other
    reads has no next one, and the trace itself is used. With `mode='approx'` the estimate is a product, `R =
    z' f'`: `x'[t] = leak x'[t-1] + x[t]`, `z'[t] = leak z'[t-1] + x'[t]`, and `f'` the mean of `slope J` so
    far, with weights `leak^age`. On its way to a lower layer a signal goes through the slopes of the step,
    where the authors' code takes `f'`. `trace_clip_abs` bounds each number of a trace ('approx' has none).
    """

    takes = "mode * leak name vjp_method trace_clip_abs mark trace_dtype"
    defaults: ClassVar = {"mode": "full"}

    @classmethod
    def choose(cls, options: Any) -> Choice:
        check_choice("mode", options.mode, ("full", "approx"))
        leak, clip, dtype = _decay("leak", options.leak), options.trace_clip_abs, options.trace_dtype
        on = Recursion(kappa=0.0, one_layer_on=True)
        rule: rules.Rule = Presynaptic(leak, out=leak, recursion=on, called="OTPE", dtype=dtype)
        if options.mode == "full":
            bound = None if clip is None else Clipped(clip)
            recursion = Recursion(Leak(leak), kappa=leak, one_layer_on=True)
            rule = rules.D_RTRL(dtype, recursion=recursion, bound=bound, called="OTPE")
        return Choice(rule, attributes={"mode": options.mode})


class OSTTP(OptionsLearner):
    """OSTTP (Ortner et al. 2023): the traces of OSTL, and a random projection of the target as signal.

        gradient = sum_t (target[t] B) slope[t] trace[t]        learner(x, target=y)

    `B_list` has a matrix for each group of hidden states, (targets, units); or `num_targets` says how many
    numbers a target has, and matrices are drawn with `key`. A target may also come last, `learner(x, y)`, or
    as `y_target=`. With `target_timing='sequence-end'` a call without a target has a signal of zero;
    'per-step' makes it an error. A readout, with memory or without, learns by the loss: its matrix, if given,
    is not used.
    """

    takes = (
        "B_list target_timing name vjp_method (fast_solve) * num_targets key mark trace_dtype "
        "normalize_matrix_spectrum"
    )

    @classmethod
    def choose(cls, options: Any) -> Choice:
        matrices, timing = options.B_list, options.target_timing
        check_choice("target_timing", timing, ("per-step", "sequence-end"))
        if (matrices is None) == (options.num_targets is None):
            raise ValueError("Give either `B_list`, a matrix for each group, or `num_targets`.")
        given = None if matrices is None else tuple(_as_tuple(np.asarray(B)) for B in matrices)
        size = (options.num_targets if given is None else len(given[0])) or 1
        signal = TargetProjection(size, as_key(options.key), given)
        rule = rules.D_RTRL(options.trace_dtype, signal=signal, called="OSTTP")
        standing = {"target": jnp.zeros(size)} if timing == "sequence-end" else {}
        return Choice(rule, attributes={"target_timing": timing, "standing": standing})


class S_TLLR(OptionsLearner):
    """S-TLLR (Apolinario & Roy 2023): inputs before an output, and inputs after it.

        e[t] = alpha_post psi[t] sum_{s<=t} lambda_post^(t-s) x[s]
             + alpha_pre  x[t]   sum_{s<t}  lambda_pre^(t-s)  psi[s]
        gradient = sum_t dL[t]/dread e[t]

    `psi` is the derivative of what is read of a unit (its spike) by its input: the slope of the surrogate
    times `J`, where the paper takes a function of its own.
    """

    takes = "lambda_post lambda_pre alpha_post alpha_pre * name vjp_method mark trace_dtype"

    @classmethod
    def choose(cls, options: Any) -> Choice:
        rule = Presynaptic(
            _decay("lambda_post", options.lambda_post),
            before=_decay("lambda_pre", options.lambda_pre),
            after=float(options.alpha_post),
            ahead=float(options.alpha_pre),
            recursion=Recursion(kappa=0.0),
            called="S_TLLR",
            dtype=options.trace_dtype,
        )
        return Choice(rule)


class ThreeFactor(OptionsLearner):
    """Three-factor learning: the trace of `D_RTRL` times a modulator of the user's.

        gradient = sum_t m[t] trace[t]        learner(x, modulator=m)

    `m` is the signal at every state, also of a readout with memory: one number, one for each sample, or an
    array like the states (with an axis of states behind, where a unit has several). It takes the place of the
    loss's own signal; a mask of `etrace_grad` weighs it as it does the loss. `learner.modulator = m` stands
    for calls without one. Weights without a trace learn by the loss.
    """

    takes = (
        "name vjp_method modulator (fast_solve) trace_dtype (chunked_trace) (control_flow) "
        "(snap_max_jacobian_elements) * mark"
    )

    @classmethod
    def choose(cls, options: Any) -> Choice:
        rule = rules.D_RTRL(options.trace_dtype, signal=Modulator(), called="ThreeFactor")
        config = ETraceConfig(learning_signal="modulatory")
        return Choice(rule, config, {"modulator": options.modulator})


def _as_tuple(matrix: Any) -> Any:
    return tuple(tuple(float(a) for a in row) for row in matrix)


def _decay(name: str, value: Any) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= float(value) < 1:
        raise ValueError(f"`{name}` is a number, at least 0 and less than 1, not {value!r}.")
    return float(value)


def _feedback(options: Any) -> Signal:
    check_choice("feedback", options.feedback, ("symmetric", "random", "adaptive"))
    if options.feedback == "symmetric":
        return PROPAGATED
    decay = _decay("feedback_decay", options.feedback_decay)
    return Feedback(as_key(options.random_feedback_key), options.feedback == "adaptive", decay)
