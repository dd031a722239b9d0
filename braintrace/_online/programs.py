"""A cache of compiled programs by the jaxpr of the user's step: an equal step is not compiled again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial

import jax

from .. import _meshes
from .._compiler.fingerprint import fingerprint
from .._meshes import Spec
from .._types import PyTree
from .call import refuse_varying
from .drive import Drive
from .parts import Start
from .sequence import Sequence, is_traced

_REMEMBERED = 16


class Programs:
    """The compiled programs that were used last."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, Callable[[Start, Sequence], PyTree]] = OrderedDict()

    def run(
        self,
        function: Callable[[Drive, Start, Sequence], PyTree],
        drive: Drive,
        start: Start,
        sequence: Sequence,
    ) -> PyTree:
        """`function(drive, start, sequence)`, compiled."""
        refuse_varying(jax.tree.leaves((start, sequence)))
        if is_traced((start, sequence)) or sequence.progress is not None:
            return _run(function, drive, start, sequence)
        key = (function, fingerprint(drive.step.closed), drive, drive.sharding_key)
        if key not in self._known:
            self._known[key] = jax.jit(lambda start, sequence: _run(function, drive, start, sequence))
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key](start, sequence)


def _run(
    function: Callable[[Drive, Start, Sequence], PyTree],
    drive: Drive,
    start: Start,
    sequence: Sequence,
) -> PyTree:
    """Call the function; for arrays with explicit sharding, the results have the specs of `drive.specs`."""

    def specs() -> list[Spec | None]:
        total, outs, after = drive.specs(start, sequence)
        return [*outs, *after] if function is Drive.evolve else [*total, *outs, *after]

    return _meshes.in_auto(partial(function, drive), (start, sequence), specs)
