"""The influence of the parameters on the carried state of each sample, `P` = dh/dw, in dense rows `V = S P`.

    V' = C V + A        gradient = sum over samples and rows of a V

The rows `S` are unit vectors (all: `RTRL`; those of later layers: `Layers`), a basis (`Rank`), or one random
vector (`UORO`). `C` mixes the rows over a window, and `A` is the influence that the window adds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._compiler.step import name_of
from .._meshes import mesh_of
from .._types import Aval, DTypeLike, Values
from .partial_sums import Gradient
from .per_sample import PerSample, RowAxis
from .per_sample_traces import Terms
from .sharding import Spec
from .trace_math import add_up, contract_states, promoted
from .weight_gradients import row_axis

Mixing = Float[Array, "samples new old"]
ByLeaf = Mapping[int, Array]  # coefficients of rows for each parameter


@dataclass(frozen=True, eq=False)
class DenseInfluence:
    """Rows of the influence of some parameters: for each, (samples, *shape) with an axis of rows inserted."""

    per: PerSample
    size: int  # number of rows
    names: dict[int, str]  # of the array of each parameter, by leaf
    dtype: DTypeLike | None = None  # by default that of each parameter
    axis: RowAxis = row_axis

    @staticmethod
    def names_of(per: PerSample, prefix: str = "") -> dict[int, str]:
        """The name of each parameter leaf that affects carried states."""
        leaves = [f"{prefix}{name_of(e.path)}:{i}" for e in per.info.fixed for i, _ in enumerate(e.invars)]
        return {n: leaves[n] for n in per.acting}

    def _aval(self, leaf: int) -> Aval:
        return self.per.info.fixed_invars[leaf].aval

    def _row_axis(self, leaf: int) -> int:
        """The axis of rows in the array of a parameter."""
        return 1 + self.axis(self._aval(leaf).ndim)

    def zeros(self) -> Values:
        found = {}
        for i, name in self.names.items():
            shape = [self.per.samples.count, *self._aval(i).shape]
            shape.insert(self._row_axis(i), self.size)
            found[name] = jnp.zeros(shape, self.dtype or self._aval(i).dtype)
        return found

    def specs(self) -> dict[str, Spec]:
        """The partition specs: samples as the states', axes of parameters as their own."""
        at, found = self.per.executor.sharding, dict[str, Spec]()
        assert at is not None
        for i, name in self.names.items():
            spec = [self.per.lead, *(at.of_leaf(i) or [None] * self._aval(i).ndim)]
            spec.insert(self._row_axis(i), None)
            found[name] = tuple(spec)
        return found

    def advanced(
        self,
        values: Values,
        added: Terms,
        by: Sequence[tuple[DenseInfluence, Mixing | ByLeaf]],
        excluded: Sequence[int] = (),
    ) -> Values:
        """`V' = sum C V + A`; `by` are the influences whose rows act on these, with `C`."""
        after = {}
        for i, name in self.names.items():
            if i not in excluded:
                each = [mixed(_of(C, i), values[v.names[i]], v._row_axis(i)) for v, C in by if i in v.names]
                each += [added[i]] if i in added else []
                new = add_up(promoted(*each)) if each else values[name]
                after[name] = new.astype(values[name].dtype)
        return after

    def gradients(self, values: Values, along: Float[Array, "samples rows"] | ByLeaf) -> dict[int, Gradient]:
        """`sum a V` over samples and rows, by leaf of the parameters."""
        each = {i: promoted(_of(along, i), values[name]) for i, name in self.names.items()}
        return {i: self._gradient(i, *pair) for i, pair in each.items()}

    def where_reached(self, values: Values, coefficients: Array) -> ByLeaf:
        """Coefficients (samples, ..., rows), zero at rows that are zero: slopes may be infinite there."""
        kept = {i: values[name] for i, name in self.names.items()}

        def cleared() -> dict[int, Array]:
            found = {}
            for i, rows in kept.items():
                axes = tuple(a for a in range(1, rows.ndim) if a != self._row_axis(i))
                reached = jnp.any(rows != 0, axis=axes)
                lead = (len(reached), *[1] * (coefficients.ndim - 2), reached.shape[1])
                found[i] = jnp.where(reached.reshape(lead), coefficients, 0)
            return found

        if mesh_of(*kept.values()) is not None:  # all devices would have to agree on a condition
            return cleared()
        # finding the rows that are zero takes a pass over all of them
        is_finite = jnp.all(jnp.isfinite(coefficients))
        return jax.lax.cond(is_finite, lambda: dict.fromkeys(kept, coefficients), cleared)  # type: ignore[no-any-return]

    def _gradient(self, leaf: int, along: Array, kept: Array) -> Gradient:
        axis, dtype = self._row_axis(leaf), self._aval(leaf).dtype
        if mesh_of(kept) is not None:
            return self._summed(leaf, jnp.squeeze(mixed(along[:, None], kept, axis), axis).astype(dtype))
        if len(kept) == 1 and 1 < kept.shape[axis] <= _WRITTEN_OUT:
            return jnp.squeeze(mixed(along[:, None], kept, axis), (0, axis)).astype(dtype)
        if kept.shape[axis] > 1:
            return jnp.tensordot(along, kept, ((0, 1), (0, axis))).astype(dtype)
        found = contract_states(along.reshape(1, -1, *[1] * (kept.ndim - 2)), jnp.squeeze(kept, axis)[None])
        return found.astype(dtype)

    def _summed(self, leaf: int, array: Float[Array, "samples ..."]) -> Gradient:
        """The sum over samples; if they are sharded, per-device partial sums."""
        at, lead = self.per.executor.sharding, self.per.lead
        ways = 0 if at is None or lead is None else at.ways(lead, len(array))
        if at is None or ways < 2:
            return jnp.sum(array, 0)
        parts = jnp.sum(array.reshape(ways, -1, *array.shape[1:]), 1)
        return at.partial_sums(parts, lead, at.of_leaf(leaf))

    def reset(self, values: Values, is_reset: Bool[Array, " samples"]) -> Values:
        """The arrays with zeros for the samples that `is_reset` flags."""
        kept = {name: values[name] for name in self.names.values()}
        return self.per.reset(kept, is_reset) if kept else {}


def _of(coefficients: Array | ByLeaf, leaf: int) -> Array:
    return coefficients[leaf] if isinstance(coefficients, Mapping) else coefficients


_WRITTEN_OUT = 16  # rows up to which sums over them are unrolled; above, a matrix product is faster


def mixed(mixing: Mixing, kept: Float[Array, "samples ..."], axis: int) -> Float[Array, "samples ..."]:
    """`sum_r mixing[b, q, r] kept[b, .., r, ..]`, with the rows of `kept` at `axis`."""
    mixing, kept = promoted(mixing, kept)
    size = kept.shape[axis]
    if 1 <= size <= _WRITTEN_OUT:
        # products of rows, which XLA fuses with the terms that are added: `V` is read once and not transposed
        shape = [1] * kept.ndim
        shape[0], shape[axis] = mixing.shape[:2]
        rows = [jax.lax.slice_in_dim(kept, r, r + 1, axis=axis) for r in range(size)]
        return add_up(mixing[:, :, r].reshape(shape) * row for r, row in enumerate(rows))
    # the parameter's axes are not merged: if they are sharded, that would gather them
    found = jnp.einsum("bqr,br...->bq...", mixing, jnp.moveaxis(kept, axis, 1))
    return jnp.moveaxis(found, 1, axis)
