"""Training: `fit` drives a learner over batches of sequences, with an optimiser of optax."""

from .comparison import Comparison as Comparison
from .curves import save_curves as save_curves
from .errors import DivergedError as DivergedError
from .errors import LostProcessError as LostProcessError
from .measure import compare as compare
from .optimizers import adaptive_obgd as adaptive_obgd
from .optimizers import obgd as obgd
from .report import write_report as write_report
from .result import FitResult as FitResult
from .terminal import show_curves as show_curves
from .training import fit as fit
