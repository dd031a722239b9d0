"""A page about training runs, without external resources: scores, curves, memory and the report."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .._report.markup import Markup, fill, join, tag, write
from .._report.tables import Tabled
from .._types import Options
from .curves import COLORS, Runs, draw_curves, names_of
from .result import FitResult

if TYPE_CHECKING:
    from .._learners.stateful import ETraceAlgorithm

BREAK = Markup("<br>")


class Target(NamedTuple):
    """The value of a metric that counts as learned."""

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
    memory: Tabled | None = None,
    settings: Options | None = None,
) -> Path:
    """Write a page about training runs and their model.

    Args:
        path: The file, HTML.
        runs: Results of `fit`, by name.
        learner: A compiled learner, whose report is shown.
        title: The title of the page.
        subtitle: A line below it.
        target: A metric, the value that counts as learned, and whether higher is better.
        memory: An object with `_repr_html_`, such as the result of `braintrace.plan`.
        settings: Settings to list.

    Returns:
        The path of the file.
    """
    aim = None if target is None else Target(*target)
    targets = {aim.metric: aim.value} if aim else {}
    cards = (_card(i, name, run, aim) for i, (name, run) in enumerate(runs.items()))
    curves = (draw_curves(runs, [metric], targets).to_svg(in_page=True) for metric in names_of(runs))
    parts = [tag("div", *cards, class_="row"), tag("h2", "Learning curves")]
    parts.append(tag("div", *(tag("div", curve, class_="card") for curve in curves), class_="row"))
    if memory is not None:
        parts.append(section("Memory and work", memory._repr_html_()))
    parts.append(section("How each parameter is learned", learner.report._repr_html_(), "card frame"))
    if settings:
        known = ((k, v) for k, v in settings.items() if v is not None)
        items = (tag("div", tag("dt", k), tag("dd", v)) for k, v in known)
        parts.append(section("Settings", tag("dl", *items)))
    return write_page(path, title, subtitle, *parts)


def write_page(path: str | Path, title: str, subtitle: str, *parts: Markup) -> Path:
    """Write a page of these parts, and return its path."""
    texts = {"title": join(title), "subtitle": join(subtitle), "body": join(*parts)}
    return write(path, fill(Path(__file__).with_name("report_page.html"), **texts))


def section(title: str, html: str, kind: str = "card") -> Markup:
    return join(tag("h2", title), tag("div", Markup(html), class_=kind))


def _card(number: int, name: str, run: FitResult, target: Target | None) -> Markup:
    metric = target.metric if target else "loss"
    score = run.metrics.get(metric, float("nan"))
    soft = partial(tag, "span", class_="soft")
    said: list[Markup] = []
    if target is not None:
        ok = target.reached(score)
        curve = zip(*run.curve(target.metric, evaluation=True), strict=True)
        reached = next((int(batch) for batch, value in curve if target.reached(float(value))), None)
        when = f" at batch {reached}" if ok and reached else ""
        words = f"target {target.value:g} {'reached' + when if ok else 'not reached'}"
        said = [tag("span", words, class_="good" if ok else "bad"), BREAK]
    seconds = run.history[-1]["seconds"] - run.compile_seconds if run.history else 0.0
    rate = f"{1e3 * seconds / (run.batches - 1):.1f} ms a batch" if run.batches > 1 else ""
    compiling = f"first batch {run.compile_seconds:.1f} s (compiling)"
    costs = f"{run.batches} batches, {seconds:.1f} s of training ({rate}), {compiling}"
    shown = [tag("div", name), tag("b", f"{score:.4g}"), " ", soft(metric.replace("_", " ")), BREAK]
    style = f"--color: {COLORS[number % len(COLORS)]}"
    return tag("div", *shown, *said, soft(costs), class_="card run", style=style)
