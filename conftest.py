"""Doctests run with the defaults of JAX, as for users; tests are stricter (tests/conftest.py)."""

from collections.abc import Iterator

import brainstate
import jax
import pytest


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
