"""Convolution: `jax.lax.conv_general_dilated` with a kernel that is learned online.

The trace sees a convolution as a product of the kernel with patches of the input,

    y[n, go, p] = sum x[n, gi, p + k] * w[go, i, k]

with one label `p` and one `k` for each spatial dimension, and `g` for the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._types import DTypeLike, Value
from .axis_labels import Term
from .primitive import WeightFn, bias_of, on_mantissa, register_primitive, shape_of, spikes_as

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Window:
    """The geometry of a convolution; the specs hold (batch, feature, *space) axes, as in `jax.lax`."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    padding: Pairs
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    feature_groups: int
    batch_groups: int
    batched: bool
    specs: lax.ConvDimensionNumbers
    precision: lax.PrecisionLike = None
    preferred: DTypeLike | None = None  # the type of the output, if it is not that of the operands

    @property
    def groups(self) -> int:
        return self.feature_groups * self.batch_groups  # one of the two is 1

    def patches(self, x: jax.Array) -> jax.Array:
        """The patches of the input, (n, g, i, p, k, q, l, ...): one entry for each kernel entry and position.

        Gathered axis by axis, because `conv_general_dilated_patches` is itself a convolution: it is 2 to 8
        times slower on CPU, and it rounds.
        """
        if not self.batched:
            x = jnp.expand_dims(x, self.specs.lhs_spec[0])
        x = jnp.transpose(x, self.specs.lhs_spec)
        edges = [(lo, hi, d - 1) for (lo, hi), d in zip(self.padding, self.lhs_dilation, strict=True)]
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *edges])
        for i, (size, stride, dilation) in enumerate(
            zip(self.kernel, self.strides, self.rhs_dilation, strict=True)
        ):
            offsets = dilation * np.arange(size)
            starts = np.arange(0, x.shape[2 + 2 * i] - dilation * (size - 1), stride)
            x = jnp.take(x, starts[:, None] + offsets[None], axis=2 + 2 * i, mode="clip")
        n, c, *rest = x.shape
        if self.batch_groups > 1:
            return jnp.swapaxes(x.reshape(self.batch_groups, n // self.batch_groups, c, *rest), 0, 1)
        return x.reshape(n, self.feature_groups, c // self.feature_groups, *rest)

    def split_kernel(self, weight: jax.Array) -> jax.Array:
        """Reshape the kernel to (g, o, i, k, l, ...)."""
        weight = jnp.transpose(weight, self.specs.rhs_spec)
        return weight.reshape(self.groups, -1, *weight.shape[1:])

    def split_bias(self, bias: jax.Array) -> jax.Array:
        """Reshape the bias to (g, o)."""
        return bias.reshape(self.groups, -1)

    def split_output(self, q: jax.Array, _: jax.Array) -> jax.Array:
        """Reshape an array shaped as the output to (n, g, o, p, q, ...)."""
        if not self.batched:
            q = jnp.expand_dims(q, self.specs.out_spec[0])
        n, o, *rest = (q := jnp.transpose(q, self.specs.out_spec)).shape
        return q.reshape(n, self.groups, o // self.groups, *rest)


def _conv(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, *, window: Window) -> jax.Array:
    specs = window.specs
    dtype = jnp.result_type(x, weight)
    y = lax.conv_general_dilated(
        (x if window.batched else jnp.expand_dims(x, specs.lhs_spec[0])).astype(dtype),
        weight.astype(dtype),
        window_strides=window.strides,
        padding=window.padding,
        lhs_dilation=window.lhs_dilation,
        rhs_dilation=window.rhs_dilation,
        feature_group_count=window.feature_groups,
        batch_group_count=window.batch_groups,
        dimension_numbers=specs,
        precision=window.precision,
        preferred_element_type=window.preferred,
    )
    if bias is not None:
        y = y + jnp.expand_dims(bias, [i for i in range(y.ndim) if i != specs.out_spec[1]])
    return y if window.batched else jnp.squeeze(y, specs.out_spec[0])


def _terms(window: Window) -> dict[str, Term]:
    space, kernel = "pqr"[: len(window.kernel)], "klm"[: len(window.kernel)]
    both = "".join(p + k for p, k in zip(space, kernel, strict=True))
    return {
        "weight": Term(
            f"ngi{both},goi{kernel}->ngo{space}", window.patches, window.split_kernel, window.split_output
        ),
        "bias": Term(f"go->ngo{space}", w=window.split_bias, y=window.split_output),
    }


conv_p = register_primitive("etp_conv", _conv, _terms)


def conv(
    x: Value,
    kernel: Value,
    bias: Value = None,
    *,
    strides: Sequence[int] = (1,),
    padding: str | Sequence[tuple[int, int]] = "SAME",
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    dimension_numbers: tuple[str, str, str] | lax.ConvDimensionNumbers | None = None,
    kernel_fn: WeightFn | None = None,
    bias_fn: WeightFn | None = None,
) -> Value:
    """Convolve `x` with a kernel that is learned online, in 1 to 3 dimensions.

    Options are those of `jax.lax.conv_general_dilated`; one stride or dilation stands for all dimensions.

    Args:
        x: Input, shape `(batch, in, *space)`; the batch axis may be missing.
        kernel: Kernel, shape `(out, in / feature_group_count, *window)`.
        bias: Bias, shape `(out,)`; by default none.
        strides: Steps of the window.
        padding: 'SAME', 'VALID', or a pair of integers for each spatial axis.
        lhs_dilation: Dilation of the input.
        rhs_dilation: Dilation of the kernel.
        feature_group_count: Number of groups of features that are convolved separately.
        batch_group_count: Number of groups of samples that are convolved separately.
        dimension_numbers: Order of the axes, as in JAX; it always includes the batch axis.
        kernel_fn: Function applied to the kernel first, without its unit.
        bias_fn: Function applied to the bias first.

    Returns:
        The convolution plus `bias`, shape `(batch, out, *space)`.

    >>> import jax.numpy as jnp
    >>> conv(jnp.ones((5, 3, 8, 8)), jnp.ones((4, 3, 2, 2)), strides=(2,)).shape
    (5, 4, 4, 4)
    """
    kernel, bias = on_mantissa(kernel_fn, kernel), on_mantissa(bias_fn, bias)
    shape, kernel_shape = shape_of(x), shape_of(kernel)
    rank = len(kernel_shape)
    if not 3 <= rank <= 5 or len(shape) not in (rank, rank - 1):
        raise ValueError(
            "`conv` takes a kernel of (out, in) and 1 to 3 spatial axes, and x with as many axes or, without "
            f"a batch, one less; not x of shape {shape} and a kernel of shape {kernel_shape}."
        )
    specs = lax.conv_dimension_numbers(kernel_shape, kernel_shape, dimension_numbers)
    size = tuple(kernel_shape[i] for i in specs.rhs_spec[2:])
    strides = _each("strides", strides, rank - 2)
    lhs_dilation = _each("lhs_dilation", lhs_dilation or (1,), rank - 2)
    rhs_dilation = _each("rhs_dilation", rhs_dilation or (1,), rank - 2)
    batched = len(shape) == rank
    if not batched:
        shape = (*shape[: specs.lhs_spec[0]], 1, *shape[specs.lhs_spec[0] :])
    window = Window(
        kernel=size,
        strides=strides,
        padding=_pairs(
            [shape[i] for i in specs.lhs_spec[2:]], size, strides, padding, lhs_dilation, rhs_dilation
        ),
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        feature_groups=feature_group_count,
        batch_groups=batch_group_count,
        batched=batched,
        specs=specs,
    )
    if bias is not None:
        bias = _per_feature(bias, kernel_shape[specs.rhs_spec[0]], specs.out_spec[1], rank)
    return conv_p(spikes_as(kernel, x), weights={"weight": kernel, "bias": bias}, window=window)


def _each(name: str, values: Sequence[int], count: int) -> tuple[int, ...]:
    """One value for each spatial dimension."""
    if len(values) not in (1, count):
        raise ValueError(f"`conv` takes {name} of length 1 or {count} for this kernel, not {tuple(values)}.")
    return tuple(values) * (count // len(values))


def _pairs(
    space: Sequence[int],
    size: Sequence[int],
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
) -> Pairs:
    """The padding of each spatial dimension, (low, high)."""
    if isinstance(padding, str):
        if any(d != 1 for d in lhs_dilation):
            raise ValueError(
                f"With `lhs_dilation`, `padding` is a pair (low, high) for each dimension, not {padding!r}."
            )
        dilated = [(k - 1) * d + 1 for k, d in zip(size, rhs_dilation, strict=True)]
        padding = lax.padtype_to_pads(space, dilated, strides, padding)
    return tuple((int(low), int(high)) for low, high in padding)


def _per_feature(bias: Value, features: int, axis: int, rank: int) -> Value:
    """A bias that broadcasts against the output along its feature axis only, as (out,)."""
    shape = shape_of(bias)
    if len(shape) > 1:
        full = (1,) * (rank - len(shape)) + shape
        if len(full) == rank and all(n == 1 for i, n in enumerate(full) if i != axis):
            bias = on_mantissa(lambda b: b.reshape(-1), bias)
    return bias_of((features,), bias)
