"""Functions with a derivative rule of their own: what their derivative reaches, which the rule alone decides.

The pull-back of such a function is a program like any other, from the cotangents of its outputs to those of
its inputs. Where a cotangent of an input comes from in it is what the input reaches.

Every online rule adds up what the losses of single steps send back, and so takes pull-backs to be linear.
That of a `custom_vjp` need not be: it may clip. Most are linear by their form; others are tried on numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._compat import Literal, primitives
from .dataflow import Flow, solve
from .evaluation import View, evaluate
from .primitives import IN_ALL_OPERANDS, IN_FIRST_OPERAND, IN_ONE_OPERAND
from .program import Atom, Node, Program, Var, is_inexact, read_program
from .slices import plain_site


@dataclass(frozen=True, eq=False)
class PullBack:
    """The pull-back of one node."""

    program: Program
    cotangents: dict[int, Var]  # of outputs, by number: inputs of the program
    results: dict[int, Any]  # of inputs, by number: outputs of the program

    @staticmethod
    def of(node: Node) -> PullBack | None:
        """Traced once, with the node's shapes; None if it has no reverse mode."""
        if node not in _traced:
            _traced[node] = PullBack._trace(node)
        return _traced[node]

    @staticmethod
    def _trace(node: Node) -> PullBack | None:
        live = [i for i, a in enumerate(node.inputs) if is_inexact(a)]
        outs = [j for j, v in enumerate(node.outputs) if is_inexact(v)]

        def pull(given: list[Any], cotangents: list[Any]) -> Any:
            def function(*some: Any) -> list[Any]:
                now = dict(zip(live, some, strict=True))
                found = _compat.bind(node.eqn, *(now.get(i, x) for i, x in enumerate(given)))
                return [found[j] for j in outs]

            return jax.vjp(function, *(given[i] for i in live))[1](cotangents)

        structs = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in node.inputs]
        cotangents = [
            jax.ShapeDtypeStruct(node.outputs[j].aval.shape, node.outputs[j].aval.dtype) for j in outs
        ]
        try:
            program = read_program(jax.make_jaxpr(pull)(structs, cotangents), marks=False)
        except Exception:  # whatever a user's rule raises that was not made for reverse mode
            return None
        given = program.inputs[len(structs) :]
        return PullBack(
            program,
            dict(zip(outs, given, strict=True)),
            dict(zip(live, program.outputs, strict=True)),
        )

    @cached_property
    def is_linear(self) -> bool:
        """Whether it is linear in the cotangents; one that can neither be seen to be nor be tried is not."""
        if _is_linear_by_form(self):
            return True
        if any(n.eqn.effects and n.outputs for n in self.program.nodes):  # not to be run unasked
            return False
        try:
            with jax.ensure_compile_time_eval():
                return _is_linear_on_numbers(self)
        except Exception:  # whatever a user's rule raises on numbers that are not its own
            return False

    @property
    def is_deaf(self) -> bool:
        """Whether it gives an input something, whatever the cotangents are: a constant, say."""
        heard, _ = solve(Flow[bool](), self.program, ((v, True) for v in self.cotangents.values()))
        return any(isinstance(a, Var) and a not in heard for a in self.results.values())


def not_linear(program: Program) -> Iterator[tuple[Node, Node]]:
    """The functions whose derivative rule is not linear, each with the node of the program that holds it."""
    for holder in program.nodes:
        for node in holder.walk():
            if node.primitive is primitives.custom_vjp_call_p:
                pull = PullBack.of(node)
                if pull is not None and not pull.is_linear:
                    yield holder, node


_ZERO, _LINEAR, _OTHER = "zero", "linear", "other"
_WHERE = {
    primitives.select_n_p: 0,
    primitives.scatter_add_p: 1,
}  # the one operand of these that is not added up


def _is_linear_by_form(pull: PullBack) -> bool:
    """Whether its operations tell that it is linear in the cotangents."""
    linear = ((v, _LINEAR) for v in pull.cotangents.values())
    flow: Flow[str] = Flow(lambda node, given: _made(node.primitive, list(map(_kind, node.inputs, given))))
    # all nodes: one that reads none of the cotangents may make zeros
    env, _ = solve(flow, pull.program, linear, visit=range(len(pull.program.nodes)))
    ends = pull.results.values()
    return all(_kind(a, env.get(a) if isinstance(a, Var) else None) in (_ZERO, _LINEAR) for a in ends)


def _kind(atom: Atom, found: str | None) -> str | None:
    """None: it does not depend on the cotangents."""
    zero = isinstance(atom, Literal) and np.ndim(atom.val) == 0 and atom.val == 0
    return _ZERO if zero else found


def _made(primitive: Any, ins: list[str | None]) -> str | None:
    live = [k for k in ins if k in (_LINEAR, _OTHER)]
    if primitive in IN_ONE_OPERAND and (_ZERO in ins or live == [_LINEAR]):
        return _ZERO if _ZERO in ins else _LINEAR
    if primitive in IN_FIRST_OPERAND and ins[0] is not None and live == [k for k in ins[:1] if k != _ZERO]:
        return ins[0]
    added = [k for i, k in enumerate(ins) if i != _WHERE.get(primitive)]
    if primitive in IN_ALL_OPERANDS and None not in added and live == [k for k in added if k == _LINEAR]:
        return _LINEAR if live else _ZERO
    return _OTHER if live else None


def _is_linear_on_numbers(pull: PullBack) -> bool:
    """Whether it adds up, and goes with the scale, at random points."""
    program, numbers = pull.program, np.random.default_rng(0)
    live = list(pull.cotangents.values())
    given = [v for v in program.inputs if v not in live]
    lowest = max(1e-6, *(float(jnp.finfo(v.aval.dtype).tiny) ** 0.5 for v in live))
    highest = min(1e6, *(float(jnp.finfo(v.aval.dtype).max) ** 0.5 for v in live))

    def random(aval: Any, draw: Callable[..., Any] = numbers.standard_normal) -> Any:
        if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), aval.shape)
        if jnp.issubdtype(aval.dtype, jnp.complexfloating):
            return jnp.asarray(draw(aval.shape) + 1j * draw(aval.shape), aval.dtype)
        real = jnp.issubdtype(aval.dtype, jnp.inexact)
        return jnp.asarray(draw(aval.shape) if real else numbers.integers(0, 2, aval.shape), aval.dtype)

    consts = {v: random(v.aval) if _compat.is_tracer(c) else c for v, c in program.consts.items()}

    @jax.jit
    def differences(at: list[Any], one: list[Any], other: list[Any], scale: Any) -> list[Any]:
        """How far it is from linear, and in units of what."""

        def pulled(cotangents: list[Any]) -> list[Any]:
            known = {**consts, **dict(zip([*given, *live], [*at, *cotangents], strict=True))}
            view = View(known, at_site=lambda site, world: plain_site)
            return evaluate(program, [(a, None) for a in pull.results.values()], view)

        times = lambda arrays: [a * scale.astype(a.dtype) for a in arrays]
        a, b = times(one), times(other)
        pairs = [
            *zip(times(pulled(one)), pulled(a), strict=True),
            *zip(map(jnp.subtract, pulled(a), pulled(b)), pulled(list(map(jnp.subtract, a, b))), strict=True),
        ]
        size = lambda x: jnp.max(jnp.abs(x), initial=0).astype(float)
        return [(size(x - y), jnp.maximum(size(x), size(y))) for x, y in pairs]

    tried = False
    rough = any(jnp.finfo(v.aval.dtype).bits < 32 for v in live)
    for draw in (numbers.standard_normal, numbers.random):  # a root or a logarithm wants the second
        at = [random(v.aval, draw) for v in given]
        one, other = ([random(v.aval) for v in live] for _ in range(2))
        for scale in (lowest, lowest**0.5, 1.0, highest**0.5, highest):
            found = np.asarray(differences(at, one, other, jnp.asarray(scale)))
            finite = np.all(np.isfinite(found), axis=1)
            tried |= bool(np.any(finite))
            if np.any(found[finite, 0] > (0.05 if rough else 1e-3) * found[finite, 1]):
                return False
    return tried


def has_own_rule(node: Node) -> bool:
    """Whether it is a `custom_jvp` or `custom_vjp` function."""
    return _compat.called_jaxpr(node.eqn, custom=True) is not None


_traced: WeakKeyDictionary[Node, PullBack | None] = WeakKeyDictionary()
