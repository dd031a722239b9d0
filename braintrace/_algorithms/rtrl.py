"""RTRL: the whole influence of every parameter on every carried number. Exact, for small models.

    P[t] = dh[t]/dh[t-1] P[t-1] + dh[t]/dw        gradient = dL/dw within the call + dL/dh[start] P[start]

A call may span one step or a window of steps; the numbers are the same. A window back-propagates through
its steps and advances `P` once, which saves a product of `P` with a square matrix at every step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from .._compiler import ETraceGraph
from .._compiler.diagnostics import DiagnosticKind
from .._compiler.exactness import RuleKind
from .._compiler.graph import graph_from_info, warn_of
from .._compiler.module_info import extract_module_info
from .._compiler.slices import has_while
from .._executor.executor import StepInputs, is_inexact, pull_back
from .base import ETraceAlgorithm
from .forms import Compiled
from .rule import Values

Leaves = list[Any]


class RTRL(ETraceAlgorithm):
    """Real-time recurrent learning, exact on any model, with marked ops or without.

    Memory is the number of carried numbers times the number of parameters.
    """

    rule_kind = RuleKind("RTRL", whole=True)

    def _compile(self, args: Any, kwargs: Any) -> ETraceGraph:
        graph = graph_from_info(extract_module_info(self.model, *args, **kwargs))
        warn_of(graph, [DiagnosticKind.RULE_NOT_LINEAR])
        return graph

    def _initial_values(self, compiled: Compiled) -> Values:
        info = compiled.graph.module_info
        size = sum(_real_size(v.aval) for e in compiled.carried for v in e.invars)
        return {
            f"{'.'.join(e.path)}:{i}": jnp.zeros((size, *_real_shape(v.aval)), _real_dtype(v.aval))
            for e in info.params
            for i, v in enumerate(e.invars)
            if jnp.issubdtype(v.aval.dtype, jnp.inexact)
        }

    def _step(self, compiled: Compiled, args: list[Any], consts: list[Any]) -> list[Any]:
        outs = self._window(
            compiled, [a[None] for a in map(jnp.asarray, args)], [True] * len(args), 1, consts
        )
        return [o[0] for o in outs]

    def _window(
        self, compiled: Compiled, args: list[Any], stepped: list[bool], length: int, consts: list[Any]
    ) -> list[Any]:
        params, rest = self._read(compiled.graph.module_info)
        flow = _Flow(compiled, stepped, length)
        outs, new, values = flow.call(params, args, consts, rest, self._values())
        self._write(compiled, new, values, length)
        return list(outs)


class _Flow:
    """A window of steps and its influence, as a function with the exact gradient as its derivative."""

    def __init__(self, compiled: Compiled, stepped: list[bool], length: int) -> None:
        self.executor, self.stepped, self.length = compiled.executor, stepped, length
        self.info = compiled.graph.module_info
        self.forward_only = any(has_while(n) for n in self.info.program.nodes)

    def run(
        self, params: Leaves, args: Leaves, consts: Leaves, rest: list[Leaves]
    ) -> tuple[Leaves, list[Leaves]]:
        def body(rest: list[Leaves], slices: Leaves) -> Any:
            now, given, others = iter(slices), iter(params), iter(rest)
            one = [next(now) if s else a for a, s in zip(args, self.stepped, strict=True)]
            states = [
                [next(given) for _ in e.invars] if e.is_param else next(others) for e in self.info.entries
            ]
            outs, new, _, _ = self.executor.forward(StepInputs(one, consts, states))
            return [xs for e, xs in zip(self.info.entries, new, strict=True) if not e.is_param], outs

        moving = [a for a, s in zip(args, self.stepped, strict=True) if s]
        new, outs = jax.lax.scan(body, rest, moving, length=self.length)
        return outs, new

    def advance(self, params: Leaves, args: Leaves, consts: Leaves, rest: Any, values: Values) -> Values:
        """The influence after the window."""
        at, restore = _real(params)
        start, rebuild = _real([x for xs in rest for x in xs])

        def end(h: Any, w: Any) -> Any:
            leaves = iter(rebuild(h))
            given = [[next(leaves) for _ in xs] for xs in rest]
            _, new = self.run(restore(w), args, consts, given)
            return _real([x for xs in new for x in xs])[0]

        jacobian = jax.jacfwd if self.forward_only else jax.jacrev
        by_state, by_param = jacobian(end, (0, 1))(start, at)
        sizes = [v.size for v in _real_leaves(params)]
        names = self._names()
        split = jnp.split(by_param, list(_running(sizes))[:-1], axis=1) if names else []
        return {
            name: _carry(by_state, values[name]) + part.reshape(values[name].shape)
            for name, part in zip(names, split, strict=True)
        }

    def call(self, params: Leaves, args: Leaves, consts: Leaves, rest: list[Leaves], values: Values) -> Any:
        @jax.custom_vjp
        def call(params: Any, args: Any, consts: Any, rest: Any, values: Any) -> Any:
            return *self.run(params, args, consts, rest), self.advance(params, args, consts, rest, values)

        def forward(params: Any, args: Any, consts: Any, rest: Any, values: Any) -> Any:
            def flat(params: Leaves, args: Leaves, consts: Leaves, leaves: Leaves) -> Leaves:
                items = iter(leaves)
                outs, new = self.run(params, args, consts, [[next(items) for _ in xs] for xs in rest])
                return [*outs, *(x for xs in new for x in xs)]

            _, pull = pull_back(flat, params, args, consts, [x for xs in rest for x in xs])
            return call(params, args, consts, rest, values), (pull, values, rest)

        def backward(residuals: Any, cotangents: Any) -> Any:
            pull, values, rest = residuals
            outs, new, _ = cotangents
            dparams, dargs, dconsts, dstart = pull([*outs, *(x for xs in new for x in xs)])
            signal = jnp.concatenate(
                [
                    _real_cotangent(d, x)
                    for d, x in zip(dstart, (x for xs in rest for x in xs), strict=True)
                    if d is not None
                ]
            )
            past = iter([_carry(signal, values[name]) for name in self._names()])
            dparams = [None if d is None else d + _cotangent(next(past), d) for d in dparams]
            return dparams, dargs, dconsts, None, None

        call.defvjp(forward, backward)
        return call(params, args, consts, rest, values)

    def _names(self) -> list[str]:
        return [
            f"{'.'.join(e.path)}:{i}"
            for e in self.info.params
            for i, v in enumerate(e.invars)
            if jnp.issubdtype(v.aval.dtype, jnp.inexact)
        ]


def _carry(by_state: Any, influence: Any) -> Any:
    """`by_state @ influence`, whatever `by_state` says of a state that nothing has reached yet."""
    reached = jnp.any(influence != 0, axis=tuple(range(1, influence.ndim)))
    reached = jnp.broadcast_to(reached.reshape([1] * (by_state.ndim - 1) + [-1]), by_state.shape)
    return jnp.tensordot(jnp.where(reached, by_state, 0), influence, 1)


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


def _real_size(aval: Any) -> int:
    size = 1
    for n in _real_shape(aval):
        size *= n
    return size if jnp.issubdtype(aval.dtype, jnp.inexact) else 0


def _real_dtype(aval: Any) -> Any:
    return jnp.finfo(aval.dtype).dtype


def _running(sizes: list[int]) -> Any:
    total = 0
    for n in sizes:
        total += n
        yield total
