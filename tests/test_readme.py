"""The code in the README and on the pages of `docs/` runs as it stands."""

import re
from pathlib import Path

import brainstate
import jax
import pytest

from docs import blocks

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
PAGES = sorted(p.name for p in (ROOT / "docs").glob("*.md") if blocks.FENCE.search(p.read_text()))


@pytest.fixture(autouse=True)
def defaults_of_users():
    with (
        brainstate.environ.context(precision=32),
        jax.enable_x64(False),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_code_block(number):
    exec(BLOCKS[number], {})


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_page(name, tmp_path):
    (tmp_path / "pages").mkdir()
    blocks.run((ROOT / "docs" / name).read_text(), f"docs/{name}", tmp_path)


def test_failing_blocks_are_not_swallowed(tmp_path):
    with pytest.raises(ZeroDivisionError):
        blocks.run("```python\n1 / 0\n```", "page.md", tmp_path)
    with pytest.raises(RuntimeError, match=r"page.md:2: exit code 3"):
        blocks.run("```sh\nexit 3\n```", "page.md", tmp_path)
    assert "three" in blocks.run("```sh\necho three\n```", "page.md", tmp_path).splitlines()
