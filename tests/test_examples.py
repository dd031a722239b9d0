"""Every example runs, at reduced size, and ends with its own check."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "demo")
PACKAGES = {"spiking_digits": "sklearn"}

# Each in a process of its own, that begins where packages are imported and nothing has been computed.
RUN = """
import os, runpy, sys
import braintrace, optax
failed = []
for path in sys.argv[1:]:
    sys.stdout.flush()
    child = os.fork()
    if not child:
        sys.argv = [path, "--quick"]
        print(path)
        runpy.run_path(path, run_name="__main__")
        sys.exit()
    if os.waitpid(child, 0)[1]:
        failed.append(path)
sys.exit(" ".join(failed) or 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("names", [NAMES[::2], NAMES[1::2]], ids=" ".join)
def test_examples(names: list[str], tmp_path: Path) -> None:
    paths = [
        str(FOLDER / f"{name}.py")
        for name in names
        if name not in PACKAGES or importlib.util.find_spec(PACKAGES[name])
    ]
    env = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    command = [sys.executable, "-W", "error", "-c", RUN, *paths]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.iterdir())
    lines = done.stdout.splitlines()
    begins = [lines.index(path) for path in paths]
    assert all(b - a > 1 for a, b in zip(begins, [*begins[1:], len(lines)], strict=True)), done.stdout


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    command = [
        sys.executable,
        "-W",
        "error",
        str(FOLDER / "demo.py"),
        "--quick",
        "--out",
        str(tmp_path / "d"),
    ]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in (tmp_path / "d").iterdir()} == {"demo.html", "demo.png", "demo.svg"}
    page = (tmp_path / "d" / "demo.html").read_text()
    assert "<svg" in page
    assert "BPTT over the whole stream" in page


def test_there_are_eleven() -> None:
    assert len(NAMES) == 11
