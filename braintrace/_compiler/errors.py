"""What the compiler raises."""

from __future__ import annotations


class CompilationError(Exception):
    """The model cannot be compiled for online learning as it is written."""


class NotSupportedError(CompilationError):
    """The model uses something that no eligibility trace can follow."""
