"""The option `vjp_method`: single steps, or windows of steps."""

from __future__ import annotations

from typing import Literal

from .._online.request import WindowSize, check_window
from .._rules.rule import Rule, TraceRule

VjpMethod = Literal["single-step", "multi-step"]


def read_method(rule: Rule, vjp_method: VjpMethod | None, window: WindowSize | None) -> VjpMethod:
    """Whether a learner with these options takes single steps, or windows."""
    if vjp_method not in ("single-step", "multi-step", None):
        raise ValueError(f"`vjp_method` is 'single-step' or 'multi-step', not {vjp_method!r}.")
    check_window(window)
    uses_windows = window is not None or (not rule.any_window and rule.always_windows)
    if uses_windows and vjp_method == "single-step" and (window or isinstance(rule, TraceRule)):
        raise ValueError(
            f"{'The low-rank correction is' if window is None else f'Windows of {window} steps are'} "
            "back-propagated through: leave `vjp_method` out, or pass 'multi-step'."
        )
    return vjp_method or ("multi-step" if uses_windows else "single-step")
