"""Custom derivative rules: the pull-back of a function as a program, and whether it is linear.

The pull-back of a function with a custom rule is traced to a program from the cotangents of its outputs to
those of its inputs. An input reaches the outputs that its cotangent depends on.

Online rules add up the gradients of the losses of single steps, which assumes linear pull-backs. That of a
`custom_vjp` need not be linear: it may clip. Linearity is read from the operations of its program; an unknown
operation (a callback to the host, say) counts as nonlinear.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

from .. import _compat
from .._compat import Literal, primitives
from .caching import cached
from .dataflow import Flow, solve, union
from .primitives import IN_ALL_OPERANDS, IN_FIRST_OPERAND, IN_ONE_OPERAND, INDICES
from .program import Atom, Loop, Node, Program, Var, is_inexact, read_program, struct


@dataclass(frozen=True, eq=False)
class PullBack:
    """The pull-back of one node as a program."""

    program: Program
    cotangents: dict[int, Var]  # inputs of the program, by the index of the output of the node
    results: dict[int, Atom]  # outputs of the program, by the index of the input of the node

    @staticmethod
    @cached
    def of(node: Node) -> PullBack | None:
        """The pull-back of a node, traced once; None if it has no reverse mode."""
        traced = _compat.pull_back_of(node.eqn)
        if traced is None:
            return None
        live = [i for i, a in enumerate(node.inputs) if is_inexact(a)]
        outs = [j for j, v in enumerate(node.outputs) if is_inexact(v)]
        program = read_program(traced, marks=False)
        given = program.inputs[len(node.inputs) :]
        return PullBack(
            program,
            dict(zip(outs, given, strict=True)),
            dict(zip(live, program.outputs, strict=True)),
        )

    @cached_property
    def is_linear(self) -> bool:
        """Whether the result is linear in the cotangents, judging by the operations."""
        live = set(self.cotangents.values())
        terms = _terms(self.program, [_LINEAR if v in live else _FREE for v in self.program.inputs])
        return not any(t & ~_LINEAR for t in terms)

    @property
    def ignores_cotangents(self) -> bool:
        """Whether the cotangent of an input does not depend on those of the outputs (a constant, say)."""
        reached, _ = solve(Flow[bool](), self.program, ((v, True) for v in self.cotangents.values()))
        return any(isinstance(a, Var) and a not in reached for a in self.results.values())


def not_linear(program: Program) -> Iterator[tuple[Node, Node]]:
    """The functions with a nonlinear derivative rule, each with the top-level node that contains it."""
    for holder in program.nodes:
        for node in holder.walk():
            if node.primitive is primitives.custom_vjp_call_p:
                pull = PullBack.of(node)
                if pull is not None and not pull.is_linear:
                    yield holder, node


# the kinds of terms in a value: constant in the cotangents, linear in them, or anything else
_FREE, _LINEAR, _OTHER = 1, 2, 4
_GIVEN_FIRST = dict.fromkeys((primitives.select_n_p, primitives.triangular_solve_p), slice(1))


def _terms(program: Program, given: Sequence[int]) -> list[int]:
    """The kinds of terms of each output, from those of each input; 0 means that the value is zero."""
    env = dict(zip(program.inputs, given, strict=True))
    for v, value in program.consts.items():
        env[v] = 0 if v.inexact and not _compat.is_tracer(value) and not np.any(value) else _FREE

    def read(atom: Atom) -> int:
        return env[atom] if isinstance(atom, Var) else _FREE * bool(np.any(atom.val))

    for node in program.nodes:
        made = _across(node, [read(a) for a in node.inputs])
        for v, terms in zip(node.outputs, made, strict=True):
            env[v] = terms if v.inexact or terms <= _FREE else _OTHER  # a cast to integers rounds
    return [read(a) for a in program.outputs]


def _across(node: Node, ins: list[int]) -> list[int]:
    """The kinds of terms of the outputs of a node."""
    if node.primitive is primitives.cond_p:
        ways = [_terms(program, ins[1:]) for program in node.inner]
        return [union(outs) or 0 if ins[0] <= _FREE else _OTHER for outs in zip(*ways, strict=True)]
    if node.loop is not None:
        return _iterated(node, node.loop, ins)
    if node.inner:
        return _terms(node.inner[0], ins)
    made = _made(node, ins)
    program = implementation(node) if made is _OTHER else None  # which may be more specific
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
        return union(terms for i, terms in enumerate(ins) if i not in fixed) or 0
    if primitive is primitives.is_finite_p or not live:
        return _FREE
    is_nan = primitive is primitives.ne_p and node.inputs[0] is node.inputs[1]
    infinite = any(isinstance(a, Literal) and np.isinf(a.val) for a in node.inputs)
    return 0 if is_nan or (primitive is primitives.eq_p and infinite) else _OTHER


def _fixed(node: Node) -> range | None:
    """The operands that must be fixed for a node to be linear in all others; None if it is not linear."""
    primitive = node.primitive
    if primitive is primitives.linear_solve_p:
        return range(sum(node.params["const_lengths"]))
    if primitive not in IN_ALL_OPERANDS:
        return None
    return range(len(node.inputs))[INDICES.get(primitive, _GIVEN_FIRST.get(primitive, slice(0)))]


def implementation(node: Node) -> Program | None:
    """The implementation of a primitive as a program; None if it has effects or cannot be traced."""
    if node.eqn.effects:
        return None
    structs = [struct(a) for a in node.inputs]
    try:
        program = read_program(jax.make_jaxpr(lambda *a: node.primitive.impl(*a, **node.params))(*structs))
    except Exception:  # an implementation that is not JAX may raise anything
        return None
    return None if any(n.primitive is node.primitive for n in program.nodes) else program


def has_own_rule(node: Node) -> bool:
    """Whether it is a `custom_jvp` or `custom_vjp` function."""
    return _compat.called_jaxpr(node.eqn, custom=True) is not None
