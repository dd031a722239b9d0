"""BPTT: back-propagation through time, with the interface of a learner, to compare with.

It keeps no traces. What one gradient spans is back-propagated through: a sequence in `etrace_grad`, the steps
between two updates elsewhere (truncated BPTT). Memory grows with that number of steps.
"""

from __future__ import annotations

from typing import Any

import brainstate
import jax

from .. import _rules as rules
from .._online.data import MultiStepData, SingleStepData, one_step
from .options import Choice, OptionsLearner


class BPTT(OptionsLearner):
    """Back-propagation through time, on any model.

    `chunk_size` of `etrace_grad` is the number of steps whose values are stored; those of other chunks are
    computed again on the way back (`jax.checkpoint`), which saves memory and changes no number.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> learner = braintrace.compile(braintrace.nn.GRUCell(3, 4), "bptt", jnp.ones((2, 3)), batch_size=2)
    >>> grads = learner.etrace_grad(jnp.ones((5, 2, 3)), step_fn=lambda x: jnp.mean(learner(x) ** 2))
    >>> sorted(".".join(path) for path in grads)
    ['Wh.weight', 'Wr.weight', 'Wz.weight']
    """

    takes = "* mark name"

    @classmethod
    def choose(cls, options: Any) -> Choice:
        return Choice(rules.BPTT())

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Advance the model itself, so that a rematerialised cell stays one."""
        self.set_for(*one_step(args, kwargs))
        data = jax.tree.leaves((args, kwargs), is_leaf=_is_data)
        windows = jax.tree.leaves([a for a in data if isinstance(a, MultiStepData)])
        self.steps.value = self.steps.value + (windows[0].shape[0] if windows else 1)
        return call_model(self.model, *args, **kwargs)


def call_model(model: brainstate.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a model with what a learner is called with: one step, or a window of steps."""
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_data)

    def step(*slices: Any) -> Any:
        now = iter(slices)
        one = [next(now) if isinstance(a, MultiStepData) else a.data if _is_data(a) else a for a in leaves]
        args, kwargs = jax.tree.unflatten(tree, one)
        return model(*args, **kwargs)

    windows = [a.data for a in leaves if isinstance(a, MultiStepData)]
    return brainstate.transform.for_loop(step, *windows) if windows else step()


def _is_data(arg: Any) -> bool:
    return isinstance(arg, SingleStepData)
