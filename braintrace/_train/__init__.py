"""Training: `fit` drives a learner over batches of sequences, with an optimiser of optax."""

from .errors import DivergedError as DivergedError
from .result import FitResult as FitResult
from .training import fit as fit
