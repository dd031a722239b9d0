"""Optimisers for streams equal their equations, written out naively."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace

RATE, KAPPA, BETA2, EPS = 0.7, 1.5, 0.9, 1e-6


def naive(traces, errors, adaptive):
    """The equations of the paper, weight by weight, for a list of traces; all moves."""
    v = [np.zeros_like(z) for z in traces[0]]
    found = []
    for count, (trace, error) in enumerate(zip(traces, errors, strict=True), 1):
        v = [BETA2 * a + (1 - BETA2) * (error * z) ** 2 for a, z in zip(v, trace, strict=True)]
        if adaptive:
            trace = [z / np.sqrt(a / (1 - BETA2**count) + EPS) for a, z in zip(v, trace, strict=True)]
        overshoot = RATE * KAPPA * max(abs(error), 1.0) * sum(np.abs(z).sum() for z in trace)
        rate = min(RATE / overshoot, RATE)
        found.append([rate * error * z for z in trace])
    return found


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("with_error", [False, True])
def test_equals_the_equations(adaptive, with_error):
    rng = np.random.default_rng(0)
    # some traces are so small that no bound is active
    traces = [[rng.normal(size=3) * s, rng.normal(size=(2, 2)) * s] for s in (1.0, 0.01, 3.0, 1e-3)]
    errors = [0.3, -2.5, 4.0, -0.01] if with_error else [-1.0] * 4
    expected = naive(traces, errors, adaptive)
    options = {"beta2": BETA2, "eps": EPS} if adaptive else {}
    make = braintrace.adaptive_obgd if adaptive else braintrace.obgd
    with jax.enable_x64(True):
        optimizer = make(RATE, KAPPA, **options)
        params = [jnp.zeros(3), jnp.zeros((2, 2))]
        state = optimizer.init(params)
        for trace, error, moves in zip(traces, errors, expected, strict=True):
            given = {"error": error} if with_error else {}
            found, state = jax.jit(optimizer.update)(list(map(jnp.asarray, trace)), state, params, **given)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, moves)


@pytest.mark.parametrize("make", [braintrace.obgd, braintrace.adaptive_obgd])
def test_schedules_chains_and_types(make):
    w = jnp.ones(3, jnp.bfloat16)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), make(optax.linear_schedule(1e-3, 0.0, 2)))
    state = optimizer.init(w)
    sizes = []
    for _ in range(3):
        moves, state = optimizer.update(w, state, w, value=jnp.ones(()))
        assert moves.dtype == w.dtype
        sizes.append(float(jnp.abs(moves).sum()))
    assert sizes[0] > sizes[1] > sizes[2] == 0


def test_no_update_overshoots():
    """On a quadratic loss with a far too large step size, descent stays within its bound."""
    w = jnp.array([3.0, -2.0])
    optimizer = braintrace.obgd(1e6, kappa=2.0)
    state = optimizer.init(w)
    for _ in range(50):
        moves, state = optimizer.update(1e3 * w, state, w)
        assert float(jnp.abs(moves).sum()) <= 0.5 + 1e-6
        w = w + moves
    assert float(jnp.abs(w).max()) < 0.5
