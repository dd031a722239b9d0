"""The result of a comparison of rules: a table, plain data, a picture, and a recommendation."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from .._report.check import about_zeros
from .._report.tables import Table, show_bytes
from .._types import Options

GOOD = 0.95  # the cosine to the exact gradient that counts as good enough
LEARNED = 0.98  # the share of the best run's decrease of the loss that counts as good enough


@dataclass(frozen=True)
class Agreement:
    """How close a gradient is to the exact one; numbers that are not finite are None."""

    cosine: float
    norm_ratio: float | None  # its norm divided by that of the exact one
    relative_error: float | None


@dataclass(frozen=True)
class Compared:
    """One rule: the quality of its gradient and its cost, or the reason `why` it could not be used."""

    rule: str
    is_bptt: bool = False
    why: str = ""
    exact: bool = False  # equal to the exact gradient, to round-off
    gradient: Agreement | None = None  # of all parameters together
    parameters: dict[str, Agreement] = field(default_factory=dict)
    step_seconds: float = 0.0
    compile_seconds: float = 0.0
    trace_bytes: int = 0  # stored from step to step
    activation_bytes: int = 0  # temporary memory of the gradient over the sequence
    losses: list[float] | None = None  # after each update
    diverged: bool = False

    @property
    def ok(self) -> bool:
        return not self.why

    @property
    def total_bytes(self) -> int:
        return self.trace_bytes + self.activation_bytes

    @property
    def cost(self) -> float:
        """Time times memory."""
        return self.step_seconds * max(self.total_bytes, 1)

    @property
    def cosine(self) -> float:
        return self.gradient.cosine if self.gradient else math.nan

    @property
    def last_loss(self) -> float | None:
        """The mean over the last tenth of the updates."""
        if not self.losses or self.diverged:
            return None
        return float(np.mean(self.losses[-max(1, len(self.losses) // 10) :]))


@dataclass(frozen=True)
class Comparison:
    """A comparison of rules on one model and its data; the first row is BPTT."""

    length: int
    device: str
    rows: list[Compared]
    updates: int | None = None
    zero: list[str] = field(default_factory=list)  # the arrays whose exact gradient is zero
    random: bool = False  # inputs and targets were drawn at random

    @property
    def bptt(self) -> Compared:
        return self.rows[0]

    def row(self, rule: str) -> Compared:
        """Return the row of a rule, by its label."""
        found = {r.rule: r for r in self.rows}
        if rule not in found:
            raise KeyError(f"No rule {rule!r} here; there are {', '.join(found)}.")
        return found[rule]

    @property
    def frontier(self) -> list[Compared]:
        """The Pareto front of cost and cosine, from the cheapest rule on."""
        found: list[Compared] = []
        for row in sorted((r for r in self.rows if r.ok), key=lambda r: (r.cost, -r.cosine)):
            if not found or row.cosine > found[-1].cosine:
                found.append(row)
        return found

    @property
    def recommended(self) -> Compared | None:
        """The recommended rule: BPTT if no online rule saves anything, None if none is good enough."""
        return _choose(self)[0]

    @property
    def recommendation(self) -> str:
        """The recommendation and its reason, as a sentence."""
        words = [*([about_zeros(self.zero)] if self.zero else []), _choose(self)[1]]
        if self.random:
            words.append("Inputs and targets were drawn at random: on your own data the cosines differ.")
        return " ".join(words)

    # -- as data -----------------------------------------------------------------------------------

    def to_dict(self) -> Options:
        """Return everything as plain data for JSON."""
        best = self.recommended
        return {**asdict(self), "recommended": best and best.rule, "recommendation": self.recommendation}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"

    @staticmethod
    def from_dict(data: Options) -> Comparison:
        """Return the comparison that `to_dict` was called on."""
        rows = []
        for row in data["rows"]:
            agreement = row["gradient"] and Agreement(**row["gradient"])
            parameters = {k: Agreement(**v) for k, v in row["parameters"].items()}
            rows.append(Compared(**{**row, "gradient": agreement, "parameters": parameters}))
        more = {k: data[k] for k in ("updates", "zero", "random")}
        return Comparison(data["length"], data["device"], rows, **more)

    # -- tables, pages and pictures ----------------------------------------------------------------

    @property
    def table(self) -> Table:
        best, bptt = self.recommended, self.bptt
        columns = ["rule", "cosine", "norm ratio", "error", "time a step", "of BPTT", "memory", "of BPTT"]
        columns += ["compile", *([f"loss after {self.updates}"] if self.updates else [])]
        rows = []
        for number, row in enumerate(self.rows, 1):
            cells = [f"{number} {row.rule}" + (" *" if row is best else "")]
            if not row.ok or row.gradient is None:
                rows.append([*cells, *["-"] * (len(columns) - 1)])
                continue
            cells += [
                "exact" if row.exact else f"{row.cosine:.4f}",
                _digits(row.gradient.norm_ratio, ".3f"),
                _digits(row.gradient.relative_error, ".1e"),
                show_seconds(row.step_seconds),
                f"{row.step_seconds / bptt.step_seconds:.2f}",
                show_bytes(row.total_bytes),
                f"{row.total_bytes / max(bptt.total_bytes, 1):.2f}",
                f"{row.compile_seconds:.1f} s",
            ]
            if self.updates:
                cells.append("diverged" if row.diverged else _digits(row.last_loss, ".4g"))
            rows.append(cells)
        missing = [f"{i} {r.rule} cannot be used here: {r.why}" for i, r in enumerate(self.rows, 1) if r.why]
        return Table(
            f"{self.length} steps, {self.device}; the exact gradient is that of BPTT",
            columns,
            rows,
            [*missing, f"* {self.recommendation}"],
        )

    @property
    def by_parameter(self) -> Table:
        """A table of the cosine to the exact gradient and the norm ratio, by parameter and rule."""
        numbered = [(str(i), r) for i, r in enumerate(self.rows, 1) if r.ok and not r.is_bptt]
        rows = []
        for name in self.bptt.parameters:
            found = [r.parameters[name] for _, r in numbered]
            rows.append([name, *(f"{a.cosine:.3f} x{_digits(a.norm_ratio, '.2f')}" for a in found)])
        title = "cosine to the exact gradient, and norm ratio, of each parameter; by the rule's number"
        return Table(title, ["parameter", *(i for i, _ in numbered)], rows)

    def show(self) -> None:
        """Print the tables, in colour in a terminal."""
        self.table.show()
        print()
        self.by_parameter.show()

    def to_str(self) -> str:
        return f"{self.table.to_str()}\n\n{self.by_parameter.to_str()}"

    def __str__(self) -> str:
        return self.to_str()

    def _repr_html_(self) -> str:
        from .comparison_picture import draw

        return f"{self.table.to_html()}{draw(self).to_svg()}{self.by_parameter.to_html()}"

    def save(self, path: str | Path) -> None:
        """Write a page (.html), the data (.json) or the picture (.svg; with matplotlib .png, .pdf, ...)."""
        from .._report.markup import tag, write
        from .comparison_picture import draw
        from .report_page import section, write_page

        path = Path(path)
        if path.suffix == ".json":
            write(path, self.to_json())
        elif path.suffix == ".html":
            picture = tag("div", draw(self).to_svg(), class_="card")
            tables = (
                section("Costs", self.table.to_html()),
                section("Parameters", self.by_parameter.to_html()),
            )
            write_page(path, "Comparison of learning rules", self.recommendation, picture, *tables)
        else:
            draw(self).save(path)


def show_seconds(seconds: float) -> str:
    """Return a duration with its unit.

    >>> show_seconds(3.2e-5)
    '32 us'
    """
    unit, size = next((u, s) for u, s in (("s", 1), ("ms", 1e-3), ("us", 1e-6)) if seconds >= s or u == "us")
    return f"{seconds / size:.3g} {unit}"


def _digits(value: float | None, digits: str) -> str:
    return "-" if value is None else format(value, digits)


def _choose(found: Comparison) -> tuple[Compared | None, str]:
    """Return the cheapest rule that is good enough, by its curve or else its gradient, and the reason."""
    online = [r for r in found.rows if r.ok and not r.is_bptt]
    if found.zero and {name.partition("[")[0] for name in found.zero} >= found.bptt.parameters.keys():
        return None, "The exact gradient is zero: rules cannot be compared."
    if not online:
        return None, "None of the rules can be used on this model: train it by BPTT."
    if found.updates and found.bptt.losses and any(r.last_loss is not None for r in online):
        return _by_curve(found, online)
    good = [r for r in online if r.exact or r.cosine >= GOOD]
    if not good:
        best = max(online, key=lambda r: (r.cosine, -r.cost))
        return None, (
            f"No online rule comes to a cosine of {GOOD} to the exact gradient: the closest is {best.rule} "
            f"with {best.cosine:.3f}, at {_costs(found, best)}; try longer windows or more rank, or let "
            "`train=` show whether it learns all the same."
        )
    best = min(good, key=lambda r: (_is_dear(found, r), r.cost))
    how = (
        "gives the exact gradient"
        if best.exact
        else f"has a cosine of {best.cosine:.3f} to the exact gradient"
    )
    cheaper = [r for r in online if r.cost < best.cost and r not in good]
    why = f"the least time x memory of those that come to {GOOD}"
    if cheaper:
        closest = max(cheaper, key=lambda r: r.cosine)
        why = f"cheaper rules are less accurate ({closest.rule}: {closest.cosine:.3f})"
    return _unless_dear(found, best, f"it {how}, at {_costs(found, best)}; {why}")


def _by_curve(found: Comparison, online: list[Compared]) -> tuple[Compared | None, str]:
    learned = {r.rule: r.last_loss for r in found.rows if r.last_loss is not None}
    start = max(r.losses[0] for r in found.rows if r.losses)
    least = min(learned.values())
    enough = start - LEARNED * (start - least)
    good = [r for r in online if learned.get(r.rule, math.inf) <= enough]
    true = "diverged" if found.bptt.diverged else f"{learned.get(found.bptt.rule, math.nan):.4g}"
    after = f"after {found.updates} updates"
    if not good:
        best = min((r for r in online if r.rule in learned), key=lambda r: learned[r.rule])
        return None, (
            f"No online rule learns as BPTT does: {after} the loss is {learned[best.rule]:.4g} by {best.rule}"
            f", the best of them, and {true} by BPTT; try longer windows or more rank."
        )
    best = min(good, key=lambda r: (_is_dear(found, r), r.cost))
    cosine = "exact" if best.exact else f"cosine {best.cosine:.3f}"
    return _unless_dear(
        found,
        best,
        f"{after} its loss is {learned[best.rule]:.4g} (BPTT: {true}), at {_costs(found, best)}, the least "
        f"time x memory of those that learn as well (the loss falls by {LEARNED:.0%} or more of what it does "
        f"in the best run); its gradient: {cosine}",
    )


def _costs(found: Comparison, row: Compared) -> str:
    time = row.step_seconds / found.bptt.step_seconds
    memory = row.total_bytes / max(found.bptt.total_bytes, 1)
    return f"{time:.2g} times the time and {memory:.2g} times the memory of BPTT"


def _is_dear(found: Comparison, row: Compared) -> bool:
    """Return whether a rule saves neither time nor memory compared with BPTT."""
    return row.step_seconds >= found.bptt.step_seconds and row.total_bytes >= found.bptt.total_bytes


def _unless_dear(found: Comparison, row: Compared, why: str) -> tuple[Compared, str]:
    """Return the recommendation, which is BPTT if the online rule saves nothing, and its reason."""
    longer = math.ceil(found.length * row.trace_bytes / max(found.bptt.activation_bytes, 1))
    words = (
        f"{row.rule}: {why}. BPTT stores all steps, and its memory grows with the length: from about "
        f"{longer} steps on, {row.rule} step by step takes less."
    )
    if not _is_dear(found, row):
        return row, f"Take {words}"
    return found.bptt, (
        f"Take BPTT for sequences of {found.length} steps: it is exact, and no rule that is good enough takes"
        f" less time or memory. For a stream, updates at every step or longer sequences, take {words}"
    )
