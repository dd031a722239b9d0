"""Identities that act when a derivative is taken: one refuses a second one, one warns at unseen states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import jax

from .._compat import identity_primitive
from .._compiler.errors import NotSupportedError
from .._compiler.module_info import ModuleInfo
from .._compiler.step import Path, show_path, show_paths
from .._executor.pull_back import is_inexact
from .._lines import warn_user
from .._types import Array, Leaves, PyTree


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


def watched(
    info: ModuleInfo, new: list[Leaves], unseen: Mapping[Path, Sequence[Path]], called: str
) -> list[Leaves]:
    """New states that warn when a loss is differentiated at one that is `unseen`.

    `unseen` maps each of these to the parameters whose gradient by the rule, `called` so, is approximate.
    """
    path_of = {h.leaf: h.path for h in info.hidden if h.path in unseen}

    def at(path: Path) -> Callable[[Array], Array]:
        def backward(_: None, d: PyTree) -> tuple[PyTree]:
            if not isinstance(d, jax.custom_derivatives.SymbolicZero):
                warn_user(
                    f"A derivative is asked for at `{show_path(path)}`, on which no output depends. If "
                    f"the loss reads it, the gradient of {show_paths(unseen[path])} by "
                    f"{called} is approximate, whatever the report says of a loss of the outputs. "
                    "Return the state as an output for a report that covers it, or train by `RTRL`.",
                    about=info.model,
                )
            return (d,)

        same = jax.custom_vjp(lambda x: x)
        same.defvjp(lambda x: (x.value, None), backward, symbolic_zeros=True)
        return same

    if not path_of:
        return new
    pairs = zip(info.carried, new, strict=True)
    each = [list(zip(e.invars, leaves, strict=True)) for e, leaves in pairs]
    return [[at(path_of[v])(a) if v in path_of else a for v, a in one] for one in each]
