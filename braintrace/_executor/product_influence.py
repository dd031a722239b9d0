"""The influence of a use of a parameter on the state of each sample, as a product of two sides.

    P ~ u (x) A        u (inputs of the op), A (state, outputs of the op)

A bias has an input of one, and shares `A` with the weight of the same op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
from jaxtyping import Float

from .._compiler.errors import NotSupportedError
from .._compiler.find_relations import SiteWeights
from .._compiler.provenance import provenance
from .._compiler.step import show_path
from .._ops.axis_labels import Labels, Layout, align
from .._types import Array, DTypeLike, Path, Values
from .effective_weights import Weighted
from .per_sample import PerSample
from .sharding import Names, Spec
from .weight_gradients import floating_factor, product


@dataclass(frozen=True, eq=False)
class ProductInfluence:
    """The influence of one use of parameters, as two sides with samples first."""

    per: PerSample
    weighted: Weighted

    @property
    def layouts(self) -> dict[str, Layout]:
        return self.weighted.layouts

    def key(self, name: str) -> str:
        return f"{self.weighted.site.index}:{'.'.join(self._paths[0])}:{name}"

    @cached_property
    def _weights(self) -> SiteWeights:
        info = self.per.info
        origin = provenance(info.program, info.param_invars)
        return SiteWeights(info, self.weighted.site, origin)

    @cached_property
    def _paths(self) -> list[Path]:
        return list(self._weights.paths.values())

    @cached_property
    def _axis(self) -> int | None:
        return self.per.axis_at(self.weighted.site)

    def zeros(self) -> Values:
        site = self.weighted.site
        sides = {name: self.input(name, site.no_inputs) for name in self.layouts}
        sides["A"] = self.by_sample(jnp.zeros((self.per.state_size, *site.shape), site.output.aval.dtype))
        return {self.key(name): jnp.zeros_like(a) for name, a in sides.items()}

    def specs(self) -> dict[str, Spec]:
        """The partition specs: samples as the states', inputs and outputs of an op as its weight's labels."""
        names, lead = self._names, self.per.lead
        found: dict[str, Spec] = {}
        for name in self.layouts:
            found[self.key(name)] = (lead, *(names.get(a) for a in self._input_labels(name)))
        return {**found, self.key("A"): (lead, None, *self._of_output(names))}

    def check(self) -> None:
        """Refuse an op whose weight terms are sums of products."""
        site, labels = self.weighted.site, self.per.labels
        for name, layout in self.layouts.items():
            samples = {labels[site.index, name]} if self.per.samples.axis is not None else set()
            extra = [
                a for a in (*layout.y, *(layout.x or ())) if a in layout.y and a not in (*layout.w, *samples)
            ]
            if extra or (self.per.samples.axis is not None and self._axis is None):
                raise NotSupportedError(
                    f"KF_RTRL keeps an input and an output side of each product with a parameter. The {name} "
                    f"`{show_path(self._paths[0])}` of `{site.primitive.name}` at {site.source} enters many "
                    "outputs of a sample at once (places of an image, steps of a loop), so that its effect "
                    "is no product. Take another rule: `UORO`, or `D_RTRL` with a `rank`."
                )

    def _input_labels(self, name: str) -> Labels:
        """The labels of the input side, without that of samples."""
        layout = self.layouts[name]
        sample = self.per.labels[self.weighted.site.index, name]
        return tuple(a for a in layout.x or () if a != sample and a in layout.w)

    def _of_output(self, names: Names) -> Spec:
        """The partition spec of the output without batch axis: by its labels, or as states of its shape."""
        at, shape = self.per.executor.sharding, self.weighted.site.shape
        spec: Spec = (None,) * len(shape)
        for layout in self.layouts.values():
            if not layout.y_is_viewed and any(a in names for a in layout.y):
                spec = tuple(names.get(a) for a in layout.y)
        groups = [g for g in self.per.executor.graph.hidden_groups if g.varshape == shape]
        if not any(spec) and groups and at is not None:
            spec = at.of_group(groups[0])
        return tuple(s for a, s in enumerate(spec) if a != self._axis)

    @property
    def _names(self) -> Names:
        """The mesh axes of each label, from the partition specs of the weights."""
        found: Names = {}
        at, number = self.per.executor.sharding, self.per.info.fixed_invars
        if at is None:
            return found
        for name, (inputs, _, _) in self._weights.found.items():
            leaves, shape = list(inputs), self.weighted.site.weights[name].aval.shape
            if len(leaves) == 1 and leaves[0].aval.shape == shape and name in self.layouts:
                spec = at.of_leaf(number.index(leaves[0]))
                found.update(at.labels(spec, shape, self.layouts[name]))
        return found

    def input(self, name: str, inputs: Sequence[Array]) -> Float[Array, "samples ..."]:
        """The input side of a weight at one step."""
        count, dtype = self.per.samples.count, self.weighted.site.output.aval.dtype
        factor = floating_factor(self.layouts[name], inputs, dtype)
        if factor is None:
            return jnp.ones((count,), dtype)
        sample = self.per.labels[self.weighted.site.index, name] or "no sample"
        x = align(*factor, (sample, *self._input_labels(name)))
        return jnp.broadcast_to(x, (count, *x.shape[1:]))

    def by_sample(self, rows: Float[Array, "rows ..."]) -> Float[Array, "samples rows ..."]:
        """Move the batch axis of rows of arrays like the output to the front."""
        return rows[None] if self._axis is None else jnp.moveaxis(rows, 1 + self._axis, 0)

    def _from_samples(self, array: Float[Array, "samples ..."]) -> Array:
        """Move the batch axis of an array like the output back to its place."""
        return array[0] if self._axis is None else jnp.moveaxis(array, 0, self._axis)

    def terms(
        self, values: Values, signal: Float[Array, "samples n"], inputs: Sequence[Array]
    ) -> dict[tuple[int, str], Array]:
        """The gradients `u (x) (signal A)` of the effective weights, summed over samples."""
        A = values[self.key("A")]
        dy = self._from_samples(jnp.einsum("bn,bn...->b...", signal.astype(real_type(A)), A))
        i, names = self.weighted.site.index, self.layouts
        return {(i, n): self._weight(n, values[self.key(n)], dy, inputs) for n in names}

    def _weight(self, name: str, u: Array, dy: Array, inputs: Sequence[Array]) -> Array:
        """`u (x) dy`, summed over samples, with the labels of the weight."""
        layout = self.layouts[name]
        sample, have = self.per.labels[self.weighted.site.index, name], self._input_labels(name)
        u, have = (u[0], have) if sample is None else (u, (sample, *have))
        return product([(u, have), (layout.view_y(dy, inputs), layout.y)], layout.w)


def real_type(array: Array) -> DTypeLike:
    return jnp.finfo(array.dtype).dtype
