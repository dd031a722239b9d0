"""Many devices: the numbers of one, laid out as inputs and weights are, and nothing sent that need not be."""

from __future__ import annotations

import itertools
import re
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import braintrace
from braintrace import nn
from braintrace._executor import pending_kernels, pending_steps
from braintrace._frontends.pure import Pure
from braintrace._report.collectives import bytes_sent, collectives
from braintrace._rules.deferred import is_pending

from .run import every

TIME, BATCH, IN, UNITS = 4, 8, 4, 8

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


def mesh_of(shape: tuple[int, int], kind: AxisType) -> Any:
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind, kind))


def is_explicit(mesh: Any) -> bool:
    return AxisType.Explicit in mesh.axis_types


# -- models ----------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """`neuron([x, z] W)`, with the spikes `z` of the step before."""

    def __init__(self, linear: Callable[[int, int], Any], neuron: Any) -> None:
        super().__init__()
        self.linear, self.neuron = linear(IN + UNITS, UNITS), neuron

    def update(self, x: Any) -> Any:
        return self.neuron(self.linear(jnp.concatenate([x, self.neuron.get_spike()], -1)))


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d((4, 2), UNITS, 3)
        self.neuron = nn.LIF((4, UNITS))

    def update(self, x: Any) -> Any:
        return self.neuron(self.conv(x.reshape(-1, IN, 1) * jnp.ones((1, 1, 2), x.dtype)))


class Read(nn.Module):
    """Two layers of spiking units, the first with recurrence, and a readout of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Recurrent(nn.Linear, nn.LIF(UNITS))
        self.second, self.neuron = nn.Linear(UNITS, UNITS), nn.LIF(UNITS)
        self.readout = nn.Linear(UNITS, 2)

    def update(self, x: Any) -> Any:
        return self.readout(self.neuron(self.second(self.first(2.0 * x))))


def sparse(rows: int, columns: int) -> Any:
    matrix = scipy.sparse.random(rows, columns, 0.5, format="csr", random_state=0)
    return nn.SparseLinear(matrix)


MODELS: dict[str, Callable[[], Any]] = {
    "GRU": lambda: nn.GRUCell(IN, UNITS),
    "LSTM": lambda: nn.LSTMCell(IN, UNITS),
    "LIF": lambda: Recurrent(nn.Linear, nn.LIF(UNITS)),
    "ALIF": lambda: Recurrent(nn.Linear, nn.ALIF(UNITS)),
    "conv": Convolved,
    "LoRA": lambda: Recurrent(lambda a, b: nn.LoRA(a, 2, b), nn.LIF(UNITS)),
    "sparse": lambda: Recurrent(sparse, nn.LIF(UNITS)),
    "two layers": lambda: nn.Sequential(nn.GRUCell(IN, UNITS), nn.ValinaRNNCell(UNITS, UNITS)),
}
RULES = {
    "D_RTRL": braintrace.rules.D_RTRL(),
    "ES_D_RTRL": braintrace.rules.ES_D_RTRL(),
    "RTRL": braintrace.rules.RTRL(),
    "BPTT": None,
    "rank": braintrace.rules.D_RTRL(rank=1),
}
# learners with more to keep, on one model: in windows, and by what their signal is made of
WINDOWS: dict[str, Callable[[Any, int], Any]] = {
    "windows": lambda m, k: braintrace.D_RTRL(m, window=k),
    "rank": lambda m, k: braintrace.D_RTRL(m, rank=2, window=k),
    "layers": lambda m, k: braintrace.D_RTRL(m, across="layers", window=k),
    "SnAp": lambda m, k: braintrace.SnAp(m, 2, window=k),
    "UORO": lambda m, k: braintrace.UORO(m, window=k),
    "KF_RTRL": lambda m, k: braintrace.KF_RTRL(m, window=k),
    "DNI": lambda m, k: synthetic(braintrace.DNI(m, window=k)),
}
SIGNALS: dict[str, Callable[[Any], Any]] = {
    "EProp": lambda m: braintrace.EProp(m, "random", 0.6),
    "EProp adaptive": lambda m: braintrace.EProp(m, "adaptive", 0.6, feedback_decay=0.1),
    "RFLO": lambda m: braintrace.RFLO(m, 0.85),
    "OSTLRecurrent": lambda m: braintrace.OSTLRecurrent(m),
    "OSTLFeedforward": lambda m: braintrace.OSTLFeedforward(m, 0.9),
    "OTTT": lambda m: braintrace.OTTT(m, leak=0.8),
    "OTPE": lambda m: braintrace.OTPE(m, leak=0.8),
    "OTPE approx": lambda m: braintrace.OTPE(m, "approx", leak=0.8),
    "OSTTP": lambda m: braintrace.OSTTP(m, num_targets=3),
    "S_TLLR": lambda m: braintrace.S_TLLR(m, 0.5, 0.7, 1.2, -0.4),
    "ThreeFactor": lambda m: braintrace.ThreeFactor(m),
}


def synthetic(learner: Any) -> Any:
    shapes = {0: (BATCH, UNITS, 1), 1: (BATCH, UNITS, 1)}
    learner.attach_synthesizer(braintrace.SyntheticGradient(shapes, scale=0.1))
    return learner


SHAPES = [(8, 1), (4, 2), (1, 8)]
KINDS = [AxisType.Auto, AxisType.Explicit]
CHUNKS = [None, 2, 1]

# every model with every rule; shapes, types and chunks so that each pair is among them
TABLE = [
    (model, rule, SHAPES[(i + j) % 3], KINDS[(i // 2 + j // 2) % 2], CHUNKS[(j + i // 3) % 3])
    for i, model in enumerate(MODELS)
    for j, rule in enumerate(RULES)
]


def test_the_table_has_every_pair():
    columns = [list(MODELS), list(RULES), SHAPES, KINDS, CHUNKS]
    for a, b in itertools.combinations(range(5), 2):
        pairs = set(itertools.product(columns[a], columns[b]))
        assert {(row[a], row[b]) for row in TABLE} == pairs, (a, b)


# -- the numbers of one device ---------------------------------------------------------------------


def data() -> tuple[Any, Any]:
    rng = np.random.RandomState(0)
    return jnp.asarray(rng.normal(size=(TIME, BATCH, IN))), jnp.asarray(rng.normal(size=(TIME, BATCH)))


def put(array: Any, mesh: Any, *spec: Any) -> Any:
    """An array on a mesh; an axis that cannot be cut evenly stays whole."""
    fits = [n if n and size % mesh.shape[n] == 0 else None for n, size in zip(spec, array.shape, strict=True)]
    return jax.device_put(array, NamedSharding(mesh, P(*fits)))


def learned(name: str, rule: str, chunk: int | None, mesh: Any = None) -> tuple[Any, Any, Any]:
    """A learner after a sequence, its gradients, and how its traces were laid out before."""
    brainstate.random.seed(0)
    with brainstate.environ.context(dt=1.0 * u.ms), warnings.catch_warnings(action="ignore"):
        with jax.numpy_rank_promotion("allow"):
            model = MODELS.get(name, Read)()
        brainstate.nn.init_all_states(model, batch_size=BATCH)
        xs, ys = data()
        if mesh is not None:
            xs, ys = put(xs, mesh, None, "data", None), put(ys, mesh, None, "data")
            for st in model.states(brainstate.ParamState).values():
                st.value = jax.tree.map(lambda a: put(a, mesh, *[None] * (a.ndim - 1), "model"), st.value)
        with jax.set_mesh(mesh) if mesh is not None and is_explicit(mesh) else nullcontext():
            return _learned(model, rule, chunk, xs, ys)


def _learned(model: Any, rule: str, chunk: int | None, xs: Any, ys: Any) -> tuple[Any, Any, Any]:
    if rule in WINDOWS:
        learner = WINDOWS[rule](model, chunk or TIME)
    elif rule in SIGNALS:
        learner = SIGNALS[rule](model)
    elif RULES[rule] is None:
        learner = braintrace.BPTT(model)
    else:
        windows = {"window": chunk} if rule == "rank" else {}
        learner = braintrace.ETraceVjpAlgorithm(model, RULES[rule], **windows)
    learner.compile_graph(xs[0])
    before = {k: st.value.sharding for k, st in learner.traces.items()}

    def step(x: Any, y: Any) -> Any:
        given = {"OSTTP": {"target": x[:, :3]}, "ThreeFactor": {"modulator": y}}.get(rule, {})
        out = learner(x, **given)
        return jnp.mean((jnp.mean(out.reshape(BATCH, -1), 1) - y) ** 2), out

    size = None if rule == "rank" or rule in WINDOWS else chunk
    grads, outs = learner.etrace_grad(xs, ys, step_fn=step, chunk_size=size, has_aux=True)
    return (learner, outs), grads, before


@cache
def on_one(name: str, rule: str, chunk: int | None) -> Any:
    return jax.tree.map(np.asarray, learned(name, rule, chunk)[1])


def as_on_one(name: str, rule: str, chunk: int | None, mesh: Any) -> Any:
    """A learner whose gradients and layouts are found to be as promised."""
    (learner, outs), grads, before = learned(name, rule, chunk, mesh)
    expected = on_one(name, rule, chunk)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), grads, expected)
    same = lambda a, sharding: a.sharding.is_equivalent_to(sharding, a.ndim)
    for path, st in learner.model.states(brainstate.ParamState).items():  # gradients as weights
        pairs = zip(jax.tree.leaves(grads[path]), jax.tree.leaves(st.value), strict=True)
        assert all(same(g, w.sharding) for g, w in pairs), path
    for key, trace in learner.traces.items():  # where they were
        assert same(trace.value, before[key]), key
        assert trace.value.sharding.device_set == set(mesh.devices.flat), key
    states = jax.tree.leaves([st.value for st in learner.model.states(brainstate.HiddenState).values()])
    by_samples = lambda spec: spec[:1] == ("data",) or mesh.shape["data"] == 1
    assert all(by_samples(a.sharding.spec) for a in states), [a.sharding for a in states]
    assert by_samples(outs.sharding.spec[1:]), outs.sharding
    return learner


@pytest.mark.parametrize(("name", "rule", "shape", "kind", "chunk"), every(80, TABLE))
def test_gradients_are_those_of_one_device(name, rule, shape, kind, chunk):
    learner = as_on_one(name, rule, chunk, mesh_of(shape, kind))
    weights = learner.model.states(brainstate.ParamState)
    if rule == "D_RTRL":  # a part on each device
        whole = {leaf.shape for st in weights.values() for leaf in jax.tree.leaves(st.value)}
        cut = {s for s in whole if s[-1] % shape[1] == 0}
        for key, trace in learner.traces.items():
            size = trace.value.addressable_shards[0].data.size * shape[0]
            assert size * shape[1] == trace.value.size or (cut != whole and size == trace.value.size), key


# each on both axes, and on one of them; types and chunks in turn
ROWS = [
    (rule, shape, KINDS[(i + j + i // 2) % 2], CHUNKS[i % 3])
    for i, rule in enumerate([*WINDOWS, *SIGNALS])
    for j, shape in enumerate([(4, 2), SHAPES[2 * (i % 2)]])
]


@pytest.mark.parametrize(("rule", "shape", "kind", "chunk"), every(39, ROWS))
def test_what_other_rules_keep_is_spread(rule, shape, kind, chunk):
    learner = as_on_one("read", rule, chunk, mesh_of(shape, kind))
    for key, trace in learner.traces.items():
        parts = trace.value.size // trace.value.addressable_shards[0].data.size
        if ":" in key and key.split(":")[0] in ("feedback", "readout"):  # by units
            assert parts == (shape[1] if trace.value.ndim else 1), key
        elif BATCH in trace.value.shape[:2]:  # by samples, and maybe more
            assert parts >= shape[0], key


# -- what is sent ----------------------------------------------------------------------------------


def gru(params: Any, h: Any, x: Any) -> tuple[Any, Any]:
    p = params
    z = jax.nn.sigmoid(x @ p["wz"] + h @ p["uz"] + p["bz"])
    r = jax.nn.sigmoid(x @ p["wr"] + h @ p["ur"] + p["br"])
    h = (1 - z) * h + z * jnp.tanh(x @ p["wc"] + (r * h) @ p["uc"] + p["bc"])
    return h, jnp.tanh(h) @ p["out"]


def gru_params(width: int = IN) -> dict[str, Any]:
    rng, rows = np.random.RandomState(0), {"w": width, "u": UNITS}
    shapes = {f"{kind}{gate}": (n, UNITS) for gate in "zrc" for kind, n in rows.items()}
    shapes |= {f"b{gate}": (1, UNITS) for gate in "zrc"} | {"out": (UNITS, 1)}
    return {k: jnp.asarray(0.5 * rng.normal(size=s)) for k, s in shapes.items()}


def squared(y: Any, target: Any) -> Any:
    return jnp.mean((y[:, 0] - target) ** 2)


def gru_on(mesh: Any, width: int = IN) -> tuple[Any, Any, Any, Any]:
    """Parameters, carry and sequences; columns are spread over `model`, and the rows of the readout."""
    given = gru_params(width)
    params = {
        k: put(a, mesh, *((None, "model") if k != "out" else ("model", None))) for k, a in given.items()
    }
    xs, ys = data()
    xs = jnp.tile(xs, (1, 1, width // IN))
    carry = put(jnp.zeros((BATCH, UNITS)), mesh, "data", "model")
    return params, carry, put(xs, mesh, None, "data", None), put(ys, mesh, None, "data")


def sent(compiled: Any) -> Counter[str]:
    """How many collectives of each kind a compiled program has."""
    names = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    return Counter(re.findall(rf" ({names})(?:-start)?\(", compiled.as_text()))


@cache
def own(shape: tuple[int, int]) -> Counter[str]:
    """Those that the model has by itself, forwards and backwards."""
    mesh = mesh_of(shape, AxisType.Auto)

    def total(params: Any, carry: Any, xs: Any, ys: Any) -> Any:
        def body(h: Any, now: Any) -> Any:
            h, y = gru(params, h, now[0])
            return h, squared(y, now[1])

        return jnp.sum(jax.lax.scan(body, carry, (xs, ys))[1])

    return sent(jax.jit(jax.grad(total)).lower(*gru_on(mesh)).compile())


@pytest.mark.parametrize(
    ("rule", "chunk", "shape"),
    every(2, [*(("D_RTRL", 2, s) for s in SHAPES), ("D_RTRL", 1, (4, 2)), ("ES_D_RTRL", 2, (4, 2))]),
)
def test_traces_send_nothing_but_a_sum_of_gradients(rule, chunk, shape):
    """And states are gathered for their products on the way forward, step by step: not for a chunk again."""
    mesh = mesh_of(shape, AxisType.Auto)
    params, carry, xs, ys = gru_on(mesh)
    xs, ys = xs[:4], ys[:4]
    net = braintrace.online(gru, params, carry, xs[0], rule=RULES[rule])
    grad = jax.jit(lambda *given: net.grad(squared, *given, chunk_size=chunk))
    compiled = grad.lower(params, carry, net.init(params, carry), xs, ys).compile()
    found = sent(compiled)
    assert found <= own(shape), (found, own(shape))
    if shape == (8, 1):
        assert found == {"all-reduce": 1}
    if chunk > 1 and shape[1] > 1:
        gathered = collectives(compiled.as_text())
        assert (
            gathered.runs["all-gather"] == 2 * TIME
        )  # of the state, and of what the reset gate leaves of it
        assert gathered.bytes["all-gather"] == 2 * TIME * 8 * UNITS * BATCH // shape[0]


def in_windows(rule: Any, shape: tuple[int, int], width: int = IN, **size: int) -> str:
    """The compiled program of four steps in windows of two: one pass, or so many steps in each."""
    params, carry, xs, ys = gru_on(mesh_of(shape, AxisType.Auto), width)
    net = braintrace.online(gru, params, carry, xs[0], rule=rule, window=2)
    size |= {"chunk_size": 2} if rule.any_window else {}
    grad = jax.jit(lambda *given: net.grad(squared, *given, **size))
    return grad.lower(params, carry, net.init(params, carry), xs, ys).compile()


rules = braintrace.rules
KEPT = [
    rules.D_RTRL(),
    rules.D_RTRL(rank=2, basis="pushed"),
    rules.RTRL(),
    rules.SnAp(2),
    rules.UORO(),
    rules.KF_RTRL(),
]


@pytest.mark.parametrize("rule", every(6, KEPT), ids=[*"wrRSUK"])
def test_windows_send_their_gradients_once(rule):
    """Beside them only the loss of every step, which is one number."""
    text = in_windows(rule, (8, 1)).as_text()
    found = re.findall(r" = (.*) (all-[a-z]+|collective-permute|reduce-scatter)(?:-start)?\(", text)
    assert [kind for _, kind in found] == ["all-reduce"] * 2
    assert sorted(shape.startswith("f64[] ") or shape == "f64[]" for shape, _ in found) == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "width"), [((4, 2), IN), ((4, 2), 4 * IN), ((1, 8), IN), ((1, 8), 4 * IN)])
def test_directions_are_sent_and_what_lies_along_them_is_not(shape, width):
    """`r` directions go through the model as its own tangents and cotangents do, at every step.

    That is two products with states forwards and three backwards. Once a window, devices that share a sample
    get all of its units: of the pushed directions, of the pulled ones, of the signal at its start. What lies
    along directions is added to the gradients of each device before these are summed: nothing more is sent.
    """
    size, windows = 2, TIME // 2
    plain, ranked = (
        in_windows(rules.D_RTRL(rank=n, basis="pushed"), shape, width, chunk_size=2) for n in (0, size)
    )
    more = sent(ranked)
    more.subtract(sent(plain))
    assert +more == {"all-gather": 2 + 3, "all-reduce": 2}
    numbers = (TIME * 5 * size + windows * (2 * size + 1)) * UNITS * BATCH // shape[0]
    assert bytes_sent(ranked.as_text()) - bytes_sent(plain.as_text()) == 8 * numbers


# -- shard_map -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [2, 1])
def test_a_learner_inside_shard_map_learns_from_its_part(chunk):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params, (xs, ys) = gru_params(), data()
    carry = jnp.zeros((BATCH, UNITS))
    part = braintrace.online(gru, params, carry[:1], xs[0, :1])

    def local(params: Any, carry: Any, xs: Any, ys: Any) -> Any:
        found = part.grad(squared, params, carry, part.init(params, carry), xs, ys, chunk_size=chunk)
        return jax.lax.pmean(found[0], "data"), found[1][0]

    specs = {"in_specs": (P(), P("data"), P(None, "data"), P(None, "data")), "out_specs": (P(), P("data"))}
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, **specs, check_vma=False))
    grads, last = mapped(params, carry, xs, ys)
    same((grads, last), by_one(chunk))
    with pytest.raises(braintrace.NotSupportedError, match="check_vma=False"):
        jax.eval_shape(jax.shard_map(local, mesh=mesh, **specs), params, carry, xs, ys)


def test_a_marked_op_varies_as_what_it_computes():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x, w = data()[0][0], gru_params()["wz"]

    def gradient(op: Any) -> Any:
        total = lambda w, x: jax.lax.psum(jnp.sum(jnp.tanh(op(x, w)) ** 2), "data")
        mapped = jax.shard_map(total, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        return jax.jit(jax.grad(mapped))(w, x)

    np.testing.assert_allclose(gradient(braintrace.matmul), gradient(jnp.matmul), rtol=1e-12)


def test_a_marked_op_inside_the_model_s_own_shard_map_is_refused():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(braintrace.matmul, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))

    def step(w: Any, h: Any, x: Any) -> Any:
        h = 0.9 * h + mapped(x, w)
        return h, h

    with pytest.raises(braintrace.NotSupportedError, match="inside `shard_map`"):
        braintrace.online(step, gru_params()["wz"], jnp.zeros((BATCH, UNITS)), data()[0][0]).report  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0, 2])
def test_each_device_runs_the_kernels_on_its_part(size, kind, monkeypatch, pending):
    taken, found = [], []

    def noted(kernel: Any) -> Any:
        return lambda *args: taken.append(args) or kernel(*args, interpret=True)

    for module in (pending_steps, pending_kernels):
        monkeypatch.setattr(module, "_write_plainly", noted(module.write))
        monkeypatch.setattr(module, "_read_plainly", noted(module.read))
    with jax.enable_x64(False):
        for on in (False, True):
            pending(on)
            given = jax.tree.map(lambda a: a.astype(jnp.float32), gru_on(mesh_of((4, 2), kind)))
            params, carry, xs, ys = given
            net = braintrace.online(gru, params, carry, xs[0], rule=rules.D_RTRL(rank=size))
            how = {"window": 2, "chunk_size": 2} if size else {"chunk_size": 1}
            grads, (after, traces), *_ = net.grad(
                squared, params, carry, net.init(params, carry), xs, ys, **how
            )
            rule_step = net.compiled.rule_step
            traces = rule_step.rule.up_to_date(rule_step.executor, traces)
            found.append((grads, after, {k: a for k, a in traces.items() if not is_pending(k)}))
            assert bool(taken) == on
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *found)
    same = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), *found)
    assert all(jax.tree.leaves(same)), same


# -- plans -----------------------------------------------------------------------------------------


PLANNED = [
    *((s, "D_RTRL", 2, {}) for s in SHAPES),
    ((4, 2), "ES_D_RTRL", 1, {}),
    ((8, 1), "RTRL", 1, {}),
    ((1, 8), "BPTT", 4, {}),
    ((4, 2), "D_RTRL", 2, {"window": 2, "rank": 1}),
]


@pytest.mark.parametrize(("shape", "rule", "chunk", "dial"), every(7, PLANNED))
def test_a_plan_says_what_the_program_of_one_device_takes(shape, rule, chunk, dial):
    mesh = mesh_of(shape, AxisType.Explicit)
    params, carry, xs, ys = gru_on(mesh_of(shape, AxisType.Auto))
    loss = lambda y, _: jnp.mean(y**2)
    rank = {"rank": dial["rank"]} if dial else {}
    chosen = getattr(braintrace.rules, rule)(**rank)
    net = braintrace.online(gru, params, carry, xs[0], rule=chosen, window=dial.get("window"))
    traces = net.init(params, carry)
    grad = jax.jit(lambda *given: net.grad(loss, *given, chunk_size=None if dial else chunk))
    compiled = grad.lower(params, carry, traces, xs[:4], ys[:4]).compile()
    found = net.plan(4, rules=[rule], chunk_sizes=[chunk], mesh=mesh, **dial)
    row = found.row(rule, window=dial.get("window"))
    assert row.chunk_size == chunk
    parts = [a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(traces)]
    assert row.trace_bytes == sum(parts)
    assert found.parameter_bytes == sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(params))
    assert found.mesh == {"data": shape[0], "model": shape[1]}
    assert row.activation_bytes == pytest.approx(compiled.memory_analysis().temp_size_in_bytes, rel=0.1)
    assert 4 * row.sent_per_step == pytest.approx(bytes_sent(compiled.as_text()), rel=0.1)
    assert row.sent_per_chunk == chunk * row.sent_per_step > 0
    if shape == (8, 1) and rule == "D_RTRL":  # one sum of gradients
        once = sum(a.nbytes for a in params.values())
        assert row.sent_per_chunk == pytest.approx(once, rel=0.05)


def test_what_is_sent_is_counted_as_often_as_it_is():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.ones((8, 4), jnp.float32), NamedSharding(mesh, P("data")))

    def program(x: Any) -> Any:
        body = lambda total, _: (total + jnp.sum(x * (1 + total[None]), 0), None)
        return jax.lax.scan(body, jnp.zeros(4, jnp.float32), None, length=3)[0]

    assert bytes_sent(jax.jit(program).lower(x).compile().as_text()) == 3 * 4 * 4


def test_a_plan_of_a_module_says_what_its_learner_takes_and_what_fits():
    mesh = mesh_of((4, 2), AxisType.Auto)
    with jax.numpy_rank_promotion("allow"):
        cell = nn.GRUCell(IN, UNITS)
    x0 = jax.ShapeDtypeStruct((BATCH, IN), float)
    found = braintrace.plan(cell, x0, BATCH, TIME, rules=["D_RTRL"], chunk_sizes=[2], mesh=mesh)
    (row,) = found.rows
    brainstate.nn.init_all_states(cell, batch_size=BATCH)
    for st in (*cell.states(brainstate.ParamState).values(), cell.h):
        first = "data" if st is cell.h else None
        names = lambda a, first=first: (first, "model") if a.ndim == 2 else ("model",)
        st.value = jax.tree.map(lambda a, names=names: put(a, mesh, *names(a)), st.value)
    learner, xs = braintrace.D_RTRL(cell), put(data()[0], mesh, None, "data", None)
    learner.compile_graph(xs[0])
    traces = [st.value for st in learner.traces.values()]
    assert row.trace_bytes == sum(a.addressable_shards[0].data.nbytes for a in traces)
    assert 8 * row.trace_bytes == sum(a.nbytes for a in traces)

    loss = lambda x: jnp.mean(learner(x) ** 2)
    pure = Pure.trace(lambda xs: learner.etrace_grad(xs, step_fn=loss, chunk_size=2), xs)
    compiled = jax.jit(lambda values, xs: pure(values, xs)).lower(pure.values(), xs).compile()
    assert row.activation_bytes == pytest.approx(compiled.memory_analysis().temp_size_in_bytes, rel=0.1)
    assert TIME * row.sent_per_step == pytest.approx(bytes_sent(compiled.as_text()), rel=0.1)

    assert 8 * found.memory_budget <= braintrace.plan(cell, x0, BATCH, 1, rules=[]).memory_budget
    assert found.fits(row)
    for words in ("on each of 8 devices (4 data x 2 model)", "sent per step"):
        assert words in str(found)
    less = replace(found, memory_budget=row.total_bytes)  # nothing is left for parameters
    assert not less.fits(row)
    assert "! With parameters and states more than the" in str(less)


# -- ensembles -------------------------------------------------------------------------------------

MEMBERS = 8


def under(mesh: Any) -> Any:
    return jax.set_mesh(mesh) if AxisType.Explicit in mesh.axis_types else nullcontext()


def same(found: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), found, expected)


def stacked() -> tuple[Any, Any]:
    """Parameters and carries of all members."""
    params = jax.tree.map(lambda a: jnp.stack([a * (1 + 0.1 * i) for i in range(MEMBERS)]), gru_params())
    return params, jnp.zeros((MEMBERS, BATCH, UNITS))


def of_member(net: Any, how: Any) -> Callable[..., Any]:
    """Gradients and traces of one member: in chunks of so many steps, or of one step by itself."""

    def one_step(params: Any, carry: Any, traces: Any, x: Any, y: Any) -> Any:
        _, traces, out = net.step(params, carry, traces, x)
        return squared(out, y), traces

    def run(params: Any, carry: Any, traces: Any, xs: Any, ys: Any) -> Any:
        if how == "step":
            return jax.grad(one_step, has_aux=True)(params, carry, traces, xs[0], ys[0])
        grads, (_, traces), _ = net.grad(squared, params, carry, traces, xs, ys, chunk_size=how)
        return grads, traces

    return run


@cache
def alone(how: Any, window: int | None) -> Any:
    """What each member has by itself on one device."""
    (params, carry), (xs, ys) = stacked(), data()
    first = lambda i: jax.tree.map(lambda a: a[i], (params, carry))
    net = braintrace.online(gru, *first(0), xs[0], window=window)
    run = jax.jit(of_member(net, how))
    each = [run(*first(i), net.init(*first(i)), xs, ys) for i in range(MEMBERS)]
    return jax.tree.map(lambda *parts: np.stack(parts), *each)


ENSEMBLES = [
    ((8, 1), AxisType.Auto, 2, None, None),
    ((8, 1), AxisType.Auto, 1, None, "members"),
    ((8, 1), AxisType.Auto, "step", None, None),
    ((8, 1), AxisType.Explicit, "step", None, None),
    ((4, 2), AxisType.Explicit, 1, None, None),
    ((8, 1), AxisType.Explicit, 2, None, None),
    ((8, 1), AxisType.Explicit, None, 2, None),
    ((4, 2), AxisType.Auto, 2, None, "members"),
    ((4, 2), AxisType.Auto, None, 2, None),
]


@pytest.mark.parametrize(("shape", "kind", "how", "window", "name"), every(9, ENSEMBLES))
def test_members_of_an_ensemble_send_each_other_nothing(shape, kind, how, window, name):
    if (kind, how) == (AxisType.Explicit, "step") and jax.__version_info__ < (0, 9):
        pytest.skip("there, `reshard` back gathers")
    mesh = jax.make_mesh(shape, ("members", "data"), axis_types=(kind, kind))
    spread = lambda tree, *spec: jax.device_put(tree, NamedSharding(mesh, P(*spec)))
    (params, carry), (xs, ys) = stacked(), data()
    net = braintrace.online(gru, gru_params(), spread(carry[0], "data"), xs[0], window=window)
    params, carry = spread(params, "members"), spread(carry, "members", "data")
    xs, ys = spread((xs, ys), None, "data")
    with under(mesh):
        traces = jax.vmap(net.init, spmd_axis_name=name)(params, carry)
        run = jax.jit(jax.vmap(of_member(net, how), (0, 0, 0, None, None), spmd_axis_name=name))
        found = run(params, carry, traces, xs, ys)
        sends = sent(run.lower(params, carry, traces, xs, ys).compile())
    same(found, alone(how, window))
    assert sends == ({} if shape == (8, 1) else {"all-reduce": 1})  # of the gradients of a member
    for leaf in jax.tree.leaves((found[0], params)):
        assert leaf.sharding.spec[0] == "members", leaf.sharding
        assert leaf.addressable_shards[0].data.size * shape[0] == leaf.size
    for leaf in jax.tree.leaves((found[1], traces)):
        assert leaf.addressable_shards[0].data.size * 8 == leaf.size, leaf.sharding
        assert leaf.sharding.spec[0] == "members"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_members_of_a_mapped_learner_send_each_other_nothing(kind):
    mesh = jax.make_mesh((8,), ("members",), axis_types=(kind,))
    xs, ys = data()
    learners = []

    def make() -> None:
        with jax.numpy_rank_promotion("allow"):
            model = nn.GRUCell(IN, UNITS)
        brainstate.nn.init_all_states(model, batch_size=BATCH)
        learners.append(braintrace.D_RTRL(model))
        learners[-1].compile_graph(xs[0])

    brainstate.random.seed(0)
    brainstate.transform.vmap_new_states(make, axis_size=MEMBERS)()
    learner = learners[-1]
    states = learner.states()
    step = lambda x, y: jnp.mean((jnp.mean(learner(x), 1) - y) ** 2)
    mapped = partial(brainstate.transform.vmap, in_states=states, out_states=states, axis_size=MEMBERS)
    run = brainstate.transform.jit(mapped(lambda: learner.etrace_grad(xs, ys, step_fn=step, chunk_size=2)))
    start = {k: st.value for k, st in states.items()}
    expected = run()
    for k, st in states.items():
        st.value = jax.device_put(start[k], NamedSharding(mesh, P("members")))
    with under(mesh):
        mapped(learner.init_etrace_state)()
        same(run(), expected)
        assert not sent(run.compile())
    for trace in learner.traces.values():
        assert trace.value.sharding.spec[0] == "members"
        assert trace.value.addressable_shards[0].data.shape == (1, *trace.value.shape[1:])


# -- layouts by hand -------------------------------------------------------------------------------

Q = ("data", "model")
LAYOUTS = {  # shape of the mesh; of weights, states, inputs
    "rows": ((4, 2), ("model", None), ("data", None), "data"),
    "columns over the batch's devices": ((8, 1), (None, "data"), ("data", None), "data"),
    "both axes": ((4, 2), ("data", "model"), ("data", "model"), "data"),
    "two axes as one": ((4, 2), (None, None), (Q, None), Q),
    "weights over two axes": ((4, 2), (None, Q), (None, Q), None),
    "states alone": ((4, 2), (None, None), ("data", "model"), None),
}


def cut(array: Any, mesh: Any, *spec: Any) -> Any:
    """An array on a mesh; an axis that cannot be cut evenly stays whole."""
    ways = lambda n: np.prod([mesh.shape[a] for a in (n if isinstance(n, tuple) else (n,))])
    fits = [n if n and not size % ways(n) else None for n, size in zip(spec, array.shape, strict=False)]
    return jax.device_put(array, NamedSharding(mesh, P(*fits)))


@cache
def by_one(chunk: int = 2) -> tuple[Any, Any]:
    """The gradients of the GRU on one device, and its last state."""
    (xs, ys), params, carry = data(), gru_params(), jnp.zeros((BATCH, UNITS))
    net = braintrace.online(gru, params, carry, xs[0])
    run = jax.jit(lambda *given: net.grad(squared, *given, chunk_size=chunk))
    grads, (last, _), _ = run(params, carry, net.init(params, carry), xs, ys)
    return grads, last


@pytest.mark.parametrize(("name", "kind"), every(6, [(n, KINDS[i % 2]) for i, n in enumerate(LAYOUTS)]))
def test_any_layout_has_the_numbers_of_one_device(name, kind):
    shape, of_weights, of_states, of_inputs = LAYOUTS[name]
    mesh, (xs, ys) = mesh_of(shape, kind), data()
    with under(mesh):
        params = {k: cut(a, mesh, *of_weights) for k, a in gru_params().items()}
        carry = cut(jnp.zeros((BATCH, UNITS)), mesh, *of_states)
        xs, ys = cut(xs, mesh, None, of_inputs), cut(ys, mesh, None, of_inputs)
        net = braintrace.online(gru, params, carry, xs[0])
        traces = net.init(params, carry)
        grad = jax.jit(lambda *given: net.grad(squared, *given, chunk_size=2)[0])
        found = grad(params, carry, traces, xs, ys)
        sends = sent(grad.lower(params, carry, traces, xs, ys).compile())
    same(found, by_one()[0])
    assert all(found[k].sharding.is_equivalent_to(params[k].sharding, 2) for k in params)
    if of_inputs is not None:  # samples stay where they are, whatever weights are spread over
        assert all(a.sharding.spec[1] == of_inputs for a in traces.values())
        assert not sends["all-to-all"]


def test_parameters_of_one_device_have_gradients_of_the_mesh_that_is_set():
    mesh, (xs, ys), params = mesh_of((8, 1), AxisType.Explicit), data(), gru_params()
    carry = jnp.zeros((BATCH, UNITS))
    with jax.set_mesh(mesh):
        xs, ys = put(xs, mesh, None, "data", None), put(ys, mesh, None, "data")
        net = braintrace.online(gru, params, carry, xs[0])
        loss = lambda params, traces: squared(net.step(params, carry, traces, xs[0])[2], ys[0])
        found = jax.jit(jax.grad(loss))(params, net.init(params, carry))
        same(
            jax.tree.map(jnp.add, found, params), jax.tree.map(lambda a, b: np.asarray(a) + b, found, params)
        )


@pytest.mark.slow
def test_functions_go_from_mesh_to_mesh():
    net = braintrace.online(gru, gru_params(), jnp.zeros((BATCH, UNITS)), data()[0][0])
    for shape, kind in (((4, 2), AxisType.Explicit), ((4, 2), AxisType.Auto), ((2, 4), AxisType.Auto)):
        mesh = mesh_of(shape, kind)
        params, carry, xs, ys = gru_on(mesh)
        with under(mesh):
            run = jax.jit(lambda *given: net.grad(squared, *given[:2], net.init(*given[:2]), *given[2:])[0])
            same(run(params, carry, xs, ys), by_one()[0])
    (params, *_), (_, carry, xs, ys) = (gru_on(mesh_of(s, AxisType.Explicit)) for s in ((2, 4), (4, 2)))
    traces = net.init(gru_params(), jnp.zeros((BATCH, UNITS)))
    with pytest.raises(ValueError, match="lie on two meshes"):
        net.grad(squared, params, carry, traces, xs, ys)


@pytest.mark.slow
@pytest.mark.parametrize("kind", every(2, KINDS))
def test_flags_and_weights_of_losses_need_not_be_on_the_mesh(kind):
    begins, mask = np.zeros((TIME, BATCH), bool), np.ones((TIME, BATCH))
    begins[2, ::2], mask[1, :3] = True, 0
    each = lambda y, target: (y[:, 0] - target) ** 2

    def run(mesh: Any) -> Any:
        given = gru_on(mesh) if mesh else (gru_params(), jnp.zeros((BATCH, UNITS)), *data())
        params, carry, xs, ys = given
        with under(mesh) if mesh else nullcontext():
            net = braintrace.online(gru, params, carry, xs[0])
            traces = net.init(params, carry)
            grads, after, _ = net.grad(
                each, params, carry, traces, xs, ys, mask=mask, reset=begins, chunk_size=2
            )
            return grads, net.reset(*after, rows=begins[2]), traces

    mesh = mesh_of((4, 2), kind)
    grads, (carry, traces), before = run(mesh)
    same((grads, (carry, traces)), run(None)[:2])
    assert all(a.sharding.is_equivalent_to(before[k].sharding, a.ndim) for k, a in traces.items())


@pytest.mark.parametrize("kind", every(2, KINDS))
def test_a_part_of_a_mesh_may_be_taken_apart_by_hand(kind):
    mesh = mesh_of((4, 2), kind)
    params, carry, xs, ys = gru_on(mesh)
    part = braintrace.online(gru, gru_params(), jnp.zeros((2, UNITS)), data()[0][0, :2])

    def local(params: Any, carry: Any, xs: Any, ys: Any) -> Any:
        found = part.grad(squared, params, carry, part.init(params, carry), xs, ys, chunk_size=2)[0]
        return jax.lax.pmean(found, "data")

    specs = {"in_specs": (P(), P("data"), P(None, "data"), P(None, "data")), "out_specs": P()}
    with jax.set_mesh(mesh):
        mapped = jax.jit(jax.shard_map(local, axis_names={"data"}, **specs, check_vma=False))
        same(mapped(params, carry, xs, ys), by_one()[0])


@pytest.mark.parametrize("kind", every(2, KINDS))
def test_a_model_may_use_shard_map_beside_its_weights(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    own = jax.shard_map(jnp.tanh, mesh=mesh, in_specs=P("data"), out_specs=P("data"))

    def gradient(squash: Any, spread: Any) -> Any:
        def step(w: Any, h: Any, x: Any) -> Any:
            h = 0.5 * h + squash(x @ w)
            return h, h

        (xs, _), w = data(), spread(gru_params()["wz"])
        carry, xs = spread(jnp.zeros((BATCH, UNITS)), "data"), spread(xs, None, "data")
        with warnings.catch_warnings(action="ignore"):
            net = braintrace.online(step, w, carry, xs[0])
            return net.grad(lambda y: jnp.mean(y**2), w, carry, net.init(w, carry), xs, chunk_size=2)[0]

    with under(mesh):
        found = gradient(own, lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec))))
    same(found, gradient(jnp.tanh, lambda a, *spec: a))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_learner_of_one_sample_is_mapped_over_those_of_a_mesh(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))

    def run(model: Any, xs: Any, ys: Any) -> Any:
        learner = braintrace.compile(model, "D_RTRL", xs[0], batch_size=BATCH, vmap=True)
        step = lambda x, y: jnp.mean((jnp.mean(learner(x), 1) - y) ** 2)
        return [learner.etrace_grad(xs, ys, step_fn=step, chunk_size=2) for _ in range(2)]

    spread = lambda a: jax.device_put(a, NamedSharding(mesh, P(None, "data")))
    brainstate.random.seed(0)
    with jax.numpy_rank_promotion("allow"):
        model = nn.ValinaRNNCell(IN, UNITS)
    with under(mesh):
        found = run(model, *map(spread, data()))
    same(found, run(model, *data()))
