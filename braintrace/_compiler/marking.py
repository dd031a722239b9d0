"""Mark the operations of an unmarked step (`mark='auto'`): where a weight meets data.

A weight is a value computed from parameters, constants and states that no step writes: in `x @ f(w)` the
weight is `f(w)`; in `h * a` it is `a`, element by element, before it is broadcast. Operations that compute a
weight are left as they are, and so are marks set by hand.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from .. import _compat
from .._compat import JaxprEqn, primitives
from .._ops.found import MARKED as OPS
from .._ops.found import mark_elements
from .._ops.primitive import ETPPrimitive
from .._types import Array, Shape
from .evaluation import read, scan_with
from .packed_states import take_apart
from .primitives import ELEMENT_WISE
from .program import Atom, Node, Program, Var, read_program
from .provenance import SLICED, provenance
from .step import Role, Step

Axes = list[int | None]


def mark_found(step: Step) -> Step:
    """Mark every operation of a step that combines a weight with data and has a marked version."""
    program = take_apart(read_program(step.closed_jaxpr, marks=False))
    num_out = len(program.outputs) - len(step.owners)
    leaves = list(zip(step.owners, program.inputs[step.num_args :], program.outputs[num_out:], strict=True))
    written = {state for state, old, new in leaves if old is not new}
    params = [old for state, old, _ in leaves if state.role is Role.PARAMETER and _is_number(old)]
    fixed = [old for state, old, _ in leaves if state.role is not Role.PARAMETER and state not in written]
    numbered = enumerate(leaves, num_out)
    hidden = [i for i, (state, old, new) in numbered if state.role is Role.HIDDEN and old is not new]
    bits = provenance(program, params).bits
    learned = sum(bits[v] for v in params)
    frontier = _Frontier(bits, learned, learned | sum(bits[v] for v in fixed) | SLICED)

    def marked(*args: Array) -> list[Array]:
        return frontier.run(program, args, hidden)

    closed: _compat.ClosedJaxpr = jax.make_jaxpr(marked)(*(v.aval for v in program.inputs))
    return replace(step, closed_jaxpr=closed, found=True)


def mark_uses(step: Step) -> Step:
    """Mark every use of a parameter with data, also in a step with marks set by hand."""
    program = take_apart(read_program(step.closed_jaxpr, marks=False))

    def opened(*args: Array) -> list[Array]:
        env: dict[Var, Array] = {**program.consts, **dict(zip(program.inputs, args, strict=True))}
        for node in program.nodes:
            vals = [read(env, a) for a in node.inputs]
            op = node.primitive
            with _compat.at_line_of(_with_line(node)):
                if isinstance(op, ETPPrimitive) and len(vals) == len(node.params["names"]):
                    # a mark on a weight without data moves to where the weight is used
                    outs = [op.impl(*vals, **node.params)]
                else:
                    outs = _compat.bind(node.eqn, *vals)
            env.update(zip(node.outputs, outs, strict=True))
        return [read(env, a) for a in program.outputs]

    closed: _compat.ClosedJaxpr = jax.make_jaxpr(opened)(*(v.aval for v in program.inputs))
    return mark_found(replace(step, closed_jaxpr=closed))


@dataclass(frozen=True, eq=False)
class _Frontier:
    """Evaluates a program with marks set; `bits` are the inputs that each variable depends on."""

    bits: dict[Var, int]
    params: int
    fixed: int
    made: dict[Var, Node] = field(default_factory=dict)  # the node of each variable evaluated so far

    def of(self, atom: Atom) -> int:
        return self.bits.get(atom, 0) if isinstance(atom, Var) else 0

    def is_data(self, atom: Atom) -> bool:
        return bool(self.of(atom) & ~self.fixed)

    def is_weight(self, atom: Atom) -> bool:
        return bool(self.of(atom) & self.params) and not self.is_data(atom) and _is_number(atom)

    def run(
        self, program: Program, args: Sequence[Array], leaving: Container[int] | None = None
    ) -> list[Array]:
        """Evaluate the outputs; weights among them (or among `leaving`, by index) are marked."""
        env: dict[Var, Array] = {**program.consts, **dict(zip(program.inputs, args, strict=True))}
        for node in program.nodes:
            self.made.update(dict.fromkeys(node.outputs, node))
            with _compat.at_line_of(_with_line(node)):
                outs = self.apply(node, env)
            env.update(zip(node.outputs, outs, strict=True))
        return [
            self.elements(a, a.aval.shape, env)
            if self.is_weight(a) and (leaving is None or i in leaving)
            else read(env, a)
            for i, a in enumerate(program.outputs)
        ]

    def apply(self, node: Node, env: dict[Var, Array]) -> list[Array]:
        vals = [read(env, a) for a in node.inputs]
        weights = [i for i, a in enumerate(node.inputs) if self.is_weight(a)]
        ours = isinstance(node.primitive, ETPPrimitive)
        if ours or not weights or not any(map(self.is_data, node.inputs)):
            return _compat.bind(node.eqn, *vals)
        if node.primitive is primitives.cond_p:
            branches = [lambda *operands, p=p: self.run(p, operands) for p in node.inner]
            outs: list[Array] = jax.lax.switch(vals[0], branches, *vals[1:])
            return outs
        if node.primitive is primitives.scan_p:
            return scan_with(node, vals, lambda operands, _: (self.run(node.inner[0], operands), ()))[0]
        if node.primitive in OPS:
            y = OPS[node.primitive](vals, weights[0], node.params)
            return _compat.bind(node.eqn, *vals) if y is None else [y]
        if node.primitive in ELEMENT_WISE and all(map(_is_number, node.outputs)):
            for i in weights:
                vals[i] = self.elements(node.inputs[i], node.outputs[0].aval.shape, env)
        return _compat.bind(node.eqn, *vals)

    def elements(self, atom: Atom, shape: Shape, env: dict[Var, Array]) -> Array:
        """Mark an element-wise weight before it is broadcast to `shape`."""
        axes: Axes = [a if n == shape[a] else None for a, n in enumerate(atom.aval.shape)]
        while isinstance(atom, Var) and atom in self.made:
            before = _before(self.made[atom], axes)
            if before is None:
                break
            (atom, *_), axes = self.made[atom].inputs, before
        return mark_elements(read(env, atom), axes, shape)


def _before(node: Node, axes: Axes) -> Axes | None:
    """The axes of the operand of a broadcast, given those of the result; None for other nodes."""
    old, new = (tuple(v.aval.shape) for v in (node.inputs[0], node.outputs[0]))
    if node.primitive is primitives.broadcast_in_dim_p:
        dims = node.params["broadcast_dimensions"]
        return [axes[d] if n == new[d] else None for n, d in zip(old, dims, strict=True)]
    long = [[i for i, n in enumerate(shape) if n != 1] for shape in (old, new)]
    views = (primitives.reshape_p, primitives.squeeze_p)
    if node.primitive not in views or [old[i] for i in long[0]] != [new[i] for i in long[1]]:
        return None
    result: Axes = [None] * len(old)
    for i, j in zip(*long, strict=True):
        result[i] = axes[j]
    return result


def _is_number(atom: Atom) -> bool:
    return bool(jnp.issubdtype(atom.aval.dtype, jnp.inexact))


def _with_line(node: Node) -> JaxprEqn:
    """The equation with a user's source line: that of the call, for nodes inside a JAX function."""
    eqns = (node.eqn, *reversed(node.callers))
    return next((e for e in eqns if not node.callers or _compat.source_line(e)), node.eqn)
