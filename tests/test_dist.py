"""The sdist and the wheel: built, unpacked and used in a process that sees nothing of the repository."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_sdist_and_wheel(tmp_path: Path) -> None:
    def build(kind: str, source: Path) -> Path:
        command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(tmp_path)]
        subprocess.run(command, cwd=source, check=True, capture_output=True)
        return next(tmp_path.glob("*.tar.gz" if kind == "sdist" else "*.whl"))

    with tarfile.open(build("sdist", ROOT)) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff"} <= {
        path.name for path in source.iterdir()
    }
    with zipfile.ZipFile(build("wheel", source)) as wheel:
        wheel.extractall(tmp_path / "site")
    packed = {path.relative_to(tmp_path / "site") for path in (tmp_path / "site" / "braintrace").rglob("*.*")}
    assert packed == {
        path.relative_to(ROOT)
        for path in (ROOT / "braintrace").rglob("*.*")
        if "__pycache__" not in path.parts and path.is_file()
    }
    env = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "tests" / "installed.py")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout


def test_versions_agree() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text()
