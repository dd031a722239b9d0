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
    "name", [name for name in CELLS if name[:3] not in ("LRU", "Lea") and "_" not in name]
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
    out, w = run(nn.MiniLSTM(3, 4))
    f, i, n = jnp.split(w("W", x), 3)
    np.testing.assert_allclose(out, s(f) / (s(f) + s(i)) * h + s(i) / (s(f) + s(i)) * n)
