"""Tests run in float64, and no axis or type is added silently."""

import gc
import sys
from collections.abc import Callable
from functools import partial

import brainstate  # sets the precision when it is imported, so it comes first
import jax
import pytest

from braintrace._executor import pending_steps
from braintrace._rules import deferred

brainstate.environ.set(precision=64)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 8)  # what names no mesh goes to the first of them
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# brainstate checks the bounds of each draw by a `cond` that is compiled each time
if checks := sys.modules.get("brainstate.transform._error_if"):
    checks.jit_error_if = lambda *args, **kwargs: None

# Tracing makes many objects that live as long as a test: look for cycles among them less often.
gc.freeze()
gc.set_threshold(20_000, 10, 10)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order all tests of a model one after the other: a worker keeps its graph, gradients and programs."""

    def model_of(item: pytest.Item) -> str:
        name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
        return name if isinstance(name, str) else item.nodeid

    first: dict[str, int] = {}
    for item in items:
        first.setdefault(model_of(item), len(first))
    items.sort(key=lambda item: first[model_of(item)])


@pytest.fixture
def pending(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Switches: every trace that fits is written once in three steps, by the kernels of a GPU."""
    monkeypatch.setattr(pending_steps, "_write_plainly", partial(pending_steps.write, interpret=True))
    monkeypatch.setattr(pending_steps, "_read_plainly", partial(pending_steps.read, interpret=True))
    for name in ("_NARROWEST", "_ROWS", "_COLUMNS"):
        monkeypatch.setattr(pending_steps, name, 1)
    for module in (pending_steps, deferred):
        monkeypatch.setattr(module, "PENDING", 3)
    monkeypatch.setattr(deferred, "_LARGE", 1)

    def switch(on: bool) -> None:
        monkeypatch.setattr(deferred, "on_gpu", lambda: on)

    return switch
