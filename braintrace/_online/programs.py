"""Compiled programs, known by the jaxpr of the user's step: an equal one compiles nothing new."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax

from .._compiler.fingerprint import fingerprint
from .drive import Drive, Given
from .sequence import Sequence, is_traced

_REMEMBERED = 16


class Programs:
    """The programs that were used last."""

    def __init__(self) -> None:
        self._known: OrderedDict[Any, Callable[..., Any]] = OrderedDict()

    def run(
        self,
        function: Callable[[Drive, Given, Sequence], Any],
        drive: Drive,
        closed: Any,
        given: Given,
        sequence: Sequence,
    ) -> Any:
        """`function(drive, given, sequence)`, compiled; `closed` is the jaxpr of the step."""
        if is_traced((given, sequence)) or sequence.progress is not None:
            return function(drive, given, sequence)
        key = (function, fingerprint(closed), drive)
        if key not in self._known:
            self._known[key] = jax.jit(lambda given, sequence: function(drive, given, sequence))
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key](given, sequence)
