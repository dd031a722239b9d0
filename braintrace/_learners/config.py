"""A learning rule as a point on axes: `ETraceConfig`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import cast

from .. import rules
from .._executor.trace_recursion import Decay, Leak, Own, Recursion
from .._online.request import check_choice
from .._rules.rule import Rule
from .._rules.signal import PROPAGATED, Feedback, Modulator, Signal, as_key
from .._rules.snap import MOST
from .._types import DTypeLike, Key, Option

_AXES: dict[str, tuple[str, ...]] = {
    "trace_factorization": ("per_param", "io_factorized", "random_projection"),
    "temporal_recursion": ("jacobian", "scalar_leak", "none"),
    "recurrence_scope": ("diagonal", "coupled", "sparse_n"),
    "learning_signal": ("symmetric", "random_feedback", "modulatory", "bootstrapped"),
    "trace_filter": ("none", "kappa"),
    "update_schedule": ("per_step", "window", "sequence_end"),
}


@dataclass(frozen=True)
class ETraceConfig:
    """A learning rule by its choices: the kind of trace, its decay, the learning signal, the filter.

    `trace_factorization`: 'per_param' (a trace of every weight), 'io_factorized' (averages of inputs and of
    state Jacobians, `decay` a number or a pair) or 'random_projection' (`UORO`). `temporal_recursion`:
    'jacobian', 'scalar_leak' (by `decay`) or 'none'; a pair for inputs and states where these are averaged.
    `recurrence_scope`: 'diagonal' (marked ops closed), 'coupled' (how a unit acts on itself through them) or
    'sparse_n' (`SnAp` of `sparse_n` steps). `learning_signal`: 'symmetric', 'random_feedback', 'modulatory'
    or 'bootstrapped' (`DNI`). `trace_filter`: 'none' or 'kappa' (with `kappa`). `update_schedule`:
    'per_step', 'window' (back-propagated through windows of `window_size` steps) or 'sequence_end' (the sum
    of all steps, which `etrace_grad` returns: the same numbers).

    >>> ETraceConfig(trace_factorization="io_factorized", decay=0.9).temporal_recursion
    ('scalar_leak', 'jacobian')
    """

    trace_factorization: str = "per_param"
    temporal_recursion: str | tuple[str, str] = "jacobian"
    recurrence_scope: str = "diagonal"
    learning_signal: str = "symmetric"
    trace_filter: str = "none"
    update_schedule: str = "per_step"
    decay: float | tuple[float, float] | None = None
    kappa: float | None = None
    sparse_n: int | None = None
    window_size: int | None = None

    def __post_init__(self) -> None:
        if self.sparse_n == 1 and self.recurrence_scope == "sparse_n":
            self._set(recurrence_scope="coupled", sparse_n=None)
        if self.trace_filter == "kappa" and self.kappa == 0:
            self._set(trace_filter="none", kappa=None)
        if self.is_factorized:
            self._as_pairs()
        for name, known in _AXES.items():
            value = getattr(self, name)
            for one in value if isinstance(value, tuple) else (value,):
                check_choice(name, one, known)
        if not self.is_factorized:
            self._check_per_param()
        for name, axis, value in (
            ("kappa", "trace_filter", "kappa"),
            ("sparse_n", "recurrence_scope", "sparse_n"),
            ("window_size", "update_schedule", "window"),
        ):
            is_set = getattr(self, name) is not None
            if is_set != (getattr(self, axis) == value):
                raise ValueError(
                    f"`{name}` goes with `{axis}={value!r}`: {name}={getattr(self, name)!r} and "
                    f"{axis}={getattr(self, axis)!r} do not."
                )
        if self.trace_filter == "kappa" and self.is_factorized:
            raise ValueError("`trace_filter='kappa'` is for `trace_factorization='per_param'`.")
        for one in (self.decay if isinstance(self.decay, tuple) else (self.decay,)) + (self.kappa,):
            if one is not None and not 0 <= one < 1:
                raise ValueError(f"A decay is at least 0 and less than 1, not {one!r}.")

    def _set(self, **values: Option) -> None:
        vars(self).update(values)  # the dataclass is frozen

    def _as_pairs(self) -> None:
        given = self.temporal_recursion
        x, f = given if isinstance(given, tuple) else ("none" if given == "none" else "scalar_leak", given)
        if self.decay is None and (x, f) != ("none", "none"):
            raise ValueError("`decay` is needed for `trace_factorization='io_factorized'`.")
        inp, out = self.decay if isinstance(self.decay, tuple) else (self.decay, self.decay)
        x, inp = ("none", 0.0) if x == "none" or not inp else (x, float(inp))
        f, out = ("none", 0.0) if f == "none" or not out else (f, float(out))
        self._set(temporal_recursion=(x, f), decay=(inp, out))

    def _check_per_param(self) -> None:
        if self.temporal_recursion == "scalar_leak" and self.decay is None:
            raise ValueError("`decay` is needed for `temporal_recursion='scalar_leak'`.")
        if self.temporal_recursion == "scalar_leak" and self.decay == 0:
            self._set(temporal_recursion="none")
        if self.temporal_recursion == "jacobian" and self.decay is not None:
            raise ValueError("`decay` is set, but `temporal_recursion` is 'jacobian'.")
        if self.temporal_recursion == "none":
            self._set(decay=0.0)
        if self.temporal_recursion != "jacobian" and self.recurrence_scope != "diagonal":
            raise ValueError("`recurrence_scope` is 'diagonal' unless `temporal_recursion='jacobian'`.")

    @property
    def is_factorized(self) -> bool:
        """Whether averages of two sides are kept."""
        return self.trace_factorization == "io_factorized"

    def replace(self, **changes: Option) -> ETraceConfig:
        """A copy with other choices."""
        return dataclasses.replace(self, **changes)

    def rule(
        self,
        key: Key | int | None = None,
        trace_dtype: DTypeLike | None = None,
        max_jacobian_elements: int = MOST,
    ) -> Rule:
        """The learning rule; `key` draws random feedback, the last two are those of the learner classes."""
        if self.recurrence_scope == "sparse_n" or self.trace_factorization == "random_projection":
            return self._influence(max_jacobian_elements)
        if self.learning_signal == "bootstrapped":
            raise ValueError(
                "`learning_signal='bootstrapped'` has a net that estimates the losses after a window: take "
                "`braintrace.DNI(model, synthesizer)`, or `braintrace.compile(model, config, ...)`."
            )
        signal: Signal = Modulator() if self.learning_signal == "modulatory" else PROPAGATED
        if self.learning_signal == "random_feedback":
            signal = Feedback(as_key(key))
        own = Own() if self.recurrence_scope == "coupled" else None
        if self.is_factorized:
            decay: Decay | None = Leak(1.0) if self.temporal_recursion[1] == "scalar_leak" else own
            recursion = None if decay is None else Recursion(decay)
            return rules.ES_D_RTRL(self.decay, trace_dtype, recursion, signal, "ETraceConfig")
        decay = own if self.temporal_recursion == "jacobian" else Leak(float(cast(float, self.decay)))
        recursion = None if decay is None and self.kappa is None else Recursion(decay, self.kappa)
        return rules.D_RTRL(
            trace_dtype=trace_dtype, recursion=recursion, signal=signal, called="ETraceConfig"
        )

    def _influence(self, max_jacobian_elements: int) -> Rule:
        """The rule of a choice that keeps influence in another form than traces."""
        name = "random_projection"
        if self.trace_factorization == name and self.recurrence_scope != "coupled":
            raise ValueError(f"`trace_factorization={name!r}` goes with `recurrence_scope='coupled'`.")
        if self.learning_signal != "symmetric" or self.trace_filter != "none" or self.is_factorized:
            raise ValueError(
                "`recurrence_scope='sparse_n'` and `trace_factorization='random_projection'` go with "
                "back-propagated signals that are not filtered, each alone."
            )
        if self.trace_factorization == name:
            return rules.UORO()
        return rules.SnAp(self.sparse_n or 1, max_jacobian_elements)
