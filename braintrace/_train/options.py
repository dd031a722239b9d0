"""The options of `fit`: their types, defaults and checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from pathlib import Path
from typing import Literal, TypedDict, TypeVar

from .._online.request import WindowSize
from .._types import Array, Mesh, PyTree
from .batches import Batches
from .result import Row

F = TypeVar("F", bound=Callable[..., object])
Metric = Callable[[PyTree, PyTree, Array], Array]


class FitOptions(TypedDict, total=False):
    """The options of `fit`, which its docstring describes; without a default in `USUAL` they are None."""

    epochs: int | None
    max_batches: int | None
    max_steps: int | None
    update_every: int | Literal["sequence"] | None
    metrics: Mapping[str, Metric] | None
    window: WindowSize | None
    rank: int | None
    basis: str | None
    across: str | None
    chunk_size: int | None
    reset: bool
    batched: bool
    eval_batches: Batches | None
    eval_every: int | None
    stop_when: Callable[[Row], bool] | None
    checkpoint_dir: str | Path | None
    checkpoint_every: int
    resume: bool
    metrics_file: str | Path | None
    progress: bool
    mesh: Mesh | None


USUAL: FitOptions = {
    "reset": True,
    "batched": True,
    "checkpoint_every": 100,
    "resume": False,
    "progress": True,
}
POSITIVE = ("epochs", "max_batches", "max_steps", "eval_every", "checkpoint_every")


def with_options(function: F) -> F:
    """Show each option and its default in the signature of a function, in place of `**options`."""
    own = inspect.signature(function)
    first = [p for p in own.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=USUAL.get(name), annotation=kind.__forward_arg__)
        for name, kind in FitOptions.__annotations__.items()
    ]
    function.__signature__ = own.replace(parameters=[*first, *options])  # type: ignore[attr-defined]
    return function


def complete(options: FitOptions, *, stream: bool) -> FitOptions:
    """Return all options, with their defaults for sequences or for a stream, after a check."""
    for name in options.keys() - FitOptions.__annotations__.keys():
        raise TypeError(f"fit() got an unexpected keyword argument {name!r}")
    found: FitOptions = {**dict.fromkeys(FitOptions.__annotations__), **USUAL, **options}  # type: ignore[typeddict-item]
    if found["update_every"] is None:
        found["update_every"] = 1 if stream else "sequence"
    every = found["update_every"]
    if every != "sequence" and not (isinstance(every, int) and every >= 1):
        raise ValueError(f"`update_every` is 'sequence' or a number of steps, not {every!r}.")
    given: Mapping[str, object] = found
    if any(isinstance(n, int) and n < 1 for n in map(given.get, POSITIVE)):
        raise ValueError(f"`{'`, `'.join(POSITIVE[:-1])}` and `{POSITIVE[-1]}` are at least 1.")
    if not stream and found["max_steps"] is not None:
        raise ValueError("`max_steps` is for a `braintrace.Stream`; for sequences pass `max_batches`.")
    if stream and found["epochs"] is not None:
        raise ValueError("A stream has no epochs; pass `max_steps`.")
    if stream and every == "sequence":
        raise ValueError("A stream has no end after which to update; `update_every` is a number of steps.")
    found["reset"] = found["reset"] and not stream
    return found
