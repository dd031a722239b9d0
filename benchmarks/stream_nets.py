"""Recurrent nets of the benchmarks of streams, as learners of `braintrace.online`."""

from __future__ import annotations

from typing import Any

import brainstate
import jax.numpy as jnp
import numpy as np

import braintrace
from braintrace import nn
from braintrace.agents import from_module


class Net(brainstate.nn.Module):
    """A cell and linear readouts of given sizes; a size of None is the cell's output itself."""

    def __init__(self, cell: Any, *sizes: int | None) -> None:
        super().__init__()
        self.cell = cell
        self.readouts = [nn.Linear(*cell.out_size, size) for size in sizes if size is not None]
        self.sizes = sizes

    def update(self, x: Any) -> Any:
        h, readouts = self.cell(x), iter(self.readouts)
        outs = [h if size is None else next(readouts)(h) for size in self.sizes]
        return outs[0] if len(outs) == 1 else tuple(outs)


def make_cell(
    name: str, num_in: int, units: int, longest: float, r_min: float = 0.9, max_phase: float = 0.3,
    gate: float = 0.0,
) -> Any:  # fmt: skip
    """Return a cell whose memory is up to about `longest` steps at the start.

    The update gates of a GRU have biases by chrono initialisation (Tallec and Ollivier, 2018); `gate` is the
    standard deviation of their input weights (0: as those of other gates).
    """
    if name in ("RTU", "LRU"):
        make = getattr(nn, name + "Cell")
        return make(num_in, units, r_min=r_min, r_max=float(np.exp(-1 / longest)), max_phase=max_phase)
    cell = nn.GRUCell(num_in, units)
    steps = 1 + (longest - 2) * np.asarray(brainstate.random.uniform(size=units), np.float32)
    weight = jnp.asarray(cell.Wz.weight.value["weight"])
    if gate:
        weight = weight.at[:num_in].set(gate * brainstate.random.normal(size=(num_in, units)))
    cell.Wz.weight.value = {"weight": weight, "bias": jnp.asarray(-np.log(steps))}
    return cell


def functional(model: Any, x: Any, scalar: bool = False, **options: Any) -> tuple[Any, Any, Any]:
    """Return learner, parameters and hidden states of a model, with or without a batch axis in `x`.

    With `scalar`, the second of two outputs, a vector of length 1, becomes a number.
    """
    brainstate.nn.init_all_states(model, batch_size=len(x) if x.ndim > 1 else None)
    step, params, carry = from_module(model, x)

    def with_number(params: Any, carry: Any, x: Any) -> Any:
        carry, (first, second) = step(params, carry, x)
        return carry, (first, second[0])

    return braintrace.online(with_number if scalar else step, params, carry, x, **options), params, carry
