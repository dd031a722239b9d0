"""Every marked operation computes what plain JAX does, under every transformation; and its letters are true.

One table of operations, one of checks, and one test over the product.
"""

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
from braintrace._ops.letters import align

rng = np.random.default_rng(0)
compiled = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # each runs once


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


DENSE = np.array([[0.0, 1, 0, 2], [3, 0, 0, 0], [0, 0, 4, 5]])


def sparse(matrix: Any, lead: tuple[int, ...] = (), *bias: tuple[int, ...]) -> Op:
    """The reference fills a dense matrix in the storage order of `matrix`, which `todense` tells."""
    order = matrix.todense() if hasattr(matrix, "todense") else matrix
    row, col = np.nonzero(np.asarray(order))
    entry = np.asarray(order)[row, col].astype(int) - 1

    def plain(x: Any, w: Any, b: Any = None) -> Any:
        return plus(x @ jnp.zeros((3, 4), w.dtype).at[row, col].add(w[entry]), b)

    size = len(matrix.data)
    return Op(partial(bt_sparse, matrix), plain, ((*lead, 3),), ((size,), *bias), bool(bias))


def bt_sparse(matrix: Any, x: Any, w: Any, b: Any = None) -> Any:
    return bt.sparse_matmul(x, w, sparse_mat=matrix, bias=b)


def counted(matrix: Any) -> Any:
    """A sparse matrix whose entries are 1, 2, ... in storage order."""
    data = np.arange(1.0, len(matrix.data) + 1)
    if hasattr(matrix, "row"):
        return type(matrix)((data, matrix.row, matrix.col), shape=matrix.shape)
    if hasattr(matrix, "indptr"):
        return type(matrix)((data, matrix.indices, matrix.indptr), shape=matrix.shape)
    return type(matrix)((data, matrix.indices), shape=matrix.shape)


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
    "conv 1d": conv((2, 3, 6), (4, 3, 3)),
    "conv 1d strided, unbatched, bias": conv((3, 6), (4, 3, 3), (4,), strides=(2,)),
    "conv 2d": conv((2, 3, 4, 5), (2, 3, 3, 2)),
    "conv 2d valid, bias": conv((2, 3, 4, 5), (2, 3, 3, 2), (2,), padding="VALID"),
    "conv 2d strided, dilated": conv(
        (2, 2, 5, 6), (2, 2, 2, 3), strides=(1, 2), padding=((2, 1), (0, 2)), rhs_dilation=(2, 1)
    ),
    "conv 2d transposed": conv(
        (2, 2, 3, 3), (2, 2, 2, 3), padding=((1, 1), (-1, 2)), lhs_dilation=(2, 3), strides=(1, 2)
    ),
    "conv 2d channels last, bias": conv(
        (2, 4, 5, 3), (3, 2, 3, 2), (1, 1, 2), strides=(2, 1), dimension_numbers=("NHWC", "HWIO", "NHWC")
    ),
    "conv 2d mixed axes, unbatched, bias": conv(
        (3, 4, 5), (3, 2, 3, 2), (2,), batch=3, dimension_numbers=("CHWN", "HOIW", "WCHN")
    ),
    "conv 2d grouped, bias": conv((2, 4, 3, 3), (6, 2, 2, 2), (6,), feature_group_count=2),
    "conv 2d depthwise, channels last": conv(
        (3, 3, 4), (2, 2, 1, 4), feature_group_count=4, dimension_numbers=("NHWC", "HWIO", "NHWC")
    ),
    "conv 1d batch-grouped, bias": conv((4, 3, 5), (6, 3, 2), (6,), batch_group_count=2),
    "conv 3d, bias": conv((1, 2, 3, 3, 2), (2, 2, 2, 2, 2), (2,)),
    "conv 3d unbatched, strided": conv((2, 3, 3, 4), (2, 2, 2, 1, 2), strides=(2,), padding="SAME_LOWER"),
    "conv, functions": Op(
        lambda x, w: bt.conv(x, w, kernel_fn=jnp.tanh),
        lambda x, w: lax.conv_general_dilated(x, jnp.tanh(w), (1,), "SAME"),
        ((2, 3, 4),),
        ((2, 3, 2),),
        linear=False,
    ),
    "sparse CSR of brainevent": sparse(counted(brainevent.CSR.fromdense(DENSE))),
    "sparse CSC of brainevent": sparse(counted(brainevent.CSC.fromdense(DENSE)), (2,)),
    "sparse CSR of brainunit": sparse(counted(u.sparse.CSR.fromdense(DENSE)), (2, 2), (4,)),
    "sparse CSC of brainunit": sparse(counted(u.sparse.CSC.fromdense(DENSE))),
    "sparse COO of brainunit": sparse(counted(u.sparse.COO.fromdense(DENSE)), (2,)),
    "sparse BCOO, padded": sparse(counted(BCOO.fromdense(DENSE, nse=7)), (2,), (4,)),
    "sparse BCSR": sparse(counted(BCSR.fromdense(DENSE))),
    "sparse csc of scipy": sparse(counted(scipy.sparse.csc_array(DENSE)), (2,)),
    "sparse, one weight": Op(
        lambda x, w, matrix=BCSR.fromdense(DENSE): bt.sparse_matmul(
            x, w, sparse_mat=matrix, weight_fn=jnp.tanh
        ),
        lambda x, w: x @ (jnp.tanh(w) * (DENSE != 0).astype(w.dtype)),
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
    return compiled(lambda *a: (of(op.marked)(*a), of(op.plain)(*a)))(*args)


def differentiable(op: Op, data: list[Any], weights: list[Any]) -> tuple[int, ...]:
    operands = [*data, *weights]
    return tuple(i for i, v in enumerate(operands) if jnp.issubdtype(v.dtype, jnp.inexact))


def value(op: Op) -> tuple[Any, Any]:
    data, weights = op.operands()
    y = op.marked(*data, *weights), compiled(op.marked)(*data, *weights)
    return y, (op.plain(*map(jnp.asarray, (*data, *weights))),) * 2


def derivatives(op: Op) -> tuple[Any, Any]:
    """The jvp, the gradient, and the jvp of the gradient."""
    data, weights = op.operands()
    live = differentiable(op, data, weights)

    def of(f: Callable[..., Any]) -> Callable[..., Any]:
        def results(*args: Any) -> Any:
            def at(*vals: Any) -> Any:
                full = list(args)
                for i, v in zip(live, vals, strict=True):
                    full[i] = v
                return f(*full)

            def loss(*vals: Any) -> Any:
                return jnp.sum(jnp.sin(at(*vals)))

            primals = [args[i] for i in live]
            tangents = [jnp.cos(p) for p in primals]
            grad = jax.grad(loss, tuple(range(len(live))))
            return jax.jvp(at, primals, tangents), jax.jvp(grad, primals, tangents)

        return results

    return on_both(op, of, *data, *weights)


def transpose(op: Op) -> tuple[Any, Any]:
    if not op.linear:
        pytest.skip("not linear")
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
    """Over data, over weights by their last axis, over one weight, over both, and nested."""
    (data, weights), (data2, weights2), (data3, weights3) = op.operands(), op.operands(2), op.operands(3, 2)
    over_data, over_weights, over_one = axes(op)
    last = [np.moveaxis(w, 0, -1) for w in weights2]
    by_last = tuple(None if a is None else -1 for a in over_weights)

    def of(f: Callable[..., Any]) -> Callable[..., Any]:
        def results(data: Any, weights: Any, data2: Any, weights2: Any, last: Any, both: Any) -> Any:
            ys = [
                jax.vmap(f, by_last, out_axes=-1)(*data, *last),
                jax.vmap(f, over_one)(*data, weights2[0], *weights[1:]),
                jax.vmap(jax.vmap(f))(*both),
            ]
            if data:
                ys += [
                    jax.vmap(f, over_data)(*data2, *weights),
                    jax.vmap(jax.vmap(f, over_data, 1), over_weights)(*data2, *weights2),
                ]
            return ys

        return results

    return on_both(op, of, data, weights, data2, weights2, last, [*data3, *weights3])


def control_flow(op: Op) -> tuple[Any, Any]:
    """A `checkpoint` in a `cond` in a `scan`, and its gradient."""
    data2, weights = op.operands(2)[0], op.operands()[1]

    def of(f: Callable[..., Any]) -> Callable[..., Any]:
        def run(weights: Any, data: Any) -> Any:
            def step(odd: Any, data: Any) -> Any:
                g = jax.checkpoint(f)
                return ~odd, lax.cond(odd, lambda w: -f(*data, *w), lambda w: g(*data, *w), weights)

            return jnp.sin(lax.scan(step, jnp.array(False), data, length=2)[1])

        def results(*args: Any) -> Any:
            y, pull = jax.vjp(lambda w: run(w, *args[1:]), args[0])
            return y, pull(y)

        return results

    return on_both(op, of, weights, data2)


def dtypes(op: Op) -> tuple[Any, Any]:
    kinds = (jnp.float32, jnp.float64, jnp.bfloat16, jnp.float16, jnp.complex64)
    operands = [sum(op.operands(dtype=d), []) for d in kinds]
    got, want = on_both(op, lambda f: lambda all_: [f(*a) for a in all_], operands)
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
    got = compiled(op.marked)(*data, *weights)
    assert u.get_unit(got) == unit
    return u.get_mantissa(got), op.plain(*map(jnp.asarray, bare))


def letters(op: Op) -> tuple[Any, Any]:
    """The contracted instant term is the gradient: contract(g, instant(J)) = vjp(g * J)."""
    (data, weights), (data2, weights2) = op.operands(), op.operands(2)
    f, (over_data, over_weights, over_one) = op.marked, axes(op)
    sites = [
        (f, [*data, *weights]),
        (jax.vmap(f, over_weights), [*data, *weights2]),
        (jax.vmap(f, over_one), [*data, weights2[0], *weights[1:]]),
        (
            jax.vmap(jax.vmap(f, over_one), over_weights),
            [*data, *op.operands(2, 3)[1]][: len(data) + 1] + weights2[1:],
        ),
    ]
    if data:
        sites += [
            (jax.vmap(f, over_data), [*data2, *weights]),
            (jax.vmap(jax.vmap(f, over_data), over_weights), [*data2, *weights2]),
        ]
    functions = [g for g, _ in sites]
    results = compiled(lambda args: [through_letters(g, *a) for g, a in zip(functions, args, strict=True)])
    got, want = zip(*results([a for _, a in sites]), strict=True)
    return got, want


def through_letters(f: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    eqn, operands = site(f, *args)
    prim, params, y = eqn.primitive, eqn.params, eqn.outvars[0].aval
    first = len(operands) - len(params["names"])
    inputs, weights = operands[:first], operands[first:]
    g, J = (jnp.asarray(rng.normal(size=y.shape)) for _ in range(2))

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


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", TABLE)
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
