"""The options that choose a rule: --rule, --window, --rank, --basis and --across."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping
from typing import Any

from .common import UsageError, hint
from .models import count, parse_call, window_size

# the names of `braintrace.compile`, which takes long to import
NAMES = (
    "d_rtrl es_d_rtrl esd_rtrl pp_prop rtrl eprop e_prop rflo ostl_recurrent ostl_feedforward ottt otpe "
    "osttp s_tllr three_factor dni bptt snap uoro kf_rtrl"
).split()
DIAL = {"window": 0, "rank": 0, "basis": None, "across": None}  # options of rules with windows, and defaults
REPLACES = {"num_targets": ("B_list",)}  # an option, and others that make it superfluous


def add_rule(parser: argparse.ArgumentParser, default: str) -> None:
    """Add `--rule`."""
    text = f"the learning rule, with options in brackets: 'rflo(leak=0.9)' (default: {default}); one of "
    parser.add_argument("--rule", metavar="RULE", help=text + ", ".join(NAMES))


def add_dial(parser: argparse.ArgumentParser, window: int = 0) -> None:
    """Add `--window`, with this default, `--rank`, `--basis` and `--across`."""
    usual = f"default: {window}" if window else "default: single steps"
    add = parser.add_argument
    add(
        "--window",
        type=window_size,
        metavar="K",
        help="back-propagate through windows of K steps, with traces for earlier ones; 0: none; 'auto': "
        f"the longest that fit into memory ({usual})",
    )
    add("--rank", type=count, metavar="R", help="rank of a correction to the diagonal traces (default: 0)")
    add("--basis", choices=("balanced", "pushed"), help="how the basis of that correction is found")
    add("--across", choices=("layers",), help="keep the influence on the layers above a weight")


def parse_rule(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name of a rule and its options.

    >>> parse_rule("d_rtrl(window=5, rank=4)")
    ('d_rtrl', {'window': 5, 'rank': 4})
    """
    name, args, options = parse_call(text)
    if args or not name:
        raise UsageError(f"--rule: {text!r}: write a name, with options by name: 'd_rtrl(window=5, rank=4)'.")
    if name.lower() not in NAMES:
        raise UsageError(f"--rule: there is no rule {name!r}; {hint(name, NAMES)}")
    return name.lower(), options


def _read(text: str) -> tuple[str, dict[str, Any], Any, Mapping[str, inspect.Parameter]]:
    """Return the name of a rule, its options, its learner class and the parameters of that."""
    from .._learners.rule_choice import NAMES as LEARNERS

    name, options = parse_rule(text)
    return name, options, LEARNERS[name], inspect.signature(LEARNERS[name].__init__).parameters


def learner_of(text: str, dial: Mapping[str, Any], **defaults: Any) -> tuple[Any, dict[str, Any]]:
    """Return the learner class of a rule and its options.

    Args:
        text: The rule, as typed.
        dial: Values of `--window`, `--rank`, `--basis` and `--across`.
        defaults: Options that are set if the rule has them and they are not typed.
    """
    name, options, make, known = _read(text)
    for option in options:
        if option not in known:
            raise UsageError(f"--rule: {name} has no option {option!r}; it has {', '.join([*known][2:])}.")
    more = {k: v for k, v in defaults.items() if k in known and not {k, *REPLACES.get(k, ())} & {*options}}
    for k, p in known.items():
        if p.default is p.empty and k not in ("self", "model", *options, *more):
            raise UsageError(f"--rule: {name} needs an option: '{name}({k}=...)'.")
    chosen = {k: dial[k] for k in DIAL if dial.get(k)}
    for option in chosen:
        if option not in known:
            raise UsageError(f"--{option} is not for --rule {name}; d_rtrl takes it.")
    if chosen.get("rank") or chosen.get("window"):
        chosen = {"vjp_method": "multi-step", "window": 1, **chosen}
    return make, {**more, **chosen, **options}


def signal_of(learner: Any, target: Any) -> dict[str, Any]:
    """Return the keyword arguments of a call, for rules whose learning signal is made of the target."""
    rule = getattr(learner, "rule", None)  # BPTT has none
    return {} if rule is None or "target" not in rule.signal.takes else {"target": target}


def has_windows(text: str) -> bool:
    """Return whether a rule has windows whose length is not typed."""
    _, options, _, known = _read(text)
    return "window" in known and not {"window", "vjp_method"} & {*options}
