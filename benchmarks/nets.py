"""The networks that are measured, and data for them.

This file also runs with the yardstick's own package, so it uses only what both have: `braintrace.nn` layers
and cells, and neurons that the caller hands in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp

import braintrace

OUTPUTS = 10
LAYERS = 3  # of a spiking net


@dataclass(frozen=True)
class Case:
    """A network, its sizes, and the length of the sequence."""

    net: str
    inputs: int
    width: int
    batch: int
    steps: int
    chunk: int = 25  # steps in a chunk, where chunks are not chosen automatically
    layers: int = 1  # of a recurrent net

    @property
    def is_spiking(self) -> bool:
        return self.net in ("LIF", "LIF, detached reset", "ALIF")

    @property
    def size(self) -> str:
        layers = LAYERS if self.is_spiking else self.layers
        width = f"{layers}x{self.width}" if layers > 1 else f"{self.width}"
        return f"{self.net} {self.inputs}->{width}, batch {self.batch}"

    @property
    def name(self) -> str:
        return f"{self.size}, T={self.steps}"


Neuron = Callable[[str, int], Any]


def neuron(name: str, size: int) -> Any:
    name, _, detached = name.partition(", ")
    return getattr(braintrace.nn, name)(size, **({"reset_gradient": False} if detached else {}))


class Recurrent(brainstate.nn.Module):
    """Layers of a cell that learns online, and a readout."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        cell = getattr(braintrace.nn, case.net if case.net.startswith("Mini") else f"{case.net}Cell")
        sizes = [case.inputs] + [case.width] * case.layers
        self.cells = [cell(m, n) for m, n in itertools.pairwise(sizes)]
        self.readout = brainstate.nn.Linear(case.width, OUTPUTS)

    def update(self, x: Any) -> Any:
        for cell in self.cells:
            x = cell(x)
        return self.readout(x)


class RecurrentSpiking(brainstate.nn.Module):
    """A layer of spiking neurons with recurrent connections, and a readout."""

    def __init__(self, case: Case, neuron: Neuron) -> None:
        super().__init__()
        self.width = case.width
        self.linear = braintrace.nn.Linear(case.inputs + case.width, case.width)
        self.neuron = neuron("LIF", case.width)
        self.readout = brainstate.nn.Linear(case.width, OUTPUTS)

    def init_state(self, batch_size: int) -> None:
        self.spikes = brainstate.HiddenState(jnp.zeros((batch_size, self.width)))

    def reset_state(self, batch_size: int) -> None:
        self.spikes.value = jnp.zeros((batch_size, self.width))

    def update(self, x: Any) -> Any:
        self.spikes.value = self.neuron(self.linear(jnp.concatenate([x, self.spikes.value], -1)))
        return self.readout(self.spikes.value)


class Spiking(brainstate.nn.Module):
    """Layers of spiking neurons, and a readout."""

    def __init__(self, case: Case, neuron: Neuron) -> None:
        super().__init__()
        sizes = [case.inputs] + [case.width] * LAYERS
        self.layers = [
            brainstate.nn.Sequential(braintrace.nn.Linear(m, n), neuron(case.net, n))
            for m, n in itertools.pairwise(sizes)
        ]
        self.readout = brainstate.nn.Linear(case.width, OUTPUTS)

    def update(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.readout(x)


def make(case: Case, neuron: Neuron = neuron) -> Any:
    """The network of a case, with its states initialised."""
    brainstate.environ.set(dt=1.0 * u.ms)
    with brainstate.random.seed_context(0):
        if case.net == "RLIF":
            net: Any = RecurrentSpiking(case, neuron)
        else:
            net = Spiking(case, neuron) if case.is_spiking else Recurrent(case)
        brainstate.nn.init_all_states(net, batch_size=case.batch)
    return net


def data(case: Case) -> tuple[Any, Any]:
    """Inputs (spikes or normal numbers) and targets, time first."""
    kx, ky = jax.random.split(jax.random.key(0))
    shape = (case.steps, case.batch, case.inputs)
    xs = jax.random.bernoulli(kx, 0.1, shape) if case.is_spiking else jax.random.normal(kx, shape)
    return xs.astype(float), jax.random.normal(ky, (case.steps, case.batch, OUTPUTS))
