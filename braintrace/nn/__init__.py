"""Layers and cells: those of `brainstate.nn` with weights that are learned online, and spiking neurons.

A layer that multiplies by a weight does so with a marked operation. All that has nothing to mark
(normalisation, dropout, pooling, activations, containers, ...) is `brainstate.nn`'s own, by the same name.
"""

from typing import Any

from .. import _precision as _precision  # isort: skip
import brainstate as _brainstate

from . import surrogate as surrogate
from .cells import CFNCell as CFNCell
from .cells import GRUCell as GRUCell
from .cells import LSTMCell as LSTMCell
from .cells import MGUCell as MGUCell
from .cells import MiniGRU as MiniGRU
from .cells import MiniLSTM as MiniLSTM
from .cells import MinimalRNNCell as MinimalRNNCell
from .cells import URLSTMCell as URLSTMCell
from .cells import ValinaRNNCell as ValinaRNNCell
from .conv import Conv1d as Conv1d
from .conv import Conv2d as Conv2d
from .conv import Conv3d as Conv3d
from .diagonal import DiagonalBlock as DiagonalBlock
from .diagonal import ELSTMCell as ELSTMCell
from .diagonal import LRUCell as LRUCell
from .diagonal import RGLRUCell as RGLRUCell
from .diagonal import RTUCell as RTUCell
from .embedding import Embedding as Embedding
from .linear import GroupedLinear as GroupedLinear
from .linear import Linear as Linear
from .linear import LoRA as LoRA
from .linear import ScaledWSLinear as ScaledWSLinear
from .linear import SignedWLinear as SignedWLinear
from .linear import SparseLinear as SparseLinear
from .neurons import ALIF as ALIF
from .neurons import GIF as GIF
from .neurons import IF as IF
from .neurons import LIF as LIF
from .neurons import Conductance as Conductance
from .neurons import hard_reset as hard_reset
from .neurons import soft_reset as soft_reset
from .readout import LeakyRateReadout as LeakyRateReadout
from .readout import LeakySpikeReadout as LeakySpikeReadout
from .resonators import BRF as BRF
from .synapses import COBA as COBA
from .synapses import CUBA as CUBA
from .synapses import STD as STD
from .synapses import STP as STP
from .synapses import Alpha as Alpha
from .synapses import DualExpon as DualExpon
from .synapses import Expon as Expon

# they multiply by weights without a mark: passed on under this name, they would seem to learn online
_UNMARKED = frozenset(
    """AllToAll OneToOne EventLinear FixedNumConn EventFixedNumConn EventFixedProb ScaledWSConv1d
    ScaledWSConv2d ScaledWSConv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d""".split()
)

# what this package makes itself; the rest is found by name
__all__ = [name for name, value in globals().items() if getattr(value, "__module__", "").startswith(__name__)]
__all__ += ["surrogate"]


def __getattr__(name: str) -> Any:
    if name in _UNMARKED:
        raise AttributeError(
            f"`braintrace.nn` has no `{name}`. `brainstate.nn.{name}` can be used as it is, and is then "
            "learned within the step only."
        )
    if name in _brainstate.nn.__all__:
        return getattr(_brainstate.nn, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    own = [name for name in globals() if not name.startswith("_")]
    return sorted({*own, *(set(_brainstate.nn.__all__) - _UNMARKED)})
