"""Elements that are zero for any data, such as those of a masked weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import _compat
from .._compat import Literal, primitives
from .constants import Constants
from .copies import Array
from .primitives import LAYOUT, named
from .program import Atom, Node, Program, Var

_KEEPS = named("neg abs tanh sin sqrt sign square convert_element_type copy div sinh asinh atan")


class Zeros:
    """Where each variable may be nonzero, as booleans; None if everywhere."""

    def __init__(self, program: Program, constants: Constants, given: Mapping[Var, Array | None]) -> None:
        self._program, self._constants = program, constants
        self._found: dict[Var, Array | None] = dict(given)

    def __call__(self, atom: Atom) -> Array | None:
        if isinstance(atom, Literal):
            return _some(np.asarray(atom.val) != 0)
        if atom not in self._found:
            self._found[atom] = self._find(atom)
        return self._found[atom]

    def _find(self, var: Var) -> Array | None:
        if var in self._program.consts:
            return self._of_constant(var)
        if var not in self._program.producer:
            return None
        if not var.inexact:
            value = self._constants(var)
            return None if value is None else _some(value != 0)
        node = self._program.nodes[self._program.producer[var]]
        shape = tuple(var.aval.shape)
        if node.primitive is primitives.mul_p:
            known = [z for z in map(self, node.inputs) if z is not None]
            return _some(np.logical_and.reduce([np.broadcast_to(z, shape) for z in known])) if known else None
        if node.primitive is primitives.select_n_p and len(node.inputs) == 3:
            return self._selected(node, shape)
        if node.primitive in _KEEPS:
            return self(node.inputs[0])
        if node.primitive in LAYOUT and (z := self(node.inputs[0])) is not None:
            return _some(_moved(node, z, shape))
        return None

    def _selected(self, node: Node, shape: tuple[int, ...]) -> Array | None:
        which = self._constants(node.inputs[0])
        if which is None:
            return None
        no, yes = (True if z is None else z for z in map(self, node.inputs[1:]))
        return _some(np.broadcast_to(np.where(which, yes, no), shape))

    def _of_constant(self, var: Var) -> Array | None:
        value = self._program.consts[var]
        # a scalar constant (a time, say) may change from call to call, and is no mask
        if var.aval.ndim == 0 or _compat.is_tracer(value) or np.all(np.asarray(value) != 0):
            return None
        known = self._constants(var)
        return None if known is None else _some(known != 0)


def _moved(node: Node, z: Array, shape: tuple[int, ...]) -> Any:
    if node.primitive is primitives.transpose_p:
        return np.transpose(z, node.params["permutation"])
    if node.primitive is primitives.broadcast_in_dim_p:
        full = [1] * len(shape)
        for n, axis in zip(z.shape, node.params["broadcast_dimensions"], strict=True):
            full[axis] = n
        return np.broadcast_to(z.reshape(full), shape)
    return z.reshape(shape)


def _some(nonzero: Array) -> Array | None:
    """None if no element is zero."""
    return None if nonzero.all() else nonzero
