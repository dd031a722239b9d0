"""The states of a `brainstate` model: found by path at each call, and reset.

`init_all_states` makes new state objects, so none is stored.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

import brainstate
import jax
import jax.numpy as jnp

from .._compiler import CompilationError
from .._compiler.step import Path, show_path
from .._frontends.modules import by_path, states_of
from .._frontends.pure import Pure
from .._lines import warn_user
from .._online.sequence import is_traced
from .._types import Array, Option, PyTree
from .compiled_step import CompiledStep

if TYPE_CHECKING:
    from .stateful import ETraceAlgorithm


def leaves_of(compiled: CompiledStep) -> list[Array]:
    """The leaves of the states that a step touches."""
    return [leaf for st in states_of(compiled.function).values() for leaf in jax.tree.leaves(st.value)]


def hidden_of(compiled: CompiledStep) -> dict[str, brainstate.State]:
    """The hidden states of a step, by name."""
    hidden = {id(h.state) for h in compiled.info.hidden}
    found = zip(compiled.info.entries, states_of(compiled.function).values(), strict=True)
    return {show_path(e.path): st for e, st in found if not e.is_fixed and id(e.state) in hidden}


def values_now(model: brainstate.nn.Module) -> dict[Path, PyTree]:
    """The values of the short-term states by path, for resets; without those that are being traced."""
    states = {p: st for p, st in by_path(model).items() if isinstance(st, brainstate.ShortTermState)}
    return {p: st.value for p, st in states.items() if not is_traced(st.value)}


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
    modules = {tuple(map(str, p)): m for p, m in model.nodes(brainstate.nn.Module).items()}
    owner = lambda path: modules[max((p for p in modules if path[: len(p)] == p), key=len)]
    found = {p: st for p, st in by_path(model).items() if p in start and id(st) not in done}
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


def initial_states(learner: ETraceAlgorithm, size: int) -> dict[Path, PyTree]:
    """The initial values of the states that a reset sets and that have `size` samples in front, by path."""
    states = by_path(learner.model)
    before = {path: st.value for path, st in states.items()}

    def start(size: int) -> dict[Path, PyTree]:
        """The values that methods of the model set for `size` samples."""

        def methods() -> None:
            _reset_by_methods(learner.model, batch_size=size)

        try:
            pure = Pure.trace(methods)
            _, new = pure(pure.values())
        finally:
            for path, st in states.items():
                st.value = before[path]
        parts = zip(pure.states, pure.trees, new, pure.written, strict=True)
        by_id = {id(st): jax.tree.unflatten(tree, leaves) for st, tree, leaves, written in parts if written}
        return {path: by_id[id(st)] for path, st in states.items() if id(st) in by_id}

    # an axis of samples is one that is longer for one more of them, and not just as long as they are many
    values, more = start(size), jax.eval_shape(lambda: start(size + 1))
    done = {id(states[path]) for path in values}
    fixed = _without_methods(learner.model, done, learner._start)
    found = {p: learner._start[p] for p in fixed if _has_samples(learner._start[p], size)}
    for path, value in values.items():
        is_per_sample = path in more and _has_samples(value, size) and _has_samples(more[path], size + 1)
        if is_per_sample and _shapes(before[path]) == _shapes(value):
            found[path] = value
    # an inexact array with axes; a counter or a clock has none
    is_number = lambda a: jnp.ndim(a) and jnp.issubdtype(jnp.result_type(a), jnp.inexact)
    missing = [
        h.path for h in learner.graph.module_info.hidden if not any(h.path[: len(p)] == p for p in found)
    ]
    missing += [
        path
        for path in values
        if path not in (*found, *missing) and any(map(is_number, jax.tree.leaves(before[path])))
    ]
    if missing:
        names = ", ".join(f"`{show_path(p)}`" for p in missing)
        raise CompilationError(
            f"Samples of a batch cannot be reset one by one: {names} has no axis of {size} samples in "
            "front, or the `reset_state` or `init_state` of its module does not give it one for "
            f"`batch_size={size}`."
        )
    return found


def _has_samples(value: PyTree, size: int) -> bool:
    """Whether each array of a state has this many samples in front."""
    return all(jnp.shape(leaf)[:1] == (size,) for leaf in jax.tree.leaves(value))


def _shapes(tree: PyTree) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)  # which knows units
    return structure, [(jnp.shape(a), jnp.result_type(a)) for a in leaves]


def reset_model(learner: ETraceAlgorithm, **options: Option) -> None:
    """Reset the states of the model: by each module's `reset_state`, or else its `init_state`.

    Short-term states of modules with neither are reset to their values when the learner was made. The traces
    stay. Warns of hidden states that nothing resets.
    """
    start = learner._start
    done = _reset_by_methods(learner.model, **options)
    for path, state in _without_methods(learner.model, done, start).items():
        state.value = start[path]
        done.add(id(state))
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
    start = initial_states(learner, len(rows))
    old = {path: found[path].value for path in start}, learner._values()
    states, traces = learner._cache.now.reset_samples(rows, start, *old)
    for path, value in states.items():
        found[path].value = value
    learner._store(traces)
    learner.steps.value = learner.steps.value  # so that `StateChanges` sees the states as set by the learner
