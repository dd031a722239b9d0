"""Evaluate one step of a compiled model: values, local Jacobians and learning signals, as pure functions."""

from .executor import ETraceGraphExecutor as ETraceGraphExecutor
from .executor import ETraceVjpGraphExecutor as ETraceVjpGraphExecutor
