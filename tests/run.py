"""Run a learner over a sequence as a user would, and compare gradients."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace._compat import primitives

from .oracle import bptt, loss, windows_of
from .zoo import CASES


def every(stride: int, values: Any) -> list[Any]:
    """All values; those between are outside the fast loop."""
    return [pytest.param(v, marks=pytest.mark.slow if i % stride else ()) for i, v in enumerate(values)]


def sequence(case: Any, length: int = 4, seed: int = 1) -> list[Any]:
    rng = np.random.RandomState(seed)
    return [case.x(rng) for _ in range(length)]


def as_args(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def compiled(learner: Any, x: Any) -> Any:
    with warnings.catch_warnings(action="ignore"):
        learner.compile_graph(*as_args(x))
    return learner


def online(
    learner: Any, xs: list[Any], window: int | None = None, jit: Any = brainstate.transform.jit
) -> dict[Any, Any]:
    """The summed online gradients of the losses of all steps, by parameter path."""
    params = learner.model.states(brainstate.ParamState)
    compiled(learner, xs[0])

    def one(*x: Any) -> Any:
        if not window:
            return loss(jax.tree.leaves(learner(*x)))
        outs = learner(*[braintrace.MultiStepData(a) for a in x])
        return jnp.sum(jax.vmap(lambda o: loss(jax.tree.leaves(o)))(outs))

    step = jit(lambda *x: brainstate.transform.grad(lambda: one(*x), params)())
    chunks = [as_args(x) for x in xs]
    if window:
        chunks = [
            tuple(jax.tree.map(lambda *a: np.stack(a), *parts) for parts in zip(*chunk, strict=True))
            for chunk in windows_of(chunks, window)
        ]
    total: Any = None
    for chunk in chunks:
        grads = jax.tree.map(np.asarray, step(*chunk))
        total = grads if total is None else jax.tree.map(np.add, total, grads)
    return {tuple(map(str, k)): v for k, v in total.items()}


@cache
def by_d_rtrl(name: str) -> tuple[Any, dict[Any, Any]]:
    """The graph of a model of the zoo, and its gradient by D-RTRL."""
    case = CASES[name]
    learner = braintrace.D_RTRL(case.build())
    grads = online(learner, sequence(case))
    return learner.graph, grads


@cache
def by_bptt(name: str) -> dict[Any, Any]:
    """The gradient of a model of the zoo through time."""
    case, xs = CASES[name], sequence(CASES[name])
    with warnings.catch_warnings(action="ignore"):
        graph = braintrace.compile_etrace_graph(case.build(), *as_args(xs[0]))
    return bptt(case.build(), xs, forward=loops_forever(graph))


def loops_forever(graph: Any) -> bool:
    return any(n.primitive is primitives.while_p for n in graph.module_info.program.nodes)


def difference(a: dict[Any, Any], b: dict[Any, Any]) -> dict[Any, float]:
    """The largest difference of each parameter's gradient, relative to its largest entry."""
    result = {}
    for path, value in a.items():
        pairs = list(zip(*(map(np.asarray, jax.tree.leaves(v)) for v in (value, b[path])), strict=True))
        scale = max([float(np.max(np.abs(x), initial=0.0)) for x, _ in pairs] + [1e-8])
        result[path] = max(float(np.max(np.abs(x - y), initial=0.0)) for x, y in pairs) / scale
    return result


def agree(a: dict[Any, Any], b: dict[Any, Any], tolerance: float) -> bool:
    found = difference(a, b)
    assert found, "no parameter to compare"
    return all(np.isfinite(d) and d < tolerance for d in found.values())
