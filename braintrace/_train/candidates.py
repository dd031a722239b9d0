"""The rules of a comparison, given as names, classes, values, pairs with options, or by label."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .._frontends.modules import check_mark
from .._learners.compile import learner_named, rule_and_window
from .._learners.learner import Learner
from .._learners.learners import BPTT, D_RTRL, ES_D_RTRL, RTRL
from .._learners.stateful import ETraceAlgorithm
from .._learners.vjp_method import read_method
from .._report.tables import title_of
from .._rules.rule import Rule


@dataclass(frozen=True)
class Candidate:
    """A rule with its options, and its label in the table."""

    label: str
    rule: type[ETraceAlgorithm] | Rule
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_bptt(self) -> bool:
        """Whether this is back-propagation through time, which gives the exact gradient."""
        if isinstance(self.rule, Rule):
            return self.rule.back_through_time
        return issubclass(self.rule, BPTT)

    def on(self, learner: Learner) -> Learner:
        """Return a learner of the same step function with this rule."""
        options = dict(self.options)
        compiled = learner.compiled
        mark = options.get("mark", compiled.mark)
        if isinstance(self.rule, Rule):
            check_mark(options.pop("mark", mark))
            method, window = options.pop("vjp_method", None), options.pop("window", None)
            if options:
                raise TypeError(f"A value of `braintrace.rules` takes no option {min(options)!r} next to it.")
            in_windows = read_method(self.rule, method, window) == "multi-step"
            rule, window = self.rule, (window or 1) if in_windows else None
        else:
            rule, window = rule_and_window(self.rule, **options)
        if mark != compiled.mark:  # which needs another graph
            learner = replace(learner, compiled=replace(compiled, mark=mark))
        return learner.with_rule(rule, window)


YARDSTICK = Candidate("BPTT", BPTT)


def ladder(length: int, fits: Callable[[Candidate], bool]) -> list[Candidate]:
    """Return rules from cheap to exact, for sequences of this length."""
    windows = [k for k in (1, 5, 10) if k < length]  # one window over the sequence would be BPTT
    given: list[Any] = [ES_D_RTRL, D_RTRL, *((D_RTRL, {"window": k}) for k in windows)]
    given += [(D_RTRL, {"window": 5, "rank": 4})] if length > 5 else [(D_RTRL, {"rank": 4})]
    whole = _read(RTRL, None)
    return [*(_read(one, None) for one in given), *([whole] if fits(whole) else [])]


def read_rules(rules: Any) -> list[Candidate]:
    """Return the candidates of a list of rules, or of a dictionary by label."""
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
                f"{one.label} is there twice; give them labels by a dictionary, `rules={{label: rule}}`."
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
    """Return the label of a rule with options."""
    if isinstance(rule, Rule):
        name, given = type(rule).__name__, {**_chosen(rule), **options}
    else:
        name, given = rule.__name__, dict(options)
    method, window, rank = (given.pop(k, None) for k in ("vjp_method", "window", "rank"))
    words = title_of(name, window or (1 if method == "multi-step" else None), rank)
    return ", ".join([words, *(f"{k}={v}" for k, v in given.items())])


def _chosen(rule: Any) -> dict[str, Any]:
    """Return the fields of a rule that differ from their defaults."""
    if not dataclasses.is_dataclass(rule):
        return {}
    found = {f.name: (getattr(rule, f.name), f.default) for f in dataclasses.fields(rule) if f.init}
    return {k: v for k, (v, usual) in found.items() if v != usual}
