"""Index letters: what an eligibility trace of an operation looks like.

A weight enters its output as a contraction, `y[out] += sum x[inp] * w[weight]`, written as
`"bi,io->bo"` (or `"o->bo"` when the factor is one). The trace of that weight has the letters of `y`
that `w` lacks, then those of `w`; from the letters alone,

    instant   x * J      broadcast over the trace        J has the letters of y
    decay     D * trace  broadcast over the trace        D has the letters of y
    contract  g * trace  summed over the letters not in w
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Letters = tuple[str, ...]


def _first(x: Any, *_: Any) -> Any:
    return x


@dataclass(frozen=True)
class Term:
    """How one weight enters `y`: an equation over views of what the operation is given.

    `x(*inputs)` is the factor (by default the first input), `w(weight)` the weight and
    `y(q, *inputs)` any array with the axes of the output, each seen with the letters of the equation.
    `...` stands for leading axes that the output has, and the factor may have.
    """

    letters: str
    x: Callable[..., Any] = _first
    w: Callable[..., Any] = _first
    y: Callable[..., Any] = _first

    def parse(self) -> tuple[str | None, str, str]:
        """The letters of the factor (None: there is none), of the weight and of the output."""
        left, arrow, y = self.letters.replace(" ", "").partition("->")
        *x, w = left.split(",")
        letters = "".join((*x, w, y)).replace("...", "")
        doubled = any(len(set(s)) < len(s) for s in (part.replace("...", "") for part in (*x, w, y)))
        if not arrow or len(x) > 1 or doubled or not (letters == "" or letters.isalpha()) or "..." in w:
            raise ValueError(
                f"The letters {self.letters!r} must read 'x,weight->y' or 'weight->y', each letter at "
                "most once in a place, with '...' for leading axes of x and y; for example "
                "'...i,io->...o'."
            )
        return (x[0] if x else None), w, y


@dataclass(frozen=True)
class Layout:
    """The letters of one weight at one site, with the axes that `vmap` and loops put in front.

    There is one level for each of these axes, outermost first; `inputs[level]` says which inputs have
    it, `weight[level]` whether the weight does. The output always does.
    """

    term: Term
    inputs: tuple[tuple[bool, ...], ...]
    weight: tuple[bool, ...]
    x: Letters | None
    w: Letters
    y: Letters

    @property
    def trace(self) -> Letters:
        return tuple(a for a in self.y if a not in self.w) + self.w

    @property
    def x_is_viewed(self) -> bool:
        """Whether the letters `x` are not simply the axes of the first input."""
        return self.term.x is not _first

    @property
    def y_is_viewed(self) -> bool:
        """Whether the letters `y` are not simply the axes of the output."""
        return self.term.y is not _first

    @property
    def w_is_viewed(self) -> bool:
        """Whether the letters `w` are not simply the axes of the weight."""
        return self.term.w is not _first

    def factor(self, inputs: Sequence[Any]) -> tuple[Any, Letters] | None:
        """The factor of `dy/dw` and its letters; None where it is one.

        Letters that neither the weight nor the output has are summed over.
        """
        if self.x is None:
            return None
        x = over_levels(self.term.x, self.inputs)(*inputs)
        extra = tuple(i for i, a in enumerate(self.x) if a not in self.w and a not in self.y)
        return jnp.sum(x, axis=extra), tuple(a for a in self.x if a in self.w or a in self.y)

    def view_y(self, q: Any, inputs: Sequence[Any]) -> Any:
        """An array with the axes of the output, seen with the letters `y`."""
        return over_levels(self.term.y, [(True, *level) for level in self.inputs])(q, *inputs)

    def view_w(self, w: Any) -> Any:
        """The weight, seen with the letters `w`."""
        return over_levels(self.term.w, [(level,) for level in self.weight])(w)


def layout(term: Term, inputs: tuple[tuple[bool, ...], ...], weight: tuple[bool, ...], y_ndim: int) -> Layout:
    """The layout of one weight of a site whose output has `y_ndim` axes, levels included."""
    x, w, y = term.parse()
    front = tuple(f"^{i}" for i in range(len(weight)))
    free = y_ndim - len(front) - len(y.replace("...", ""))
    if term.y is _first and (free < 0 or (free > 0 and "..." not in y)):
        raise ValueError(f"The letters {term.letters!r} do not fit an output of {y_ndim - len(front)} axes.")
    lead = tuple(f"_{i}" for i in range(free)) if "..." in y else ()
    in_x = tuple(a for a, level in zip(front, inputs, strict=True) if any(level))
    in_w = tuple(a for a, level in zip(front, weight, strict=True) if level)
    return Layout(
        term=term,
        inputs=inputs,
        weight=weight,
        x=None if x is None else in_x + _expand(x, lead),
        w=in_w + _expand(w, ()),
        y=front + _expand(y, lead),
    )


def _expand(letters: str, lead: Letters) -> Letters:
    head, dots, tail = letters.partition("...")
    return tuple(head) + (lead if dots else ()) + tuple(tail)


def over_levels(fn: Callable[..., Any], levels: Sequence[Sequence[bool]]) -> Callable[..., Any]:
    """`fn` mapped over a leading axis of the flagged arguments, for each level, outermost first."""
    for level in reversed(levels):
        if any(level):
            fn = jax.vmap(fn, in_axes=tuple(0 if flag else None for flag in level))
    return fn


def align(q: jax.Array, have: Letters, want: Letters) -> jax.Array:
    """`q` with its axes in the order of `want`, and an axis of one for each letter that it lacks."""
    q = jnp.transpose(q, [have.index(a) for a in want if a in have])
    return jnp.expand_dims(q, [i for i, a in enumerate(want) if a not in have])
