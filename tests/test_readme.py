"""The code in the README and on the pages of `docs/` runs as it stands; the reference is complete."""

import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import brainstate
import jax
import pytest

import braintrace
from docs import blocks

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
TEXTS = {
    path.relative_to(ROOT / "docs").as_posix(): path.read_text()
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if "_build" not in path.parts
}
PAGES = [name for name, text in TEXTS.items() if blocks.FENCE.search(text)]


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
    blocks.run(TEXTS[name], f"docs/{name}", tmp_path)


def test_failing_blocks_are_not_swallowed(tmp_path):
    with pytest.raises(ZeroDivisionError):
        blocks.run("```python\n1 / 0\n```", "page.md", tmp_path)
    with pytest.raises(RuntimeError, match=r"page.md:2: exit code 3"):
        blocks.run("```sh\nexit 3\n```", "page.md", tmp_path)
    assert "three" in blocks.run("```sh\necho three\n```", "page.md", tmp_path).splitlines()


RUN_ALL = """
import sys
from pathlib import Path
from docs import blocks
folder = Path(sys.argv[1])
page = "text\\n```sh\\necho $RANDOM$RANDOM > drawn; cat drawn\\n```"
first = blocks.run_all({"a": page, "api/b": page}, folder)
assert first["a"] != first["api/b"]
assert (folder / "api" / "b" / "drawn").read_text().strip() == first["api/b"][0]
other = page.replace("cat", "echo two; cat")
second = blocks.run_all({"a": f"other {page}", "api/b": other}, folder)
assert second["a"] == first["a"]
assert second["api/b"][0].startswith("two")
blocks.run_all({"a": "```sh\\nexit 3\\n```"}, folder)
"""


def test_pages_in_processes(tmp_path):
    """Each page runs in a folder of its own, and again only if its code changes; an error ends the build."""
    command = [sys.executable, "-c", RUN_ALL, str(tmp_path)]  # before a fork, nothing may have been computed
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "AssertionError" not in done.stderr
    assert "docs/a.md:2: exit code 3" in done.stderr


def test_notebook():
    page = "# Title\n\nSee [rules](rules.md#windows).\n```python\nprint(1)\n```\nEnd.\n```sh\nls\n```\n"
    found = json.loads(json.dumps(blocks.notebook(page, ["1", ""])))
    kinds = [cell["cell_type"] for cell in found["cells"]]
    assert kinds == ["markdown", "code", "markdown", "code"]
    title, code, _, command = found["cells"]
    assert title["source"] == "# Title\n\nSee rules."
    assert (code["source"], code["outputs"][0]["text"]) == ("print(1)", "1\n")
    assert (command["source"], command["outputs"]) == ("!ls", [])


PUBLIC = {
    (module, name)
    for module in (f"braintrace.{m}" for m in "agents nir nn rules tasks".split())
    for name, value in vars(importlib.import_module(module)).items()
    if not name.startswith("_") and not inspect.ismodule(value)
} | {("braintrace", name) for name in braintrace.__all__}


@pytest.mark.parametrize("module", sorted({module for module, _ in PUBLIC}))
def test_every_public_name_is_in_the_reference_with_an_example(module):
    api = {name: text for name, text in TEXTS.items() if name.startswith("api/")}
    listed, used = set(), ""
    for text in api.values():
        current = "braintrace"
        for line in re.findall(r"^ *\.\. (\w+:: .*)$", text, re.MULTILINE):
            kind, name = line.split(":: ")
            current = name if kind == "currentmodule" else current
            listed |= {name, f"{current}.{name}"}
        used += text
    for name in [name for home, name in PUBLIC if home == module]:
        value = getattr(importlib.import_module(module), name)
        if not getattr(value, "__module__", "").startswith("braintrace"):
            continue  # a layer of brainstate, under the same name
        aliased = module == "braintrace" and value.__name__ != name
        assert aliased or f"{module}.{name}" in listed, f"no entry for {module}.{name}"
        short = module.removeprefix("braintrace").lstrip(".")
        called = rf"\b{short or 'braintrace'}\.{name}\b|\b{name}\("
        assert ">>>" in (value.__doc__ or "") or re.search(called, used), f"no example of {module}.{name}"


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "README.md", "examples/README.md"])
def test_named_files_exist(name):
    text = (ROOT / name).read_text()
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    for path in links:
        assert ((ROOT / name).parent / path).exists(), path
    for path in re.findall(r"`(?:braintrace/)?([\w/]+/[\w/]*\.\w+)`", text):
        assert any((root / path).exists() for root in (ROOT, ROOT / "braintrace")), path


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
