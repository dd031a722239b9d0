"""The range of positions that each element of an array reaches.

Two integer arrays hold the lowest and the highest position (equal: exactly one; different: several; lowest
above highest: none). A second pair of arrays, the *direct* reach, ignores paths through operations that mix
positions (a norm's mean, a softmax's sum): if two readers differ, one that reaches a single position takes
precedence over one that reaches several. Two readers with different single positions leave no direct reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from .links import Array, Link, Pairs, Same, Shape, numbered

_NONE = np.iinfo(np.int32).max
_ALL, _DIRECT = 0, 1
_TORN = -1  # marks an element whose readers reach different single positions


class Reach:
    """The lowest and the highest position of each element: along all paths, and along direct paths."""

    __slots__ = ("high", "low")

    def __init__(self, low: Array, high: Array) -> None:
        self.low = low  # (2, *shape)
        self.high = high

    @staticmethod
    def at(positions: Array) -> Reach:
        both = np.stack([positions, positions]).astype(np.int32)
        return Reach(both, both)

    @staticmethod
    def identity(shape: Shape) -> Reach:
        """Each element reaches the position of its own number, in row-major order."""
        return Reach.at(numbered(shape))

    @staticmethod
    def empty(shape: Shape) -> Reach:
        return Reach(np.full((2, *shape), _NONE, np.int32), np.full((2, *shape), -1, np.int32))

    @property
    def shape(self) -> Shape:
        return tuple(self.low.shape[1:])

    @property
    def is_empty(self) -> bool:
        return bool(np.all(self.high[_ALL] < 0))

    @property
    def lowest(self) -> Array:
        return np.asarray(self.low[_ALL])

    @property
    def highest(self) -> Array:
        return np.asarray(self.high[_ALL])

    @property
    def width(self) -> int:
        """The longest range from an element's lowest to its highest position; 0 if nothing is reached."""
        return int(max(0, np.max(self.highest - np.minimum(self.lowest, self.highest + 1) + 1, initial=0)))

    @property
    def direct(self) -> Array:
        """The one position that each element reaches directly; -1 if there is none or several."""
        low, high = self.low[_DIRECT], self.high[_DIRECT]
        return np.where(low == high, low, -1)

    def stays_at(self, positions: Array) -> bool:
        """Whether no element reaches any position but its own."""
        own = (self.lowest == positions) & (self.highest == positions)
        return bool(np.all((self.highest < 0) | own))

    def __bool__(self) -> bool:
        return not self.is_empty

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reach) and (
            self is other or (np.array_equal(self.low, other.low) and np.array_equal(self.high, other.high))
        )

    def __or__(self, other: Reach) -> Reach:
        """The positions reached through either of two readers."""
        if other is self:
            return self
        low, high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        (a, p), (b, q) = ((r.low[_DIRECT] == r.high[_DIRECT], r.low[_DIRECT]) for r in (self, other))
        for keep, single in ((a & ~b & (q != _TORN), p), (b & ~a & (p != _TORN), q)):
            low[_DIRECT, ...][keep] = high[_DIRECT, ...][keep] = single[keep]
        torn = (low[_DIRECT] == _TORN) | (a & b & (p != q))
        low[_DIRECT, ...][torn], high[_DIRECT, ...][torn] = _TORN, _NONE
        return Reach(low, high)

    def __getitem__(self, index: int) -> Reach:
        return Reach(self.low[:, index], self.high[:, index])

    def carry(self, link: Link, shape: Shape, *, back: bool) -> Reach:
        """The reach at the other end of a link, of the given shape."""
        if isinstance(link, Same):
            return Reach(self.low.reshape(2, *shape), self.high.reshape(2, *shape))
        if isinstance(link, Pairs):
            here, there = (link.out, link.inp) if back else (link.inp, link.out)
            result = Reach.empty((math.prod(shape),))
            for kind in (_ALL, _DIRECT):
                np.minimum.at(result.low[kind], there, self.low[kind].ravel()[here])
                np.maximum.at(result.high[kind], there, self.high[kind].ravel()[here])
            low = result.low[_DIRECT]
            if len(there) > 1 and np.any(low == _TORN):
                low[(low == _TORN) & (np.bincount(there, minlength=len(low)) > 1)] = 0  # mixed here
            return Reach(result.low.reshape(2, *shape), result.high.reshape(2, *shape))
        # after the axis of the two kinds
        drop, order, grow = (tuple(a + 1 for a in axes) for axes in link.moves(back=back))

        def move(array: Array, reduce: Callable[..., Array], initial: int) -> Array:
            array = reduce(array, axis=drop, initial=initial) if drop else array
            array = np.expand_dims(np.transpose(array, (0, *order)), grow)
            return np.broadcast_to(array, (2, *shape))

        low = self.low
        if any(low.shape[axis] > 1 for axis in drop) and np.any(low[_DIRECT] == _TORN):
            low = np.stack([low[_ALL], np.maximum(low[_DIRECT], 0)])  # mixed here
        return Reach(move(low, np.min, _NONE), move(self.high, np.max, -1))

    @staticmethod
    def stack(parts: Sequence[Reach | None], shape: Shape) -> Reach:
        """Stack reaches of the given shape; None is empty."""
        full = [Reach.empty(shape) if p is None else p for p in parts]
        return Reach(np.stack([p.low for p in full], 1), np.stack([p.high for p in full], 1))


SiteReach = dict[int, Reach]
