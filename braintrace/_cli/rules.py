"""`--rule`: a name of the table of rules, with options in brackets."""

from __future__ import annotations

import argparse
import inspect
from typing import Any

from . import models
from .common import UsageError, hint

# those of `braintrace.compile`, which takes long to import
NAMES = (
    "d_rtrl es_d_rtrl esd_rtrl pp_prop rtrl eprop e_prop rflo ostl_recurrent ostl_feedforward ottt otpe "
    "osttp s_tllr three_factor dni bptt snap uoro kf_rtrl"
).split()


def add_argument(parser: argparse.ArgumentParser, default: str, about: str) -> None:
    parser.add_argument(
        "--rule",
        metavar="RULE",
        help=f"{about}, with options in brackets: 'rflo(leak=0.9)' (default: {default}); known are "
        + ", ".join(NAMES),
    )


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """The name of a rule and its options."""
    name, args, options = models.parse_call(text)
    if args or not name:
        raise UsageError(f"--rule: {text!r}: write a name, with options by name: 'd_rtrl(window=5, rank=4)'.")
    if name.lower() not in NAMES:
        raise UsageError(f"--rule: there is no rule {name!r}; {hint(name, NAMES)}")
    return name.lower(), options


def _read(text: str) -> tuple[str, dict[str, Any], Any, Any]:
    """The name of a rule, the options given, its learner's class and the parameters of that."""
    from .._learners.compile import NAMES as LEARNERS

    name, options = parsed(text)
    return name, options, LEARNERS[name], inspect.signature(LEARNERS[name].__init__).parameters


def learner_of(text: str, window: int, rank: int, **usual: Any) -> tuple[Any, dict[str, Any]]:
    """The class of a rule and all its options; those of `usual` that it has, where none are given."""
    name, options, make, known = _read(text)
    for option in options:
        if option not in known:
            raise UsageError(f"--rule: {name} has no option {option!r}; it has {', '.join([*known][2:])}.")
    more = {k: v for k, v in usual.items() if k in known and not {k, *TAKEN.get(k, ())} & {*options}}
    needed = [
        k for k, p in known.items() if p.default is p.empty and k not in ("self", "model", *options, *more)
    ]
    if needed:
        raise UsageError(f"--rule: {name} needs an option: '{name}({needed[0]}=...)'.")
    for option, value in (("window", window), ("rank", rank)):
        if value and option not in known:
            raise UsageError(f"--{option} is not for --rule {name}; d_rtrl takes it.")
    more |= {"vjp_method": "multi-step", "window": window or 1} if window or rank else {}
    more |= {"rank": rank} if rank else {}
    return make, {**more, **options}


def told(learner: Any, target: Any) -> dict[str, Any]:
    """What a call is given beside the input, for rules whose signal is made of the target."""
    rule = getattr(learner, "rule", None)  # BPTT has none
    return {} if rule is None or "target" not in rule.signal.takes else {"target": target}


TAKEN = {"num_targets": ("B_list",)}  # options that take the place of another


def has_windows(text: str) -> bool:
    """Whether a rule goes back through windows of which nothing was said yet."""
    _, options, _, known = _read(text)
    return "window" in known and not {"window", "vjp_method"} & {*options}
