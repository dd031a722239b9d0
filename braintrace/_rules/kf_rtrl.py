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

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .._compiler.errors import NotSupportedError
from .._compiler.step import show_paths
from .._executor.executor import ETraceGraphExecutor
from .._executor.per_sample import find_per_sample
from .._executor.product_influence import ProductInfluence, real_type
from .._executor.sharding import Spec
from .._executor.trace_math import finite
from .._executor.window import Window
from .._types import Array, Leaves
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

    def _uses(self, executor: ETraceGraphExecutor) -> list[ProductInfluence]:
        per = find_per_sample(executor, self.samples, traces=False)
        if (known := executor.per_sample.get((self.samples, ProductInfluence))) is not None:
            return known  # type: ignore[no-any-return]
        found = [ProductInfluence(per, w) for w in per.sites]
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
        executor.per_sample[self.samples, ProductInfluence] = found
        return found

    def start(self, executor: ETraceGraphExecutor) -> Values:
        return {key: a for use in self._uses(executor) for key, a in use.zeros().items()}

    def specs(self, executor: ETraceGraphExecutor, shapes: Shapes) -> dict[str, Spec]:
        found = {key: spec for use in self._uses(executor) for key, spec in use.specs().items()}
        return {key: spec for key, spec in found.items() if len(spec) == len(shapes[key].shape)}

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
                pushed = jnp.einsum("bnm,bm...->bn...", H.astype(real_type(J)), values[use.key("A")])
                p1, p2 = (
                    self.balance(norm([a], real_type(a)), norm(b.values(), real_type(a)))
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
            terms |= use.terms(values, signal, [a[0] for a in inputs[use.weighted.site.index]])
        found = per.to_parameters(window, terms)
        return [found.get(i) for i in range(len(none))]

    def forget(self, executor: ETraceGraphExecutor, values: Values, is_reset: Flags) -> Values:
        per = find_per_sample(executor, self.samples, traces=False)
        return {**per.reset(values, is_reset), COUNT: values[COUNT]}
