"""The learner classes, a row each: the options in order, and the rule of the same name.

The published rules are four choices each: the kind of trace, its decay, the signal, the filter. They are
approximate unless the report says otherwise.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import jax.numpy as jnp

from .. import rules
from .._executor.trace_recursion import Own, Recursion
from .._types import Options
from .config import ETraceConfig
from .options import Choice, OptionsLearner, as_config
from .trace_states import EligibilityTrace


class D_RTRL(OptionsLearner):
    """Diagonal real-time recurrent learning: a trace of every weight.

        trace[t] = D[t] trace[t-1] + J[t] x[t]        gradient = sum_t <g[t], trace[t]>

    With `window=k`, `etrace_grad` back-propagates through windows of `k` steps along all paths, and traces
    summarise earlier steps; a call is a window of one step, or of the steps in `MultiStepData`. With
    `rank=r`, a correction of that rank is added: `1 + r` traces, every parameter learns through time, and
    with `r` the state size the gradient is that of BPTT. With `across='layers'`, a stack of layers whose
    traces are exact one by one has the gradient of BPTT.
    """

    takes = (
        "name vjp_method fast_solve trace_dtype chunked_trace control_flow config key "
        "max_jacobian_elements * window rank samples basis across mark normalize_matrix_spectrum"
    )

    factorization = "per_param"
    config_of_rule = ETraceConfig()

    @classmethod
    def choose(cls, options: SimpleNamespace) -> Choice:
        if options.config is not None and (options.rank or options.across):
            raise ValueError("`rank` and `across` go with the rule of `D_RTRL` itself, without a `config`.")
        return super().choose(options)

    @property
    def etrace_bwg(self) -> dict[str, EligibilityTrace]:
        """The states that hold the traces of the weights, by name."""
        return self.etrace_states


class ES_D_RTRL(OptionsLearner):
    """D-RTRL with each trace as a product of an input average and a state average.

        x'[t] = a x'[t-1] + x[t]        f'[t] = b D[t] f'[t-1] + (1 - b) J[t]
        gradient = sum_t x'[t] (g[t] f'[t]) / (1 - b^(t+1))

    Memory is linear in the number of units. `config` takes the place of `decay_or_rank`.
    """

    takes = "decay_or_rank name vjp_method fast_solve control_flow config key * window mark trace_dtype"

    factorization = "io_factorized"

    @classmethod
    def choose(cls, options: SimpleNamespace) -> Choice:
        rule = rules.ES_D_RTRL(options.decay_or_rank)
        config = ETraceConfig("io_factorized", decay=(rule.inp, rule.out))
        found = super().choose(options)
        return found if found.config else found._replace(config=config)

    @property
    def etrace_xs(self) -> dict[str, EligibilityTrace]:
        """The states that hold averages of inputs, by name."""
        return {k: st for k, st in self.traces.items() if k.endswith(":x")}

    @property
    def etrace_dfs(self) -> dict[str, EligibilityTrace]:
        """The states that hold averages of state Jacobians, by name."""
        return {k: st for k, st in self.traces.items() if ":f->" in k}


class RTRL(OptionsLearner):
    """Real-time recurrent learning: exact on any model, with marked ops or without.

        P[t] = H[t] P[t-1] + dh[t]/dw        gradient = sum_t g[t] P[t]

    Memory is, per sample, the state size times the number of parameters. In chunks
    (`etrace_grad(..., chunk_size=k)`) the numbers are the same, and `P` is updated once in `k` steps.
    """

    takes = "* mark name"


class SnAp(OptionsLearner):
    """Sparse n-step approximation of RTRL (Menick et al. 2020, arXiv:2006.07232).

        P[t] = M * (H[t] P[t-1] + dh[t]/dw)        H = dh[t]/dh[t-1], the full Jacobian

    `M` is one where an entry of a parameter acts on a state variable within `n` steps. The pattern comes from
    the structure of the step, for every parameter: sparse and grouped products, convolutions, layers. A dense
    recurrence reaches everything in two steps: then, and with `n` large enough on any model, the gradient is
    that of RTRL.

    With `n=1` it keeps a trace of every weight as `D_RTRL` does, at the same cost, which decays with the
    diagonal of `H` (`mark` and `trace_dtype` are for these traces). Parameters without a trace learn within
    the step. A unit with several states has one trace over all of them. With `n > 1`, a call is a window of
    one step, through which all paths are back-propagated, and the signal at the old state meets `P[t-1]`; in
    the paper the signal at the new state meets `P[t]`, which truncates one step earlier. A pattern of more
    than `max_jacobian_elements` entries is refused with its size. (In 0.2.6 that limit is on the blocks
    of `H`, and patterns stay within a group of states.)
    """

    takes = (
        "n name vjp_method fast_solve max_jacobian_elements * window samples mark trace_dtype "
        "chunked_trace control_flow random_feedback_key"
    )

    @classmethod
    def choose(cls, options: SimpleNamespace) -> Choice:
        n = options.n
        rule: rules.Rule = rules.SnAp(n, options.max_jacobian_elements, options.samples)
        if n == 1:
            rule = rules.D_RTRL(trace_dtype=options.trace_dtype, recursion=Recursion(Own()), called="SnAp(1)")
        return Choice(rule, ETraceConfig(recurrence_scope="sparse_n", sparse_n=n), {"n": n})


class UORO(OptionsLearner):
    """Unbiased online recurrent optimisation (Tallec and Ollivier 2017, arXiv:1702.05043).

        P ~ s theta^T,    s' = rho0 H s + rho1 nu,    theta' = theta / rho0 + (nu^T dh/dw) / rho1

    The influence of all parameters is one random product per sample, with the full Jacobian `H` and random
    signs `nu`: unbiased, for every parameter of any model, in the memory of parameters and states. A single
    run is noisy; averages over many steps or samples are not. The stream of signs continues over resets. With
    `window=k`, each window of `k` steps takes one draw: longer windows have less noise. (0.2.6 has a product
    for each group of states, and truncates paths between groups.)
    """

    takes = (
        "name vjp_method fast_solve control_flow key eps random_feedback_key "
        "snap_max_jacobian_elements * window samples mark config"
    )

    @classmethod
    def choose(cls, options: SimpleNamespace) -> Choice:
        config = options.config or ETraceConfig("random_projection", recurrence_scope="coupled")
        as_config(config, cls, "random_projection").rule()  # which checks the other axes
        return Choice(rules.UORO(options.key, options.eps, options.samples), config)


class RandomProjectionVjpAlgorithm(UORO):
    """`UORO`, with the position that 0.2.6 has for `config` among its arguments."""

    takes = (
        "name vjp_method fast_solve control_flow config key eps "
        "random_feedback_key snap_max_jacobian_elements * window samples mark"
    )


class KF_RTRL(OptionsLearner):
    """Kronecker-factored RTRL (Mujika, Meier and Steger 2018, arXiv:1805.10842).

        P ~ u (x) A,    u' = c1 p1 u + c2 p2 x,    A' = (c1 / p1) H A + (c2 / p2) dh/dy

    The influence of each product `y = x w` has two factors, with random signs `c` and the `p` of least
    variance: unbiased, with far less noise than `UORO`, in a memory of batch x state size x outputs for each
    use of a parameter. The paper has one weight matrix; here every use of every parameter has two factors of
    its own, in any model where these are products (no convolutions). In windows, they advance step by step.
    """

    takes = "name vjp_method key eps * window samples mark"


class BPTT(OptionsLearner):
    """Back-propagation through time, on any model, to compare with. It has no traces.

        gradient = d(sum_t L[t])/dw        through all steps of one gradient

    The steps of one gradient are a sequence in `etrace_grad`, elsewhere those between two updates (truncated
    BPTT). Memory grows with their number. `chunk_size` of `etrace_grad` is the number of steps whose values
    are stored; those of other chunks are computed again on the way back (`jax.checkpoint`), which saves
    memory and changes no number.
    """

    takes = "* mark name"


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


ParamDimVjpAlgorithm = D_RTRL
IODimVjpAlgorithm = pp_prop = ES_D_RTRL
