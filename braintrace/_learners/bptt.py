"""BPTT: back-propagation through time, with the interface of a learner, to compare with.

It keeps no traces. What one gradient spans is back-propagated through: a sequence in `etrace_grad`, the steps
between two updates elsewhere (truncated BPTT). Memory grows with that number of steps.
"""

from __future__ import annotations

from typing import Any

import jax

from .. import _rules as rules
from .._online.data import MultiStepData, one_step
from .model_calls import call_model, is_data
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
        data = jax.tree.leaves((args, kwargs), is_leaf=is_data)
        windows = jax.tree.leaves([a for a in data if isinstance(a, MultiStepData)])
        self.steps.value = self.steps.value + (windows[0].shape[0] if windows else 1)
        return call_model(self.model, *args, **kwargs)
