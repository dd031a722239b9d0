"""Cache the result of an analysis on the object that it analyses: a program, a traced step or a graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

Of = TypeVar("Of")
Given = ParamSpec("Given")
Analysis = TypeVar("Analysis")

_CACHE = "_analyses"  # the attribute that holds the results, so that they live as long as the object


def cached(
    function: Callable[Concatenate[Of, Given], Analysis],
) -> Callable[Concatenate[Of, Given], Analysis]:
    """Compute `function(of, *options)` once for each object and each set of options."""

    @wraps(function)
    def lookup(of: Of, /, *args: Given.args, **kwargs: Given.kwargs) -> Analysis:
        results: dict[Hashable, Analysis] = vars(of).setdefault(_CACHE, {})
        hashable = (tuple(a) if isinstance(a, list) else a for a in args)
        key = (function, tuple(hashable), tuple(sorted(kwargs.items())))
        if key not in results:
            results[key] = function(of, *args, **kwargs)
        return results[key]

    return lookup


def clear(of: object) -> None:
    """Delete all results, because the object has changed."""
    vars(of).pop(_CACHE, None)
