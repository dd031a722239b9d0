"""The recurrent cells: what is learned in each, whether exactly, and that it learns."""

from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace as bt
from braintrace import nn
from tests.nn.online import Net, check, check_factored, train

# What is not exact leaves out the same everywhere: the influence of h[t-1] through a product.
CELLS = {
    "ValinaRNNCell": Net(lambda: nn.ValinaRNNCell(3, 4, activation="tanh"), "W: h", "h", exact=False),
    "GRUCell": Net(lambda: nn.GRUCell(3, 4), "Wz: h, Wh: h", "h", exact=False),
    "GRUCell_without_batch": Net(lambda: nn.GRUCell(3, 4), "Wz: h, Wh: h", "h", exact=False, batch=None),
    "MGUCell": Net(lambda: nn.MGUCell(3, 4), "Wf: h mixed, Wh: h", "h", exact=False),
    "LSTMCell": Net(lambda: nn.LSTMCell(3, 4), "W: c h", "c h", exact=False),
    "URLSTMCell": Net(lambda: nn.URLSTMCell(3, 4), "W: c h, bias: c h", "c h", exact=False),
    "CFNCell": Net(lambda: nn.CFNCell(3, 4), "Wfi: h, Wh: h", "h", exact=False),
    "MinimalRNNCell": Net(lambda: nn.MinimalRNNCell(3, 4), "Wx: h mixed, Wf: h", "h", exact=False),
    "MiniGRU": Net(lambda: nn.MiniGRU(3, 4), "W: h", "h", exact=True),
    "MiniLSTM": Net(lambda: nn.MiniLSTM(3, 4), "W: h", "h", exact=True, batch=None),
    "LRUCell": Net(
        lambda: nn.LRUCell(3, 4), "nu: im re, theta: im re, gamma: im re, B: im re", "im re", exact=True
    ),
    "RTUCell": Net(
        lambda: nn.RTUCell(3, 4, activation="tanh"), "nu: im re, theta: im re, W: im re", "im re", exact=True
    ),
    "RTUCell_nonlinear": Net(
        lambda: nn.RTUCell(3, 4, activation="tanh", linear=False),
        "nu: im re, theta: im re, W: im re",
        "im re",
        exact=True,
        batch=None,
    ),
    "RGLRUCell": Net(lambda: nn.RGLRUCell(3, 4, 0.3, 0.9), "W: h, Lambda: h", "h", exact=True),
    "ELSTMCell": Net(lambda: nn.ELSTMCell(3, 4), "wf: c, wz: c, Wfz: c", "c", exact=True),
    "BRF": Net(
        lambda: nn.BRF(3, omega=(3.0, 5.0), b_offset=(0.5, 1.0), delta=0.1),
        "omega: u v, b_offset: u v",
        "q u v",
        exact=True,
        x_scale=5.0,
    ),
    "LeakyRateReadout": Net(lambda: nn.LeakyRateReadout(3, 4, tau=5.0), "weight: r", "r", exact=True),
    "LeakySpikeReadout": Net(
        lambda: nn.LeakySpikeReadout(3, 4, tau=5.0), "weight: V", "V", exact=True, x_scale=3.0
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_gradients(name: str) -> None:
    check(CELLS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_factored_gradients(name: str) -> None:
    check_factored(CELLS[name])


def test_gru_without_a_trace_for_the_reset_gate() -> None:
    model, xs = CELLS["GRUCell"].make()
    learner = bt.D_RTRL(model)
    learner.compile_graph(xs[0])
    assert ("Wr", "weight") in learner.report.excluded_weights
    with pytest.raises(ValueError, match="Wr"):
        learner.get_etrace_of(("Wr", "weight"))


@pytest.mark.parametrize(
    "name", [name for name in CELLS if name[:3] not in ("LRU", "RTU", "BRF", "Lea") and "_" not in name]
)
def test_sizes_by_either_name_and_as_tuples(name: str) -> None:
    cell = getattr(nn, name)
    with jax.numpy_rank_promotion("allow"):
        made = [cell(3, 4), cell(num_in=3, num_out=(4,)), cell(in_size=(3,), out_size=4), cell((3,), [4])]
    shapes = [jax.tree.map(jnp.shape, {k: st.value for k, st in m.states().items()}) for m in made]
    assert shapes == shapes[:1] * 4
    with pytest.raises(TypeError, match="tuple of one"):
        cell(3, (4, 5))
    with pytest.raises(TypeError):
        cell(3)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CELLS if "without" not in name])
def test_training(name: str) -> None:
    """Each cell learns to follow one of its inputs."""

    class Reader(brainstate.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with jax.numpy_rank_promotion("allow"):
                self.cell = CELLS[name].build()
            self.out = nn.Linear(*self.cell.out_size, 1)

        def update(self, x: Any) -> Any:
            return self.out(self.cell(x))

    brainstate.random.seed(0)
    xs = jnp.asarray(np.random.RandomState(0).randn(12, 4, 3) + 0.5)
    with brainstate.environ.context(dt=1.0):
        losses = train(Reader(), lambda out, x: jnp.mean((out - x[:, :1] - 0.5) ** 2), xs, rate=0.1)
    assert all(np.isfinite(losses))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", CELLS)
def test_states(name: str) -> None:
    """`init_state` makes them, with or without a batch, and `reset_state` sets them back."""
    with jax.numpy_rank_promotion("allow"):
        cell = CELLS[name].build()
    for batch in (None, 2):
        brainstate.nn.init_all_states(cell, batch_size=batch)
        states = {k[-1]: s for k, s in cell.states(brainstate.HiddenState).items()}
        first = {k: s.value for k, s in states.items()}
        assert all(v.shape[: v.ndim - 1] == (() if batch is None else (batch,)) for v in first.values())
        for state in states.values():
            state.value = state.value + 1.0
        cell.reset_state(batch_size=batch)
        for k, state in states.items():
            np.testing.assert_array_equal(state.value, first[k])
    cell.reset_state(batch_size=5)
    assert all(s.value.shape[0] == 5 for s in states.values())


def test_lru_is_a_complex_recurrence() -> None:
    cell = nn.LRUCell(3, 4, r_min=0.3, r_max=0.9, max_phase=1.0)
    brainstate.nn.init_all_states(cell)
    lam = jnp.exp(jax.lax.complex(-jnp.exp(cell.nu.value), jnp.exp(cell.theta.value)))
    assert jnp.all((jnp.abs(lam) > 0.3) & (jnp.abs(lam) < 0.9) & (jnp.angle(lam) < 1.0))
    np.testing.assert_allclose(jnp.exp(2 * cell.gamma.value), 1 - jnp.abs(lam) ** 2)
    B, C = (np.asarray(layer.weight.value["weight"]) for layer in (cell.B, cell.C))
    lam, gamma, D, h = np.asarray(lam), np.exp(cell.gamma.value), np.asarray(cell.D.value), 0.0
    for x in np.random.RandomState(0).randn(3, 3):
        h = lam * h + gamma * (x @ (B[:, :4] + 1j * B[:, 4:]))
        y = np.real(h @ (C[:4] - 1j * C[4:])) + D * x
        np.testing.assert_allclose(cell(jnp.asarray(x)), y)


@pytest.mark.parametrize("linear", [True, False])
def test_rtu_is_a_complex_recurrence(linear: bool) -> None:
    cell = nn.RTUCell(3, 4, activation="tanh", linear=linear, r_min=0.3, r_max=0.9, max_phase=1.0)
    brainstate.nn.init_all_states(cell)
    lam = np.exp(-np.exp(cell.nu.value) + 1j * np.exp(cell.theta.value))
    assert np.all((np.abs(lam) > 0.3) & (np.abs(lam) < 0.9) & (np.angle(lam) < 1.0))
    W, h = np.asarray(cell.W.weight.value["weight"]), np.zeros(4, complex)
    f = lambda z: np.tanh(z.real) + 1j * np.tanh(z.imag)
    for x in np.random.RandomState(0).randn(3, 3):
        h = lam * h + np.sqrt(1 - np.abs(lam) ** 2) * (x @ (W[:, :4] + 1j * W[:, 4:]))
        h = h if linear else f(h)
        y = f(h) if linear else h
        np.testing.assert_allclose(cell(jnp.asarray(x)), np.concatenate([y.real, y.imag]))
    with jax.numpy_rank_promotion("allow"):
        slow = nn.RGLRUCell(3, 100)
    a = jax.nn.sigmoid(slow.Lambda.value) ** 8
    assert jnp.all((a > 0.9) & (a < 0.999))


def test_brf_by_its_equations() -> None:
    neuron = nn.BRF(5, omega=(5.0, 15.0), b_offset=(0.1, 1.0))
    brainstate.nn.init_all_states(neuron)
    omega, offset = np.asarray(neuron.omega.value), np.asarray(neuron.b_offset.value)
    u, q, z, spikes = np.zeros(5, complex), np.zeros(5), np.zeros(5), 0.0
    for x in 40 * np.random.RandomState(0).rand(200, 5):
        q = 0.9 * q + z
        b = (-1 + np.sqrt(1 - (0.01 * omega) ** 2)) / 0.01 - offset - q
        u = u + 0.01 * ((b + 1j * omega) * u + x)
        z = (u.real >= 1 + q).astype(float)
        spikes += z.sum()
        np.testing.assert_array_equal(neuron(jnp.asarray(x)), z)
    assert 20 < spikes < 200
    with pytest.raises(ValueError, match="smaller `delta`"):
        nn.BRF(5, omega=(5.0, 15.0), delta=0.1)


def test_a_block_needs_a_cell_of_its_size() -> None:
    with pytest.raises(ValueError, match="RTUCell has inputs of size"):
        nn.DiagonalBlock(4, nn.RTUCell(3, 4))


def test_cells_by_their_equations() -> None:
    """Those that brainstate does not have."""
    draw = np.random.RandomState(0)
    x, h, s = jnp.asarray(draw.randn(3)), jnp.asarray(draw.randn(4)), jax.nn.sigmoid

    def run(cell: Any) -> Any:
        brainstate.nn.init_all_states(cell)
        cell.h.value = h
        return cell(x), lambda name, v: v @ getattr(cell, name).weight.value["weight"]

    out, w = run(nn.CFNCell(3, 4))
    f, i = jnp.split(s(w("Wfi", jnp.concatenate([x, h]))), 2)
    np.testing.assert_allclose(out, f * jnp.tanh(h) + i * jnp.tanh(w("Wh", x)))
    out, w = run(nn.MinimalRNNCell(3, 4, activation=jnp.sin))
    n = jnp.sin(w("Wx", x))
    f = s(w("Wf", jnp.concatenate([n, h])))
    np.testing.assert_allclose(out, f * h + (1 - f) * n)
    out, w = run(nn.MiniGRU(3, 4))
    z, n = jnp.split(w("W", x), 2)
    np.testing.assert_allclose(out, (1 - s(z)) * h + s(z) * n)
    cell = nn.RGLRUCell(3, 4, 0.3, 0.9)
    out, w = run(cell)
    r, i, v = jnp.split(w("W", x), 3)
    a = s(cell.Lambda.value) ** (8 * s(r))
    np.testing.assert_allclose(out, a * h + jnp.sqrt(1 - a**2) * s(i) * v)
    out, w = run(nn.MiniLSTM(3, 4))
    f, i, n = jnp.split(w("W", x), 3)
    np.testing.assert_allclose(out, s(f) / (s(f) + s(i)) * h + s(i) / (s(f) + s(i)) * n)
    cell = nn.ELSTMCell(3, 4)
    brainstate.nn.init_all_states(cell)
    cell.c.value = h
    out, w = cell(x), lambda name, v: v @ getattr(cell, name).weight.value["weight"]
    f, z = jnp.split(w("Wfz", x), 2)
    f, z = s(f + cell.wf.value * h), jnp.tanh(z + cell.wz.value * h)
    c = f * h + (1 - f) * z
    np.testing.assert_allclose(out, s(w("Wo", jnp.concatenate([x, c]))) * c)
