"""Neurons and synapses by their equations, and networks of them against the oracles."""

import re
from collections.abc import Callable
from typing import Any

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace as bt
from braintrace import nn
from tests import oracle
from tests.nn.online import Net, check, check_factored, distance, train
from tests.run import every, online

ms, mV, mS, ohm = u.ms, u.mV, u.mS, u.ohm


# -- equations: the same step in numpy, one unit at a time, from the text of a book ----------------------


def step_if(s: dict[str, float], x: float, soft: bool) -> None:
    if s["V"] >= 1.0:
        s["V"] = s["V"] - 1.0 if soft else 0.0
    s["V"] += 2.0 * x / 4.0


def step_lif(s: dict[str, float], x: float, soft: bool) -> None:
    if s["V"] >= 1.0:
        s["V"] = s["V"] - 1.2 if soft else -0.2
    target = 0.1 + 2.0 * x
    s["V"] = target + (s["V"] - target) * np.exp(-1 / 4)


def step_alif(s: dict[str, float], x: float, soft: bool) -> None:
    if s["V"] >= 1.0 + 0.5 * s["a"]:
        s["V"] = s["V"] - 1.2 if soft else -0.2
        s["a"] += 1
    target = 0.1 + 2.0 * x
    s["V"] = target + (s["V"] - target) * np.exp(-1 / 4)
    s["a"] *= np.exp(-1 / 20)


def step_gif(s: dict[str, float], x: float, soft: bool) -> None:
    if s["V"] >= s["V_th"]:
        s["V"] = s["V"] - (s["V_th"] + 0.2) if soft else -0.2
        s["I1"] = 0.3 * s["I1"] + 0.2
        s["I2"] = 1.0 * s["I2"] - 0.4
        s["V_th"] = max(s["V_th"], 1.1)
    V, target = s["V"], 0.1 + 2.0 * (x + s["I1"] + s["I2"])
    s["V"] = target + (V - target) * np.exp(-1 / 4)
    s["I1"] *= np.exp(-0.2)
    s["I2"] *= np.exp(-0.05)
    at_rest = 1.0 + 0.02 / 0.1 * (V - 0.1)  # where the threshold would go with V held
    s["V_th"] = at_rest + (s["V_th"] - at_rest) * np.exp(-0.1)


COMMON = {"R": 2.0, "tau": 4.0}
REST = {**COMMON, "V_reset": -0.2, "V_rest": 0.1}
GIF = {
    "V_th_reset": 1.1,
    "a": 0.02,
    "b": 0.1,
    "k1": 0.2,
    "k2": 0.05,
    "R1": 0.3,
    "R2": 1.0,
    "A1": 0.2,
    "A2": -0.4,
}
NEURONS: dict[str, tuple[Any, Callable[..., None], dict[str, Any]]] = {
    "IF": (nn.IF, step_if, COMMON),
    "LIF": (nn.LIF, step_lif, REST),
    "ALIF": (nn.ALIF, step_alif, {**REST, "tau_a": 20.0, "beta": 0.5}),
    "GIF": (nn.GIF, step_gif, {**REST, **GIF}),
}
UNITS = {
    **dict.fromkeys(["tau", "tau_a"], ms),
    **dict.fromkeys(["V_th", "V_reset", "V_rest", "beta", "V_th_reset", "V_th_inf"], mV),
    **dict.fromkeys(["a", "b", "k1", "k2"], 1 / ms),
    **dict.fromkeys(["A1", "A2"], u.mA),
    "R": ohm,
}


def currents(length: int = 60, units: int = 5) -> np.ndarray:
    return 0.6 + 0.6 * np.random.RandomState(3).randn(length, units)


@pytest.mark.parametrize("with_units", [False, True])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("name", every(2, NEURONS))
def test_neuron(name: str, soft: bool, with_units: bool) -> None:
    cls, reference, options = NEURONS[name]
    xs = currents()
    options = {**options, "V_th_inf" if name == "GIF" else "V_th": 1.0}
    if with_units:
        options = {k: v * UNITS[k] if k in UNITS else v for k, v in options.items()}
    with brainstate.environ.context(dt=1.0 * ms if with_units else 1.0):
        neuron = cls(5, reset=nn.soft_reset if soft else nn.hard_reset, **options)
        brainstate.nn.init_all_states(neuron)
        states = {k[-1]: s for k, s in neuron.states(brainstate.HiddenState).items()}
        units = [{k: float(u.get_mantissa(s.value)[i]) for k, s in states.items()} for i in range(5)]
        run = brainstate.transform.jit(neuron)
        fired = []
        for x in xs:
            z = run(jnp.asarray(x) * u.mA if with_units else jnp.asarray(x))
            for i, s in enumerate(units):
                reference(s, x[i], soft)
                for k, state in states.items():
                    np.testing.assert_allclose(u.get_mantissa(state.value)[i], s[k], rtol=1e-10, atol=1e-12)
            above = [s["V"] - s.get("V_th", 1.0) - 0.5 * s.get("a", 0.0) for s in units]
            np.testing.assert_array_equal(z, np.asarray(above) >= 0)
            np.testing.assert_array_equal(neuron.get_spike(), z)
            fired.append(np.mean(z))
    assert 0.05 < np.mean(fired) < 0.8
    assert u.get_unit(neuron.V.value) == (mV if with_units else u.UNITLESS)


def test_lif_fires_at_the_rate_of_the_book() -> None:
    """With a constant current I and a hard reset, the interval is `tau log(R I / (R I - V_th))`."""
    with brainstate.environ.context(dt=0.01 * ms):
        neuron = nn.LIF(1, tau=10.0 * ms, V_th=15.0 * mV, reset=nn.hard_reset)
        brainstate.nn.init_all_states(neuron)
        spikes = brainstate.transform.for_loop(lambda _: neuron(20.0 * mV * jnp.ones(1)), jnp.arange(10_000))
    interval = np.diff(np.nonzero(np.asarray(spikes)[:, 0])[0]).mean() * 0.01
    np.testing.assert_allclose(interval, 10.0 * np.log(20 / 5), rtol=2e-3)


@pytest.mark.parametrize("cls", [nn.IF, nn.LIF])
def test_conductance(cls: Any) -> None:
    """With a conductance held for a step, the solution is exact: two half steps make a whole one."""
    leak = cls is nn.LIF
    g, E, V0 = jnp.asarray([0.5, 0.0]), 3.0, jnp.asarray([0.2, -0.4])
    found = []
    for steps in (1, 2):
        with brainstate.environ.context(dt=1.0 / steps):
            neuron = cls(2, R=2.0, tau=4.0, V_th=100.0, V_initializer=V0)
            brainstate.nn.init_all_states(neuron)
            for _ in range(steps):
                neuron(nn.COBA(E)(g), nn.CUBA(0.5)(jnp.ones(2)))
        found.append(neuron.V.value)
    np.testing.assert_allclose(*found, rtol=1e-12)
    rate = leak + 2.0 * np.asarray(g)
    force = 2.0 * np.asarray(g) * E + 2.0 * 0.5
    target = force / np.where(rate, rate, 1)
    exact = np.where(rate, target + (V0 - target) * np.exp(-rate / 4), V0 + force / 4)
    np.testing.assert_allclose(found[0], exact, rtol=1e-12)


def kernel(synapse: Any, length: int = 40) -> np.ndarray:
    brainstate.nn.init_all_states(synapse)
    spike = (jnp.arange(length) == 0).astype(float)
    return np.asarray(brainstate.transform.for_loop(lambda x: synapse(x * jnp.ones(1)), spike))[:, 0]


@pytest.mark.parametrize("unit", [1.0, ms])
def test_synapse_kernels(unit: Any) -> None:
    with brainstate.environ.context(dt=0.5 * unit):
        t = 0.5 * np.arange(40)
        np.testing.assert_allclose(kernel(nn.Expon(1, tau=4.0 * unit)), np.exp(-t / 4), rtol=1e-10)
        np.testing.assert_allclose(kernel(nn.Alpha(1, tau=4.0 * unit)), t / 4 * np.exp(1 - t / 4), rtol=1e-10)
        dual = nn.DualExpon(1, tau_decay=4.0 * unit, tau_rise=1.0 * unit, amplitude=2.0)
        np.testing.assert_allclose(kernel(dual), 2 * (np.exp(-t / 4) - np.exp(-t)), rtol=1e-10, atol=1e-12)
    with brainstate.environ.context(dt=0.001 * unit):
        peak = kernel(nn.DualExpon(1, tau_decay=4.0 * unit, tau_rise=1.0 * unit), 3000).max()
        np.testing.assert_allclose(peak, 1.0, rtol=1e-6)
    with pytest.raises(ValueError, match="Alpha"):
        nn.DualExpon(1, tau_decay=4.0 * unit, tau_rise=4.0 * unit)


def test_time_constants_of_each_unit() -> None:
    with brainstate.environ.context(dt=1.0), jax.numpy_rank_promotion("allow"):
        neuron = nn.LIF(3, tau=jnp.asarray([1.0, 2.0, 4.0]), V_th=100.0)
        brainstate.nn.init_all_states(neuron, batch_size=2)
        neuron(jnp.ones((2, 3)))
        np.testing.assert_allclose(neuron.V.value[1], 1 - np.exp([-1.0, -0.5, -0.25]))


def test_units_that_do_not_fit_are_refused() -> None:
    with brainstate.environ.context(dt=1.0 * ms):
        neuron = nn.LIF(3, tau=5.0 * ms, V_th=1.0 * mV)
        brainstate.nn.init_all_states(neuron)
        with pytest.raises((u.UnitMismatchError, u.DimensionMismatchError)):
            neuron(jnp.ones(3))


# -- derivatives ---------------------------------------------------------------------------------------


def test_short_term_plasticity() -> None:
    """Against Tsodyks and Markram's equations between spikes, step by step in numpy."""
    z = (np.random.RandomState(0).rand(40, 3) > 0.6).astype(float)
    with brainstate.environ.context(dt=1.0):
        both, depressed = nn.STP(3, U=0.3, tau_f=30.0, tau_d=9.0), nn.STD(3, U=0.3, tau=9.0)
        brainstate.nn.init_all_states([both, depressed])
        x, use, alone = np.ones(3), np.full(3, 0.3), np.ones(3)
        for now in z:
            left, left_alone = (1 - (1 - r) * np.exp(-1 / 9) for r in (x, alone))
            use = use * np.exp(-1 / 30) + now * 0.3 * (1 - use)
            np.testing.assert_allclose(both(jnp.asarray(now)), now * use * left, rtol=1e-10)
            np.testing.assert_allclose(depressed(jnp.asarray(now)), now * left_alone, rtol=1e-10)
            x, alone = left - now * use * x, left_alone - now * 0.3 * alone


SURROGATES = {
    "sigmoid": (nn.surrogate.sigmoid(3.0), lambda x: jax.nn.sigmoid(3.0 * x)),
    "triangle": (nn.surrogate.triangle(1.0, 1.0), lambda x: x - x * jnp.abs(x) / 2),
    "arctan": (nn.surrogate.arctan(2.0), lambda x: jnp.arctan(jnp.pi * x) / jnp.pi),
    "fast_sigmoid": (nn.surrogate.fast_sigmoid(5.0), lambda x: x / (1 + 5 * jnp.abs(x))),
    "gaussian": (nn.surrogate.gaussian(0.4), lambda x: jax.scipy.stats.norm.cdf(x / 0.4)),
    "own": (nn.surrogate.with_derivative(jnp.cos), jnp.sin),
}


@pytest.mark.parametrize("name", SURROGATES)
def test_surrogate(name: str) -> None:
    """A step, with the derivative of the smooth function that it stands for."""
    spike, smooth = SURROGATES[name]
    x = jnp.linspace(-0.9, 0.9, 7)
    np.testing.assert_array_equal(spike(x), x >= 0)
    assert spike(x).dtype == x.dtype
    np.testing.assert_allclose(
        jax.vmap(jax.grad(spike))(x), jax.vmap(jax.grad(smooth))(x), rtol=1e-9, atol=1e-9
    )
    np.testing.assert_allclose(
        jax.jvp(spike, (x,), (x,))[1], x * jax.vmap(jax.grad(smooth))(x), rtol=1e-9, atol=1e-9
    )
    assert spike(x.astype(jnp.float32)).dtype == jnp.float32


def test_multi_gaussian_integrates_to_its_scale() -> None:
    x = jnp.linspace(-30.0, 30.0, 20_001)
    total = jnp.sum(jax.vmap(jax.grad(nn.surrogate.multi_gaussian(0.5)))(x)) * (x[1] - x[0])
    np.testing.assert_allclose(total, 0.5 * (1 + 0.15 - 2 * 0.15), rtol=1e-3)


@pytest.mark.parametrize("reset", [nn.soft_reset, nn.hard_reset])
@pytest.mark.parametrize("kept", [True, False])
def test_gradient_of_the_reset(reset: Any, kept: bool) -> None:
    """`dV[t+1]/dV[t]` is `a (1 - th z')` with a soft reset, `a (1 - z - V z')` with a hard one."""
    slope = nn.surrogate.with_derivative(jnp.ones_like)
    with brainstate.environ.context(dt=1.0):
        neuron = nn.LIF(2, tau=4.0, spk_fun=slope, reset=reset, reset_gradient=kept)
        brainstate.nn.init_all_states(neuron)
        function = brainstate.transform.StatefulFunction(neuron.update, return_only_write=False)
        function.make_jaxpr(jnp.zeros(2))
        V, z = jnp.asarray([0.4, 1.3]), np.asarray([0.0, 1.0])
        J = jax.jacobian(lambda V: function.jaxpr_call([V], jnp.zeros(2))[0][0])(V)
    soft, hard = 1 - kept * np.ones(2), 1 - z - kept * np.asarray(V)
    expected = np.diag(np.exp(-1 / 4) * (soft if reset is nn.soft_reset else hard))
    np.testing.assert_allclose(J, expected, rtol=1e-12, atol=1e-12)


# -- networks ------------------------------------------------------------------------------------------


class Layer(brainstate.nn.Module):
    """Input weights, a synapse (or none), a neuron and a readout."""

    def __init__(self, neuron: Any, synapse: Any = None, weights: Any = None, readout: Any = None) -> None:
        super().__init__()
        self.weights = nn.Linear(3, 4) if weights is None else weights
        self.synapse, self.neuron = synapse, neuron
        self.readout = nn.Linear(4, 2) if readout is None else readout

    def update(self, x: Any) -> Any:
        current = self.weights(x)
        if self.synapse is not None:
            current = self.synapse(current)
        return self.readout(self.neuron(current))


class Recurrent(brainstate.nn.Module):
    """A population that is driven by its own spikes of the last step too."""

    def __init__(self, neuron: Any, synapse: Any) -> None:
        super().__init__()
        self.weights, self.synapse, self.neuron = nn.Linear(7, 4), synapse, neuron
        self.readout = nn.Linear(4, 2)

    def update(self, x: Any) -> Any:
        xz = jnp.concatenate([x, self.neuron.get_spike()], -1)
        return self.readout(self.neuron(self.synapse(self.weights(xz))))


class TwoInputs(brainstate.nn.Module):
    """An excitatory and an inhibitory population of inputs, each with a conductance of its own."""

    def __init__(self, tau: Any = 5.0) -> None:
        super().__init__()
        self.exc, self.inh = nn.SignedWLinear(3, 4), nn.SignedWLinear(3, 4)
        self.g_e, self.g_i = nn.Expon(4, tau=tau), nn.DualExpon(4, tau_decay=2 * tau, tau_rise=tau)
        self.to_e, self.to_i = nn.COBA(E=3.0), nn.COBA(E=-0.5)
        self.neuron = nn.LIF(4, tau=2 * tau)
        self.readout = nn.Linear(4, 2)

    def update(self, x: Any) -> Any:
        spikes = (x > 0).astype(x.dtype)
        e, i = self.to_e(self.g_e(self.exc(spikes))), self.to_i(self.g_i(self.inh(1 - spikes)))
        return self.readout(self.neuron(e, i))


class DalesLaw(brainstate.nn.Module):
    """An E/I network: three excitatory and one inhibitory unit, each of one sign to all."""

    def __init__(self) -> None:
        super().__init__()
        sign = jnp.asarray([[1.0], [1.0], [1.0], [-1.0]])
        self.inp, self.rec = nn.Linear(3, 4), nn.SignedWLinear(4, 4, w_sign=sign)
        self.synapse, self.neuron = nn.Expon(4, tau=4.0), nn.ALIF(4, tau=8.0, tau_a=20.0, beta=0.5)
        self.readout = nn.Linear(4, 2)

    def update(self, x: Any) -> Any:
        current = self.synapse(self.inp(x) + self.rec(self.neuron.get_spike()))
        return self.readout(self.neuron(current))


class TwoPopulations(brainstate.nn.Module):
    """An E/I network of two populations with conductances, in units: ms, mV and mS."""

    def __init__(self) -> None:
        super().__init__()
        weight = brainstate.nn.init.KaimingNormal(unit=mS)
        zero = brainstate.nn.init.ZeroInit(unit=mS)
        self.ee, self.ei = (nn.SignedWLinear(6, n, w_init=weight) for n in (3, 2))
        self.ie, self.ii = (nn.SignedWLinear(2, n, w_init=weight) for n in (3, 2))
        self.g_ee, self.g_ie = (nn.Expon(3, tau=tau * ms, g_initializer=zero) for tau in (5.0, 10.0))
        self.g_ei, self.g_ii = (nn.Alpha(2, tau=tau * ms, g_initializer=zero) for tau in (2.0, 4.0))
        options = {"R": 1.0 * u.kohm, "V_th": -50.0 * mV, "V_reset": -65.0 * mV, "V_rest": -60.0 * mV}
        start = jnp.asarray([-49.0, -52.0, -55.0]) * mV  # one fires at once
        self.e = nn.ALIF(3, tau=20.0 * ms, V_initializer=start, **options)
        self.i = nn.LIF(2, tau=10.0 * ms, V_initializer=start[:2], reset=nn.hard_reset, **options)
        self.exc, self.inh = nn.COBA(E=0.0 * mV), nn.COBA(E=-80.0 * mV)
        self.readout = nn.Linear(3, 2)

    def update(self, x: Any) -> Any:
        e = jnp.concatenate([(x > 0).astype(x.dtype), self.e.get_spike()], -1)
        g = self.g_ei(self.ei(e)), self.g_ii(self.ii(self.i.get_spike()))
        i = self.i(self.exc(g[0]), self.inh(g[1]))
        g = self.g_ee(self.ee(e)), self.g_ie(self.ie(i))
        return self.readout(self.e(self.exc(g[0]), self.inh(g[1])))


def mV_weights() -> Any:
    return nn.Linear(3, 4, w_init=brainstate.nn.init.KaimingNormal(unit=mV), b_init=None)


NETS = {
    "if": Net(lambda: Layer(nn.IF(4, tau=4.0)), "weights: neuron.V", "neuron.V", exact=True, x_scale=3.0),
    "lif": Net(lambda: Layer(nn.LIF(4, tau=4.0)), "weights: neuron.V", "neuron.V", exact=True, x_scale=3.0),
    "lif_in_mV": Net(
        lambda: Layer(nn.LIF(4, tau=4.0 * ms, V_th=1.0 * mV), weights=mV_weights()),
        "weights: neuron.V",
        "neuron.V",
        exact=True,
        x_scale=3.0,
        dt=1.0 * ms,
        batch=None,
    ),
    "lif_hard": Net(
        lambda: Layer(nn.LIF(4, tau=4.0, reset=nn.hard_reset, spk_fun=nn.surrogate.triangle(1.0))),
        "weights: neuron.V",
        "neuron.V",
        exact=True,
        x_scale=3.0,
    ),
    "lif_hard_stopped": Net(
        lambda: Layer(nn.LIF(4, tau=4.0, reset=nn.hard_reset, reset_gradient=False)),
        "weights: neuron.V",
        "neuron.V",
        exact=True,
        x_scale=3.0,
    ),
    "alif": Net(
        lambda: Layer(nn.ALIF(4, tau=4.0, tau_a=20.0, beta=0.5, spk_fun=nn.surrogate.multi_gaussian())),
        "weights: neuron.V",
        "neuron.V neuron.a",
        exact=True,
        x_scale=3.0,
    ),
    "gif": Net(
        lambda: Layer(nn.GIF(4, tau=4.0, **GIF)),
        "weights: neuron.V",
        "neuron.I1 neuron.I2 neuron.V neuron.V_th",
        exact=True,
        x_scale=3.0,
    ),
    "expon_lif": Net(
        lambda: Layer(nn.LIF(4, tau=4.0), nn.Expon(4, tau=3.0)),
        "weights: neuron.V synapse.g",
        "neuron.V synapse.g",
        exact=True,
        x_scale=2.0,
    ),
    "dual_expon_alif": Net(
        lambda: Layer(nn.ALIF(4, tau=4.0, tau_a=9.0), nn.DualExpon(4, tau_decay=4.0, tau_rise=1.0)),
        "weights: neuron.V synapse.g_decay synapse.g_rise",
        "neuron.V neuron.a synapse.g_decay synapse.g_rise",
        exact=True,
        x_scale=2.0,
    ),
    "alpha_lif": Net(
        lambda: Layer(nn.LIF(4, tau=4.0), nn.Alpha(4, tau=2.0)),
        "weights: synapse.h",
        "neuron.V synapse.g synapse.h",
        exact=True,
        x_scale=2.0,
    ),
    "conv_lif": Net(
        lambda: Layer(
            nn.LIF((4, 2), tau=4.0),
            weights=nn.Conv1d((4, 2), 2, kernel_size=3),
            readout=nn.Sequential(nn.Flatten(start_axis=-2), nn.Linear(8, 2)),
        ),
        "weights: neuron.V",
        "neuron.V",
        exact=True,
        x=(4, 2),
        x_scale=3.0,
    ),
    "ei_inputs": Net(
        TwoInputs,
        "exc: g_e.g neuron.V, inh: g_i.g_decay g_i.g_rise neuron.V",
        "g_e.g g_i.g_decay g_i.g_rise neuron.V",
        exact=True,
    ),
    # the influence of spikes through the recurrent weights is left out
    "recurrent_alif": Net(
        lambda: Recurrent(nn.ALIF(4, tau=4.0, tau_a=20.0, beta=0.5), nn.Expon(4, tau=3.0)),
        "weights: neuron.V synapse.g",
        "neuron.V neuron.a synapse.g",
        exact=False,
        x_scale=2.0,
    ),
    "ei_dales_law": Net(
        DalesLaw,
        "inp: neuron.V synapse.g, rec: neuron.V synapse.g",
        "neuron.V neuron.a synapse.g",
        exact=False,
        x_scale=2.0,
    ),
    "ei_two_populations": Net(
        TwoPopulations,
        "ei: g_ei.h, ii: g_ii.h, ee: e.V g_ee.g, ie: e.V g_ie.g",
        "g_ei.g g_ei.h g_ii.g g_ii.h i.V | e.V e.a g_ee.g g_ie.g",
        exact=False,
        dt=1.0 * ms,
        batch=None,
    ),
    # a spike of the first layer acts on later losses through the second one's memory: its filter tells
    "two_layers": Net(
        lambda: Layer(nn.LIF(4, tau=4.0), nn.Expon(4, tau=3.0), readout=nn.LeakyRateReadout(4, 2, tau=5.0)),
        "weights: neuron.V synapse.g, readout: readout.r",
        "neuron.V synapse.g | readout.r",
        exact=True,
        x_scale=2.0,
    ),
}


@pytest.mark.parametrize("cls", [nn.LIF, nn.ALIF])
def test_neurons_behind_a_default_linear_fire_if_each_input_adds_its_weight(cls: Any) -> None:
    rng = np.random.RandomState(0)

    def rate(width: int, draw: Any, **options: Any) -> float:
        brainstate.random.seed(0)
        net = brainstate.nn.Sequential(nn.Linear(width, 256), cls(256, **options))
        brainstate.nn.init_all_states(net, batch_size=8)
        xs = jnp.asarray(draw(60, 8, width))
        return float(brainstate.transform.for_loop(net, xs).mean())

    spikes = lambda p: lambda *shape: (rng.rand(*shape) < p).astype(float)
    with brainstate.environ.context(dt=1.0 * ms):
        for draw in (rng.randn, spikes(0.1), spikes(0.5)):
            for width in (8, 512):
                assert 0.02 < rate(width, draw, R=5.0) < 0.27
        assert rate(64, spikes(0.1)) < 0.002


def test_a_net_that_never_fires_is_told_of() -> None:
    class Silent(brainstate.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights, self.neurons = nn.Linear(3, 4, w_init=0.01 * jnp.ones((3, 4))), nn.LIF(4)
            self.readout = nn.Linear(4, 2)

        def update(self, x: Any) -> Any:
            return self.readout(self.neurons(self.weights(x)))

    xs, ys = jnp.ones((5, 2, 3)), jnp.zeros((5, 2, 2))
    loss = lambda net, x, y: jnp.sum((net(x) + 1 - y) ** 2)
    told = r"`readout.weight\['weight'\]` is exactly zero.*no unit ever fired.*R=tau/dt"
    with brainstate.environ.context(dt=1.0 * ms):
        found = bt.compare(Silent(), xs, ys, loss, ["d_rtrl"], progress=False)
        assert found.zero == ["readout.weight['weight']"]
        assert re.match(f"The gradient of {told}", found.recommendation)
        learner = bt.compile(Silent(), "d_rtrl", xs[0], batch_size=2)
        step = lambda x, y: loss(learner, x, y)
        assert re.match(
            f"The gradient of {told}", bt.check_gradients(learner, xs, ys, step_fn=step).explanation
        )
        with pytest.warns(UserWarning, match=told):
            bt.fit(learner, [(xs, ys)] * 3, step, optax.sgd(1e-3), progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_gradients(name: str) -> None:
    check(NETS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alif", "expon_lif", "ei_dales_law"])
def test_factored_gradients(name: str) -> None:
    check_factored(NETS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alif", "ei_dales_law", "two_layers"])
def test_training(name: str) -> None:
    """A spiking network learns to tell the sign of an input."""
    net = NETS[name]
    brainstate.random.seed(0)
    xs = jnp.asarray(np.repeat(2.0 * np.random.RandomState(0).randn(1, 8, 3), 12, 0))

    def loss(out: Any, x: Any) -> Any:
        return jnp.mean(jax.nn.softplus(-jnp.sign(x[:, 0]) * (out[:, 0] - out[:, 1])))

    with brainstate.environ.context(dt=net.dt):
        losses = train(net.build(), loss, xs, rate=1.0)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", ["IF", "LIF", "ALIF", "Gif", "Expon_CUBA", "DualExpon_COBA"])
def test_brainpy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With our layers for the connections, neurons and synapses of `brainpy.state` learn online too."""
    monkeypatch.setenv("BRAINPY_STATE_ALLOW_DIRECT_IMPORT", "1")
    state = pytest.importorskip("brainpy_state")
    zero = brainstate.nn.init.ZeroInit(unit=mS)

    class Direct(brainstate.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = brainstate.nn.init.KaimingNormal(unit=u.mA)
            self.weights, self.neuron = nn.Linear(3, 4, w_init=weight, b_init=None), getattr(state, name)(4)
            self.readout = nn.Linear(4, 2)

        def update(self, x: Any) -> Any:
            return self.readout(self.neuron(self.weights(x)))

    class Projected(brainstate.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            synapse, coupling = (getattr(state, part) for part in name.split("_"))
            out = coupling.desc(E=5.0 * mV) if coupling is state.COBA else coupling.desc()
            self.neuron = state.LIF(4, R=1.0 * (u.kohm if coupling is state.COBA else ohm), spk_reset="hard")
            self.projection = state.AlignPostProj(
                comm=nn.Linear(3, 4, w_init=brainstate.nn.init.KaimingNormal(unit=mS), b_init=None),
                syn=synapse.desc(4, g_initializer=zero),
                out=out,
                post=self.neuron,
            )
            self.readout = nn.Linear(4, 2)

        def update(self, x: Any) -> Any:
            self.projection(x)
            return self.readout(self.neuron())

    build, scale = (Projected, 1.0) if "_" in name else (Direct, 10.0)
    net = Net(build, "", "", exact=True, dt=1.0 * ms, batch=None, x_scale=scale)
    with brainstate.environ.context(dt=net.dt):
        model, xs = net.make()
        learner = bt.D_RTRL(model)
        learner.compile_graph(xs[0])
        assert len(learner.graph.hidden_groups) == len(learner.graph.hidden_param_op_relations) == 1
        bptt = oracle.bptt(model, xs)
        assert distance(online(learner, xs), bptt) < 1e-11
