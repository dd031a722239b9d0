"""One page about training runs: scores, curves, memory, and what is learned how; it loads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from .._learners.base import ETraceAlgorithm
from .curves import COLORS, Runs, lines_of, names_of
from .result import FitResult
from .svg import draw_svg


class Target(NamedTuple):
    """The score that counts as learned."""

    metric: str
    value: float
    higher_is_better: bool

    def reached(self, score: float) -> bool:
        return score >= self.value if self.higher_is_better else score <= self.value


def write_report(
    path: str | Path,
    runs: Runs,
    learner: ETraceAlgorithm,
    *,
    title: str,
    subtitle: str = "",
    target: tuple[str, float, bool] | None = None,
    memory: Any = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write a page about runs, by name, and about the model that a learner has compiled.

    `target` is a metric, the value that counts as learned, and whether more is better; `memory` is anything
    with `_repr_html_`, such as what `braintrace.plan` returns.
    """
    aim = None if target is None else Target(*target)
    parts = [
        f'<div class="row">{"".join(_card(i, n, r, aim) for i, (n, r) in enumerate(runs.items()))}</div>',
        "<h2>Learning curves</h2>",
        f'<div class="row">{"".join(_panel(runs, m, aim) for m in names_of(runs))}</div>',
    ]
    if memory is not None:
        parts += ["<h2>Memory and work</h2>", f'<div class="card">{memory._repr_html_()}</div>']
    parts += [
        "<h2>What is learned how</h2>",
        f'<div class="card frame">{learner.report._repr_html_()}</div>',
    ]
    if settings:
        items = "".join(
            f"<div><dt>{escape(k)}</dt><dd>{escape(str(v))}</dd></div>"
            for k, v in settings.items()
            if v is not None
        )
        parts += ["<h2>Settings</h2>", f'<div class="card"><dl>{items}</dl></div>']
    return write_page(path, title, subtitle, parts)


def write_page(path: str | Path, title: str, subtitle: str, parts: list[str]) -> Path:
    """Write a page of these parts, each of them HTML."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    page = Template(resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8"))
    path.write_text(
        page.substitute(title=escape(title), subtitle=escape(subtitle), body="\n".join(parts)),
        encoding="utf-8",
    )
    return path


def _card(number: int, name: str, run: FitResult, target: Target | None) -> str:
    metric = target.metric if target else "loss"
    score = run.metrics.get(metric, float("nan"))
    said = ""
    if target is not None:
        ok = target.reached(score)
        reached = _when(run, target)
        when = f" at batch {reached}" if ok and reached else ""
        said = (
            f'<span class="{"good" if ok else "bad"}">target {target.value:g} '
            f"{'reached' + when if ok else 'not reached'}</span><br>"
        )
    seconds = run.history[-1]["seconds"] - run.compile_seconds if run.history else 0.0
    rate = f"{1e3 * seconds / (run.batches - 1):.1f} ms a batch" if run.batches > 1 else ""
    return (
        f'<div class="card run" style="--color: {COLORS[number % len(COLORS)]}"><div>{escape(name)}</div>'
        f'<b>{score:.4g}</b> <span class="soft">{escape(metric.replace("_", " "))}</span><br>{said}'
        f'<span class="soft">{run.batches} batches, {seconds:.1f} s of training ({rate}), first batch '
        f"{run.compile_seconds:.1f} s (compiling)</span></div>"
    )


def _when(run: FitResult, target: Target) -> int | None:
    """The first evaluation that was good enough."""
    x, y = run.curve(target.metric, evaluation=True)
    return next((int(b) for b, v in zip(x, y, strict=True) if target.reached(float(v))), None)


def _panel(runs: Runs, metric: str, target: Target | None) -> str:
    value = target.value if target and target.metric == metric else None
    return f'<div class="card">{draw_svg(lines_of(runs, metric), metric.replace("_", " "), value)}</div>'
