"""Rules as they are typed: `--rule`, with `--window`, `--rank`, `--basis` and `--across`, and `--rules`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .models import parse_call
from .options import RULES, UsageError, hint

if TYPE_CHECKING:
    from .._learners.stateful import ETraceAlgorithm
    from .._types import Option, Options

DIAL = {"window": 0, "rank": 0, "basis": None, "across": None}  # options of rules with windows, and defaults
REPLACES = {"num_targets": ("B_list",)}  # an option, and others that make it superfluous


def parse_rule(text: str, option: str = "--rule") -> tuple[str, Options]:
    """Return the name of a rule and its options.

    >>> parse_rule("d_rtrl(window=5, rank=4)")
    ('d_rtrl', {'window': 5, 'rank': 4})
    """
    name, args, options = parse_call(text)
    if args or not name:
        raise UsageError(f"{option}: {text!r}: a name, with options by name: 'd_rtrl(window=5, rank=4)'.")
    if name.lower() not in RULES:
        raise UsageError(f"{option}: there is no rule {name!r}; {hint(name, RULES)}")
    return name.lower(), options


def parse_rules(texts: Sequence[str] | None) -> list[tuple[str, Options]] | None:
    """Return the names and options of the rules of `--rules`, or None for the default ones."""
    from .._learners.rule_choice import read_rules

    if not texts:
        return None
    rules = [parse_rule(text, "--rules") for text in texts]
    try:
        read_rules(rules)
    except ValueError as error:
        raise UsageError(f"--rules: {error}") from error
    return rules


def learner_of(text: str, dial: Options, **defaults: Option) -> tuple[type[ETraceAlgorithm], Options]:
    """Return the learner class of a rule and its options.

    Args:
        text: The rule, as typed.
        dial: Values of `--window`, `--rank`, `--basis` and `--across`.
        defaults: Options that are set if the rule has them and they are not typed.
    """
    name, learner, known, options = _read(text)
    for option in options:
        if option not in known:
            raise UsageError(f"--rule: {name} has no option {option!r}; it has {', '.join([*known][1:])}.")
    more = {k: v for k, v in defaults.items() if k in known and not {k, *REPLACES.get(k, ())} & {*options}}
    for k, p in known.items():
        if p.default is p.empty and k not in ("model", *options, *more):
            raise UsageError(f"--rule: {name} needs an option: '{name}({k}=...)'.")
    chosen = {k: dial[k] for k in DIAL if dial.get(k)}
    for option in chosen:
        if option not in known:
            raise UsageError(f"--{option} is not for --rule {name}; d_rtrl takes it.")
    if chosen.get("rank") or chosen.get("window"):
        chosen = {"vjp_method": "multi-step", "window": 1, **chosen}
    return learner, {**more, **chosen, **options}


def has_windows(text: str) -> bool:
    """Return whether a rule has windows whose length is not typed."""
    _, _, known, options = _read(text)
    return "window" in known and not {"window", "vjp_method"} & {*options}


def _read(text: str) -> tuple[str, type[ETraceAlgorithm], Mapping[str, inspect.Parameter], Options]:
    """Return the name of a rule, its learner class, the options that it has, and those that are typed."""
    from .._learners.rule_choice import NAMES as LEARNERS

    name, options = parse_rule(text)
    return name, LEARNERS[name], inspect.signature(LEARNERS[name]).parameters, options
