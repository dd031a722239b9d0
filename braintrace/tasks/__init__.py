"""Tasks that need no download: `get('copying')` makes one, `names()` lists them.

Data are numpy arrays and depend on the seed alone.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable

from .recall import adding, anbn, copying, dms
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


# of options; others are at least 1, or 0 where they are not counts
AT_LEAST = {"delay": 0, "gap": 0, "length": 2, "stimuli": 2, "smoothness": 0.1}


def names() -> list[str]:
    """The names that `get` knows."""
    return list(FACTORIES)


def get(name: str, **options: float) -> Task:
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
    for option, value in options.items():
        _check_option(name, option, value, known[option].default)
    return FACTORIES[name](**options)


def _check_option(name: str, option: str, value: float, usual: float) -> None:
    """An option is a number of the kind of its default, and not too small."""
    whole = isinstance(usual, int)
    least = AT_LEAST.get(option, 1 if whole else 0)
    right = isinstance(value, numbers.Integral if whole else numbers.Real) and not isinstance(value, bool)
    if not right or not least <= value < math.inf:
        kind = "a whole number" if whole else "a number"
        raise ValueError(
            f"The option {option!r} of the task {name!r} is {kind} of at least {least}, such as {usual}, not "
            f"{value!r}."
        )


def summary(name: str) -> str:
    """Return the description of a task in one line; makes no data.

    >>> summary("adding")
    'Add the two marked numbers of a row of random numbers.'
    """
    return (inspect.getdoc(FACTORIES[name]) or "").partition("\n")[0]
