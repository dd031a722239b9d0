"""Compare the gradient of a learner of a `brainstate` model with that of back-propagation through time.

Both gradients are those of the same `step_fn` over the same sequences, from the states as they are now and
from traces of zero. For BPTT, a call of the learner is one of its model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._frontends.pure import Pure
from .._online.parts import finite_targets, weighed
from .._online.request import check_choice, check_chunk_size, split_loss
from .._online.sequence import Sequence, over_chunks
from .._report.check import GradientCheck, Gradients, compare_gradients, round_off
from .model_calls import calling_model
from .sequences import trace as trace_step
from .stateful import ETraceAlgorithm


def check_gradients(
    learner: ETraceAlgorithm,
    *sequences: Any,
    step_fn: Callable[..., Any],
    mask: Any = None,
    chunk_size: int | None = None,
    weights: Any = None,
    reduction: str = "mean",
    has_aux: bool = False,
    tolerance: float | None = None,
) -> GradientCheck:
    """Compare `learner.etrace_grad(*sequences, step_fn=step_fn, ...)` with BPTT; states stay as they are.

    The arguments are those of `etrace_grad`. `tolerance` is the relative error that counts as round-off; by
    default it goes by the type of the parameters.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> learner = braintrace.compile(braintrace.nn.GRUCell(3, 4), "d_rtrl", jnp.ones(3))
    >>> check = check_gradients(learner, jnp.ones((5, 3)), step_fn=lambda x: jnp.sum(learner(x) ** 2))
    >>> [(p.path[0], p.cause) for p in check.parameters]
    [('Wh', 'rule'), ('Wr', 'rule'), ('Wz', 'rule')]
    """
    check_choice("reduction", reduction, ("mean", "sum"))
    check_chunk_size(chunk_size)
    sequence = Sequence.check(sequences, mask)
    if (learner.steps_at_once(chunk_size) or 1) == 1:
        targets = trace_step(learner, step_fn, sequence).step.targets
        leaves, tree = jax.tree.flatten(sequence.arrays)
        arrays = jax.tree.unflatten(tree, finite_targets(leaves, sequence.mask, targets))
        sequence = replace(sequence, arrays=arrays)
    weights = learner.param_states if weights is None else weights
    exactness = learner.report.exactness
    options = {"mask": sequence.mask, "chunk_size": chunk_size, "weights": weights, "reduction": reduction}

    total = (float(jnp.sum(sequence.mask)) or 1.0) if reduction == "mean" else 1.0

    def online(*arrays: Any) -> Any:
        grads = learner.etrace_grad(*arrays, step_fn=step_fn, has_aux=has_aux, **options)
        return grads[0] if has_aux else grads

    def true(*arrays: Any) -> Any:
        given = replace(sequence, arrays=arrays)
        with calling_model(learner):
            grads = _bptt(learner, given, step_fn, chunk_size, weights, has_aux)
        return jax.tree.map(lambda g: g / total, grads)

    found, expected = _gradient(online, learner, sequence), _gradient(true, learner, sequence)
    if tolerance is None:
        states = [*weights.values(), *learner.traces.values()]
        tolerance = round_off([st.value for st in states])
    return compare_gradients(found, expected, exactness, sequence.length, tolerance)


def _bptt(
    learner: Any, sequence: Sequence, step_fn: Any, chunk_size: int | None, weights: Any, has_aux: bool
) -> Any:
    """The gradient of the summed losses through all steps."""
    size = learner.steps_at_once(chunk_size)
    samples = sequence.mask.shape[1:]

    def losses(carry: Any, arrays: Any, mask: Any, _: Any) -> Any:
        if size is not None and size > 1:
            return carry, split_loss(step_fn(*arrays), has_aux, mask.shape[:1], samples)[0]
        one = lambda slices: split_loss(step_fn(*slices), has_aux, (), samples)[0]
        return carry, brainstate.transform.for_loop(one, arrays)

    def total() -> Any:
        _ = [state.value for state in weights.values()]  # also of those that the model does not use
        _, found = over_chunks(losses, (), sequence, size or sequence.length, brainstate.transform.scan)
        return weighed(found, sequence.mask)

    return brainstate.transform.grad(total, weights)()


def _gradient(function: Any, learner: ETraceAlgorithm, sequence: Sequence) -> Gradients:
    """The gradients that `function` returns, from traces of zero; no state is written."""
    pure, values = trace_afresh(function, learner, sequence)
    found = jax.jit(lambda values, arrays: pure(values, *arrays)[0])(values, sequence.arrays)
    return {tuple(map(str, path)): g for path, g in found.items()}


def trace_afresh(function: Any, learner: ETraceAlgorithm, sequence: Sequence) -> tuple[Pure, list[list[Any]]]:
    """A function over a sequence as a pure one, and the values of its states, traces being zero."""
    pure = Pure.trace(function, *sequence.arrays)
    traces = [st for k, st in learner.traces.items() if k not in learner._lasting_values()]
    fresh = {id(st) for st in (*traces, learner.steps)}
    values = [
        [jnp.zeros_like(leaf) for leaf in leaves] if id(state) in fresh else leaves
        for state, leaves in zip(pure.states, pure.values(), strict=True)
    ]
    return pure, values
