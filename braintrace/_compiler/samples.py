"""Find the batch axis: the axis of the carried states along which entries are independent samples.

Along a batch axis, all entries share the parameters and no entry depends on another. An axis of units is not
a batch axis, because each unit has its own weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from .._ops.axis_labels import Labels, Layout
from .caching import cached
from .links import Array
from .module_info import ModuleInfo
from .positions import positions_of
from .program import Atom, Site, Var
from .reach import Reach
from .step import Path


@dataclass(frozen=True, eq=False)
class Samples:
    """The samples of a step; `axis` is None if the whole carried state is one sample."""

    axis: int | None
    count: int
    carried: tuple[Var, ...]  # the carried arrays, before the step, that depend on parameters
    sites: dict[int, Array]  # the sample of each element of a site's output; -1 if none or several
    mixed: tuple[Path, ...] = ()  # states in which entries along `axis` depend on each other

    @property
    def state_size(self) -> int:
        """The state size of one sample in real numbers, counting arrays that depend on parameters."""
        parts = [2 if jnp.issubdtype(v.aval.dtype, jnp.complexfloating) else 1 for v in self.carried]
        return sum(n * int(v.aval.size) for n, v in zip(parts, self.carried, strict=True)) // self.count

    def have(self, axis: int) -> bool:
        """Whether that axis has the same length in all carried arrays."""
        return (
            all(v.aval.ndim > axis for v in self.carried)
            and len({v.aval.shape[axis] for v in self.carried}) < 2
        )

    def label(self, site: Site, layout: Layout) -> str | None:
        """The label of the batch axis of a site's output; None if there is none, or if the weight has it."""
        numbers = self.sites[site.index]
        if self.axis is None or np.any(numbers < 0):
            return None
        if layout.y_is_viewed:
            with jax.ensure_compile_time_eval():
                numbers = np.asarray(layout.view_y(jnp.asarray(numbers), site.no_inputs))
        found = counting(numbers, layout.y, self.count)
        return None if found in layout.w else found


@cached
def find_samples(info: ModuleInfo, axis: int | str | None = "auto") -> Samples:
    """Find the batch axis of a step, or check the given `axis` (None: the batch is one sample).

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> cell = braintrace.nn.GRUCell(2, 3)
    >>> _ = brainstate.nn.init_all_states(cell, batch_size=4)
    >>> graph = braintrace.compile_etrace_graph(cell, jnp.ones((4, 2)))
    >>> found = find_samples(graph.module_info)
    >>> found.axis, found.count
    (0, 4)
    """
    return _Search(info).find(axis)


class _Search:
    # Samples are found by analysis, not assumed along axis 0, because a wrong guess gives wrong gradients
    # without an error: per-sample rules keep one basis or influence matrix for each entry of the batch axis.
    # An axis qualifies if (1) each parameter affects all entries alike, (2) no entry depends on another and
    # (3) ops that take data have the axis, and their weights lack it. If only (2) fails, the samples of a
    # batch are coupled (batch norm, say): `mixed` holds these states, and rules refuse or use one sample.

    def __init__(self, info: ModuleInfo) -> None:
        self.info = info
        self.positions = positions_of(info.program, through=True)
        self.params = [v for v in info.param_invars if v.inexact and v.aval.size]

    @cached_property
    def carried(self) -> list[tuple[Path, Var, Atom]]:
        """The arrays that depend on parameters, in this step or a later one: path, old and new variable."""
        pairs = [
            (e.path, old, new)
            for e in self.info.carried
            for old, new in zip(e.invars, e.outvars, strict=True)
            if old.inexact
        ]
        found: list[tuple[Path, Var, Atom]] = []
        while True:
            acting = (*self.params, *(old for _, old, _ in found))
            starts = {v: Reach.at(_numbers(v, None)) for v in acting}
            came = self.positions.sources(starts, {})
            now = [pair for pair in pairs if pair[2] in came]
            if len(now) == len(found):
                return now
            found = now

    def find(self, axis: int | str | None) -> Samples:
        shapes, auto = [tuple(old.aval.shape) for _, old, _ in self.carried], axis == "auto"
        given = [] if axis is None or auto else [int(axis)]
        mixed: Samples | None = None
        for a in range(min(map(len, shapes), default=0)) if auto else given:
            sizes = {s[a] if a < len(s) else None for s in shapes}
            count = next(iter(sizes), None)
            if len(sizes) > 1 or count is None:
                continue
            if count > 1 and (not auto or self._is_shared_along(a)):
                acting = self._acting_on_others(a)
                found = self._samples(a, count)
                if not acting and (not auto or self._has_own_inputs(found)):
                    return found
                is_batch = not auto or (a == 0 and self._has_free_axis(count))
                if acting and mixed is None and is_batch:
                    mixed = Samples(a, count, (), {}, acting)
        return mixed or self._samples(None, 1)

    def _has_own_inputs(self, samples: Samples) -> bool:
        """Whether every op that takes data has the batch axis, and its weights lack it."""
        sites = [s for s in self.info.program.sites if s.num_inputs and s.index in samples.sites]
        return all(samples.label(s, layout) for s in sites for layout in s.layouts().values())

    def _has_free_axis(self, count: int) -> bool:
        """Whether some op takes data, and each such op has an axis of that length that its weights lack."""
        sites = [s for s in self.info.program.sites if s.num_inputs]
        for site in sites:
            for layout in site.layouts().values():
                sizes = [n for a, n in zip(layout.y, site.shape, strict=False) if a not in layout.w]
                if not layout.y_is_viewed and count not in sizes:
                    return False
        return bool(sites)

    def _samples(self, axis: int | None, count: int) -> Samples:
        starts = {new: Reach.at(_numbers(new, axis)) for _, _, new in self.carried if isinstance(new, Var)}
        _, sites = self.positions.reaches(starts)
        own = {i: np.where(r.lowest == r.highest, r.lowest, -1) for i, r in sites.items() if r is not None}
        return Samples(axis, count, tuple(old for _, old, _ in self.carried), own)

    def _is_shared_along(self, axis: int) -> bool:
        """Whether every parameter affects all entries along an axis alike."""
        came = (self.positions.sources({v: Reach.identity(v.aval.shape)}, {}) for v in self.params)
        return all(
            _is_same_along(reached[new], axis)
            for reached in came
            for _, _, new in self.carried
            if isinstance(new, Var) and new in reached
        )

    def _acting_on_others(self, axis: int) -> tuple[Path, ...]:
        """The states in which an entry along the axis depends on other entries."""
        starts = {old: Reach.at(_numbers(old, axis)) for _, old, _ in self.carried}
        came = self.positions.sources(starts, {})
        found = []
        for path, _, new in self.carried:
            reach = came.get(new) if isinstance(new, Var) else None
            if reach is not None and not reach.stays_at(_numbers(new, axis)):
                found.append(path)
        return tuple(dict.fromkeys(found))


def counting(numbers: Array, labels: Labels, count: int) -> str | None:
    """The label of the axis along which an array counts from 0 to `count - 1`; negative entries match."""
    for axis, label in enumerate(labels):
        shape = [-1 if a == axis else 1 for a in range(numbers.ndim)]
        counted = np.arange(numbers.shape[axis]).reshape(shape)
        if numbers.shape[axis] == count and np.all((numbers < 0) | (numbers == counted)):
            return label
    return None


def _numbers(v: Atom, axis: int | None) -> Array:
    """The index of each element along an axis; zeros if the axis is None."""
    shape = tuple(v.aval.shape)
    if axis is None:
        return np.zeros(shape, np.int32)
    return np.broadcast_to(np.arange(shape[axis]).reshape(-1, *[1] * (len(shape) - axis - 1)), shape)


def _is_same_along(reach: Reach, axis: int) -> bool:
    return all(
        np.array_equal(a, np.broadcast_to(a.take([0], axis), a.shape)) for a in (reach.lowest, reach.highest)
    )
