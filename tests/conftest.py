"""Tests run in float64, and no axis or type is added silently."""

import gc

import brainstate  # sets the precision when it is imported, so it comes first
import jax
import pytest

brainstate.environ.set(precision=64)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 8)  # what names no mesh goes to the first of them
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

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
