"""Training is tested as users train: in float32, with JAX's usual promotion."""

from collections.abc import Iterator

import brainstate
import jax
import pytest


@pytest.fixture(autouse=True)
def as_users_have_it() -> Iterator[None]:
    with (
        brainstate.environ.context(precision=32),
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield
