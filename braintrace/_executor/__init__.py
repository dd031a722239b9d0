"""One step of a compiled model: values, local Jacobians, learning signals. Pure functions."""

from .executor import ETraceGraphExecutor as ETraceGraphExecutor
from .executor import ETraceVjpGraphExecutor as ETraceVjpGraphExecutor
