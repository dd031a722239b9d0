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

from .._executor.dense_influence import DenseInfluence
from .._executor.executor import ETraceGraphExecutor
from .._executor.per_sample import find_per_sample
from .._executor.sharding import Spec
from .._executor.trace_math import finite
from .._executor.window import Window
from .._types import Leaves
from .projection import BASIS, Pushed, along_rows
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

    def _influence(self, executor: ETraceGraphExecutor) -> DenseInfluence:
        """The array `theta` of each parameter."""
        per = find_per_sample(executor, self.samples, traces=False)
        return DenseInfluence(per, 1, DenseInfluence.names_of(per, f"{BASIS}:"))

    def start(self, executor: ETraceGraphExecutor) -> Values:
        influence = self._influence(executor)
        return {**Pushed().start(influence.per, 1), **influence.zeros()}

    def advance(self, executor: ETraceGraphExecutor, values: Values, window: Window) -> Values:
        if window.keep is not None:  # samples that are reset at its start have no past
            values = self.forget(executor, values, ~window.keep[0])
            window = window.without_first_reset
        influence = self._influence(executor)
        per, s = influence.per, influence.per.shard_samples(values[BASIS])
        pushed = per.shard_samples(finite(per.push(window, s[:, 0])))[:, None]
        nu = per.shard_samples(signs(key_at(self.key, values[COUNT][0]), s.shape, s.dtype))
        added = per.pull(window, nu)[1]
        theta = [values[name] for name in influence.names.values()]
        rho0 = self.balance(norm(theta, s.dtype), norm([pushed], s.dtype))
        rho1 = self.balance(norm(added.values(), s.dtype), norm([nu], s.dtype))
        added = {i: scaled(1 / rho1, a) for i, a in added.items()}
        theta_after = influence.advanced(values, added, [(influence, (1 / rho0)[:, None, None])])
        return {BASIS: scaled(rho0, pushed) + scaled(rho1, nu), COUNT: values[COUNT] + 1, **theta_after}

    def past(self, executor: ETraceGraphExecutor, values: Values, signals: Leaves, window: Window) -> Leaves:
        influence = self._influence(executor)
        per = influence.per
        signal = per.shard_samples(finite(per.vectors(signals, dual=True)))
        found = influence.gradients(values, along_rows(signal, per.shard_samples(values[BASIS])))
        return [found.get(i) for i in range(len(window.params))]

    def specs(self, executor: ETraceGraphExecutor, shapes: Shapes) -> dict[str, Spec]:
        influence = self._influence(executor)
        return {**Pushed().specs(influence.per), **influence.specs()}

    def forget(self, executor: ETraceGraphExecutor, values: Values, is_reset: Flags) -> Values:
        per = find_per_sample(executor, self.samples, traces=False)
        return {**per.reset(values, is_reset), COUNT: values[COUNT]}
