"""Networks for the tasks, by the name of their cell: one recurrent layer and a readout."""

from __future__ import annotations

from argparse import Namespace

import brainstate
import brainunit as u
import jax.numpy as jnp

from .. import nn
from .._types import Value
from ..tasks.task import Task

RATE = {
    "gru": nn.GRUCell,
    "lstm": nn.LSTMCell,
    "urlstm": nn.URLSTMCell,
    "mgu": nn.MGUCell,
    "rnn": nn.ValinaRNNCell,
    "minimal": nn.MinimalRNNCell,
    "cfn": nn.CFNCell,
    "minigru": nn.MiniGRU,
    "minilstm": nn.MiniLSTM,
}


class RateNet(brainstate.nn.Module):
    """A cell and a linear readout."""

    def __init__(self, cell: str, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        options = {"activation": "tanh"} if cell == "rnn" else {}
        self.cell = RATE[cell](inputs, hidden, **options)
        self.readout = nn.Linear(hidden, outputs)

    def update(self, x: Value) -> Value:
        return self.readout(self.cell(x))


class DiagonalNet(brainstate.nn.Module):
    """Linear recurrent units (LRU) between two linear layers."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.embed = brainstate.nn.Linear(inputs, hidden)
        self.cell = nn.LRUCell(hidden, hidden, r_min=0.9, r_max=0.999)
        self.readout = nn.Linear(hidden, outputs)

    def update(self, x: Value) -> Value:
        return self.readout(jnp.tanh(self.cell(self.embed(x))))


class SpikingNet(brainstate.nn.Module):
    """Recurrent spiking neurons and a leaky readout; `activity` is the mean number of input spikes."""

    def __init__(
        self, adaptive: bool, inputs: int, hidden: int, outputs: int, activity: float, length: int
    ) -> None:
        super().__init__()
        # expected spikes within 20 ms: of the inputs, and of neurons that fire in one step of fifty
        spikes = jnp.repeat(jnp.array([20 * activity, 20 / 50 * hidden]), jnp.array([inputs, hidden]))
        start = brainstate.random.normal(size=(inputs + hidden, hidden)) / jnp.sqrt(spikes[:, None])
        self.weights = nn.Linear(inputs + hidden, hidden, w_init=start)
        tau = 20.0 * u.ms
        more = {"tau_a": float(length) * u.ms, "beta": 0.2} if adaptive else {}
        self.neurons = (nn.ALIF if adaptive else nn.LIF)(hidden, R=20.0, tau=tau, **more)
        self.readout = nn.LeakyRateReadout(hidden, outputs, tau=tau)

    def update(self, x: Value) -> Value:
        inputs = jnp.concatenate([x, self.neurons.get_spike()], -1)
        return self.readout(self.neurons(self.weights(inputs)))


def make_net(cell: str, task: Task | Namespace, hidden: int) -> brainstate.nn.Module:
    """Return a network for a task."""
    if cell == "lru":
        return DiagonalNet(task.inputs, hidden, task.outputs)
    if cell in RATE:
        return RateNet(cell, task.inputs, hidden, task.outputs)
    activity = float(task.batch(0, 0, 8)[0].mean()) * task.inputs
    return SpikingNet(cell == "alif", task.inputs, hidden, task.outputs, max(activity, 0.1), task.length)
