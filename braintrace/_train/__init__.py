"""Training: `fit` drives a learner over batches of sequences, with an optimiser of optax."""

from .curves import save_curves as save_curves
from .errors import DivergedError as DivergedError
from .report import write_report as write_report
from .result import FitResult as FitResult
from .terminal import show_curves as show_curves
from .training import fit as fit
