"""The matrices whose dense influence is large: a GPU kernel advances each in one pass, with its trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .._meshes import mesh_of
from .._types import Array, Values
from .dense_influence import DenseInfluence, Mixing
from .matrices import Matrix
from .memory import on_gpu
from .partial_sums import Gradient
from .per_sample import Vectors
from .pulled_rows import PulledRows
from .rows import fits, kernel_coefficients, step
from .sharding import Spec
from .slots import Slot
from .window import Record, Window

# `P` and `d` of traces that advance as `P trace + sum_t x[t] d[t]`
AffineTerms = dict[str, tuple[Array, Array]]
AffineTermsOf = Callable[[Sequence[Slot], Record], AffineTerms]

_LARGE = 2**28  # bytes of `V` of a matrix; intermediate results of smaller ones stay in the GPU's cache


@dataclass(frozen=True, eq=False)
class KernelMatrices:
    """The matrices that the kernel advances, by leaf, with the partition specs of their `V`."""

    store: DenseInfluence
    matrices: dict[int, Matrix] = field(default_factory=dict)
    specs: dict[int, Spec] = field(default_factory=dict)
    affine: AffineTerms = field(default_factory=dict)

    @staticmethod
    def find(
        store: DenseInfluence,
        values: Values,
        window: Window,
        affine_terms: AffineTermsOf,
    ) -> KernelMatrices:
        """The matrices that the kernel can advance over a window."""
        per, at = store.per, store.per.executor.sharding
        sharded = mesh_of(*values.values()) is not None
        if not on_gpu() or (sharded and at is None):
            return KernelMatrices(store)
        found, specs = {}, dict[int, Spec]()
        for i, matrix in per.matrices.items():
            rows = values[store.names[i]]
            trace = None if matrix.slot is None else values[matrix.slot.key]
            ways: Sequence[int] = (1, 1, 1, 1)
            if sharded and at is not None:
                on_inputs, on_outputs = at.of_leaf(i) or (None, None)
                specs[i] = at.fitted((per.lead, on_inputs, None, on_outputs), rows.shape)
                ways = [at.ways(p, n) for p, n in zip(specs[i], rows.shape, strict=True)]
            if rows.nbytes // math.prod(ways) >= _LARGE and fits(window.length, rows, trace, ways):
                found[i] = matrix
        affine = affine_terms([m.slot for m in found.values() if m.slot is not None], window.record)
        known = {i: m for i, m in found.items() if m.slot is None or m.slot.key in affine}
        return KernelMatrices(store, known, {i: specs.get(i, ()) for i in known}, affine)

    def advanced(
        self, values: Values, rows: PulledRows, mixing: Mixing, signal: Vectors, along: Array
    ) -> tuple[Values, dict[int, Gradient]]:
        """`V` and the traces after the window, and the gradients for a signal at its start, by leaf.

        `rows` are those of the basis after the window, pulled back to its start; `mixing` and `along` are the
        coefficients of `V` in these rows and in the signal.
        """
        per, after, grads = self.store.per, dict[str, Array](), dict[int, Gradient]()
        at_signal = per.traces.at_groups(signal[:, None])
        lifted = [per.traces.lift(a, rows.window) for a in (rows.at_traces, at_signal)]
        inputs = per.inputs(rows.window)
        for i, matrix in self.matrices.items():
            name, slot = self.store.names[i], matrix.slot
            trace = None if slot is None else values[slot.key]
            more = () if slot is None else (*self.affine[slot.key], *(a[slot.key] for a in lifted))
            factors = matrix.factors(inputs, rows.pulled.dys)
            how = kernel_coefficients(matrix, *factors, mixing, along, *more)
            after[name], trace, grad = step(values[name], trace, how, per.executor.sharding, self.specs[i])
            after.update({} if slot is None else {slot.key: trace})
            grads[i] = grad.astype(per.info.fixed_invars[i].aval.dtype)
        return after, grads
