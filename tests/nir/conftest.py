"""Layers draw their weights from one seed: some draws give silent neurons, of which tests could say nothing."""

from collections.abc import Iterator

import brainstate
import pytest


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with brainstate.random.seed_context(1):
        yield
