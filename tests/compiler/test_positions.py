"""The positions analysis against the pattern of non-zeros of the Jacobian, on random programs.

A program is a chain of steps on one array. All of them map positive numbers to positive numbers, and no
derivative is negative, so that nothing cancels: a zero in the Jacobian is a path that is not there.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

import braintrace
from braintrace._compiler.positions import Positions
from braintrace._compiler.program import Program, Var, read_program
from braintrace._compiler.reach import Reach

Step = Callable[[Any], Any]
MAX_SIZE = 16  # elements, after any step
# each program runs once, so nearly all of the time goes into compiling it
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def squash(x):
    """Unlike `tanh`, steep enough to have a derivative everywhere."""
    return x / (1 + x)


@jax.custom_jvp
def custom(x):
    return jnp.where(x > 0, squash(x), x)


custom.defjvps(lambda t, ans, x: 0.5 * t)

ELEMENT_WISE: dict[str, Step] = {
    "squash": squash,
    "square": lambda x: 0.5 * x + 0.1 * x**2,
    "jit": jax.jit(lambda x: jnp.log1p(x) * x),
    "custom_jvp": custom,
}


def axis_of(draw: Any, x: Any) -> int:
    return draw(st.integers(0, x.ndim - 1))


def weights(shape: Sequence[int]) -> Any:
    """Positive numbers, all different."""
    return jnp.asarray(0.2 + np.random.RandomState(0).rand(*shape))


# -- steps whose links are exact: `step(draw, x)` returns a function of x -------------------------------


def element_wise(draw: Any, x: Any) -> Step:
    return ELEMENT_WISE[draw(st.sampled_from(sorted(ELEMENT_WISE)))]


def reshape(draw: Any, x: Any) -> Step:
    shapes = [s for s in [(x.size,), (2, -1), (-1, 2), (3, -1), (2, 2, -1)] if x.size % abs(np.prod(s)) == 0]
    shape = draw(st.sampled_from(shapes))
    return lambda x: x.reshape(shape)


def transpose(draw: Any, x: Any) -> Step:
    order = draw(st.permutations(range(x.ndim)))
    return lambda x: jnp.transpose(x, order)


def cut(draw: Any, x: Any) -> Step:
    axis = axis_of(draw, x)
    n = x.shape[axis]
    start = draw(st.integers(0, n - 1))
    stop, stride = draw(st.integers(start + 1, n)), draw(st.integers(1, 3))
    return lambda x: lax.slice_in_dim(x, start, stop, stride, axis)


def pad(draw: Any, x: Any) -> Step:
    if x.size > MAX_SIZE // 2:
        return lambda x: x
    config = []
    for n in x.shape:
        low, high, inside = draw(st.integers(-1, 2)), draw(st.integers(0, 1)), draw(st.integers(0, 1))
        config.append((max(low, 1 - n), high, inside))
    return lambda x: lax.pad(x, jnp.ones((), x.dtype), config)


def reverse(draw: Any, x: Any) -> Step:
    axis = axis_of(draw, x)
    return lambda x: jnp.flip(x, axis)


def roll(draw: Any, x: Any) -> Step:
    axis, shift = axis_of(draw, x), draw(st.integers(0, 3))
    return lambda x: jnp.roll(x, shift, axis)


def roll_added(draw: Any, x: Any) -> Step:
    move = roll(draw, x)
    return lambda x: x + 0.3 * move(x)


def concatenate(draw: Any, x: Any) -> Step:
    axis, twice = axis_of(draw, x), draw(st.booleans())
    return lambda x: jnp.concatenate(
        [x, squash(x) if twice else weights(x.shape), 2 * x[:1]] if axis == 0 else [x, 2 * x], axis
    )


def stack(draw: Any, x: Any) -> Step:
    axis = draw(st.integers(0, x.ndim))
    return lambda x: jnp.stack([x, weights(x.shape)], axis)


def tile(draw: Any, x: Any) -> Step:
    reps = (1,) * (x.ndim - 1) + (2,)
    return lambda x: jnp.tile(x, reps)


def split(draw: Any, x: Any) -> Step:
    if x.shape[-1] % 2:
        return lambda x: x

    def halves(x):
        a, b = jnp.split(x, 2, -1)
        return a * b

    return halves


def broadcast(draw: Any, x: Any) -> Step:
    axis = draw(st.integers(0, x.ndim))
    return lambda x: jnp.broadcast_to(jnp.expand_dims(x, axis), (*x.shape[:axis], 2, *x.shape[axis:]))


def reduce(draw: Any, x: Any) -> Step:
    axis, op = axis_of(draw, x), draw(st.sampled_from([jnp.sum, jnp.mean, jnp.prod]))
    keep = draw(st.booleans()) or x.ndim == 1
    return lambda x: op(x, axis, keepdims=keep)


def mean_added(draw: Any, x: Any) -> Step:
    axis = axis_of(draw, x)
    return lambda x: x + 0.1 * x.mean(axis, keepdims=True)


def gather(draw: Any, x: Any) -> Step:
    axis = axis_of(draw, x)
    n = x.shape[axis]
    indices = np.array(draw(st.lists(st.integers(-n, n - 1), min_size=1, max_size=4)))
    return lambda x: jnp.take(x, indices, axis, mode="wrap")


def gather_points(draw: Any, x: Any) -> Step:
    count = draw(st.integers(1, 4))
    indices = tuple(np.array([draw(st.integers(0, n)) for _ in range(count)]) for n in x.shape)
    mode = draw(st.sampled_from(["fill", "clip"]))
    return lambda x: x.at[indices].get(mode=mode, fill_value=1.0)


def gather_each(draw: Any, x: Any) -> Step:
    """Other indices in each row."""
    if x.ndim < 2:
        return lambda x: x
    indices = np.array([draw(st.integers(0, x.shape[1] - 1)) for _ in range(x.shape[0])])
    if draw(st.booleans()):
        return lambda x: jax.vmap(lambda row, i: row[i])(x, indices)[:, None]
    return lambda x: jax.vmap(lambda row, i: row.at[i].set(squash(row[0])))(x, indices)


def scatter(draw: Any, x: Any) -> Step:
    n = x.shape[0]
    indices = np.array(draw(st.lists(st.integers(0, n), min_size=1, max_size=3, unique=True)))
    how = draw(st.sampled_from(["set", "add", "multiply"]))

    def put(x):
        updates = jnp.stack([squash(x[-1])] * len(indices))
        return getattr(x.at[indices], how)(updates, unique_indices=True)

    return put


def scatter_rows(draw: Any, x: Any) -> Step:
    start = draw(st.integers(0, 2))
    return lambda x: lax.dynamic_update_slice(
        jnp.ones((x.shape[0] + 1, *x.shape[1:]), x.dtype), x, (start,) + (0,) * (x.ndim - 1)
    )


def dynamic_slice(draw: Any, x: Any) -> Step:
    starts = [draw(st.integers(0, n)) for n in x.shape]
    sizes = [draw(st.integers(1, n)) for n in x.shape]
    return lambda x: lax.dynamic_slice(x, starts, sizes)


def matmul(draw: Any, x: Any) -> Step:
    m = draw(st.integers(1, 4))
    return lambda x: x @ weights((x.shape[-1], m))


def product_with_itself(draw: Any, x: Any) -> Step:
    if x.ndim != 1 or x.size > 4:
        return lambda x: jnp.sum(x * squash(x), -1, keepdims=True)
    return lambda x: jnp.outer(x, x)


def batched_product(draw: Any, x: Any) -> Step:
    return lambda x: jnp.einsum("...i,...i->...", x, squash(x))[..., None]


def pool(draw: Any, x: Any) -> Step:
    window = (1,) * (x.ndim - 1) + (min(2, x.shape[-1]),)
    stride = (1,) * (x.ndim - 1) + (draw(st.integers(1, 2)),)
    padding = draw(st.sampled_from(["VALID", "SAME"]))
    return lambda x: lax.reduce_window(x, 0.0, lax.add, window, stride, padding)


def scan(draw: Any, x: Any) -> Step:
    length, back = draw(st.integers(1, 3)), draw(st.booleans())
    move = draw(
        st.sampled_from([squash, lambda c: jnp.roll(c, 1, 0), lambda c: c + 0.1 * c.sum(0, keepdims=True)])
    )

    def run(x):
        carry, ys = lax.scan(lambda c, _: (move(c), c[0]), x, length=length, reverse=back)
        return carry if not back else jnp.concatenate([carry, ys])

    return run


def scan_over(draw: Any, x: Any) -> Step:
    back = draw(st.booleans())

    def run(x):
        last, ys = lax.scan(
            lambda c, row: (0.5 * c + row, squash(row)), jnp.ones(x.shape[1:], x.dtype), x, reverse=back
        )
        return jnp.concatenate([last[None], ys])

    return run


def fori_loop(draw: Any, x: Any) -> Step:
    """A counter that is known in each iteration."""
    n = x.shape[0]
    return lambda x: lax.fori_loop(0, min(n, 3), lambda i, c: c.at[i].set(squash(x[n - 1 - i])), x)


EXACT = [
    *[element_wise, reshape, transpose, cut, pad, reverse, roll, roll_added, concatenate, stack, tile, split],
    *[
        broadcast,
        reduce,
        mean_added,
        gather,
        gather_points,
        gather_each,
        scatter,
        scatter_rows,
        dynamic_slice,
        matmul,
    ],
    *[product_with_itself, batched_product, pool, scan, scan_over, fori_loop],
]


# -- steps that only bound where things go -------------------------------------------------------------


def cumulative(draw: Any, x: Any) -> Step:
    axis, op = (
        axis_of(draw, x),
        draw(st.sampled_from([lax.cumsum, lax.cumprod, lax.cummax, lax.cumlogsumexp])),
    )
    return lambda x: op(x, axis)


def sort(draw: Any, x: Any) -> Step:
    axis = axis_of(draw, x)
    return lambda x: jnp.sort(x, axis)


def top_k(draw: Any, x: Any) -> Step:
    return lambda x: lax.top_k(x, 1)[0]


def select(draw: Any, x: Any) -> Step:
    move = roll(draw, x)
    return lambda x: jnp.where(x > 0.7, x, move(x))


def largest(draw: Any, x: Any) -> Step:
    axis = axis_of(draw, x)
    return lambda x: jnp.max(x, axis, keepdims=True)


def max_pool(draw: Any, x: Any) -> Step:
    window = (1,) * (x.ndim - 1) + (min(2, x.shape[-1]),)
    return lambda x: lax.reduce_window(x, -jnp.inf, lax.max, window, window, "SAME")


def index_from_data(draw: Any, x: Any) -> Step:
    axis = axis_of(draw, x)
    return lambda x: lax.dynamic_slice_in_dim(x, jnp.argmax(x.ravel()), 1, axis)


def scatter_from_data(draw: Any, x: Any) -> Step:
    return lambda x: x.at[jnp.argmin(x.ravel()) % x.shape[0]].set(2 * x[0])


def cond(draw: Any, x: Any) -> Step:
    move, mean = roll(draw, x), mean_added(draw, x)
    return lambda x: lax.cond(x.sum() > 2.0, move, lambda x: x if x.ndim > 1 else mean(x), x)


def while_loop(draw: Any, x: Any) -> Step:
    move = roll(draw, x)

    def run(x):
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, move(c[1])), (0, x))[1]

    return run


def while_to_the_mean(draw: Any, x: Any) -> Step:
    return lambda x: lax.while_loop(
        lambda c: c.sum() < 5.0, lambda c: c + jnp.concatenate([c[-1:], c[:-1]]), x
    )


def convolution(draw: Any, x: Any) -> Step:
    def run(x):
        row = x.reshape(1, 1, -1)
        return lax.conv_general_dilated(row, weights((1, 1, 2)), (1,), "SAME").reshape(x.shape)

    return run


def cholesky(draw: Any, x: Any) -> Step:
    return lambda x: x * jnp.linalg.cholesky(jnp.eye(2, dtype=x.dtype) * x.sum())[1, 1]


def fft(draw: Any, x: Any) -> Step:
    return lambda x: jnp.abs(jnp.fft.fft(x, axis=-1)) + 0.1


BOUNDED = [
    *[cumulative, sort, top_k, select, largest, max_pool, index_from_data, scatter_from_data, cond],
    *[while_loop, while_to_the_mean, convolution, cholesky, fft],
]


# -- the two sides -------------------------------------------------------------------------------------


class Chain:
    def __init__(self, steps: Sequence[tuple[str, Step]]) -> None:
        self.steps = steps

    def __call__(self, x: Any) -> Any:
        for _, step in self.steps:
            x = step(x)
        return 1.0 * x

    def __repr__(self) -> str:
        return " > ".join(name for name, _ in self.steps)


@st.composite
def programs(draw: Any, steps: Sequence[Callable[..., Step]], length: int) -> tuple[Step, Any]:
    x = jnp.asarray(
        0.3 + np.random.RandomState(1).rand(*draw(st.sampled_from([(4,), (5,), (2, 3), (3, 2), (2, 2, 2)])))
    )
    shape, chain = x, []
    for make in draw(st.lists(st.sampled_from(steps), min_size=1, max_size=length)):
        step = make(draw, shape)
        after = jax.eval_shape(step, shape)
        if 0 < after.size <= MAX_SIZE and 0 < after.ndim <= 4:
            chain.append((make.__name__, step))
            shape = after

    return Chain(chain), x


def analyse(f: Step, x: Any) -> tuple[Reach, Reach]:
    """What the elements of x reach, and where the elements of f(x) come from."""
    program: Program = read_program(jax.make_jaxpr(f)(x))
    (inp,), (out,) = program.inputs, program.outputs
    assert isinstance(out, Var)
    positions = Positions(program)

    def numbers(var: Var) -> Reach:
        return Reach.at(np.arange(var.aval.size).reshape(var.aval.shape))

    reached, _ = positions.reaches({out: numbers(out)})
    came = positions.sources({inp: numbers(inp)}, {})
    return (
        reached.get(inp, Reach.empty(inp.aval.shape)),
        came.get(out, Reach.empty(out.aval.shape)),
    )


def nonzeros(f: Step, x: Any) -> np.ndarray:
    """Whether each element of f(x) depends on each element of x."""
    jacobian = jax.jit(jax.jacfwd(f), compiler_options=QUICKLY)(x)
    assert np.all(np.isfinite(jacobian))
    return np.asarray(jacobian).reshape(-1, x.size) != 0


def check(reach: Reach, pattern: np.ndarray, exact: bool) -> None:
    """`pattern[p, k]`: element k really reaches position p."""
    low, high, direct = (a.ravel() for a in (reach.lowest, reach.highest, reach.direct))
    for k in range(pattern.shape[1]):
        found = np.flatnonzero(pattern[:, k])
        if exact:
            assert (found.size == 0) == (high[k] < 0)
            if found.size:
                assert (low[k], high[k]) == (found[0], found[-1])
        elif found.size:
            assert low[k] <= found[0] <= found[-1] <= high[k]
        assert direct[k] == -1 or low[k] <= direct[k] <= high[k]
        if low[k] == high[k]:
            assert direct[k] == low[k]


def direct(low: int, high: int) -> Reach:
    ends = [np.array([[end], [end]], np.int32) for end in (low, high)]
    return Reach(*ends)


readers = st.one_of(
    st.just(Reach.empty((1,))),
    st.integers(0, 3).map(lambda p: direct(p, p)),
    st.tuples(st.integers(0, 3), st.integers(1, 3)).map(lambda r: direct(r[0], r[0] + r[1])),
)


@given(st.lists(readers, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_the_order_of_readers_does_not_matter(found, random):
    shuffled = random.sample(found, len(found))
    in_order, any_order = functools.reduce(operator.or_, found), functools.reduce(operator.or_, shuffled)
    assert in_order == any_order
    single = {int(r.lowest[0]) for r in found if r.lowest[0] == r.highest[0]}
    assert in_order.direct[0] == (single.pop() if len(single) == 1 else -1)


options = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def window(x):
    return lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), "VALID")


def window_of_two(x):
    add = lambda a, b: (a[0] + b[0], a[1] + b[1])
    return lax.reduce_window((x, x), (0.0, 0.0), add, (1, 2), (1, 1), "VALID")[1]


def largest_of_each_column(x):
    return lax.approx_max_k(x, 1, reduction_dimension=0)[0]


def roll_in_a_rule(x):
    """A function whose derivative rule moves elements and uses a marked op."""

    @jax.custom_vjp
    def f(x):
        return 2 * x

    f.defvjp(lambda x: (f(x), None), lambda _, g: (braintrace.element_wise(jnp.roll(g, 1, 1)),))
    return f(x)


@pytest.mark.parametrize(
    ("f", "like"),  # JAX cannot map a window of two over a batch
    [(window_of_two, window), (largest_of_each_column, largest_of_each_column)],
)
def test_bounds_of_one_step(f, like):
    x = 0.3 + jnp.asarray(np.random.RandomState(1).rand(2, 3))
    pattern = nonzeros(like, x)
    reached, came = analyse(f, x)
    check(reached, pattern, exact=False)
    check(came, pattern.T, exact=False)


def test_marked_op_in_a_derivative_rule():
    reached, came = analyse(roll_in_a_rule, jnp.ones((2, 3)))
    assert reached.direct.tolist() == [[2, 0, 1], [5, 3, 4]]
    assert came.direct.tolist() == [[1, 2, 0], [4, 5, 3]]


@pytest.mark.slow
@options
@given(programs(EXACT, 6))
def test_exact(program):
    f, x = program
    pattern = nonzeros(f, x)
    reached, came = analyse(f, x)
    check(reached, pattern, exact=True)
    check(came, pattern.T, exact=True)


@pytest.mark.slow
@options
@given(programs([*BOUNDED, *EXACT], 6))
def test_bounds(program):
    f, x = program
    pattern = nonzeros(f, x)
    reached, came = analyse(f, x)
    check(reached, pattern, exact=False)
    check(came, pattern.T, exact=False)
