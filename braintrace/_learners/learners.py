"""The learners that users take first."""

from __future__ import annotations

from typing import Any

from .. import _rules as rules
from .config import ETraceConfig
from .options import Choice, OptionsLearner


class D_RTRL(OptionsLearner):
    """Diagonal real-time recurrent learning: a trace of every weight.

        trace[t] = D[t] trace[t-1] + J[t] x[t]        gradient = sum_t <g[t], trace[t]>

    With `window=k`, `etrace_grad` back-propagates through windows of `k` steps along all paths, and traces
    summarise earlier steps; a call is a window of one step, or of the steps in `MultiStepData`. With
    `rank=r`, a correction of that rank is kept for each sample: `1 + r` traces, every parameter learns
    through time, and with `r` the state size the gradient is that of BPTT. With `across='layers'`, a stack
    of layers whose traces are exact one by one has the gradient of BPTT.
    """

    takes = (
        "name vjp_method (fast_solve) trace_dtype (chunked_trace) (control_flow) config random_feedback_key "
        "snap_max_jacobian_elements * window rank samples basis across mark normalize_matrix_spectrum"
    )

    @classmethod
    def choose(cls, options: Any) -> Choice:
        o = options
        rule: rules.Rule = rules.D_RTRL(o.trace_dtype, o.rank, o.samples, o.basis, across=o.across)
        if o.config is not None and (o.rank or o.across):
            raise ValueError("`rank` and `across` go with the rule of `D_RTRL` itself, without a `config`.")
        return Choice(cls.configured(o, "per_param") or rule, o.config or ETraceConfig())

    @property
    def etrace_bwg(self) -> dict[str, Any]:
        """The states that hold the traces of the weights, by name."""
        return self.etrace_states


class ES_D_RTRL(OptionsLearner):
    """D-RTRL with traces as products of an input and a state average: memory linear in the units.

        x'[t] = a x'[t-1] + x[t]        f'[t] = b D[t] f'[t-1] + (1 - b) J[t]
        gradient = sum_t x'[t] (g[t] f'[t]) / (1 - b^(t+1))

    `config` takes the place of `decay_or_rank`. Options that `D_RTRL` has as well have the same effect.
    """

    takes = (
        "decay_or_rank name vjp_method (fast_solve) (control_flow) config random_feedback_key * window mark "
        "trace_dtype"
    )

    @classmethod
    def choose(cls, options: Any) -> Choice:
        rule = rules.ES_D_RTRL(options.decay_or_rank, options.trace_dtype)
        config = options.config or ETraceConfig("io_factorized", decay=(rule.inp, rule.out))
        return Choice(cls.configured(options, "io_factorized") or rule, config)

    @property
    def etrace_xs(self) -> dict[str, Any]:
        """The states that hold averages of inputs, by name."""
        return {k: st for k, st in self.traces.items() if k.endswith(":x")}

    @property
    def etrace_dfs(self) -> dict[str, Any]:
        """The states that hold averages of the state Jacobians, by name."""
        return {k: st for k, st in self.traces.items() if ":f->" in k}


class RTRL(OptionsLearner):
    """Real-time recurrent learning, exact on any model, with marked ops or without (whatever `mark` is).

        P[t] = H[t] P[t-1] + dh[t]/dw        gradient = sum_t g[t] P[t]

    Memory is, for each sample, the state size times the number of parameters. In chunks
    (`etrace_grad(..., chunk_size=k)`) the numbers are the same, and `P` is updated once in `k` steps.
    """

    takes = "* mark name"

    @classmethod
    def choose(cls, options: Any) -> Choice:
        return Choice(rules.RTRL())


ParamDimVjpAlgorithm = D_RTRL
IODimVjpAlgorithm = ES_D_RTRL
pp_prop = ES_D_RTRL
