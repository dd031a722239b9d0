"""Learning rules as values, and what one of one's own is made from."""

from ._rules import BackRule as BPTT
from ._rules import DRule as D_RTRL
from ._rules import ESRule as ES_D_RTRL
from ._rules import Rule as Rule
from ._rules import TraceRule as TraceRule
from ._rules import WholeRule as RTRL

__all__ = ["BPTT", "D_RTRL", "ES_D_RTRL", "RTRL", "Rule", "TraceRule"]
