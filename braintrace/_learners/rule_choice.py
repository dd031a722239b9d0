"""A rule as users give it: a name, a class, a value of `braintrace.rules`, or one of these with options."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .._frontends.modules import check_mark
from .._online.request import WindowSize
from .._report.plan import PlanRequest, bytes_of
from .._report.tables import title_of
from .._rules.rule import Rule
from .._types import Model, Option, Options, RuleLike
from . import learners
from .calling import read_method
from .dni import DNI
from .options import OptionsLearner
from .stateful import ETraceAlgorithm

if TYPE_CHECKING:
    from .learner import Learner

Rules = Mapping[str, RuleLike] | Iterable[RuleLike] | RuleLike
PLANNED = ("D_RTRL", "ES_D_RTRL", "RTRL", "BPTT")
RTRL_BYTES = 1 << 25  # the largest traces of RTRL for which it is tried by default
DIAL = ("window", "rank", "basis", "across")  # the options that `fit`, `plan`, `compare` and commands take
NAMES: dict[str, type[ETraceAlgorithm]] = {
    "d_rtrl": learners.D_RTRL,
    "es_d_rtrl": learners.ES_D_RTRL,
    "esd_rtrl": learners.ES_D_RTRL,
    "pp_prop": learners.ES_D_RTRL,
    "rtrl": learners.RTRL,
    "eprop": learners.EProp,
    "e_prop": learners.EProp,
    "rflo": learners.RFLO,
    "ostl_recurrent": learners.OSTLRecurrent,
    "ostl_feedforward": learners.OSTLFeedforward,
    "ottt": learners.OTTT,
    "otpe": learners.OTPE,
    "osttp": learners.OSTTP,
    "s_tllr": learners.S_TLLR,
    "three_factor": learners.ThreeFactor,
    "dni": DNI,
    "bptt": learners.BPTT,
    "snap": learners.SnAp,
    "uoro": learners.UORO,
    "kf_rtrl": learners.KF_RTRL,
}


@dataclass(frozen=True)
class RuleChoice:
    """A rule with its options, and its label in a table."""

    label: str
    source: type[ETraceAlgorithm] | Rule
    options: Options = field(default_factory=dict)

    @staticmethod
    def of(given: RuleLike, label: str | None = None, what: str = "rule") -> RuleChoice:
        """Read a rule that is given in any of the ways above; errors call it `what`."""
        source, options = given, {}
        if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
            source, options = given[0], dict(given[1])
        if isinstance(source, str):
            source = learner_named(source, what)
        if isinstance(source, type) and issubclass(source, Rule):
            source = source()
        is_class = isinstance(source, type) and issubclass(source, ETraceAlgorithm)
        if not is_class and not isinstance(source, Rule):
            raise TypeError(
                f"`{what}` is a rule such as `braintrace.rules.D_RTRL()`, not {given!r}. A rule is a name "
                "such as 'd_rtrl', a class such as `braintrace.D_RTRL`, a value of `braintrace.rules`, or a "
                "pair of one of these and a dictionary of options."
            )
        return RuleChoice(label or _title(source, options), source, options)

    def make(self, model: Model, **options: Option) -> ETraceAlgorithm:
        """A learner of a model with this rule."""
        given = {**self.options, **options}
        if isinstance(self.source, Rule):
            return ETraceAlgorithm(model, self.source, **given)
        return self.source(model, **given)

    def with_options(self, **options: object) -> RuleChoice:
        """Return the rule with further options, and a label for them."""
        return RuleChoice.of((self.source, {**self.options, **options}))

    @property
    def name(self) -> str:
        """The name of the rule, without its options."""
        return self.source.kind(False).name if isinstance(self.source, Rule) else self.source.__name__

    @property
    def is_bptt(self) -> bool:
        """Whether this is back-propagation through time, which gives the exact gradient."""
        if isinstance(self.source, Rule):
            return self.source.back_through_time
        return issubclass(self.source, learners.BPTT)

    def read(self) -> tuple[Rule, WindowSize | None]:
        """The rule as a value, and the steps of its windows, if it takes some."""
        options = dict(self.options)
        if isinstance(self.source, Rule):
            method, window = options.pop("vjp_method", None), options.pop("window", None)
            check_mark(options.pop("mark", "ops"))
            if options:
                raise TypeError(f"A value of `braintrace.rules` takes no option {min(options)!r} next to it.")
            rule = self.source
        elif issubclass(self.source, OptionsLearner):
            given, choice = self.source.read_options(None, **options)
            rule, window, method = choice.rule, *(getattr(given, k, None) for k in ("window", "vjp_method"))
            if window is None and choice.config is not None:
                window = choice.config.window_size
        else:
            name = self.source.__name__
            raise TypeError(f"{name} has no rule by itself: pass a value of `braintrace.rules`.")
        return rule, (window or 1) if read_method(rule, method, window) == "multi-step" else None

    def on(self, learner: Learner) -> Learner:
        """A learner of the same step function with this rule."""
        compiled, (rule, window) = learner.compiled, self.read()
        mark = self.options.get("mark", compiled.mark)
        if mark != compiled.mark:  # which needs another graph
            learner = replace(learner, compiled=replace(compiled, mark=mark))
        return learner.with_rule(rule, window)


def read_rules(rules: Rules) -> list[RuleChoice]:
    """The choices of a list of rules, or of a dictionary by label."""
    if isinstance(rules, Mapping):
        found = [RuleChoice.of(given, str(label)) for label, given in rules.items()]
    else:
        alone = isinstance(rules, str | type | Rule) or not isinstance(rules, Iterable)
        found = [RuleChoice.of(given) for given in ([rules] if alone else rules)]
    for i, one in enumerate(found):
        if one.label in [other.label for other in found[:i]]:
            raise ValueError(f"{one.label} is there twice: give labels, `rules={{label: rule}}`.")
    return found


def add_d_rtrl(choices: list[RuleChoice], options: Options) -> list[RuleChoice]:
    """Add `D_RTRL` with the options of `DIAL` that are set, unless the list has it."""
    if unknown := sorted(options.keys() - set(DIAL)):
        raise TypeError(f"There is no option {unknown[0]!r}; options of `D_RTRL` are {', '.join(DIAL)}.")
    given = {name: value for name, value in options.items() if value}
    added = [RuleChoice.of(("d_rtrl", {"window": 1, **given}))] if given else []
    return [*choices, *(c for c in added if c.label not in [other.label for other in choices])]


def read_request(
    length: int,
    rules: Rules = PLANNED,
    chunk_sizes: Iterable[int] | None = None,
    memory_budget: int | None = None,
    **options: Option,
) -> PlanRequest:
    """Read the rules of a plan; `options` of D_RTRL add a row."""
    return PlanRequest(length, add_d_rtrl(read_rules(rules), options), chunk_sizes, memory_budget)


def rules_to_compare(
    rules: Rules | None, learner: Learner, length: int, budget: int, options: Options
) -> list[RuleChoice]:
    """BPTT, and these rules or, if None, rules from cheap to exact with `RTRL` if it is small.

    `options` of D_RTRL add a row.
    """
    choices = _default_rules(learner, length, min(budget, RTRL_BYTES)) if rules is None else read_rules(rules)
    if not choices:
        raise ValueError("There is no rule to compare: `rules` is empty.")
    choices = add_d_rtrl(choices, options)
    first = next((c for c in choices if c.is_bptt), RuleChoice.of("bptt"))
    return [first, *(c for c in choices if c is not first)]


def _default_rules(learner: Learner, length: int, most: int) -> list[RuleChoice]:
    windows = [k for k in (1, 5, 10) if k < length]  # one window over the sequence would be BPTT
    given: list[RuleLike] = ["es_d_rtrl", "d_rtrl", *(("d_rtrl", {"window": k}) for k in windows)]
    given.append(("d_rtrl", {"window": 5, "rank": 4} if length > 5 else {"rank": 4}))
    try:
        if bytes_of(RuleChoice.of("rtrl").on(learner).trace_shapes.values()) <= most:
            given.append("rtrl")
    except Exception:  # a rule that cannot be used is not tried unless asked for
        pass
    return list(map(RuleChoice.of, given))


def learner_named(name: str, what: str) -> type[ETraceAlgorithm]:
    """The class of learners with a name such as 'd_rtrl'."""
    known = NAMES.get(name.strip().lower())
    if known is None:
        near = difflib.get_close_matches(name.lower(), NAMES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(map(repr, NAMES))}."
        raise ValueError(f"Unknown {what} {name!r}; {hint}")
    return known


def _title(source: type[ETraceAlgorithm] | Rule, options: Options) -> str:
    """The label of a rule with options."""
    if isinstance(source, Rule):
        name, given = type(source).__name__, dict(options)
        if dataclasses.is_dataclass(source):  # the fields that differ from their defaults
            usual = {f.name: f.default for f in dataclasses.fields(source) if f.init}
            given = {k: getattr(source, k) for k, v in usual.items() if getattr(source, k) != v} | given
    else:
        name, given = source.__name__, dict(options)
    method, window, rank, across = (given.pop(k, None) for k in ("vjp_method", "window", "rank", "across"))
    words = title_of(name, window or (1 if method == "multi-step" else None), rank)
    words += f", across {across}" if across else ""
    return ", ".join([words, *(f"{k}={v}" for k, v in given.items())])
