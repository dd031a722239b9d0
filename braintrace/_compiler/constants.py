"""Values known at compile time: those computed from constants alone, and elements that are zero for any data.

The first are indices of slices and gathers; the second are those of masked weights, say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._compat import Literal, Primitive, primitives
from .._types import ArrayLike
from .copies import Array, copy
from .primitives import COPIES, LAYOUT, named
from .program import Atom, Node, Program, Var


class Constants:
    """The values of variables that do not depend on data, computed on demand; None for all others."""

    def __init__(self, program: Program, given: Mapping[Var, Array | None]) -> None:
        self._program = program
        self._values: dict[Var, ArrayLike | None] = dict(given)
        for var, value in program.consts.items():
            self._values[var] = value if _is_plain(var) and not _compat.is_tracer(value) else None

    def __call__(self, atom: Atom) -> Array | None:
        given = isinstance(atom, Literal) or atom in self._program.consts
        if given and not any(atom is known for known in self._program.read):
            self._program.read.append(atom)
        if isinstance(atom, Literal):
            return np.asarray(atom.val)
        if atom not in self._values:
            self._values[atom] = self._compute(atom)
        value = self._values[atom]
        return None if value is None else np.asarray(value)

    def _compute(self, var: Var) -> ArrayLike | None:
        node = self._program.maker(var)
        if node is None or node.inner or node.site is not None or node.eqn.effects or not _is_plain(var):
            return None
        vals = []
        for atom in node.inputs:
            value = self(atom)
            if value is None:
                return None
            vals.append(value)
        for v, out in zip(node.outputs, _evaluate(node, vals), strict=True):
            self._values[v] = out
        return self._values[var]


def _is_plain(var: Var) -> bool:
    return any(jnp.issubdtype(var.aval.dtype, kind) for kind in (np.number, np.bool_))  # not a random key


_UFUNCS: dict[Primitive, Callable[..., Array]] = {
    primitives.abs_p: np.abs,
    primitives.add_p: np.add,
    primitives.and_p: np.bitwise_and,
    primitives.copy_p: np.asarray,
    primitives.eq_p: np.equal,
    primitives.ge_p: np.greater_equal,
    primitives.gt_p: np.greater,
    primitives.le_p: np.less_equal,
    primitives.lt_p: np.less,
    primitives.max_p: np.maximum,
    primitives.min_p: np.minimum,
    primitives.mul_p: np.multiply,
    primitives.ne_p: np.not_equal,
    primitives.neg_p: np.negative,
    primitives.not_p: np.invert,
    primitives.or_p: np.bitwise_or,
    primitives.rem_p: np.fmod,
    primitives.sign_p: np.sign,
    primitives.sub_p: np.subtract,
}


def _evaluate(node: Node, vals: Sequence[Array]) -> list[Array]:
    """Evaluate one node, in numpy if possible, because JAX takes 20 ms to compile each new operation."""
    aval, primitive, params = node.outputs[0].aval, node.primitive, node.params
    shape, dtype = tuple(aval.shape), aval.dtype
    if not all(d.kind in "biu" for d in (dtype, *(v.dtype for v in vals))):
        pass
    elif primitive in _UFUNCS:
        return [_UFUNCS[primitive](*vals).astype(dtype)]
    elif primitive in COPIES and primitive is not primitives.gather_p:
        return [copy(primitive, params, vals, shape)]
    elif primitive in LAYOUT:
        return [_moved(node, vals[0], shape)]
    elif primitive is primitives.convert_element_type_p:
        return [vals[0].astype(dtype)]
    elif primitive is primitives.iota_p:
        axis = params["dimension"]
        counts = np.arange(shape[axis], dtype=dtype)
        return [np.broadcast_to(np.expand_dims(counts, [i for i in range(len(shape)) if i != axis]), shape)]
    elif primitive is primitives.select_n_p and len(vals) == 3:
        return [np.where(vals[0], vals[2], vals[1])]
    with jax.ensure_compile_time_eval():
        return list(map(np.asarray, _compat.bind(node.eqn, *vals)))


_KEEPS = named("neg abs tanh sin sqrt sign square convert_element_type copy div sinh asinh atan")


class Zeros:
    """Where each variable may be nonzero, as booleans; None if everywhere.

    Elements are zero for any data where a constant mask is zero.
    """

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
        node = self._program.maker(var)
        if node is None:
            return None
        if not var.inexact:
            value = self._constants(var)
            return None if value is None else _some(value != 0)
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


def _moved(node: Node, z: Array, shape: tuple[int, ...]) -> Array:
    if node.primitive is primitives.transpose_p:
        return np.transpose(z, node.params["permutation"])
    if node.primitive is primitives.broadcast_in_dim_p:
        full = [1] * len(shape)
        for n, axis in zip(z.shape, node.params["broadcast_dimensions"], strict=True):
            full[axis] = n
        return np.broadcast_to(z.reshape(full), shape)
    if node.primitive is primitives.reshape_p and node.params["dimensions"] is not None:
        z = np.transpose(z, node.params["dimensions"])
    return z.reshape(shape)


def _some(nonzero: Array) -> Array | None:
    """None if no element is zero."""
    return None if nonzero.all() else nonzero
