"""Functions with a derivative rule of their own: what their derivative reaches, which the rule alone decides.

The pull-back of such a function is a program like any other, from the cotangents of its outputs to those of
its inputs. Where a cotangent of an input comes from in it is what the input reaches.

Every online rule adds up what the losses of single steps send back, and so takes pull-backs to be linear.
That of a `custom_vjp` need not be: it may clip. The operations of its program decide; one that cannot be read
(a callback to the host, say) counts as not linear.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np

from .. import _compat
from .._compat import Literal, primitives
from .dataflow import Flow, solve, union
from .primitives import IN_ALL_OPERANDS, IN_FIRST_OPERAND, IN_ONE_OPERAND, INDICES
from .program import Atom, Loop, Node, Program, Var, is_inexact, read_program, struct


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

        structs = [struct(a) for a in node.inputs]
        cotangents = [struct(node.outputs[j]) for j in outs]
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
        """Whether the program shows that the result is linear in the cotangents."""
        live = set(self.cotangents.values())
        terms = _terms(self.program, [_LINEAR if v in live else _FREE for v in self.program.inputs])
        return not any(t & ~_LINEAR for t in terms)

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


# kinds of terms that a value may be the sum of: constant in the cotangents, linear in them, or neither known
_FREE, _LINEAR, _OTHER = 1, 2, 4
_GIVEN_FIRST = dict.fromkeys((primitives.select_n_p, primitives.triangular_solve_p), slice(1))


def _terms(program: Program, given: Sequence[int]) -> list[int]:
    """The kinds of terms of each output, from those of each input; no kind means zero."""
    env = dict(zip(program.inputs, given, strict=True))
    for v, value in program.consts.items():
        env[v] = 0 if v.inexact and not _compat.is_tracer(value) and not np.any(value) else _FREE

    def read(atom: Atom) -> int:
        return env[atom] if isinstance(atom, Var) else _FREE * bool(np.any(atom.val))

    for node in program.nodes:
        made = _across(node, [read(a) for a in node.inputs])
        for v, terms in zip(node.outputs, made, strict=True):
            env[v] = terms if v.inexact or terms <= _FREE else _OTHER  # an integer is a rounded number
    return [read(a) for a in program.outputs]


def _across(node: Node, ins: list[int]) -> list[int]:
    """The kinds of terms of the outputs of a node."""
    if node.primitive is primitives.cond_p:
        ways = [_terms(program, ins[1:]) for program in node.inner]
        return [union(outs) if ins[0] <= _FREE else _OTHER for outs in zip(*ways, strict=True)]
    if node.loop is not None:
        return _iterated(node, node.loop, ins)
    if node.inner:
        return _terms(node.inner[0], ins)
    made = _made(node, ins)
    program = implementation(node) if made is _OTHER else None  # which may tell more
    return [made] * len(node.outputs) if program is None else _terms(program, ins)


def _iterated(node: Node, loop: Loop, ins: list[int]) -> list[int]:
    start = loop.before + loop.consts
    carry, more = ins[start:][: loop.carry], ins[start + loop.carry :]
    while True:
        made = _terms(loop.body, [*ins[loop.before : start], *carry, *more])
        after = [a | b for a, b in zip(carry, made, strict=False)]
        if after == carry:
            break
        carry = after
    goes_on = 0 if loop.length is not None else _terms(node.inner[0], [*ins[: loop.before], *carry])[0]
    outs = [*carry, *made[loop.carry :]]
    return outs if goes_on <= _FREE else [_OTHER] * len(outs)


def _made(node: Node, ins: list[int]) -> int:
    primitive, live = node.primitive, [i for i, terms in enumerate(ins) if terms > _FREE]
    if primitive in IN_ONE_OPERAND and (0 in ins or len(live) == 1):
        return 0 if 0 in ins else ins[live[0]]
    if primitive in IN_FIRST_OPERAND and live in ([], [0]):
        return ins[0]
    if primitive is primitives.select_n_p and not ins[0]:  # never true
        return ins[1]
    fixed = _fixed(node)
    if fixed is not None and not any(i in fixed for i in live):
        return int(union(terms for i, terms in enumerate(ins) if i not in fixed))
    if primitive is primitives.is_finite_p or not live:
        return _FREE
    is_nan = primitive is primitives.ne_p and node.inputs[0] is node.inputs[1]
    infinite = any(isinstance(a, Literal) and np.isinf(a.val) for a in node.inputs)
    return 0 if is_nan or (primitive is primitives.eq_p and infinite) else _OTHER


def _fixed(node: Node) -> range | None:
    """The operands given which a node is linear in all others together; None if it is not."""
    primitive = node.primitive
    if primitive is primitives.linear_solve_p:
        return range(sum(node.params["const_lengths"]))
    if primitive not in IN_ALL_OPERANDS:
        return None
    return range(len(node.inputs))[INDICES.get(primitive, _GIVEN_FIRST.get(primitive, slice(0)))]


def implementation(node: Node) -> Program | None:
    """A primitive as the program of its implementation, if that can be traced, and without effects."""
    if node.eqn.effects:
        return None
    structs = [struct(a) for a in node.inputs]
    try:
        program = read_program(jax.make_jaxpr(lambda *a: node.primitive.impl(*a, **node.params))(*structs))
    except Exception:  # whatever an implementation that is not JAX raises when it is traced
        return None
    return None if any(n.primitive is node.primitive for n in program.nodes) else program


def has_own_rule(node: Node) -> bool:
    """Whether it is a `custom_jvp` or `custom_vjp` function."""
    return _compat.called_jaxpr(node.eqn, custom=True) is not None


_traced: WeakKeyDictionary[Node, PullBack | None] = WeakKeyDictionary()
