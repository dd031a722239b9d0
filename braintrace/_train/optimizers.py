"""Optimisers for streams, which survive an update at every step with batch size 1; and optimisers by name.

Overshooting-bounded gradient descent (ObGD), Elsayed, Vasan and Mahmood 2024, "Streaming deep reinforcement
learning finally works", arXiv:2410.14606. With the error `d` of a prediction and the eligibility trace `z`,
the decayed sum of its gradients:

    M = learning_rate kappa max(|d|, 1) ||z||_1        w <- w + learning_rate / max(M, 1) d z

The adaptive form replaces `z` by `z / sqrt(v + eps)`, where `v` is a running average of `(d z)^2`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from .._types import Array, ArrayLike, Function, PyTree

if TYPE_CHECKING:
    import optax

Rate = float | Callable[[Array], ArrayLike]  # a learning rate, or a schedule of Optax


class State(NamedTuple):
    """The number of updates and, of `adaptive_obgd`, running averages of squared updates."""

    count: PyTree
    moments: PyTree


def obgd(learning_rate: Rate = 1.0, kappa: float = 2.0) -> optax.GradientTransformationExtraArgs:
    """Return overshooting-bounded gradient descent, as an Optax gradient transformation.

    The step size shrinks when the update would overshoot: no update is longer than `1 / kappa` in the L1
    norm, per unit of error.

    Args:
        learning_rate: The largest step size, a float or a schedule of Optax. Default 1.
        kappa: How cautious the bound is, a float above 1. Default 2.

    Returns:
        A transformation whose `update(updates, state, params, error=None)` takes gradients of a loss, to
        descend along. With `error`, the error of a prediction (such as the TD error), `updates` are
        eligibility traces of the prediction's gradients, and the step is along `error * updates`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> optimizer = obgd(kappa=2.0)
        >>> w = {"w": jnp.zeros(2)}
        >>> updates, _ = optimizer.update({"w": jnp.array([30.0, -10.0])}, optimizer.init(w), w)
        >>> updates["w"].tolist()
        [-0.375, 0.125]
    """
    return _bounded(learning_rate, kappa, None, 0.0)


def adaptive_obgd(
    learning_rate: Rate = 1.0, kappa: float = 2.0, beta2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    """Return overshooting-bounded gradient descent with a step size per weight, as in RMSProp.

    Args:
        learning_rate: The largest step size, a float or a schedule of Optax. Default 1.
        kappa: How cautious the bound is, a float above 1. Default 2.
        beta2: Decay of the running average of squared updates, a float. Default 0.999.
        eps: Added to the average before its root is taken, a float. Default 1e-8.

    Returns:
        A transformation whose `update` takes the same arguments as that of `obgd`.

    Example:
        >>> import jax.numpy as jnp
        >>> optimizer = adaptive_obgd(learning_rate=0.1)
        >>> w = jnp.zeros(2)
        >>> updates, _ = optimizer.update(jnp.array([30.0, -10.0]), optimizer.init(w), w)
        >>> [round(float(u), 3) for u in updates]
        [-0.1, 0.1]
    """
    return _bounded(learning_rate, kappa, beta2, eps)


def _bounded(
    learning_rate: Rate, kappa: float, beta2: float | None, eps: float
) -> optax.GradientTransformationExtraArgs:
    """Return the transformation, with `z / sqrt(v + eps)` in place of `z` unless `beta2` is None."""
    import optax

    def init(params: PyTree) -> State:
        zeros = lambda: jax.tree.map(lambda w: jnp.zeros_like(abs(w)), params)
        return State(jnp.zeros([], jnp.int32), None if beta2 is None else zeros())

    def update(
        traces: PyTree, state: State, params: PyTree = None, *, error: PyTree = None, **_: object
    ) -> tuple[PyTree, State]:
        count, moments = state.count + 1, state.moments
        size = 1.0 if error is None else jnp.abs(error)
        if beta2 is not None:
            average = lambda v, z: beta2 * v + (1 - beta2) * (size * abs(z)) ** 2
            moments = jax.tree.map(average, moments, traces)
            traces = jax.tree.map(lambda z, v: z / jnp.sqrt(v / (1 - beta2**count) + eps), traces, moments)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        norm = sum(jnp.sum(abs(z)) for z in jax.tree.leaves(traces))
        bound = rate * kappa * jnp.maximum(size, 1) * norm
        step = rate / jnp.maximum(bound, 1) * (-1.0 if error is None else error)
        return jax.tree.map(lambda z: (step * z).astype(z.dtype), traces), State(count, moments)

    return optax.GradientTransformationExtraArgs(init, update)


OWN = {"obgd": obgd, "adaptive_obgd": adaptive_obgd}
SOME = "adam, adamw, sgd, rmsprop and obgd are some"


def optimizer_by_name(name: str, learning_rate: float, clip: float) -> optax.GradientTransformation:
    """Return an optimiser of Optax, or `obgd` or `adaptive_obgd`, after clipping gradients to a global norm.

    Args:
        name: The name of a function that takes a learning rate first.
        learning_rate: The learning rate.
        clip: The largest global norm of a gradient; 0 for no limit.

    Raises:
        ImportError: Optax is not installed.
        ValueError: There is no such optimiser, or `fit` cannot use it.
    """
    try:
        import optax
    except ImportError as error:
        raise ImportError("Training needs optax and orbax: pip install 'braintrace[train]'.") from error
    make: Function | None = OWN.get(name) or getattr(optax, name, None)
    if make is None:
        raise ValueError(f"optax has no optimiser {name!r}; {SOME}.")
    try:
        if not next(iter(inspect.signature(make).parameters), "").endswith("learning_rate"):
            raise TypeError("it takes no learning rate")
        chosen = make(learning_rate)
        update = optax.with_extra_args_support(chosen).update
        jax.eval_shape(lambda w: update(w, chosen.init(w), w, value=w), 1.0)
    except TypeError as error:
        raise ValueError(f"optax.{name} cannot be used here ({error}); {SOME}.") from error
    return optax.chain(optax.clip_by_global_norm(clip), chosen) if clip else chosen
