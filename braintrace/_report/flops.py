"""Count the floating-point operations of a jaxpr: one for each multiplication or addition.

As in XLA's own count, dead code, common subexpressions and transcendental functions count nothing. A loop
counts as often as it runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, primitives
from .._compiler.primitives import ARITHMETIC, CUMULATIVE, REDUCTIONS, WINDOWS, named
from .._ops.primitive import ETPPrimitive
from .._types import Aval, Value

Source: TypeAlias = object  # identifies a value: equal for values computed from the same sources
Sources: TypeAlias = list[Source]


def count_flops(closed: ClosedJaxpr) -> float:
    """The operations of a closed jaxpr."""
    return _count(*_compat.parts(closed))


def _count(jaxpr: Jaxpr, consts: Iterable[object] = ()) -> float:
    flat = _Flat()
    return flat.cost(flat.inline(jaxpr, list(map(_constant, consts)), [object() for _ in jaxpr.invars], None))


class _Flat:
    """A jaxpr with its calls inlined; values that are computed from the same sources are one."""

    def __init__(self) -> None:
        self.known: dict[object, list[Source]] = {}
        self.made: list[tuple[list[Source], list[Source], JaxprEqn]] = []  # outputs, inputs, equation

    def inline(self, jaxpr: Jaxpr, consts: Sources, args: Sources, apart: JaxprEqn | None) -> Sources:
        """The outputs of a jaxpr; subexpressions inside the rematerialised call `apart` are its own."""
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(atom: Value) -> Source:
            return _constant(atom.val) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            call = _compat.called_jaxpr(eqn) or _compat.called_jaxpr(eqn, custom=True)
            if call is not None:
                # what is rematerialised is computed again, even if it was before
                inner = eqn if eqn.primitive is _compat.remat_p else apart
                outs = self.inline(call[0], list(map(_constant, call[1])), ins, inner)
            elif (same := self.unchanged(eqn, ins)) is not None:
                outs = [same]
            else:
                params = tuple(sorted((k, _key(v)) for k, v in eqn.params.items()))
                key = (eqn.primitive, tuple(ins), params, apart)
                if key not in self.known:
                    self.known[key] = [object() for _ in eqn.outvars]
                    self.made.append((self.known[key], ins, eqn))
                outs = self.known[key]
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def unchanged(self, eqn: JaxprEqn, ins: list[Source]) -> Source | None:
        """The input that an equation passes on as it is, if it does: a copy, or a sum with zero."""
        if eqn.primitive in _UNCHANGED:
            return ins[0]
        if eqn.primitive in _KEEPS_ZERO and _is_zero(ins[0]):
            return _ZERO
        if eqn.primitive in _SUMS and any(map(_is_zero, ins)):
            return ins[1] if _is_zero(ins[0]) else ins[0]
        return None

    def cost(self, wanted: list[Source]) -> float:
        live, total = set(wanted), 0.0
        for outs, ins, eqn in reversed(self.made):
            if eqn.effects or any(o in live for o in outs):
                live.update(ins)
                total += _cost(eqn)
        return total


_ZERO = "0.0"
_UNCHANGED = named("stop_gradient copy")
_KEEPS_ZERO = named("broadcast_in_dim convert_element_type")
_SUMS = named("add add_jaxvals")


def _constant(value: Value) -> Source:
    """A name for a constant, the same for equal numbers."""
    number = np.ndim(value) == 0 and not _compat.is_tracer(value)
    dtype = getattr(value, "dtype", float)
    if not number or dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jax.dtypes.extended):
        return id(value)
    return _ZERO if value == 0 else f"{value}"


def _is_zero(value: Source) -> bool:
    return isinstance(value, str) and value == _ZERO


def _key(param: object) -> object:
    return id(param) if isinstance(param, ClosedJaxpr | Jaxpr) or callable(param) else str(param)


def _cost(eqn: JaxprEqn) -> float:
    """The operations of one equation."""
    out: Aval = eqn.outvars[0].aval if eqn.outvars else None
    ins: list[Aval] = [v.aval for v in eqn.invars]
    if isinstance(eqn.primitive, ETPPrimitive):
        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ins]
        made = jax.make_jaxpr(lambda *a: eqn.primitive.impl(*a, **eqn.params))(*structs)
        return count_flops(made)
    inner = [_count(j, [object() for _ in j.constvars]) for j in _compat.all_jaxprs(eqn)]
    if eqn.primitive is primitives.scan_p:
        return float(eqn.params["length"]) * inner[0]
    if eqn.primitive is primitives.cond_p:
        return max(inner)
    if eqn.primitive is primitives.dot_general_p:
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return float(2 * out.size * math.prod(ins[0].shape[i] for i in contracted))
    if eqn.primitive is primitives.conv_general_dilated_p:
        kernel, spec = ins[1], eqn.params["dimension_numbers"].rhs_spec
        return float(2 * out.size * kernel.size / kernel.shape[spec[0]])
    if eqn.primitive is primitives.scatter_add_p:
        return float(ins[-1].size)
    if eqn.primitive in REDUCTIONS | WINDOWS | CUMULATIVE:
        return float(ins[0].size)
    if eqn.primitive in ARITHMETIC:
        return float(out.size)
    return sum(inner)
