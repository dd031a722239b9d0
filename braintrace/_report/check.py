"""Compare a learner's gradient with that of back-propagation through time, on any model.

    relative error  |online - bptt| / |bptt|        cosine  <online, bptt> / (|online| |bptt|)
    norm ratio      |online| / |bptt|

Both gradients are those of the same `step_fn` over the same sequences, from the states as they are now and
from traces of zero; for that of BPTT, a call of the learner is one of its model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._compiler.step import Path, show_path, show_paths
from .._frontends.pure import Pure
from .._learners.bptt import call_model
from .._learners.learner import Learner
from .._learners.sequences import trace
from .._learners.stateful import ETraceAlgorithm
from .._online.drive import finite_targets, weighed
from .._online.request import check_choice, check_chunk_size, split_loss
from .._online.sequence import Sequence, over_chunks
from .._rules import BPTT
from .tables import Table, Tabled
from .verdict import DroppedPath, Exactness

Gradients = Mapping[Path, Any]

# how far apart two ways of computing one gradient may be: sums of products in another order
_ROUND_OFF = {8: 1e-9, 4: 1e-4, 2: 3e-2}


@dataclass(frozen=True)
class ParameterCheck:
    """How one parameter's gradient compares; `cause` is 'equal', 'rule' or 'numerical'."""

    path: Path
    relative_error: float
    cosine: float
    norm: float  # of the gradient of BPTT
    cause: str
    dropped: tuple[DroppedPath, ...]
    norm_ratio: float


@dataclass(frozen=True)
class GradientCheck(Tabled):
    """A learner's gradient beside that of BPTT, parameter by parameter."""

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
        """Whether nothing differs by more than round-off and what the rule drops."""
        return all(p.cause != "numerical" for p in self.parameters)

    @property
    def equal(self) -> bool:
        return all(p.cause == "equal" for p in self.parameters)

    @property
    def explanation(self) -> str:
        """In words, whose the difference is."""
        words = [about_zeros(self.zero)] if self.zero else []
        if self.equal:
            why = "" if self.exactness.exact else " although the rule drops paths: they carry nothing here"
            return "\n".join([*words, f"{self.rule} gives the gradient of BPTT, to round-off{why}."])
        rule = [p for p in self.parameters if p.cause == "rule"]
        if rule:
            words.append(
                f"The difference of {show_paths(p.path for p in rule)} is the rule's: {self.rule} does not "
                "count all of their effect on later losses."
            )
            dropped = dict.fromkeys(d.reason for p in rule for d in p.dropped)
            words += [f"- not counted: {reason}" for reason in list(dropped)[:5]]
            if len(dropped) > 5:
                words.append(f"- and {len(dropped) - 5} more in `.exactness.dropped`")
        rest = [p for p in self.parameters if p.cause == "numerical"]
        if rest:
            words.append(
                f"The difference of {show_paths(p.path for p in rest)} is numerical: no path is dropped, yet "
                f"it is larger than {self.tolerance:.0e}. Compare again in float64 "
                "(`brainstate.environ.set(precision=64)`): "
                "round-off shrinks, anything else stays. What stays comes from `step_fn`, if it reads or "
                "assigns a state of the model by itself: traces know only of what the model's own step does."
            )
        return "\n".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        names = ("rule", "length", "relative_error", "cosine", "norm_ratio", "tolerance", "explanation")
        found = {name: getattr(self, name) for name in names} | {"exact": self.exactness.exact}
        found["parameters"] = rows = {show_path(p.path): dict(vars(p)) for p in self.parameters}
        for row in rows.values():
            del row["path"]
            row["dropped"] = [d.reason for d in row["dropped"]]
        return found

    @property
    def table(self) -> Table:
        rows = [
            (
                show_path(p.path),
                f"{p.relative_error:.1e}",
                f"{p.cosine:.4f}",
                f"{p.norm:.2e}",
                _CAUSES[p.cause],
            )
            for p in self.parameters
        ]
        rows.append(("all", f"{self.relative_error:.1e}", f"{self.cosine:.4f}", "", ""))
        return Table(
            f"{self.rule} against BPTT over {self.length} steps",
            ("parameter", "relative error", "cosine", "norm", "difference"),
            rows,
            self.explanation.splitlines(),
        )


_CAUSES = {"equal": "round-off", "rule": "the rule's", "numerical": "numerical"}


def check_gradients(
    learner: ETraceAlgorithm,
    *sequences: Any,
    step_fn: Callable[..., Any],
    mask: Any = None,
    chunk_size: int | None = None,
    weights: Any = None,
    reduction: str = "mean",
    has_aux: bool = False,
    tolerance: float | None = None,
) -> GradientCheck:
    """Compare `learner.etrace_grad(*sequences, step_fn=step_fn, ...)` with BPTT; states stay as they are.

    The arguments are those of `etrace_grad`. `tolerance` is the relative error that counts as round-off; by
    default it goes by the type of the parameters.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> learner = braintrace.compile(braintrace.nn.GRUCell(3, 4), "d_rtrl", jnp.ones(3))
    >>> check = check_gradients(learner, jnp.ones((5, 3)), step_fn=lambda x: jnp.sum(learner(x) ** 2))
    >>> [(p.path[0], p.cause) for p in check.parameters]
    [('Wh', 'rule'), ('Wr', 'rule'), ('Wz', 'rule')]
    """
    check_choice("reduction", reduction, ("mean", "sum"))
    check_chunk_size(chunk_size)
    sequence = Sequence.check(sequences, mask)
    if (learner.steps_at_once(chunk_size) or 1) == 1:
        targets = trace(learner, step_fn, sequence).step.targets
        leaves, tree = jax.tree.flatten(sequence.arrays)
        arrays = jax.tree.unflatten(tree, finite_targets(leaves, sequence.mask, targets))
        sequence = replace(sequence, arrays=arrays)
    weights = learner.param_states if weights is None else weights
    exactness = learner.report.exactness
    options = {"mask": sequence.mask, "chunk_size": chunk_size, "weights": weights, "reduction": reduction}

    total = (float(jnp.sum(sequence.mask)) or 1.0) if reduction == "mean" else 1.0

    def online(*arrays: Any) -> Any:
        grads = learner.etrace_grad(*arrays, step_fn=step_fn, has_aux=has_aux, **options)
        return grads[0] if has_aux else grads

    def true(*arrays: Any) -> Any:
        given = replace(sequence, arrays=arrays)
        with calling_model(learner):
            grads = _bptt(learner, given, step_fn, chunk_size, weights, has_aux)
        return jax.tree.map(lambda g: g / total, grads)

    found, expected = _gradient(online, learner, sequence), _gradient(true, learner, sequence)
    if tolerance is None:
        states = [*weights.values(), *learner.traces.values()]
        tolerance = round_off([st.value for st in states])
    return put_beside(found, expected, exactness, sequence.length, tolerance)


def check_learner(
    learner: Learner,
    loss: Callable[..., Any],
    params: Any,
    carry: Any,
    *sequences: Any,
    tolerance: float | None = None,
    **options: Any,
) -> GradientCheck:
    """Compare `learner.grad(loss, params, carry, traces of zero, *sequences, ...)` with BPTT."""
    signal = learner.rule.signal

    def gradient(learner: Learner) -> Gradients:
        unused = set() if learner.rule.signal.takes else {*signal.takes, *signal.spellings}
        more = {k: v for k, v in options.items() if k not in unused}
        grads = learner.grad(loss, params, carry, learner.init(params, carry), *sequences, **more)[0]
        return learner.function.by_parameter(grads)

    found, expected = gradient(learner), gradient(learner.with_rule(BPTT()))
    if tolerance is None:
        tolerance = round_off([found, learner.trace_shapes])
    length = Sequence.check(sequences, None).length
    return put_beside(found, expected, learner.report.exactness, length, tolerance)


def put_beside(
    found: Gradients, expected: Gradients, exactness: Exactness, length: int, tolerance: float
) -> GradientCheck:
    """Compare each parameter's gradient with that of BPTT, and name the cause of the difference."""
    rows = []
    pairs = {path: (flatten(g), flatten(expected[path])) for path, g in found.items()}
    largest = max(float(np.linalg.norm(b)) for _, b in pairs.values())
    for path, (a, b) in pairs.items():
        error, cosine, ratio = _compare(a, b)
        dropped = tuple(d for d in exactness.dropped if d.weight_path == path)
        # Terms that cancel, as in the gradient of a bias before a normalisation, leave their own round-off
        # behind, and are of the size of other gradients; a hundredth still tells a small gradient from none.
        scale = max(float(np.linalg.norm(b)), largest / 100)
        is_equal = float(np.linalg.norm(a - b)) <= tolerance * scale
        cause = "equal" if is_equal else "rule" if dropped else "numerical"
        rows.append(ParameterCheck(path, error, cosine, float(np.linalg.norm(b)), cause, dropped, ratio))
    a, b = (np.concatenate([pair[i] for pair in pairs.values()]) for i in (0, 1))
    return GradientCheck(exactness.rule, length, rows, *_compare(a, b), exactness, tolerance, zeros(expected))


@contextmanager
def calling(learner: ETraceAlgorithm, function: Callable[..., Any]) -> Iterator[None]:
    """Have `learner(...)` call another function."""
    object.__setattr__(learner, "update", function)
    try:
        yield
    finally:
        object.__delattr__(learner, "update")


def calling_model(learner: ETraceAlgorithm) -> AbstractContextManager[None]:
    """Have `learner(...)` call its model, without traces."""

    def update(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = learner._split_call(args, kwargs)[1:]
        return call_model(learner.model, *args, **kwargs)

    return calling(learner, update)


def _bptt(
    learner: Any, sequence: Sequence, step_fn: Any, chunk_size: int | None, weights: Any, has_aux: bool
) -> Any:
    """The gradient of the summed losses through all steps."""
    size = learner.steps_at_once(chunk_size)
    samples = sequence.mask.shape[1:]

    def losses(carry: Any, arrays: Any, mask: Any, _: Any) -> Any:
        if size is not None and size > 1:
            return carry, split_loss(step_fn(*arrays), has_aux, mask.shape[:1], samples)[0]
        one = lambda slices: split_loss(step_fn(*slices), has_aux, (), samples)[0]
        return carry, brainstate.transform.for_loop(one, arrays)

    def total() -> Any:
        _ = [state.value for state in weights.values()]  # also of those that the model does not use
        _, found = over_chunks(losses, (), sequence, size or sequence.length, brainstate.transform.scan)
        return weighed(found, sequence.mask)

    return brainstate.transform.grad(total, weights)()


def _gradient(function: Any, learner: ETraceAlgorithm, sequence: Sequence) -> Gradients:
    """The gradients that `function` returns, from traces of zero; no state is written."""
    pure, values = trace_afresh(function, learner, sequence)
    found = jax.jit(lambda values, arrays: pure(values, *arrays)[0])(values, sequence.arrays)
    return {tuple(map(str, path)): g for path, g in found.items()}


def trace_afresh(function: Any, learner: ETraceAlgorithm, sequence: Sequence) -> tuple[Pure, list[list[Any]]]:
    """A function over a sequence as a pure one, and the values of its states, traces being zero."""
    pure = Pure.trace(function, *sequence.arrays)
    traces = [st for k, st in learner.traces.items() if k not in learner._lasting_values()]
    fresh = {id(st) for st in (*traces, learner.steps)}
    values = [
        [jnp.zeros_like(leaf) for leaf in leaves] if id(state) in fresh else leaves
        for state, leaves in zip(pure.states, pure.values(), strict=True)
    ]
    return pure, values


def flatten(tree: Any) -> np.ndarray[Any, Any]:
    """The leaves as one vector, in double precision; a complex number as two."""
    leaves = [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(tree)]
    parts = [p for v in leaves for p in ((v.real, v.imag) if np.iscomplexobj(v) else (v,))]
    return np.concatenate([np.zeros(0), *(p.astype(np.float64) for p in parts)])


def _compare(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> tuple[float, float, float]:
    """The relative error of `a` against `b`, their cosine and the ratio of norms; two zeros are equal."""
    na, nb = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    if nb == 0:
        return (0.0, 1.0, 1.0) if na == 0 else (float("inf"), 0.0, float("inf"))
    cosine = float(a @ b) / (na * nb) if na else 0.0
    return float(np.linalg.norm(a - b)) / nb, cosine, na / nb


def round_off(values: Any) -> float:
    """By the coarsest type among parameters and traces."""
    types = [leaf.dtype for leaf in jax.tree.leaves(values) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return max(_ROUND_OFF[min(8, jnp.finfo(t).bits // 8)] for t in types)


def by_name(trees: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of parameters or their gradients, by names such as `readout.weight['bias']`."""
    leaves = jax.tree_util.tree_leaves_with_path(dict(trees))
    return {f"{at[0].key}{jax.tree_util.keystr(at[1:])}": leaf for at, leaf in leaves}


def zeros(gradients: Gradients) -> list[str]:
    """The names of the arrays among gradients that are exactly zero."""
    named = by_name({show_path(path): g for path, g in gradients.items()})
    return [name for name, g in named.items() if g.size and not np.any(g)]


def about_zeros(names: Iterable[str]) -> str:
    """What to do about parameters whose gradient is zero."""
    return (
        f"The gradient of {', '.join(f'`{n}`' for n in names)} is exactly zero on these data, and nothing is "
        "learned there. A weight that reads spikes has none if no unit ever fired: then make the input "
        "weights (`w_init`) or `R` of the neurons larger (`R=tau/dt`), or `V_th` smaller."
    )
