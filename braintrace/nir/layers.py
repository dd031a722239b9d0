"""Layers of `braintrace.nn` as NIR nodes, where NIR has the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import brainstate
import brainunit as u
import nir
import numpy as np

from .. import nn
from .._types import Array, Value
from ..nn.dynamics import initial
from .errors import NIRError

_MISSING = {
    nn.ALIF: "an adaptive threshold",
    nn.GIF: "an adaptive threshold and spike-triggered currents",
    nn.STP: "short-term plasticity",
    nn.STD: "short-term depression",
    nn.COBA: "conductances",
    nn.Expon: "a synapse of its own; load a graph with CubaLIF instead",
}


def to_graph(model: brainstate.nn.Module, time_step: Callable[[], float]) -> nir.NIRGraph:
    """The graph of layers one after the other; shapes that follow from others are left open."""
    if not isinstance(model, brainstate.nn.Module):
        raise TypeError(f"`save` takes a module, not {type(model)}.")
    parts = list(_layers(model))
    found: list[nir.NIRNode] = []
    for k, layer in enumerate(parts):
        found += _nodes(layer, f"layer {k}, `{type(layer).__name__}`", time_step)
    sizes = [layer.in_size for layer in parts if getattr(layer, "in_size", None)]
    if not found or not sizes:
        raise NIRError("The model has no layer that states the size of its input.")
    inner = {str(k): node for k, node in enumerate(found)}
    nodes = {"input": nir.Input(np.array(sizes[0])), **inner, "output": nir.Output(None)}
    return nir.NIRGraph(nodes, list(pairwise(nodes)), {}, type_check=False)


def _layers(model: brainstate.nn.Module) -> Iterator[brainstate.nn.Module]:
    if isinstance(model, brainstate.nn.Sequential):
        for layer in model.layers:
            yield from _layers(layer)
    else:
        yield model


def _nodes(layer: brainstate.nn.Module, name: str, time_step: Callable[[], float]) -> Iterator[nir.NIRNode]:
    if isinstance(layer, nn.Linear):
        params = layer.weight.value
        mask = 1.0 if layer.w_mask is None else layer.w_mask
        yield _dense(params["weight"] * mask, params.get("bias"), name)
    elif isinstance(layer, nn.Conv1d | nn.Conv2d):
        yield _conv(layer, name)
    elif isinstance(layer, nn.LIF):
        times = {"tau": _seconds(layer.tau, layer, name), "v_leak": _plain(layer.V_rest, layer, name)}
        _check_start(layer, name, times["v_leak"])
        yield nir.LIF(r=_plain(layer.R, layer, name), **times, **_firing(layer, name))
    elif isinstance(layer, nn.IF):
        _check_start(layer, name, 0.0)
        r = _plain(layer.R, layer, name) / _seconds(layer.tau, layer, name)
        yield nir.IF(r=r, **_firing(layer, name))
    elif isinstance(layer, nn.LeakyRateReadout):
        _check_start(layer, name, 0.0)
        tau = _seconds(layer.tau, layer, name)
        # `r <- decay r + y` is a leaky integrator with this resistance, at this time step
        yield _dense(layer.weight.value, None, name)
        yield nir.LI(tau=tau, r=1 / -np.expm1(-time_step() / tau), v_leak=np.zeros_like(tau))
    elif isinstance(layer, brainstate.nn.Flatten):
        if layer.in_size is None:
            raise NIRError(f"{name} needs `in_size`: NIR counts axes without the batch axis.")
        yield nir.Flatten(np.array(layer.in_size), start_dim=layer.start_axis, end_dim=layer.end_axis)
    else:
        missing = next((f": {text}" for kind, text in _MISSING.items() if isinstance(layer, kind)), "")
        raise NIRError(f"NIR has no node for {name}{missing}.")


def _plain(value: Value, layer: brainstate.nn.Module, name: str) -> np.ndarray:
    """A parameter for each unit, as an array without a unit."""
    if isinstance(value, u.Quantity):
        raise NIRError(f"{name} has voltages with a unit ({value.unit}), which NIR does not know.")
    return np.broadcast_to(np.asarray(value, np.float64), layer.out_size).astype(brainstate.environ.dftype())


def _check_start(layer: brainstate.nn.Module, name: str, expected: float | np.ndarray) -> None:
    """Refuse initial values that NIR does not have."""
    for state, value in layer.initial_values.items():
        start = _plain(initial(value, layer.out_size, None), layer, name)
        if not np.all(start == expected):
            raise NIRError(f"{name}: `{state}` has an initial value of its own; in NIR it starts at rest.")


def _seconds(tau: Value, layer: brainstate.nn.Module, name: str) -> np.ndarray:
    return _plain(tau / u.second if isinstance(tau, u.Quantity) else tau, layer, name)


def _firing(layer: brainstate.nn.Module, name: str) -> dict[str, np.ndarray]:
    """The threshold and the reset of a neuron."""
    if layer.reset is not nn.hard_reset:
        reset = getattr(layer.reset, "__name__", repr(layer.reset))
        raise NIRError(f"{name} has the reset `{reset}`; NIR knows `hard_reset` only.")
    threshold = _plain(layer.V_th, layer, name)
    # ours fire at the threshold, NIR's above it: the number before it says the same
    below = np.nextafter(threshold, -np.inf, dtype=threshold.dtype)
    return {"v_threshold": below, "v_reset": _plain(layer.V_reset, layer, name)}


def _dense(weight: Array, bias: Array | None, name: str) -> nir.NIRNode:
    if isinstance(weight, u.Quantity) or isinstance(bias, u.Quantity):
        raise NIRError(f"{name} has weights with a unit, which NIR does not know.")
    transposed = np.asarray(weight).T
    return nir.Linear(transposed) if bias is None else nir.Affine(transposed, np.asarray(bias))


def _conv(layer: brainstate.nn.Module, name: str) -> nir.NIRNode:
    if not layer.channel_first or set(layer.lhs_dilation) != {1}:
        raise NIRError(f"{name}: NIR's convolutions have channels first and no `lhs_dilation`.")
    params, rank = layer.weight.value, layer.num_spatial_dims
    kernel = params["weight"] if layer.w_mask is None else params["weight"] * layer.w_mask
    # brainstate keeps kernels as (*window, in, out)
    kernel = np.moveaxis(np.asarray(kernel), (-1, -2), (0, 1))
    bias = np.zeros(kernel.shape[0], kernel.dtype) if "bias" not in params else np.asarray(params["bias"])
    padding: str | np.ndarray
    if isinstance(layer.padding, str):
        padding = layer.padding.lower()
    elif any(low != high for low, high in layer.padding):
        raise NIRError(f"{name}: NIR pads both sides by the same number, not by {layer.padding}.")
    else:
        padding = np.array([low for low, _ in layer.padding])
    given = {"stride": layer.stride, "padding": padding, "dilation": layer.rhs_dilation}
    given = {
        n: v if isinstance(v, str) else np.array(v) if rank == 2 else int(v[0]) for n, v in given.items()
    }
    kind = nir.Conv1d if rank == 1 else nir.Conv2d
    return kind(None, kernel, groups=layer.groups, bias=bias.reshape(-1), **given)
