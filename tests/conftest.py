"""Tests run in float64, and no axis or type is added silently."""

import gc
import sys
from collections.abc import Callable
from functools import partial

import brainstate  # sets the precision when it is imported, so it comes first
import jax
import pytest
from jaxlib.mlir import ir

from braintrace._executor import pending_kernels, pending_matrices, pending_steps, pending_windows
from braintrace._rules import deferred, rank

brainstate.environ.set(precision=64)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 8)  # what names no mesh goes to the first of them
jax.config.update("jax_enable_compilation_cache", False)  # no folder is set: programs need no keys
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# brainstate checks the bounds of each draw by a `cond` that is compiled each time
if checks := sys.modules.get("brainstate.transform._error_if"):
    checks.jit_error_if = lambda *args, **kwargs: None

# JAX makes an MLIR context for each program that it compiles, which takes 3 ms. One does for all, except for
# those that are compiled while another is: their modules would become part of its module.
if lowering := sys.modules.get("jax._src.interpreters.mlir"):
    new_context = lowering.make_ir_context
    shared_context = new_context()
    lowering.make_ir_context = lambda: new_context() if ir.Context.current else shared_context

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
    """Switches: all that fits is written once in some steps, by the kernels of a GPU."""
    for module in (pending_steps, pending_kernels):
        monkeypatch.setattr(module, "_write_plainly", partial(module.write, interpret=True))
        monkeypatch.setattr(module, "_read_plainly", partial(module.read, interpret=True))
    for module in (pending_steps, pending_windows):
        monkeypatch.setattr(module, "_NARROWEST", 1)
    for name in ("_ROWS", "_COLUMNS"):
        monkeypatch.setattr(pending_steps, name, 1)
    follow = partial(pending_kernels.follow, interpret=True)
    monkeypatch.setattr(pending_kernels, "_follow_plainly", follow)
    for name in ("_READ", "_FOLLOWED"):
        monkeypatch.setattr(pending_kernels, name, (4, 2))  # that do not fill the last block
    monkeypatch.setattr(pending_kernels, "_WRITTEN", ((36, 4, 2),))
    for module in (pending_steps, deferred):
        monkeypatch.setattr(module, "PENDING", 3)
    for module in (pending_windows, pending_matrices, rank):
        monkeypatch.setattr(module, "STEPS", 6)
    for module in (deferred, pending_matrices):
        monkeypatch.setattr(module, "_LARGE", 1)

    def switch(on: bool) -> None:
        for module in (deferred, pending_matrices):
            monkeypatch.setattr(module, "on_gpu", lambda: on)

    return switch
