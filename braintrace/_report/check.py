"""Comparison of an online gradient with that of back-propagation through time, by parameter.

relative error  |online - bptt| / |bptt|        cosine  <online, bptt> / (|online| |bptt|)
norm ratio      |online| / |bptt|
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler.step import Path, show_path, show_paths
from .._diagnostics.verdict import DroppedPath, Exactness
from .._types import NumPyArray, Options, PyTree
from .tables import Table, Tabled

Gradients = Mapping[Path, PyTree]

# largest relative error of two sums of the same products in different order, by bytes of the type
_ROUND_OFF = {8: 1e-9, 4: 1e-4, 2: 3e-2}


@dataclass(frozen=True)
class ParameterCheck:
    """The comparison of one parameter's gradient; `cause` is 'equal', 'rule' or 'numerical'."""

    path: Path
    relative_error: float
    cosine: float
    norm: float  # of the gradient of BPTT
    cause: str
    dropped: tuple[DroppedPath, ...]
    norm_ratio: float


@dataclass(frozen=True)
class GradientCheck(Tabled):
    """A learner's gradient compared with that of BPTT, parameter by parameter."""

    rule: str
    length: int
    parameters: list[ParameterCheck]
    relative_error: float  # of all parameters together
    cosine: float
    norm_ratio: float
    exactness: Exactness
    tolerance: float
    zero: list[str] = field(default_factory=list)  # the arrays whose gradient of BPTT is zero

    @property
    def ok(self) -> bool:
        """Whether every difference is round-off or due to a path that the rule truncates."""
        return all(p.cause != "numerical" for p in self.parameters)

    @property
    def equal(self) -> bool:
        return all(p.cause == "equal" for p in self.parameters)

    @property
    def explanation(self) -> str:
        """The causes of the differences, as sentences."""
        words = [about_zeros(self.zero)] if self.zero else []
        if self.equal:
            words.append(f"{self.rule} gives the gradient of BPTT, to round-off.")
            if not self.exactness.exact:
                words.append("The paths that it truncates contribute nothing here.")
            return "\n".join(words)
        rule = [p for p in self.parameters if p.cause == "rule"]
        if rule:
            words.append(
                f"The difference of {show_paths(p.path for p in rule)} is due to the rule: {self.rule} does "
                "not follow all of their influence on later losses."
            )
            dropped = dict.fromkeys(d.reason for p in rule for d in p.dropped)
            words += [f"- not followed: {reason}" for reason in list(dropped)[:5]]
            if len(dropped) > 5:
                words.append(f"- and {len(dropped) - 5} more in `.exactness.dropped`")
        rest = [p for p in self.parameters if p.cause == "numerical"]
        if rest:
            words.append(
                f"The difference of {show_paths(p.path for p in rest)} is numerical: it is not due to a "
                f"truncated path, yet it is larger than {self.tolerance:.0e}. Compare again in float64 "
                "(`brainstate.environ.set(precision=64)`): "
                "round-off shrinks. A difference that remains comes from `step_fn`, if it reads or assigns a "
                "state of the model itself: traces follow only the model's own step."
            )
        return "\n".join(words)

    def to_dict(self) -> Options:
        """Return all fields as plain data."""
        names = ("rule", "length", "relative_error", "cosine", "norm_ratio", "tolerance", "explanation")
        found = {name: getattr(self, name) for name in names} | {"exact": self.exactness.exact}
        found["parameters"] = rows = {show_path(p.path): dict(vars(p)) for p in self.parameters}
        for row in rows.values():
            del row["path"]
            row["dropped"] = [d.reason for d in row["dropped"]]
        return found

    @property
    def table(self) -> Table:
        numbers = lambda c: (f"{c.relative_error:.1e}", f"{c.cosine:.4f}")
        rows = [(show_path(p.path), *numbers(p), f"{p.norm:.2e}", _CAUSES[p.cause]) for p in self.parameters]
        rows.append(("all", *numbers(self), "", ""))
        return Table(
            f"{self.rule} against BPTT over {self.length} steps",
            ("parameter", "relative error", "cosine", "norm", "difference"),
            rows,
            self.explanation.splitlines(),
        )


_CAUSES = {"equal": "round-off", "rule": "the rule's", "numerical": "numerical"}


def compare_gradients(
    found: Gradients,
    expected: Gradients,
    exactness: Exactness,
    length: int,
    tolerance: float | None = None,
    traces: PyTree = None,
) -> GradientCheck:
    """Compare each parameter's gradient with that of BPTT, and name the cause of the difference.

    The default of the `tolerance` depends on the types of gradients and traces.
    """
    tolerance = round_off([dict(found), traces]) if tolerance is None else tolerance
    rows = []
    pairs = {path: (flatten(g), flatten(expected[path])) for path, g in found.items()}
    largest = max(float(np.linalg.norm(b)) for _, b in pairs.values())
    for path, (a, b) in pairs.items():
        error, cosine, ratio = _compare(a, b)
        dropped = tuple(d for d in exactness.dropped if d.weight_path == path)
        # Terms that cancel, as in the gradient of a bias before a normalisation, leave their own round-off
        # and are of the size of other gradients. A hundredth still distinguishes a small gradient from none.
        scale = max(float(np.linalg.norm(b)), largest / 100)
        is_equal = float(np.linalg.norm(a - b)) <= tolerance * scale
        cause = "equal" if is_equal else "rule" if dropped else "numerical"
        rows.append(ParameterCheck(path, error, cosine, float(np.linalg.norm(b)), cause, dropped, ratio))
    a, b = (np.concatenate([pair[i] for pair in pairs.values()]) for i in (0, 1))
    return GradientCheck(exactness.rule, length, rows, *_compare(a, b), exactness, tolerance, zeros(expected))


def flatten(tree: PyTree) -> NumPyArray:
    """Concatenate the leaves to one vector in double precision; a complex number becomes two."""
    leaves = [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(tree)]
    parts = [p for v in leaves for p in ((v.real, v.imag) if np.iscomplexobj(v) else (v,))]
    return np.concatenate([np.zeros(0), *(p.astype(np.float64) for p in parts)])


def _compare(a: NumPyArray, b: NumPyArray) -> tuple[float, float, float]:
    """Return the relative error of `a` to `b`, their cosine and the ratio of norms; two zeros are equal."""
    na, nb = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    if nb == 0:
        return (0.0, 1.0, 1.0) if na == 0 else (float("inf"), 0.0, float("inf"))
    cosine = float(a @ b) / (na * nb) if na else 0.0
    return float(np.linalg.norm(a - b)) / nb, cosine, na / nb


def round_off(values: PyTree) -> float:
    """Return the relative error that counts as round-off, by the coarsest type among the arrays."""
    types = [leaf.dtype for leaf in jax.tree.leaves(values) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return max(_ROUND_OFF[min(8, jnp.finfo(t).bits // 8)] for t in types)


def by_name(trees: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Return the arrays of pytrees by names such as `readout.weight['bias']`."""
    leaves = jax.tree_util.tree_leaves_with_path(dict(trees))
    return {f"{at[0].key}{jax.tree_util.keystr(at[1:])}": leaf for at, leaf in leaves}


def zeros(gradients: Gradients) -> list[str]:
    """Return the names of the arrays among gradients that are exactly zero."""
    named = by_name({show_path(path): g for path, g in gradients.items()})
    return [name for name, g in named.items() if g.size and not np.any(g)]


def about_zeros(names: Iterable[str]) -> str:
    """Return the advice for parameters whose gradient is zero."""
    return (
        f"The gradient of {', '.join(f'`{n}`' for n in names)} is exactly zero on these data: they are "
        "not learned. That of a weight that reads spikes is zero if no unit ever fired: then make the input "
        "weights (`w_init`) or `R` of the neurons larger (`R=tau/dt`), or `V_th` smaller."
    )
