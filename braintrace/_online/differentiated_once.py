"""The identity on the operands of an online gradient, which cannot be differentiated again."""

from __future__ import annotations

from typing import NoReturn

import jax

from .._compat import identity_primitive
from .._compiler.errors import NotSupportedError
from .._executor.pull_back import is_inexact
from .._types import PyTree


def differentiated_once(values: PyTree) -> PyTree:
    """The identity on the operands of an online gradient, which raises if the gradient is differentiated."""
    return jax.tree.map(lambda a: _once_p.bind(a) if is_inexact(a) else a, values)


def _refuse(primals: PyTree, tangents: PyTree) -> NoReturn:
    raise NotSupportedError(
        "The online gradient of a step, or what `grad` or `etrace_grad` returned, is differentiated again, "
        "as `jax.hessian` and meta-gradients do. It has no derivative: traces hold first derivatives of what "
        "parameters did in earlier steps, and no second ones. Use back-propagation through time "
        "(`braintrace.BPTT`, `rule=braintrace.rules.BPTT()`); or, where no second derivative is meant, cut "
        "the path with `jax.lax.stop_gradient`."
    )


_once_p = identity_primitive("differentiated_once", _refuse)
