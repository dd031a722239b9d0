"""The compiler's tables against the primitives that JAX has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import pytest
from jax import lax
from jax.extend.core import Primitive

from braintrace import _compat
from braintrace._compiler import primitives as tables

TABLES = """ELEMENT_WISE LAYOUT COPIES PARTS SCATTERS REDUCTIONS WINDOWS CUMULATIVE ALONG_AN_AXIS ON_MATRICES
PRODUCTS CONTROL_FLOW CALLS""".split()

# Each output is taken to depend on all of each input.
MIXING = frozenset(
    """all_gather all_to_all custom_lin custom_linear_solve dce_sink eig eigh geqrf get hessenberg
    householder_product lu ormqr platform_index pmax pmin ppermute psum pvary qr ragged_all_to_all
    random_gamma reduce scaled_dot schur select_and_gather_add select_and_scatter select_and_scatter_add
    svd swap tridiagonal tridiagonal_solve xla_pmap""".split()
)
# No input has a derivative.
WITHOUT_DERIVATIVE = frozenset(
    """after_all argmax argmin axis_index bitcast_convert_type create_token empty empty2 iota mulhi
    random_bits random_clone random_fold_in random_seed random_split random_unwrap random_wrap
    rng_bit_generator rng_uniform threefry2x32""".split()
)


def in_jaxpr(jaxpr: Any) -> Iterator[Primitive]:
    for eqn in jaxpr.eqns:
        yield eqn.primitive
        for inner in _compat.all_jaxprs(eqn):
            yield from in_jaxpr(inner)


def primitives_of_jax() -> set[Primitive]:
    """Those that `jax.extend` names, and those that JAX's functions of one or two arrays are made of."""
    found = {p for p in vars(_compat.primitives).values() if isinstance(p, Primitive)}
    x, i = jnp.full((2, 2), 0.5), jnp.ones((2, 2), int)
    examples: list[Any] = [lambda x: jnp.tile(x, 2), lambda x: x.at[0].subtract(x[1])]
    for module in (jnp, lax, jax.nn, jsp.special, jsp.linalg, jnp.linalg, jnp.fft):
        members = (vars(module)[name] for name in dir(module) if not name.startswith("_"))
        examples += [f for f in members if str(getattr(f, "__module__", "")).startswith("jax")]
    for example in examples:
        for args in ((x,), (x, x), (i, i)):
            try:
                found.update(in_jaxpr(jax.make_jaxpr(example)(*args).jaxpr))
            except Exception:  # not a function of such arrays
                continue
            break
    return found


@pytest.mark.slow
def test_every_primitive_is_in_one_table():
    found = primitives_of_jax()
    assert len(found) > 150
    where = Counter(p for name in TABLES for p in getattr(tables, name))
    listed = MIXING | WITHOUT_DERIVATIVE
    unknown = sorted(p.name for p in found if where[p] + (p.name in listed) == 0)
    assert not unknown, (
        f"JAX {jax.__version__} has primitives that the compiler does not know: {unknown}. Put the name of "
        "each into the table of braintrace/_compiler/primitives.py that says what it does; if it is an old "
        "one with a new name, beside the old name, wherever braintrace/ has that. If "
        "`jax.extend.core.primitives` does not have it, braintrace/_compat.py finds it by tracing. One that "
        "mixes all that it is given belongs into the list MIXING of this test."
    )
    twice = sorted(p.name for p in found if where[p] + (p.name in listed) > 1)
    assert not twice, f"These primitives are in more than one table: {twice}."


def test_tables_of_some_are_parts_of_the_whole():
    known = frozenset[Primitive]().union(*(getattr(tables, name) for name in TABLES))
    for name in "FLAT NOT_COMPLEX ARITHMETIC IN_ONE_OPERAND IN_FIRST_OPERAND IN_ALL_OPERANDS INDICES".split():
        assert known.issuperset(getattr(tables, name)), name
