"""The functional learner, and learners of `brainstate` models that keep states and traces between calls."""

from .. import _precision as _precision
