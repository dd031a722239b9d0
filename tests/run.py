"""Run a learner over a sequence as a user would, and compare gradients."""

from __future__ import annotations

import re
import warnings
import zlib
from functools import cache, lru_cache
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace._compat import primitives
from braintrace._frontends.pure import Pure

from .oracle import Brute, bptt, loss, windows_of
from .zoo import CASES


def digest(value: Any) -> int:
    """Return a hash of a case, which does not depend on its position in a list."""
    return zlib.crc32(re.sub(" at 0x[0-9a-f]+", "", repr(value)).encode())


def some(stride: int, values: Any) -> list[Any]:
    """Return about one of `stride` values, chosen by their hashes, and at least one."""
    values = list(values)
    numbers = [digest(v) for v in values]
    return [v for v, n in zip(values, numbers, strict=True) if n % stride == 0 or n == min(numbers)]


def every(stride: int, values: Any) -> list[Any]:
    """Return all values as parameters of a test; one of `stride`, those with the least hashes, is fast."""
    values = list(values)
    fast = set(sorted(map(digest, values))[: -(-len(values) // stride)])
    marks = [() if digest(v) in fast else pytest.mark.slow for v in values]
    return [
        pytest.param(*v if isinstance(v, tuple) else [v], marks=mark)
        for v, mark in zip(values, marks, strict=True)
    ]


def sequence(case: Any, length: int = 4, seed: int = 1) -> list[Any]:
    rng = np.random.RandomState(seed)
    return [case.x(rng) for _ in range(length)]


def as_args(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def compiled(learner: Any, x: Any) -> Any:
    with warnings.catch_warnings(action="ignore"):
        learner.compile_graph(*as_args(x))
    return learner


def online(learner: Any, xs: list[Any], window: int | None = None, transform: Any = None) -> dict[Any, Any]:
    """Return the sum of the online gradients of all steps, by parameter path.

    `transform` makes a gradient function of a loss: `by_brainstate` as users do, which compiles slowly.
    """
    params = learner.model.states(brainstate.ParamState)
    compiled(learner, xs[0])

    def one(*x: Any) -> Any:
        if not window:
            return loss(jax.tree.leaves(learner(*x)))
        outs = learner(*[braintrace.MultiStepData(a) for a in x])
        return jnp.sum(jax.vmap(lambda o: loss(jax.tree.leaves(o)))(outs))

    step = (transform or by_jax)(one, params)
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


def in_one_pass(learner: Any, xs: list[Any], prepare: Any = None, **options: Any) -> dict[Any, Any]:
    """The gradient over the whole sequence, in one backward pass; `prepare(learner)` is called first."""
    compiled(learner, xs[0])
    if prepare is not None:
        prepare(learner)
    stacked = [jax.tree.map(lambda *a: jnp.stack(a), *parts) for parts in zip(*map(as_args, xs), strict=True)]
    step = lambda *x: loss(jax.tree.leaves(learner(*x)))
    grads = learner.etrace_grad(*stacked, step_fn=step, reduction="sum", **options)
    return {tuple(map(str, k)): jax.tree.map(np.asarray, v) for k, v in grads.items()}


def by_brainstate(one: Any, params: Any) -> Any:
    return brainstate.transform.jit(lambda *x: brainstate.transform.grad(lambda: one(*x), params)())


def by_jax(one: Any, params: Any) -> Any:
    """Return the gradient function of a loss that is traced once, as a pure function of its states."""

    @cache
    def of(tree: Any, shapes: Any) -> Any:
        pure = Pure.trace(one, *jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(*s) for s in shapes]))
        learned = [i for i, st in enumerate(pure.states) if any(st is p for p in params.values())]

        def total(given: dict[int, Any], values: Any, *x: Any) -> Any:
            return pure([given.get(i, v) for i, v in enumerate(values)], *x)

        return pure, learned, jax.jit(jax.grad(total, has_aux=True))

    def step(*x: Any) -> dict[Any, Any]:
        leaves, tree = jax.tree.flatten(x)
        pure, learned, gradient = of(tree, tuple((np.shape(a), a.dtype) for a in leaves))
        values = pure.values()
        grads, new = gradient({i: values[i] for i in learned}, values, *x)
        pure.assign(new)
        found = {id(pure.states[i]): jax.tree.unflatten(pure.trees[i], grads[i]) for i in learned}
        zeros = lambda p: jax.tree.map(jnp.zeros_like, p.value)
        return {k: found[id(p)] if id(p) in found else zeros(p) for k, p in params.items()}

    return step


@cache
def by_d_rtrl(name: str) -> tuple[Any, dict[Any, Any]]:
    """Return the graph of a model of the zoo, and its gradient by D-RTRL."""
    case = CASES[name]
    learner = braintrace.D_RTRL(case.build())
    transform = by_brainstate if digest(name) % 16 == 0 else by_jax
    grads = online(learner, sequence(case), transform=transform)
    return learner.graph, grads


@cache
def graph_of(name: str) -> Any:
    """The compiled graph of a model of the zoo, which is the same for every rule."""
    case = CASES[name]
    with warnings.catch_warnings(action="ignore"):
        return braintrace.compile_etrace_graph(case.build(), *as_args(sequence(case, 1)[0]))


@cache
def by_bptt(name: str, length: int = 4) -> dict[Any, Any]:
    """The gradient of a model of the zoo through time."""
    case, xs = CASES[name], sequence(CASES[name], length)
    return bptt(case.build(), xs, forward=loops_forever(graph_of(name)))


@lru_cache(maxsize=8)  # tests of a model run one after the other
def brute_force(name: str) -> Brute:
    """The definitions of the rules on a model of the zoo; its programs are compiled once for all tests."""
    case = CASES[name]
    return Brute(case.build(), sequence(case, 1)[0], graph_of(name))


def is_flat(graph: Any) -> bool:
    """Whether brute force can follow every site: none is inside control flow."""
    return not any(s.context for s in graph.module_info.program.sites)


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
