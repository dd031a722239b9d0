"""Marked operations: what a model calls."""

from .conv import conv as conv
from .element_wise import element_wise as element_wise
from .letters import Term as Term
from .matmul import einsum as einsum
from .matmul import embedding as embedding
from .matmul import grouped_matmul as grouped_matmul
from .matmul import lora_matmul as lora_matmul
from .matmul import matmul as matmul
from .primitive import ETPPrimitive as ETPPrimitive
from .primitive import register_primitive as register_primitive
from .sparse import sparse_matmul as sparse_matmul
