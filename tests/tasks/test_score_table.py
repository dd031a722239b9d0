"""The table of scores, out of results."""

import json
from pathlib import Path
from typing import Any

from benchmarks.score_table import Column, write

ABOUT = {"python": "3.11", "jax": "0.10", "cores": 2, "device": "cpu"}


def test_table(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "metric_name": "accuracy",
        "higher_is_better": True,
        "chance": 0.5,
        "target": 0.9,
        "options": {"delay": 5},
        "description": "remember",
        "length": 20,
        "model": "gru",
        "units": 64,
        "batch": 32,
        "updates": 100,
        "rate": 0.005,
    }
    run = lambda score: {"score": score, "seconds": 60.0, "device": "cpu"}
    runs = {str(seed): run(0.94 + 0.01 * seed) for seed in range(3)}
    one = lambda score: {"0": run(score)}
    rules = {"BPTT": runs, "truncated": one(0.8), "D_RTRL": one(0.7), "windows": one(0.945)}
    memory = {name: [1000, 1000] for name in rules}
    result = {"settings": settings, "rules": rules, "memory": memory, "about": ABOUT}
    (tmp_path / "memory.json").write_text(json.dumps(result))
    rows = {"memory": {"cosines": {"D_RTRL": [0.6, 0.8]}, "published": ".691"}}
    cosines = {"cosines": {"rows": rows, "about": "How close.", "seconds": 90.0}, "about": ABOUT}
    (tmp_path / "cosines.json").write_text(json.dumps(cosines))
    columns = {
        "BPTT": Column("BPTT"),
        "truncated": Column("BPTT", window=5),
        "D_RTRL": Column("D_RTRL"),
        "windows": Column("D_RTRL", window=5),
        "ranked": Column("D_RTRL", window=5, rank=4),
    }
    table = write(tmp_path, ["memory", "absent"], columns, 10)
    text = (tmp_path / "README.md").read_text()
    assert table in text
    assert (
        "| memory | accuracy ↑ | 0.5 | 0.9 | 0.950 ± 0.010 | 0.800 (1) | 0.700 (1) | **0.945 (1)** | - |"
        in table
    )
    assert "| D_RTRL | 0 of 1 | memory |" in table
    assert "| the best of windows and rank | 1 of 1 |  |" in table
    assert "same windows: none." in table
    assert "| 60 / 60 / 60 / 60 |" in text
    assert (tmp_path / "memory.png").exists()
    assert "remember (delay=5)" in text
    assert "1.5 core-minutes" in text
    assert "| memory | 0.700 ± 0.141 | .691 |" in text
    assert "absent" not in text
