"""The states of a `brainstate` model, found by path at each call: `init_all_states` makes new ones."""

from __future__ import annotations

from typing import Any

import brainstate
import jax

from .._compiler.module_info import StateEntry
from .._compiler.step import Path, show_path
from .compiled_step import CompiledStep


def by_path(model: brainstate.nn.Module) -> dict[Path, brainstate.State]:
    """The model's states as they are now."""
    return {tuple(map(str, path)): st for path, st in model.states().items()}


def states_of(form: CompiledStep) -> list[tuple[StateEntry, brainstate.State]]:
    """The states that a step touches, as they are now."""
    found = by_path(form.function.step.model)
    return [(e, found.get(e.path, e.state)) for e in form.info.entries]


def leaves_of(form: CompiledStep) -> list[Any]:
    """The leaves of the states that a step touches."""
    return [leaf for _, st in states_of(form) for leaf in jax.tree.leaves(st.value)]


def hidden_of(form: CompiledStep) -> dict[str, brainstate.State]:
    """The hidden states of a step, by name."""
    hidden = {id(h.state) for h in form.info.hidden}
    return {show_path(e.path): st for e, st in states_of(form) if not e.is_fixed and id(e.state) in hidden}
