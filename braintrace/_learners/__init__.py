"""The learners that users of `brainstate` hold: they keep states and traces between calls."""

from .._online.data import MultiStepData as MultiStepData
from .._online.data import SingleStepData as SingleStepData
from .base import EligibilityTrace as EligibilityTrace
from .base import ETraceAlgorithm as ETraceAlgorithm
from .bptt import BPTT as BPTT
from .compile import ETraceVmap as ETraceVmap
from .compile import compile as compile
from .expon import GradExpon as GradExpon
from .functional import OnlineFunctions as OnlineFunctions
from .functional import online as online
from .influence import KF_RTRL as KF_RTRL
from .influence import UORO as UORO
from .influence import RandomProjectionVjpAlgorithm as RandomProjectionVjpAlgorithm
from .influence import SnAp as SnAp
from .learners import D_RTRL as D_RTRL
from .learners import ES_D_RTRL as ES_D_RTRL
from .learners import RTRL as RTRL
from .learners import IODimVjpAlgorithm as IODimVjpAlgorithm
from .learners import ParamDimVjpAlgorithm as ParamDimVjpAlgorithm
from .learners import pp_prop as pp_prop
from .vjp import ETraceVjpAlgorithm as ETraceVjpAlgorithm
