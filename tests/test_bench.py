"""The benchmarks at toy size: the measurements, the tables and the plots come out."""

import importlib
import json
from pathlib import Path

import jax
import pytest


@pytest.mark.slow
def test_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    bench, m, nets = map(importlib.import_module, ("bench", "methods", "nets"))
    names = (m.BPTT, m.CHECKPOINT, m.D_SGD, m.FLOOR)
    plan = [
        bench.Item(nets.Case("LIF", 3, 4, 2, 6, chunk=3), names),
        bench.Item(nets.Case("GRU", 3, 4, 2, 6), (m.ES_STEP,), sweeps=("length", "width")),
        bench.Item(nets.Case("GRU", 3, 8, 2, 9), (m.ES_STEP,), sweeps=("length", "width")),
    ]
    with jax.numpy_rank_promotion("allow"):  # brainstate's readout adds its bias so
        results = bench.run(plan, bench.Settings(seconds=0.01), compiled=None)
    bench.write(results, tmp_path)

    found = json.loads((tmp_path / "results.json").read_text())["cases"]
    assert [tuple(e["methods"]) for e in found] == [tuple(i.names) for i in plan]
    for method in (cost for e in found for cost in e["methods"].values()):
        assert method["seconds"] > 0
        assert method["peak_bytes"] > 0
    page = (tmp_path / "results.md").read_text()
    assert "## LIF 3->3x4, batch 2, T=6" in page
    assert "traces grow with which power of width | at most 1.1 | 0." in page
    assert {p.name for p in tmp_path.glob("*.png")} == {"length.png", "width.png", "nets.png"}
