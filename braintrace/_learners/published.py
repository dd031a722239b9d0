"""Published learning rules, each by four choices: what is kept, its decay, the signal, the filter.

Every learner here is approximate unless its report says otherwise. `fast_solve`, `chunked_trace`,
`control_flow` and `snap_max_jacobian_elements` are accepted and have no effect: code written for 0.2.x chose
a code path by them.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import brainstate
import jax.numpy as jnp
import numpy as np

from .. import _rules as rules
from .._executor.recursion import Leak, Own, Recursion
from .._frontends.modules import Mark
from .._rules.bounds import Clipped
from .._rules.presynaptic import Presynaptic
from .._rules.signal import PROPAGATED, Feedback, Modulator, Signal, TargetProjection, as_key
from .._rules.snap import MOST
from .config import ETraceConfig
from .learners import as_config, as_trace_dtype, normalized
from .vjp import ETraceVjpAlgorithm, VjpMethod


class EProp(ETraceVjpAlgorithm):
    """e-prop (Bellec et al. 2020): the trace of what is read of a unit, filtered, times a broadcast signal.

        trace[t] = D[t] trace[t-1] + J[t] x[t]        e[t] = kappa e[t-1] + slope[t] trace[t]
        gradient = sum_t L[t] e[t]

    `slope` is the derivative of what others read of the states (a spike of a voltage). `kappa_filter_decay`
    is the decay of the filter, 0 for none; by default it is that of the model's leaky readout, if there is
    one. `L` is, by `feedback`: 'symmetric', the back-propagated signal there; 'random', the outputs' errors
    through fixed random matrices (drawn with `random_feedback_key`); 'adaptive', through matrices that change
    as the readout does; each time, `feedback_decay` of their difference to it is forgotten (as if both
    decayed by that, as in the paper). A readout with memory (`nn.LeakyRateReadout`) has neither filter nor
    matrix: its own trace and the back-propagated signal give its exact gradient.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        feedback: str = "symmetric",
        kappa_filter_decay: float | None = None,
        random_feedback_key: Any = None,
        name: str | None = None,
        vjp_method: VjpMethod | None = None,
        fast_solve: bool = True,
        trace_dtype: Any = None,
        chunked_trace: bool = True,
        control_flow: Any = None,
        snap_max_jacobian_elements: int | None = None,
        *,
        feedback_decay: float = 0.0,
        mark: Mark = "ops",
        normalize_matrix_spectrum: bool = False,
    ) -> None:
        given = kappa_filter_decay
        kappa = None if given is None else _decay("kappa_filter_decay", given)
        signal = _feedback(feedback, random_feedback_key, feedback_decay)
        rule = rules.D_RTRL(
            as_trace_dtype(trace_dtype),
            recursion=Recursion(kappa=kappa) if kappa else None,
            signal=signal,
            called="EProp",
            by_readouts=kappa is None,
        )
        rule = normalized(rule) if normalize_matrix_spectrum else rule
        kind = "symmetric" if feedback == "symmetric" else "random_feedback"
        name_of_filter = "kappa" if kappa else "none"
        config = ETraceConfig(learning_signal=kind, trace_filter=name_of_filter, kappa=kappa or None)
        super().__init__(model, rule, vjp_method=vjp_method, mark=mark, name=name, config=config)


class RFLO(ETraceVjpAlgorithm):
    """Random feedback local online learning (Murray 2019): traces that leak, and random feedback.

        trace[t] = leak trace[t-1] + J[t] x[t]        gradient = sum_t (dL/dy B) slope[t] trace[t]

    `leak` is that of the units, `1 - 1/tau`; None: the local Jacobian, which on a leaky net is its leak.
    `feedback` is as in `EProp`, and so is how a readout with memory learns.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        leak: float | None = None,
        feedback: str = "random",
        random_feedback_key: Any = None,
        *,
        feedback_decay: float = 0.0,
        name: str | None = None,
        mark: Mark = "ops",
        trace_dtype: Any = None,
    ) -> None:
        recursion = None if leak is None else Recursion(Leak(_decay("leak", leak)))
        signal = _feedback(feedback, random_feedback_key, feedback_decay)
        rule = rules.D_RTRL(as_trace_dtype(trace_dtype), recursion=recursion, signal=signal, called="RFLO")
        super().__init__(model, rule, mark=mark, name=name)


class OSTLRecurrent(ETraceVjpAlgorithm):
    """OSTL (Bohnstingl et al. 2022) of recurrent layers: traces by the unit's own Jacobian.

        trace[t] = O[t] trace[t-1] + J[t] x[t]        O = diagonal of dh[t]/dh[t-1], marked ops open

    Signals go back through the layers of a step. How units act on *other* units of their layer is left out
    (the paper keeps it for a single layer, at the price of `RTRL`).
    """

    regime = "with-H"

    def __init__(
        self,
        model: brainstate.nn.Module,
        name: str | None = None,
        vjp_method: VjpMethod | None = None,
        fast_solve: bool = True,
        trace_dtype: Any = None,
        chunked_trace: bool = True,
        control_flow: Any = None,
        config: ETraceConfig | None = None,
        random_feedback_key: Any = None,
        snap_max_jacobian_elements: int = MOST,
        *,
        mark: Mark = "ops",
        normalize_matrix_spectrum: bool = False,
    ) -> None:
        dtype = as_trace_dtype(trace_dtype)
        rule: rules.Rule = rules.D_RTRL(dtype, recursion=Recursion(Own()), called="OSTLRecurrent")
        if config is not None:
            rule = as_config(config, type(self), "per_param").rule(
                random_feedback_key, dtype, snap_max_jacobian_elements
            )
        rule = normalized(rule) if normalize_matrix_spectrum else rule
        config = config or ETraceConfig(recurrence_scope="coupled")
        super().__init__(model, rule, vjp_method=vjp_method, mark=mark, name=name, config=config)


class OSTLFeedforward(ETraceVjpAlgorithm):
    """OSTL (Bohnstingl et al. 2022) without the recurrent part: traces by the local Jacobian.

        trace[t] = D[t] trace[t-1] + J[t] x[t]        D = dh[t]/dh[t-1] with marked ops closed

    Exact for one layer without recurrent weights, as the paper says. With `decay_or_rank`, `ES_D_RTRL`.
    """

    regime = "without-H"

    def __init__(
        self,
        model: brainstate.nn.Module,
        decay_or_rank: Any = None,
        name: str | None = None,
        vjp_method: VjpMethod | None = None,
        fast_solve: bool = True,
        control_flow: Any = None,
        config: ETraceConfig | None = None,
        random_feedback_key: Any = None,
        *,
        mark: Mark = "ops",
        trace_dtype: Any = None,
    ) -> None:
        dtype = as_trace_dtype(trace_dtype)
        rule: rules.Rule = rules.D_RTRL(dtype, called="OSTLFeedforward")
        if decay_or_rank is not None:
            rule = rules.ES_D_RTRL(decay_or_rank, dtype, called="OSTLFeedforward")
        if config is not None:
            rule = as_config(config, type(self), "io_factorized").rule(random_feedback_key, dtype)
        super().__init__(model, rule, vjp_method=vjp_method, mark=mark, name=name, config=config)


class OTTT(ETraceVjpAlgorithm):
    """Online training through time (Xiao et al. 2022): an average of what comes in, and nothing else.

        x'[t] = leak x'[t-1] + x[t]        gradient = sum_t x'[t] (dL[t]/dh J[t])

    `leak` is that of the units. `mode` says when the user updates the weights, at the end of a sequence ('A')
    or at every step ('O'); the gradient of a step is the same.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        mode: str = "A",
        *,
        leak: float,
        name: str | None = None,
        vjp_method: VjpMethod | None = None,
        mark: Mark = "ops",
        trace_dtype: Any = None,
    ) -> None:
        if mode not in ("A", "O"):
            raise ValueError(f"`mode` is 'A' or 'O', not {mode!r}.")
        rule = Presynaptic(_decay("leak", leak), called="OTTT", dtype=as_trace_dtype(trace_dtype))
        super().__init__(model, rule, vjp_method=vjp_method, mark=mark, name=name)
        self.mode = mode


class OTPE(ETraceVjpAlgorithm):
    """Online training with postsynaptic estimates (Summe et al. 2023): the trace, carried one layer on.

        trace[t] = leak trace[t-1] + J[t] x[t]        R[t] = leak R[t-1] + slope[t] trace[t]
        gradient = sum_t dL[t]/dread R[t]

    `R` estimates what a layer's weights did to the next layer, whose units leak alike. A layer that no other
    reads has no next one, and the trace itself is used. With `mode='approx'` the estimate is a product, `R =
    z' f'`: `x'[t] = leak x'[t-1] + x[t]`, `z'[t] = leak z'[t-1] + x'[t]`, and `f'` the mean of `slope J` so
    far, with weights `leak^age`. On its way to a lower layer a signal goes through the slopes of the step,
    where the authors' code takes `f'`. `trace_clip_abs` bounds each number of a trace ('approx' has none).
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        mode: str = "full",
        *,
        leak: float,
        name: str | None = None,
        vjp_method: VjpMethod | None = None,
        trace_clip_abs: float | None = None,
        mark: Mark = "ops",
        trace_dtype: Any = None,
    ) -> None:
        if mode not in ("full", "approx"):
            raise ValueError(f"`mode` is 'full' or 'approx', not {mode!r}.")
        leak, dtype = _decay("leak", leak), as_trace_dtype(trace_dtype)
        on = Recursion(kappa=0.0, one_layer_on=True)
        rule: rules.Rule = Presynaptic(leak, out=leak, recursion=on, called="OTPE", dtype=dtype)
        if mode == "full":
            bound = None if trace_clip_abs is None else Clipped(trace_clip_abs)
            recursion = Recursion(Leak(leak), kappa=leak, one_layer_on=True)
            rule = rules.D_RTRL(dtype, recursion=recursion, bound=bound, called="OTPE")
        super().__init__(model, rule, vjp_method=vjp_method, mark=mark, name=name)
        self.mode = mode


class OSTTP(ETraceVjpAlgorithm):
    """OSTTP (Ortner et al. 2023): the traces of OSTL, and a random projection of the target as signal.

        gradient = sum_t (target[t] B) slope[t] trace[t]        learner(x, target=y)

    `B_list` has a matrix for each group of hidden states, (targets, units); or `num_targets` says how many
    numbers a target has, and matrices are drawn with `key`. A target may also come last, `learner(x, y)`, or
    as `y_target=`. With `target_timing='sequence-end'` a call without a target has a signal of zero;
    'per-step' makes it an error. A readout, with memory or without, learns by the loss: its matrix, if given,
    is not used.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        B_list: Sequence[Any] | None = None,
        target_timing: str = "per-step",
        name: str | None = None,
        vjp_method: VjpMethod | None = None,
        fast_solve: bool = True,
        *,
        num_targets: int | None = None,
        key: Any = None,
        mark: Mark = "ops",
        trace_dtype: Any = None,
        normalize_matrix_spectrum: bool = False,
    ) -> None:
        if target_timing not in ("per-step", "sequence-end"):
            raise ValueError(f"`target_timing` is 'per-step' or 'sequence-end', not {target_timing!r}.")
        if (B_list is None) == (num_targets is None):
            raise ValueError("Give either `B_list`, a matrix for each group, or `num_targets`.")
        given = None if B_list is None else tuple(_as_tuple(np.asarray(B)) for B in B_list)
        size = num_targets if given is None else len(given[0])
        signal = TargetProjection(size or 1, as_key(key), given)
        rule = rules.D_RTRL(as_trace_dtype(trace_dtype), signal=signal, called="OSTTP")
        rule = normalized(rule) if normalize_matrix_spectrum else rule
        super().__init__(model, rule, vjp_method=vjp_method, mark=mark, name=name)
        self.target_timing = target_timing
        if target_timing == "sequence-end":
            self.standing["target"] = jnp.zeros(size or 1)


class S_TLLR(ETraceVjpAlgorithm):
    """S-TLLR (Apolinario & Roy 2023): inputs before what goes out, and inputs after it.

        e[t] = alpha_post psi[t] sum_{s<=t} lambda_post^(t-s) x[s]
             + alpha_pre  x[t]   sum_{s<t}  lambda_pre^(t-s)  psi[s]
        gradient = sum_t dL[t]/dread e[t]

    `psi` is the derivative of what is read of a unit (its spike) by its input: the slope of the surrogate
    times `J`, where the paper takes a function of its own.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        lambda_post: float,
        lambda_pre: float,
        alpha_post: float = 1.0,
        alpha_pre: float = 1.0,
        *,
        name: str | None = None,
        vjp_method: VjpMethod | None = None,
        mark: Mark = "ops",
        trace_dtype: Any = None,
    ) -> None:
        rule = Presynaptic(
            _decay("lambda_post", lambda_post),
            before=_decay("lambda_pre", lambda_pre),
            after=float(alpha_post),
            ahead=float(alpha_pre),
            recursion=Recursion(kappa=0.0),
            called="S_TLLR",
            dtype=as_trace_dtype(trace_dtype),
        )
        super().__init__(model, rule, vjp_method=vjp_method, mark=mark, name=name)


class ThreeFactor(ETraceVjpAlgorithm):
    """Three-factor learning: the trace of `D_RTRL` times a modulator of the user's.

        gradient = sum_t m[t] trace[t]        learner(x, modulator=m)

    `m` is the signal at every state, also of a readout with memory: one number, one for each sample, or an
    array like the states (with an axis of states behind, where a unit has several). It takes the place of the
    loss's own signal; a mask of `etrace_grad` weighs it as it does the loss. `learner.modulator = m` stands
    for calls without one. Weights without a trace learn by the loss.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        name: str | None = None,
        vjp_method: VjpMethod | None = None,
        modulator: Any = None,
        fast_solve: bool = True,
        trace_dtype: Any = None,
        chunked_trace: bool = True,
        control_flow: Any = None,
        snap_max_jacobian_elements: int = 0,
        *,
        mark: Mark = "ops",
    ) -> None:
        rule = rules.D_RTRL(as_trace_dtype(trace_dtype), signal=Modulator(), called="ThreeFactor")
        config = ETraceConfig(learning_signal="modulatory")
        super().__init__(model, rule, vjp_method=vjp_method, mark=mark, name=name, config=config)
        self.modulator = modulator


def _as_tuple(matrix: Any) -> Any:
    return tuple(tuple(float(a) for a in row) for row in matrix)


def _decay(name: str, value: Any) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= float(value) < 1:
        raise ValueError(f"`{name}` is a number, at least 0 and less than 1, not {value!r}.")
    return float(value)


def _feedback(kind: str, key: Any, decay: float) -> Signal:
    if kind not in ("symmetric", "random", "adaptive"):
        raise ValueError(f"`feedback` is 'symmetric', 'random' or 'adaptive', not {kind!r}.")
    if kind == "symmetric":
        return PROPAGATED
    return Feedback(as_key(key), kind == "adaptive", _decay("feedback_decay", decay))
