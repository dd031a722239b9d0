"""KF-RTRL: the influence of each weight as a random Kronecker product of an input and an output side.

A use `y = op(x, w)` of a parameter acts on the states by `x (x) J`, with `J` = dh/dy along all paths. Its
influence on the carried states is kept, for each sample, in the same form:

    P ~ u (x) A        u (inputs of the op), A (state, outputs of the op)

At each step, with `H` = dh[t]/dh[t-1] along all paths and two random signs `c` for each use and sample:

    u' = c1 p1 u     + c2 p2 x        p1 = sqrt(|H A| / (|u| + eps)) + eps
    A' = c1 H A / p1 + c2 J / p2      p2 = sqrt(|J| / (|x| + eps)) + eps
    gradient = within the window + sum over uses of u (x) (dL/dh[start] A)

The estimate is unbiased. A bias has an input of one, and shares `A` with the weight of the same op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from jaxtyping import Float

from .._compiler.errors import NotSupportedError
from .._compiler.find_relations import SiteWeights
from .._compiler.provenance import provenance
from .._compiler.step import show_path, show_paths
from .._executor.effective_weights import Weighted
from .._executor.executor import ETraceGraphExecutor
from .._executor.per_sample import PerSample, find_per_sample
from .._executor.sharding import Names, Spec
from .._executor.trace_math import finite
from .._executor.weight_gradients import floating_factor, product
from .._executor.window import Window
from .._ops.axis_labels import Labels, Layout, align
from .._types import Array, DTypeLike, Leaves, Path
from .rule import Flags, Shapes, Values
from .signs import COUNT, Estimate, key_at, norm, scaled, signs


@dataclass(frozen=True)
class KF_RTRL(Estimate):
    """A random Kronecker product for each use of a parameter, unbiased.

    Args:
        key: Integer or random key of the signs.
        eps: Number added to norms.
        samples: Batch axis of the states; 'auto' finds it, None treats the batch as one sample.
    """

    def _uses(self, executor: ETraceGraphExecutor) -> list[Use]:
        per = find_per_sample(executor, self.samples, traces=False)
        if (known := executor.per_sample.get((self.samples, Use))) is not None:
            return known  # type: ignore[no-any-return]
        found = [Use(per, w) for w in per.sites]
        for use in found:
            use.check()
        if per.others:
            leaves = [e.path for e in per.info.fixed for _ in e.invars]
            raise NotSupportedError(
                f"KF_RTRL keeps an input and an output side of each product with a parameter, and "
                f"{show_paths(dict.fromkeys(leaves[i] for i in per.others))} acts on states in another way, "
                "too. Use it through `braintrace.matmul` or `braintrace.element_wise`, or take another rule: "
                "`UORO`, or `D_RTRL` with a `rank`."
            )
        executor.per_sample[self.samples, Use] = found
        return found

    def start(self, executor: ETraceGraphExecutor) -> Values:
        values: Values = {}
        for use in self._uses(executor):
            inputs = use.weighted.site.no_inputs
            for name in use.layouts:
                x = use.input(name, inputs)
                values[use.key(name)] = jnp.zeros(x.shape, x.dtype)
            site = use.weighted.site
            y = jnp.zeros((use.per.state_size, *site.shape), site.output.aval.dtype)
            values[use.key("A")] = jnp.zeros_like(use.by_sample(y))
        return values

    def specs(self, executor: ETraceGraphExecutor, shapes: Shapes) -> dict[str, Spec]:
        """The partition specs: samples as the states', inputs and outputs of an op as its weight's labels."""
        found: dict[str, Spec] = {}
        for use in self._uses(executor):
            names, lead = use.names, use.per.lead
            for name in use.layouts:
                found[use.key(name)] = (lead, *(names.get(a) for a in use.input_labels(name)))
            found[use.key("A")] = (lead, None, *use.of_output(names))
        return {k: spec for k, spec in found.items() if len(spec) == len(shapes[k].shape)}

    def advance(self, executor: ETraceGraphExecutor, values: Values, window: Window) -> Values:
        uses = self._uses(executor)
        if not uses:
            return values
        per = uses[0].per

        def step(values: Values, window: Window) -> tuple[Values, tuple[()]]:
            if window.keep is not None:
                values = self.forget(executor, values, ~window.keep[0])
            H, dys = per.back(window, per.unit_rows, [use.weighted for use in uses])
            H, inputs = finite(H), per.inputs(window)
            after: Values = {COUNT: values[COUNT] + 1}
            key = key_at(self.key, values[COUNT][0])
            for use in uses:
                i = use.weighted.site.index
                J = use.by_sample(dys[i][:, 0])
                x = {n: use.input(n, [a[0] for a in inputs[i]]) for n in use.layouts}
                u = {n: values[use.key(n)] for n in use.layouts}
                pushed = jnp.einsum("bnm,bm...->bn...", H.astype(_real(J)), values[use.key("A")])
                p1, p2 = (
                    self.balance(norm([a], _real(a)), norm(b.values(), _real(a)))
                    for a, b in ((pushed, u), (J, x))
                )
                c = signs(jax.random.fold_in(key, i), (2, per.samples.count), p1.dtype)
                for name in use.layouts:
                    after[use.key(name)] = scaled(c[0] * p1, u[name]) + scaled(c[1] * p2, x[name])
                after[use.key("A")] = scaled(c[0] / p1, pushed) + scaled(c[1] / p2, J)
            return after, ()

        return window.scan_windows(1, step, values)[0]  # type: ignore[no-any-return]

    def past(self, executor: ETraceGraphExecutor, values: Values, signals: Leaves, window: Window) -> Leaves:
        uses = self._uses(executor)
        none: Leaves = [None] * len(window.params)
        if not uses:
            return none
        per = uses[0].per
        signal, inputs = finite(per.vectors(signals, dual=True)), per.inputs(window)
        terms: dict[tuple[int, str], Array] = {}
        for use in uses:
            i, A = use.weighted.site.index, values[use.key("A")]
            dy = use.from_samples(jnp.einsum("bn,bn...->b...", signal.astype(_real(A)), A))
            for name in use.layouts:
                terms[i, name] = use.weight(name, values[use.key(name)], dy, [a[0] for a in inputs[i]])
        found = per.to_parameters(window, terms)
        return [found.get(i) for i in range(len(none))]

    def forget(self, executor: ETraceGraphExecutor, values: Values, is_reset: Flags) -> Values:
        per = find_per_sample(executor, self.samples, traces=False)
        return {**per.reset(values, is_reset), COUNT: values[COUNT]}


@dataclass(frozen=True, eq=False)
class Use:
    """One use of parameters, and the layout of its two sides in arrays with samples first."""

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

    def input_labels(self, name: str) -> Labels:
        """The labels of the input side, without that of samples."""
        layout = self.layouts[name]
        sample = self.per.labels[self.weighted.site.index, name]
        return tuple(a for a in layout.x or () if a != sample and a in layout.w)

    def of_output(self, names: Names) -> Spec:
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
    def names(self) -> Names:
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
        x = align(*factor, (sample, *self.input_labels(name)))
        return jnp.broadcast_to(x, (count, *x.shape[1:]))

    def by_sample(self, rows: Float[Array, "rows ..."]) -> Float[Array, "samples rows ..."]:
        """Move the batch axis of rows of arrays like the output to the front."""
        return rows[None] if self._axis is None else jnp.moveaxis(rows, 1 + self._axis, 0)

    def from_samples(self, array: Float[Array, "samples ..."]) -> Array:
        """Move the batch axis of an array like the output back to its place."""
        return array[0] if self._axis is None else jnp.moveaxis(array, 0, self._axis)

    def weight(self, name: str, u: Array, dy: Array, inputs: Sequence[Array]) -> Array:
        """`u (x) dy`, summed over samples, with the labels of the weight."""
        layout = self.layouts[name]
        sample, have = self.per.labels[self.weighted.site.index, name], self.input_labels(name)
        u, have = (u[0], have) if sample is None else (u, (sample, *have))
        return product([(u, have), (layout.view_y(dy, inputs), layout.y)], layout.w)


def _real(array: Array) -> DTypeLike:
    return jnp.finfo(array.dtype).dtype
