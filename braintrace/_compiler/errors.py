"""The exceptions that the compiler raises."""

from __future__ import annotations


class CompilationError(Exception):
    """The model cannot be compiled for online learning as it is written."""


class NotSupportedError(CompilationError):
    """The model uses an operation through which no eligibility trace can be computed."""
