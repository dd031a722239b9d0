"""Find the traces of one parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import brainstate

from .._compiler.step import show_path

if TYPE_CHECKING:
    from .stateful import ETraceAlgorithm


def traces_of(learner: ETraceAlgorithm, weight: Any) -> dict[str, Any]:
    """The traces of one parameter, given as its state or its path."""
    if isinstance(weight, brainstate.State):
        found = [e.path for e in learner.graph.module_info.params if e.state is weight]
        if not found:
            raise ValueError("The weight is not a parameter that the compiled model uses.")
        (path,) = found
    else:
        path = tuple(weight) if isinstance(weight, tuple | list) else tuple(str(weight).split("."))
    chosen = {
        key: st.value
        for key, st in learner.traces.items()
        if any(_belongs(key, t) for t in learner.executor.slots if path in t.relation.param_paths)
    }
    if not chosen:
        known = f"; known: {', '.join(map(show_path, learner.report.etrace_weights))}"
        reasons = {p: f": {why}" for p, why in learner.report.excluded_weights.items()}
        raise ValueError(f"The parameter `{show_path(path)}` has no trace{reasons.get(path, known)}.")
    return chosen


def _belongs(key: str, trace: Any) -> bool:
    path = ".".join(trace.relation.weight_path)
    return key == trace.key or key.startswith(f"{trace.relation.site.index}:{path}:")
