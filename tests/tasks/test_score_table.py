"""The table of scores, out of results."""

import json
from pathlib import Path
from typing import Any

from benchmarks.score_table import write

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
    runs = {str(seed): {"score": 0.94 + 0.01 * seed, "seconds": 60.0} for seed in range(3)}
    rules = {"BPTT": runs, "D_RTRL": {"0": {"score": 0.7, "seconds": 60.0}}}
    result = {"settings": settings, "rules": rules, "about": ABOUT}
    (tmp_path / "memory.json").write_text(json.dumps(result))
    rows = {"memory": {"cosines": {"D_RTRL": [0.6, 0.8]}, "published": ".691"}}
    cosines = {"cosines": {"rows": rows, "about": "How close.", "seconds": 90.0}, "about": ABOUT}
    (tmp_path / "cosines.json").write_text(json.dumps(cosines))
    write(tmp_path, ["memory", "absent"], ["BPTT", "D_RTRL", "ES_D_RTRL"])
    text = (tmp_path / "README.md").read_text()
    assert "| memory | accuracy ↑ | 0.5 | 0.9 | **0.950 ± 0.010** | 0.700 | - | 60 / 60 / - |" in text
    assert "remember (delay=5)" in text
    assert "4 core-minutes" in text
    assert "| memory | 0.700 ± 0.141 | .691 |" in text
    assert "absent" not in text
