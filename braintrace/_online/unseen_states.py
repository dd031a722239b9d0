"""A warning where a loss is differentiated at a hidden state that no output depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax

from .._compiler.module_info import ModuleInfo
from .._compiler.step import Path, show_path, show_paths
from .._lines import warn_user
from .._types import Array, Leaves, PyTree


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
