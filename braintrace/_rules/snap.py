"""SnAp(n): the influence of every parameter where it can act within `n` steps.

    P[t] = M * (H[t] P[t-1] + dh[t]/dw)        gradient = within the window + dL/dh[start] P[start]

with `H` = dh[t]/dh[t-1] along all paths, and `M` one where an element of a parameter reaches a state variable
in at most `n` steps. The pattern `M` comes from the structure of the step: sparse and grouped products,
convolutions, layers. A dense recurrence reaches everything in two steps, and `P` is then that of RTRL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .._compiler.errors import NotSupportedError
from .._compiler.exactness import RuleKind
from .._compiler.influence_pattern import find_reached
from .._executor.executor import ETraceGraphExecutor
from .._executor.per_sample import find_per_sample
from .._executor.sharding import Spec
from .._executor.sparse_influence import SparseInfluence, elements
from .._executor.trace_math import finite
from .._executor.window import Window
from .._types import Leaves
from .rule import Flags, Rule, Shapes, Values

MOST = 16777216  # stored entries, of all samples
_READABLE = 2**32  # largest pattern that is computed: one bit per entry


@dataclass(frozen=True)
class SnAp(Rule):
    """The entries of the influence matrix that a parameter can reach within `n` steps.

    Args:
        n: Number of steps, at least 1.
        max_jacobian_elements: Largest number of entries; a larger influence matrix is refused.
        samples: Batch axis of the states; 'auto' finds it, None treats the batch as one sample.
    """

    n: int = 2
    max_jacobian_elements: int = MOST
    samples: int | str | None = "auto"
    any_window: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or isinstance(self.n, bool) or self.n < 1:
            raise ValueError(f"`n` is a number of steps, from 1 on, not {self.n!r}.")

    def kind(self, windows: bool) -> RuleKind:
        return RuleKind(f"SnAp({self.n})", windows=windows, reach=self.n, samples=self.samples)

    def _influence(self, executor: ETraceGraphExecutor) -> SparseInfluence:
        key = (type(self), self.n, self.samples)
        if key not in executor.per_sample:
            per = find_per_sample(executor, self.samples, traces=False)
            leaves = per.info.fixed_invars
            size = len(set(elements(per))) * sum(leaves[i].aval.size for i in per.acting)
            if size > _READABLE:
                raise self._too_large(f"up to {size * per.samples.count}", size * per.samples.count)
            reached = find_reached(per.info, per.samples, per.acting)
            per.linear.tell_read()
            executor.per_sample[key] = SparseInfluence.of(per, reached, self.n)
        found: SparseInfluence = executor.per_sample[key]
        if found.size > self.max_jacobian_elements:
            raise self._too_large(f"{found.size}", found.size)
        return found

    def _too_large(self, words: str, size: int) -> NotSupportedError:
        return NotSupportedError(
            f"What parameters reach in {self.n} steps is {words} numbers, {size / 2**28:.2f} GiB in float32: "
            f"more than `max_jacobian_elements={self.max_jacobian_elements}`. Take a smaller `n` or batch, a "
            "sparser recurrence, a higher limit, or another rule: `D_RTRL` with a `rank`."
        )

    def start(self, executor: ETraceGraphExecutor) -> Values:
        return self._influence(executor).zeros()

    def specs(self, executor: ETraceGraphExecutor, shapes: Shapes) -> dict[str, Spec]:
        return self._influence(executor).specs()

    def advance(self, executor: ETraceGraphExecutor, values: Values, window: Window) -> Values:
        influence = self._influence(executor)

        def step(values: Values, window: Window) -> tuple[Values, tuple[()]]:
            if window.keep is not None:
                values = self.forget(executor, values, ~window.keep[0])
            return influence.advanced(values, window), ()

        return window.scan_windows(1, step, values)[0] if values else values

    def past(self, executor: ETraceGraphExecutor, values: Values, signals: Leaves, window: Window) -> Leaves:
        influence = self._influence(executor)
        per = influence.per
        found = influence.gradients(values, per.shard_samples(finite(per.vectors(signals, dual=True))))
        return [found.get(i) for i in range(len(window.params))]

    def forget(self, executor: ETraceGraphExecutor, values: Values, is_reset: Flags) -> Values:
        return self._influence(executor).per.reset(values, is_reset)
