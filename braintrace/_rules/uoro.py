"""UORO: the influence of the parameters as one random outer product for each sample, unbiased.

    P ~ s theta^T        s (state), theta (parameters)

Over a window, with `H` = d(state at its end)/d(state at its start) along all paths, `W` = d(state at its
end)/d(parameters) and `nu` random signs, one for each state variable:

    s'     = rho0 H s     + rho1 nu
    theta' = theta / rho0 + (nu^T W) / rho1
    gradient = within the window + <dL/dh[start], s> theta

The mean of `nu nu^T` is the identity and that of `nu` zero, so that the mean of `s' theta'^T` is `H P + W`.
`rho` makes the two factors of a product about as long; with norms over all entries of a sample,

    rho0 = sqrt(|theta| / (|H s| + eps)) + eps        rho1 = sqrt(|nu^T W| / (|nu| + eps)) + eps
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax

from .._executor.executor import ETraceGraphExecutor
from .._executor.sharding import Spec
from .._executor.trace_math import finite
from .._executor.window import Window
from .._types import Leaves
from .projection import BASIS
from .rank import Rank, named
from .rule import Flags, Shapes, Values
from .signs import COUNT, Estimate, key_at, norm, scaled, signs


@dataclass(frozen=True)
class UORO(Estimate):
    """A random outer product of a state vector and a parameter vector for each sample, unbiased.

    Args:
        key: Integer or random key of the signs.
        eps: Number added to norms.
        samples: Batch axis of the states; 'auto' finds it, None treats the batch as one sample.
    """

    @property
    def _kept(self) -> Rank:
        """The arrays of a rank-1 correction, with `s` in place of the basis and `theta` in place of `V`."""
        return Rank(1, self.samples, corrects_traces=False)

    def start(self, executor: ETraceGraphExecutor) -> Values:
        return self._kept.start(executor)

    def advance(self, executor: ETraceGraphExecutor, values: Values, window: Window) -> Values:
        if window.keep is not None:  # samples that are reset at its start have no past
            values = self.forget(executor, values, ~window.keep[0])
            window = window.without_first_reset
        per = self._kept.per_sample(executor)
        s = per.shard_samples(values[BASIS])
        pushed = per.shard_samples(finite(jax.vmap(partial(per.push, window), 1, 1)(s)))
        nu = per.shard_samples(signs(key_at(self.key, values[COUNT][0]), s.shape, s.dtype))
        added = per.pull(window, nu)[1]
        names = {i: key for i, (key, _) in named(per).items()}
        theta = {i: values[key] for i, key in names.items()}
        rho0 = self.balance(norm(theta.values(), s.dtype), norm([pushed], s.dtype))
        rho1 = self.balance(norm(added.values(), s.dtype), norm([nu], s.dtype))
        after = {BASIS: scaled(rho0, pushed) + scaled(rho1, nu), COUNT: values[COUNT] + 1}
        for i, key in names.items():
            after[key] = scaled(1 / rho0, theta[i])
            if i in added:
                after[key] = after[key] + scaled(1 / rho1, added[i]).astype(theta[i].dtype)
        return after

    def past(self, executor: ETraceGraphExecutor, values: Values, signals: Leaves, window: Window) -> Leaves:
        found = self._kept.past(executor, values, signals)
        return [found.get(i) for i in range(len(window.params))]

    def specs(self, executor: ETraceGraphExecutor, shapes: Shapes) -> dict[str, Spec]:
        return self._kept.specs(executor)

    def forget(self, executor: ETraceGraphExecutor, values: Values, is_reset: Flags) -> Values:
        return {**self._kept.forget(executor, values, is_reset), COUNT: values[COUNT]}
