"""`--window` and `--rank`: how far gradients go back, and in how many directions traces follow the past."""

from __future__ import annotations

import argparse


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
