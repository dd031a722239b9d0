"""Parameters that are the matrix of one dense op, whose per-sample gradients are products of two factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from .._compat import Literal
from .._compiler.program import Site
from .._ops.axis_labels import Labels, Layout, align
from .._types import Array
from .effective_weights import Weighted, effective_weights, known_params
from .slots import Slot
from .weight_gradients import ROWS, TIME, factors_over_time

if TYPE_CHECKING:
    from .per_sample import PerSample


@dataclass(frozen=True, eq=False)
class Matrix:
    """A parameter that is the matrix of one dense op: `y[b, o] = sum_i x[b, i] w[i, o]`."""

    site: Site
    name: str
    label: str  # of the batch axis
    layout: Layout
    slot: Slot | None  # of its trace

    def by_sample(self, array: Array, have: Labels, *lead: str) -> Array:
        """Transpose an array with labels `have` to (samples, *lead, out)."""
        return align(array, have, (self.label, *lead, self.layout.w[1]))

    def factors(self, inputs: dict[int, list[Array]], dys: dict[int, Array]) -> tuple[Array, Array]:
        """`x`, (samples, in, time), and `dy`, (samples, rows, time, out)."""
        i = self.site.index
        (x, have), (dy, y) = factors_over_time(self.layout, inputs[i], dys[i], rows=True)
        return align(x, have, (self.label, self.layout.w[0], TIME)), self.by_sample(dy, y, ROWS, TIME)


def find_matrices(per: PerSample) -> dict[int, Matrix]:
    """The leaves of `params` whose only use is as the matrix of one dense op, with or without a trace."""
    keys = [(w, name) for w in per.sites for name in w.layouts]
    program, fixed = per.info.program, [v.aval for v in per.info.fixed_invars]

    def weights(params: list[Array], consts: list[Array]) -> list[Array]:
        found = effective_weights(program, known_params(per.info, params, consts), per.sites)
        return [found[w.site.index][name] for w, name in keys]

    jaxpr = jax.make_jaxpr(weights)(fixed, list(program.consts.values())).jaxpr
    read = {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, Literal)}
    found = {}
    for i, leaf in enumerate(jaxpr.invars[: len(fixed)]):
        uses = [key for key, v in zip(keys, jaxpr.outvars, strict=True) if v is leaf]
        if i in per.acting and i not in per.others and leaf not in read and len(uses) == 1:
            matrix = _matrix(per, *uses[0])
            found.update({} if matrix is None else {i: matrix})
    return found


def _matrix(per: PerSample, weighted: Weighted, name: str) -> Matrix | None:
    site, layout = weighted.site, weighted.layouts[name]
    label, w, x = per.labels[site.index, name], layout.w, layout.x
    slots = [t for t in per.executor.slots if per.linear.site(t.relation.site) is site and t.name == name]
    if label is None or x is None or len(w) != 2 or layout.y_is_viewed or layout.w_is_viewed:
        return None
    if {*x} != {label, w[0]} or {*layout.y} != {label, w[1]} or len(slots) > 1:
        return None
    plain = all(
        t.labels == (label, *w) and {*t.y} == {*layout.y} and not t.positions.on_hidden for t in slots
    )
    return Matrix(site, name, label, layout, slots[0] if slots else None) if plain else None
