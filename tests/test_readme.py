"""The code in the README runs as it stands."""

import re
from pathlib import Path

import brainstate
import jax
import pytest

BLOCKS = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parent.parent / "README.md").read_text(), re.DOTALL
)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_code_block(number):
    with (
        brainstate.environ.context(precision=32),
        jax.enable_x64(False),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        exec(BLOCKS[number], {})
