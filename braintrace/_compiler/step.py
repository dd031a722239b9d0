"""One time step of a model, as front ends hand it to the compiler: a jaxpr, and what each leaf of it is."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import _compat

Path = tuple[str, ...]


def show_path(path: Iterable[Any]) -> str:
    """A path as users write it: `rnn.h`; a layer of a list is a number in it."""
    return ".".join(map(str, path))


def show_paths(paths: Iterable[Path]) -> str:
    """Paths in a sentence, each once."""
    return ", ".join(f"`{show_path(p)}`" for p in dict.fromkeys(paths))


def name_of(path: Iterable[Any]) -> str:
    """A name that no other path has: a dot within a part is not one between parts."""
    return ".".join(str(part).replace("\\", "\\\\").replace(".", "\\.") for part in path)


class Role(enum.Enum):
    """What a state is to learning."""

    PARAMETER = "parameter"
    HIDDEN = "hidden"  # its floating arrays may carry a trace from step to step
    OTHER = "other"  # carried, but not traced: counters, random keys, running statistics


@dataclass(frozen=True, eq=False)
class State:
    """A tree of arrays that a step is given and hands back."""

    path: Path
    role: Role
    tree: Any
    kind: str  # how its owner calls such a thing, for people
    unit: str = ""
    grouped: bool = False  # the last axis holds several states of one unit
    handle: Any = None  # the front end's own object for it


def _no_advice(paths: Sequence[Path]) -> str:
    return ""


@dataclass(frozen=True, eq=False)
class Step:
    """`(arguments, leaves of the states) -> (outputs, leaves of the states)`, and what they are."""

    closed_jaxpr: _compat.ClosedJaxpr
    num_args: int
    out_tree: Any
    states: tuple[State, ...]
    name: str
    arg_names: tuple[str, ...] = ()
    model: Any = None  # the front end's own object
    unmarked: Callable[[Sequence[Path]], str] = _no_advice  # what to use instead of what holds parameters
    specs: tuple[Any, ...] | None = None  # how outputs and new leaves are spread, if types say it
    found: bool = False  # whether marks were set where parameters meet what is not made of them
