"""Every marked operation computes what plain JAX does, under every transformation; and its letters are true.

One table of operations, one of checks, and one test over the product.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import brainevent
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax import lax
from jax.experimental.sparse import BCOO, BCSR

import braintrace as bt
from braintrace import _compat
from braintrace._ops.axis_labels import align
from tests.run import some


@dataclass(frozen=True)
class Op:
    """A marked function and its plain reference, both of (*data, *weights); given as shapes or arrays."""

    marked: Callable[..., Any]
    plain: Callable[..., Any]
    data: tuple[Any, ...]
    weights: tuple[Any, ...]
    bias: bool = False  # the last weight is one
    linear: bool = True  # in each operand

    def operands(self, *lead: int, dtype: Any = float) -> tuple[list[Any], list[Any]]:
        """Random data and weights with `lead` axes in front; given arrays are rolled along them."""
        rng = np.random.default_rng(len(lead))

        def make(spec: Any) -> Any:
            if isinstance(spec, np.ndarray):
                rolled = [np.roll(spec, i) for i in range(np.prod(lead, dtype=int))]
                return np.stack(rolled).reshape((*lead, *spec.shape))
            value = rng.normal(size=(*lead, *spec))
            if np.issubdtype(dtype, np.complexfloating):
                value = value + 1j * rng.normal(size=value.shape)
            return jnp.asarray(value, dtype)

        return [make(s) for s in self.data], [make(s) for s in self.weights]


def plus(y: Any, bias: Any) -> Any:
    return y if bias is None else y + jnp.broadcast_to(bias, y.shape)


def double(w: Any) -> Any:
    return 2 * w


# --- the table ---


def matmul(x: tuple[int, ...], *bias: tuple[int, ...]) -> Op:
    return Op(bt.matmul, lambda x, w, b=None: plus(x @ w, b), (x,), ((3, 2), *bias), bool(bias))


def conv(
    x: tuple[int, ...], kernel: tuple[int, ...], *bias: tuple[int, ...], batch: int = 0, **options: Any
) -> Op:
    """`batch` is the batch axis, for the reference to add it where x has none."""

    def plain(x: Any, kernel: Any, bias: Any = None) -> Any:
        given = {"window_strides": (1,), "padding": "SAME", **options}
        given["window_strides"] = given.pop("strides", given["window_strides"])
        if len(given["window_strides"]) == 1:
            given["window_strides"] *= kernel.ndim - 2
        full = x if x.ndim == kernel.ndim else jnp.expand_dims(x, batch)
        y = lax.conv_general_dilated(full, kernel, **given)
        axis = lax.conv_dimension_numbers(full.shape, kernel.shape, given.get("dimension_numbers")).out_spec[
            1
        ]
        if bias is not None:
            y = y + jnp.reshape(bias, [-1 if i == axis else 1 for i in range(y.ndim)])
        return y if x.ndim == kernel.ndim else jnp.squeeze(y, batch)

    return Op(partial(bt.conv, **options), plain, (x,), (kernel, *bias), bool(bias))


LAST = ("NHWC", "HWIO", "NHWC")
DENSE = np.array([[0.0, 1, 0, 2], [3, 0, 0, 0], [0, 0, 4, 5]])
STORED = np.argwhere(DENSE)
SPARSE = BCOO(  # with two entries of padding
    (np.append(DENSE[DENSE != 0], [0, 0]), np.append(STORED, [DENSE.shape] * 2, 0)), shape=DENSE.shape
)


def sparse(lead: tuple[int, ...], *bias: tuple[int, ...]) -> Op:
    row, col = np.nonzero(DENSE)

    def plain(x: Any, w: Any, b: Any = None) -> Any:
        return plus(x @ jnp.zeros(DENSE.shape, w.dtype).at[row, col].add(w[:5]), b)

    return Op(
        lambda x, w, b=None: bt.sparse_matmul(x, w, sparse_mat=SPARSE, bias=b),
        plain,
        ((*lead, 3),),
        ((7,), *bias),
        bool(bias),
    )


def einsum(equation: str, x: tuple[int, ...], w: tuple[int, ...]) -> Op:
    return Op(partial(bt.einsum, equation), partial(jnp.einsum, equation), (x,), (w,))


def lora(x: tuple[int, ...], *bias: tuple[int, ...]) -> Op:
    return Op(
        lambda x, B, A, b=None: bt.lora_matmul(x, B, A, alpha=0.5, bias=b),
        lambda x, B, A, b=None: plus(0.5 * (x @ B @ A), b),
        (x,),
        ((3, 2), (2, 4), *bias),
        bool(bias),
    )


def grouped(x: tuple[int, ...], *bias: tuple[int, ...]) -> Op:
    return Op(
        bt.grouped_matmul,
        lambda x, w, b=None: plus(jnp.einsum("...gi,gio->...go", x, w), b),
        (x,),
        ((2, 3, 4), *bias),
        bool(bias),
    )


def embedding(indices: Any) -> Op:
    return Op(bt.embedding, lambda i, w: jnp.take(w, i, axis=0), (np.array(indices),), ((4, 3),))


def element_wise(shape: tuple[int, ...]) -> Op:
    return Op(bt.element_wise, lambda w: w, (), (shape,))


# y[b, c] = sum_t x[b, t] w[c, t] z[t] + v[c], of two inputs and two weights
own_p = bt.register_primitive(
    "etp_own",
    lambda x, z, weight, v: jnp.einsum("bt,ct,t->bc", x, weight, z) + v[None],
    {"weight": bt._ops.Term("bt,ct->bc", x=lambda x, z: x * z[None]), "v": "c->bc"},
)

fns = Op(
    lambda x, w, b: bt.matmul(x, w, b, weight_fn=lambda w: jnp.tanh(w.T), bias_fn=double),
    lambda x, w, b: plus(x @ jnp.tanh(w.T), 2 * b),
    ((5, 3),),
    ((2, 3), (2,)),
    bias=True,
    linear=False,
)

TABLE = {
    "matmul vector": matmul((3,)),
    "matmul batched": matmul((5, 3)),
    "matmul 3 leading axes": matmul((2, 1, 4, 3)),
    "matmul vector, bias": matmul((3,), (2,)),
    "matmul batched, bias": matmul((5, 3), (2,)),
    "matmul, bias of one": matmul((5, 3), (1,)),
    "matmul, functions": fns,
    "element_wise (n,)": element_wise((4,)),
    "element_wise (m, n)": element_wise((3, 4)),
    "element_wise (1,)": element_wise((1,)),
    "element_wise ()": element_wise(()),
    "element_wise, function": Op(
        lambda w: bt.element_wise(w, jax.nn.sigmoid), jax.nn.sigmoid, (), ((3,),), linear=False
    ),
    "element_wise, rank changes": Op(
        lambda w: bt.element_wise(w, weight_fn=lambda w: w.reshape(3, 2)),
        lambda w: w.reshape(3, 2),
        (),
        ((6,),),
    ),
    "conv 1d, function": Op(
        lambda x, w: bt.conv(x, w, kernel_fn=jnp.tanh, padding="VALID"),
        lambda x, w: lax.conv_general_dilated(x, jnp.tanh(w), (1,), "VALID"),
        ((2, 3, 4),),
        ((2, 3, 2),),
        linear=False,
    ),
    "conv 1d strided, unbatched, bias": conv((3, 6), (4, 3, 3), (4,), strides=(2,)),
    "conv 1d batch-grouped, bias": conv((4, 3, 5), (6, 3, 2), (6,), batch_group_count=2),
    "conv 2d strided, dilated": conv(
        (2, 2, 5, 6), (2, 2, 2, 3), strides=(1, 2), padding=((2, 1), (0, 2)), rhs_dilation=(2, 1)
    ),
    "conv 2d transposed": conv(
        (2, 2, 3, 3), (2, 2, 2, 3), padding=((1, 1), (-1, 2)), lhs_dilation=(2, 3), strides=(1, 2)
    ),
    "conv 2d channels last, bias": conv((2, 4, 5, 3), (3, 2, 3, 2), (1, 1, 2), dimension_numbers=LAST),
    "conv 2d mixed axes, unbatched, bias": conv(
        (3, 4, 5), (3, 2, 3, 2), (2,), batch=3, dimension_numbers=("CHWN", "HOIW", "WCHN")
    ),
    "conv 2d grouped, bias": conv((2, 4, 3, 3), (6, 2, 2, 2), (6,), feature_group_count=2),
    "conv 2d depthwise, unbatched": conv(
        (3, 3, 4), (2, 2, 1, 4), feature_group_count=4, dimension_numbers=LAST
    ),
    "conv 3d strided, bias": conv((1, 2, 3, 3, 2), (2, 2, 2, 2, 2), (2,), strides=(2,), padding="SAME_LOWER"),
    "sparse": sparse(()),
    "sparse batched, bias": sparse((2,), (4,)),
    "sparse, one weight": Op(
        lambda x, w: bt.sparse_matmul(x, w, sparse_mat=SPARSE, weight_fn=jnp.tanh),
        lambda x, w: x @ (jnp.tanh(w) * jnp.array(DENSE != 0, w.dtype)),
        ((3,),),
        ((),),
        linear=False,
    ),
    "lora vector": lora((3,)),
    "lora batched, bias": lora((5, 3), (4,)),
    "lora, functions": Op(
        lambda x, B, A: bt.lora_matmul(x, B, A, b_fn=jnp.tanh, a_fn=double),
        lambda x, B, A: x @ jnp.tanh(B) @ (2 * A),
        ((3,),),
        ((3, 2), (2, 4)),
        linear=False,
    ),
    "embedding scalar": embedding(2),
    "embedding batched": embedding([[0, 2, 2], [-1, 1, 3]]),
    "einsum": einsum("bhd,hde->bhe", (5, 2, 3), (2, 3, 4)),
    "einsum leading axes": einsum("...i,oi->o...", (2, 4, 3), (5, 3)),
    "einsum that sums x": einsum("bsi,io->bo", (2, 4, 3), (3, 5)),
    "einsum that sums w": einsum("bi,rio->ob", (4, 3), (2, 3, 5)),
    "einsum, all free": einsum("a,b->ab", (2,), (3,)),
    "grouped": grouped((2, 3)),
    "grouped batched, bias": grouped((5, 2, 3), (2, 4)),
    "one's own": Op(
        lambda x, z, w, v: own_p(x, z, weights={"weight": w, "v": v}),
        lambda x, z, w, v: jnp.einsum("bt,ct->bc", x * z[None], w) + v[None],
        ((2, 3), (3,)),
        ((4, 3), (4,)),
        bias=False,
    ),
}


# --- the checks: each returns what the marked and the plain function give ---


def on_both(op: Op, of: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """`of(function)(*args)` of the marked function and of the plain one, compiled together."""
    return jax.jit(lambda *a: (of(op.marked)(*a), of(op.plain)(*a)))(*args)


def differentiable(op: Op, data: list[Any], weights: list[Any]) -> tuple[int, ...]:
    operands = [*data, *weights]
    return tuple(i for i, v in enumerate(operands) if jnp.issubdtype(v.dtype, jnp.inexact))


def value(op: Op) -> tuple[Any, Any]:
    data, weights = op.operands()
    y = op.marked(*data, *weights), jax.jit(op.marked)(*data, *weights)
    return y, (op.plain(*map(jnp.asarray, (*data, *weights))),) * 2


def derivatives(op: Op) -> tuple[Any, Any]:
    data, weights = op.operands()
    live = differentiable(op, data, weights)

    def of(f: Callable[..., Any]) -> Callable[..., Any]:
        def results(*args: Any) -> Any:
            def at(*vals: Any) -> Any:
                full = list(args)
                for i, v in zip(live, vals, strict=True):
                    full[i] = v
                return f(*full)

            primals = [args[i] for i in live]
            y, pull = jax.vjp(at, *primals)
            return pull(jnp.cos(y)), jax.jvp(at, primals, [jnp.cos(p) for p in primals])

        return results

    return on_both(op, of, *data, *weights)


def transpose(op: Op) -> tuple[Any, Any]:
    data, weights = op.operands()
    live = differentiable(op, data, weights)

    def of(f: Callable[..., Any]) -> Callable[..., Any]:
        def results(*args: Any) -> Any:
            ct = jnp.cos(f(*args))
            return [
                jax.linear_transpose(lambda v, i=i: f(*args[:i], v, *args[i + 1 :]), args[i])(ct)
                for i in live
            ]

        return results

    return on_both(op, of, *data, *weights)


def axes(op: Op) -> tuple[tuple[Any, ...], ...]:
    """The `in_axes` of data only, of weights only and of one weight only."""
    n, m = len(op.data), len(op.weights)
    return (0,) * n + (None,) * m, (None,) * n + (0,) * m, (None,) * n + (0,) + (None,) * (m - 1)


def vmap(op: Op) -> tuple[Any, Any]:
    """Over data, over weights by their last axis, over one weight, over both at once and nested."""
    (data, weights), (data2, weights2) = op.operands(), op.operands(2)
    over_data, over_weights, over_one = axes(op)
    last = [np.moveaxis(w, 0, -1) for w in weights2]
    by_last = tuple(None if a is None else -1 for a in over_weights)

    def of(f: Callable[..., Any]) -> Callable[..., Any]:
        def results(data: Any, weights: Any, data2: Any, weights2: Any, last: Any) -> Any:
            ys = [jax.vmap(f, by_last, out_axes=-1)(*data, *last)]
            if weights[1:]:
                ys += [jax.vmap(f, over_one)(*data, weights2[0], *weights[1:])]
            if data:
                ys += [
                    jax.vmap(f, over_data)(*data2, *weights),
                    jax.vmap(f)(*data2, *weights2),
                    jax.vmap(jax.vmap(f, over_data, 1), over_weights)(*data2, *weights2),
                ]
            return ys

        return results

    return on_both(op, of, data, weights, data2, weights2, last)


def control_flow(op: Op) -> tuple[Any, Any]:
    """A `checkpoint` in a `cond` in a `scan`, and its gradient."""
    data2, weights = op.operands(2)[0], op.operands()[1]

    def of(f: Callable[..., Any]) -> Callable[..., Any]:
        def run(weights: Any, data: Any) -> Any:
            def step(odd: Any, data: Any) -> Any:
                y = jax.eval_shape(f, *data, *weights)
                empty = lambda w: jnp.zeros(y.shape, y.dtype)
                return ~odd, lax.cond(odd, empty, lambda w: jax.checkpoint(f)(*data, *w), weights)

            return jnp.sin(lax.scan(step, jnp.array(False), data, length=2)[1])

        def results(*args: Any) -> Any:
            y, pull = jax.vjp(lambda w: run(w, *args[1:]), args[0])
            return y, pull(y)

        return results

    return on_both(op, of, weights, data2)


def dtypes(op: Op) -> tuple[Any, Any]:
    """All but float64, which the other checks are in."""
    kinds = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64)
    data_weights = [op.operands(dtype=d) for d in kinds]
    got, want = on_both(op, lambda f: lambda each: [f(*x, *w) for x, w in each], data_weights)
    assert [y.dtype for y in got] == list(kinds)
    return got, want


def units(op: Op) -> tuple[Any, Any]:
    """Data in mV and the first weight in mS; a bias in nA, a thousandth of that."""
    data, weights = op.operands()
    floating = [isinstance(s, tuple) for s in op.data]
    unit = u.UNITLESS
    for i, f in enumerate(floating):
        if f:
            unit, data[i] = unit * u.mV, data[i] * u.mV
    unit, weights[0] = unit * u.mS, weights[0] * u.mS
    bare = [*map(u.get_mantissa, (*data, *weights))]
    if op.bias:
        weights[-1] = weights[-1] * 1000 * u.nA
    got = jax.jit(op.marked)(*data, *weights)
    assert u.get_unit(got) == unit
    return u.get_mantissa(got), op.plain(*map(jnp.asarray, bare))


def letters(op: Op) -> tuple[Any, Any]:
    """The contracted instant term is the gradient: contract(g, instant(J)) = vjp(g * J)."""
    (data, weights), (data2, weights2) = op.operands(), op.operands(2)
    f, (over_data, over_weights, over_one) = op.marked, axes(op)
    sites = [(f, [*data, *weights]), (jax.vmap(f, over_weights), [*data, *weights2])]
    if weights[1:]:
        sites += [(jax.vmap(f, over_one), [*data, weights2[0], *weights[1:]])]
    if data:
        sites += [
            (jax.vmap(f, over_data), [*data2, *weights]),
            (jax.vmap(jax.vmap(f, over_data), over_weights), [*data2, *weights2]),
        ]
    functions = [g for g, _ in sites]
    results = jax.jit(lambda args: [through_letters(g, *a) for g, a in zip(functions, args, strict=True)])
    got, want = zip(*results([a for _, a in sites]), strict=True)
    return got, want


def through_letters(f: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    eqn, operands = site(f, *args)
    prim, params, y = eqn.primitive, eqn.params, eqn.outvars[0].aval
    first = len(operands) - len(params["names"])
    inputs, weights = operands[:first], operands[first:]
    g, J = jnp.asarray(np.random.default_rng(9).normal(size=(2, *y.shape)))

    def views(*weights: Any) -> dict[str, Any]:
        effective = prim.effective(weights, params)
        layouts = prim.layouts(params, list(effective), y.ndim)
        return {name: layouts[name].view_w(w) for name, w in effective.items()}

    viewed, pull = jax.vjp(views, *weights)
    layouts = prim.layouts(params, list(viewed), y.ndim)
    got = pull({name: contracted(layouts[name], inputs, w, g, J) for name, w in viewed.items()})
    _, pull = jax.vjp(lambda *w: prim.bind(*inputs, *w, **params), *weights)
    return got, pull(g * J)


def contracted(layout: Any, inputs: list[Any], w: Any, g: Any, J: Any) -> Any:
    trace = layout.trace
    g, J = layout.view_y(g, inputs), layout.view_y(J, inputs)
    sizes = dict(zip((*layout.y, *layout.w), (*J.shape, *w.shape), strict=True))
    assert len(layout.w) == w.ndim
    instant = align(J, layout.y, trace)
    factor = layout.factor(inputs)
    if factor is not None:
        instant = instant * align(*factor, trace)
    instant = jnp.broadcast_to(instant, [sizes[a] for a in trace])
    axes = tuple(i for i, a in enumerate(trace) if a not in layout.w)
    return jnp.sum(align(g, layout.y, trace) * instant, axes)


def site(f: Callable[..., Any], *args: Any) -> tuple[Any, list[Any]]:
    """The marked equation of a function, and its operands."""
    closed = jax.make_jaxpr(f)(*args)
    env = dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, *args], strict=True))
    for eqn in closed.jaxpr.eqns:
        vals = [a.val if isinstance(a, _compat.Literal) else env[a] for a in eqn.invars]
        if isinstance(eqn.primitive, bt.ETPPrimitive):
            return eqn, vals
        env.update(zip(eqn.outvars, _compat.bind(eqn, *vals), strict=True))
    raise AssertionError("no marked equation")


CHECKS = [value, derivatives, transpose, vmap, control_flow, dtypes, units, letters]


LONG = [pytest.param(c, marks=pytest.mark.slow) if c in (control_flow, dtypes) else c for c in CHECKS]


APPLICABLE = [(n, c) for n, op in TABLE.items() for c in CHECKS if op.linear or c is not transpose]
FAST = {(n, c) for n in some(3, TABLE) for c in CHECKS if c not in (control_flow, dtypes)}


@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param(n, c, id=f"{n}-{c.__name__}", marks=() if (n, c) in FAST else pytest.mark.slow)
        for n, c in APPLICABLE
    ],
)
def test_op(name: str, check: Callable[[Op], tuple[Any, Any]]) -> None:
    got, want = check(TABLE[name])
    assert_close(got, want)


def assert_close(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        eps = float(jnp.finfo(b.dtype).eps) if jnp.issubdtype(b.dtype, jnp.inexact) else 0
        wide = complex if jnp.issubdtype(b.dtype, jnp.complexfloating) else float
        np.testing.assert_allclose(np.asarray(a, wide), np.asarray(b, wide), rtol=30 * eps, atol=30 * eps)


# --- what the table has no row for ---


def test_second_derivative() -> None:
    x, w = jnp.arange(1.0, 4), jnp.ones((3, 2))
    grads = (jax.grad(lambda w, f=f: jnp.sum(jnp.sin(f(x, w)))) for f in (bt.matmul, jnp.matmul))
    got, want = jax.jit(lambda w: [jax.jvp(g, [w], [w]) for g in grads])(w)
    assert_close(got, want)


FORMATS = {
    "brainevent.CSR": brainevent.CSR.fromdense,
    "brainevent.CSC": brainevent.CSC.fromdense,
    "saiunit.CSR": u.sparse.CSR.fromdense,
    "saiunit.CSC": u.sparse.CSC.fromdense,
    "saiunit.COO": u.sparse.COO.fromdense,
    "BCOO": BCOO.fromdense,
    "BCOO in another order": lambda m: BCOO(
        (m[[2, 0, 0], [3, 1, 3]], [[2, 3], [0, 1], [0, 3]]), shape=m.shape
    ),
    "BCSR": BCSR.fromdense,
    "BCSR with padding": lambda m: BCSR.fromdense(m, nse=8),
    "scipy.csr_array": scipy.sparse.csr_array,
    "scipy.csc_matrix": scipy.sparse.csc_matrix,
    "scipy.coo_array": scipy.sparse.coo_array,
}


@pytest.mark.parametrize("kind", FORMATS)
def test_sparse_formats(kind: str) -> None:
    """Entries are in the order in which the matrix stores them."""
    matrix, x = FORMATS[kind](DENSE), jnp.arange(6.0).reshape(2, 3)
    y = bt.sparse_matmul(x, matrix.data, sparse_mat=matrix)
    np.testing.assert_array_equal(y, x @ np.asarray(matrix.todense()))


def test_sparse_matrix_as_an_argument() -> None:
    """Its indices are then unknown while tracing."""
    matrix, x = BCSR.fromdense(DENSE), jnp.arange(3.0)
    y = jax.jit(lambda m, x: bt.sparse_matmul(x, m.data, sparse_mat=m))(matrix, x)
    np.testing.assert_array_equal(y, x @ DENSE)


@pytest.mark.parametrize("dtype", [bool, np.int32, np.uint8])
@pytest.mark.parametrize(
    "name",
    [
        "matmul batched, bias",
        "conv 1d strided, unbatched, bias",
        "sparse",
        "lora vector",
        "einsum",
        "grouped",
    ],
)
def test_spikes(name: str, dtype: Any) -> None:
    """Booleans and integers are numbers of the weight's type."""
    op = TABLE[name]
    spikes = np.random.default_rng(0).integers(0, 2, op.data[0]).astype(dtype)
    weights = op.operands(dtype=jnp.float32)[1]
    y, pull = jax.vjp(partial(op.marked, spikes), *weights)
    want, pull_want = jax.vjp(partial(op.plain, spikes.astype(np.float32)), *weights)
    assert_close((y, pull(y)), (want, pull_want(want)))


def test_numpy_and_python_numbers() -> None:
    x, w = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(3, 4)
    np.testing.assert_allclose(
        bt.matmul(x, w, 0.5, weight_fn=lambda w: w.at[0].set(0)), x[:, 1:] @ w[1:] + 0.5
    )
    np.testing.assert_array_equal(bt.element_wise(0.5, double), 1.0)
    for y in (
        bt.sparse_matmul(x, 2.0, sparse_mat=SPARSE),
        bt.sparse_matmul(x, weight=2.0, sparse_mat=SPARSE),
    ):
        np.testing.assert_array_equal(y, x @ (2 * (DENSE != 0)))
    np.testing.assert_array_equal(bt.embedding(2, w), w[2])


@pytest.mark.parametrize(
    ("equation", "shape"), [("bo, oi", (4, 3)), ("...i,io", (2, 4, 3)), ("zi,ia", (4, 3))]
)
def test_einsum_without_an_arrow(equation: str, shape: tuple[int, ...]) -> None:
    x, w = jnp.ones(shape), jnp.arange(15.0).reshape(3, 5)
    np.testing.assert_array_equal(bt.einsum(equation, x, w), jnp.einsum(equation, x, w))


def test_mixed_types() -> None:
    x, kernel = jnp.ones((1, 3, 4), jnp.float16), jnp.ones((2, 3, 2), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        assert bt.conv(x, kernel).dtype == jnp.float32


def test_bias_has_the_unit_of_the_result() -> None:
    x, w = jnp.ones(3), jnp.ones((3, 2))
    for bias in (w[0], w[0] * u.mA):
        with pytest.raises(u.UnitMismatchError):
            bt.matmul(x * u.mV, w, bias)
    with pytest.raises(u.UnitMismatchError):
        bt.matmul(x, w, w[0] * u.mV)


def one(*shape: int) -> Any:
    return np.ones(shape)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bt.matmul(one(3), one(4, 2)), "takes x of shape ('...', 4)"),
        (lambda: bt.matmul(one(3), one(3)), "weight of 2 axes"),
        (lambda: bt.matmul(one(5, 3), one(3, 2), one(5, 2)), "the shape of the output's features, (2,)"),
        (lambda: bt.conv(one(2, 3, 4, 4, 4), one(2, 3, 3)), "1 to 3 spatial axes"),
        (lambda: bt.conv(one(2, 3, 4), one(2, 3, 3), one(3)), "the shape of the output's features, (2,)"),
        (lambda: bt.conv(one(2, 3, 4), one(2, 3, 3), strides=(1, 2)), "strides of length 1"),
        (lambda: bt.conv(one(2, 3, 4), one(2, 3, 3), lhs_dilation=(2,)), "(low, high)"),
        (lambda: bt.sparse_matmul(one(3), one(4), sparse_mat=SPARSE), "weight_data of shape (7,)"),
        (lambda: bt.sparse_matmul(one(4), one(7), sparse_mat=SPARSE), "x of shape ('...', 3)"),
        (lambda: bt.einsum("ii,io->o", one(3, 3), one(3, 2)), "each label at most once"),
        (lambda: bt.einsum("...ii,io->...o", one(3, 3), one(3, 2)), "each label at most once"),
        (lambda: bt.einsum("io->oi", one(3), one(3, 2)), "two operands"),
    ],
)
def test_errors(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_type_errors() -> None:
    with pytest.raises(TypeError, match="integer indices"):
        bt.embedding(one(2), one(3, 2))
    with pytest.raises(TypeError, match="not both"):
        bt.element_wise(one(2), double, weight_fn=double)
    for weights in ({}, {"weight_data": one(7), "weight": one(7)}):
        with pytest.raises(TypeError, match="one of them"):
            bt.sparse_matmul(one(3), sparse_mat=SPARSE, **weights)
    fixed = brainevent.FixedNumPerPre((one(3, 2), np.zeros((3, 2), int)), shape=(3, 4))
    batched = BCOO((one(2, 1), np.zeros((2, 1, 2), int)), shape=(2, 3, 4))
    for matrix in (batched, fixed, one(3, 4)):
        with pytest.raises(TypeError, match="without batch axes"):
            bt.sparse_matmul(one(3), one(6), sparse_mat=matrix)


def test_letters_that_do_not_fit() -> None:
    prim = bt.register_primitive("etp_misfit", lambda x, weight: x * weight, "o,o->bo")
    eqn, _ = site(lambda x, w: prim(x, weights={"weight": w}), one(3), one(3))
    with pytest.raises(ValueError, match="do not fit an output of 1 axes"):
        prim.layouts(eqn.params, ["weight"], 1)
