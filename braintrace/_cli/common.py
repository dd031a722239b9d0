"""Helpers of all commands: their parsers, and errors of usage."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any


class UsageError(Exception):
    """Invalid usage, reported without a traceback; exit code 2."""


def add_command(
    commands: Any, name: str, short: str, about: str, run: Callable[..., int], **options: Any
) -> argparse.ArgumentParser:
    """Add the parser of a command, which calls `run`."""
    form = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=short, description=about, formatter_class=form, **options
    )
    parser.set_defaults(run=run)
    return parser


def hint(name: str, known: Sequence[str]) -> str:
    """Suggest the known name that is closest to an unknown one, or list all of them."""
    near = difflib.get_close_matches(name.lower(), known, 1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
