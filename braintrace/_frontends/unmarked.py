"""Layers of `brainstate.nn` that have a marked namesake in `braintrace.nn`."""

from __future__ import annotations

from collections.abc import Sequence

import brainstate

from .._compiler.step import Path, show_path


def unmarked_layers(model: brainstate.nn.Module, params: Sequence[Path]) -> str:
    """Which layers to use instead of those that hold these parameters; nothing where there are none."""
    from .. import nn

    modules = {tuple(map(str, p)): m for p, m in model.nodes(brainstate.nn.Module).items()}
    found: dict[str, list[str]] = {}
    for path in params:
        for end in range(len(path)):  # the outermost layer: a cell, not the products inside it
            kind = type(modules.get(path[:end]))
            own = getattr(brainstate.nn, kind.__name__, None) is kind
            if own and kind.__name__ in vars(nn):
                where = f"`{show_path(path[:end])}`" if end else "the model"
                names = found.setdefault(kind.__name__, [])
                names += [where] if where not in names else []
                break
    return " ".join(
        f"Use `braintrace.nn.{name}` instead of `brainstate.nn.{name}` for {', '.join(where)}."
        for name, where in found.items()
    )
