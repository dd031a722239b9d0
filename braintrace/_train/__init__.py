"""Training: `fit`, on batches of sequences or streams; comparisons of rules; optimisers for streams."""

from .comparison import Comparison as Comparison
from .curves import save_curves as save_curves
from .curves import show_curves as show_curves
from .fit import fit as fit
from .optimizers import adaptive_obgd as adaptive_obgd
from .optimizers import obgd as obgd
from .report_page import write_report as write_report
from .result import DivergedError as DivergedError
from .result import FitResult as FitResult
from .result import LostProcessError as LostProcessError
from .stream import Stream as Stream
