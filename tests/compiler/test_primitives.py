"""The compiler's tables against the primitives that JAX has."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

import braintrace as bt
from braintrace import _compat
from braintrace._compiler import primitives as tables
from braintrace._compiler.influence_pattern import Sets
from braintrace._compiler.positions import Positions
from braintrace._compiler.program import read_program

TABLES = """ELEMENT_WISE LAYOUT COPIES PARTS SCATTERS REDUCTIONS WINDOWS CUMULATIVE ALONG_AN_AXIS ON_MATRICES
PRODUCTS CONTROL_FLOW CALLS""".split()

# What their pull-back shows, or each output depends on all of each input.
MIXING = frozenset(
    """all_gather all_to_all custom_lin custom_linear_solve dce_sink geqrf get ormqr platform_index pmax
    pmin ppermute psum pvary ragged_all_to_all random_gamma reduce scaled_dot select_and_gather_add
    select_and_scatter select_and_scatter_add swap xla_pmap""".split()
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


# -- a parameter and a state through each differentiable primitive -------------------------------------


def spread_out(m: Any) -> Any:
    """A matrix that is far from singular, of which no two eigenvalues or singular values are close."""
    return 0.3 * m + jnp.asarray(np.diag([1.0, 3.0, 6.0]) + np.triu(np.ones((3, 3)), 1))


def symmetric(m: Any) -> Any:
    return 0.2 * (m + m.T) + jnp.asarray(np.diag([1.0, 3.0, 6.0]))


def positive(m: Any) -> Any:
    return 0.5 + jax.nn.sigmoid(m)


def third_party() -> Any:
    """A primitive whose value comes from an operand without a derivative."""
    prim = Primitive("third_party")
    value = lambda a, hint: jnp.sin(hint)[::-1]
    prim.def_impl(value)
    prim.def_abstract_eval(lambda a, hint: a)
    _compat.mlir.register_lowering(prim, _compat.mlir.lower_fun(value, multiple_results=False))
    _compat.ad.primitive_jvps[prim] = lambda primals, tangents: (
        prim.bind(*primals),
        (jnp.cos(primals[0]) * _compat.ad.instantiate_zeros(tangents[0]))[::-1],
    )
    return lambda m: prim.bind(m, lax.stop_gradient(m))


def root(m: Any) -> Any:
    near = lambda y, _: (y - (y**3 + y - lax.stop_gradient(m)) / (3 * y**2 + 1), None)
    find = lambda f, y: lax.scan(near, y, length=20)[0]
    return lax.custom_root(
        lambda y: y**3 + y - m, jnp.zeros_like(m), find, lambda g, y: y / g(jnp.ones_like(y))
    )


@jax.custom_vjp
def called_back(m: Any) -> Any:
    shape = jax.ShapeDtypeStruct(m.shape, m.dtype)
    return jax.pure_callback(lambda a: np.sin(np.asarray(a)).cumsum(0), shape, m, vmap_method="sequential")


called_back.defvjp(lambda m: (called_back(m), m), lambda m, g: (jnp.cos(m) * jnp.cumsum(g[::-1], 0)[::-1],))

LINEAR_ALGEBRA = {
    "solve": lambda m: jnp.linalg.solve(spread_out(m), jnp.arange(1.0, 4)),
    "inv": lambda m: jnp.linalg.inv(spread_out(m)),
    "eigh": lambda m: jnp.abs(jnp.linalg.eigh(symmetric(m))[1]),
    "cholesky": lambda m: jnp.linalg.cholesky(symmetric(m)),
    "qr": lambda m: jnp.linalg.qr(spread_out(m))[1],
    "triangular_solve": lambda m: jsp.linalg.solve_triangular(spread_out(m), jnp.ones(3)),
    "third_party": third_party(),
    "custom_root": root,
}
KINDS = {
    "linear algebra": LINEAR_ALGEBRA,
    "more linear algebra": {
        "svd": lambda m: jnp.linalg.svd(spread_out(m), compute_uv=False),
        "svd_u": lambda m: jnp.abs(jnp.linalg.svd(spread_out(m))[0]),
        "eigvals": lambda m: jnp.real(jnp.linalg.eigvals(spread_out(m))),
        "lu": lambda m: jsp.linalg.lu(spread_out(m))[2],
        "slogdet": lambda m: jnp.linalg.slogdet(spread_out(m))[1],
        "pinv": lambda m: jnp.linalg.pinv(spread_out(m)),
        "cho_solve": lambda m: jsp.linalg.cho_solve(jsp.linalg.cho_factor(symmetric(m)), jnp.ones(3)),
        "expm": lambda m: jsp.linalg.expm(0.3 * m),
        "tridiagonal_solve": lambda m: lax.linalg.tridiagonal_solve(
            *(0.1 * m + jnp.asarray([[0.0], [2.0], [0.0]])), jnp.ones((3, 1))
        ),
        "cg": lambda m: jsp.sparse.linalg.cg(symmetric(m), jnp.ones(3), tol=1e-14)[0],
        "batched": lambda m: jnp.linalg.solve(
            jnp.stack([spread_out(m), spread_out(m.T)]), jnp.ones((2, 3, 1))
        ),
    },
    "along axes": {
        "fft": lambda m: jnp.real(jnp.fft.fft(m)),
        "irfft": lambda m: jnp.fft.irfft(m.astype(complex), 3),
        "cumsum": lambda m: jnp.cumsum(m, 1),
        "cumprod": lambda m: jnp.cumprod(m, 0),
        "cummax": lambda m: lax.cummax(m, 1),
        "cumlogsumexp": lambda m: lax.cumlogsumexp(m, 1),
        "sort": lambda m: jnp.sort(m, 0),
        "sort_by": lambda m: lax.sort((m, jnp.sin(m.T)), dimension=1, num_keys=1)[1],
        "top_k": lambda m: lax.top_k(m, 2)[0],
        "approx_max_k": lambda m: lax.approx_max_k(m, 2)[0],
        "associative_scan": lambda m: lax.associative_scan(lambda a, b: a * b, positive(m), axis=1),
        "reduce_prod": lambda m: jnp.prod(m, 0),
        "reduce_max": lambda m: jnp.max(m, 1),
        "reduce": lambda m: lax.reduce(m, 0.0, lambda a, b: a + b, (0,)),
        "logsumexp": lambda m: jax.nn.logsumexp(m, 1),
        "reduce_window_sum": lambda m: lax.reduce_window(m, 0.0, lax.add, (2, 2), (1, 1), "VALID"),
        "reduce_window_max": lambda m: lax.reduce_window(m, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME"),
    },
    "moved": {
        "gather": lambda m: m[jnp.argmax(m, 0)],
        "take_along_axis": lambda m: jnp.take_along_axis(m, jnp.argsort(m, 1), 1),
        "scatter": lambda m: m.at[0, 1].set(m[1, 1] ** 2),
        "scatter_add": lambda m: jnp.zeros((3, 3), m.dtype).at[jnp.argmax(m, 0)].add(m),
        "scatter_mul": lambda m: m.at[np.array([0, 2])].multiply(jnp.sin(m[:2]), unique_indices=True),
        "scatter_min": lambda m: m.at[0].min(m[1]),
        "dynamic_slice": lambda m: lax.dynamic_slice(m, (jnp.argmax(m[0]) % 2, 0), (2, 2)),
        "dynamic_update_slice": lambda m: lax.dynamic_update_slice(m, jnp.sin(m[:1]), (jnp.argmax(m[0]), 0)),
        "pad": lambda m: jnp.pad(m, 1, mode="reflect"),
        "tile": lambda m: jnp.tile(m, 2)[:, 2:],
        "split": lambda m: jnp.concatenate(jnp.split(m, 3)[::-1]),
        "select_n": lambda m: lax.select_n(m > 0, m, m.T),
        "barrier": lambda m: lax.optimization_barrier((m, m.T))[1],
        "conv": lambda m: lax.conv(m[None, None], m[None, None, :2, :2], (1, 1), "SAME"),
        "dot_general": lambda m: jnp.einsum("ij,kj->ik", m, jnp.sin(m)),
    },
    "unit by unit": {
        "clamp": lambda m: lax.clamp(-0.5, m, 0.5),
        "atan2": lambda m: jnp.arctan2(m, m.T + 2),
        "pow": lambda m: positive(m) ** m.T,
        "rem": lambda m: jnp.fmod(m, 0.7 + positive(m.T)),
        "igamma": lambda m: lax.igamma(positive(m), positive(m.T)),
        "betainc": lambda m: lax.betainc(jnp.full((3, 3), 1.5), jnp.full((3, 3), 2.0), positive(m) / 2),
        "polygamma": lambda m: jsp.special.polygamma(1, positive(m)),
        "lgamma": lambda m: lax.lgamma(positive(m)),
        "erf_inv": lambda m: lax.erf_inv(positive(m) / 2),
        "bessel_i0e": lax.bessel_i0e,
        "random_gamma": lambda m: jax.random.gamma(jax.random.key(1), positive(m) + 1),
        "complex": lambda m: jnp.abs(lax.complex(m, m.T) ** 2),
        "cond": lambda m: lax.cond(jnp.sum(m) > 0, jnp.sin, jnp.cos, m),
        "scan": lambda m: lax.scan(lambda c, r: (c * 0.5 + jnp.sin(r), c), jnp.zeros(3, m.dtype), m)[1],
        "checkpoint": lambda m: jax.checkpoint(lambda m: jnp.sin(jnp.cumsum(m, 0)))(m),
        "called_back": called_back,
    },
}


LONG = {"random_gamma", "expm"}  # programs of many operations, which a step has once


@pytest.mark.parametrize("name", ["solve", "third_party", "custom_root"])
def test_what_a_derivative_reaches_is_found_where_the_value_does_not_show_it(name):
    """Of a function that hides what its value is made of, the pattern of the Jacobian."""
    m = jnp.asarray(np.random.RandomState(0).standard_normal((3, 3)))
    program = read_program(jax.make_jaxpr(LINEAR_ALGEBRA[name])(m))
    (out,) = program.outputs
    start = Sets.single(np.arange(out.aval.size).reshape(out.aval.shape), out.aval.size)
    reached = Positions(program).reaches({out: start})[0][program.inputs[0]]
    jacobian = jax.jacrev(LINEAR_ALGEBRA[name])(m).reshape(out.aval.size, 9)
    assert np.array_equal(reached.unpacked(out.aval.size).reshape(9, -1).T, np.abs(jacobian) > 1e-9)


RULES = {  # and windows
    "RTRL": (bt.rules.RTRL(), None),
    "full rank": (bt.rules.D_RTRL(rank=1000), None),
    "SnAp": (bt.rules.SnAp(n=1), None),
    "D_RTRL": (bt.rules.D_RTRL(), None),
    "windows": (bt.rules.D_RTRL(), 2),
    "ES_D_RTRL": (bt.rules.ES_D_RTRL(0.7), None),
    "UORO": (bt.rules.UORO(), None),
    "KF_RTRL": (bt.rules.KF_RTRL(), None),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_rule_follows_every_primitive_or_says_that_it_does_not(kind):
    """One model of many parts, each a parameter and a state of its own through one primitive."""
    parts, rng = KINDS[kind], np.random.RandomState(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape))
    params = {of: {n: draw(3, 3) for n in parts} for of in ("into", "within")}
    carry, xs, weights = {n: 0.5 * draw(3, 3) for n in parts}, draw(4, 3, 3), draw(4)

    def part(name: str, m: Any) -> Any:
        y = jnp.ravel(parts[name](m))
        return jnp.tanh(0.5 * jnp.resize(y, (9,)).reshape(3, 3))

    def step(p: Any, carry: Any, x: Any) -> Any:
        new = {
            n: 0.3 * h
            + (part(n, p["into"][n] + x) if n not in LONG else p["into"][n] + x)
            + 0.5 * part(n, h + 0.3 * p["within"][n])
            for n, h in carry.items()
        }
        return new, sum(jnp.sum(jnp.sin(h)) for h in new.values())

    def total(p: Any) -> Any:
        return jnp.sum(weights * lax.scan(lambda h, x: step(p, h, x), carry, xs)[1])

    truth = jax.jit(jax.grad(total))(params)
    with warnings.catch_warnings(action="ignore"):
        first = bt.online(step, params, carry, xs[0])
        for name, (rule, window) in RULES.items():
            net = first.with_rule(rule, window)
            missed = {path[1:] for path in net.report.exactness.weights}
            assert not missed or name not in ("RTRL", "full rank"), (name, missed)

            def gradient(params: Any, net: Any = net) -> Any:
                loss, traces = lambda y, weight: weight * y, net.init(params, carry)
                return net.grad(loss, params, carry, traces, xs, weights, chunk_size=1, reduction="sum")[0]

            if len(missed) == 2 * len(parts) and kind != "linear algebra":
                jax.eval_shape(lambda net=net: net.step(params, carry, net.init(params, carry), xs[0]))
                continue  # there is nothing to compare
            found = gradient(params)
            for of, own in params.items():
                for n in own:
                    a, b = truth[of][n], found[of][n]
                    off = float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(a)))
                    assert np.isfinite(off), (name, of, n)
                    assert off < 1e-8 or (of, n) in missed, (name, of, n, off)
