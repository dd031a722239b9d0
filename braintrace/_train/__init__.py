"""Training: `fit` drives a learner over batches of sequences, with an optimiser of optax."""

from .errors import DivergedError as DivergedError
from .training import fit as fit
from .result import FitResult as FitResult
