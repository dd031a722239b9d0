"""Layers draw their weights from one seed: with some draws neurons are silent and a test shows nothing."""

from collections.abc import Iterator

import brainstate
import pytest


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with brainstate.random.seed_context(1):
        yield
