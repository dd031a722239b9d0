"""Learning rules as values, and what one of one's own is made from."""

from ._executor.trace_recursion import Leak as Leak
from ._executor.trace_recursion import Own as Own
from ._executor.trace_recursion import Recursion as Recursion
from ._rules import BPTT as BPTT
from ._rules import D_RTRL as D_RTRL
from ._rules import DNI as DNI
from ._rules import ES_D_RTRL as ES_D_RTRL
from ._rules import KF_RTRL as KF_RTRL
from ._rules import RTRL as RTRL
from ._rules import UORO as UORO
from ._rules import Bootstrapped as Bootstrapped
from ._rules import Feedback as Feedback
from ._rules import Modulator as Modulator
from ._rules import Presynaptic as Presynaptic
from ._rules import Rule as Rule
from ._rules import SnAp as SnAp
from ._rules import TargetProjection as TargetProjection
from ._rules import TraceRule as TraceRule

__all__ = [
    "BPTT",
    "DNI",
    "D_RTRL",
    "ES_D_RTRL",
    "KF_RTRL",
    "RTRL",
    "UORO",
    "Bootstrapped",
    "Feedback",
    "Leak",
    "Modulator",
    "Own",
    "Presynaptic",
    "Recursion",
    "Rule",
    "SnAp",
    "TargetProjection",
    "TraceRule",
]
