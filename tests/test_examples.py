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


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_example(name: str, tmp_path: Path) -> None:
    package = PACKAGES.get(name)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"no {package}: pip install --no-deps scikit-learn")
    command = [sys.executable, "-W", "error", str(FOLDER / f"{name}.py"), "--quick"]
    env = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.iterdir())
    assert len(done.stdout.splitlines()) >= 1


def test_there_are_ten() -> None:
    assert len(NAMES) == 10
