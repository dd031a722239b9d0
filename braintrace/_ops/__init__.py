"""Marked operations: drop-in array operations whose weights are learned online."""

from .axis_labels import Term as Term
from .convolution import conv as conv
from .dense import einsum as einsum
from .dense import embedding as embedding
from .dense import grouped_matmul as grouped_matmul
from .dense import lora_matmul as lora_matmul
from .dense import matmul as matmul
from .elementwise import element_wise as element_wise
from .primitive import ETPPrimitive as ETPPrimitive
from .primitive import register_primitive as register_primitive
from .sparse import sparse_matmul as sparse_matmul
