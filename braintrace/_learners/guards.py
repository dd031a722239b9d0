"""Warnings of what users do to states and weights between calls, which the traces do not know of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import brainstate

from .._compiler.step import show_path
from .._lines import warn_user
from .model_states import by_path, hidden_of
from .state_changes import StateChanges
from .state_reads import StateReads
from .weight_changes import WeightChanges

if TYPE_CHECKING:
    from .stateful import ETraceAlgorithm


class Guards:
    """The three observers of a learner: of states set, of states read, and of changing weights."""

    def __init__(self, model: brainstate.nn.Module) -> None:
        self.model = model
        self.reads = StateReads()
        self.weights = WeightChanges(model)
        self._changes: StateChanges | None = None

    def before_call(self, learner: ETraceAlgorithm, *, keep: bool) -> None:
        """Warn if a hidden state was set since the last call and the traces were not.

        `keep`: the traces are used after the call.
        """
        form = learner._forms.known
        if form is not None and learner.traces and not learner._is_tracing:
            hidden = hidden_of(form)
            self.reads.watch(hidden)
            self._changes = self._changes or StateChanges(learner)
            self._changes.watch(hidden)
            self._changes.before_call(self.reads, keep=keep)

    def after_call(self) -> None:
        """Record the hidden states after a call that has written the step counter before them."""
        if self._changes is not None:
            self._changes.after_call()

    def compare_reads(self, hidden: Mapping[str, brainstate.State], *, is_tracing: bool) -> None:
        """Warn if the function that is being traced has read a hidden state."""
        read = self.reads.before_call(hidden)
        if read and not is_tracing:
            warn_user(
                f"{', '.join(f'`{name}`' for name in read)} is read before the learner is called. Should the "
                "loss depend on it, what parameters did to it in earlier steps is not in the gradient. In "
                "`learner.etrace_grad` it is; or read the state inside of the model and return it.",
                about=self.model,
            )

    def compare_masks(self, learner: ETraceAlgorithm) -> None:
        """Warn if a state that a weight is made of is another one than for the traces so far."""
        if not learner.rule.back_through_time:
            found, masks = by_path(learner.model), learner.executor.masks
            self.weights.compare_masks({show_path(e.path): found.get(e.path, e.state) for e in masks})

    def reset_weights(self) -> None:
        """Drop the weights seen so far, because the traces were reset."""
        self.weights = WeightChanges(self.model)
