"""The learners that users hold."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import brainstate
import jax.numpy as jnp

from .. import _rules as rules
from .._frontends.modules import Mark
from .._rules.bounds import Normalized
from .._rules.snap import MOST
from .config import ETraceConfig
from .vjp import ETraceVjpAlgorithm, VjpMethod


class D_RTRL(ETraceVjpAlgorithm):
    """Diagonal real-time recurrent learning: a trace of every weight.

        trace[t] = D[t] trace[t-1] + J[t] x[t]        gradient = sum_t <g[t], trace[t]>

    With `window=k`, `etrace_grad` back-propagates through windows of `k` steps along all paths, and traces
    stand for what came before; a call is a window of one step, or of the steps in `MultiStepData`
    (`vjp_method='multi-step'`, which `window` implies). With `rank=r`, what traces leave out is kept as well,
    in `r` directions for each sample: `1 + r` traces, every parameter learns through time, and with as many
    directions as numbers carried the gradient is that of BPTT. `samples` is the axis of the states along
    which samples lie ('auto': it is found; None: all is one sample); `power=1` turns the directions to what
    is strong, at about twice the cost: it pays where many of them decay alike, as in spiking nets. With
    `across='layers'`, the influence of each weight on the states of the layers above is kept densely, for
    each sample: a stack of layers whose traces are exact one by one has the gradient of BPTT. With
    `mark='auto'`, a model needs no marked ops: a mark is set wherever a parameter enters by an operation that
    can have one. `trace_dtype` is what traces are stored in (None: what they are computed in). `config`
    chooses another rule with a trace of every weight, as an `ETraceConfig`: `random_feedback_key` is for its
    matrices, `snap_max_jacobian_elements` bounds the size of its pattern. With `normalize_matrix_spectrum`,
    as in 0.2.0, `D` is divided by its spectral radius, and what a step adds and the trace by their largest
    number, each where that is above one. `fast_solve`, `chunked_trace` and `control_flow` are accepted and
    have no effect: code written for 0.2.x chose a code path by them.
    """

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
        window: int | None = None,
        rank: int = 0,
        samples: int | Literal["auto"] | None = "auto",
        power: int = 0,
        across: Literal["layers"] | None = None,
        mark: Mark = "ops",
        normalize_matrix_spectrum: bool = False,
    ) -> None:
        dtype = as_trace_dtype(trace_dtype)
        rule: rules.Rule = rules.D_RTRL(dtype, rank, samples, power, across=across)
        if config is not None:
            if rank or across:
                raise ValueError(
                    "`rank` and `across` go with the rule of `D_RTRL` itself, without a `config`."
                )
            rule = as_config(config, type(self), "per_param").rule(
                random_feedback_key, dtype, snap_max_jacobian_elements
            )
        super().__init__(
            model,
            normalized(rule) if normalize_matrix_spectrum else rule,
            vjp_method=vjp_method,
            window=window,
            mark=mark,
            name=name,
            config=config or ETraceConfig(),
        )

    @property
    def etrace_bwg(self) -> dict[str, Any]:
        """The states that hold the traces of the weights, by name."""
        return self.etrace_states


class ES_D_RTRL(ETraceVjpAlgorithm):
    """D-RTRL with traces as products of an input and a state average: memory linear in the units.

    `decay_or_rank` is the decay of the averages, in [0, 1), or an integer rank `r` for `(r - 1) / (r + 1)`; a
    pair is of the inputs and of the states. `config` says more, and takes its place. The other options are
    those of `D_RTRL`.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        decay_or_rank: Any = 0.9,
        name: str | None = None,
        vjp_method: VjpMethod | None = None,
        fast_solve: bool = True,
        control_flow: Any = None,
        config: ETraceConfig | None = None,
        random_feedback_key: Any = None,
        *,
        window: int | None = None,
        mark: Mark = "ops",
        trace_dtype: Any = None,
    ) -> None:
        dtype = as_trace_dtype(trace_dtype)
        plain = rules.ES_D_RTRL(decay_or_rank, dtype)
        rule: rules.Rule = plain
        if config is not None:
            rule = as_config(config, type(self), "io_factorized").rule(random_feedback_key, dtype)
        config = config or ETraceConfig("io_factorized", decay=(plain.inp, plain.out))
        super().__init__(
            model, rule, vjp_method=vjp_method, window=window, mark=mark, name=name, config=config
        )

    @property
    def etrace_xs(self) -> dict[str, Any]:
        """The states that hold averages of inputs, by name."""
        return {k: st for k, st in self.traces.items() if k.endswith(":x")}

    @property
    def etrace_dfs(self) -> dict[str, Any]:
        """The states that hold averages of what an op's output does to the hidden states, by name."""
        return {k: st for k, st in self.traces.items() if ":f->" in k}


class RTRL(ETraceVjpAlgorithm):
    """Real-time recurrent learning, exact on any model, with marked ops or without (whatever `mark` is).

    Memory is, for each sample, the numbers that it carries times the number of parameters. In chunks
    (`etrace_grad(..., chunk_size=k)`) the numbers are the same, and that is touched once in `k` steps.
    """

    def __init__(self, model: brainstate.nn.Module, *, mark: Mark = "ops", name: str | None = None) -> None:
        super().__init__(model, rules.RTRL(), mark=mark, name=name)


def as_trace_dtype(dtype: Any) -> Any:
    """A type for numbers that are averaged: of floating or complex numbers."""
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.inexact):
        raise TypeError(
            f"`trace_dtype` is a type of floating numbers, such as `jnp.bfloat16`, not {dtype!r}."
        )
    return found


def normalized(rule: Any) -> Any:
    """The rule with its traces, and what they advance by, divided by what is above one."""
    if not isinstance(rule, rules.D_RTRL):
        raise ValueError("`normalize_matrix_spectrum` is for rules with a trace of every weight.")
    return dataclasses.replace(rule, bound=Normalized())


def as_config(config: Any, learner: type, factorization: str) -> ETraceConfig:
    """A config that a learner can take."""
    if not isinstance(config, ETraceConfig):
        raise TypeError(f"`config` is a `braintrace.ETraceConfig`, not {config!r}.")
    return config.check_for(learner.__name__, factorization)


ParamDimVjpAlgorithm = D_RTRL
IODimVjpAlgorithm = ES_D_RTRL
pp_prop = ES_D_RTRL
