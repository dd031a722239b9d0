"""RTRL: the whole influence of every parameter on every carried number. Exact, for small models.

    P[t] = dh[t]/dh[t-1] P[t-1] + dh[t]/dw        gradient = dL/dw within the window + dL/dh[start] P[start]

A window may be one step or many; the numbers are the same. A longer one saves a product of `P` with a square
matrix at every step.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from .._compiler.exactness import RuleKind
from .._compiler.slices import has_while
from .._compiler.step import name_of
from .._executor.executor import ETraceGraphExecutor, Leaves, is_inexact
from .._executor.spread import Spec
from .._executor.window import Window, where_rows
from .rule import Rule, Values


@dataclass(frozen=True)
class RTRL(Rule):
    """The influence of every number of every parameter on every number that is carried."""

    def kind(self, windows: bool) -> RuleKind:
        return RuleKind("RTRL", whole=True)

    def start(self, executor: ETraceGraphExecutor) -> Values:
        size = sum(_real_size(v.aval) for v in _carried(executor))
        types = [v.aval.dtype for v in _carried(executor) if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
        return {
            name: jnp.zeros((size, *_real_shape(a)), _real_type(a.dtype, *types))
            for name, a in _named_params(executor).items()
        }

    def spread(self, executor: ETraceGraphExecutor, shapes: Values) -> dict[str, Spec]:
        at = executor.spread
        assert at is not None
        live = [k and is_inexact(v.aval) for v, k in zip(_fixed(executor), _learned(executor), strict=True)]
        specs = [at.of_leaf(i) for i, k in enumerate(live) if k]
        lacking = [len(s.shape) - len(spec or ()) for s, spec in zip(shapes.values(), specs, strict=True)]
        pairs = zip(shapes, specs, lacking, strict=True)  # numbers, and the parts of complex ones, in front
        return {name: (*[None] * n, *spec) for name, spec, n in pairs if spec is not None}

    def advance(self, executor: ETraceGraphExecutor, values: Values, window: Window) -> Values:
        learned = _learned(executor)
        at, restore = _real([p for p, k in zip(window.params, learned, strict=True) if k])
        before = jax.tree.map(lambda a: a[0], window.before)
        if window.keep is not None:  # what begins anew there is no function of the state before
            values = self.forget(executor, values, ~window.keep[0])
        leaves, tree = jax.tree.flatten(before)
        start, rebuild = _real(leaves)

        def end(h: Any, w: Any) -> Any:
            now = iter(restore(w))
            params = [next(now) if k else p for p, k in zip(window.params, learned, strict=True)]
            return _real(jax.tree.leaves(window.end(params, jax.tree.unflatten(tree, rebuild(h)))))[0]

        # a `while` loop has no reverse mode
        forward_only = any(has_while(n) for n in executor.info.program.nodes)
        by_state, by_param = (jax.jacfwd if forward_only else jax.jacrev)(end, (0, 1))(start, at)
        sizes = [math.prod(_real_shape(a)) for a in _named_params(executor).values()]
        split = jnp.split(by_param, list(itertools.accumulate(sizes))[:-1], axis=1) if values else []
        return {
            name: (_carry(by_state, old) + part.reshape(old.shape)).astype(old.dtype)
            for name, part in zip(_named_params(executor), split, strict=True)
            for old in [values[name]]
        }

    def past(self, executor: ETraceGraphExecutor, values: Values, signals: Leaves, window: Window) -> Leaves:
        before = jax.tree.leaves(window.before)
        pairs = [(d, x) for d, x in zip(signals, before, strict=True) if d is not None]
        signal = jnp.concatenate([_real_cotangent(d, x) for d, x in pairs])
        found = iter([_carry(signal, values[name]) for name in _named_params(executor)])
        live = [k and is_inexact(p) for p, k in zip(window.params, _learned(executor), strict=True)]
        return [_cotangent(next(found), p) if k else None for p, k in zip(window.params, live, strict=True)]

    def forget(self, executor: ETraceGraphExecutor, values: Values, rows: Any) -> Values:
        parts = []
        for v in _carried(executor):
            is_sampled = v.aval.shape[:1] == rows.shape
            of = rows if is_sampled else jnp.zeros(1, bool)
            count = _real_size(v.aval)  # a complex number is its two parts, which stand in front
            halves = 2 if jnp.issubdtype(v.aval.dtype, jnp.complexfloating) else 1
            shape = (halves, len(of), count // (halves * len(of)))
            parts.append(jnp.broadcast_to(of.reshape(1, -1, 1), shape).ravel())
        gone = jnp.concatenate(parts)
        return {k: where_rows(gone, jnp.zeros_like(p), p) for k, p in values.items()}


def _carried(executor: ETraceGraphExecutor) -> list[Any]:
    return [v for e in executor.info.carried for v in e.invars]


def _fixed(executor: ETraceGraphExecutor) -> list[Any]:
    return [v for e in executor.info.fixed for v in e.invars]


def _learned(executor: ETraceGraphExecutor) -> list[bool]:
    """Of each fixed leaf, whether it is a parameter's."""
    return [e.is_param for e in executor.info.fixed for _ in e.invars]


def _named_params(executor: ETraceGraphExecutor) -> dict[str, Any]:
    """The inexact leaves of the parameters, by stable names."""
    return {
        f"{name_of(e.path)}:{i}": v.aval
        for e in executor.info.params
        for i, v in enumerate(e.invars)
        if jnp.issubdtype(v.aval.dtype, jnp.inexact)
    }


def _carry(by_state: Any, influence: Any) -> Any:
    """`by_state @ influence`, whatever `by_state` says of a state that nothing has reached yet."""
    reached = jnp.any(influence != 0, axis=tuple(range(1, influence.ndim)))
    reached = jnp.broadcast_to(reached.reshape([1] * (by_state.ndim - 1) + [-1]), by_state.shape)
    return jnp.tensordot(jnp.where(reached, by_state, 0), influence.astype(by_state.dtype), 1)


def _real_leaves(leaves: Leaves) -> Leaves:
    """The inexact leaves as real arrays; a complex one as its two parts."""
    return [
        jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x
        for x in map(jnp.asarray, leaves)
        if is_inexact(x)
    ]


def _real(leaves: Leaves) -> tuple[Any, Any]:
    """The inexact leaves as one real vector, and the way back."""
    flat, unravel = ravel_pytree(_real_leaves(leaves))

    def restore(vector: Any) -> Leaves:
        parts = iter(unravel(vector))
        result = []
        for leaf in leaves:
            if not is_inexact(leaf):
                result.append(leaf)
            elif jnp.iscomplexobj(leaf):
                re, im = next(parts)
                result.append((re + 1j * im).astype(leaf.dtype))
            else:
                result.append(next(parts).astype(leaf.dtype))
        return result

    return flat, restore


def _real_cotangent(d: Any, x: Any) -> Any:
    """A cotangent as JAX gives it, as one of the real vector: of `a + ib` it is `da - i db`."""
    if not jnp.iscomplexobj(x):
        return d.ravel()
    return jnp.stack([d.real, -d.imag]).ravel()


def _cotangent(real: Any, like: Any) -> Any:
    return (real[0] - 1j * real[1]).astype(like.dtype) if jnp.iscomplexobj(like) else real.astype(like.dtype)


def _real_shape(aval: Any) -> tuple[int, ...]:
    return (2, *aval.shape) if jnp.issubdtype(aval.dtype, jnp.complexfloating) else tuple(aval.shape)


def _real_type(*types: Any) -> Any:
    """The type of real numbers that holds all of them."""
    with jax.numpy_dtype_promotion("standard"):  # parameters may be of fewer bits than what is carried
        return jnp.finfo(jnp.result_type(*types)).dtype


def _real_size(aval: Any) -> int:
    return math.prod(_real_shape(aval)) if jnp.issubdtype(aval.dtype, jnp.inexact) else 0
