"""The rules of a comparison, as users give them: names, classes, values, pairs with options, or by label."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .._learners.base import ETraceAlgorithm
from .._learners.bptt import BPTT
from .._learners.compile import learner_named, rule_and_window
from .._learners.learners import D_RTRL, ES_D_RTRL, RTRL
from .._learners.vjp import ETraceVjpAlgorithm, read_method
from .._report.tables import title_of
from .._rules.rule import Rule


@dataclass(frozen=True)
class Candidate:
    """A rule with its options, and what it is called."""

    label: str
    rule: type[ETraceAlgorithm] | Rule
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_bptt(self) -> bool:
        """Whether it is back-propagation through time, the yardstick."""
        if isinstance(self.rule, Rule):
            return self.rule.back_through_time
        return issubclass(self.rule, BPTT)

    def learner(self, model: Any) -> ETraceAlgorithm:
        if self.is_bptt:
            return BPTT(model, **self.options)
        if isinstance(self.rule, Rule):
            return ETraceVjpAlgorithm(model, self.rule, **self.options)
        return self.rule(model, **self.options)

    def value(self) -> tuple[Rule, int | None]:
        """The rule as a value, and the steps of its windows: what functions are trained with."""
        if not isinstance(self.rule, Rule):
            return rule_and_window(self.rule, **self.options)
        method = read_method(self.rule, self.options.get("vjp_method"), self.options.get("window"))
        return self.rule, (self.options.get("window") or 1) if method == "multi-step" else None


YARDSTICK = Candidate("BPTT", BPTT)


def ladder(length: int, fits: Callable[[Candidate], bool]) -> list[Candidate]:
    """Rules from cheap to exact, for sequences of so many steps."""
    windows = [k for k in (1, 5, 10) if k < length]  # else all of it is one window: BPTT
    given: list[Any] = [ES_D_RTRL, D_RTRL, *((D_RTRL, {"window": k}) for k in windows)]
    given += [(D_RTRL, {"window": 5, "rank": 4})] if length > 5 else [(D_RTRL, {"rank": 4})]
    whole = _read(RTRL, None)
    return [*(_read(one, None) for one in given), *([whole] if fits(whole) else [])]


def read_rules(rules: Any) -> list[Candidate]:
    """The candidates that a user's list, or dictionary by label, stands for."""
    if isinstance(rules, Mapping):
        found = [_read(given, str(label)) for label, given in rules.items()]
    else:
        alone = isinstance(rules, str | type | Rule) or not isinstance(rules, Iterable)
        found = [_read(given, None) for given in ([rules] if alone else rules)]
    if not found:
        raise ValueError("There is no rule to compare: `rules` is empty.")
    for i, one in enumerate(found):
        if one.label in [other.label for other in found[:i]]:
            raise ValueError(
                f"{one.label} is there twice; tell them apart by a dictionary, `rules={{label: rule}}`."
            )
    return found


def _read(given: Any, label: str | None) -> Candidate:
    options: dict[str, Any] = {}
    rule = given
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        rule, options = given[0], dict(given[1])
    if isinstance(rule, str):
        rule = learner_named(rule)
    is_class = isinstance(rule, type) and issubclass(rule, ETraceAlgorithm)
    if not is_class and not isinstance(rule, Rule):
        raise TypeError(
            "A rule is a name such as 'd_rtrl', a class such as `braintrace.D_RTRL`, a value of "
            f"`braintrace.rules`, or a pair of one of these and a dictionary of options, not {given!r}."
        )
    return Candidate(label or _title(rule, options), rule, options)


def _title(rule: type[ETraceAlgorithm] | Rule, options: Mapping[str, Any]) -> str:
    """A rule and its options, in words."""
    if isinstance(rule, Rule):
        name, given = type(rule).__name__, {**_chosen(rule), **options}
    else:
        name, given = rule.__name__, dict(options)
    method, window, rank = (given.pop(k, None) for k in ("vjp_method", "window", "rank"))
    words = title_of(name, window or (1 if method == "multi-step" else None), rank)
    return ", ".join([words, *(f"{k}={v}" for k, v in given.items())])


def _chosen(rule: Any) -> dict[str, Any]:
    """The fields of a rule that are not as they are by default."""
    if not dataclasses.is_dataclass(rule):
        return {}
    found = {f.name: (getattr(rule, f.name), f.default) for f in dataclasses.fields(rule) if f.init}
    return {k: v for k, (v, usual) in found.items() if v != usual}
