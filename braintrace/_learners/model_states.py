"""The states of a `brainstate` model: found by path at each call, and reset.

`init_all_states` makes new state objects, so none is stored.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

import brainstate
import jax
import jax.numpy as jnp

from .. import _compat
from .._compiler import CompilationError
from .._compiler.module_info import StateEntry
from .._compiler.step import Path, show_path
from .._frontends.pure import Pure
from .._lines import warn_user
from .._types import Array, Option, PyTree
from .compiled_step import CompiledStep

if TYPE_CHECKING:
    from .stateful import ETraceAlgorithm


def by_path(model: brainstate.nn.Module) -> dict[Path, brainstate.State]:
    """The model's states as they are now."""
    return {tuple(map(str, path)): st for path, st in model.states().items()}


def states_of(compiled: CompiledStep) -> list[tuple[StateEntry, brainstate.State]]:
    """The states that a step touches, as they are now."""
    found = by_path(compiled.function.step.model)
    return [(e, found.get(e.path, e.state)) for e in compiled.info.entries]


def leaves_of(compiled: CompiledStep) -> list[Array]:
    """The leaves of the states that a step touches."""
    return [leaf for _, st in states_of(compiled) for leaf in jax.tree.leaves(st.value)]


def hidden_of(compiled: CompiledStep) -> dict[str, brainstate.State]:
    """The hidden states of a step, by name."""
    hidden = {id(h.state) for h in compiled.info.hidden}
    return {show_path(e.path): s for e, s in states_of(compiled) if not e.is_fixed and id(e.state) in hidden}


def values_now(model: brainstate.nn.Module) -> dict[Path, PyTree]:
    """The values of the short-term states by path, for `reset`; without those that are being traced."""
    found = {path: st.value for path, st in model.states(brainstate.ShortTermState).items()}
    return {p: v for p, v in found.items() if not any(map(_compat.is_tracer, jax.tree.leaves(v)))}


def reset(model: brainstate.nn.Module, start: dict[Path, PyTree], **options: Option) -> set[int]:
    """Reset all states: by each module's `reset_state`, or else its `init_state`, or else to `start`.

    Returns the `id` of every state that was reset. A short-term state that its module's own `reset_state`
    does not set is left as it is.
    """
    done = _reset_by_methods(model, **options)
    for path, state in _without_methods(model, done, start).items():
        state.value = start[path]
        done.add(id(state))
    return done


def _reset_by_methods(model: brainstate.nn.Module, **options: Option) -> set[int]:
    """Call `reset_state`, or `init_state` of modules without one; the `id` of every state that they set."""
    with brainstate.StateTraceStack() as trace:
        brainstate.nn.reset_all_states(model, **options)
        for module in model.nodes(brainstate.nn.Module).values():
            if _has_own(module, "init_state") and not _has_own(module, "reset_state"):
                _reset_by_init(module, **options)
    return set(map(id, trace.get_write_states()))


def _without_methods(
    model: brainstate.nn.Module, done: Container[int], start: dict[Path, PyTree]
) -> dict[Path, brainstate.State]:
    """The states in `start` that no method has set and whose module has no `reset_state`."""
    modules = model.nodes(brainstate.nn.Module)
    owner = lambda path: modules[max((p for p in modules if path[: len(p)] == p), key=len)]
    found = {p: st for p, st in model.states().items() if p in start and id(st) not in done}
    return {p: st for p, st in found.items() if not _has_own(owner(p), "reset_state")}


def _has_own(module: brainstate.nn.Module, method: str) -> bool:
    return getattr(type(module), method) is not getattr(brainstate.nn.Module, method)


def _reset_by_init(module: brainstate.nn.Module, **options: Option) -> None:
    """Give the states of a module the values of those that its `init_state` makes.

    The state objects stay the same, because others may hold them.
    """
    is_leaf = lambda value: not isinstance(value, list | dict | tuple)
    before = module.states()
    names = {path[0] for path in before}
    kept = {k: jax.tree.map(lambda a: a, vars(module)[k], is_leaf=is_leaf) for k in names}
    module.init_state(**options)
    made = module.states()
    vars(module).update(kept)
    for path, state in before.items():
        if path in made and made[path] is not state:
            state.value = made[path].value


def strengthen(model: brainstate.nn.Module) -> None:
    """Give states types of their own: one that was made of a Python number gets one in the first step only,
    and the second would be another program."""
    is_weak = lambda a: getattr(a, "weak_type", False)  # a key has no such type
    for state in model.states().values():
        if any(map(is_weak, jax.tree.leaves(state.value))):
            state.value = jax.tree.map(lambda a: jax.lax.convert_element_type(a, a.dtype), state.value)


def initial_states(learner: ETraceAlgorithm, size: int, hidden: PyTree) -> dict[Path, PyTree]:
    """The initial values of the states that a reset sets and that have `size` samples in front, by path."""
    model = learner.model

    before = {id(st): st.value for st in model.states().values()}

    def start(size: int) -> dict[int, PyTree]:
        """The values that methods of the model set for `size` samples, by the `id` of the state."""

        def methods() -> None:
            _reset_by_methods(model, batch_size=size)

        try:
            pure = Pure.trace(methods)
            _, new = pure(pure.values())
        finally:
            for st in model.states().values():
                st.value = before[id(st)]
        parts = zip(pure.states, pure.trees, new, pure.written, strict=True)
        return {id(st): jax.tree.unflatten(tree, leaves) for st, tree, leaves, written in parts if written}

    values, more = start(size), jax.eval_shape(lambda: start(size + 1))
    fixed = {path: learner._start[path] for path in _without_methods(model, values, learner._start)}
    found = {
        tuple(map(str, path)): value
        for path, value in fixed.items()
        if all(jnp.shape(leaf)[:1] == (size,) for leaf in jax.tree.leaves(value))
    }
    for path, st in model.states().items():
        now = before[id(st)]
        if id(st) not in values or _shapes(now) != _shapes(values[id(st)]):
            continue
        # an axis of samples is one that is longer for one more of them, and not just as long as they are many
        first = [jnp.shape(leaf)[:1] for leaf in jax.tree.leaves((now, more.get(id(st))))]
        if first == [(size,)] * (len(first) // 2) + [(size + 1,)] * (len(first) // 2):
            found[tuple(map(str, path))] = values[id(st)]
    # an inexact array with axes; a counter or a clock has none
    is_number = lambda a: jnp.ndim(a) and jnp.issubdtype(jnp.result_type(a), jnp.inexact)
    has_numbers = lambda tree: any(map(is_number, jax.tree.leaves(tree)))
    missing = [h.path for h in hidden if not any(h.path[: len(p)] == p for p in found)]
    missing += [
        path
        for path, st in ((tuple(map(str, p)), st) for p, st in model.states().items())
        if id(st) in values and path not in found and path not in missing and has_numbers(before[id(st)])
    ]
    if missing:
        names = ", ".join(f"`{show_path(p)}`" for p in missing)
        raise CompilationError(
            f"Samples of a batch cannot be reset one by one: {names} has no axis of {size} samples in "
            "front, or the `reset_state` or `init_state` of its module does not give it one for "
            f"`batch_size={size}`."
        )
    return found


def reset_model(learner: ETraceAlgorithm, **options: Option) -> None:
    """Reset the states of the model, not the traces; warn of hidden states that nothing resets."""
    done = reset(learner.model, learner._start, **options)
    compiled = learner._cache.known
    hidden = {} if compiled is None else hidden_of(compiled)
    left = ", ".join(f"`{name}`" for name, st in hidden.items() if id(st) not in done)
    if left:
        warn_user(
            f"A reset leaves {left} as it is, so that a sequence starts from the end of the one before. "
            "Set it in the `reset_state` of its module. A module without `reset_state` is reset by its "
            "`init_state` or, without either, to the values when the learner was made.",
            about=learner.model,
        )


def reset_rows(learner: ETraceAlgorithm, rows: Array) -> None:
    """Reset the states and traces of the samples that are flagged in `rows`."""
    if rows.ndim != 1 or rows.dtype != bool:
        raise ValueError(f"`rows` has a boolean for each sample, not {rows.dtype}{list(rows.shape)}.")
    found = by_path(learner.model)
    start = initial_states(learner, len(rows), learner.graph.module_info.hidden)
    old = {path: found[path].value for path in start}, learner._values()
    states, traces = learner._cache.now.reset_samples(rows, start, *old)
    for path, value in states.items():
        found[path].value = value
    learner._store(traces)
    learner.steps.value = learner.steps.value  # so that `StateChanges` sees the states as set by the learner


def _shapes(tree: PyTree) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)  # which knows units
    return structure, [(jnp.shape(a), jnp.result_type(a)) for a in leaves]
