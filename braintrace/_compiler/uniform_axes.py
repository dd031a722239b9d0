"""Find the axes along which all elements of an array are equal, whatever the data.

A decay that is the same for all units is a number that is broadcast to their shape. Element-wise operations,
sums and changes of layout keep such axes; values of constants are compared.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .._compat import Literal, primitives
from .._types import ArrayLike, NumPyArray
from .primitives import ELEMENT_WISE, REDUCTIONS, is_reshape, named
from .program import Atom, Node, Program, Var

Axes = frozenset[int]

_STACK = named("stack")
_KEEP_AXES = named("slice rev dynamic_slice")


class UniformAxes:
    """The uniform axes of the variables of a program; `value(var)` is an input's value, None if unknown."""

    def __init__(self, program: Program, value: Callable[[Var], ArrayLike | None]) -> None:
        self._program, self._value = program, value
        self._found: dict[Var, Axes] = {}

    def __call__(self, atom: Atom) -> Axes:
        if isinstance(atom, Literal):
            return _of_value(np.asarray(atom.val))
        if atom not in self._found:
            self._found[atom] = self._of(atom) | {a for a, n in enumerate(atom.aval.shape) if n == 1}
        return self._found[atom]

    def _of(self, var: Var) -> Axes:
        if all(n == 1 for n in var.aval.shape):
            return frozenset()
        if (node := self._program.maker(var)) is not None:
            return frozenset() if node.inner or node.site is not None else self._across(node, var)
        value = self._program.consts[var] if var in self._program.consts else self._value(var)
        return frozenset() if value is None else _of_value(np.asarray(value))

    def _across(self, node: Node, var: Var) -> Axes:
        primitive, params, shape = node.primitive, node.params, var.aval.shape
        if primitive in ELEMENT_WISE:
            inputs = [a for a in node.inputs if a.aval.shape]
            if len(node.outputs) > 1:  # one operand for each output
                inputs = [node.inputs[node.outputs.index(var)]]
            found = (self(a) for a in inputs)
            return frozenset(range(len(shape))).intersection(*found)
        if primitive is primitives.broadcast_in_dim_p:
            axes = params["broadcast_dimensions"]
            kept = {axes[a] for a in self(node.inputs[0])}
            return frozenset(a for a in range(len(shape)) if a not in axes or a in kept)
        if primitive is primitives.concatenate_p:
            others = frozenset(range(len(shape))) - {params["dimension"]}
            return others.intersection(*map(self, node.inputs))
        if primitive in _STACK:
            others = frozenset(range(len(shape) - 1)).intersection(*map(self, node.inputs))
            return frozenset(a + (a >= params["axis"]) for a in others)
        if not node.inputs:
            return frozenset()
        known, before = self(node.inputs[0]), node.inputs[0].aval.shape
        if primitive is primitives.transpose_p:
            return frozenset(i for i, a in enumerate(params["permutation"]) if a in known)
        if primitive in _KEEP_AXES:
            return known
        if primitive in REDUCTIONS:
            left = [a for a in range(len(before)) if a not in params["axes"]]
            return frozenset(i for i, a in enumerate(left) if a in known)
        if is_reshape(primitive, params):
            old, new = ([a for a, n in enumerate(s) if n != 1] for s in (before, shape))
            if known.issuperset(old):
                return frozenset(new)
            if [before[a] for a in old] == [shape[a] for a in new]:
                return frozenset(b for a, b in zip(old, new, strict=True) if a in known)
        return frozenset()


def _of_value(value: NumPyArray) -> Axes:
    if value.dtype.kind not in "biufc" or not value.size:
        return frozenset()
    return frozenset(a for a in range(value.ndim) if np.all(value == value.take([0], a)))
