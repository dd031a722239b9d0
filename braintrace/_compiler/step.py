"""One time step of a model, the input of the compiler: a jaxpr, and the role of each of its leaves."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax

from .. import _compat
from .._meshes import Spec
from .._types import Handle, Model
from .._types import Path as Path


def show_path(path: Iterable[object]) -> str:
    """A path as users write it, such as `rnn.h` or `layers.0.h`."""
    return ".".join(map(str, path))


def show_paths(paths: Iterable[Path]) -> str:
    """A comma-separated list of paths in backticks, without repetition."""
    return ", ".join(f"`{show_path(p)}`" for p in dict.fromkeys(paths))


def name_of(path: Iterable[object]) -> str:
    """A unique string for a path: dots inside a part are escaped."""
    return ".".join(str(part).replace("\\", "\\\\").replace(".", "\\.") for part in path)


class Role(enum.Enum):
    """The role of a state in learning."""

    PARAMETER = "parameter"
    HIDDEN = "hidden"  # recurrent state: its floating arrays may have traces
    OTHER = "other"  # carried without a trace: counters, random keys, running statistics


@dataclass(frozen=True, eq=False)
class State:
    """A pytree of arrays that a step takes and returns."""

    path: Path
    role: Role
    tree: jax.tree_util.PyTreeDef
    kind: str  # the front end's word for it, used in messages
    unit: str = ""
    grouped: bool = False  # whether the last axis enumerates several states of one unit
    handle: Handle = None  # the front end's object that holds it


@dataclass(frozen=True, eq=False)
class Step:
    """A jaxpr `(arguments, leaves of the states) -> (outputs, leaves of the states)` with its metadata."""

    closed_jaxpr: _compat.ClosedJaxpr
    num_args: int
    out_tree: jax.tree_util.PyTreeDef
    states: tuple[State, ...]
    name: str
    arg_names: tuple[str, ...] = ()
    model: Model = None  # the front end's model object
    # advice on marked replacements for the layers with these parameters
    unmarked: Callable[[Sequence[Path]], str] = lambda paths: ""
    specs: tuple[Spec | None, ...] | None = None  # partition specs of outputs and new leaves, if typed
    found: bool = False  # whether the compiler set the marks (`mark='auto'`)

    @property
    def owners(self) -> list[State]:
        """The state of each leaf."""
        return [st for st in self.states for _ in range(st.tree.num_leaves)]
