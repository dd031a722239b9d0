"""Tables of JAX's primitives by their effect on element positions, compared by identity.

Every primitive of JAX is in one of the first tables or in the list of `tests/compiler/test_primitives.py`
with those that mix all elements; that test fails if JAX adds or renames a primitive. Primitives that a
version of JAX does not have are left out of the tables.
"""

from __future__ import annotations

from .. import _compat
from .._compat import Primitive, primitives
from .._types import Options


def named(names: str) -> frozenset[Primitive]:
    """The primitives with these names that this version of JAX has."""
    places = (primitives, _compat)
    found = (getattr(place, f"{name}_p", None) for name in names.split() for place in places)
    return frozenset(p for p in found if p is not None)


def is_reshape(primitive: Primitive, params: Options) -> bool:
    """Whether the elements keep their row-major order."""
    if primitive is primitives.reshape_p:
        return params["dimensions"] is None
    return primitive is primitives.squeeze_p


# -- every primitive is in one of these -----------------------------------------------------------

ELEMENT_WISE = named(
    """abs acos acosh add add_jaxvals and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    clz complex conj convert_element_type copy cos cosh device_put digamma div eq eq_to erf erf_inv erfc exp
    exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p
    log2 logistic lt lt_to max min mul name ne neg nextafter not one_minus_square optimization_barrier or
    polygamma population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt select_n
    sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor zeta"""
)
LAYOUT = named("broadcast_in_dim reshape squeeze transpose")
COPIES = named("concatenate stack tile pad slice rev gather dynamic_slice dynamic_update_slice")
PARTS = named("split unstack")
SCATTERS = named("scatter scatter_add scatter_max scatter_min scatter_mul scatter_sub")
REDUCTIONS = named("reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor")
WINDOWS = named("reduce_window reduce_window_max reduce_window_min reduce_window_sum")
CUMULATIVE = named("cumsum cumprod cummax cummin cumlogsumexp")
ALONG_AN_AXIS = named("approx_top_k sort top_k")  # mix along one axis
ON_MATRICES = named(  # mix along the last axes
    """cholesky eig eigh fft hessenberg householder_product lu qr schur svd triangular_solve tridiagonal
    tridiagonal_solve"""
)
PRODUCTS = named("conv_general_dilated dot_general")
CONTROL_FLOW = named("cond scan while")
CALLS = named("call closed_call custom_jvp_call custom_vjp_call jit remat")

# -- further properties of some of them -----------------------------------------------------------

FLAT = named("ceil floor is_finite round sign stop_gradient")  # no derivative
NOT_COMPLEX = named("cholesky conj")  # no complex derivative
ARITHMETIC = named(  # one floating-point operation per element
    """abs add add_jaxvals and clamp convert_element_type div eq floor ge gt integer_pow le lt max min mul ne
    neg not one_minus_square or rem round select_n sign square sub xor"""
)

# linear operations, by the operands that they are linear in
IN_ONE_OPERAND = PRODUCTS | named("mul")  # any one operand, for fixed others
IN_FIRST_OPERAND = (  # for fixed others
    LAYOUT
    | PARTS
    | named(
        """neg real imag conj convert_element_type copy rev slice tile reduce_sum cumsum reduce_window_sum
        dynamic_slice gather div fft name device_put sharding_constraint"""
    )
)
IN_ALL_OPERANDS = named(  # jointly, for fixed indices and predicates
    """add sub add_jaxvals concatenate stack pad complex select_n scatter scatter_add scatter_sub
    dynamic_update_slice triangular_solve"""
)

# the operands that are indices
INDICES = {
    **dict.fromkeys(named("gather dynamic_slice"), slice(1, None)),
    **dict.fromkeys(named("dynamic_update_slice"), slice(2, None)),
    **dict.fromkeys(SCATTERS, slice(1, 2)),
}
