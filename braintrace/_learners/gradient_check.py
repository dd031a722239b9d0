"""Compare the gradient of a learner of a `brainstate` model with that of back-propagation through time.

Both are gradients of the same `step_fn` over the same sequences, from the states as they are now and traces
of zero. For BPTT, a call of the learner is a call of its model.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .. import rules
from .._frontends.pure import Pure
from .._online.request import check_choice, check_chunk_size, split_loss
from .._online.sequence import Sequence
from .._report.check import GradientCheck, Gradients, compare_gradients
from .._types import ArrayLike, Function, PyTree
from .calling import calling, split_call
from .stateful import ETraceAlgorithm


def check_gradients(
    learner: ETraceAlgorithm,
    *sequences: PyTree,
    step_fn: Function,
    mask: ArrayLike | None = None,
    chunk_size: int | None = None,
    weights: PyTree = None,
    reduction: str = "mean",
    has_aux: bool = False,
    tolerance: float | None = None,
) -> GradientCheck:
    """Compare `learner.etrace_grad(*sequences, step_fn=step_fn, ...)` with BPTT; states stay as they are.

    Args:
        learner: A compiled learner.
        *sequences: Arrays or pytrees with time as the first axis.
        step_fn: Calls the learner once and returns the loss of a step, as for `etrace_grad`.
        mask: Weights of the losses.
        chunk_size: That of `etrace_grad`.
        weights: States whose gradients are compared; the model's parameters by default.
        reduction: 'mean' or 'sum'.
        has_aux: Whether `step_fn` returns a pair.
        tolerance: Relative error that counts as round-off; by default it depends on the type of the weights.

    Returns:
        The differences by parameter, and their causes.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> learner = braintrace.compile(braintrace.nn.GRUCell(3, 4), "d_rtrl", jnp.ones(3))
    >>> check = check_gradients(learner, jnp.ones((5, 3)), step_fn=lambda x: jnp.sum(learner(x) ** 2))
    >>> [(p.path[0], p.cause) for p in check.parameters]
    [('Wh', 'rule'), ('Wr', 'rule'), ('Wz', 'rule')]
    """
    check_choice("reduction", reduction, ("mean", "sum"))
    check_chunk_size(chunk_size)
    sequence = Sequence.check(sequences, mask)
    weights = learner.param_states if weights is None else weights
    exactness = learner.report.exactness
    options = {"mask": sequence.mask, "weights": weights, "reduction": reduction}
    in_windows = (learner.steps_at_once(chunk_size) or 1) > 1
    exact = ETraceAlgorithm(learner.model, rules.BPTT())
    exact._cache = learner._cache.with_rule(rules.BPTT(), None)

    def one_loss(*slices: PyTree) -> PyTree:
        """The loss of a step; if `step_fn` takes windows, of a window of one step."""
        lead = (1,) if in_windows else ()
        out = step_fn(*jax.tree.map(lambda a: a.reshape(*lead, *a.shape), slices))
        return split_loss(out, has_aux, lead, sequence.mask.shape[1:])[0].reshape(sequence.mask.shape[1:])

    def online(*arrays: PyTree) -> PyTree:
        how = {"has_aux": has_aux, "chunk_size": chunk_size, **options}
        grads = learner.etrace_grad(*arrays, step_fn=step_fn, **how)
        return grads[0] if has_aux else grads

    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        _, args, kwargs = split_call(learner, args, kwargs)  # without the inputs of the rule's signal
        return exact.update(*args, **kwargs)

    def by_bptt(*arrays: PyTree) -> PyTree:
        with calling(learner, call):
            return exact.etrace_grad(*arrays, step_fn=one_loss, **options)

    found, expected = (_gradient(f, learner, sequence) for f in (online, by_bptt))
    traces = [st.value for st in learner.traces.values()]
    return compare_gradients(found, expected, exactness, sequence.length, tolerance, traces)


def _gradient(function: Function, learner: ETraceAlgorithm, sequence: Sequence) -> Gradients:
    """The gradients that `function` returns, from traces of zero; no state is written."""
    pure = Pure.trace(function, *sequence.arrays)
    traces = [st for k, st in learner.traces.items() if k not in learner._lasting_values()]
    zero = {id(st) for st in (*traces, learner.steps)}
    values = [
        [jnp.zeros_like(leaf) for leaf in leaves] if id(state) in zero else leaves
        for state, leaves in zip(pure.states, pure.values(), strict=True)
    ]
    found = jax.jit(lambda values, arrays: pure(values, *arrays)[0])(values, sequence.arrays)
    return {tuple(map(str, path)): g for path, g in found.items()}
