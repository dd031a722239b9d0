"""A key for jaxprs that compute the same, so that calling an equal program again compiles nothing.

The key covers operations, shapes, literals and custom derivative rules. It ignores names, source lines and
the values of constants, which are inputs of a program.
"""

from __future__ import annotations

from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from .._types import ArrayLike, Aval


def fingerprint(closed: ClosedJaxpr) -> Hashable:
    """A key that is equal for equal programs."""
    jaxpr, consts = _compat.parts(closed)
    return _jaxpr(jaxpr, True), tuple(map(_aval, consts))


def _jaxpr(jaxpr: Jaxpr, rules: bool) -> Hashable:
    """The key of a jaxpr; with `rules=False`, without custom derivative rules."""
    number: dict[object, int] = {}
    for var in (*jaxpr.constvars, *jaxpr.invars):
        number[var] = len(number)
    eqns = []
    for eqn in jaxpr.eqns:
        ins = tuple(_atom(a, number) for a in eqn.invars)
        for var in eqn.outvars:
            number[var] = len(number)
        outs = tuple(map(_aval, (v.aval for v in eqn.outvars)))
        eqns.append((eqn.primitive, ins, outs, _params(eqn, rules)))
    heads = tuple(map(_aval, (v.aval for v in (*jaxpr.constvars, *jaxpr.invars))))
    return heads, tuple(eqns), tuple(_atom(a, number) for a in jaxpr.outvars)


def _atom(atom: object, number: dict[object, int]) -> Hashable:
    return _number(atom.val) if isinstance(atom, Literal) else number[atom]


def _aval(x: Aval) -> Hashable:
    return tuple(jnp.shape(x)), str(jnp.result_type(x)), bool(getattr(x, "weak_type", False))


def _number(value: ArrayLike) -> Hashable:
    """The key of a constant value; a tracer equals nothing else."""
    if _compat.is_tracer(value):
        return object()
    array = np.asarray(value)
    return array.shape, str(array.dtype), array.tobytes()


def _body(body: _compat.Body, rules: bool) -> Hashable:
    """The key of a jaxpr with the values of its constants."""
    return _jaxpr(body[0], rules), tuple(map(_number, body[1]))


def _params(eqn: JaxprEqn, rules: bool) -> Hashable:
    if (called := _compat.called_jaxpr(eqn, custom=True)) is not None:
        return _body(called, rules), _own_rule(eqn) if rules else None
    return tuple((name, _value(value, rules)) for name, value in sorted(eqn.params.items()))


def _own_rule(eqn: JaxprEqn) -> Hashable:
    """The key of the pull-back of a function with a custom derivative rule."""
    traced = _compat.pull_back_of(eqn)
    return object() if traced is None else _body(_compat.parts(traced), False)


def _value(value: object, rules: bool) -> Hashable:
    if isinstance(value, ClosedJaxpr | Jaxpr):
        return _body(_compat.parts(value), rules)
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return tuple(_value(v, rules) for v in value)
    if isinstance(value, dict):
        return tuple((k, _value(v, rules)) for k, v in value.items())
    if isinstance(value, np.ndarray | jax.Array):
        return _number(value)
    try:
        hash(value)
    except TypeError:
        return object()
    return value
