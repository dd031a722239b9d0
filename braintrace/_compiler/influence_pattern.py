"""The sparsity pattern of the influence: which state elements each parameter element reaches in `n` steps.

Sets of state elements are propagated backwards through a step along the links of `positions`, from the new
states to the old states and to the parameters. The elements that a parameter reaches in one step, and those
that state elements reach in each further step, are the nonzero pattern of the influence matrix (SnAp-n). The
pattern depends on the program and its indices, not on the values of parameters or states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .links import Array, Link, Pairs, Same, Shape
from .module_info import ModuleInfo
from .positions import positions_of
from .program import Var
from .samples import Samples
from .step import Path


class Sets:
    """A set of labels for each element, as packed bits of shape (*shape, bytes)."""

    __slots__ = ("bits",)

    def __init__(self, bits: Array) -> None:
        self.bits = bits

    @staticmethod
    def single(labels: Array, count: int) -> Sets:
        """One label for each element."""
        bits = np.zeros((labels.size, (count + 7) // 8), np.uint8)
        found = labels.ravel()
        bits[np.arange(labels.size), found // 8] = 1 << (7 - found % 8)
        return Sets(bits.reshape(*labels.shape, -1))

    def unpacked(self, count: int) -> Array:
        """The sets as booleans of shape (*shape, labels)."""
        return np.unpackbits(self.bits, axis=-1, count=count).astype(bool)

    def __bool__(self) -> bool:
        return bool(self.bits.any())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sets) and np.array_equal(self.bits, other.bits)

    def __or__(self, other: Sets) -> Sets:
        return Sets(self.bits | other.bits)

    def __getitem__(self, index: int) -> Sets:
        return Sets(self.bits[index])

    def stack(self, parts: Sequence[Sets | None], shape: Shape) -> Sets:
        none = np.zeros((*shape, self.bits.shape[-1]), np.uint8)
        return Sets(np.stack([none if p is None else p.bits for p in parts]))

    def carry(self, link: Link, shape: Shape, *, back: bool) -> Sets:
        """The sets at the other end of a link, of the given shape."""
        width = self.bits.shape[-1]
        if isinstance(link, Same):
            return Sets(self.bits.reshape(*shape, width))
        if isinstance(link, Pairs):
            here, there = (link.out, link.inp) if back else (link.inp, link.out)
            result = np.zeros((int(np.prod(shape, dtype=int)), width), np.uint8)
            order = np.argsort(there, kind="stable")
            to, first = np.unique(there[order], return_index=True)
            if len(to):
                given = self.bits.reshape(-1, width)[here[order]]
                result[to] = np.bitwise_or.reduceat(given, first, axis=0)
            return Sets(result.reshape(*shape, width))
        drop, left, grow = link.moves(back=back)
        bits = np.bitwise_or.reduce(self.bits, axis=drop) if drop else self.bits
        bits = np.expand_dims(np.transpose(bits, (*left, len(left))), grow)
        return Sets(np.broadcast_to(bits, (*shape, width)))

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Reached:
    """The reachability between parameter elements and the state elements (labels) of one sample."""

    labels: int
    state_of: list[Path]  # the state of each label
    moves: Array  # (labels, labels): whether a new state element depends on an old one
    params: dict[int, Array]  # for each parameter leaf, the labels reached in one step: (size, bytes)

    @cached_property
    def _steps(self) -> Array:
        """For each old state element, the new ones that depend on it, as packed bits."""
        return np.packbits(self.moves.T, axis=-1)

    def after(self, steps: int) -> dict[int, Array]:
        """The labels that each parameter leaf reaches within a number of steps."""
        found = {}
        for leaf, sets in self.params.items():
            kinds, which = np.unique(sets, axis=0, return_inverse=True)
            for _ in range(steps - 1):
                grown = self.grown(kinds)
                if np.array_equal(grown, kinds):
                    break
                kinds = grown
            found[leaf] = kinds[which.ravel()]
        return found

    def grown(self, sets: Array) -> Array:
        """Sets joined with the labels that they reach in one more step."""
        has = np.unpackbits(sets, axis=-1, count=self.labels).astype(bool)
        more = [np.bitwise_or.reduce(self._steps[row], axis=0, initial=0) for row in has]
        return sets | np.asarray(more, np.uint8).reshape(sets.shape)


def find_reached(info: ModuleInfo, samples: Samples, leaves: Sequence[int]) -> Reached:
    """The reachability of the state elements and of some leaves of `info.fixed`, by index, in one step."""
    positions = positions_of(info.program, through=True, fine=True)
    after = {old: (e.path, new) for e in info.carried for old, new in zip(e.invars, e.outvars, strict=True)}
    state_of: list[Path] = []
    labels: dict[Var, Array] = {}
    for old in samples.carried:
        size = old.aval.size // samples.count
        labels[old] = _labels(tuple(old.aval.shape), samples, len(state_of), size)
        state_of += [after[old][0]] * size
    count = len(state_of)
    starts: dict[Var, Sets] = {}
    for old, own in labels.items():
        new, sets = after[old][1], Sets.single(own, count)
        if isinstance(new, Var):
            starts[new] = starts[new] | sets if new in starts else sets
    env, _ = positions.reaches(starts)  # type: ignore[arg-type]
    found: dict[Var, Any] = dict(env)
    moves = np.zeros((count, count), bool)
    for old, own in labels.items():
        if old in found:
            np.logical_or.at(moves.T, own.ravel(), found[old].unpacked(count).reshape(-1, count))
    fixed = info.fixed_invars
    none = lambda v: np.zeros((v.aval.size, (count + 7) // 8), np.uint8)
    params = {
        i: found[fixed[i]].bits.reshape(fixed[i].aval.size, -1) if fixed[i] in found else none(fixed[i])
        for i in leaves
    }
    return Reached(count, state_of, moves, params)


def _labels(shape: Shape, samples: Samples, first: int, size: int) -> Array:
    """The label of each element, equal for all samples: the pattern is the union over samples."""
    own = np.arange(first, first + size)
    if samples.axis is None:
        return own.reshape(shape)
    rest = (*shape[: samples.axis], *shape[samples.axis + 1 :])
    full = np.broadcast_to(own.reshape(rest), (samples.count, *rest))
    return np.moveaxis(full, 0, samples.axis)
