"""Axis labels: the shape of an operation's eligibility trace, from an einsum equation.

A weight enters its output as a contraction, `y[out] += sum x[inp] * w[weight]`, written as
`"bi,io->bo"` (or `"o->bo"` when the factor is one). The trace of that weight has the axes of `y`
that `w` lacks, then those of `w`. The labels determine all arithmetic on a trace:

    instant   x * J      broadcast over the trace        J has the axes of y
    decay     D * trace  broadcast over the trace        D has the axes of y
    contract  g * trace  summed over the axes not in w
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp

from .._types import Array

Labels = tuple[str, ...]
Result = TypeVar("Result")


def _first(x: Array, *_: Array) -> Array:
    return x


@dataclass(frozen=True)
class Term:
    """How one weight enters `y`: an einsum equation over views of the operands.

    Attributes:
        letters: The equation, `'x,weight->y'` or `'weight->y'`. `...` stands for leading axes that the
            output has, and the factor may have.
        x: `x(*inputs)` is the factor that the weight is multiplied with; by default the first input.
        w: `w(weight)` is the weight with the axes of the equation.
        y: `y(q, *inputs)` takes an array shaped as the output to the axes of the equation.
    """

    letters: str
    x: Callable[..., Array] = _first
    w: Callable[..., Array] = _first
    y: Callable[..., Array] = _first

    def parse(self) -> tuple[str | None, str, str]:
        """The labels of the factor (None if the factor is one), of the weight and of the output."""
        left, arrow, y = self.letters.replace(" ", "").partition("->")
        *x, w = left.split(",")
        letters = "".join((*x, w, y)).replace("...", "")
        doubled = any(len(set(s)) < len(s) for s in (part.replace("...", "") for part in (*x, w, y)))
        if not arrow or len(x) > 1 or doubled or not (letters == "" or letters.isalpha()) or "..." in w:
            raise ValueError(
                f"The axis labels {self.letters!r} must read 'x,weight->y' or 'weight->y', each label at "
                "most once in a place, with '...' for leading axes of x and y; for example "
                "'...i,io->...o'."
            )
        return (x[0] if x else None), w, y


@dataclass(frozen=True)
class Layout:
    """The axis labels of one weight at one site, including the axes that `vmap` and loops add in front.

    There is one level for each added axis, outermost first: `inputs[level]` says which inputs have it,
    `weight[level]` whether the weight has it. The output always has it.
    """

    term: Term
    inputs: tuple[tuple[bool, ...], ...]
    weight: tuple[bool, ...]
    x: Labels | None
    w: Labels
    y: Labels

    @property
    def trace(self) -> Labels:
        return tuple(a for a in self.y if a not in self.w) + self.w

    @property
    def x_is_viewed(self) -> bool:
        """Whether the labels `x` describe a view of the inputs, not the first input itself."""
        return self.term.x is not _first

    @property
    def y_is_viewed(self) -> bool:
        """Whether the labels `y` describe a view of the output, not the output itself."""
        return self.term.y is not _first

    @property
    def w_is_viewed(self) -> bool:
        """Whether the labels `w` describe a view of the weight, not the weight itself."""
        return self.term.w is not _first

    def factor(self, inputs: Sequence[Array]) -> tuple[Array, Labels] | None:
        """The factor of `dy/dw` and its labels; None if it is one.

        Axes that neither the weight nor the output has are summed over.
        """
        if self.x is None:
            return None
        x = over_levels(self.term.x, self.inputs)(*inputs)
        extra = tuple(i for i, a in enumerate(self.x) if a not in self.w and a not in self.y)
        return jnp.sum(x, axis=extra), tuple(a for a in self.x if a in self.w or a in self.y)

    def view_y(self, q: Array, inputs: Sequence[Array]) -> Array:
        """View an array shaped as the output with the axes `y`."""
        return over_levels(self.term.y, [(True, *level) for level in self.inputs])(q, *inputs)

    def view_w(self, w: Array) -> Array:
        """View the weight with the axes `w`."""
        return over_levels(self.term.w, [(level,) for level in self.weight])(w)


def layout(term: Term, inputs: tuple[tuple[bool, ...], ...], weight: tuple[bool, ...], y_ndim: int) -> Layout:
    """The layout of one weight of a site whose output has `y_ndim` axes, including levels."""
    x, w, y = term.parse()
    front = tuple(f"^{i}" for i in range(len(weight)))
    free = y_ndim - len(front) - len(y.replace("...", ""))
    if term.y is _first and (free < 0 or (free > 0 and "..." not in y)):
        raise ValueError(
            f"The axis labels {term.letters!r} do not fit an output of {y_ndim - len(front)} axes."
        )
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


def _expand(letters: str, lead: Labels) -> Labels:
    head, dots, tail = letters.partition("...")
    return tuple(head) + (lead if dots else ()) + tuple(tail)


def over_levels(fn: Callable[..., Result], levels: Sequence[Sequence[bool]]) -> Callable[..., Result]:
    """`jax.vmap` of `fn` over a leading axis of the flagged arguments, for each level, outermost first."""
    for level in reversed(levels):
        if any(level):
            fn = jax.vmap(fn, in_axes=tuple(0 if flag else None for flag in level))
    return fn


def align(q: Array, have: Labels, want: Labels) -> Array:
    """Transpose `q` to the axis order `want`, with an axis of length one for each label that it lacks."""
    q = jnp.transpose(q, [have.index(a) for a in want if a in have])
    return jnp.expand_dims(q, [i for i, a in enumerate(want) if a not in have])
