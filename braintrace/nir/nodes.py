"""NIR nodes without dynamics: a module for each, whose parameters keep their names and shapes.

A learned parameter is a `ParamState` and is used through a marked operation; a frozen one is an array. Shapes
are those of one sample, channels first; a batch axis may come before them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import brainstate
import jax
import jax.numpy as jnp
import nir
import numpy as np

from .._ops import conv, element_wise, grouped_matmul, matmul
from .._types import Array, ArrayLike, Options, Shape
from ..nn.dynamics import Dynamics
from ..nn.neurons import Spike
from .errors import NIRError
from .files import numbers, shape_of


@dataclass(frozen=True)
class Settings:
    """How a graph, which is continuous in time, becomes a module that takes steps."""

    dt: float
    method: str
    reset: str
    spk_fun: Spike
    learns: Callable[[str, str], bool]  # takes the name of a node and of a parameter of it


class Node(Dynamics):
    """Base class of the nodes: parameters with the names that NIR gives them, and `update`."""

    parameters: tuple[str, ...] = ()
    sized_by: str = ""  # a parameter that has the shape of the input
    # Neurons have an output before they are called in a step, that of the step before.
    remembers: bool = False
    # Delays of at least one step know their output of a step before they are called in it.
    foresees: bool = False

    def __init__(self, node: nir.NIRNode, name: str, settings: Settings, in_size: Shape) -> None:
        super().__init__(in_size, in_size, None, {})
        self.kind, self.metadata = type(node).__name__, dict(node.metadata or {})
        for field in self.parameters:
            value = numbers(node, field, name).astype(brainstate.environ.dftype())
            learned = settings.learns(name, field)
            setattr(self, field, brainstate.ParamState(jnp.asarray(value)) if learned else value)

    def value(self, field: str) -> Array | np.ndarray:
        """The array of a parameter."""
        found = getattr(self, field)
        value: Array | np.ndarray = found.value if isinstance(found, brainstate.State) else found
        return value

    def for_units(self, field: str, x: Array) -> Array:
        """A parameter with one entry per unit, marked if it is learned, with a batch axis if `x` has one."""
        learned = isinstance(getattr(self, field), brainstate.State)
        value = element_wise(self.value(field)) if learned else jnp.asarray(self.value(field))
        return jnp.expand_dims(value, tuple(range(x.ndim - value.ndim)))

    def fields(self) -> Options:
        """The arguments of the NIR node besides its parameters."""
        return {}

    def to_nir(self) -> nir.NIRNode:
        """The NIR node with the current values of the parameters."""
        values = {field: np.asarray(self.value(field)) for field in self.parameters}
        node = getattr(nir, self.kind)(**values, **self.fields())
        node.metadata = dict(self.metadata)
        return node


class Port(Node):
    """Input and Output: the identity."""

    def fields(self) -> Options:
        return {f"{self.kind.lower()}_type": np.array(self.in_size)}

    def update(self, x: Array) -> Array:
        return x


class Dense(Node):
    """Affine and Linear, `y = W x + b`; axes of `W` before the last two are groups."""

    def __init__(self, node: nir.NIRNode, name: str, settings: Settings, in_size: Shape) -> None:
        self.parameters = ("weight", "bias") if isinstance(node, nir.Affine) else ("weight",)
        super().__init__(node, name, settings, in_size)
        *groups, out, _ = self.value("weight").shape
        self.out_size = (*groups, out)
        if "bias" in self.parameters and self.value("bias").shape != self.out_size:
            found = self.value("bias").shape
            raise NIRError(f"`{name}`: the bias has the shape {found}, not {self.out_size}.")

    def update(self, x: Array) -> Array:
        weight = jnp.swapaxes(self.value("weight"), -1, -2)
        bias = self.value("bias") if "bias" in self.parameters else None
        y: Array
        if weight.ndim == 2:
            y = matmul(x, weight, bias)
            return y
        batch = x.shape[: x.ndim - len(self.in_size)]
        weight = weight.reshape(-1, *weight.shape[-2:])
        bias = None if bias is None else bias.reshape(weight.shape[0], -1)
        y = grouped_matmul(x.reshape(*batch, *weight.shape[:2]), weight, bias)
        return y.reshape(*batch, *self.out_size)


class Scale(Node):
    """`y = scale * x`."""

    parameters, sized_by = ("scale",), "scale"

    def update(self, x: Array) -> Array:
        return x * self.for_units("scale", x)


class Conv(Node):
    """Conv1d and Conv2d, of (channels, *space); the weight is (out, in / groups, *window)."""

    parameters = ("weight", "bias")

    def __init__(self, node: nir.NIRNode, name: str, settings: Settings, in_size: Shape) -> None:
        super().__init__(node, name, settings, in_size)
        rank, weight = (1 if self.kind == "Conv1d" else 2), self.value("weight")
        self.stride, self.dilation = (_each(v, rank, name) for v in (node.stride, node.dilation))
        self.groups = int(node.groups)
        if weight.ndim != rank + 2 or self.value("bias").shape != weight.shape[:1]:
            raise NIRError(f"`{name}`: weight {weight.shape} and bias {self.value('bias').shape} do not fit.")
        if self.groups < 1 or weight.shape[0] % self.groups:
            raise NIRError(f"`{name}`: {weight.shape[0]} output channels are not {self.groups} groups.")
        if len(in_size) != rank + 1 or in_size[0] != weight.shape[1] * self.groups:
            channels, space = weight.shape[1] * self.groups, ", ".join("hw"[-rank:])
            raise NIRError(f"`{name}` takes an input of shape ({channels}, {space}), not {in_size}.")
        given = node.padding
        self.padding = given if isinstance(given, str) else _each(given, rank, name, 0)
        if self.padding == "same" and set(self.stride) != {1}:
            raise NIRError(f"`{name}`: the padding 'same' has no meaning with the stride {self.stride}.")
        self.out_size = _shape_after(self, name)

    def fields(self) -> Options:
        names = ("stride", "padding", "dilation")
        pack = (lambda v: int(v[0])) if self.kind == "Conv1d" else np.array
        given = {n: v if isinstance(v := getattr(self, n), str) else pack(v) for n in names}
        return {**given, "groups": self.groups, "input_shape": pack(self.in_size[1:])}

    def update(self, x: Array) -> Array:
        pads = self.padding.upper() if isinstance(self.padding, str) else [(p, p) for p in self.padding]
        options: Options = {"strides": self.stride, "padding": pads, "rhs_dilation": self.dilation}
        weight, bias = self.value("weight"), self.value("bias")
        y: Array = conv(x, weight, bias, feature_group_count=self.groups, **options)
        return y


class Pool(Node):
    """SumPool2d and AvgPool2d; a mean counts the padding, as that of PyTorch does."""

    def __init__(self, node: nir.NIRNode, name: str, settings: Settings, in_size: Shape) -> None:
        super().__init__(node, name, settings, in_size)
        if len(in_size) != 3:
            raise NIRError(f"`{name}` takes an input of shape (channels, h, w), not {in_size}.")
        self.kernel_size, self.stride = (_each(v, 2, name) for v in (node.kernel_size, node.stride))
        self.padding = _each(node.padding, 2, name, 0)
        self.out_size = _shape_after(self, name)

    def fields(self) -> Options:
        return {n: np.array(getattr(self, n)) for n in ("kernel_size", "stride", "padding")}

    def update(self, x: Array) -> Array:
        first = (1,) * (x.ndim - 2)
        pads = [(0, 0)] * (x.ndim - 2) + [(p, p) for p in self.padding]
        windows, strides = (*first, *self.kernel_size), (*first, *self.stride)
        total: Array = jax.lax.reduce_window(
            x, np.zeros((), x.dtype)[()], jax.lax.add, windows, strides, pads
        )
        return total if self.kind == "SumPool2d" else total / np.prod(self.kernel_size).item()


class Flatten(Node):
    """Axes `start_dim` to `end_dim`, counted without the batch axis, as one."""

    def __init__(self, node: nir.NIRNode, name: str, settings: Settings, in_size: Shape) -> None:
        super().__init__(node, name, settings, in_size)
        if (node.input_type or {}).get("input") is not None:
            expected = shape_of(node.input_type["input"], name)
            if in_size != expected:
                raise NIRError(f"`{name}` takes an input of shape {expected}, not {in_size}.")
        self.start_dim, self.end_dim, n = int(node.start_dim), int(node.end_dim), len(in_size)
        start, end = (d + n if d < 0 else d for d in (self.start_dim, self.end_dim))
        if not 0 <= start <= end < n:
            axes = f"{self.start_dim} to {self.end_dim}"
            raise NIRError(f"`{name}`: axes {axes} are not in the shape {in_size}.")
        self.out_size = (*in_size[:start], int(np.prod(in_size[start : end + 1])), *in_size[end + 1 :])

    def fields(self) -> Options:
        ends = {"start_dim": self.start_dim, "end_dim": self.end_dim}
        return {"input_type": {"input": np.array(self.in_size)}, **ends}

    def update(self, x: Array) -> Array:
        return x.reshape(*x.shape[: x.ndim - len(self.in_size)], *self.out_size)


class Threshold(Node):
    """A spike where the input is above the threshold."""

    parameters, sized_by = ("threshold",), "threshold"

    def __init__(self, node: nir.NIRNode, name: str, settings: Settings, in_size: Shape) -> None:
        super().__init__(node, name, settings, in_size)
        self.spk_fun = settings.spk_fun

    def update(self, x: Array) -> Array:
        return above(self.spk_fun, x - self.for_units("threshold", x))


def above(spk_fun: Spike, x: Array) -> Array:
    """A spike where `x > 0`; the functions in `nn.surrogate` spike where `x >= 0`."""
    not_above: Array = spk_fun(-x)
    return 1 - not_above


def _each(value: ArrayLike, rank: int, name: str, least: int = 1) -> tuple[int, ...]:
    """An integer for each spatial axis."""
    given = np.asarray(value)
    if given.size not in (1, rank) or not np.issubdtype(given.dtype, np.integer) or np.any(given < least):
        raise NIRError(f"`{name}`: {value!r} is not one or {rank} integers of at least {least}.")
    return tuple(int(n) for n in np.broadcast_to(given.reshape(-1), rank))


def _shape_after(module: Node, name: str) -> Shape:
    x = jax.ShapeDtypeStruct(module.in_size, brainstate.environ.dftype())
    try:
        shape = jax.eval_shape(module.update, x).shape
    except (TypeError, ValueError) as error:
        raise NIRError(f"`{name}` cannot take an input of shape {module.in_size}: {error}") from error
    if 0 in shape:
        raise NIRError(f"`{name}`: the window is larger than the input of shape {module.in_size}.")
    return tuple(shape)
