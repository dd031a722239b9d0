"""Parameters by their names in 0.2.x and in `brainstate.nn` do in our cells what they did there."""

from collections.abc import Callable
from typing import Any

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace as bt
from braintrace import nn

rng = np.random.RandomState(0)


@pytest.fixture(autouse=True)
def lenient() -> Any:
    with jax.numpy_rank_promotion("allow"), brainstate.environ.context(dt=1.0):
        yield


def dense(inputs: int, outputs: int, **more: Any) -> dict[str, Any]:
    return {"weight": {"weight": rng.randn(inputs, outputs), **more}}


def gates(names: str, inputs: int = 7, outputs: int = 4) -> dict[str, Any]:
    return {name: dense(inputs, outputs, bias=rng.randn(outputs)) for name in names.split()}


def s(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def times(x: Any, layer: Any) -> Any:
    return x @ layer["weight"]["weight"] + layer["weight"].get("bias", 0)


def gru(p: Any, x: Any, h: Any) -> Any:
    xh = np.concatenate([x, h])
    z, r = s(times(xh, p["Wz"])), s(times(xh, p["Wr"]))
    h = (1 - z) * h + z * np.tanh(times(np.concatenate([x, r * h]), p["Wh"]))
    return h, h


def lstm(p: Any, x: Any, hc: Any) -> Any:
    i, g, f, o = (times(np.concatenate([x, hc[0]]), p[name]) for name in ("Wi", "Wg", "Wf", "Wo"))
    c = s(f + 1) * hc[1] + s(i) * np.tanh(g)
    h = s(o) * np.tanh(c)
    return h, np.stack([h, c])


def urlstm(p: Any, x: Any, hc: Any) -> Any:
    f, r, n, o = (times(np.concatenate([x, hc[0]]), p[name]) for name in ("Wf", "Wr", "Wu", "Wo"))
    f, r = s(f + p["bias"]), s(r - p["bias"])
    g = 2 * r * f + (1 - 2 * r) * f**2
    c = g * hc[1] + (1 - g) * np.tanh(n)
    h = s(o) * np.tanh(c)
    return h, np.stack([h, c])


def cfn(p: Any, x: Any, h: Any) -> Any:
    xh = np.concatenate([x, h])
    h = s(times(xh, p["Wf"])) * np.tanh(h) + s(times(xh, p["Wi"])) * np.tanh(times(x, p["Wh"]))
    return h, h


def minimal(p: Any, x: Any, h: Any) -> Any:
    z = times(x, p["phi"])
    f = s(times(np.concatenate([z, h]), p["W_u"]))
    h = f * h + (1 - f) * z
    return h, h


def lru(p: Any, x: Any, h: Any) -> Any:
    B, C = (p[f"{k}_re"]["weight"]["weight"] + 1j * p[f"{k}_im"]["weight"]["weight"] for k in "BC")
    h = np.exp(-np.exp(p["nu_log"]) + 1j * np.exp(p["theta_log"])) * h + np.exp(p["gamma_log"]) * (x @ B)
    return (h @ C).real + p["D"] * x, h


def readout(p: Any, x: Any, r: Any) -> Any:
    r = np.exp(-1 / 5) * r + x @ p["W"]
    return r, r


def fused_gru(p: Any, x: Any, h: Any) -> Any:
    r, z = ({"weight": {k: np.split(v, 2, -1)[i] for k, v in p["Wrz"]["weight"].items()}} for i in range(2))
    return gru({"Wr": r, "Wz": z, "Wh": p["Wh"]}, x, h)


H, HC, HIM = np.zeros(4), np.zeros((2, 4)), np.zeros(4, complex)
LRU = {name: rng.randn(4) for name in ("nu_log", "theta_log", "gamma_log")} | {"D": rng.randn(3)}
LRU |= {"B_re": dense(3, 4), "B_im": dense(3, 4), "C_re": dense(4, 3), "C_im": dense(4, 3)}
UR = {name: dense(7, 4) for name in ("Wf", "Wr", "Wu", "Wo")}
OLD: dict[str, tuple[Callable[[], Any], dict[str, Any], Callable[..., Any], Any]] = {
    "GRU": (lambda: nn.GRUCell(3, 4), gates("Wz Wr Wh"), gru, H),
    "GRU, fused": (lambda: nn.GRUCell(3, 4), {**gates("Wrz", 7, 8), **gates("Wh")}, fused_gru, H),
    "GRU into brainstate's": (lambda: brainstate.nn.GRUCell(3, 4), gates("Wz Wr Wh"), gru, H),
    "LSTM": (lambda: nn.LSTMCell(3, 4), {**gates("Wi Wg Wf Wo"), "h": HC[0], "c": HC[1]}, lstm, HC),
    "URLSTM": (lambda: nn.URLSTMCell(3, 4), {**UR, "bias": rng.randn(4)}, urlstm, HC),
    "CFN": (lambda: nn.CFNCell(3, 4), {**gates("Wf Wi"), **gates("Wh", 3)}, cfn, H),
    "MinimalRNN": (
        lambda: nn.MinimalRNNCell(3, 4, activation=lambda x: x),
        {**gates("phi", 3), **gates("W_u", 8)},
        minimal,
        H,
    ),
    "LRU": (lambda: nn.LRUCell(3, 4), {**LRU, "h_re": H, "h_im": H}, lru, HIM),
    "readout": (lambda: nn.LeakyRateReadout(3, 4, tau=5.0), {"W": rng.randn(3, 4), "r": H}, readout, H),
}


@pytest.mark.parametrize("name", OLD)
def test_old_names_do_the_same(name: str) -> None:
    build, tree, step, state = OLD[name]
    with brainstate.environ.context(precision=64):
        cell = build()
        assert bt.load_parameters(cell, tree) == ([], [])
        brainstate.nn.init_all_states(cell)
        for x in rng.randn(4, 3):
            y, state = step(tree, x, state)
            np.testing.assert_allclose(cell(jnp.asarray(x)), y, rtol=1e-9)


class Net(brainstate.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.LSTMCell(3, 4), nn.Linear(4, 2, b_init=None)]
        self.norm = brainstate.nn.BatchNorm0d(2)


def test_trees_of_every_form() -> None:
    gate = gates("Wi Wg Wf Wo")
    parts: dict[Any, Any] = {("layers", 0, name, "weight"): v["weight"] for name, v in gate.items()}
    parts |= {("layers", 1, "weight"): dense(4, 2)["weight"], ("norm", "weight"): Net().norm.weight.value}
    dotted = {
        f"{'.'.join(map(str, path))}.{k}": v for path, leaves in parts.items() for k, v in leaves.items()
    }
    nested = {
        "layers": [gate, {"weight": parts["layers", 1, "weight"]}],
        "norm": {"weight": parts["norm", "weight"]},
    }
    states = {path: brainstate.ParamState(v) for path, v in parts.items()}
    found = []
    for tree in (parts, dotted, nested, states, {**dotted, "norm/running_mean": np.full(2, 3.0)}):
        net = Net()
        assert bt.load_parameters(net, tree) == ([], [])
        found.append({k: st.value for k, st in net.states(brainstate.ParamState).items()})
    assert all(jax.tree.all(jax.tree.map(jnp.array_equal, found[0], other)) for other in found)
    assert jnp.all(net.norm.running_mean.value == 3)
    again = Net()
    bt.load_parameters(again, net.states())
    assert jnp.array_equal(
        again.layers[0].W.weight.value["bias"], found[0]["layers", 0, "W", "weight"]["bias"]
    )


def test_what_does_not_fit_is_named() -> None:
    cell, tree = nn.LSTMCell(3, 4), gates("Wi Wg Wf Wo")
    before = cell.W.weight.value
    del tree["Wg"], tree["Wo"]["weight"]["bias"]
    with pytest.raises(
        ValueError, match=r"Missing: W.weight.bias, W.weight.weight. Left over: Wi.weight.weight,"
    ):
        bt.load_parameters(cell, tree)
    assert cell.W.weight.value is before
    net = Net()
    found = bt.load_parameters(net, {"layers.1.weight.weight": np.ones((4, 2)), "head": 1.0}, strict=False)
    assert found.left_over == ["head"]
    assert found.missing[0] == "layers.0.W.weight.bias"
    assert jnp.all(net.layers[1].weight.value["weight"] == 1)
    with pytest.raises(ValueError, match=r"layers.1.weight.weight has the shape \(2, 4\) and not \(4, 2\)"):
        bt.load_parameters(net, {"layers.1.weight.weight": np.ones((2, 4))}, strict=False)
    with pytest.raises(ValueError, match="the gate of a MiniGRU sees `h` as well"):
        bt.load_parameters(nn.MiniGRU(3, 4), {**gates("W_x", 3), **gates("W_z")})
    with pytest.warns(UserWarning, match="no activation after `phi`"):
        bt.load_parameters(nn.MinimalRNNCell(3, 4), {**gates("phi", 3), **gates("W_u", 8)})


def test_units() -> None:
    cell = nn.SignedWLinear(3, 4, w_init=jnp.ones((3, 4)) * u.mV)
    bt.load_parameters(cell, {"weight": np.ones((3, 4)) * u.volt})
    np.testing.assert_allclose(cell.weight.value.to_decimal(u.mV), 1000.0)
    with pytest.raises(ValueError, match="has the unit"):
        bt.load_parameters(cell, {"weight": np.ones((3, 4))})
