"""Learning rules: frozen values with pure functions over arrays."""

from .d_rtrl import D_RTRL as D_RTRL
from .es_d_rtrl import ES_D_RTRL as ES_D_RTRL
from .kf_rtrl import KF_RTRL as KF_RTRL
from .presynaptic import Presynaptic as Presynaptic
from .published import OSTTP as OSTTP
from .published import OTPE as OTPE
from .published import OTTT as OTTT
from .published import RFLO as RFLO
from .published import S_TLLR as S_TLLR
from .published import EProp as EProp
from .published import OSTLFeedforward as OSTLFeedforward
from .published import OSTLRecurrent as OSTLRecurrent
from .published import ThreeFactor as ThreeFactor
from .rtrl import RTRL as RTRL
from .rule import Rule as Rule
from .rule import TraceRule as TraceRule
from .signal import Bootstrapped as Bootstrapped
from .signal import Feedback as Feedback
from .signal import Modulator as Modulator
from .signal import TargetProjection as TargetProjection
from .snap import SnAp as SnAp
from .uoro import UORO as UORO
from .without_traces import BPTT as BPTT
from .without_traces import DNI as DNI
