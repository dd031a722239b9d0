"""Learning rules as values, and what one of one's own is made from."""

from ._rules import BPTT as BPTT
from ._rules import D_RTRL as D_RTRL
from ._rules import ES_D_RTRL as ES_D_RTRL
from ._rules import KF_RTRL as KF_RTRL
from ._rules import RTRL as RTRL
from ._rules import UORO as UORO
from ._rules import Rule as Rule
from ._rules import SnAp as SnAp
from ._rules import TraceRule as TraceRule

__all__ = ["BPTT", "D_RTRL", "ES_D_RTRL", "KF_RTRL", "RTRL", "UORO", "Rule", "SnAp", "TraceRule"]
