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
from ._rules.d_rtrl import D_RTRL as D_RTRL
from ._rules.es_d_rtrl import ES_D_RTRL as ES_D_RTRL
from ._rules.kf_rtrl import KF_RTRL as KF_RTRL
from ._rules.presynaptic import Presynaptic as Presynaptic
from ._rules.published import OSTTP as OSTTP
from ._rules.published import OTPE as OTPE
from ._rules.published import OTTT as OTTT
from ._rules.published import RFLO as RFLO
from ._rules.published import S_TLLR as S_TLLR
from ._rules.published import EProp as EProp
from ._rules.published import OSTLFeedforward as OSTLFeedforward
from ._rules.published import OSTLRecurrent as OSTLRecurrent
from ._rules.published import ThreeFactor as ThreeFactor
from ._rules.rtrl import RTRL as RTRL
from ._rules.rule import Rule as Rule
from ._rules.rule import TraceRule as TraceRule
from ._rules.signal import Bootstrapped as Bootstrapped
from ._rules.signal import Feedback as Feedback
from ._rules.signal import Modulator as Modulator
from ._rules.signal import TargetProjection as TargetProjection
from ._rules.snap import SnAp as SnAp
from ._rules.uoro import UORO as UORO
from ._rules.without_traces import BPTT as BPTT
from ._rules.without_traces import DNI as DNI
