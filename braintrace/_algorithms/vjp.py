"""Learners whose gradient comes from a derivative rule around the step.

One call is one function with a derivative rule of its own. Its pull-back takes the cotangents of the
outputs and new states, gets the learning signals and the within-step gradients from one `vjp`, and adds
what the traces make of the signals. The incoming states and traces get no gradient: the losses of several
calls add up, and nothing is counted twice.
"""

from __future__ import annotations

from typing import Any

import brainstate
import jax

from .._executor.executor import ETraceGraphExecutor, Local, StepInputs, pull_back
from .base import Compiled, ETraceAlgorithm, _one_step
from .data import MultiStepData
from .rule import Gradients, Rule, Signals, Values, add_to


class ETraceVjpAlgorithm(ETraceAlgorithm):
    """A learner with a `Rule`."""

    def __init__(self, model: brainstate.nn.Module, rule: Rule, *, name: str | None = None) -> None:
        super().__init__(model, name=name)
        self.rule = rule

    def _initial_values(self, compiled: Compiled) -> Values:
        executor = compiled.executor
        info = executor.graph.module_info

        def probe(inputs: list[Any]) -> Values:
            known = dict(zip(info.program.inputs, inputs, strict=True))
            given = StepInputs(
                args=[known[v] for v in info.arg_invars],
                consts=list(info.program.consts.values()),
                states=[[known[v] for v in e.invars] for e in info.entries],
            )
            _, _, env, operands = executor.forward(given)
            return self.rule.init(executor.traces, executor.local(env, operands))

        structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in info.program.inputs]
        shapes = jax.eval_shape(probe, structs)
        return jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), shapes)  # type: ignore[no-any-return]

    def update(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, MultiStepData) for a in (*args, *kwargs.values())):
            raise ValueError(
                "This learner takes one step at a time (`vjp_method='single-step'`); `MultiStepData` is for "
                "`vjp_method='multi-step'`."
            )
        args, kwargs = _one_step(args, kwargs)
        compiled = self._lookup(args, kwargs)
        info = compiled.graph.module_info
        from .._compiler.module_info import split_static

        data = split_static(args, kwargs)[0]
        consts = info.retrace(*args, **kwargs)
        leaves = self._read(compiled)
        params = [x for e, xs in zip(info.entries, leaves, strict=True) if e.is_param for x in xs]
        rest = [xs for e, xs in zip(info.entries, leaves, strict=True) if not e.is_param]
        traces = {k: st.value for k, st in self.traces.items()}
        step = single_step(compiled.executor, self.rule)
        outs, new, traces = step(params, data, consts, rest, traces)
        self._write(compiled, new)
        for key, value in traces.items():
            self.traces[key].value = value
        self.steps.value = self.steps.value + 1
        return jax.tree.unflatten(info.out_tree, outs)


def single_step(executor: ETraceGraphExecutor, rule: Rule) -> Any:
    """One step as a function with the online gradient as its derivative.

    `step(params, args, consts, states, traces) -> outputs, new states, new traces`.
    """
    info, traces = executor.graph.module_info, executor.traces

    def inputs(params: list[Any], args: list[Any], consts: list[Any], rest: list[list[Any]]) -> StepInputs:
        given, others = iter(params), iter(rest)
        states = [[next(given) for _ in e.invars] if e.is_param else next(others) for e in info.entries]
        return StepInputs(args, consts, states)

    def carried(states: list[list[Any]]) -> list[list[Any]]:
        return [xs for e, xs in zip(info.entries, states, strict=True) if not e.is_param]

    def advance(params: Any, args: Any, consts: Any, rest: Any, values: Values) -> tuple[Any, Values, Local]:
        outs, states, env, operands = executor.forward(inputs(params, args, consts, rest))
        local = executor.local(env, operands)
        return (outs, carried(states)), rule.update(traces, values, local), local

    @jax.custom_vjp
    def step(params: Any, args: Any, consts: Any, rest: Any, values: Values) -> Any:
        (outs, new), values, _ = advance(params, args, consts, rest, values)
        return outs, new, values

    def forward(params: Any, args: Any, consts: Any, rest: Any, values: Values) -> Any:
        (outs, new), values, local = advance(params, args, consts, rest, values)

        def differentiable(params: Any, args: Any, consts: Any, deltas: Any) -> list[Any]:
            outs, states = executor.signals(inputs(params, args, consts, rest), deltas)
            return [*outs, *(x for xs in carried(states) for x in xs)]

        _, pull = pull_back(differentiable, params, args, consts, executor.zero_deltas())
        kept = (local.inputs, local.weights, local.J if _any_partial(executor) else None)
        return (outs, new, values), (pull, values, kept, params, consts)

    def backward(residuals: Any, cotangents: Any) -> Any:
        pull, values, (site_inputs, weights, J), params, consts = residuals
        outs, new, _ = cotangents
        dparams, dargs, dconsts, deltas = pull([*outs, *(x for xs in new for x in xs)])
        local = Local(site_inputs, weights, {}, J or {})
        signals = executor.group_signals(deltas)
        grads = rule.gradient(traces, values, signals, local)
        for key, value in _instant_part(executor, signals, local).items():
            grads[key] = grads[key] - value
        dparams = _add(dparams, to_parameters(executor, params, consts, grads))
        return dparams, dargs, dconsts, None, None

    step.defvjp(forward, backward)
    return step


def _any_partial(executor: ETraceGraphExecutor) -> bool:
    return not all(t.positions.complete for t in executor.traces)


def _instant_part(executor: ETraceGraphExecutor, signals: Signals, local: Local) -> Gradients:
    """Where a trace leaves paths out, the weight is live within the step: count its part there once."""
    grads: Gradients = {}
    for trace in executor.traces:
        if not trace.positions.complete:
            site = trace.relation.site.index
            inputs, weight = local.inputs[site], local.weights[site][trace.name]
            g = trace.to_site(signals[trace.group.index], 1)
            dy = trace.to_y((g * local.J[site, trace.group.index]).sum(0))
            add_to(grads, trace, trace.from_cotangent(trace.factor(inputs), dy, inputs, weight))
    return grads


def to_parameters(
    executor: ETraceGraphExecutor, params: list[Any], consts: list[Any], grads: Gradients
) -> list[Any]:
    """Gradients of effective weights carried back to the parameters."""
    info = executor.graph.module_info
    keys = [(t.relation.site.index, t.name) for t in executor.traces]
    shown = {(t.relation.site.index, t.name): t for t in executor.traces}
    keys = list(dict.fromkeys(keys))

    def weights(params: list[Any]) -> list[Any]:
        known = dict(zip((v for e in info.params for v in e.invars), params, strict=True))
        known.update(zip(info.program.consts, consts, strict=True))
        effective = executor.weights(known)
        return [effective[site][name] for site, name in keys]

    values, pull = pull_back(weights, params)
    cotangents = [shown[k].unview(grads[k], v) for k, v in zip(keys, values, strict=True)]
    return pull(cotangents)[0]  # type: ignore[no-any-return]


def _add(a: list[Any], b: list[Any]) -> list[Any]:
    return [y if x is None else x if y is None else x + y for x, y in zip(a, b, strict=True)]
