"""Online learning of recurrent and spiking networks, with eligibility traces, in JAX and brainstate."""

from ._ops import ETPPrimitive as ETPPrimitive
from ._ops import conv as conv
from ._ops import einsum as einsum
from ._ops import element_wise as element_wise
from ._ops import embedding as embedding
from ._ops import grouped_matmul as grouped_matmul
from ._ops import lora_matmul as lora_matmul
from ._ops import matmul as matmul
from ._ops import register_primitive as register_primitive
from ._ops import sparse_matmul as sparse_matmul
