"""Matrices whose dense influence is large: a GPU writes it, with their traces, once in several windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from .._types import Array, Values
from .dense_influence import DenseInfluence, Mixing
from .matrices import Matrix
from .memory import on_gpu
from .partial_sums import Gradient
from .pending_windows import STEPS, Large, PendingWindows, fits
from .per_sample import Vectors
from .pulled_rows import PulledRows
from .sharding import Spec
from .slots import Slot
from .weight_gradients import ROWS
from .window import Record, Window

# `P` and `d` of traces that advance as `P trace + sum_t x[t] d[t]`
AffineTerms = dict[str, tuple[Array, Array]]
AffineTermsOf = Callable[[Sequence[Slot], Record], AffineTerms]

COUNT = "pending steps"
_LARGE = 2**28  # bytes of `V` of a matrix; for smaller ones, kernel launches dominate the time of a window


@dataclass(frozen=True, eq=False)
class PendingMatrices:
    """The pending windows of those matrices of a store that have any, by leaf."""

    store: DenseInfluence
    matrices: dict[int, Matrix]

    @staticmethod
    def start(store: DenseInfluence, values: Values) -> Values:
        """No pending windows on `V` and the traces in `values`, for the matrices that are large and fit."""
        if not on_gpu():
            return {}
        found, at, D = Values(), store.per.executor.sharding, store.per.executor.example_local().D
        for i, matrix in store.per.matrices.items():
            rows, slot = values[store.names[i]], matrix.slot
            if slot is not None and D[slot.group.index] is None:
                continue  # the trace is that of the last step alone
            trace, spec = None if slot is None else values[slot.key], _spec(store, i)
            ways = [1] * 4 if at is None else [at.ways(p, n) for p, n in zip(spec, rows.shape, strict=True)]
            size = math.prod(rows.shape) * rows.dtype.itemsize // math.prod(ways)
            if size >= _LARGE and fits(rows, trace, ways):
                empty = PendingWindows.empty(rows, 0 if trace is None else len(trace))
                found.update({n: getattr(empty, f) for f, n in _names(store, i).items()})
        return {**found, COUNT: jnp.zeros((), jnp.int32)} if found else {}

    @staticmethod
    def of(store: DenseInfluence, values: Mapping[str, Any]) -> PendingMatrices:
        """Those with pending windows among a rule's arrays."""
        found = {i: m for i, m in store.per.matrices.items() if _names(store, i)["x"] in values}
        return PendingMatrices(store, found)

    def specs(self) -> dict[str, Spec]:
        each = [(_names(self.store, i), PendingWindows.specs(_spec(self.store, i))) for i in self.matrices]
        return {names[f]: spec for names, specs in each for f, spec in specs.items()}

    def written(self, values: Values, length: int | None = None) -> Values:
        """The arrays, written if there is no room for a window of this length; None: in any case."""
        if not self.matrices:
            return values
        count = values[COUNT]
        due = count + length >= STEPS if length is not None and length < STEPS else count > 0
        found, at = dict(values), self.store.per.executor.sharding
        for i, matrix in self.matrices.items():
            windows, spec = self._windows(i, values), _spec(self.store, i)
            names = [self.store.names[i], *([] if matrix.slot is None else [matrix.slot.key])]
            found.update(zip(names, windows.written(self._large(i, values), due, at, spec), strict=True))
        return {**found, COUNT: jnp.where(due, 0, count)}

    def followed_by(
        self, values: Values, window: Window, rows: PulledRows, mixing: Mixing, affine_terms: AffineTermsOf
    ) -> Values:
        """The arrays with one more window; those of `V` and the traces are as they were.

        `rows` are those of the basis after the window, pulled back to its start; `mixing` are the
        coefficients of `V` in them.
        """
        if not self.matrices:
            return {}
        per, count = self.store.per, values[COUNT]
        at = per.executor.sharding
        slots = [m.slot for m in self.matrices.values() if m.slot is not None]
        affine = affine_terms(slots, window.record)
        start, inputs = per.traces.lift(rows.at_traces, window), per.inputs(window)
        found: Values = {COUNT: count + window.length}
        for i, matrix in self.matrices.items():
            key = None if matrix.slot is None else matrix.slot.key
            own = (None, None) if key is None else (affine[key], start[key])
            factors = matrix.factors(inputs, rows.pulled.dys)
            now = PendingWindows.of_window(matrix, *factors, mixing, *own)
            after = self._windows(i, values).followed_by(now, count, at, _spec(self.store, i))
            found.update({n: getattr(after, f) for f, n in _names(self.store, i).items()})
            found.update({n: values[n] for n in (self.store.names[i], *([key] if key else []))})
        return found

    def gradients(self, values: Values, along: Array, signal: Vectors, window: Window) -> dict[int, Gradient]:
        """The gradients for a signal, through `V` and the traces, by leaf; `along` are its coefficients."""
        if not self.matrices:
            return {}
        per, at = self.store.per, self.store.per.executor.sharding
        lifted = per.traces.lift(per.traces.at_groups(signal[:, None]), window)
        found: dict[int, Gradient] = {}
        for i, matrix in self.matrices.items():
            windows, slot = self._windows(i, values), matrix.slot
            at_trace = windows.own[:, 0, :0]
            if slot is not None:
                labels = (ROWS, "state", *slot.at)
                at_trace = matrix.by_sample(lifted[slot.key], labels, ROWS, "state")[:, 0]
            grad = windows.contract(
                self._large(i, values), along, at_trace, values[COUNT], at, _spec(self.store, i)
            )
            found[i] = grad.astype(per.info.fixed_invars[i].aval.dtype)
        return found

    def reset(self, before: Values, is_reset: Array) -> Values:
        """What replaces the arrays of these matrices: their windows are reset, and not `V` and the traces.

        The reset counts as a step, if there is none.
        """
        if not self.matrices:
            return {}
        found: Values = {COUNT: jnp.maximum(before[COUNT], 1)}
        for i, matrix in self.matrices.items():
            kept = self._windows(i, before).known(before[COUNT]).kept(~is_reset)
            found.update({n: getattr(kept, f) for f, n in _names(self.store, i).items()})
            large = [self.store.names[i], *([] if matrix.slot is None else [matrix.slot.key])]
            found.update({n: before[n] for n in large})
        return found

    def _windows(self, leaf: int, values: Values) -> PendingWindows:
        return PendingWindows(**{f: values[n] for f, n in _names(self.store, leaf).items()})

    def _large(self, leaf: int, values: Values) -> Large:
        slot = self.matrices[leaf].slot
        return values[self.store.names[leaf]], None if slot is None else values[slot.key]


def _spec(store: DenseInfluence, leaf: int) -> Spec:
    """The partition spec of the `V` of a matrix; () if it is not sharded."""
    at = store.per.executor.sharding
    if at is None:
        return ()
    shape = (store.per.samples.count, *store.per.info.fixed_invars[leaf].aval.shape)
    return at.fitted(store.specs()[store.names[leaf]], (*shape[:-1], store.size, shape[-1]))


def _names(store: DenseInfluence, leaf: int) -> dict[str, str]:
    """The names of the arrays of `PendingWindows` among those of the rule."""
    return {f: f"pending {f} {store.names[leaf]}" for f in ("x", "d", "mix", "own")}
