"""`--window` and `--rank`: how far gradients go back, and in how many directions traces follow the past."""

from __future__ import annotations

import argparse
import inspect
from typing import Any

from .common import UsageError


def add_arguments(parser: argparse.ArgumentParser, window: int = 0) -> None:
    """With the window that there is if none is given; 0 is a single step at a time."""
    usual = f"default: {window}" if window else "default: one step at a time"
    parser.add_argument(
        "--window",
        type=count,
        metavar="K",
        help=f"go back through windows of so many steps, and by traces before them; 0 for none ({usual})",
    )
    parser.add_argument(
        "--rank",
        type=count,
        metavar="R",
        help="directions in which traces follow what passes from unit to unit (default: 0)",
    )


def count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return value


def options(make: Any, rule: str, window: int, rank: int) -> dict[str, Any]:
    """The options of a learner for these; `make` is its class."""
    known = inspect.signature(make.__init__).parameters
    for name, value in (("window", window), ("rank", rank)):
        if value and name not in known:
            raise UsageError(f"--{name} is not for --rule {rule}; d_rtrl takes it.")
    found: dict[str, Any] = {"vjp_method": "multi-step", "window": window or 1} if window or rank else {}
    return found | ({"rank": rank} if rank else {})
