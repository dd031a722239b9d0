"""Learning rules as values, and the types that a rule of one's own is made from.

A rule is passed to `braintrace.online(..., rule=...)` and wherever else a rule is taken: as a value
(`rules.D_RTRL(rank=4)`), as a class, or as a name ('d_rtrl').

A rule of one's own is a frozen dataclass derived from `TraceRule`, with `init`, `update` and `gradient`;
`Rule` is the base class of all. `Recursion`, with `Leak` or `Own`, describes how traces decay; `Feedback`,
`Modulator`, `TargetProjection` and `Bootstrapped` are learning signals other than the back-propagated one.

>>> from braintrace import rules
>>> rules.EProp(feedback="random").called
'EProp'
"""

from ._executor.trace_recursion import Leak as Leak
from ._executor.trace_recursion import Own as Own
from ._executor.trace_recursion import Recursion as Recursion
from ._rules import BPTT as BPTT
from ._rules import D_RTRL as D_RTRL
from ._rules import DNI as DNI
from ._rules import ES_D_RTRL as ES_D_RTRL
from ._rules import KF_RTRL as KF_RTRL
from ._rules import OSTTP as OSTTP
from ._rules import OTPE as OTPE
from ._rules import OTTT as OTTT
from ._rules import RFLO as RFLO
from ._rules import RTRL as RTRL
from ._rules import S_TLLR as S_TLLR
from ._rules import UORO as UORO
from ._rules import Bootstrapped as Bootstrapped
from ._rules import EProp as EProp
from ._rules import Feedback as Feedback
from ._rules import Modulator as Modulator
from ._rules import OSTLFeedforward as OSTLFeedforward
from ._rules import OSTLRecurrent as OSTLRecurrent
from ._rules import Presynaptic as Presynaptic
from ._rules import Rule as Rule
from ._rules import SnAp as SnAp
from ._rules import TargetProjection as TargetProjection
from ._rules import ThreeFactor as ThreeFactor
from ._rules import TraceRule as TraceRule
