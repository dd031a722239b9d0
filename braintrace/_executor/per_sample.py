"""What each sample of a batch has to itself: its numbers, and what its signals give the parameters.

Traces and parameters are shared by the whole batch; here a cotangent keeps its sample. At a site,

    dL/dw of sample b = sum_t x[t, b] dy[t, b]

is one product over time, by the letters of the op. A use of a parameter by which samples cannot be told apart
is pulled back once for each sample instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler.dataflow import Flow, solve, union
from .._compiler.program import Node, Site, Var
from .._compiler.provenance import provenance
from .._compiler.samples import Samples, counting
from .._compiler.site_weights import SiteWeights
from .._ops.letters import Layout, Letters, align
from .executor import ETraceGraphExecutor, Leaves, is_inexact, pull_back
from .slots import Slot, promoted
from .weights import effective_weights
from .window import Window, each_step

Terms = dict[int, Any]  # of each leaf of `params`, by its number: (samples, rows, *shape)


@dataclass(frozen=True, eq=False)
class Weighted:
    """A site whose weights are made of parameters alone, and where the samples of its output are."""

    site: Site
    varying: tuple[str, ...]
    layouts: dict[str, Layout]
    letters: dict[str, str | None]  # of each weight, the letter along which the output's samples lie


class PerSample:
    """The samples of one compiled step."""

    def __init__(self, executor: ETraceGraphExecutor, samples: Samples) -> None:
        self.executor, self.samples = executor, samples
        self.info = executor.info

    # -- numbers of a sample -----------------------------------------------------------------------

    @cached_property
    def _leaves(self) -> list[Var]:
        return [v for e in self.info.carried for v in e.invars]

    @property
    def numbers(self) -> int:
        return self.samples.numbers

    @cached_property
    def dtype(self) -> Any:
        """The type of real numbers that holds all that is carried."""
        types = [jnp.finfo(v.aval.dtype).dtype for v in self.samples.carried]
        return np.result_type(np.float32, *types) if types else np.dtype(np.float32)

    def vectors(self, leaves: Leaves, *, dual: bool) -> Any:
        """Tangents (`dual`: cotangents) of the carried leaves, as (samples, numbers)."""
        by_var = dict(zip(self._leaves, leaves, strict=True))
        parts = []
        for v in self.samples.carried:
            one = _first(by_var[v], self.samples.axis)
            each = [one.real, -one.imag if dual else one.imag] if jnp.iscomplexobj(one) else [one]
            parts += [a.astype(self.dtype).reshape(self.samples.count, -1) for a in each]
        return jnp.concatenate(parts, axis=1)

    def leaves(self, vectors: Any, *, dual: bool) -> Leaves:
        """The way back; None for leaves that have no derivative."""
        at, found = 0, {}
        for v in self.samples.carried:
            shape = _first_shape(v.aval.shape, self.samples.axis)
            size = v.aval.size // self.samples.count
            each = []
            for _ in range(_parts(v)):
                each.append(vectors[:, at : at + size].reshape(shape))
                at += size
            one = each[0] if len(each) == 1 else jax.lax.complex(each[0], -each[1] if dual else each[1])
            found[v] = _back(one, self.samples.axis).astype(v.aval.dtype)
        return [
            found[v] if v in found else jnp.zeros(v.aval.shape, v.aval.dtype) if v.inexact else None
            for v in self._leaves
        ]

    # -- sites -------------------------------------------------------------------------------------

    @cached_property
    def sites(self) -> list[Weighted]:
        """The sites that act on what is carried, whose weight terms the letters tell sample by sample."""
        params = [v for e in self.info.params for v in e.invars]
        origin = provenance(self.info.program, params)
        fixed = {v for e in self.info.fixed for v in e.invars}
        found = []
        for site in self.info.program.sites:
            weights = SiteWeights(self.info, site, origin)
            plain = all(set(inputs) <= fixed and not moves for inputs, moves, _ in weights.found.values())
            if site.index not in self.samples.sites or not weights.paths or not plain:
                continue
            if "cond" in site.context and site.num_inputs > 1:
                continue  # the letters go by indices: none, in a branch not taken
            layouts = site.layouts(weights.varying)
            letters = {name: self.samples.letter(site, layout) for name, layout in layouts.items()}
            if self.samples.axis is None or None not in letters.values():
                found.append(Weighted(site, weights.varying, layouts, letters))
        return found

    @cached_property
    def others(self) -> list[int]:
        """The leaves of `params` that act on what is carried in other ways, too."""
        handled = {w.site.index for w in self.sites}
        leaves = [(v, e.is_param) for e in self.info.fixed for v in e.invars]
        new = {a for e in self.info.carried for a in e.outvars}

        def transfer(node: Node, given: list[Any]) -> Any:
            if node.site is not None and node.site.index in handled:
                return union(given[: node.site.num_inputs])
            return union(given)

        flow = Flow[bool](transfer, derivatives=True, enters=True)
        result = []
        for i, (v, is_param) in enumerate(leaves):
            if is_param and v.inexact and new & set(solve(flow, self.info.program, [(v, True)])[0]):
                result.append(i)
        return result

    # -- what rows of signals give -----------------------------------------------------------------

    def pull(self, window: Window, rows: Any) -> tuple[Any, Terms]:
        """Rows of signals at the window's end, (samples, rows, numbers), pulled back through it.

        Their signals at its start, and what the window gives each parameter, sample by sample.
        """
        count, each = self.samples.count, rows.shape[1]
        given: Any = rows
        if self.others:  # one sample at a time
            given = (jnp.eye(count, dtype=rows.dtype)[:, :, None, None] * rows[:, None]).reshape(
                count, count * each, -1
            )
        cotangents = jax.vmap(lambda r: self.leaves(r, dual=True), 1)(given)
        pulled, dys, dparams = window.pull(cotangents, [w.site for w in self.sites], self.others)
        start = jax.vmap(lambda c: self.vectors(c, dual=True), out_axes=1)(pulled)
        terms: Terms = {}
        if self.others:
            pick = lambda a: a.reshape(count, each, *a.shape[1:])
            start = jnp.sum(start.reshape(count, count, each, -1), 1)
            terms = {i: pick(d) for i, d in dparams.items()}
            dys = jax.tree.map(lambda a: jnp.sum(pick(a), 0), dys)
        return start, self._add(terms, window, self._weight_terms(window, dys))

    def _weight_terms(self, window: Window, dys: dict[int, Any]) -> dict[tuple[int, str], Any]:
        """`sum_t x[t] dy[t]` of each weight at each site, (samples, rows, *letters of the weight)."""
        steps = (window.args, window.consts, window.before, window.ys)
        kept = {w.site.index: w.site.num_inputs for w in self.sites}

        def operands(step: Any) -> Any:
            found = self.executor.forward(window.params, *step)[3]
            return {i: found[i][:n] for i, n in kept.items()}

        inputs = each_step(operands, steps)
        return {
            (w.site.index, name): _over_time(layout, w.letters[name], inputs[w.site.index], dys[w.site.index])
            for w in self.sites
            for name, layout in w.layouts.items()
        }

    def _add(self, terms: Terms, window: Window, found: dict[tuple[int, str], Any]) -> Terms:
        """The terms, with those of effective weights carried back to the parameters."""
        if not found:
            return terms
        by_leaf = self.to_parameters(window.params, window.first_consts, self.sites, found)
        return {**terms, **{i: terms[i] + a if i in terms else a for i, a in by_leaf.items()}}

    def to_parameters(
        self, params: Leaves, consts: Leaves, of: Sequence[Any], found: dict[tuple[int, str], Any]
    ) -> Terms:
        """(samples, rows, *letters) of effective weights as (samples, rows, *shape) of parameters."""
        fixed = [*self.info.program.consts, *(v for e in self.info.fixed for v in e.invars)]

        def weights(params: Leaves) -> Leaves:
            known = self.executor.known_params(params, consts)
            effective = effective_weights(self.info.program, {v: known[v] for v in fixed}, of)
            return [effective[i][name] for i, name in found]

        values, pull = pull_back(weights, params)
        layouts = {(w.site.index, name): layout for w in of for name, layout in w.layouts.items()}

        def one(rows: list[Any]) -> Leaves:
            terms = zip(found, rows, values, strict=True)
            return pull([_unview(layouts[k], d, v) for k, d, v in terms])[0]  # type: ignore[no-any-return]

        leaves = jax.vmap(jax.vmap(one))(_same_lead(list(found.values())))
        return {i: a for i, a in enumerate(leaves) if a is not None and self._is_param[i]}

    @cached_property
    def _is_param(self) -> list[bool]:
        return [e.is_param for e in self.info.fixed for _ in e.invars]

    # -- traces ------------------------------------------------------------------------------------

    def contract(self, traces: dict[str, Any], rows: Any, window: Window) -> Terms:
        """`sum g trace` for rows of signals at the states of the traces, sample by sample."""
        slots = self.executor.slots
        leaves = jax.vmap(lambda r: self.leaves(r, dual=True), 1)(rows)
        signals = jax.vmap(self.executor.at_groups)(leaves)
        found: dict[tuple[int, str], Any] = {}
        for slot in slots:
            inputs = window.first.inputs[slot.relation.site.index]
            g = jax.vmap(lambda q, slot=slot, inputs=inputs: slot.lift(q, inputs, 1))(
                signals[slot.group.index]
            )
            term = _contract(slot, self._slot_letter(slot), g, traces[slot.key])
            key = (slot.relation.site.index, slot.name)
            found[key] = found[key] + term if key in found else term
        if not found:
            return {}
        relations = self.executor.graph.hidden_param_op_relations
        return self.to_parameters(window.params, window.first_consts, relations, found)

    def _slot_letter(self, slot: Slot) -> str | None:
        """The letter of a trace along which samples lie."""
        if self.samples.axis is None:
            return None
        numbers = np.broadcast_to(
            np.arange(1, self.samples.count + 1).reshape(
                -1, *[1] * (len(slot.group.varshape) - self.samples.axis - 1)
            ),
            slot.group.varshape,
        )
        with jax.ensure_compile_time_eval():
            seen = np.asarray(
                slot.lift(jnp.asarray(numbers, float)[None], slot.relation.site.no_inputs, 1)[0]
            )
        # a place of the output that reaches no state has a zero there
        letter = counting(seen - 1, slot.at, self.samples.count)
        return None if letter in slot.layout.w else letter

    @property
    def tells_traces(self) -> bool:
        """Whether every trace has an axis of samples."""
        slots = self.executor.slots
        return self.samples.axis is None or all(self._slot_letter(t) is not None for t in slots)


TIME, ROWS = "time", "rows"


def _over_time(layout: Layout, letter: str | None, inputs: list[Any], dy: Any) -> Any:
    """`sum_t x[t] dy[t]`, with the letters (sample, rows, *weight); `dy` is (rows, time, *y)."""
    view = jax.vmap(layout.view_y)
    dy = jax.vmap(view, (0, None))(dy, inputs)
    y: Letters = (ROWS, TIME, *layout.y)
    lead = (ROWS,) if letter is None else (letter, ROWS)
    factor = _factors(layout, inputs, dy.dtype)
    if factor is None:
        out = tuple(a for a in (*lead, *layout.w) if a in y)
        result = _einsum([(dy, y)], out)
    else:
        x, have = promoted(factor[0], dy)[0], (TIME, *factor[1])
        dy = promoted(factor[0], dy)[1]
        out = tuple(a for a in (*lead, *layout.w) if a in y or a in have)
        result = _einsum([(x, have), (dy, y)], out)
    result = align(result, out, (*lead, *layout.w))
    return result[None] if letter is None else result


def _factors(layout: Layout, inputs: list[Any], dtype: Any) -> tuple[Any, Letters] | None:
    """The op's factor at every step."""
    if layout.x is None:
        return None
    letters: list[Letters] = []

    def one(inputs: list[Any]) -> Any:
        x, have = layout.factor(inputs)  # type: ignore[misc]
        letters.append(have)
        return x if is_inexact(x) else x.astype(dtype)

    return jax.vmap(one)(list(inputs)), letters[0]


def _contract(slot: Slot, letter: str | None, g: Any, trace: Any) -> Any:
    """`sum g trace` with the letters (sample, rows, *weight); `g` is (rows, states, *at)."""
    g, trace = promoted(g, trace)
    lead = (ROWS,) if letter is None else (letter, ROWS)
    out = (*lead, *slot.layout.w)
    result = _einsum([(g, (ROWS, "states", *slot.at)), (trace, ("states", *slot.letters))], out)
    return result[None] if letter is None else result


def _einsum(operands: Sequence[tuple[Any, Letters]], out: Letters) -> Any:
    letters = dict.fromkeys(a for _, have in operands for a in have)
    number = {a: i for i, a in enumerate(letters)}
    args: list[Any] = []
    for array, have in operands:
        args += [array, [number[a] for a in have]]
    return jnp.einsum(*args, [number[a] for a in out])


def _unview(layout: Layout, dw: Any, weight: Any) -> Any:
    """A term with the letters of the weight, shaped as the effective weight."""
    struct = jax.ShapeDtypeStruct(weight.shape, weight.dtype)
    dw = dw if jnp.iscomplexobj(weight) else dw.real
    dw = jnp.broadcast_to(dw, jax.eval_shape(layout.view_w, struct).shape)
    return jax.linear_transpose(layout.view_w, struct)(dw.astype(weight.dtype))[0]


def _same_lead(arrays: list[Any]) -> list[Any]:
    """The arrays with the same number of samples: one that all of them share stands for each."""
    count = max(a.shape[0] for a in arrays)
    return [jnp.broadcast_to(a, (count, *a.shape[1:])) for a in arrays]


def _parts(v: Var) -> int:
    """How many real numbers a number of the array is."""
    return 2 if jnp.issubdtype(v.aval.dtype, jnp.complexfloating) else 1


def _first(a: Any, axis: int | None) -> Any:
    return a[None] if axis is None else jnp.moveaxis(a, axis, 0)


def _back(a: Any, axis: int | None) -> Any:
    return a[0] if axis is None else jnp.moveaxis(a, 0, axis)


def _first_shape(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    return (1, *shape) if axis is None else (shape[axis], *shape[:axis], *shape[axis + 1 :])
