"""What a run was started with, as far as it changes what is learned: a run that goes on compares it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._learners.vjp import ETraceVjpAlgorithm
from .engine import Engine

_STEPS = 3  # a learning rate may begin at zero


def settings(engine: Engine) -> dict[str, Any]:
    """Names and values of any JSON kind."""
    found: dict[str, Any] = {
        "`update_every`": engine.update_every or "sequence",
        "`reset`": engine.reset,
    }
    if engine.in_windows:
        found["the window (`chunk_size`)"] = engine.chunk_size
    learner = engine.learner
    if isinstance(learner, ETraceVjpAlgorithm):
        found["`window`"] = learner.window if learner.vjp_method == "multi-step" else "a single step"
        found["`rank`"] = getattr(learner.rule, "rank", 0)
    if (step := _size_of_step(engine)) is not None:
        found["what the optimiser makes of a gradient of 1 (its learning rate, say)"] = step
    return found


def _size_of_step(engine: Engine) -> float | None:
    """How far the optimiser goes in a few steps along gradients of one: optax keeps no learning rate.

    None where it takes more than gradients and parameters.
    """
    ones = jax.tree.map(lambda p: jnp.ones((1,) * jnp.ndim(p), jnp.result_type(p)), engine.parameters())
    try:
        state = engine.optimizer.init(ones)
        total = 0.0
        for _ in range(_STEPS):
            updates, state = engine.optimizer.update(ones, state, ones)
            total += sum(float(np.abs(np.asarray(a)).sum()) for a in jax.tree.leaves(updates))
    except Exception:  # an optimiser may ask for anything
        return None
    return float(f"{total / _STEPS / max(1, len(jax.tree.leaves(ones))):.4g}")
