"""Tasks that need no download: `get('copying')` makes one, `names()` lists them.

Data are numpy arrays and depend on the seed alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .memory import adding, anbn, copying, dms
from .recordings import (
    digits_pixels,
    digits_rows,
    spiking_digits_pixels,
    spiking_digits_rows,
    spoken_digits,
    vowels,
)
from .series import integrator, laser, lorenz, mackey_glass, text
from .spikes import evidence, randman
from .task import Batch as Batch
from .task import Split as Split
from .task import Task as Task

FACTORIES: dict[str, Callable[..., Task]] = {
    factory.__name__: factory
    for factory in (
        copying,
        adding,
        anbn,
        dms,
        evidence,
        randman,
        integrator,
        mackey_glass,
        lorenz,
        digits_rows,
        digits_pixels,
        spiking_digits_rows,
        spiking_digits_pixels,
        spoken_digits,
        vowels,
        laser,
        text,
    )
}


def names() -> list[str]:
    """The names that `get` knows."""
    return list(FACTORIES)


def get(name: str, **options: Any) -> Task:
    """The task of that name; `options` are those of its factory, such as `delay` of copying.

    >>> get("adding", length=20).length
    20
    """
    if name not in FACTORIES:
        raise ValueError(f"Unknown task {name!r}; known are {', '.join(names())}.")
    known = inspect.signature(FACTORIES[name]).parameters
    if unknown := [option for option in options if option not in known]:
        takes = f"takes {', '.join(known)}" if known else "takes no options"
        raise ValueError(f"The task {name!r} has no option {unknown[0]!r}; it {takes}.")
    return FACTORIES[name](**options)


def summary(name: str) -> str:
    """What a task asks for, in a line; makes no data.

    >>> summary("adding")
    'Add the two marked numbers of a row of random numbers.'
    """
    return (inspect.getdoc(FACTORIES[name]) or "").partition("\n")[0]
