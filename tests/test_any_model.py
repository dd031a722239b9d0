"""Step functions of any framework learn online as they are: against BPTT and the definitions of rules."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace as bt
from braintrace._precision import keep_x64

from .oracle import Brute, flatten, loss
from .run import some

with warnings.catch_warnings(action="ignore"):
    import equinox as eqx
    import equinox.internal as eqxi
    import haiku as hk
    from flax import linen, nnx


@pytest.fixture(autouse=True)
def as_frameworks_need_it():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


IN, UNITS, LENGTH, BATCH = 3, 4, 4, 2
ROUND_OFF = 1e-10


@dataclass(frozen=True)
class Model:
    """A step of one sample, with its parameters and carry; `batched` takes samples in front of all."""

    step: Callable[..., Any]
    params: Any
    carry: Any
    batched: Callable[..., Any]


def of_one(step: Any, params: Any, carry: Any) -> Model:
    """A step that knows no batch axis."""
    return Model(step, params, carry, lambda p, c, x: jax.vmap(partial(step, p))(c, x))


def wide(tree: Any) -> Any:
    """In float64: some frameworks make parameters of 32 bits."""
    return jax.tree.map(
        lambda a: a.astype(float) if eqx.is_inexact_array(a) and not jnp.iscomplexobj(a) else a, tree
    )


# -- cells: each of (inputs, units) ------------------------------------------------------------------

KEY = jax.random.key(0)
zeros, pair = jnp.zeros(UNITS), (jnp.zeros(UNITS), jnp.zeros(UNITS))


def of_equinox(cell: Any, carry: Any) -> Any:
    def make(inputs: int, units: int) -> Model:
        def step(cell: Any, carry: Any, x: Any) -> Any:
            carry = cell(x, carry)
            return carry, jax.tree.leaves(carry)[0]

        return of_one(step, cell(inputs, units, key=KEY), carry)

    return make


def of_nnx(cell: Any, carry: Any) -> Any:
    def make(inputs: int, units: int) -> Model:
        form, params = nnx.split(cell(inputs, units, dtype=float, param_dtype=float, rngs=nnx.Rngs(0)))
        step = lambda params, carry, x: nnx.merge(form, params)(carry, x)
        return Model(step, params, carry, step)

    return make


def of_linen(cell: Any, carry: Any) -> Any:
    def make(inputs: int, units: int) -> Model:
        module = cell(units, param_dtype=float)
        return Model(module.apply, module.init(KEY, carry, jnp.ones(inputs)), carry, module.apply)

    return make


def of_haiku(cell: Any, carry: Any) -> Any:
    def make(inputs: int, units: int) -> Model:
        def forward(carry: Any, x: Any) -> Any:
            y, carry = cell(units)(x, carry)
            return carry, y

        net = hk.without_apply_rng(hk.transform(forward))
        return Model(net.apply, net.init(KEY, carry, jnp.ones(inputs)), carry, net.apply)

    return make


def of_brainstate(cell: Any, **options: Any) -> Any:
    def make(inputs: int, units: int) -> Model:
        brainstate.random.seed(0)
        module = cell(inputs, units, **options)
        brainstate.nn.init_all_states(module)
        split = lambda module: brainstate.graph.treefy_split(module, brainstate.ParamState, ...)
        form, params, states = split(module)
        carry, tree = jax.tree.flatten(states)  # states note whether they were written

        def step(params: Any, carry: Any, x: Any) -> Any:
            module = brainstate.graph.treefy_merge(form, params, jax.tree.unflatten(tree, carry))
            y = module(x)
            return jax.tree.leaves(split(module)[2]), y

        return of_one(step, params, carry)

    return make


def weights(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.RandomState(seed).normal(size=shape) / shape[0] ** 0.5)


def integrator(inputs: int, units: int) -> Model:
    def step(params: Any, h: Any, x: Any) -> Any:
        h = params["decay"] * h + jnp.tanh(x @ params["w"] + params["b"])
        return h, h

    params = {"w": weights(inputs, units), "b": jnp.zeros(units), "decay": jnp.full(units, 0.8)}
    return of_one(step, params, zeros)


def lru(inputs: int, units: int) -> Model:
    def step(params: Any, h: Any, x: Any) -> Any:
        lam = jnp.exp(-jnp.exp(params["nu"]) + 1j * params["theta"])
        h = lam * h + (x @ params["re"] + 1j * (x @ params["im"]))
        return h, h.real @ params["out"]

    re, im, out = weights(inputs, units), weights(inputs, units, seed=1), weights(units, units, seed=2)
    params = {
        "nu": jnp.full(units, -1.0),
        "theta": jnp.linspace(0.1, 1, units),
        "re": re,
        "im": im,
        "out": out,
    }
    return of_one(step, params, jnp.zeros(units, complex))


def leaky(inputs: int, units: int) -> Model:
    def step(params: Any, carry: Any, x: Any) -> Any:
        h = carry["h"] + 0.3 * (jnp.tanh(x @ params["w"] + carry["h"] @ params["r"]) - carry["h"])
        return {"h": h, "count": carry["count"] + 1}, h

    params = {"w": weights(inputs, units), "r": weights(units, units, seed=1)}
    return of_one(step, params, {"h": zeros, "count": jnp.zeros((), int)})


def dotted(inputs: int, units: int) -> Model:
    """Paths that read alike."""

    def step(params: Any, h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ params["in"] @ params["a.b"] + h @ params["a"]["b"])
        return h, h

    square = [weights(units, units, seed=seed) for seed in (1, 2)]
    return of_one(step, {"in": weights(inputs, units), "a.b": square[0], "a": {"b": square[1]}}, zeros)


CELLS = {
    "integrator": integrator,
    "lru": lru,
    "leaky": leaky,
    "dotted": dotted,
    "eqx.GRUCell": of_equinox(eqx.nn.GRUCell, zeros),
    "eqx.LSTMCell": of_equinox(eqx.nn.LSTMCell, pair),
    "nnx.SimpleCell": of_nnx(nnx.SimpleCell, zeros),
    "nnx.GRUCell": of_nnx(nnx.GRUCell, zeros),
    "nnx.LSTMCell": of_nnx(nnx.LSTMCell, pair),
    "nnx.OptimizedLSTMCell": of_nnx(nnx.OptimizedLSTMCell, pair),
    "linen.SimpleCell": of_linen(linen.SimpleCell, zeros),
    "linen.GRUCell": of_linen(linen.GRUCell, zeros),
    "linen.LSTMCell": of_linen(linen.LSTMCell, pair),
    "linen.MGUCell": of_linen(linen.MGUCell, zeros),
    "hk.VanillaRNN": of_haiku(hk.VanillaRNN, zeros),
    "hk.GRU": of_haiku(hk.GRU, zeros),
    "hk.LSTM": of_haiku(hk.LSTM, hk.LSTMState(*pair)),
    "brainstate.ValinaRNNCell": of_brainstate(brainstate.nn.ValinaRNNCell),
    "brainstate.GRUCell": of_brainstate(brainstate.nn.GRUCell),
    "brainstate.LSTMCell": of_brainstate(brainstate.nn.LSTMCell),
    "brainstate.MGUCell": of_brainstate(brainstate.nn.MGUCell),
}


def stacked(cell: Any) -> Model:
    """Two cells, with an MLP in front and one behind."""
    first, second = cell(IN, UNITS), cell(UNITS, UNITS)
    params = {
        "front": [weights(IN, 5), weights(5, IN, seed=1)],
        "first": first.params,
        "second": second.params,
        "behind": [weights(UNITS, 5, seed=2), weights(5, 2, seed=3)],
    }

    def mlp(ws: Any, x: Any) -> Any:
        return jnp.tanh(x @ ws[0]) @ ws[1]

    def through(first: Any, second: Any, params: Any, carry: Any, x: Any) -> Any:
        a, x = first(params["first"], carry[0], mlp(params["front"], x))
        b, y = second(params["second"], carry[1], x)
        return (a, b), mlp(params["behind"], y)

    step = partial(through, first.step, second.step)
    return Model(step, params, (first.carry, second.carry), partial(through, first.batched, second.batched))


MODELS = {name: partial(make, IN, UNITS) for name, make in CELLS.items()}
TWICE = ("integrator", "lru", "eqx.LSTMCell", "nnx.GRUCell", "linen.LSTMCell", "hk.GRU", "brainstate.MGUCell")
STACKS = {f"two {name}": partial(stacked, CELLS[name]) for name in TWICE}
QUICK = ("integrator", "nnx.GRUCell", "two eqx.LSTMCell")
RANKED = ("lru", "dotted", "hk.GRU", "two eqx.LSTMCell")


def each(models: Any) -> Any:
    return pytest.mark.parametrize(
        "name", [pytest.param(n, marks=() if n in QUICK[:2] else pytest.mark.slow) for n in models]
    )


@cache
def model_of(name: str) -> Model:
    model = {**MODELS, **STACKS}[name]()
    return Model(model.step, wide(model.params), model.carry, model.batched)


def data() -> Any:
    return jnp.asarray(np.random.RandomState(0).normal(size=(LENGTH, BATCH, IN)))


def online(model: Model, rule: Any = None) -> Any:
    return bt.online(model.step, model.params, model.carry, jnp.ones(IN), rule=rule)


def gradient(net: Any, model: Model, xs: Any, **options: Any) -> Any:
    def of(xs: Any) -> Any:
        traces = net.init(model.params, model.carry)
        return net.grad(loss, model.params, model.carry, traces, xs, reduction="sum", **options)[0]

    return jax.jit(of)(xs)


def through_time(model: Model, xs: Any) -> Any:
    def total(params: Any) -> Any:
        def one(carry: Any, x: Any) -> Any:
            carry, y = model.step(params, carry, x)
            return carry, loss(y)

        return jnp.sum(jax.lax.scan(one, model.carry, xs)[1])

    return jax.jit(jax.grad(total))(model.params)


def by_steps(net: Any, model: Model, xs: Any) -> Any:
    """The sum of the gradients of single steps, by `jax.grad`."""

    def one(state: Any, x: Any) -> Any:
        def value(params: Any) -> Any:
            carry, traces, y = net.step(params, *state, x)
            return loss(y), (carry, traces)

        grads, state = jax.grad(value, has_aux=True)(model.params)
        return state, grads

    start = model.carry, net.init(model.params, model.carry)
    return jax.tree.map(lambda g: g.sum(0), jax.jit(lambda: jax.lax.scan(one, start, xs)[1])())


def by_definition(net: Any, model: Model, xs: Any) -> Any:
    step = net.graph.module_info.step  # with the marks that were found
    values = [*net.function.params.leaves(model.params), *net.function.carry.leaves(model.carry)]
    is_param = [st.role.value == "parameter" for st in step.states]
    flat = flatten(step.closed_jaxpr, [xs[0]], values, [st.path for st in step.states], is_param)
    return list(Brute(flat, xs[0], net.graph).d_rtrl(list(xs)).values())


def differences(a: Any, b: Any) -> list[float]:
    """The largest difference of each parameter's gradient, relative to its largest entry."""
    pairs = zip(*(map(np.asarray, jax.tree.leaves(tree)) for tree in (a, b)), strict=True)
    return [float(np.max(np.abs(x - y)) / max(float(np.max(np.abs(x))), 1e-8)) for x, y in pairs]


def agree(a: Any, b: Any, tolerance: float = ROUND_OFF) -> bool:
    return max(differences(a, b)) < tolerance


@each({**MODELS, **STACKS})
def test_rules_against_bptt_and_their_definitions(name):
    model, xs = model_of(name), data()[:, 0]
    truth, net = through_time(model, xs), online(model)
    assert agree(truth, gradient(net.with_rule(bt.rules.RTRL()), model, xs, chunk_size=1))
    if name in RANKED:
        assert agree(truth, gradient(online(model, bt.rules.D_RTRL(rank=10**6)), model, xs))
    found = gradient(net, model, xs)
    if name not in ("lru", "two lru"):  # brute force knows real numbers only
        assert agree(found, by_definition(net, model, xs))
    if name in some(2, MODELS):
        assert agree(found, by_steps(net, model, xs))
    if name in QUICK:
        assert agree(truth, gradient(net.with_rule(bt.rules.BPTT()), model, xs))
        assert agree(found, gradient(net, model, xs, chunk_size=2))
    paths, verdict = net.function.params.paths, net.report.exactness
    differ = {p for p, d in zip(paths, differences(truth, found), strict=True) if d > ROUND_OFF}
    assert differ == set(verdict.weights), str(verdict)
    assert verdict.exact == (name in ("integrator", "lru")), str(verdict)


@each((*TWICE, "two eqx.LSTMCell"))
def test_samples_inside_or_outside(name):
    model, xs = model_of(name), data()
    carry = jax.tree.map(lambda a: jnp.broadcast_to(a, (BATCH, *a.shape)), model.carry)
    inside = Model(model.batched, model.params, carry, model.batched)
    found = gradient(bt.online(inside.step, inside.params, carry, xs[0]), inside, xs)
    net = online(model)
    mapped = jax.jit(jax.vmap(partial(gradient, net, model), 1))(xs)
    assert agree(jax.tree.map(lambda g: g.sum(0), mapped), found)


@each({**MODELS, **STACKS})
def test_training(name):
    """To hold a number that came at the first step."""
    model, optimizer = model_of(name), optax.adam(0.03)
    net, xs = online(model), data()[:, 0].at[1:].set(0.0)
    target = lambda y: jnp.mean((y - 0.3) ** 2)

    @jax.jit
    def train(params: Any, state: Any) -> Any:
        traces = net.init(params, model.carry)
        grads, _, (losses, _) = net.grad(target, params, model.carry, traces, xs)
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state, losses.mean()

    params, state, values = model.params, optimizer.init(model.params), []
    for _ in range(15):
        params, state, value = train(params, state)
        values.append(float(value))
    assert values[-1] < 0.7 * values[0]


# -- the learner of Flax NNX ---------------------------------------------------------------------------


class Net(nnx.Module):
    """With running statistics and random numbers."""

    def __init__(self) -> None:
        rngs, types = nnx.Rngs(0), {"dtype": float, "param_dtype": float}
        self.front = nnx.Linear(IN, UNITS, use_bias=False, rngs=rngs, **types)
        self.norm = nnx.BatchNorm(UNITS, rngs=rngs, **types)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.cell = nnx.LSTMCell(UNITS, UNITS, rngs=rngs, **types)

    def __call__(self, carry: Any, x: Any) -> Any:
        return self.cell(carry, self.drop(self.norm(self.front(x))))


def learner_of(net: Any, **options: Any) -> Any:
    carry = jnp.ones((UNITS, UNITS)), jnp.zeros((UNITS, UNITS))  # as many samples as units
    return bt.nnx.Learner(net, carry, jnp.ones((UNITS, IN)), **options)


@pytest.mark.slow
def test_nnx_learner():
    same = partial(agree, tolerance=1e-6)  # `BatchNorm` takes its statistics in float32
    xs = jnp.asarray(np.random.RandomState(0).normal(size=(4, UNITS, IN)))
    flags = jnp.zeros((4, UNITS), bool).at[2, 1].set(True)
    whole, halves, steps, plain = Net(), Net(), Net(), Net()
    learner = learner_of(whole)
    grads, losses, aux = learner.grad(
        lambda y: (loss(y), y.sum()), xs, reset=flags, has_aux=True, return_value=True, reduction="sum"
    )
    assert jax.tree.structure(grads) == jax.tree.structure(nnx.state(whole, nnx.Param))
    assert losses.shape == aux.shape == (4,)

    # what is kept between calls, under jit, one sample begun anew by hand
    other = learner_of(halves)
    grad = nnx.jit(lambda learner, xs: learner.grad(loss, xs, reduction="sum"))
    first = grad(other, xs[:2])
    other.reset(flags[2])
    assert same(grads, jax.tree.map(jnp.add, first, grad(other, xs[2:])))

    # step by step; statistics and random numbers advance as in the module itself
    third = learner_of(steps)
    total = jax.tree.map(jnp.zeros_like, grads)
    carry = third.functions.start[:2]
    step = nnx.jit(nnx.grad(lambda learner, x: loss(learner(x)), argnums=nnx.DiffState(0, nnx.Param)))
    for x, flag in zip(xs, flags, strict=True):
        third.reset(flag)
        total = jax.tree.map(jnp.add, total, step(third, x)["module"])
        start = jnp.ones_like(carry[0]), jnp.zeros_like(carry[1])
        carry = [jnp.where(flag[:, None], a, b) for a, b in zip(start, carry, strict=True)]
        carry, _ = plain(tuple(carry), x)
    assert same(grads, total)
    for net in (whole, halves, steps):
        assert same(nnx.state(plain, nnx.BatchStat), nnx.state(net, nnx.BatchStat))
        assert int(net.drop.rngs.count[...]) == 4
    assert not any("norm" in ".".join(p) for g in learner.report.hidden_groups for p in g.hidden_paths)

    # another form: without dropout and statistics of the batch
    whole.eval()
    learner.reset()
    carry = jax.tree.map(jnp.asarray, start)
    assert same(whole(carry, xs[0])[1], learner(xs[0]))
    assert int(whole.drop.rngs.count[...]) == 4


@pytest.mark.slow
def test_nnx_learner_is_given_a_modulator():
    cell = nnx.SimpleCell(3, 4, dtype=jnp.float64, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    rule = bt.rules.D_RTRL(signal=bt.rules.Modulator())
    learner = bt.nnx.Learner(cell, jnp.zeros((2, 4)), jnp.ones((2, 3)), rule=rule)
    xs, m = jnp.ones((3, 2, 3)), jnp.arange(6.0).reshape(3, 2)
    once = learner.grad(lambda y: jnp.sum(y), xs, modulator=m)
    learner.reset()
    twice = learner.grad(lambda y: jnp.sum(y), xs, modulator=2 * m)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.allclose(2 * a, b), once, twice))
    assert learner(xs[0], modulator=m[0]).shape == (2, 4)
    with pytest.raises(ValueError, match="modulator"):
        learner(xs[0])


@pytest.mark.slow
def test_nnx_optimizer():
    net, xs = Net(), jnp.ones((4, UNITS, IN))
    learner = learner_of(net, rule=bt.rules.ES_D_RTRL(0.5))
    optimizer = nnx.Optimizer(net, optax.adam(0.03), wrt=nnx.Param)

    @nnx.jit
    def train(learner: Any, optimizer: Any) -> Any:
        learner.reset()
        grads, losses = learner.grad(lambda y: jnp.mean((y - 0.3) ** 2), xs, return_value=True)
        optimizer.update(learner.module, grads)
        return losses.mean()

    values = [float(train(learner, optimizer)) for _ in range(15)]
    assert values[-1] < 0.7 * values[0]


# -- checks, plans, types, mistakes --------------------------------------------------------------------


def test_check_and_plan():
    model, xs = model_of("integrator"), data()[:, 0]
    net = online(model)
    check = net.check(loss, model.params, model.carry, xs)
    assert check.equal
    assert [p.path for p in check.parameters] == [("params", "b"), ("params", "decay"), ("params", "w")]
    plan = net.plan(4, rules=["D_RTRL", "BPTT"], chunk_sizes=[2])
    assert [(r.rule, r.exact) for r in plan.rows] == [("D_RTRL", True), ("BPTT", True)]
    assert plan.parameter_bytes == 8 * (IN + 2) * UNITS
    assert plan.row("D_RTRL").trace_bytes == sum(
        a.nbytes for a in net.init(model.params, model.carry).values()
    )
    leaky = model_of("leaky")
    check = online(leaky).check(loss, leaky.params, leaky.carry, xs)
    assert {p.cause for p in check.parameters} == {"rule"}


def test_parameters_of_fewer_bits_than_the_carry():
    model, xs = model_of("integrator"), data()[:, 0]
    narrow = jax.tree.map(lambda a: a.astype(jnp.float32), model.params)
    model = Model(model.step, narrow, model.carry, model.batched)
    truth = through_time(model, xs)
    for rule, size in ((bt.rules.RTRL(), 1), (bt.rules.D_RTRL(), 2)):
        found = gradient(online(model, rule), model, xs, chunk_size=size)
        assert {a.dtype for a in found.values()} == {jnp.dtype(jnp.float32)}
        assert max(differences(truth, found)) < 1e-5


def test_chunks_of_windows_change_nothing():
    model, xs = model_of("leaky"), data()[:, 0]
    net = bt.online(model.step, model.params, model.carry, xs[0], window=3)
    assert agree(gradient(net, model, xs), gradient(net, model, xs, chunk_size=2))


def test_numbers_of_python_among_the_parameters_are_static():
    class Cell(eqx.Module):
        w: Any
        decay: float
        drop: eqx.nn.Dropout

        def __call__(self, h: Any, x: Any) -> Any:
            h = self.decay * h + x @ self.drop(self.w, inference=True)
            return h, h

    cell, h = Cell(weights(IN, UNITS), 0.8, eqx.nn.Dropout(0.5)), jnp.zeros(UNITS)
    net = bt.online(Cell.__call__, cell, h, jnp.ones(IN))
    grads = net.grad(loss, cell, h, net.init(cell, h), data()[:, 0], chunk_size=1)[0]
    assert jax.tree.structure(grads) == jax.tree.structure(eqx.filter(cell, eqx.is_inexact_array))
    with pytest.raises(ValueError, match="no array, but static"):
        net.init(eqx.tree_at(lambda c: c.decay, cell, jnp.ones(())), h)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rule": 3}, "`rule` is a rule such as"),
        ({"rule": "drtrl"}, "did you mean 'd_rtrl'"),
        ({"mark": "all"}, "`mark` is 'ops'"),
        ({"window": 0}, "`window` is a number of steps"),
        ({"window": True}, "`window` is a number of steps"),
        ({"rule": bt.rules.D_RTRL(), "rank": 2}, "takes no option 'rank' next to it"),
        ({"rule": "rtrl", "rank": 2}, "RTRL: .*'rank'"),
        ({"step": lambda params, carry, x: ((carry, carry), x)}, "another structure"),
        ({"step": lambda params, carry, x: carry}, "returns a pair"),
        ({"step": lambda params, carry, x: carry}, "order='carry x -> carry'"),
        ({"step": lambda params, carry, x: (x, carry)}, "order='carry x -> y carry'"),
        ({"step": lambda params, a, b: (a @ params["w"], b)}, "order='x carry -> carry y'"),
        ({"step": lambda params, a, b: (a, a @ params["w"] + b)}, "order='x carry -> y carry'"),
        (
            {"step": lambda params, x, h: (x + h, h), "x": jnp.ones(UNITS)},
            "by its shapes or names, `params x carry -> carry y`",
        ),
        ({"order": "x h -> y h"}, "`order` is such as"),
        ({"order": "x carry -> carry y"}, "order='carry x -> carry y'"),
        (
            {"step": lambda params, carry, x: (carry[None], x)},
            r"float64\[4\] before a step and float64\[1, 4\]",
        ),
        (
            {"step": lambda params, carry, x: (carry > 0, x)},
            r"float64\[4\] before a step and bool\[4\] after",
        ),
        ({"untraced": ["stats"]}, "`untraced` has 'stats'; the leaves of the carry are"),
    ],
)
def test_mistakes_are_named(options, words):
    model = model_of("integrator")
    given = {"step": model.step, "params": model.params, "carry": model.carry, "x": jnp.ones(IN)} | options
    with pytest.raises((TypeError, ValueError, bt.CompilationError), match=words):
        bt.online(**given)


@pytest.mark.parametrize("rule", ["rtrl", "RTRL", bt.RTRL, bt.rules.RTRL, bt.BPTT])
def test_rules_by_name_and_by_class(rule):
    model = model_of("integrator")
    assert (
        type(online(model, rule).rule).__name__ == (rule if isinstance(rule, str) else rule.__name__).upper()
    )


def test_options_of_a_rule_next_to_its_name():
    model = model_of("integrator")
    of = partial(bt.online, model.step, model.params, model.carry, jnp.ones(IN))
    assert of(rank=2, basis="pushed", window=3).rule == bt.rules.D_RTRL(rank=2, basis="pushed")
    assert (of(rank=2).window, of(rank=2, window=3).window) == (1, 3)
    assert of(rule=bt.ES_D_RTRL, decay_or_rank=0.5).rule == bt.rules.ES_D_RTRL(0.5)
    assert of(rule=("es_d_rtrl", {"window": 2}), decay_or_rank=0.5).window == 2
    learner = bt.nnx.Learner(
        nnx.GRUCell(IN, 2, rngs=nnx.Rngs(0)), jnp.zeros(2), jnp.ones(IN), across="layers"
    )
    assert learner.functions.rule == bt.rules.D_RTRL(across="layers")


def test_other_orders():
    cell, h, xs = eqx.nn.GRUCell(IN, UNITS, key=KEY), jnp.zeros(UNITS), data()[:, 0]
    usual = online(model_of("eqx.GRUCell"))
    orders = {
        "x carry -> carry": eqx.nn.GRUCell.__call__,
        "x carry -> y carry": lambda cell, x, h: (cell(x, h),) * 2,
        "carry x -> y carry": lambda cell, h, x: (cell(x, h),) * 2,
        "x carry -> carry y": lambda cell, x, h: (cell(x, h),) * 2,
    }
    want = usual.step(wide(cell), h, usual.init(wide(cell), h), xs[0])[::2]
    for order, step in orders.items():
        net = bt.online(step, wide(cell), h, xs[0], order=order)
        assert agree(want, net.step(wide(cell), h, net.init(wide(cell), h), xs[0])[::2])


class InputFirst(nnx.Module):
    def __init__(self, outputs: int) -> None:
        self.w, self.r, self.out = (
            nnx.Linear(i, o, rngs=nnx.Rngs(0)) for i, o in ((IN, UNITS), (UNITS, UNITS), (UNITS, outputs))
        )

    def __call__(self, a: Any, b: Any) -> Any:
        h = jnp.tanh(self.w(a) + self.r(b))
        return self.out(h), h


def test_nnx_modules_of_another_order():
    h, x = jnp.zeros(UNITS), jnp.ones(IN)
    with pytest.raises(bt.CompilationError, match=r"InputFirst is, .*pass `order='x carry -> y carry'`"):
        bt.nnx.Learner(InputFirst(2), h, x)
    learner = bt.nnx.Learner(InputFirst(2), h, x, order="x carry -> y carry", rule="es_d_rtrl")
    assert learner(x).shape == (2,)


def test_nnx_without_flax(monkeypatch):
    monkeypatch.delitem(sys.modules, "braintrace.nnx", raising=False)
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install braintrace\[nnx\]"):
        importlib.import_module("braintrace.nnx")


def test_a_carry_without_a_trace():
    def step(params: Any, carry: Any, x: Any) -> Any:
        h = 0.9 * carry["h"] + x @ params["w"]
        mean = 0.5 * carry["stats"]["mean"] + 0.5 * jax.lax.stop_gradient(jnp.mean(h))
        return {"h": h, "stats": {"mean": mean}}, h - mean

    params, xs = {"w": weights(IN, UNITS)}, data()[:, 0]
    carry = {"h": jnp.zeros(UNITS), "stats": {"mean": jnp.zeros(())}}
    net = bt.online(step, params, carry, xs[0], untraced=["stats"])
    assert [g.hidden_paths for g in net.graph.hidden_groups] == [[("carry", "h")]]
    check = net.check(loss, params, carry, xs)
    assert check.equal
    assert check.exactness.exact

    def live(params: Any, carry: Any, x: Any) -> Any:
        new, y = step(params, carry, x + carry["stats"]["mean"])
        return {**new, "stats": {"mean": jnp.mean(y)}}, y

    net = bt.online(live, params, carry, xs[0], untraced=["stats"])
    with pytest.warns(UserWarning, match=r"`carry\.stats\.mean` \(carry\), which has no trace"):
        assert not net.report.exactness.exact


def test_other_shapes_are_named():
    model = model_of("integrator")
    net = online(model)
    with pytest.raises(
        TypeError, match="The loss function must return the loss of the step; it returned None"
    ):
        net.grad(lambda y: None, model.params, model.carry, net.init(model.params, model.carry), data()[:, 0])
    with pytest.raises(ValueError, match=r"`params.b` has the shape \(1,\), and had"):
        net.init({**model.params, "b": jnp.zeros(1)}, model.carry)
    with pytest.raises(ValueError, match=r"`x` has the shape"):
        gradient(net, model, data())


def total_of(net: Any, model: Model, xs: Any, params: Any) -> Any:
    """The summed loss of single steps in a loop."""

    def one(state: Any, x: Any) -> Any:
        carry, traces, y = net.step(params, *state, x)
        return (carry, traces), loss(y)

    return jnp.sum(jax.lax.scan(one, (model.carry, net.init(params, model.carry)), xs)[1])


def squared_gradient(function: Any) -> Any:
    return lambda params: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(function)(params)))


@pytest.mark.parametrize("window", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_second_derivatives_are_refused(window):
    model, xs = model_of("leaky"), data()[:2, 0]
    params = model.params
    net = bt.online(model.step, params, model.carry, xs[0], window=window)
    total, ones = partial(total_of, net, model, xs), jax.tree.map(jnp.ones_like, params)
    first = jax.grad(total)(params)
    transposed = jax.linear_transpose(jax.linearize(total, params)[1], params)(1.0)[0]
    for again in (transposed, jax.vjp(jax.checkpoint(total), params)[1](1.0)[0]):
        assert agree(first, again)
    losses = lambda params: jnp.sum(net.grad(loss, params, model.carry, {**traces}, xs)[2][0])
    traces = net.init(params, model.carry)
    for second in (
        lambda: jax.grad(squared_gradient(total))(params),
        lambda: jax.jit(jax.grad(squared_gradient(jax.jit(total))))(params),
        lambda: jax.jvp(jax.grad(total), (params,), (ones,)),
        lambda: jax.vmap(lambda s: jax.jvp(jax.grad(total), (params,), (s,)))(
            jax.tree.map(lambda a: a[None], ones)
        ),
        lambda: jax.lax.scan(lambda p, _: (p, jax.grad(squared_gradient(total))(p)), params, None, 1),
        lambda: jax.grad(lambda p: jax.jvp(total, (p,), (ones,))[1])(params),
    ):
        with pytest.raises(bt.NotSupportedError, match=r"is differentiated again.*rules\.BPTT"):
            second()
    with pytest.raises(bt.NotSupportedError, match="is differentiated again"):
        jax.grad(losses)(params)


@pytest.mark.parametrize("window", [None, 2])
def test_forward_mode_derivatives_are_refused(window):
    model, xs = model_of("leaky"), data()[:2, 0]
    params = model.params
    net = bt.online(model.step, params, model.carry, xs[0], window=window)
    total, ones = partial(total_of, net, model, xs), jax.tree.map(jnp.ones_like, params)
    one = lambda x: net.step(params, model.carry, net.init(params, model.carry), x)[2]
    for forward in (
        lambda: jax.jvp(total, (params,), (ones,)),
        lambda: jax.jit(jax.jacfwd(total))(params),
        lambda: jax.linearize(total, params)[1](ones),
        lambda: jax.jvp(one, (xs[0],), (xs[0],)),
        lambda: jax.jit(jax.jacfwd(one))(xs[0]),
    ):
        with pytest.raises(bt.NotSupportedError, match=r"forward-mode derivative.*Use `jax\.grad`"):
            forward()


@pytest.mark.slow
def test_second_derivatives_of_bptt():
    model, xs = model_of("leaky"), data()[:2, 0]
    net = online(model, bt.rules.BPTT())

    def truth(params: Any) -> Any:
        return squared_gradient(lambda p: jnp.sum(jax.lax.scan(partial(step, p), model.carry, xs)[1]))(params)

    def step(params: Any, carry: Any, x: Any) -> Any:
        carry, y = model.step(params, carry, x)
        return carry, loss(y)

    def found(params: Any) -> Any:
        grads = net.grad(loss, params, model.carry, {}, xs, reduction="sum")[0]
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))

    expected = jax.grad(truth)(model.params)
    assert agree(expected, jax.grad(squared_gradient(partial(total_of, net, model, xs)))(model.params))
    assert agree(expected, jax.grad(found)(model.params))


@pytest.mark.parametrize("traced", [False, True])
def test_a_loss_that_closes_over_parameters_is_warned_of(traced):
    model, xs = model_of("leaky"), data()[:, 0]

    def gradient(params: Any, penalty: Any) -> Any:
        net = online(model)
        traces = net.init(params, model.carry)
        return net.grad(lambda y: loss(y) + penalty(params), params, model.carry, traces, xs)[0]

    run = jax.jit(gradient, static_argnums=1) if traced else gradient
    with pytest.warns(UserWarning, match=r"closes over `params\.w`: what it reads there is a constant"):
        run(model.params, lambda params: jnp.sum(params["w"] ** 2))
    with warnings.catch_warnings(action="error"):
        run(model.params, lambda params: jax.lax.stop_gradient(jnp.sum(params["w"] ** 2)))


def test_the_users_precision_is_kept(monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", "True")
    brainstate.environ.set(precision=32)  # as `import brainstate` does
    keep_x64()
    assert jax.config.jax_enable_x64
    assert brainstate.environ.get_precision() == 64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "before", "after"),
    [
        ("0", "import jax; jax.config.update('jax_enable_x64', True)", "import brainstate"),
        ("0", "", "jax.config.update('jax_enable_x64', True); import brainstate"),
        ("1", "", "braintrace.fit"),
        ("1", "import brainstate", ""),
    ],
)
def test_the_users_precision_survives_the_import(value, before, after):
    code = f"{before}\nimport braintrace, jax\n{after}\nassert jax.numpy.ones(1).dtype == 'float64'"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "JAX_ENABLE_X64": value})


def checkpointed(*args: Any) -> Any:
    return eqxi.while_loop(*args, max_steps=16, kind="checkpointed")


def plain_loop_of_spikes(goes_on: Any, one: Any, start: Any) -> Any:
    spike = jax.custom_vjp(lambda h: h)
    spike.defvjp(lambda h: (h, None), lambda _, g: (g,))
    return jax.lax.while_loop(goes_on, lambda c: one((spike(c[0]), c[1])), start)


def within(loop: Any) -> Model:
    """Units that go to what they are given in five steps of a loop."""

    def step(p: Any, h: Any, x: Any) -> Any:
        u = jnp.tanh(x @ p["w"])
        h, _ = loop(lambda c: c[1] < 5, lambda c: (c[0] + 0.1 * (u - c[0]), c[1] + 1), (h, 0))
        return h, jnp.sin(h)

    return of_one(step, {"w": weights(IN, UNITS)}, zeros)


@pytest.mark.parametrize("window", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_a_checkpointed_loop_has_a_reverse_mode(window):
    model, xs = within(checkpointed), data()[:, 0]
    net = bt.online(model.step, model.params, model.carry, xs[0], window=window)
    assert net.report.exactness.exact
    assert agree(through_time(model, xs), gradient(net, model, xs, chunk_size=2))


@pytest.mark.parametrize(
    ("loop", "rule", "words"),
    [
        (checkpointed, bt.rules.UORO(), "has a `while` loop in its backward pass"),
        (plain_loop_of_spikes, bt.rules.D_RTRL(), "`custom_vjp` function at .* has no forward mode"),
    ],
)
def test_loops_that_a_rule_cannot_follow_are_refused_with_their_line(loop, rule, words):
    model = within(loop)
    with pytest.raises(bt.NotSupportedError, match=rf"test_any_model.py(.|\n)*{words}"):
        gradient(online(model, rule), model, data()[:, 0])
