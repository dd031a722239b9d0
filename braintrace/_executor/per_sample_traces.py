"""Traces of parameters sample by sample: signals contracted with them, and their instant terms."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._ops.axis_labels import align
from .._types import Leaves
from .slots import Slot
from .trace_math import States, add_up, promoted, states
from .weight_gradients import ROWS, TIME, factor_over_time, product, with_rows
from .window import Signals, Window

if TYPE_CHECKING:
    from .per_sample import PerSample

Rows = Float[Array, "samples rows n"]  # of state vectors; `n` is the state size
# per-sample gradients by leaf index in `params`: (samples, *shape), with a row axis inserted in the shape
Terms = dict[int, Array]


@dataclass(frozen=True)
class Pulled:
    """Rows of signals at the end of a window, pulled back through it."""

    start: Rows  # at its start
    left: Leaves  # of several windows: the parts that do not cross, (rows, time, *leaf); empty if one
    dys: dict[int, Array]  # cotangents of the outputs of sites, (rows, time, *y)
    terms: Terms  # gradients of the parameters except through these sites


class TracesPerSample:
    """The traces of a graph, whose batch axis is the first of each result."""

    def __init__(self, per: PerSample) -> None:
        self.per = per

    def at_groups(self, rows: Rows) -> Signals:
        """Take rows of signals, (samples, rows, state size), to the groups: (rows, S, *varshape) each."""
        leaves = jax.vmap(lambda r: self.per.leaves(r, dual=True), 1)(rows)
        return jax.vmap(self.per.executor.at_groups)(leaves)

    def lift(self, signals: Signals, window: Window) -> dict[str, Float[Array, "rows state ..."]]:
        """Take signals at the groups, with rows in front, to the axes of each trace: (rows, S, *at)."""
        inputs = window.first.inputs
        lift = lambda slot: lambda q: slot.lift(q, inputs[slot.relation.site.index], 1)
        return {t.key: jax.vmap(lift(t))(signals[t.group.index]) for t in self.per.executor.slots}

    def contract(self, traces: dict[str, Array], signals: Signals, window: Window) -> Terms:
        """Per-sample gradients `sum g trace`, for signals `g` at the groups, with rows in front."""
        lifted = self.lift(signals, window)
        found: dict[tuple[int, str], Array] = {}
        for slot in self.per.executor.slots:
            pair = promoted(lifted[slot.key], traces[slot.key])
            _add(found, slot, _contract(slot, self._slot_labels[slot.key], *pair))
        return self._of_traced(window, found)

    def instant(self, pulled: Pulled, signals: dict[int, States], window: Window) -> tuple[Pulled, Terms]:
        """Add the gradients of the instant terms `J x` at every step, for signals at the groups.

        The signals of each state are (rows, time, *varshape). They are added to the cotangents of outputs,
        so that one product with the inputs is enough, unless the trace is on other positions than the output.
        """
        dys, found = dict(pulled.dys), dict[tuple[int, str], Array]()
        same = {w.site.index: w.layouts for w in self.per.sites}
        record = window.record.local
        by_group: dict[tuple[int, int], list[Slot]] = {}
        for slot in self.per.executor.slots:
            by_group.setdefault((slot.relation.site.index, slot.group.index), []).append(slot)
        for (site, group), slots in by_group.items():
            pair = lambda q, slot=slots[0], J=record.J[site, group]: slot.pair(q, J, 1)
            dy = jax.vmap(pair)(list(signals[group]))
            marked = self.per.linear.site(slots[0].relation.site)
            at = None if marked is None else marked.index
            if at in dys and slots[0].relation.layouts == same[at] and not slots[0].positions.on_hidden:
                dys[at] = dys[at] + (dy if jnp.iscomplexobj(dys[at]) else dy.real).astype(dys[at].dtype)
                continue
            for slot in slots:
                lifted = jax.vmap(slot.lift_instant, (1, 0), 1)(dy, list(record.inputs[site]))
                _add(found, slot, self._of_instant(slot, lifted, record.inputs[site]))
        return replace(pulled, dys=dys), self._of_traced(window, found)

    def _of_instant(self, slot: Slot, dy: Array, inputs: Sequence[Array]) -> Array:
        """`sum_t x[t] dy[t]` of one trace: samples first, then the axes of the weight with rows."""
        label = self._slot_labels[slot.key]
        want = (*(() if label is None else (label,)), *with_rows(slot.layout.w))
        factor = factor_over_time(slot.layout, inputs, dy.dtype)
        term = product([*([] if factor is None else [factor]), (dy, (ROWS, TIME, *slot.y))], want)
        return term[None] if label is None else term

    def _of_traced(self, window: Window, found: dict[tuple[int, str], Array]) -> Terms:
        """Pull per-sample gradients of the effective weights with traces back to the parameters."""
        relations = self.per.executor.graph.hidden_param_op_relations
        return self.per.of_weights(window, relations, found) if found else {}

    @cached_property
    def _slot_labels(self) -> dict[str, str | None]:
        """The label of the batch axis of each trace; None if it has none."""
        return {t.key: self._slot_label(t) for t in self.per.executor.slots}

    def _slot_label(self, slot: Slot) -> str | None:
        if self.per.samples.axis is None:
            return None
        hidden = slot.group.hidden[0]
        shape = slot.group.varshape if hidden.part is None else tuple(hidden.leaf.aval.shape)
        numbers = np.indices(shape)[self.per.samples.axis] + 1
        with jax.ensure_compile_time_eval():
            places = np.asarray(hidden.of_leaf(jnp.asarray(numbers, float)))
        label = slot.label_along(places, self.per.samples.count)
        return None if label in slot.layout.w else label

    @property
    def have_samples(self) -> bool:
        """Whether every trace has a batch axis."""
        return self.per.samples.axis is None or None not in self._slot_labels.values()


def _contract(
    slot: Slot, label: str | None, g: Float[Array, "rows state ..."], trace: Float[Array, "state ..."]
) -> Float[Array, "samples ..."]:
    """`sum g trace`: samples first, then the axes of the weight with rows.

    Element-wise products, because XLA fuses them with the sum that they are added to.
    """
    lead = () if label is None else (label,)
    summed = tuple(a for a in slot.labels if a not in (label, *slot.layout.w))
    labels = (*summed, *lead, *with_rows(slot.layout.w))
    terms = [
        align(a, (ROWS, *slot.at), labels) * align(b, slot.labels, labels)
        for a, b in zip(states(g, 1), states(trace, 0), strict=True)
    ]
    result = jnp.sum(add_up(terms), axis=tuple(range(len(summed))))
    return result[None] if label is None else result


def _add(found: dict[tuple[int, str], Array], slot: Slot, term: Array) -> None:
    key = (slot.relation.site.index, slot.name)
    found[key] = found[key] + term if key in found else term


def add_terms(*terms: Terms) -> Terms:
    """The sum of gradients by leaf."""
    found: Terms = {}
    for i, a in itertools.chain(*(t.items() for t in terms)):
        found[i] = add_up(promoted(found[i], a)) if i in found else a
    return found
