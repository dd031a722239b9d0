"""How many floating operations a jaxpr takes: a multiplication or an addition is one.

Counted as XLA does, and loops as often as they run: what no output needs, and what was computed before from
the same values, is left out; a transcendental function counts nothing.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._compat import Literal, primitives
from .._compiler.primitives import ARITHMETIC, CUMULATIVE, REDUCTIONS, WINDOWS, named
from .._ops.primitive import ETPPrimitive


def count_flops(closed: Any) -> float:
    """The operations of a closed jaxpr."""
    return _count(*_compat.parts(closed))


def _count(jaxpr: Any, consts: Any = ()) -> float:
    flat = _Flat()
    return flat.cost(flat.inline(jaxpr, list(map(_constant, consts)), [object() for _ in jaxpr.invars], None))


class _Flat:
    """A jaxpr with its calls read through; values are known by what they are computed from."""

    def __init__(self) -> None:
        self.known: dict[Any, list[Any]] = {}
        self.made: list[tuple[list[Any], list[Any], Any]] = []  # outputs, inputs, equation

    def inline(self, jaxpr: Any, consts: list[Any], args: list[Any], apart: Any) -> list[Any]:
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(atom: Any) -> Any:
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

    def unchanged(self, eqn: Any, ins: list[Any]) -> Any:
        """The input that an equation passes on as it is, if it does: a copy, or a sum with zero."""
        if eqn.primitive in _UNCHANGED:
            return ins[0]
        if eqn.primitive in _KEEPS_ZERO and _is_zero(ins[0]):
            return _ZERO
        if eqn.primitive in _SUMS and any(map(_is_zero, ins)):
            return ins[1] if _is_zero(ins[0]) else ins[0]
        return None

    def cost(self, wanted: list[Any]) -> float:
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


def _constant(value: Any) -> Any:
    """A name for a constant, the same for equal numbers."""
    number = np.ndim(value) == 0 and not _compat.is_tracer(value)
    dtype = getattr(value, "dtype", float)
    if not number or dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jax.dtypes.extended):
        return id(value)
    return _ZERO if value == 0 else f"{value}"


def _is_zero(value: Any) -> bool:
    return isinstance(value, str) and value == _ZERO


def _key(param: Any) -> Any:
    return (
        id(param) if isinstance(param, _compat.ClosedJaxpr | _compat.Jaxpr) or callable(param) else str(param)
    )


def _cost(eqn: Any) -> float:
    out: Any = eqn.outvars[0].aval if eqn.outvars else None
    if isinstance(eqn.primitive, ETPPrimitive):
        structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        made = jax.make_jaxpr(lambda *a: eqn.primitive.impl(*a, **eqn.params))(*structs)
        return count_flops(made)
    inner = [_count(j, [object() for _ in j.constvars]) for j in _compat.all_jaxprs(eqn)]
    if eqn.primitive is primitives.scan_p:
        return float(eqn.params["length"]) * inner[0]
    if eqn.primitive is primitives.cond_p:
        return max(inner)
    if eqn.primitive is primitives.dot_general_p:
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return float(2 * out.size * math.prod(eqn.invars[0].aval.shape[i] for i in contracted))
    if eqn.primitive is primitives.conv_general_dilated_p:
        kernel, spec = eqn.invars[1].aval, eqn.params["dimension_numbers"].rhs_spec
        return float(2 * out.size * kernel.size / kernel.shape[spec[0]])
    if eqn.primitive is primitives.scatter_add_p:
        return float(eqn.invars[-1].aval.size)
    if eqn.primitive in REDUCTIONS | WINDOWS | CUMULATIVE:
        return float(eqn.invars[0].aval.size)
    if eqn.primitive in ARITHMETIC:
        return float(out.size)
    return sum(inner)
