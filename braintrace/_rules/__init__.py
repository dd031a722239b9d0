"""Learning rules: frozen values with pure functions over arrays."""

from .bptt import BackRule as BackRule
from .d_rtrl import DRule as DRule
from .es_d_rtrl import ESRule as ESRule
from .rtrl import WholeRule as WholeRule
from .rule import Rule as Rule
from .rule import TraceRule as TraceRule
