"""The benchmarks of streams at toy size: rows and tables come out, and rows that are there are kept."""

import importlib
import json
from pathlib import Path

import jax
import pytest


@pytest.mark.slow
def test_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    streams = importlib.import_module("streams")
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        streams.main(["--quick", "--out", str(tmp_path)])
        first = {path.name: path.read_text() for path in tmp_path.iterdir()}
        streams.main(["--quick", "--out", str(tmp_path), "--task", "series"])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == first
    assert first.keys() == {"README.md", *(f"{name}.json" for name in streams.TASKS)}
    for name in streams.TASKS:
        (row,) = json.loads(first[f"{name}.json"])
        assert row["score"] == row["score"]
        assert row["seconds"] > 0
        assert f"## {name}" in first["README.md"]
