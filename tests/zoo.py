"""A table of small models, with what the compiler must find in each written out.

`CASES` maps names to cases. A case is a function `f(p, s, x) -> (new states, output)` of parameters and
states by name; `case`, `tail` and `weight` register one. Parameters and states are drawn from a fixed seed,
in JAX's default floating type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax import lax

import braintrace as bt

Path = tuple[str, ...]
Relation = tuple[str, Path, list[Path], dict[Path, str]]

CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """A model, and what the compiler must find in it.

    `relations` are in program order: op, path of the weight, hidden paths that it feeds, and how each
    hidden state is reached. `positions[relation, group]` is the map from positions of `y` to positions of
    the group's states (-1: none), or "identity", or `Broadcast`: the map from hidden positions to those
    of `y`. `exact`: the local Jacobian is all of it, so that online gradients equal BPTT.
    """

    name: str
    build: Callable[[], brainstate.nn.Module]
    x: Callable[[np.random.RandomState], Any]
    groups: list[list[Path]]
    relations: list[Relation]
    positions: dict[tuple[int, int], Any] | None = None
    exact: bool | None = None
    kind: str = ""


@dataclass(frozen=True)
class Broadcast:
    """A trace on the hidden positions: the position of `y` that each comes from."""

    map: Any


class Step(brainstate.nn.Module):
    """A model made of one function, `f(p, s, x) -> (new states, output)`."""

    def __init__(self, f: Callable[..., Any], params: dict[str, Any], states: dict[str, Any]) -> None:
        super().__init__()
        self.f, self.param_names, self.state_names = f, list(params), list(states)
        draw = Draw(np.random.RandomState(0))
        for name, spec in params.items():
            setattr(self, name, brainstate.ParamState(draw(spec, 0.5)))
        for name, spec in states.items():
            state = spec(draw) if callable(spec) else brainstate.HiddenState(draw(spec, 0.3))
            setattr(self, name, state)

    def update(self, x: Any) -> Any:
        p = SimpleNamespace(**{k: getattr(self, k).value for k in self.param_names})
        s = SimpleNamespace(**{k: _get(getattr(self, k)) for k in self.state_names})
        new, out = self.f(p, s, x)
        for name, value in new.items():
            _set(getattr(self, name), value)
        return out


def _get(state: brainstate.State) -> Any:
    if isinstance(state, brainstate.HiddenTreeState):
        return SimpleNamespace(**{k: state.get_value(k) for k in state.name2index})
    return state.value


def _set(state: brainstate.State, value: Any) -> None:
    if isinstance(state, brainstate.HiddenTreeState):
        state.set_value(value)
    else:
        state.value = value


class Draw:
    """Random arrays by shape: `4`, `(2, 3)`, or a dict of them; an array is taken as it is."""

    def __init__(self, rng: np.random.RandomState) -> None:
        self.rng = rng

    def __call__(self, spec: Any, scale: float = 0.3) -> Any:
        if isinstance(spec, dict):
            return {k: self(v, scale) for k, v in spec.items()}
        if isinstance(spec, int | tuple):
            shape = (spec,) if isinstance(spec, int) else spec
            return jnp.asarray(scale * self.rng.randn(*shape), jnp.result_type(float))
        return spec


def _path(name: str) -> Path:
    return tuple(name.split("."))


def relations_of(text: str) -> list[Relation]:
    """`"matmul w: a b~; ..."`: an op, its weight and the states that it feeds.

    `b~` is reached through another marked op too.
    """
    found: list[Relation] = []
    for part in filter(None, text.split("; ")):
        head, _, states = part.partition(": ")
        op, path = head.split()
        classes = {_path(n.rstrip("~")): "mixed" if n.endswith("~") else "all_direct" for n in states.split()}
        found.append((f"etp_{op}", _path(path), list(classes), classes))
    return found


def case(
    kind: str,
    name: str,
    relations: str,
    *,
    groups: str = "h",
    x: Any = 3,
    positions: dict[Any, Any] | None = None,
    exact: bool = True,
    **shapes: Any,
) -> Callable[[Callable[..., Any]], None]:
    """Register a model; groups as `"c h | r"`, positions by relation, "identity" where not given.

    `shapes` are those of the parameters and hidden states (`w=(3, 4)`, `h=4` where none is given); a
    function makes a state of another kind.
    """
    hidden = groups.replace("|", " ").split()
    states = {k: v for k, v in shapes.items() if k in hidden or callable(v)} or {"h": 4}
    params = {k: v for k, v in shapes.items() if k not in states} or {"w": (3, 4)}
    found = relations_of(relations)
    maps = {(k if isinstance(k, tuple) else (k, 0)): v for k, v in (positions or {}).items()}

    def register(f: Callable[..., Any]) -> None:
        assert name not in CASES
        CASES[name] = Case(
            name=name,
            build=lambda: Step(f, params, states),
            x=x if callable(x) else lambda rng: Draw(rng)(x, 1.0),
            groups=[[_path(n) for n in group.split()] for group in groups.split("|")],
            relations=found,
            positions={(i, 0): "identity" for i in range(len(found))} | maps,
            exact=exact,
            kind=kind,
        )

    return register


def tail(
    name: str, fn: Any, *, y: int = 4, h: Any = 4, x: Any = 3, to: Any = "identity", **options: Any
) -> None:
    """`h = 0.8 h + fn(y)` with `y = x @ w`; `to` is where `y` goes (None: nowhere to follow it to)."""
    relations, positions = ("", {}) if to is None else ("matmul w: h", {0: to})

    @case("tail", name, relations, x=x, w=(3, y), h=h, positions=positions, **options)
    def _(p, s, x):
        h = 0.8 * s.h + fn(bt.matmul(x, p.w))
        return {"h": h}, jnp.tanh(h)


def weight(name: str, fn: Any, path: str = "w", *, batched: bool = False, **params: Any) -> None:
    """`h = 0.9 h + x @ fn(parameters)`."""
    x, h = ((2, 3), (2, 4)) if batched else (3, 4)

    @case("weight", name, f"matmul {path}: h", x=x, **(params or {"w": (3, 4)}), h=h)
    def _(p, s, x):
        h = 0.9 * s.h + bt.matmul(x, fn(p))
        return {"h": h}, jnp.tanh(h)


# -- plain cells ---------------------------------------------------------------------------------------


@case("cell", "leaky", "matmul w: h")
def _(p, s, x):
    h = 0.9 * s.h + bt.matmul(x, p.w)
    return {"h": h}, jnp.tanh(h)


@case("cell", "leaky_batched", "matmul w: h", x=(2, 3), h=(2, 4))
def _(p, s, x):
    h = 0.9 * s.h + bt.matmul(x, p.w)
    return {"h": h}, jnp.tanh(h)


@case("cell", "leaky_three_axes", "matmul w: h", x=(2, 3, 3), h=(2, 3, 4))
def _(p, s, x):
    h = 0.9 * s.h + bt.matmul(x, p.w)
    return {"h": h}, jnp.tanh(h)


@case("cell", "leaky_nonlinear", "matmul w: h", x=(2, 3), h=(2, 4))
def _(p, s, x):
    h = jnp.tanh(0.9 * s.h + jnp.sin(bt.matmul(x, p.w)))
    return {"h": h}, jnp.sin(h) * h


@case("cell", "rnn", "matmul wi: h; matmul wh: h", wi=(3, 4), wh=(4, 4), exact=False)
def _(p, s, x):
    h = jnp.tanh(bt.matmul(x, p.wi) + bt.matmul(s.h, p.wh))
    return {"h": h}, jnp.tanh(h)


@case("cell", "rnn_batched", "matmul w: h", x=(2, 3), w=(7, 4), h=(2, 4), exact=False)
def _(p, s, x):
    h = 0.5 * s.h + jnp.tanh(bt.matmul(jnp.concatenate([x, s.h], -1), p.w))
    return {"h": h}, jnp.tanh(h)


@case("cell", "gru", "matmul wz: h; matmul wh: h", wz=(7, 4), wr=(7, 4), wh=(7, 4), exact=False)
def _(p, s, x):
    xh = jnp.concatenate([x, s.h])
    z, r = jax.nn.sigmoid(bt.matmul(xh, p.wz)), jax.nn.sigmoid(bt.matmul(xh, p.wr))
    n = jnp.tanh(bt.matmul(jnp.concatenate([x, r * s.h]), p.wh))
    h = (1 - z) * s.h + z * n
    return {"h": h}, jnp.tanh(h)


@case(
    "cell",
    "gru_fused",
    "matmul wzr: h~; matmul wh: h",
    x=(2, 3),
    wzr=(6, 6),
    wh=(6, 3),
    h=(2, 3),
    positions={0: [[0, 1, 2, -1, -1, -1], [3, 4, 5, -1, -1, -1]]},
    exact=False,
)
def _(p, s, x):
    y = jax.nn.sigmoid(bt.matmul(jnp.concatenate([x, s.h], -1), p.wzr))
    z, r = jnp.split(y, 2, -1)
    n = jnp.tanh(bt.matmul(jnp.concatenate([x, r * s.h], -1), p.wh))
    h = (1 - z) * s.h + z * n
    return {"h": h}, jnp.tanh(h)


@case(
    "cell",
    "lstm",
    "matmul wi: c h; matmul wf: c h; matmul wg: c h; matmul wo: h",
    wi=(7, 4),
    wf=(7, 4),
    wg=(7, 4),
    wo=(7, 4),
    c=4,
    h=4,
    groups="c h",
    exact=False,
)
def _(p, s, x):
    xh = jnp.concatenate([x, s.h])
    i, f, g, o = (bt.matmul(xh, w) for w in (p.wi, p.wf, p.wg, p.wo))
    c = jax.nn.sigmoid(f) * s.c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return {"c": c, "h": h}, jnp.tanh(h)


@case(
    "cell",
    "lstm_fused",
    "matmul w: c h",
    x=(2, 3),
    w={"weight": (5, 8), "bias": 8},
    c=(2, 2),
    h=(2, 2),
    groups="c h",
    positions={0: [[0, 1] * 4, [2, 3] * 4]},
    exact=False,
)
def _(p, s, x):
    y = bt.matmul(jnp.concatenate([x, s.h], -1), p.w["weight"], p.w["bias"])
    i, f, g, o = jnp.split(y, 4, -1)
    c = jax.nn.sigmoid(f) * s.c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return {"c": c, "h": h}, jnp.tanh(h)


@case(  # `h` is written and never read: an output, not a hidden state
    "cell",
    "lstm_of_input",
    "matmul w: c",
    w=(3, 16),
    c=4,
    h=lambda draw: brainstate.HiddenState(draw(4)),
    groups="c",
    positions={0: [0, 1, 2, 3] * 3 + [-1] * 4},
)
def _(p, s, x):
    i, f, g, o = jnp.split(bt.matmul(x, p.w), 4)
    c = jax.nn.sigmoid(f) * s.c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return {"c": c, "h": h}, jnp.tanh(h)


@case("cell", "mini_gru", "matmul wz: h; matmul wh: h", wz=(3, 4), wh=(3, 4))
def _(p, s, x):
    z = jax.nn.sigmoid(bt.matmul(x, p.wz))
    h = (1 - z) * s.h + z * bt.matmul(x, p.wh)
    return {"h": h}, jnp.tanh(h)


@case(
    "cell",
    "mini_gru_fused",
    "matmul w: h",
    x=(2, 3),
    w=(3, 6),
    h=(2, 3),
    positions={0: [[0, 1, 2, 0, 1, 2], [3, 4, 5, 3, 4, 5]]},
)
def _(p, s, x):
    z, n = jnp.moveaxis(bt.matmul(x, p.w).reshape(2, 2, 3), 1, 0)
    h = (1 - jax.nn.sigmoid(z)) * s.h + jax.nn.sigmoid(z) * n
    return {"h": h}, jnp.tanh(h)


@case("cell", "rotation", "matmul wa: a; matmul wb: b", wa=(3, 4), wb=(3, 4), a=4, b=4, groups="a b")
def _(p, s, x):
    a = 0.6 * s.a - 0.7 * s.b + bt.matmul(x, p.wa)
    b = 0.7 * s.a + 0.6 * s.b + bt.matmul(x, p.wb)
    return {"a": a, "b": b}, jnp.tanh(a) * b


@case(
    "cell",
    "lru",
    "element_wise nu: re im; element_wise theta: re im; matmul w: re im; element_wise gamma: re im",
    nu=4,
    theta=4,
    w=(3, 8),
    gamma=4,
    re=4,
    im=4,
    groups="re im",
    positions={2: [0, 1, 2, 3] * 2},
)
def _(p, s, x):
    r, phi = jnp.exp(-jnp.exp(bt.element_wise(p.nu))), bt.element_wise(p.theta)
    a, b = r * jnp.cos(phi), r * jnp.sin(phi)
    y, g = bt.matmul(x, p.w), bt.element_wise(p.gamma, jnp.exp)
    re = a * s.re - b * s.im + g * y[:4]
    im = b * s.re + a * s.im + g * y[4:]
    return {"re": re, "im": im}, jnp.tanh(re - im)


def _complex(draw: Draw) -> brainstate.State:
    return brainstate.HiddenState(lax.complex(draw(4), draw(4)))


@case(
    "complex",
    "gain_of_complex",
    "matmul b: g z; matmul a: z",
    groups="g z",
    a=(3, 4),
    b=(3, 4),
    g=4,
    z=_complex,
)
def _(p, s, x):
    """A real state beside a complex one."""
    g = 0.9 * s.g + jnp.tanh(bt.matmul(x, p.b))
    z = lax.complex(0.7 * g, 0.4 * g) * s.z + bt.matmul(x, p.a).astype(s.z.dtype)
    return {"g": g, "z": z}, z.real + z.imag**2


@case("complex", "lru_complex", "element_wise nu: h; matmul wre: h", nu=4, wre=(3, 4), wim=(3, 4), h=_complex)
def _(p, s, x):
    r = jnp.exp(-jnp.exp(bt.element_wise(p.nu)))
    a = lax.complex(r * np.cos(0.5), r * np.sin(0.5))
    y = bt.matmul(x.astype(s.h.dtype), lax.complex(p.wre, p.wim))
    h = a * s.h + y
    return {"h": h}, jnp.tanh(h.real) + h.imag**2


# -- between op and state ------------------------------------------------------------------------------

tail("roll", lambda y: jnp.roll(y, 1), to=[1, 2, 3, 0])
tail("roll_batched", lambda y: jnp.roll(y, 2, -1), x=(2, 3), h=(2, 4), to=[[2, 3, 0, 1], [6, 7, 4, 5]])
tail("reverse", lambda y: y[::-1], to=[3, 2, 1, 0])
tail("reverse_batch", lambda y: jnp.flip(y, 0), x=(2, 3), h=(2, 4), to=[[4, 5, 6, 7], [0, 1, 2, 3]])
tail("permute", lambda y: y[np.array([2, 0, 3, 1])], to=[1, 3, 0, 2])
tail(
    "permute_columns", lambda y: y[:, np.array([2, 0, 1])], y=3, x=(2, 3), h=(2, 3), to=[[1, 2, 0], [4, 5, 3]]
)
tail("reshape", lambda y: y.reshape(2, 3), y=6, h=(2, 3))
tail("reshape_transpose", lambda y: y.reshape(2, 3).T.reshape(6), y=6, h=6, to=[0, 2, 4, 1, 3, 5])
tail("transpose", lambda y: y.T, y=4, x=(2, 3), h=(4, 2), to=[[0, 2, 4, 6], [1, 3, 5, 7]])
tail("slice", lambda y: y[1:5], y=6, to=[-1, 0, 1, 2, 3, -1])
tail("strided_slice", lambda y: y[::2], y=6, h=3, to=[0, -1, 1, -1, 2, -1])
tail("one_element", lambda y: y[2], h=(), to=[-1, -1, 0, -1])
tail("dynamic_slice", lambda y: lax.dynamic_slice(y, (1,), (2,)), h=2, to=[-1, 0, 1, -1])
tail("pad", lambda y: jnp.pad(y, (1, 2)), y=3, h=6, to=[1, 2, 3])
tail("interior_pad", lambda y: lax.pad(y, jnp.zeros((), y.dtype), [(0, 0, 1)]), y=3, h=5, to=[0, 2, 4])
tail("concatenate_zeros", lambda y: jnp.concatenate([jnp.zeros(2, y.dtype), y]), y=2, to=[2, 3])
tail("concatenate_twice", lambda y: jnp.concatenate([y, 2 * y]), y=2, to=Broadcast([0, 1, 0, 1]))
tail("stack", lambda y: jnp.stack([y, y**2]), y=3, h=(2, 3), to=Broadcast([[0, 1, 2], [0, 1, 2]]))
tail("gather_twice", lambda y: y[np.array([0, 1, 1, 0])], y=2, to=Broadcast([0, 1, 1, 0]))
tail("broadcast", lambda y: jnp.broadcast_to(y, (2, 4)), h=(2, 4), to=Broadcast([[0, 1, 2, 3], [0, 1, 2, 3]]))
tail(
    "broadcast_columns",
    lambda y: jnp.broadcast_to(y[:, None], (2, 3)),
    y=2,
    h=(2, 3),
    to=Broadcast([[0] * 3, [1] * 3]),
)
tail("broadcast_one", lambda y: jnp.broadcast_to(y, (4,)), y=1, to=Broadcast([0, 0, 0, 0]))
tail("tile", lambda y: jnp.tile(y, 3), y=2, h=6, to=Broadcast([0, 1] * 3))
tail("sum", lambda y: y.sum(0), x=(2, 3), to=[[0, 1, 2, 3], [0, 1, 2, 3]])
tail("sum_of_features", lambda y: y.sum(-1), x=(2, 3), h=2, to=[[0] * 4, [1] * 4])
tail("mean", lambda y: y.mean(), h=(), to=[0, 0, 0, 0])
tail("max", lambda y: y.max(-1), x=(2, 3), h=2, to=[[0] * 4, [1] * 4])
tail("logsumexp", lambda y: jax.nn.logsumexp(y, -1), x=(2, 3), h=2, to=[[0] * 4, [1] * 4])
tail("sum_of_halves", lambda y: y[:3] + y[3:] ** 2, y=6, h=3, to=[0, 1, 2, 0, 1, 2])
tail("glu", lambda y: y[:2] * jax.nn.sigmoid(y[2:]), y=4, h=2, to=[0, 1, 0, 1])
tail(
    "max_pool",
    lambda y: lax.reduce_window(y, -jnp.inf, lax.max, (2,), (2,), "VALID"),
    y=6,
    h=3,
    to=[0, 0, 1, 1, 2, 2],
)
tail(
    "average_pool",
    lambda y: lax.reduce_window(y.reshape(2, 4), 0.0, lax.add, (2, 2), (2, 2), "VALID") / 4,
    y=8,
    h=(1, 2),
    to=[0, 0, 1, 1, 0, 0, 1, 1],
)
tail("at_set", lambda y: jnp.zeros(5, y.dtype).at[np.array([4, 0, 2])].set(y), y=3, h=5, to=[4, 0, 2])
tail("at_add", lambda y: jnp.zeros(3, y.dtype).at[np.array([0, 0, 2, 1])].add(y), h=3, to=[0, 0, 2, 1])
tail("at_slice", lambda y: jnp.ones(5, y.dtype).at[1:4].add(y), y=3, h=5, to=[1, 2, 3])
tail("at_multiply", lambda y: y.at[1].multiply(2.0).at[np.array([0, 3])].set(0.0), to=[-1, 1, 2, -1])
tail("where", lambda y: jnp.where(np.array([True, False, True, True]), y, 0.1))
tail("where_positive", lambda y: jnp.where(y > 0, y, 0.1 * y) + jnp.clip(y, -1.0, 1.0), x=(2, 3), h=(2, 4))
tail("stop_gradient", lambda y: y * lax.stop_gradient(jnp.roll(y, 1)))
tail("segment_sum", lambda y: jax.ops.segment_sum(y, np.array([1, 0, 1, 2]), 3), h=3, to=[1, 0, 1, 2])
tail(
    "diagonal_matrix",
    lambda y: jnp.eye(3, dtype=y.dtype) * (1 + y[:, None]),
    y=3,
    h=(3, 3),
    to=Broadcast([[0] * 3, [1] * 3, [2] * 3]),
)
tail("batched_product", lambda y: jnp.einsum("bi,bi->b", y, jnp.cos(y)), x=(2, 3), h=2, to=[[0] * 4, [1] * 4])

tail("layer_norm", lambda y: (y - y.mean()) / jnp.sqrt(y.var() + 1e-5), exact=False)
tail(
    "layer_norm_batched",
    lambda y: (y - y.mean(-1, keepdims=True)) / (y.std(-1, keepdims=True) + 0.1),
    x=(2, 3),
    h=(2, 4),
    exact=False,
)
tail("layer_norm_of_many", lambda y: (y - y.mean()) / jnp.sqrt(y.var() + 1e-5), y=8, h=8, exact=False)
tail("layer_norm_rolled", lambda y: jnp.roll(y, 1) - y.mean(), to=[1, 2, 3, 0], exact=False)
tail("softmax", jax.nn.softmax, exact=False)
tail("cumsum", jnp.cumsum, exact=False)
tail("sort", jnp.sort, exact=False)
tail("solve", lambda y: jnp.linalg.solve(jnp.eye(4) + jnp.outer(y, y), jnp.arange(4.0)), exact=False)
tail("two_neighbours", lambda y: y + jnp.roll(y, 1), exact=False)
tail("three_neighbours", lambda y: jnp.roll(y, 1) + y + jnp.roll(y, -1), exact=False)
tail("plain_matrix", lambda y: y @ jnp.asarray(np.arange(16.0).reshape(4, 4) / 16, y.dtype), exact=False)
tail(
    "plain_matrix_of_other_shape",
    lambda y: y @ jnp.asarray(np.arange(8.0).reshape(2, 4) / 8, y.dtype),
    y=2,
    to=None,
    exact=False,
)
tail(
    "overlapping_pool",
    lambda y: lax.reduce_window(y, -jnp.inf, lax.max, (2,), (1,), "VALID"),
    y=5,
    to=None,
    exact=False,
)


@case("tail", "shift_from_data", "matmul w: h", exact=False)
def _(p, s, x):
    h = 0.8 * s.h + jnp.roll(bt.matmul(x, p.w), (x[0] > 0).astype(int))
    return {"h": h}, jnp.tanh(h)


@case(
    "tail",
    "concatenate_ops",
    "matmul w1: h; matmul w2: h",
    x=(2, 3),
    w1=(3, 1),
    w2=(3, 2),
    h=(2, 3),
    positions={0: [[0], [3]], 1: [[1, 2], [4, 5]]},
)
def _(p, s, x):
    y = jnp.concatenate([bt.matmul(x, p.w1), bt.matmul(x, p.w2)], -1)
    h = jnp.tanh(0.9 * s.h + y)
    return {"h": h}, jnp.tanh(h)


@case("tail", "two_groups", "matmul w: h m", h=4, m=(), groups="h | m", positions={(0, 1): [0, 0, 0, 0]})
def _(p, s, x):
    y = bt.matmul(x, p.w)
    h, m = 0.9 * s.h + y, 0.8 * s.m + jnp.mean(y**2)
    return {"h": h, "m": m}, jnp.tanh(h) * m


# -- weights that are made of parameters ---------------------------------------------------------------

_MASK = np.array([[1, 0, 1, 0], [0, 1, 1, 1], [1, 1, 0, 0]], bool)
_SIGN = np.array([[1.0], [-1.0], [1.0]])

weight("weight_tanh", lambda p: jnp.tanh(p.w))
weight("weight_scale", lambda p: 2.0 * p.w, batched=True)
weight("weight_mask", lambda p: jnp.where(_MASK, p.w, 0.0))
weight("weight_mask_product", lambda p: p.w * jnp.asarray(_MASK, p.w.dtype), batched=True)
weight("weight_transpose", lambda p: p.w.T, w=(4, 3))
weight("weight_slice", lambda p: p.w[1:4, ::2], w=(5, 8), batched=True)
weight("weight_concatenate", lambda p: jnp.concatenate([p.w1, p.w2]), "w1", w1=(1, 4), w2=(2, 4))
weight("weight_product", lambda p: p.w1 @ p.w2, "w1", w1=(3, 2), w2=(2, 4))
weight("weight_standardise", lambda p: (p.w - p.w.mean(0, keepdims=True)) / p.w.std(0, keepdims=True))
weight("weight_sign", lambda p: jnp.abs(p.w) * jnp.asarray(_SIGN, p.w.dtype), batched=True)
weight("weight_softplus", lambda p: jax.nn.softplus(p.w))
weight("weight_solve", lambda p: jnp.linalg.solve(jnp.eye(3) + 0.1 * p.m, p.w), "m", m=(3, 3), w=(3, 4))
weight("weight_reshape", lambda p: p.w.reshape(3, 4), w=12)
weight("weight_shared_rows", lambda p: jnp.broadcast_to(p.w, (3, 4)), w=(1, 4))
weight("weight_gather", lambda p: p.w[np.array([1, 0, 1])], w=(2, 4))
weight("weight_gain", lambda p: p.w["v"] * p.w["g"], w={"g": (1, 4), "v": (3, 4)}, batched=True)
weight("weight_norm", lambda p: p.w / jnp.linalg.norm(p.w))
weight("weight_of_scan", lambda p: lax.fori_loop(0, 2, lambda i, w: jnp.sin(w), p.w))
weight("weight_of_jit", lambda p: jax.jit(jax.checkpoint(jnp.tanh))(p.w))


@case("weight", "weight_fn", "matmul w: h", w={"weight": (3, 4), "bias": 4})
def _(p, s, x):
    h = 0.9 * s.h + bt.matmul(x, p.w["weight"], p.w["bias"], weight_fn=jnp.tanh, bias_fn=jnp.sin)
    return {"h": h}, jnp.tanh(h)


@case("weight", "bias_of_data", "matmul w: h")
def _(p, s, x):
    h = 0.9 * s.h + jnp.tanh(bt.matmul(x, p.w, jnp.resize(x, (4,))))
    return {"h": h}, jnp.tanh(h)


@case("weight", "weight_of_data", "matmul b: h", b=4)
def _(p, s, x):
    h = 0.9 * s.h + jnp.tanh(bt.matmul(x, jnp.outer(x, jnp.resize(x, (4,))), p.b))
    return {"h": h}, jnp.tanh(h)


@case("weight", "bias_of_state", "", exact=False)
def _(p, s, x):
    h = jnp.tanh(bt.matmul(x, p.w, 0.9 * s.h))
    return {"h": h}, jnp.tanh(h)


@case("weight", "factor_of_data", "", w=(3, 2), exact=False)
def _(p, s, x):
    h = 0.9 * s.h + jnp.tanh(bt.lora_matmul(x, p.w, jnp.outer(x[:2], jnp.resize(x, (4,)))))
    return {"h": h}, jnp.tanh(h)


@case("weight", "weight_also_plain", "matmul w: h")
def _(p, s, x):
    h = 0.9 * s.h + bt.matmul(x, p.w)
    return {"h": h}, jnp.tanh(h) + x @ p.w


@case(
    "weight",
    "weight_mask_in_a_state",
    "matmul v: h; matmul w: h",
    x=(2, 3),
    w=(3, 4),
    v=(2, 3, 4),
    h=(2, 4),
    mask=lambda draw: brainstate.State(jnp.asarray(_MASK)),
    gain=lambda draw: brainstate.ShortTermState(draw((3, 4), 1.0)),
    positions={0: np.tile(np.arange(8).reshape(1, 2, 4), (2, 1, 1))},
)
def _(p, s, x):
    """States that the step reads and never writes, in a weight and in the weights of a loop."""
    more = lax.scan(lambda y, v: (y + bt.matmul(x, v * s.gain), None), jnp.zeros_like(s.h), p.v)[0]
    h = 0.9 * s.h + bt.matmul(x, jnp.where(s.mask, p.w, 0.0)) + more
    return {"h": h}, jnp.tanh(h)


# -- one weight, several sites; several sites, one state -----------------------------------------------


@case("shared", "tied", "matmul w: h; matmul w: h", x=(2, 3), w=(3, 3), h=(2, 3))
def _(p, s, x):
    h = 0.9 * s.h + bt.matmul(x, p.w) * jnp.tanh(bt.matmul(x, p.w.T))
    return {"h": h}, jnp.tanh(h)


@case("shared", "tied_layers", "matmul w: a; matmul w: b", a=4, b=3, groups="a | b")
def _(p, s, x):
    a = 0.9 * s.a + bt.matmul(x, p.w)
    b = 0.8 * s.b + bt.matmul(jnp.tanh(a), p.w.T)
    return {"a": a, "b": b}, jnp.tanh(b)


@case("shared", "two_sites", "matmul w: h; matmul w: h")
def _(p, s, x):
    h = 0.9 * s.h + bt.matmul(x, p.w) + jnp.sin(bt.matmul(x**2, p.w))
    return {"h": h}, jnp.tanh(h)


@case(
    "shared",
    "two_sites_two_states",
    "matmul w: a; matmul w: b",
    a=4,
    b=(2, 4),
    groups="a | b",
    positions={1: Broadcast([[0, 1, 2, 3], [0, 1, 2, 3]])},
)
def _(p, s, x):
    a = 0.9 * s.a + bt.matmul(x, p.w)
    b = 0.8 * s.b + bt.matmul(x**2, p.w)[None] * jnp.ones((2, 1), x.dtype)
    return {"a": a, "b": b}, jnp.tanh(a)[None] * b


@case("shared", "same_call_twice", "matmul w: h; matmul w: h")
def _(p, s, x):
    call = jax.jit(bt.matmul)
    h = 0.9 * s.h + call(x, p.w) + jnp.sin(call(x, p.w))
    return {"h": h}, jnp.tanh(h)


@case("shared", "gated", "matmul w1: h; matmul w2: h", w1=(3, 4), w2=(3, 4))
def _(p, s, x):
    h = 0.9 * s.h + bt.matmul(x, p.w1) * bt.matmul(x, p.w2)
    return {"h": h}, jnp.tanh(h)


@case("shared", "gated_state", "matmul w1: h; matmul w2: h", w1=(3, 4), w2=(3, 4))
def _(p, s, x):
    h = jax.nn.sigmoid(bt.matmul(x, p.w1)) * jnp.sin(s.h) + bt.matmul(x, p.w2)
    return {"h": h}, jnp.tanh(h)


@case("shared", "squared", "matmul w: h")
def _(p, s, x):
    y = bt.matmul(x, p.w)
    h = 0.9 * s.h + y * y + y * s.h
    return {"h": h}, jnp.tanh(h)


# -- layers --------------------------------------------------------------------------------------------


@case(
    "layers",
    "two_layers",
    "matmul w1: a; matmul w2: b",
    w1=(3, 4),
    w2=(4, 2),
    a=4,
    b=2,
    groups="a | b",
)
def _(p, s, x):
    a = 0.9 * s.a + bt.matmul(x, p.w1)
    b = 0.8 * s.b + bt.matmul(jnp.tanh(a), p.w2)
    return {"a": a, "b": b}, jnp.tanh(b)


@case(  # the second layer has no memory, so nothing of the first is lost
    "layers",
    "second_layer_without_memory",
    "matmul w1: a",
    x=(2, 3),
    w1=(3, 4),
    w2=(4, 2),
    a=(2, 4),
    groups="a",
)
def _(p, s, x):
    a = 0.9 * s.a + bt.matmul(x, p.w1)
    return {"a": a}, jnp.tanh(bt.matmul(jnp.tanh(a), p.w2))


@case(
    "layers",
    "two_layers_of_one_shape",
    "matmul w1: a; matmul w2: b",
    x=(2, 3),
    w1=(3, 4),
    w2=(4, 4),
    a=(2, 4),
    b=(2, 4),
    groups="a | b",
    exact=False,
)
def _(p, s, x):
    a = 0.9 * s.a + bt.matmul(x, p.w1)
    b = jnp.tanh(0.8 * s.b + bt.matmul(jnp.tanh(a), p.w2))
    return {"a": a, "b": b}, jnp.tanh(b)


@case(
    "layers",
    "skip_of_input",
    "matmul w1: a; matmul w2: b; matmul w3: b",
    w1=(3, 4),
    w2=(4, 2),
    w3=(3, 2),
    a=4,
    b=2,
    groups="a | b",
    exact=False,
)
def _(p, s, x):
    a = 0.9 * s.a + bt.matmul(x, p.w1)
    b = 0.8 * s.b + bt.matmul(jnp.tanh(a), p.w2) * bt.matmul(x, p.w3)
    return {"a": a, "b": b}, jnp.tanh(b)


@case(
    "layers",
    "residual",
    "matmul w1: a b~; matmul w2: b",
    w1=(3, 4),
    w2=(4, 4),
    a=4,
    b=4,
    groups="a b",
    exact=False,
)
def _(p, s, x):
    a = 0.9 * s.a + bt.matmul(x, p.w1)
    b = 0.8 * s.b + bt.matmul(jnp.tanh(a), p.w2) + a
    return {"a": a, "b": b}, jnp.tanh(b)


@case(
    "layers",
    "three_layers",
    "matmul w1: a; matmul w2: b; matmul w3: c",
    w1=(3, 4),
    w2=(4, 2),
    w3=(2, 3),
    a=4,
    b=2,
    c=3,
    groups="a | b | c",
    exact=False,
)
def _(p, s, x):
    a = jnp.tanh(0.9 * s.a + bt.matmul(x, p.w1))
    b = jnp.tanh(0.8 * s.b + bt.matmul(a, p.w2))
    c = jnp.tanh(0.7 * s.c + bt.matmul(b, p.w3))
    return {"a": a, "b": b, "c": c}, jnp.tanh(c)


@case("layers", "op_of_op", "matmul w2: h", w1=(3, 2), w2=(2, 4), exact=False)
def _(p, s, x):
    h = 0.9 * s.h + bt.matmul(jnp.tanh(bt.matmul(x, p.w1)), p.w2)
    return {"h": h}, jnp.tanh(h)


@case("layers", "op_of_op_and_direct", "matmul w1: h~; matmul w2: h", w1=(3, 4), w2=(4, 4), exact=False)
def _(p, s, x):
    y = jnp.tanh(bt.matmul(x, p.w1))
    h = 0.9 * s.h + bt.matmul(y, p.w2) + y
    return {"h": h}, jnp.tanh(h)


@case("layers", "skip_to_output", "matmul w: h", x=(2, 3), h=(2, 4))
def _(p, s, x):
    y = bt.matmul(x, p.w)
    h = 0.9 * s.h + y
    return {"h": h}, jnp.tanh(h) * y


@case("layers", "skip_to_output_mixed", "matmul w: h")
def _(p, s, x):
    y = bt.matmul(x, p.w)
    h = 0.9 * s.h + y
    return {"h": h}, jnp.tanh(h) * jax.nn.softmax(y)


class Nested(brainstate.nn.Module):
    """Cells in a list and in attributes: paths of more than one name."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = [Step(CELL, {"w": (3, 4)}, {"h": 4}), Step(CELL, {"w": (4, 4)}, {"h": 4})]
        self.out = Step(CELL, {"w": (4, 2)}, {"h": 2})

    def update(self, x: Any) -> Any:
        for cell in self.cells:
            x = cell(x)
        return self.out(x)


def CELL(p: Any, s: Any, x: Any) -> Any:
    h = 0.9 * s.h + bt.matmul(x, p.w)
    return {"h": h}, jnp.tanh(h)


CASES["nested_modules"] = Case(
    "nested_modules",
    Nested,
    lambda rng: Draw(rng)(3, 1.0),
    [[("cells", "0", "h")], [("cells", "1", "h")], [("out", "h")]],
    relations_of("matmul cells.0.w: cells.0.h; matmul cells.1.w: cells.1.h; matmul out.w: out.h"),
    {(0, 0): "identity", (1, 0): "identity", (2, 0): "identity"},
    False,
    "layers",
)


# -- states --------------------------------------------------------------------------------------------


@case("state", "cascade", "matmul w: a b", a=4, b=4, groups="a b")
def _(p, s, x):
    a = 0.9 * s.a + bt.matmul(x, p.w)
    b = 0.8 * s.b + jnp.tanh(a)
    return {"a": a, "b": b}, jnp.tanh(b)


@case("state", "cascade_of_old", "matmul w: a", x=(2, 3), a=(2, 4), b=(2, 4), groups="a b")
def _(p, s, x):
    a = 0.9 * s.a + bt.matmul(x, p.w)
    b = 0.8 * s.b + jnp.tanh(s.a)
    return {"a": a, "b": b}, jnp.tanh(b) * a


@case("state", "cascade_of_three", "matmul w: a b c", x=(2, 3), a=(2, 4), b=(2, 4), c=(2, 4), groups="a b c")
def _(p, s, x):
    a = 0.9 * s.a + bt.matmul(x, p.w)
    b = 0.8 * s.b + jnp.tanh(a)
    c = 0.7 * s.c + jnp.sin(b) * a
    return {"a": a, "b": b, "c": c}, jnp.tanh(c) + b**2


def _state(*shape: int) -> Callable[[Draw], brainstate.State]:
    return lambda draw: brainstate.HiddenState(draw(shape))


@case("state", "read_by_dead_code", "matmul w: h", x=(2, 3), w=(3, 4), h=(2, 4), z=_state(2, 4))
def _(p, s, x):
    bt.matmul(s.z, p.w.T @ p.w)
    h, _ = jax.jit(lambda h, z: (0.9 * h + bt.matmul(x, p.w), 2 * z))(s.h, s.z)
    (y, _), _ = lax.scan(lambda c, _: ((c[0] * h, c[1] * s.z), None), (h, s.z), None, length=2)
    return {"h": h, "z": jax.nn.softmax(h)}, y * jax.nn.softmax(h)


@case("state", "packed", "matmul w: h.0:4 h.4:8", x=(2, 3), w=(3, 4), h=_state(2, 8), groups="h.0:4 h.4:8")
def _(p, s, x):
    v, a = jnp.split(s.h, 2, -1)
    v = 0.9 * v - 0.2 * a + bt.matmul(x, p.w)
    h = jnp.concatenate([v, 0.8 * a + 0.3 * jnp.tanh(v)], -1)
    return {"h": h}, jnp.tanh(h)


@case(
    "state",
    "packed_with_resets",
    "matmul w: h.0:4 h.4:8",
    x=(2, 3),
    w=(3, 4),
    h=_state(2, 8),
    groups="h.0:4 h.4:8",
)
def _(p, s, x):
    v, a = jnp.split(jnp.where(x[:, :1] > 0.5, 0, s.h), 2, -1)
    v = 0.9 * v - 0.2 * a + bt.matmul(x, p.w)
    h = jnp.concatenate([v, 0.8 * a + 0.3 * jnp.tanh(v)], -1)
    return {"h": h}, jnp.tanh(h)


@case(
    "state",
    "layers_packed",
    "matmul w: h.0:1",
    w=(3, 4),
    u=(4, 4),
    h=_state(2, 4),
    groups="h.0:1",
)
def _(p, s, x):
    a = 0.9 * s.h[0] + bt.matmul(x, p.w)
    b = jnp.tanh(bt.matmul(a, p.u))
    return {"h": s.h.at[1].set(b).at[0].set(a)}, b


@case("state", "joined_and_split", "element_wise a: h; matmul w: h", a=4, w=(3, 4), h=4)
def _(p, s, x):
    a, h = jnp.split(jnp.concatenate([bt.element_wise(p.a, jax.nn.sigmoid), s.h]), 2)
    h = a * h + bt.matmul(x, p.w)
    return {"h": h}, jnp.tanh(h)


@case("state", "cascade_rolled", "matmul w: a", a=4, b=4, groups="a | b", exact=False)
def _(p, s, x):
    a = 0.9 * s.a + bt.matmul(x, p.w)
    b = 0.8 * s.b + jnp.roll(a, 1)
    return {"a": a, "b": b}, jnp.tanh(b)


@case("state", "cascade_summed", "matmul w: a", a=4, b=(), groups="a | b", exact=False)
def _(p, s, x):
    a = 0.9 * s.a + bt.matmul(x, p.w)
    b = 0.8 * s.b + jnp.tanh(a).sum()
    return {"a": a, "b": b}, jnp.tanh(a) * b


@case("state", "minus", "matmul w: h a", h=4, a=4, groups="h a")
def _(p, s, x):
    h = 0.9 * (s.h - s.a) + bt.matmul(x, p.w)
    a = 0.7 * s.a + 0.1 * jnp.tanh(h)
    return {"h": h, "a": a}, jnp.tanh(h)


@case("state", "minus_old", "matmul w: h", x=(2, 3), h=(2, 4), a=(2, 4), groups="h a")
def _(p, s, x):
    d = s.h - s.a
    h, a = 0.9 * d + bt.matmul(x, p.w), 0.7 * s.a - 0.1 * jnp.sin(d)
    return {"h": h, "a": a}, jnp.tanh(h - a)


@case("state", "apart", "matmul w1: a; matmul w2: b", w1=(3, 4), w2=(3, 4), a=4, b=4, groups="a | b")
def _(p, s, x):
    a, b = 0.9 * s.a + bt.matmul(x, p.w1), 0.8 * s.b + bt.matmul(x, p.w2)
    return {"a": a, "b": b}, jnp.tanh(a * b)


@case("state", "hidden_group_state", "matmul w: h", h=lambda draw: brainstate.HiddenGroupState(draw((4, 2))))
def _(p, s, x):
    v, a = s.h[..., 0], s.h[..., 1]
    v = 0.9 * v - 0.2 * a + bt.matmul(x, p.w)
    a = 0.8 * a + 0.3 * jnp.tanh(v)
    return {"h": jnp.stack([v, a], -1)}, jnp.tanh(v)


@case(
    "state",
    "hidden_group_state_and_another",
    "matmul w: h r",
    x=(2, 3),
    h=lambda draw: brainstate.HiddenGroupState(draw((2, 4, 2))),
    r=(2, 4),
    groups="h r",
)
def _(p, s, x):
    h = 0.9 * s.h + 0.1 * s.h[..., ::-1] + bt.matmul(x, p.w)[..., None] * jnp.ones(2, x.dtype)[None, None]
    r = 0.8 * s.r + jnp.tanh(h[..., 0]) * h[..., 1]
    return {"h": h, "r": r}, jnp.tanh(r)


def _tree(draw: Draw) -> brainstate.State:
    return brainstate.HiddenTreeState({"v": draw(4) * u.mV, "a": draw(4)})


@case("state", "hidden_tree_state", "matmul w: n", n=_tree, groups="n")
def _(p, s, x):
    v = 0.9 * s.n.v - 0.2 * s.n.a * u.mV + bt.matmul(x, p.w) * u.mV
    a = 0.8 * s.n.a + 0.3 * jnp.tanh(v / u.mV)
    return {"n": {"v": v, "a": a}}, jnp.tanh(v / u.mV)


@case(
    "state",
    "state_of_two_leaves",
    "matmul w: h.a h.v",
    h=lambda draw: brainstate.ShortTermState(draw({"v": 4, "a": 4})),
    groups="h.a h.v",
)
def _(p, s, x):
    v = 0.9 * s.h["v"] - 0.2 * s.h["a"] + bt.matmul(x, p.w)
    a = 0.8 * s.h["a"] + 0.3 * jnp.tanh(v)
    return {"h": {"v": v, "a": a}}, jnp.tanh(v)


@case(
    "state",
    "short_term_state",
    "matmul w: h a",
    h=lambda draw: brainstate.ShortTermState(draw(4)),
    a=4,
    groups="h a",
)
def _(p, s, x):
    h = 0.9 * s.h - 0.2 * s.a + bt.matmul(x, p.w)
    a = 0.8 * s.a + 0.3 * jnp.tanh(h)
    return {"h": h, "a": a}, jnp.tanh(h)


@case("state", "unit", "matmul w: h", h=lambda draw: brainstate.HiddenState(draw(4) * u.mV))
def _(p, s, x):
    h = 0.9 * s.h + bt.matmul(x, p.w * u.mV)
    return {"h": h}, jnp.tanh(h / u.mV)


@case(
    "state",
    "unit_of_input_and_leak",
    "matmul w: v; element_wise tau: v",
    x=(2, 3),
    w=(3, 4),
    tau=4,
    v=lambda draw: brainstate.HiddenState(draw((2, 4)) * u.mV),
    groups="v",
    positions={1: Broadcast([[0, 1, 2, 3]] * 2)},
)
def _(p, s, x):
    current = bt.matmul(x * u.mA, p.w * u.ohm)
    tau = bt.element_wise((2 + jnp.tanh(p.tau)) * u.ms)[None]
    v = s.v + (current - s.v) * (0.5 * u.ms / tau)
    return {"v": v}, jnp.tanh(v / u.mV)


@case("state", "scalar", "matmul w: h", w=(3, 1), h=())
def _(p, s, x):
    h = jnp.tanh(0.9 * s.h + bt.matmul(x, p.w)[0])
    return {"h": h}, jnp.tanh(h)


@case("state", "copies", "matmul w: a b", a=4, b=4, groups="a b")
def _(p, s, x):
    b = 0.5 * s.b + 0.3 * s.a + bt.matmul(x, p.w)
    return {"a": b, "b": b}, jnp.tanh(b)


@case("state", "swapped", "matmul w: b", a=4, b=4, groups="a b")
def _(p, s, x):
    return {"a": s.b, "b": 0.5 * s.a + bt.matmul(x, p.w)}, jnp.tanh(s.a * s.b)


@case("state", "delay_of_two", "matmul w: a", a=4, b=4, groups="a b")
def _(p, s, x):
    return {"a": 0.5 * s.b + bt.matmul(x, p.w), "b": s.a}, jnp.tanh(s.a * s.b)


@case("state", "counter", "matmul w: h", h=4, t=lambda draw: brainstate.ShortTermState(jnp.zeros((), int)))
def _(p, s, x):
    h = 0.9 * s.h + bt.matmul(x, p.w) / (1 + s.t).astype(x.dtype)
    return {"h": h, "t": s.t + 1}, jnp.tanh(h)


@case(  # the running mean is carried but not traced
    "state", "running_mean", "matmul w: h", h=4, m=lambda draw: brainstate.LongTermState(draw(4)), exact=False
)
def _(p, s, x):
    y = bt.matmul(x, p.w)
    h = 0.9 * s.h + y - s.m
    return {"h": h, "m": 0.9 * s.m + 0.1 * y}, jnp.tanh(h)


@case(
    "state",
    "two_states_two_shapes",
    "matmul w1: a; matmul w2: b",
    x=(2, 3),
    w1=(3, 4),
    w2=(3, 2),
    a=(2, 4),
    b=(2, 2),
    groups="a | b",
)
def _(p, s, x):
    a, b = 0.9 * s.a + bt.matmul(x, p.w1), 0.8 * s.b + bt.matmul(x, p.w2)
    return {"a": a, "b": b}, jnp.tanh(a) * jnp.sin(b.sum(-1, keepdims=True))


# -- leaks, gains and thresholds -----------------------------------------------------------------------


def _leak(name: str, shape: Any, h: Any, to: Any) -> None:
    x = 3 if isinstance(h, int) else (*h[:-1], 3)
    relations = "element_wise a: h; matmul w: h"

    @case("leak", name, relations, x=x, a=shape, w=(3, 4), h=h, positions={0: to})
    def _(p, s, x):
        a = bt.element_wise(p.a, jax.nn.sigmoid)
        h = jnp.broadcast_to(a, s.h.shape) * s.h + bt.matmul(x, p.w)
        return {"h": h}, jnp.tanh(h)


_leak("leak_full", 4, 4, "identity")
_leak("leak_one", 1, 4, Broadcast([0, 0, 0, 0]))
_leak("leak_scalar", (), 4, Broadcast([0, 0, 0, 0]))
_leak("leak_full_batched", 4, (2, 4), Broadcast([[0, 1, 2, 3]] * 2))
_leak("leak_one_batched", 1, (2, 4), Broadcast([[0] * 4] * 2))
_leak("leak_scalar_batched", (), (2, 4), Broadcast([[0] * 4] * 2))
_leak("leak_of_state_shape", (2, 4), (2, 4), "identity")


@case("leak", "gain", "element_wise g: h; matmul w: h", g=4, w=(3, 4))
def _(p, s, x):
    h = jnp.tanh(s.h) + bt.element_wise(p.g, weight_fn=jnp.exp) * bt.matmul(x, p.w)
    return {"h": h}, jnp.tanh(h)


@case("leak", "leak_of_scalar_state", "element_wise a: h; element_wise b: h", x=(), a=(), b=(), h=())
def _(p, s, x):
    h = bt.element_wise(p.a, jax.nn.sigmoid) * s.h + x * bt.element_wise(p.b)
    return {"h": h}, jnp.tanh(h)


# -- other operations ----------------------------------------------------------------------------------


@case("op", "bias", "matmul w: h", x=(2, 3), w=(3, 4), b=4, h=(2, 4))
def _(p, s, x):
    h = jnp.tanh(0.9 * s.h + bt.matmul(x, p.w, p.b))
    return {"h": h}, jnp.tanh(h)


@case("op", "lora", "lora_matmul B: h", x=(2, 3), B=(3, 2), A=(2, 4), h=(2, 4))
def _(p, s, x):
    h = 0.9 * s.h + bt.lora_matmul(x, p.B, p.A, alpha=0.5)
    return {"h": h}, jnp.tanh(h)


@case("op", "lora_and_frozen", "lora_matmul B: h", B=(3, 1), A=(1, 4), b=4)
def _(p, s, x):
    frozen = jnp.asarray(np.arange(12.0).reshape(3, 4) / 12, x.dtype)
    h = 0.9 * s.h + x @ frozen + bt.lora_matmul(x, p.B, p.A, bias=p.b, a_fn=jnp.tanh)
    return {"h": h}, jnp.tanh(h)


def _conv(name: str, x: Any, kernel: Any, h: Any, bias: int | None = None, **options: Any) -> None:
    params = {"k": kernel} if bias is None else {"k": kernel, "b": bias}

    @case("op", name, "conv k: h", x=x, h=h, **params)
    def _(p, s, x):
        h = 0.9 * s.h + bt.conv(x, p.k, getattr(p, "b", None), **options)
        return {"h": h}, jnp.tanh(h)


_conv("conv", (2, 1, 5), (2, 1, 3), (2, 2, 5))
_conv("conv_unbatched", (2, 4), (3, 2, 2), (3, 4))
_conv("conv_strided", (1, 2, 6), (2, 2, 2), (1, 2, 3), bias=2, strides=(2,), padding="VALID")
_conv("conv_dilated", (2, 1, 6), (2, 1, 2), (2, 2, 4), rhs_dilation=(2,), padding="VALID")
_conv("conv_lhs_dilated", (1, 2, 3), (2, 2, 2), (1, 2, 4), lhs_dilation=(2,), padding=((0, 0),))
_conv("conv_grouped", (2, 4, 3), (4, 2, 2), (2, 4, 2), bias=4, feature_group_count=2, padding="VALID")
_conv("conv2d", (1, 2, 3, 3), (2, 2, 2, 2), (1, 2, 3, 3), bias=2)
_conv(
    "conv2d_channels_last",
    (2, 3, 3, 1),
    (2, 2, 1, 2),
    (2, 2, 2, 2),
    bias=2,
    padding="VALID",
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
)


@case(
    "op",
    "conv_pooled",
    "conv k: h",
    x=(1, 1, 4),
    k=(2, 1, 3),
    h=4,
    positions={0: [[[0, 0, 1, 1], [2, 2, 3, 3]]]},
)
def _(p, s, x):
    y = jax.nn.relu(bt.conv(x, p.k))
    h = 0.9 * s.h + lax.reduce_window(y, -jnp.inf, lax.max, (1, 1, 2), (1, 1, 2), "VALID").reshape(4)
    return {"h": h}, jnp.tanh(h)


def _indices(*shape: int) -> Callable[[np.random.RandomState], Any]:
    return lambda rng: jnp.asarray(rng.randint(0, 5, shape))


@case("op", "embedding", "embedding w: h", x=_indices(2), w=(5, 4), h=(2, 4))
def _(p, s, x):
    h = 0.9 * s.h + bt.embedding(x, p.w)
    return {"h": h}, jnp.tanh(h)


@case("op", "embedding_of_one", "embedding w: h", x=_indices(), w=(5, 4))
def _(p, s, x):
    h = jnp.tanh(s.h + bt.embedding(x, p.w, weight_fn=jnp.sin))
    return {"h": h}, jnp.tanh(h)


@case(
    "op",
    "embedding_summed",
    "embedding w: h",
    x=_indices(2),
    w=(5, 3),
    h=3,
    positions={0: [[0, 1, 2], [0, 1, 2]]},
)
def _(p, s, x):
    h = 0.9 * s.h + bt.embedding(x, p.w).sum(0)
    return {"h": h}, jnp.tanh(h)


@case("op", "einsum", "einsum w: h", x=(2, 2, 3), w=(2, 3, 4), h=(2, 2, 4))
def _(p, s, x):
    h = 0.9 * s.h + bt.einsum("bhd,hde->bhe", x, p.w)
    return {"h": h}, jnp.tanh(h)


@case("op", "einsum_transposed", "einsum w: h", x=(2, 3), w=(4, 3), h=(4, 2))
def _(p, s, x):
    h = 0.9 * s.h + bt.einsum("bi,oi->ob", x, p.w)
    return {"h": h}, jnp.tanh(h)


@case("op", "grouped_matmul", "grouped_matmul w: h", x=(2, 2, 3), w=(2, 3, 2), b=(2, 2), h=(2, 2, 2))
def _(p, s, x):
    h = 0.9 * s.h + bt.grouped_matmul(x, p.w, p.b)
    return {"h": h}, jnp.tanh(h)


_SPARSE = scipy.sparse.coo_matrix([[1.0, 0, 0, 1], [0, 1, 0, 0], [1, 0, 1, 1]])


@case("op", "sparse", "sparse_matmul w: h", w=6)
def _(p, s, x):
    h = 0.9 * s.h + bt.sparse_matmul(x, p.w, sparse_mat=_SPARSE)
    return {"h": h}, jnp.tanh(h)


@case("op", "sparse_batched", "sparse_matmul w: h", x=(2, 3), w=6, b=4, h=(2, 4))
def _(p, s, x):
    h = 0.9 * s.h + bt.sparse_matmul(x, p.w, sparse_mat=_SPARSE, bias=p.b, weight_fn=jnp.tanh)
    return {"h": h}, jnp.tanh(h)


gain_p = bt.register_primitive(
    "etp_gain", lambda x, weight: x * jnp.broadcast_to(weight, x.shape), "...o,o->...o"
)


@case("op", "own_op", "gain g: h", x=(2, 4), g=4, h=(2, 4))
def _(p, s, x):
    h = 0.9 * s.h + gain_p(x, weights={"weight": p.g})
    return {"h": h}, jnp.tanh(h)


# -- control flow --------------------------------------------------------------------------------------


@case("flow", "cond", "matmul w2: h; matmul w1: h", w1=(3, 4), w2=(3, 4))
def _(p, s, x):
    y = lax.cond(x.sum() > 0, lambda x: bt.matmul(x, p.w1), lambda x: jnp.sin(bt.matmul(x, p.w2)), x)
    h = 0.9 * s.h + y
    return {"h": h}, jnp.tanh(h)


@case("flow", "cond_one_weight", "matmul w: h; matmul w: h", x=(2, 3), h=(2, 4))
def _(p, s, x):
    y = lax.cond(x[0, 0] > 0, lambda: bt.matmul(x, p.w), lambda: bt.matmul(x**2, 2 * p.w))
    h = 0.9 * s.h + y
    return {"h": h}, jnp.tanh(h)


@case("flow", "cond_of_state", "matmul w: h")
def _(p, s, x):
    h = lax.cond(s.h.sum() > 0, lambda h: 0.5 * h, lambda h: 0.9 * h + bt.matmul(x, p.w), s.h)
    return {"h": h}, jnp.tanh(h)


@case("flow", "cond_roll", "matmul w: h; matmul w: h", positions={0: [1, 2, 3, 0]})
def _(p, s, x):
    y = lax.cond(x.sum() > 0, lambda: bt.matmul(x, p.w), lambda: jnp.roll(bt.matmul(x, p.w), 1))
    h = 0.9 * s.h + y
    return {"h": h}, jnp.tanh(h)


@case(  # one site, and a branch that moves it: where it goes depends on data
    "flow", "cond_moves", "matmul w: h", exact=False
)
def _(p, s, x):
    y = bt.matmul(x, p.w)
    h = 0.9 * s.h + lax.cond(x.sum() > 0, lambda y: jnp.roll(y, 1), lambda y: y, y)
    return {"h": h}, jnp.tanh(h)


@case("flow", "switch", "matmul w1: h; matmul w2: h", w1=(3, 4), w2=(3, 4))
def _(p, s, x):
    index = (x[0] > 0).astype(int) + (x[1] > 0).astype(int)
    branches = [lambda: bt.matmul(x, p.w1), lambda: jnp.zeros_like(s.h), lambda: bt.matmul(x, p.w2) ** 2]
    h = 0.9 * s.h + lax.switch(index, branches)
    return {"h": h}, jnp.tanh(h)


@case("flow", "scan_3", "matmul w: h", positions={0: [[0, 1, 2, 3]] * 3})
def _(p, s, x):
    h, _ = lax.scan(lambda h, _: (h + 0.1 * (jnp.sin(bt.matmul(x, p.w)) - h), None), s.h, length=3)
    return {"h": h}, jnp.tanh(h)


@case(
    "flow",
    "scan_40",
    "matmul w: h",
    x=(2, 3),
    h=(2, 4),
    positions={0: np.tile(np.arange(8).reshape(1, 2, 4), (40, 1, 1))},
)
def _(p, s, x):
    h, _ = lax.scan(lambda h, _: (h + 0.1 * (bt.matmul(x, p.w) - h), None), s.h, length=40)
    return {"h": h}, jnp.tanh(h)


@case("flow", "scan_of_inputs", "matmul w: h", x=(3, 3), positions={0: [[0, 1, 2, 3]] * 3})
def _(p, s, x):
    def sub(h, x):
        h = jnp.tanh(0.9 * h + bt.matmul(x, p.w))
        return h, jnp.sin(h)

    h, outs = lax.scan(sub, s.h, x, reverse=True)
    return {"h": h}, outs


@case(
    "flow",
    "scan_recurrent",
    "matmul w: h~",
    x=(3, 2),
    w=(6, 4),
    positions={0: [[0, 1, 2, 3]] * 3},
    exact=False,
)
def _(p, s, x):
    def sub(h, x):
        return jnp.tanh(0.9 * h + bt.matmul(jnp.concatenate([x, h]), p.w)), None

    h, _ = lax.scan(sub, s.h, x)
    return {"h": h}, jnp.tanh(h)


@case("flow", "scan_after_op", "matmul w: h", x=(2, 3), h=(2, 4))
def _(p, s, x):
    y = bt.matmul(x, p.w)
    h, _ = lax.scan(lambda h, _: (h + 0.1 * (y - jnp.tanh(h)), None), s.h, length=3)
    return {"h": h}, jnp.tanh(h)


@case("flow", "scan_after_op_40", "matmul w: h")
def _(p, s, x):
    y = bt.matmul(x, p.w)
    h, _ = lax.scan(lambda h, _: (h + 0.05 * (y - jnp.tanh(h)), None), s.h, length=40)
    return {"h": h}, jnp.tanh(h)


@case(  # a carry that turns: after four iterations every element is back where it was
    "flow", "scan_that_turns", "matmul w: h"
)
def _(p, s, x):
    y, _ = lax.scan(lambda y, _: (jnp.sin(jnp.roll(y, 1)), None), bt.matmul(x, p.w), length=4)
    h = 0.9 * s.h + y
    return {"h": h}, jnp.tanh(h)


@case("flow", "scan_over_layers", "matmul w: h", w=(3, 3, 2), h=(3, 2))
def _(p, s, x):
    _, h = lax.scan(lambda c, wh: (c, jnp.tanh(0.9 * wh[1] + bt.matmul(x, wh[0]))), 0, (p.w, s.h))
    return {"h": h}, jnp.tanh(h)


@case("flow", "scan_through_layers", "matmul w: h~", x=2, w=(3, 2, 2), h=(3, 2), exact=False)
def _(p, s, x):
    def layer(x, wh):
        h = jnp.tanh(0.9 * wh[1] + bt.matmul(x, wh[0]))
        return h, h

    x, h = lax.scan(layer, x, (p.w, s.h))
    return {"h": h}, jnp.tanh(x)


@case(
    "flow",
    "cond_in_scan",
    "matmul w2: h; matmul w1: h",
    x=(3, 3),
    w1=(3, 4),
    w2=(3, 4),
    positions={0: [[0, 1, 2, 3]] * 3, 1: [[0, 1, 2, 3]] * 3},
)
def _(p, s, x):
    def sub(h, x):
        y = lax.cond(x[0] > 0, lambda: bt.matmul(x, p.w1), lambda: jnp.sin(bt.matmul(x, p.w2)))
        return 0.9 * h + y, None

    h, _ = lax.scan(sub, s.h, x)
    return {"h": h}, jnp.tanh(h)


@case("flow", "scan_in_cond", "matmul w: h", positions={0: [[0, 1, 2, 3]] * 2})
def _(p, s, x):
    def loop(h):
        return lax.scan(lambda h, _: (0.9 * h + bt.matmul(x, p.w), None), h, length=2)[0]

    h = lax.cond(x.sum() > 0, loop, lambda h: 0.5 * h, s.h)
    return {"h": h}, jnp.tanh(h)


@case("flow", "scan_in_scan", "matmul w: h", x=(2, 3, 3), positions={0: [[[0, 1, 2, 3]] * 3] * 2})
def _(p, s, x):
    def outer(h, x):
        return lax.scan(lambda h, x: (0.9 * h + bt.matmul(x, p.w), None), jnp.tanh(h), x)

    h, _ = lax.scan(outer, s.h, x)
    return {"h": h}, jnp.tanh(h)


@case("flow", "fori_loop", "matmul w: h", x=(3, 3), positions={0: [[0, 1, 2, 3]] * 3})
def _(p, s, x):
    h = lax.fori_loop(0, 3, lambda i, h: 0.9 * h + bt.matmul(x[i], p.w), s.h)
    return {"h": h}, jnp.tanh(h)


@case("flow", "fori_loop_over_units", "matmul w: h", w=(3, 2), h=3, positions={0: [[0, 0], [1, 1], [2, 2]]})
def _(p, s, x):
    def body(i, h):
        return h.at[i].set(jnp.tanh(h[i]) + bt.matmul(x, p.w).sum() * (1.0 + i))

    h = lax.fori_loop(0, 3, body, s.h)
    return {"h": h}, jnp.tanh(h)


@case("flow", "checkpoint", "matmul w: h", x=(2, 3), h=(2, 4))
def _(p, s, x):
    h = jax.checkpoint(lambda h, x, w: jnp.tanh(0.9 * h + bt.matmul(x, w)))(s.h, x, p.w)
    return {"h": h}, jnp.tanh(h)


@case("flow", "checkpoint_in_scan", "matmul w: h", x=(2, 3), positions={0: [[0, 1, 2, 3]] * 2})
def _(p, s, x):
    sub = jax.checkpoint(lambda h, x: (jnp.tanh(0.9 * h + bt.matmul(x, p.w)), None))
    h, _ = lax.scan(sub, s.h, x)
    return {"h": h}, jnp.tanh(h)


@case("flow", "nested_jit", "matmul w: h")
def _(p, s, x):
    inner = jax.jit(lambda x, w: jnp.sin(bt.matmul(x, w)))
    h = jax.jit(lambda h, x, w: 0.9 * h + inner(x, jnp.tanh(w)))(s.h, x, p.w)
    return {"h": h}, jnp.tanh(h)


@case("while", "while_after_op", "matmul w: h")
def _(p, s, x):
    y = lax.while_loop(lambda y: jnp.abs(y).max() > 0.5, lambda y: 0.5 * y, bt.matmul(x, p.w))
    h = 0.9 * s.h + y
    return {"h": h}, jnp.tanh(h)


@case("while", "while_of_state", "matmul w: h", x=(2, 3), h=(2, 4))
def _(p, s, x):
    h = 0.9 * s.h + bt.matmul(x, p.w)
    h = lax.while_loop(lambda h: jnp.abs(h).max() > 2.0, lambda h: jnp.sin(h) * 1.5, h)
    return {"h": h}, jnp.tanh(h)


@case("while", "while_that_rolls", "matmul w: h", exact=False)
def _(p, s, x):
    y = bt.matmul(x, p.w)
    y = lax.while_loop(lambda y: y[0] > 0.0, lambda y: jnp.roll(y, 1) - 0.5, y)
    h = 0.9 * s.h + y
    return {"h": h}, jnp.tanh(h)


@case("flow", "vmap_data", "matmul w: h", x=(2, 3), h=(2, 4))
def _(p, s, x):
    h = 0.9 * s.h + jax.vmap(lambda x: jnp.sin(bt.matmul(x, p.w)))(x)
    return {"h": h}, jnp.tanh(h)


@case(
    "flow",
    "vmap_data_to_columns",
    "matmul w: h",
    x=(2, 3),
    h=(4, 2),
    positions={0: [[0, 2, 4, 6], [1, 3, 5, 7]]},
)
def _(p, s, x):
    h = 0.9 * s.h + jax.vmap(lambda x: bt.matmul(x, p.w), out_axes=1)(x)
    return {"h": h}, jnp.tanh(h)


@case("flow", "vmap_weights", "matmul w: h", w=(2, 3, 4), h=(2, 4))
def _(p, s, x):
    h = 0.9 * s.h + jax.vmap(bt.matmul, (None, 0))(x, p.w)
    return {"h": h}, jnp.tanh(h)


@case("flow", "vmap_both", "matmul w: h", x=(2, 3), w={"weight": (2, 3, 4), "bias": (2, 4)}, h=(2, 4))
def _(p, s, x):
    h = 0.9 * s.h + jax.vmap(bt.matmul)(x, p.w["weight"], p.w["bias"])
    return {"h": h}, jnp.tanh(h)


@case("flow", "vmap_of_vmap", "matmul w: h", x=(2, 3), w=(2, 3, 4), h=(2, 2, 4))
def _(p, s, x):
    models = jax.vmap(bt.matmul, (None, 0))
    h = 0.9 * s.h + jax.vmap(lambda x: models(x, p.w))(x)
    return {"h": h}, jnp.tanh(h)


@case(
    "flow",
    "vmap_of_cell",
    "element_wise a: h; matmul w: h",
    x=(2, 3),
    a=4,
    w=(3, 4),
    h=(2, 4),
    positions={0: Broadcast([[0, 1, 2, 3]] * 2)},
)
def _(p, s, x):
    def cell(h, x):
        return bt.element_wise(p.a, jax.nn.sigmoid) * h + bt.matmul(x, p.w)

    h = jax.vmap(cell)(s.h, x)
    return {"h": h}, jnp.tanh(h)


@case(
    "flow",
    "vmap_of_scan",
    "matmul w: h",
    x=(2, 3, 3),
    h=(2, 4),
    positions={0: [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 3},
)
def _(p, s, x):
    def cell(h, x):
        return lax.scan(lambda h, x: (jnp.tanh(0.9 * h + bt.matmul(x, p.w)), None), h, x)[0]

    h = jax.vmap(cell)(s.h, x)
    return {"h": h}, jnp.tanh(h)


@case(  # `vmap` makes the weight inside depend on the predicate
    "flow", "vmap_of_cond", "", x=(2, 3), h=(2, 4), exact=False
)
def _(p, s, x):
    def cell(h, x):
        return lax.cond(x[0] > 0, lambda: 0.9 * h + bt.matmul(x, p.w), lambda: 0.5 * h)

    h = jax.vmap(cell)(s.h, x)
    return {"h": h}, jnp.tanh(h)


@case("flow", "grad_inside", "matmul w: h")
def _(p, s, x):
    """A model that differentiates itself: one step down the gradient of an energy of `h`."""
    y = bt.matmul(x, p.w)
    h = s.h - 0.1 * jax.grad(lambda h: jnp.sum(jnp.sin(h) * y + h**2))(s.h)
    return {"h": h}, jnp.tanh(h)


# -- derivative rules of their own, and spikes ---------------------------------------------------------


@jax.custom_jvp
def jvp_tanh(x):
    return jnp.tanh(x)


jvp_tanh.defjvps(lambda t, ans, x: (1 - ans**2) * t)


@jax.custom_vjp
def vjp_tanh(x):
    return jnp.tanh(x)


vjp_tanh.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: ((1 - jnp.tanh(x) ** 2) * g,))


@jax.custom_jvp
def jvp_spike(x):
    return (x > 0).astype(x.dtype)


jvp_spike.defjvps(lambda t, ans, x: t / (1 + jnp.abs(x)) ** 2)


@jax.custom_vjp
def vjp_spike(x):
    return (x > 0).astype(x.dtype)


vjp_spike.defvjp(lambda x: (vjp_spike(x), x), lambda x, g: (g / (1 + jnp.abs(x)) ** 2,))


@case("spike", "custom_jvp", "matmul w: h", x=(2, 3), h=(2, 4))
def _(p, s, x):
    h = jvp_tanh(0.9 * s.h + jvp_tanh(bt.matmul(x, p.w)))
    return {"h": h}, jnp.tanh(h)


@case("spike", "custom_vjp", "matmul w: h")
def _(p, s, x):
    h = vjp_tanh(0.9 * s.h + vjp_tanh(bt.matmul(x, p.w)))
    return {"h": h}, jnp.tanh(h)


@jax.custom_vjp
def straight_through(x):
    return (x > 0).astype(x.dtype)


straight_through.defvjp(
    lambda x: (straight_through(x), x), lambda x, g: jax.vjp(lambda x: jax.nn.softmax(x, -1), x)[1](g)
)


@jax.custom_jvp
def fires(v, threshold):
    return (v > 0.2).astype(v.dtype)


fires.defjvp(lambda xs, ts: (fires(*xs), (ts[0] - ts[1]) / (1 + jnp.abs(xs[0] - xs[1])) ** 2))


@jax.custom_vjp
def winner(x):
    return (x == x.max(-1, keepdims=True)).astype(x.dtype)


winner.defvjp(lambda x: (winner(x), x), lambda x, g: (g / (1 + jnp.abs(x)) ** 2,))


tail("rule_mixes", straight_through, exact=False)
tail("rule_mixes_batched", straight_through, x=(2, 3), h=(2, 4), exact=False)
tail("only_the_function_mixes", winner)
tail("rule_reads_more", lambda y: fires(jnp.ones_like(y), y))


@case("spike", "rule_of_state_mixes", "matmul w: h", exact=False)
def _(p, s, x):
    h = 0.9 * s.h - 0.5 * straight_through(s.h) + bt.matmul(x, p.w)
    return {"h": h}, jnp.tanh(h)


@case("spike", "relu_and_gelu", "matmul w: h")  # `jax.nn.relu` and `silu` are custom_jvp and jit
def _(p, s, x):
    h = jax.nn.silu(0.9 * s.h) + jax.nn.relu(bt.matmul(x, p.w)) + jax.nn.gelu(s.h)
    return {"h": h}, jnp.tanh(h)


def _spikes(name: str, spike: Callable[[Any], Any], x: Any, v: Any) -> None:
    @case("spike", f"lif_{name}", "matmul w: v", x=x, v=v, groups="v")
    def _(p, s, x):
        v = 0.9 * s.v * (1 - spike(s.v - 0.5)) + bt.matmul(x, p.w)
        return {"v": v}, spike(v - 0.5)

    @case("spike", f"lif_soft_reset_{name}", "matmul w: v", x=x, v=v, groups="v")
    def _(p, s, x):
        v = 0.9 * s.v + bt.matmul(x, p.w)
        z = spike(v - 0.5)
        return {"v": v - 0.5 * z}, z

    @case("spike", f"alif_{name}", "matmul w: v", x=x, v=v, a=v, groups="v a")
    def _(p, s, x):
        z = spike(s.v - 0.5 - s.a)
        v = 0.9 * s.v + bt.matmul(x, p.w) - 0.5 * z
        a = 0.8 * s.a + 0.2 * z
        return {"v": v, "a": a}, spike(v - 0.5 - a)


_spikes("jvp", jvp_spike, 3, 4)
_spikes("vjp", vjp_spike, (2, 3), (2, 4))


@case("spike", "lif_recurrent", "matmul w: v; matmul r: v", w=(3, 4), r=(4, 4), v=4, groups="v", exact=False)
def _(p, s, x):
    z = vjp_spike(s.v - 0.5)
    v = 0.9 * s.v * (1 - z) + bt.matmul(x, p.w) + bt.matmul(z, p.r)
    return {"v": v}, vjp_spike(v - 0.5)


@case("spike", "learned_threshold", "element_wise th: v; matmul w: v", th=4, w=(3, 4), v=4, groups="v")
def _(p, s, x):
    z = jvp_spike(s.v - bt.element_wise(p.th, jnp.exp))
    v = 0.9 * s.v * (1 - z) + bt.matmul(x, p.w)
    return {"v": v}, jnp.tanh(v)


@case(
    "spike",
    "lif_and_leaky_readout",
    "matmul w: v; matmul o: r",
    x=(2, 3),
    w=(3, 4),
    o=(4, 2),
    v=(2, 4),
    r=(2, 2),
    groups="v | r",
)
def _(p, s, x):
    v = 0.9 * s.v * (1 - vjp_spike(s.v - 0.5)) + bt.matmul(x, p.w)
    r = 0.8 * s.r + bt.matmul(vjp_spike(v - 0.5), p.o)
    return {"v": v, "r": r}, jnp.tanh(r)


# -- readouts and parameters without a mark ------------------------------------------------------------


@case("readout", "plain_readout", "matmul w: h", x=(2, 3), w=(3, 4), o=(4, 2), h=(2, 4))
def _(p, s, x):
    h = 0.9 * s.h + bt.matmul(x, p.w)
    return {"h": h}, jnp.tanh(h @ p.o)


@case("readout", "marked_readout", "matmul w: h", w=(3, 4), o=(4, 2), b=2)
def _(p, s, x):
    h = 0.9 * s.h + bt.matmul(x, p.w)
    return {"h": h}, jnp.tanh(bt.matmul(jnp.sin(h), p.o, p.b))


@case("readout", "plain_bias_of_output", "matmul w: h", w=(3, 4), b=4)
def _(p, s, x):
    h = 0.9 * s.h + bt.matmul(x, p.w)
    return {"h": h}, jnp.tanh(h + p.b)


@case("readout", "plain_bias_of_state", "matmul w: h", w=(3, 4), b=4, exact=False)
def _(p, s, x):
    h = 0.9 * s.h + bt.matmul(x, p.w) + p.b
    return {"h": h}, jnp.tanh(h)


@case("readout", "plain_input_weight", "matmul w: h", w=(3, 4), v=(3, 4), exact=False)
def _(p, s, x):
    h = 0.9 * s.h + bt.matmul(x, p.w) * (x @ p.v)
    return {"h": h}, jnp.tanh(h)


@case("readout", "readout_of_old", "matmul w: h", w=(3, 4), o=(4, 2))
def _(p, s, x):
    h = 0.9 * s.h + bt.matmul(x, p.w)
    return {"h": h}, jnp.tanh(h[:2] + s.h @ p.o)


@case("readout", "op_of_old_spikes", "matmul w: v z", w=(3, 4), o=(4, 2), v=4, z=4, groups="v z")
def _(p, s, x):
    v = 0.9 * s.v + bt.matmul(x, p.w)
    return {"v": v, "z": vjp_spike(v - 0.3)}, bt.matmul(s.z, p.o)


@case(
    "readout",
    "op_of_old_in_control_flow",
    "matmul w: c h",
    w=(3, 8),
    o=(4, 4),
    c=4,
    h=4,
    groups="c h",
    positions={0: [0, 1, 2, 3, 0, 1, 2, 3]},
)
def _(p, s, x):
    y = lax.cond(x[0] > 0, lambda h: bt.matmul(h, p.o), jnp.sin, s.h)
    y, _ = lax.scan(lambda y, _: (jnp.tanh(bt.matmul(y, p.o)), None), y, length=2)
    i, g = jnp.split(bt.matmul(x, p.w), 2)
    c = 0.8 * s.c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return {"c": c, "h": jax.nn.sigmoid(g) * jnp.tanh(c)}, y


@case("readout", "several_outputs", "matmul w: h", w=(3, 4), o=(4, 2))
def _(p, s, x):
    h = 0.9 * s.h + bt.matmul(x, p.w)
    return {"h": h}, jnp.concatenate([jnp.tanh(h @ p.o), jnp.sin(h), s.h * h])


# -- positions of the state that reach others ----------------------------------------------------------


@case("mixing", "plain_recurrent", "matmul w: h", w=(3, 4), r=(4, 4), exact=False)
def _(p, s, x):
    h = jnp.tanh(bt.matmul(x, p.w) + s.h @ p.r)
    return {"h": h}, jnp.tanh(h)


@case("mixing", "roll_of_state", "matmul w: h", x=(2, 3), h=(2, 4), exact=False)
def _(p, s, x):
    h = 0.6 * s.h + 0.3 * jnp.roll(s.h, 1, -1) + bt.matmul(x, p.w)
    return {"h": h}, jnp.tanh(h)


@case("mixing", "only_roll_of_state", "matmul w: h", exact=False)
def _(p, s, x):
    h = jnp.tanh(jnp.roll(s.h, 1)) + bt.matmul(x, p.w)
    return {"h": h}, jnp.tanh(h)


@case("mixing", "mean_of_state", "matmul w: h", exact=False)
def _(p, s, x):
    h = 0.9 * s.h - 0.5 * jnp.mean(s.h) + bt.matmul(x, p.w)
    return {"h": h}, jnp.tanh(h)


@case("mixing", "layer_norm_of_state", "matmul w: h", x=(2, 3), h=(2, 4), exact=False)
def _(p, s, x):
    m = 0.9 * s.h + bt.matmul(x, p.w)
    h = (m - m.mean(-1, keepdims=True)) / (m.std(-1, keepdims=True) + 0.1)
    return {"h": h}, jnp.tanh(h)


@case(
    "mixing",
    "norms_of_two_states",
    "matmul w: c h",
    groups="c h",
    x=(2, 3),
    w=(3, 7),
    c=(2, 7),
    h=(2, 7),
    exact=False,
)
def _(p, s, x):
    """One norm over features, one over the batch as well, and spikes with a slope of their own."""
    c = 0.5 * s.c + bt.matmul(x, p.w) - vjp_spike(s.h)
    c = c / jnp.sqrt(jnp.mean(c**2, -1, keepdims=True) + 0.1)
    h = 0.3 * s.h * c - 0.2 * jnp.mean(vjp_spike(c))
    return {"c": c, "h": h}, jnp.tanh(h)


@case("mixing", "softmax_of_state", "matmul w: h", exact=False)
def _(p, s, x):
    h = 0.5 * s.h + jax.nn.softmax(s.h) + bt.matmul(x, p.w)
    return {"h": h}, jnp.tanh(h)


@case(
    "mixing",
    "outer_of_state",
    "matmul w: h",
    w=(3, 2),
    h=(2, 2),
    positions={0: Broadcast([[0, 0], [1, 1]])},
    exact=False,
)
def _(p, s, x):
    """Fast weights: a state of two axes that decays by what it holds for the input."""
    k = jnp.tanh(x[:2])
    h = 0.9 * s.h - 0.1 * jnp.outer(s.h @ k, k) + bt.matmul(x, p.w)[:, None] * k[None]
    return {"h": h}, jnp.tanh(h @ k)


@case("mixing", "conv_of_state", "conv k: h", x=(1, 1, 4), k=(1, 1, 3), h=(1, 1, 4), exact=False)
def _(p, s, x):
    blur = jnp.asarray(np.array([[[0.2, 0.5, 0.2]]]), x.dtype)
    h = lax.conv_general_dilated(s.h, blur, (1,), "SAME") + bt.conv(x, p.k)
    return {"h": h}, jnp.tanh(h)


@case(
    "mixing",
    "weight_that_changes",  # no trace can follow a weight that depends on the state
    "",
    exact=False,
)
def _(p, s, x):
    h = 0.9 * s.h + bt.matmul(x, p.w * jnp.tanh(s.h)[None])
    return {"h": h}, jnp.tanh(h)


@case("mixing", "weight_of_input", "matmul v: h", w=(3, 4), v=(3, 4), exact=False)
def _(p, s, x):
    h = 0.9 * s.h + bt.matmul(x, p.w * x[:, None]) + bt.matmul(x, p.v)
    return {"h": h}, jnp.tanh(h)


# -- states that start from zero ----------------------------------------------------------------------


@case("cell", "root_from_zero", "matmul w: h", h=lambda draw: brainstate.HiddenState(draw(jnp.zeros(4))))
def _(p, s, x):
    h = 0.9 * jnp.sqrt(jnp.abs(s.h)) + bt.matmul(x, p.w)  # no finite slope at the start
    return {"h": h}, jnp.tanh(h)


# -- complex numbers that are taken apart -------------------------------------------------------------------


def mod_relu(z: Any, b: Any) -> Any:
    size = jnp.abs(z)
    return z * (jax.nn.relu(size + b) / (size + 1e-3)).astype(z.dtype)


@case(
    "complex",
    "mod_relu",
    "matmul wre: h; element_wise b: h",
    wre=(3, 4),
    wim=(3, 4),
    b=4,
    h=_complex,
)
def _(p, s, x):
    y = bt.matmul(x.astype(s.h.dtype), lax.complex(p.wre, p.wim))
    h = mod_relu((0.8 + 0.3j) * s.h + y, bt.element_wise(p.b))
    return {"h": h}, jnp.tanh(h.real) + h.imag**2


@case(
    "complex",
    "mod_relu_rnn",
    "matmul w: h; matmul r: h; element_wise b: h",
    w=(3, 4),
    r=(4, 4),
    b=4,
    h=_complex,
    exact=False,
)
def _(p, s, x):
    y = bt.matmul(x, p.w).astype(s.h.dtype) + bt.matmul(s.h, p.r.astype(s.h.dtype))
    h = mod_relu(y + 0.5j * s.h, bt.element_wise(p.b))
    return {"h": h}, jnp.tanh(h.real) + h.imag**2


@case(
    "complex",
    "conj_of_broadcast",
    "matmul b: g z; matmul a: z",
    groups="g z",
    a=(3, 1),
    b=(3, 4),
    g=4,
    z=_complex,
    positions={1: Broadcast([0, 0, 0, 0])},
)
def _(p, s, x):
    """A real state and a complex one, coupled both ways."""
    g = 0.9 * s.g + jnp.tanh(bt.matmul(x, p.b)) * jnp.abs(s.z)
    y = bt.matmul(x.astype(s.z.dtype), lax.complex(p.a, 2 * p.a))
    z = lax.complex(0.7 * g, 0.4 * g) * jnp.conj(s.z) + jnp.conj(y)
    return {"g": g, "z": z}, z.real + z.imag**2


@case("complex", "conj_in_while", "matmul a: h", a=(3, 4), h=_complex)
def _(p, s, x):
    """No reverse mode: local Jacobians are pushed forwards."""
    h = 0.8 * s.h + jnp.conj(bt.matmul(x.astype(s.h.dtype), lax.complex(p.a, 2 * p.a)))
    h, _ = lax.while_loop(lambda c: c[1] < 2, lambda c: (mod_relu(0.9j * c[0], 0.1), c[1] + 1), (h, 0))
    return {"h": h}, s.h.real + s.h.imag**2


# -- delay lines -----------------------------------------------------------------------------------------


def _line(kind: Any, *shape: int) -> Callable[[Draw], brainstate.State]:
    return lambda draw: kind(draw(shape))


@case(
    "delay", "delay_rolled", "matmul w: h b", groups="h b", x=(2, 3), w=(3, 4), h=(2, 4),
    b=_line(brainstate.LongTermState, 3, 2, 4),
)  # fmt: skip
def _(p, s, x):
    h = jnp.tanh(0.9 * s.h + bt.matmul(x, p.w))
    return {"h": h, "b": jnp.roll(s.b, 1, 0).at[0].set(h)}, jnp.tanh(s.b[-1])


@case(
    "delay", "delay_ring", "matmul w: h b", groups="h b", w=(3, 4), o=(4, 2), h=4,
    b=_line(brainstate.DelayState, 3, 4), i=lambda draw: brainstate.ShortTermState(jnp.zeros((), int)),
)  # fmt: skip
def _(p, s, x):
    """Written at every second step, at a place that moves."""
    h = 0.9 * s.h + bt.matmul(x, p.w)
    b = lax.cond(s.i % 2 == 0, lambda b: b.at[s.i // 2 % 3].set(jnp.tanh(h)), lambda b: b, s.b)
    return {"h": h, "b": b, "i": s.i + 1}, bt.matmul(s.b[(s.i // 2 - 2) % 3] + b[s.i // 2 % 3], p.o)


@case(
    "delay", "delay_fed_back", "matmul w: h b", groups="h b", w=(3, 4), h=4, b=_line(brainstate.State, 4, 6)
)
def _(p, s, x):
    """The states of a position lie along the last axis; more than a few."""
    h = 0.9 * s.h + bt.matmul(x, p.w) - 0.3 * jnp.tanh(s.b[:, 1])
    return {"h": h, "b": jnp.concatenate([h[:, None], s.b[:, :-1]], 1)}, jnp.tanh(h)


@case(
    "delay", "delay_of_broadcast", "matmul w: h b", groups="h b", w=(3, 1), h=4,
    b=_line(brainstate.HiddenState, 2, 4), positions={0: Broadcast([0, 0, 0, 0])},
)  # fmt: skip
def _(p, s, x):
    h = 0.9 * s.h + x[0] * bt.matmul(x, p.w)
    return {"h": h, "b": jnp.stack([h, s.b[0]])}, jnp.tanh(s.b[1])


# -- sparse recurrence -----------------------------------------------------------------------------------

RING = scipy.sparse.coo_matrix((np.ones(12), ([*range(6), *range(6)], [*range(6), *range(1, 6), 0])), (6, 6))


@case("cell", "ring", "matmul wi: h; sparse_matmul w: h", wi=(3, 6), w=12, h=6, exact=False)
def _(p, s, x):
    """Each unit reads itself and its neighbour."""
    h = jnp.tanh(bt.matmul(x, p.wi) + bt.sparse_matmul(s.h, p.w, sparse_mat=RING))
    return {"h": h}, h


# -- ops from a state to itself ------------------------------------------------------------------------


def _recurrent(name: str, relation: str, h: Any, op: Callable[[Any, Any], Any], **params: Any) -> None:
    @case("recurrent", name, f"{relation}: h", x=h, h=h, exact=False, **params)
    def _(p, s, x):
        h = jnp.tanh(0.5 * s.h + x + op(p, jnp.sin(s.h)))
        return {"h": h}, jnp.tanh(h)


_RING = scipy.sparse.coo_matrix(np.eye(4) + np.roll(np.eye(4), 1, 1))
_recurrent("recurrent_conv", "conv k", (2, 2, 5), lambda p, h: bt.conv(h, p.k), k=(2, 2, 3))
_recurrent(
    "recurrent_sparse", "sparse_matmul w", (2, 4),
    lambda p, h: bt.sparse_matmul(h, p.w, sparse_mat=_RING), w=8,
)  # fmt: skip
_recurrent(
    "recurrent_grouped", "grouped_matmul w", (2, 2, 3), lambda p, h: bt.grouped_matmul(h, p.w), w=(2, 3, 3)
)
_recurrent(
    "recurrent_lora", "lora_matmul B", (2, 4), lambda p, h: bt.lora_matmul(h, p.B, p.A), B=(4, 2), A=(2, 4)
)
_recurrent(
    "recurrent_einsum", "einsum w", (2, 2, 3), lambda p, h: bt.einsum("bhd,hde->bhe", h, p.w), w=(2, 3, 3)
)
_recurrent(
    "recurrent_einsum_of_one", "einsum w", (2, 3), lambda p, h: bt.einsum("hd,hde->he", h, p.w), w=(2, 3, 3)
)
_recurrent(
    "recurrent_behind", "matmul w", (2, 4),
    lambda p, h: bt.matmul(jax.nn.sigmoid(bt.matmul(h, p.r)) * h, p.w), r=(4, 4), w=(4, 4),
)  # fmt: skip


# Models with marked ops inside of loops or branches, and with loops that end when a condition does: brute
# force cannot follow the former, and nobody can go back through the latter.
IN_CONTROL_FLOW = frozenset(
    """weight_mask_in_a_state cond cond_one_weight cond_of_state cond_roll switch scan_3 scan_40
    scan_of_inputs scan_recurrent scan_over_layers scan_through_layers cond_in_scan scan_in_cond scan_in_scan
    fori_loop fori_loop_over_units checkpoint_in_scan vmap_of_scan op_of_old_in_control_flow""".split()
)
WITH_WHILE = frozenset("while_after_op while_of_state while_that_rolls conj_in_while".split())
