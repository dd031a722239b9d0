"""The verdict in words: whether the gradient is that of back-propagation through time, and if not, why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .._compat import Primitive
from .._compiler.exactness import RuleKind, find_unseen
from .._compiler.findings import Finding, Found, Use
from .._compiler.graph import TraceGraph
from .._compiler.step import Path, show_path, show_paths
from .records import KIND_OF

Key = TypeVar("Key")
Item = TypeVar("Item")

# what is not counted, `of` an op, parameter or state on its path `to` states, and how the op on it is named
_WORDS = {
    Found.NO_TRACE: ("how {of} acts on {to} beyond the step: it has no trace{why}", ""),
    Found.LEFT_IN_STATE: ("what {of} leaves in {to}, which is carried from step to step without a trace", ""),
    Found.THROUGH_OP: ("how {of} acts on {to} beyond the step", "through"),
    Found.OTHER_POSITIONS: ("how {of} acts on other units of {to} beyond the step", "by"),
    Found.AVERAGED: (
        "the joint effect of inputs and states of {of}: their averages are kept, not their products",
        "",
    ),
    Found.OTHER_SIGNAL: ("the back-propagated signal at {to}, for {of}: {rule} has another signal", ""),
    Found.GIVEN_LEAK: ("the local Jacobian of {to}, for {of}: its trace decays by a given leak", ""),
    Found.FILTERED: ("the effect on {to} at single steps, for {of}: its trace is averaged over steps", ""),
    Found.BOUNDED: ("the effect of {of} on {to} above the bound of its trace", ""),
    Found.ESTIMATED: ("the effect of {of} on {to} beyond a window, which is estimated", ""),
    Found.UNKNOWN_RULE: ("whatever the rule {rule} leaves out in its trace of {of}", ""),
    Found.UNMARKED: ("how {of} acts on {to} beyond the step, without a mark", "by"),
    Found.RECURRENT_OP: ("what {of} passes on to {to}", "through"),
    Found.OTHER_UNITS: ("how units of {of} act on other units", "by"),
    Found.OTHER_GROUP: ("what {to} keeps of {of}", "through"),
    Found.OTHER_STATE: ("what {to}, which has no trace, keeps of {of}", "through"),
    Found.WHILE: ("what goes to the outputs", "through a loop without reverse mode,"),
    Found.OWN_DERIVATIVE: ("the derivative rule of a function that holds {of}", "inside"),
    Found.OUT_OF_REACH: ("the effect of {of} on {to} after more steps than the pattern covers", ""),
    Found.RANDOM: ("the error of a random estimate of the effect of {of} on {to}", ""),
    Found.NOT_LINEAR: (
        "the joint effect of several losses in a derivative rule that cannot be shown to be linear,",
        "that of",
    ),
}


@dataclass(frozen=True)
class DroppedPath:
    """One way in which a parameter acts on later losses that the gradient does not count."""

    weight_path: Path
    what: str  # in words: what is not counted
    way: str  # and through which op or primitive it goes
    primitive: Primitive | None  # the op or primitive on the way
    source: str  # the line of code
    hidden_paths: tuple[Path, ...] = ()

    @property
    def reason(self) -> str:
        return f"{self.what} {self.way}".strip() + (f" at {self.source}" if self.source else "")

    @property
    def message(self) -> str:
        return f"`{show_path(self.weight_path)}`: {self.reason}."

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Exactness:
    """Whether a rule's gradient equals that of BPTT, and every path that it drops."""

    rule: str
    dropped: list[DroppedPath]
    num_params: int
    windows: bool = False
    directions: tuple[int, int] | None = None  # of the correction: its rank, and the state size
    estimate: bool = False  # random, and right on average
    # hidden states that no output depends on, and the parameters that miss more if a loss reads them
    unseen: dict[Path, list[Path]] = field(default_factory=dict)

    @staticmethod
    def of(graph: TraceGraph, rule: RuleKind, dropped: Iterable[Finding]) -> Exactness:
        """The verdict on a compiled model of which a rule drops these paths."""
        found = dict.fromkeys(dropped_path(d, rule.name) for d in dropped)
        return Exactness(
            rule.name,
            list(found),
            len(graph.module_info.params),
            rule.windows,
            rule.directions(graph),
            rule.estimate,
            find_unseen(graph, rule),
        )

    @property
    def exact(self) -> bool:
        return not self.dropped

    @property
    def weights(self) -> dict[Path, list[DroppedPath]]:
        """The parameters whose gradient is approximate, and what each misses."""
        return _grouped((d.weight_path, d) for d in self.dropped)

    @property
    def reasons(self) -> dict[str, list[Path]]:
        """Each thing that is not counted, and the parameters that miss it."""
        return _grouped(dict.fromkeys((d.reason, d.weight_path) for d in self.dropped))

    def to_str(self, most: int = 5) -> str:
        """The verdict in words, with at most `most` reasons."""
        items = self.items()
        more = [f"and {len(items) - most} more: see `.dropped`"] if len(items) > most else []
        unseen = [
            f"a loss that reads `{show_path(path)}`, on which no output depends, has an approximate gradient "
            f"of {', '.join(f'`{show_path(p)}`' for p in params)}"
            for path, params in self.unseen.items()
        ]
        return "\n".join([self.headline, *(f"- {item}" for item in (*items[:most], *more, *unseen))])

    @property
    def headline(self) -> str:
        """The verdict in a sentence."""
        if self.exact:
            return (
                f"{self.rule} is exact here: the gradient of a loss of the model's outputs is that of "
                "back-propagation through time."
            )
        where = " across windows (exact inside a window, and if one window covers the sequence)"
        if self.estimate:
            return (
                f"{self.rule} is a random estimate here, of {len(self.weights)} of {self.num_params} "
                "parameters: its mean over random signs is the gradient of back-propagation through time, a "
                "single run has a large error. Not known:"
            )
        how = "Not counted:"
        if self.directions is not None:
            kept, numbers = self.directions
            how = f"Counted in {kept} of {numbers} directions only:"
        return (
            f"{self.rule} is approximate here{where if self.windows else ''}: {len(self.weights)} of "
            f"{self.num_params} parameters miss some of their effect on later losses. {how}"
        )

    def items(self) -> list[str]:
        """The truncated paths in words, each once with all its ops, lines and parameters."""
        items = []
        for what, several in _grouped((d.what, d) for d in self.dropped).items():
            ways = _some([d.way for d in several if d.way], 3)
            lines = _some([d.source.rsplit("/", 1)[-1] for d in several if d.source], 3)
            at = f" at {', '.join(lines)}" if lines else ""
            by = ", ".join(_some([f"`{show_path(d.weight_path)}`" for d in several], 4))
            items.append(f"{' '.join([what, ', '.join(ways)]).strip()}{at} (missed by {by})")
        return items

    def in_short(self) -> str:
        """The verdict in a few words."""
        if self.exact:
            return f"{self.rule} is exact"
        return f"{self.rule} is approximate for {len(self.weights)} of {self.num_params} parameters"

    def __str__(self) -> str:
        return self.to_str()

    def __repr__(self) -> str:
        return f"<Exactness: {self.in_short()}>"

    def _repr_pretty_(self, p: Any, cycle: bool) -> None:
        p.text(str(self))


def dropped_path(d: Finding, rule: str = "") -> DroppedPath:
    """A truncated path, in words."""
    what, how = _WORDS[d.kind]
    of = _label(d.of) if isinstance(d.of, Use) else show_paths([d.of] if d.of else [])
    to = "itself" if d.kind is Found.RECURRENT_OP and d.states == (d.of,) else show_paths(d.states)
    why = f", since {KIND_OF[d.detail].value}" if d.detail else ""
    way = "through marked ops" if d.kind is Found.RECURRENT_OP else ""
    at = d.by.site if isinstance(d.by, Use) else d.by
    if how and d.by is not None:
        way = f"{how} {_label(d.by) if isinstance(d.by, Use) else f'`{d.by.primitive.name}`'}"
    return DroppedPath(
        d.weight_path,
        what.format(of=of, to=to, why=why, rule=rule),
        way,
        at.primitive if at else None,
        at.source if at else "",
        d.hidden_paths,
    )


def _label(use: Use) -> str:
    of = f" {use.of}" if use.params else ""
    return f"`{use.site.primitive.name.removeprefix('etp_')}`{of}"


def _grouped(pairs: Iterable[tuple[Key, Item]]) -> dict[Key, list[Item]]:
    """The values of each key, in order."""
    found: dict[Key, list[Item]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def _some(words: Iterable[str], most: int) -> list[str]:
    """The first words, each once, and how many more there are."""
    words = list(dict.fromkeys(words))
    return words if len(words) <= most else [*words[: most - 1], f"{len(words) - most + 1} more"]
