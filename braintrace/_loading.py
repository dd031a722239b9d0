"""Fill a model's parameters from a tree of values, as of 0.2.x, of `brainstate`'s cells or of this package.

A tree is any nesting of dictionaries and lists, or a flat dictionary with tuples or dotted names for keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp

from . import nn
from ._compiler.step import show_path
from ._lines import warn_user
from ._types import Path, PyTree, Value
from .nn.dynamics import Dynamics


class Loaded(NamedTuple):
    """Parameters without a value, and values without a parameter, by dotted name."""

    missing: list[str]
    left_over: list[str]


class Names(NamedTuple):
    """Other names of a cell's parameters: they are joined along an axis, then cut into those of the cell."""

    old: tuple[str, ...]
    new: tuple[str, ...]
    axis: int = -1
    signs: tuple[int, ...] = (1, 1, 1, 1)


NAMES: list[tuple[type, Names]] = [
    (nn.GRUCell, Names(("Wrz",), ("Wr", "Wz"))),
    (brainstate.nn.GRUCell, Names(("Wr", "Wz"), ("Wrz",))),
    (brainstate.nn.LSTMCell, Names(("Wi", "Wg", "Wf", "Wo"), ("W",))),
    (brainstate.nn.URLSTMCell, Names(("Wf", "Wr", "Wu", "Wo"), ("W",))),
    (nn.CFNCell, Names(("Wf", "Wi"), ("Wfi",))),
    (nn.MinimalRNNCell, Names(("phi",), ("Wx",))),
    (nn.MinimalRNNCell, Names(("W_u",), ("Wf",))),
    (nn.LRUCell, Names(("B_re", "B_im"), ("B",))),
    (nn.LRUCell, Names(("C_re", "C_im"), ("C",), axis=0, signs=(1, -1))),
    *((nn.LRUCell, Names((f"{name}_log",), (name,))) for name in ("nu", "theta", "gamma")),
    *((nn.LRUCell, Names((f"h_{name}",), (name,))) for name in ("re", "im")),
    (nn.LeakyRateReadout, Names(("W",), ("weight",))),
]

# cells that compute something else there, so that no parameters of ours would do the same
OTHER_CELLS = {
    nn.MiniGRU: "in 0.2.x the gate of a MiniGRU sees `h` as well",
    nn.MiniLSTM: "in 0.2.x the gates of a MiniLSTM see `h` as well, and are not divided by their sum",
}


def load_parameters(model: brainstate.nn.Module, tree: PyTree, *, strict: bool = True) -> Loaded:
    """Fill the parameters of `model` from `tree`, by path.

    Names may be our own, those of 0.2.x or those of `brainstate.nn`: separate and fused gates, `phi`, `h_re`
    and the like are translated. Running statistics are filled if the tree has them; hidden states are not.

    Args:
        model: The model to fill.
        tree: Nested dictionaries of arrays.
        strict: Fill nothing unless every parameter and every array of the tree has its place.

    Returns:
        The names that were missing from the tree, and those that were left over.

    >>> import braintrace, jax.numpy as jnp
    >>> gate = {"weight": {"weight": jnp.ones((7, 4)), "bias": jnp.zeros(4)}}
    >>> cell = braintrace.nn.LSTMCell(3, 4)
    >>> load_parameters(cell, {"Wi": gate, "Wg": gate, "Wf": gate, "Wo": gate})
    Loaded(missing=[], left_over=[])
    >>> load_parameters(cell, {"Wi": gate}, strict=False).missing
    ['W.weight.bias', 'W.weight.weight']
    """
    given = dict(_leaves(tree))
    modules = {_as_path(path): module for path, module in model.nodes(brainstate.nn.Module).items()}
    for path, module in modules.items():
        _compare_activation(path, module, given)
        for kind, names in NAMES:
            if isinstance(module, kind):
                _translate(given, path, names)
    states = {_as_path(path): st for path, st in model.states().items()}
    hidden = {path for path, st in states.items() if isinstance(st, brainstate.ShortTermState)}
    hidden |= {(*path, name) for path, module in modules.items() for name in _hidden_names(module)}
    values: list[tuple[brainstate.State, PyTree]] = []
    missing: list[str] = []
    unfit: list[str] = []
    for path, state in states.items():
        if not isinstance(state, brainstate.LongTermState):
            continue
        leaves, structure = jax.tree_util.tree_flatten_with_path(state.value, is_leaf=_has_unit)
        new = []
        for key, leaf in leaves:
            name = (*path, *(jax.tree_util.keystr((k,), simple=True) for k in key))
            if name in given:
                new.append(_fitted(name, given.pop(name), leaf, unfit))
            else:
                new.append(leaf)
                missing += [show_path(name)] if isinstance(state, brainstate.ParamState) else []
        values.append((state, jax.tree.unflatten(structure, new)))
    left_over = [show_path(key) for key in given if not any(key[: len(h)] == h for h in hidden)]
    if unfit:
        raise ValueError(f"Values do not fit their parameters: {'; '.join(unfit)}.")
    if strict and (missing or left_over):
        notes = [why for kind, why in OTHER_CELLS.items() if any(type(m) is kind for m in modules.values())]
        raise ValueError(
            f"The tree does not fit the model. Missing: {', '.join(missing) or 'nothing'}. Left over: "
            f"{', '.join(left_over) or 'nothing'}. {''.join(f'Note that {why}. ' for why in notes)}"
            "`strict=False` fills what fits and returns these names."
        )
    for state, value in values:
        state.value = value
    return Loaded(missing, left_over)


def _leaves(tree: PyTree, path: Path = ()) -> Iterator[tuple[Path, Value]]:
    """The arrays of a tree, each with its path; of states, those of their values."""
    if isinstance(tree, dict) or hasattr(tree, "items"):
        for key, part in tree.items():
            yield from _leaves(part, (*path, *_as_path(key if isinstance(key, tuple) else (key,))))
    elif isinstance(tree, list | tuple):
        for i, part in enumerate(tree):
            yield from _leaves(part, (*path, str(i)))
    elif isinstance(tree, brainstate.State | brainstate.TreefyState):
        yield from _leaves(tree.value, path)
    elif tree is not None:
        yield path, tree


def _as_path(keys: tuple[object, ...]) -> Path:
    return tuple(part for key in keys for part in str(key).replace("/", ".").split("."))


def _translate(given: dict[Path, Value], path: Path, names: Names) -> None:
    """Replace values under other names by those that the cell has for them."""
    first = (*path, names.old[0])
    for rest in [key[len(first) :] for key in given if key[: len(first)] == first]:
        keys = [(*path, name, *rest) for name in names.old]
        if all(key in given for key in keys):
            parts = [given.pop(key) * sign for key, sign in zip(keys, names.signs, strict=False)]
            whole = parts[0] if len(parts) == 1 else u.math.concatenate(parts, axis=names.axis)
            cut = [whole] if len(names.new) == 1 else u.math.split(whole, len(names.new), axis=names.axis)
            given.update({(*path, name, *rest): part for name, part in zip(names.new, cut, strict=True)})


def _fitted(path: Path, value: Value, like: Value, unfit: list[str]) -> Value:
    """Convert a value to the type and unit of the one that it replaces."""
    (have, unit), (want, wanted) = ((jnp.shape(u.get_mantissa(v)), u.get_unit(v)) for v in (value, like))
    if have != want:
        unfit.append(f"{show_path(path)} has the shape {have} and not {want}")
        return like
    if not unit.has_same_dim(wanted):
        unfit.append(f"{show_path(path)} has the unit {unit} and not {wanted}")
        return like
    dtype = jnp.result_type(u.get_mantissa(like))
    array = jnp.asarray(u.Quantity(value).to(wanted).mantissa, dtype)
    return u.Quantity(array, unit=wanted) if _has_unit(like) else array


def _has_unit(leaf: object) -> bool:
    return isinstance(leaf, u.Quantity)


def _hidden_names(module: brainstate.nn.Module) -> tuple[str, ...]:
    """The names of a module's hidden states, which exist only once they are initialised."""
    if isinstance(module, Dynamics):
        return tuple(module.initial_values)
    return ("h", "c", "re", "im") if isinstance(module, brainstate.nn.RNNCell) else ()


def _compare_activation(path: Path, module: brainstate.nn.Module, given: dict[Path, Value]) -> None:
    """Warn of a `MinimalRNNCell` of 0.2.x, which has no activation after its first product."""
    if isinstance(module, nn.MinimalRNNCell) and any(key[: len(path) + 1] == (*path, "phi") for key in given):
        x = jnp.linspace(-2.0, 2.0, 5)
        if not jnp.array_equal(module.activation(x), x):
            warn_user(
                f"`{show_path(path) or type(module).__name__}`: in 0.2.x a MinimalRNNCell has no activation "
                "after `phi`. To compute the same, build it with `activation=lambda x: x`."
            )
