"""Convolutions with kernels that are learned online."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Sequence

import brainstate

from .._ops import conv
from .._types import Options, Shape, Size, Value


class _Conv(brainstate.nn.Module):
    """Base class of the convolutions, a mix-in in front of the classes of `brainstate.nn`."""

    num_spatial_dims: int

    @functools.wraps(brainstate.nn.Conv2d.__init__)  # type: ignore[misc]
    def __init__(self, *args: object, **options: object) -> None:
        own = super().__init__
        given = inspect.signature(own).bind(*args, **options)
        values = given.arguments
        any_space = isinstance(values["in_size"], numbers.Integral)
        if any_space:  # a size on which any such kernel fits, for the constructor's own checks
            sizes = self._each(values["kernel_size"]), self._each(values.get("rhs_dilation", 1))
            extent = [a * b for a, b in zip(*sizes, strict=True)]
            values |= {"in_size": (int(values["in_size"]), *extent), "channel_first": True}
        own(*given.args, **given.kwargs)
        self.any_space = any_space
        if any_space:
            self._in_size = self._out_size = None

    def _each(self, value: Size) -> Shape:
        values = tuple(value) if isinstance(value, Sequence) else (value,)
        return values * self.num_spatial_dims if len(values) == 1 else values

    def _check_input_dim(self, x: Value) -> None:
        if not self.any_space:
            super()._check_input_dim(x)
            return
        n = self.num_spatial_dims
        if x.ndim not in (n + 1, n + 2) or x.shape[-n - 1] != self.in_channels:
            space = "height width depth".split()[-n:] if n > 1 else ["length"]
            raise ValueError(
                f"Conv{n}d({self.in_channels}, ...) takes ([batch,] {self.in_channels}, {', '.join(space)}), "
                f"channels first, not {x.shape}."
            )

    def _conv_op(self, x: Value, params: Options) -> Value:
        kernel = params["weight"] if self.w_mask is None else params["weight"] * self.w_mask
        return conv(
            x,
            kernel,
            params.get("bias"),
            strides=self.stride,
            padding=self.padding,
            lhs_dilation=self.lhs_dilation,
            rhs_dilation=self.rhs_dilation,
            feature_group_count=self.groups,
            dimension_numbers=self.dimension_numbers,
        )


class Conv1d(_Conv, brainstate.nn.Conv1d):
    """Convolution over ([batch,] length, channels); given an integer `in_size`, channels come first.

    An integer is the number of input channels; the length is then taken from the input.

    >>> import jax.numpy as jnp
    >>> Conv1d((28, 3), 8, kernel_size=5)(jnp.ones((2, 28, 3))).shape
    (2, 28, 8)
    >>> Conv1d(3, 8, kernel_size=5)(jnp.ones((2, 3, 28))).shape
    (2, 8, 28)
    """


class Conv2d(_Conv, brainstate.nn.Conv2d):
    """Convolution over ([batch,] height, width, channels); given an integer `in_size`, channels come first.

    An integer is the number of input channels; height and width are then taken from the input.

    >>> import jax.numpy as jnp
    >>> Conv2d((28, 28, 1), 8, kernel_size=3)(jnp.ones((28, 28, 1))).shape
    (28, 28, 8)
    >>> Conv2d(1, 8, kernel_size=3, padding="SAME")(jnp.ones((1, 28, 28))).shape
    (8, 28, 28)
    """


class Conv3d(_Conv, brainstate.nn.Conv3d):
    """Convolution over ([batch,] three axes, channels); given an integer `in_size`, channels come first.

    An integer is the number of input channels; the other sizes are then taken from the input.

    >>> import jax.numpy as jnp
    >>> Conv3d((4, 5, 6, 1), 2, kernel_size=3)(jnp.ones((4, 5, 6, 1))).shape
    (4, 5, 6, 2)
    >>> Conv3d(1, 2, kernel_size=3)(jnp.ones((1, 4, 5, 6))).shape
    (2, 4, 5, 6)
    """
