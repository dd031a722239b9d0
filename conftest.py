"""Doctests run with the defaults of JAX, as for users; tests are stricter (tests/conftest.py)."""

import zlib
from collections.abc import Iterator

import brainstate
import jax
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave a third of the examples in docstrings, chosen by a hash of the name, in the fast loop."""
    for item in items:
        if isinstance(item, pytest.DoctestItem) and zlib.crc32(item.name.encode()) % 3:
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def defaults_in_doctests(request: pytest.FixtureRequest) -> Iterator[None]:
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    with (
        brainstate.environ.context(precision=32),
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield
