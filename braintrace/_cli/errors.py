"""Mistakes of the user, told without a traceback."""

from __future__ import annotations


class UsageError(Exception):
    """What was typed cannot be meant; exit code 2."""
