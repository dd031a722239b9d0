"""What must hold, judged from the results of one run: ratios, which a noisy machine changes least."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import methods as m
from measure import ratio
from nets import Case

CPU_GRU = Case("GRU", 128, 256, 16, 50, chunk=25)
GPU_GRU = Case("GRU", 256, 1024, 64, 200, chunk=20)
SMALL_GRU = Case("GRU", 128, 256, 32, 200, chunk=20)
ONE_GRU = Case("GRU", 16, 64, 1, 500)  # a sample at a time
GPU_LIF = Case("LIF", 1024, 512, 128, 1000, chunk=50)
GPU_FILTERED = Case("LIF, detached reset", 1024, 512, 128, 1000, chunk=50)  # traces are filtered inputs


def others(inputs: int, width: int, batch: int, steps: int) -> tuple[Case, ...]:
    """Nets for windows and rank besides a GRU."""
    kinds = (("LSTM", 2), ("RLIF", 1), ("GRU", 2), ("MiniGRU", 4))
    return tuple(Case(net, inputs, width, batch, steps, layers=n) for net, n in kinds)


CPU_NETS, GPU_NETS = others(128, 256, 16, 50), others(256, 512, 64, 200)

Results = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """One target: its words, the limit, what was measured, and whether it holds (None: not measured)."""

    text: str
    limit: str
    measured: float | None
    holds: bool | None

    @staticmethod
    def of(text: str, measured: float | None, limit: float, holds: Callable[[float, float], bool]) -> Verdict:
        words = f"{'at most' if holds is operator.le else 'at least'} {limit:g}"
        return Verdict(text, words, measured, None if measured is None else holds(measured, limit))


Row = tuple[Case, str, str, float]  # case, method, compared with which, limit of the ratio of times
SEVEN, EIGHT, NINE, SIXTEEN, SEVENTEEN = (
    next(name for name, r in m.STREAMS.items() if r == rank) for rank in (7, 8, 9, 16, 17)
)


def _in_windows(case: Case, windows: float, balanced: float, pushed: float) -> list[Row]:
    limits = {**dict.fromkeys(m.WINDOWS, windows), m.D_RANK: balanced, m.D_PUSHED: pushed}
    return [(case, name, m.BPTT, limit) for name, limit in limits.items()]


def _on_a_line(case: Case) -> list[Row]:
    """Streams whose time grows with the rank at most, with some tolerance, and without a jump."""
    pairs = ((EIGHT, SEVEN, 1.3), (NINE, EIGHT, 1.3), (SIXTEEN, EIGHT, 2.2), (SEVENTEEN, SIXTEEN, 1.3))
    return [(case, a, b, limit) for a, b, limit in pairs]


CPU = (
    (CPU_GRU, m.D_AUTO, m.BPTT, 1.0),
    (CPU_GRU, m.D_DROP, m.BPTT, 1.0),
    (CPU_GRU, m.D_CHUNK, m.BPTT, 1.6),
    *_in_windows(CPU_GRU, 1.4, 1.6, 3.5),
    *(row for c in CPU_NETS for row in _in_windows(c, 1.8 if c.net == "LSTM" else 1.4, 1.6, 3.5)),
    (ONE_GRU, m.D_RANK_SGD, m.D_SGD, 3.0),
    *_on_a_line(ONE_GRU),
    (CPU_GRU, m.ES_AUTO, m.BPTT, 0.6),
    (CPU_GRU, m.ES_DROP, m.BPTT, 0.6),
    (CPU_GRU, m.D_STEP, m.YARD_D, 1.0),
    (CPU_GRU, m.D_AUTO, m.YARD_D, 0.1),
    (CPU_GRU, m.ES_STEP, m.YARD_ES, 1.0),
    (CPU_GRU, m.ES_SAME, m.YARD_ES, 1.0),
)
GPU = (
    (GPU_GRU, m.D_AUTO, m.BPTT, 0.75),
    (GPU_GRU, m.D_DROP, m.BPTT, 0.75),
    (GPU_GRU, m.D_CHUNK, m.BPTT, 1.3),
    *_in_windows(GPU_GRU, 1.2, 1.25, 1.5),
    *(
        row
        for c in GPU_NETS
        for row in _in_windows(c, *((1.4, 1.5, 1.8) if c.net == "LSTM" else (1.2, 1.25, 1.5)))
    ),
    (ONE_GRU, m.D_RANK_SGD, m.D_SGD, 3.0),
    (GPU_GRU, EIGHT, m.STREAM_FLOOR, 1.5),
    *_on_a_line(GPU_GRU),
    (GPU_GRU, m.D_STEP, m.FLOOR, 1.6),
    (GPU_GRU, m.D_SGD, m.FLOOR, 1.15),
    (GPU_GRU, m.D_SGD_BF16, m.FLOOR, 0.75),
    (GPU_GRU, m.D_BF16, m.FLOOR, 0.75),
    *((c, m.D_SGD, m.BPTT, 5.0) for c in GPU_NETS if c.net == "LSTM"),
    (GPU_FILTERED, m.D_STEP, m.ES_STEP, 1.1),
    (GPU_FILTERED, m.D_SGD, m.ES_SGD, 1.1),
    (GPU_GRU, m.ES_AUTO, m.BPTT, 0.45),
    (GPU_GRU, m.ES_DROP, m.BPTT, 0.45),
    *((GPU_GRU, name, m.YARD_D, 1.0) for name in (m.D_AUTO, m.D_CHUNK, m.D_STEP, m.D_BF16, m.D_SGD)),
    *((GPU_GRU, name, m.YARD_ES, 1.0) for name in (m.ES_AUTO, m.ES_CHUNK, m.ES_STEP, m.ES_SGD, m.ES_SAME)),
    (GPU_LIF, m.ES_AUTO, m.BPTT, 0.7),
    (GPU_LIF, m.ES_CHUNK, m.BPTT, 0.7),
)
COMPILED = {
    **dict.fromkeys((m.D_AUTO, m.D_DROP, m.D_CHUNK, m.ES_AUTO), 1.5),
    **dict.fromkeys(m.WINDOWS, 2.0),
    **dict.fromkeys((m.D_RANK, m.D_PUSHED), 3.0),
}
FIXED = (m.D_CHUNK, m.D_STEP, m.D_SGD, m.ES_CHUNK, m.ES_STEP, m.ES_SGD)
MOST_GROWTH, MOST_SLOPE = 1.2, 1.1
SHORT, LONG = 100, 10_000


def judge(results: Results) -> list[Verdict]:
    """Every target that this kind of machine has."""
    speed = CPU if results["about"]["platform"] == "cpu" else GPU
    return [
        *(_speed(results, *row) for row in speed),
        *(_compile(results, name) for name in COMPILED),
        *(_growth(results, name) for name in FIXED),
        _slope(results, m.ES_STEP),
    ]


def _speed(results: Results, case: Case, name: str, beside: str, limit: float) -> Verdict:
    measured = None
    for entry in results["cases"]:
        if entry["name"] == case.name:
            times = {k: v.get("times", []) for k, v in entry["methods"].items()}
            measured = ratio(times, name, beside)
    return Verdict.of(f"{case.name}: time of {name} / {beside}", measured, limit, operator.le)


def _compile(results: Results, name: str) -> Verdict:
    found = results.get("compile", {})
    measured = found[name] / found[m.BPTT] if name in found and m.BPTT in found else None
    return Verdict.of(f"time to compile {name} / {m.BPTT}", measured, COMPILED[name], operator.le)


def _growth(results: Results, name: str) -> Verdict:
    found = _peaks(results, "length", name, "steps")
    measured = found[LONG] / found[SHORT] if {SHORT, LONG} <= set(found) else None
    return Verdict.of(f"memory of {name}: T={LONG:,} / T={SHORT}", measured, MOST_GROWTH, operator.le)


def _slope(results: Results, name: str) -> Verdict:
    found = _peaks(results, "width", name, "width", "trace_bytes")
    measured = None
    if len(found) > 1:
        small, large = min(found), max(found)
        measured = math.log(found[large] / found[small]) / math.log(large / small)
    return Verdict.of(f"{name}: traces grow with which power of width", measured, MOST_SLOPE, operator.le)


def _peaks(results: Results, sweep: str, name: str, key: str, what: str = "peak_bytes") -> dict[int, int]:
    """Bytes of a method by length or by width."""
    found = [e for e in results["cases"] if sweep in e["sweeps"] and what in e["methods"].get(name, {})]
    return {e["case"][key]: e["methods"][name][what] for e in found}
