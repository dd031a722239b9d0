"""Published learning rules, each by four choices: the kind of trace, its decay, the signal, the filter.

Every learner here is approximate unless its report says otherwise.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import jax.numpy as jnp

from .. import _rules as rules
from .._types import Options
from .config import ETraceConfig
from .options import Choice, OptionsLearner


class EProp(OptionsLearner):
    """e-prop (Bellec et al. 2020): filtered traces of the units' outputs, times a broadcast signal.

        trace[t] = D[t] trace[t-1] + J[t] x[t]        e[t] = kappa e[t-1] + slope[t] trace[t]
        gradient = sum_t L[t] e[t]

    `slope` is the derivative of a unit's output (the spike of a voltage). A `kappa_filter_decay` of 0 means
    no filter. The signal `L` is, by `feedback`: 'symmetric', the back-propagated one; 'random', the outputs'
    errors through fixed random matrices; 'adaptive', through matrices that change as the readout does, and
    whose difference to it decays by `feedback_decay` per update (as if both decayed, as in the paper). A
    readout with memory (`nn.LeakyRateReadout`) has neither filter nor matrix: its own trace and the
    back-propagated signal give its exact gradient.
    """

    takes = (
        "feedback kappa_filter_decay key name vjp_method fast_solve trace_dtype "
        "chunked_trace control_flow snap_max_jacobian_elements * feedback_decay mark "
        "normalize_matrix_spectrum"
    )
    example = "feedback='random'"

    @classmethod
    def choose(cls, options: SimpleNamespace) -> Choice:
        found, kappa = super().choose(options), options.kappa_filter_decay
        kind = "symmetric" if options.feedback == "symmetric" else "random_feedback"
        filters: Options = {"trace_filter": "kappa", "kappa": float(kappa)} if kappa else {}
        return found._replace(config=ETraceConfig(learning_signal=kind, **filters))


class RFLO(OptionsLearner):
    """Random feedback local online learning (Murray 2019): leaky traces and random feedback.

        trace[t] = leak trace[t-1] + J[t] x[t]        gradient = sum_t (dL/dy B) slope[t] trace[t]

    `leak` is that of the units, `1 - 1/tau`; by default the local Jacobian, which on a leaky net is its
    leak. `feedback` is that of `EProp`; a readout with memory learns as in `EProp`.
    """

    takes = "leak feedback key * feedback_decay name mark trace_dtype"
    example = "leak=0.9"


class OSTLRecurrent(OptionsLearner):
    """OSTL (Bohnstingl et al. 2022) of recurrent layers: traces with each unit's own Jacobian.

        trace[t] = O[t] trace[t-1] + J[t] x[t]        O = diagonal of the full Jacobian dh[t]/dh[t-1]

    Signals are back-propagated through the layers of a step. Influence on *other* units of a layer is
    truncated (the paper keeps it for a single layer, at the cost of `RTRL`).
    """

    regime = "with-H"
    takes = (
        "name vjp_method fast_solve trace_dtype chunked_trace control_flow config "
        "key max_jacobian_elements * mark normalize_matrix_spectrum"
    )
    factorization = "per_param"
    config_of_rule = ETraceConfig(recurrence_scope="coupled")


class OSTLFeedforward(OptionsLearner):
    """OSTL (Bohnstingl et al. 2022) without the recurrent part: traces with the local Jacobian.

        trace[t] = D[t] trace[t-1] + J[t] x[t]        D = dh[t]/dh[t-1] along paths without marked ops

    Exact for one layer without recurrent weights, as the paper says. With `decay_or_rank`, `ES_D_RTRL`.
    """

    regime = "without-H"
    takes = "decay_or_rank name vjp_method fast_solve control_flow config key * mark trace_dtype"
    factorization = "io_factorized"


class OTTT(OptionsLearner):
    """Online training through time (Xiao et al. 2022): a leaky sum of the inputs.

        x'[t] = leak x'[t-1] + x[t]        gradient = sum_t x'[t] (dL[t]/dh J[t])

    `leak` is that of the units. `mode` is 'A' if the user updates the weights at the end of a sequence, and
    'O' if at every step; the gradient of a step is the same.
    """

    takes = "mode * leak name vjp_method mark trace_dtype"
    defaults: ClassVar = {"mode": "A"}
    example = "leak=0.9"
    keeps = ("mode",)
    choices: ClassVar = {"mode": ("A", "O")}


class OTPE(OptionsLearner):
    """Online training with postsynaptic estimates (Summe et al. 2023): traces carried one layer on.

        trace[t] = leak trace[t-1] + J[t] x[t]        R[t] = leak R[t-1] + slope[t] trace[t]
        gradient = sum_t dL[t]/dread R[t]

    `R` estimates the influence of a layer's weights on the next layer, whose units have the same leak. A
    layer without a next one uses the trace itself. With `mode='approx'` the estimate is a product, `R = z'
    f'`: `x'[t] = leak x'[t-1] + x[t]`, `z'[t] = leak z'[t-1] + x'[t]`, and `f'` the mean of `slope J` so far,
    with weights `leak^age`. On its way to a lower layer a signal goes through the slopes of the step, where
    the authors' code takes `f'`. `trace_clip_abs` bounds each entry of a trace ('approx' has none).
    """

    takes = "mode * leak name vjp_method trace_clip_abs mark trace_dtype"
    example = "leak=0.9"
    keeps = ("mode",)


class OSTTP(OptionsLearner):
    """OSTTP (Ortner et al. 2023): the traces of OSTL, with a random projection of the target as signal.

        gradient = sum_t (target[t] B) slope[t] trace[t]        learner(x, target=y)

    `B_list` has a matrix for each group of hidden states; or they are drawn with `key`, for targets of size
    `num_targets`. A target may also come last, `learner(x, y)`, or as `y_target=`. With
    `target_timing='sequence-end'` a call without a target has a signal of zero; with 'per-step' it is an
    error. A readout, with memory or without, learns by the loss: its matrix, if given, is not used.
    """

    takes = (
        "B_list target_timing name vjp_method fast_solve * num_targets key mark trace_dtype "
        "normalize_matrix_spectrum"
    )
    example = "num_targets=2"
    keeps = ("target_timing",)
    choices: ClassVar = {"target_timing": ("per-step", "sequence-end")}

    @classmethod
    def choose(cls, options: SimpleNamespace) -> Choice:
        found = super().choose(options)
        signal = found.rule.signal
        assert isinstance(signal, rules.TargetProjection)
        standing = {"target": jnp.zeros(signal.size)} if options.target_timing == "sequence-end" else {}
        return found._replace(attributes={**found.attributes, "standing": standing})


class S_TLLR(OptionsLearner):
    """S-TLLR (Apolinario & Roy 2023): correlations of outputs with earlier and with later inputs.

        e[t] = alpha_post psi[t] sum_{s<=t} lambda_post^(t-s) x[s]
             + alpha_pre  x[t]   sum_{s<t}  lambda_pre^(t-s)  psi[s]
        gradient = sum_t dL[t]/dread e[t]

    `psi` is the derivative of a unit's output (its spike) by its input: the slope of the surrogate times `J`,
    where the paper takes a function of its own.
    """

    takes = "lambda_post lambda_pre alpha_post alpha_pre * name vjp_method mark trace_dtype"
    example = "lambda_post=0.5, lambda_pre=0.5"


class ThreeFactor(OptionsLearner):
    """Three-factor learning: the trace of `D_RTRL` times a modulator that the user gives.

        gradient = sum_t m[t] trace[t]        learner(x, modulator=m)

    `m` replaces the loss's signal at every state, also of a readout with memory: a scalar, one value per
    sample, or an array like the states (with a last axis of states, if a unit has several). A mask of
    `etrace_grad` weighs it as it does the loss. `learner.modulator = m` is for calls without one. Weights
    without a trace learn by the loss.
    """

    takes = (
        "name vjp_method modulator fast_solve trace_dtype chunked_trace control_flow "
        "snap_max_jacobian_elements * mark"
    )
    keeps = ("modulator",)
    config_of_rule = ETraceConfig(learning_signal="modulatory")
