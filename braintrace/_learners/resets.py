"""The values that a model's states begin with."""

from __future__ import annotations

from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._compiler import CompilationError
from .._compiler.step import Path, show_path
from .._frontends.pure import Pure


def reset(model: brainstate.nn.Module, **options: Any) -> None:
    """Reset all states; a module that has no `reset_state` of its own gets what its `init_state` makes."""
    brainstate.nn.reset_all_states(model, **options)
    for module in model.nodes(brainstate.nn.Module).values():
        _reset_by_init(module, **options)


def strengthen(model: brainstate.nn.Module) -> None:
    """Give states types of their own: one that was made of a Python number gets one in the first step only,
    and the second would be another program."""
    for state in model.states().values():
        if any(
            getattr(a, "weak_type", False) for a in jax.tree.leaves(state.value)
        ):  # a key has no such type
            state.value = jax.tree.map(lambda a: jax.lax.convert_element_type(a, a.dtype), state.value)


def initial_states(learner: Any, size: int, hidden: Any) -> dict[Path, Any]:
    """The initial values of the states that a reset sets and that have `size` samples in front, by path."""
    model = learner.model

    before = {id(st): st.value for st in model.states().values()}

    def start(size: int) -> dict[int, Any]:
        """What a reset for so many samples writes, by the identity of the state."""
        try:
            pure = Pure.trace(lambda: reset(model, batch_size=size))
            _, new = pure(pure.values())
        finally:
            for st in model.states().values():
                st.value = before[id(st)]
        parts = zip(pure.states, pure.trees, new, pure.written, strict=True)
        return {id(st): jax.tree.unflatten(tree, leaves) for st, tree, leaves, written in parts if written}

    values, more = start(size), jax.eval_shape(lambda: start(size + 1))
    found = {}
    for path, st in model.states().items():
        now = before[id(st)]
        if id(st) not in values or _shapes(now) != _shapes(values[id(st)]):
            continue
        # an axis of samples is one that is longer for one more of them, and not just as long as they are many
        first = [jnp.shape(leaf)[:1] for leaf in jax.tree.leaves((now, more.get(id(st))))]
        if first == [(size,)] * (len(first) // 2) + [(size + 1,)] * (len(first) // 2):
            found[tuple(map(str, path))] = values[id(st)]
    missing = [h.path for h in hidden if not any(h.path[: len(p)] == p for p in found)]
    missing += [
        path
        for path, st in ((tuple(map(str, p)), st) for p, st in model.states().items())
        if id(st) in values and path not in found and path not in missing and _has_numbers(before[id(st)])
    ]
    if missing:
        names = ", ".join(f"`{show_path(p)}`" for p in missing)
        raise CompilationError(
            f"Samples of a batch cannot begin anew one by one: {names} has no axis of {size} samples in "
            "front, or its module has no `reset_state` or `init_state` that gives it one for "
            f"`batch_size={size}`."
        )
    return found


def _has_numbers(tree: Any) -> bool:
    """Whether there is an array of numbers in it; a counter or a clock is none."""
    leaves = jax.tree.leaves(tree)
    return any(jnp.ndim(a) and jnp.issubdtype(jnp.result_type(a), jnp.inexact) for a in leaves)


def _shapes(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)  # which knows units
    return structure, [(jnp.shape(a), jnp.result_type(a)) for a in leaves]


def _reset_by_init(module: brainstate.nn.Module, **options: Any) -> None:
    kind, plain = type(module), brainstate.nn.Module
    if kind.reset_state is not plain.reset_state or kind.init_state is plain.init_state:
        return
    states = {name: st for name, st in vars(module).items() if isinstance(st, brainstate.State)}
    module.init_state(**options)
    for name, state in states.items():
        state.value = getattr(module, name).value
        setattr(module, name, state)  # the same object as before: others may hold it
