"""Spike functions: a step function with the derivative of a smoother one (a surrogate).

    spike(x) = 1 if x >= 0 else 0        d spike(x)/dx := derivative(x)

Each function here returns such a `spike`, which a neuron takes as `spk_fun`. `with_derivative` makes others:

    LIF(10, spk_fun=surrogate.with_derivative(lambda x: 1 / (1 + x**2)))
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from .._types import Value

Function = Callable[[Value], Value]


def with_derivative(derivative: Function) -> Function:
    """Make a spike function with a given surrogate derivative.

    >>> spike = with_derivative(lambda x: 1 / (1 + jnp.abs(x)) ** 2)
    >>> spike(jnp.array([-1.0, 0.5])).tolist()
    [0.0, 1.0]
    >>> round(float(jax.grad(spike)(1.0)), 3)
    0.25
    """
    return partial(_spike, derivative=derivative)  # not a closure: neurons can be pickled


def _spike(x: Value, derivative: Function) -> Value:
    return _step(derivative, x)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _step(derivative: Function, x: Value) -> Value:
    return jnp.asarray(x >= 0, jnp.result_type(x))


@_step.defjvp
def _step_jvp(derivative: Function, primals: Value, tangents: Value) -> Value:
    (x,), (dx,) = primals, tangents
    return _step(derivative, x), derivative(x) * dx


def sigmoid(alpha: float = 4.0) -> Function:
    """The derivative of a logistic function, `alpha s(alpha x) (1 - s(alpha x))`.

    >>> round(float(jax.grad(sigmoid())(0.0)), 3)
    1.0
    """
    return with_derivative(partial(_sigmoid, alpha=alpha))


def _sigmoid(x: Value, alpha: float) -> Value:
    s = jax.nn.sigmoid(alpha * x)
    return alpha * s * (1 - s)


def triangle(height: float = 0.3, width: float = 1.0) -> Function:
    """A triangle, `height max(0, 1 - |x| / width)`: the derivative known as that of relu.

    >>> round(float(jax.grad(triangle())(0.0)), 3)
    0.3
    """
    return with_derivative(partial(_triangle, height=height, width=width))


def _triangle(x: Value, height: float, width: float) -> Value:
    return height * jnp.maximum(0.0, 1 - jnp.abs(x) / width)


def arctan(alpha: float = 2.0) -> Function:
    """The derivative of an arc tangent, `(alpha / 2) / (1 + (pi alpha x / 2)^2)`.

    >>> round(float(jax.grad(arctan())(0.0)), 3)
    1.0
    """
    return with_derivative(partial(_arctan, alpha=alpha))


def _arctan(x: Value, alpha: float) -> Value:
    return alpha / 2 / (1 + (jnp.pi / 2 * alpha * x) ** 2)


def fast_sigmoid(alpha: float = 10.0) -> Function:
    """`1 / (1 + alpha |x|)^2`, as in SuperSpike (Zenke & Ganguli, 2018).

    >>> round(float(jax.grad(fast_sigmoid())(0.1)), 3)
    0.25
    """
    return with_derivative(partial(_fast_sigmoid, alpha=alpha))


def _fast_sigmoid(x: Value, alpha: float) -> Value:
    return 1 / (1 + alpha * jnp.abs(x)) ** 2


def gaussian(sigma: float = 0.5) -> Function:
    """The density of a normal distribution, `N(x; 0, sigma)`.

    >>> round(float(jax.grad(gaussian())(0.0)), 3)
    0.798
    """
    return with_derivative(partial(_normal, sigma=sigma))


def _normal(x: Value, sigma: float, mean: float = 0.0) -> Value:
    return jnp.exp(-(((x - mean) / sigma) ** 2) / 2) / (sigma * (2 * jnp.pi) ** 0.5)


def multi_gaussian(scale: float = 0.5, sigma: float = 0.5, h: float = 0.15, s: float = 6.0) -> Function:
    """A normal density with negative flanks (Yin et al., 2021); `N(m, d)` at `x` has mean m, deviation d:

        scale ((1 + h) N(0, sigma) - h N(sigma, s sigma) - h N(-sigma, s sigma))

    >>> round(float(jax.grad(multi_gaussian())(0.0)), 3)
    0.439
    """
    return with_derivative(partial(_multi_gaussian, scale=scale, sigma=sigma, h=h, s=s))


def _multi_gaussian(x: Value, scale: float, sigma: float, h: float, s: float) -> Value:
    flanks = _normal(x, s * sigma, sigma) + _normal(x, s * sigma, -sigma)
    return scale * ((1 + h) * _normal(x, sigma) - h * flanks)
