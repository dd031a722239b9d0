"""Estimate the memory and operations of training, before anything is allocated.

The size of traces is that of `jax.eval_shape` of the rule's `init`. Activations are the memory that XLA
allocates for the gradient of the whole sequence, which is compiled for the device in use and never run. The
loss is the mean square of the outputs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .._executor.memory import device_memory
from .._meshes import MeshAxes, fitted, longer, on_one_mesh, part_of, sharded_shape
from .._online.choose import auto_window
from .._online.choose import memory_budget as default_budget
from .._online.sequence import even_chunks
from .._types import Array, Aval, Mesh, Options, PyTree
from .collectives import bytes_sent
from .flops import count_flops
from .tables import Table, Tabled, show_bytes, show_count

if TYPE_CHECKING:
    from .._learners.learner import Learner
    from .._learners.rule_choice import RuleChoice

STEP_BY_STEP = ("RTRL", "SnAp", "UORO", "KF_RTRL")  # rules that advance one step at a time

# On a CPU, XLA assigns buffers before it makes machine code, so that the code need not be fast.
_QUICKLY: Options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True)
class PlanRow:
    """The cost of one rule with one chunk size, or with one `window`."""

    rule: str  # its name
    title: str  # with its options
    chunk_size: int  # steps per backward pass
    exact: bool  # whether the gradient equals that of BPTT
    trace_bytes: int
    activation_bytes: int  # allocated while the gradient of the sequence is computed
    flops_per_step: float
    window: int | None = None
    sent_per_step: float = 0.0  # bytes that a device receives from others
    sent_per_chunk: float = 0.0

    @property
    def total_bytes(self) -> int:
        return self.trace_bytes + self.activation_bytes


@dataclass(frozen=True)
class Plan(Tabled):
    """The costs of several rules on one model, and a recommendation."""

    batch_size: int | None
    length: int
    parameter_bytes: int
    state_bytes: int
    memory_budget: int
    rows: list[PlanRow]
    recommendation: str
    recommended: PlanRow | None
    mesh: dict[str, int] | None = None  # its axes and their sizes; bytes are those of one device

    def row(self, rule: str, chunk_size: int | None = None, *, window: int | None = None) -> PlanRow:
        """Return one row; without a chunk size, that of the largest chunk."""
        asked = lambda r: (r.rule, r.window) == (rule, window) and chunk_size in (None, r.chunk_size)
        found = list(filter(asked, self.rows))
        if not found:
            raise KeyError(f"No row for {rule} with chunks of {chunk_size}.")
        return max(found, key=lambda r: r.chunk_size)

    def fits(self, row: PlanRow) -> bool:
        """Return whether a row fits in `memory_budget`, with the parameters and states."""
        return row.total_bytes + self.parameter_bytes + self.state_bytes <= self.memory_budget

    def to_dict(self) -> Options:
        """Return all fields as plain data."""
        return asdict(self)

    @property
    def table(self) -> Table:
        rows = [
            (
                r.title + (" *" if r is self.recommended else ""),
                "all" if r.chunk_size == self.length else str(r.chunk_size),
                "exact" if r.exact else "approximate",
                show_bytes(r.trace_bytes),
                show_bytes(r.activation_bytes),
                show_bytes(r.total_bytes) + ("" if self.fits(r) else " !"),
                show_count(r.flops_per_step),
                *((show_bytes(int(r.sent_per_step)), show_bytes(int(r.sent_per_chunk))) if self.mesh else ()),
            )
            for r in self.rows
        ]
        what = f"{self.length} steps" + ("" if self.batch_size is None else f", batch of {self.batch_size}")
        columns = ["rule", "steps at once", "gradient", "traces", "activations", "together", "flops per step"]
        notes = [f"* {self.recommendation}"]
        if self.mesh:
            axes = " x ".join(f"{size} {name}" for name, size in self.mesh.items())
            what += f"; on each of {math.prod(self.mesh.values())} devices ({axes})"
            columns[1], columns[6:] = "at once", ["flops", "sent per step", "per chunk"]
            notes.append("Bytes stored and received are those of one device; flops are those of all.")
        parameters, states = show_bytes(self.parameter_bytes), show_bytes(self.state_bytes)
        title = f"{what}; parameters {parameters}, states {states}"
        if not all(map(self.fits, self.rows)):
            where = " of a device" if self.mesh else ""
            notes.append(
                f"! With parameters and states more than the {show_bytes(self.memory_budget)}{where}."
            )
        return Table(title, columns, rows, notes)


@dataclass(frozen=True)
class PlanRequest:
    """The rules and sizes that a plan is asked for; see `braintrace.plan`."""

    length: int
    choices: list[RuleChoice]
    chunk_sizes: Iterable[int] | None = None
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"`length` must be at least 1, not {self.length}.")

    def sizes(self, name: str) -> list[int]:
        """Return the chunk sizes for a rule; some go step by step, and BPTT needs more than one step."""
        if name in STEP_BY_STEP:
            return [1]
        middle = even_chunks(self.length, math.isqrt(self.length))
        sizes = sorted({min(s, self.length) for s in (self.chunk_sizes or (1, middle, self.length))})
        return [s for s in sizes if s > 1] or [self.length] if name == "BPTT" else sizes


def plan_learner(learner: Learner, request: PlanRequest, layout: Layout | None) -> Plan:
    """Estimate the costs of a learner's step function, with arrays sharded by `layout` if there is one."""
    params, states = learner.function.params.like, learner.function.carry.like
    rows = [row for choice in request.choices for row in _rows(learner, request, choice)]
    devices = () if layout is None else tuple(layout.mesh.devices.flat)
    budget = device_memory(devices) if request.memory_budget is None else request.memory_budget
    best, words = _recommend(rows, request.length, budget, bytes_of([*params, *states]), len(devices))
    return Plan(
        batch_size=None,
        length=request.length,
        parameter_bytes=bytes_of(params),
        state_bytes=bytes_of(states),
        memory_budget=budget,
        rows=rows,
        recommendation=words,
        recommended=best,
        mesh=None if layout is None else dict(layout.mesh.shape),
    )


@dataclass(frozen=True)
class Layout:
    """The default sharding of inputs, states and parameters over a mesh."""

    mesh: Mesh
    samples: str
    units: str | None

    @staticmethod
    def of(mesh: Mesh) -> Layout:
        """Return the sharding for a mesh, with all axes of type Auto."""
        auto = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
        first, *others = mesh.axis_names
        units = "model" if "model" in others else next(iter(others), None)
        return Layout(jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=auto), first, units)

    def of_input(self, a: Aval) -> Aval:
        return self._put(a, [self.samples])

    def of_state(self, a: Aval) -> Aval:
        return self._put(a, [self.samples, *[None] * (len(a.shape) - 2), self.units])

    def of_param(self, a: Aval) -> Aval:
        given = getattr(a, "sharding", None)
        if isinstance(given, jax.sharding.NamedSharding) and given.mesh.axis_names == self.mesh.axis_names:
            return self._put(a, given.spec)
        return self._put(a, [*[None] * (len(a.shape) - 1), self.units])

    def _put(self, a: Aval, names: Iterable[MeshAxes]) -> Aval:
        """Shard a shape over axes of the mesh; array axes that these do not divide are not sharded."""
        return sharded_shape(a, self.mesh, fitted(self.mesh, names, a.shape))


def _rows(learner: Learner, request: PlanRequest, choice: RuleChoice) -> list[PlanRow]:
    """Estimate the cost of a rule in windows, or with each chunk size."""
    rule, window = choice.read()
    if window == "auto":
        window = auto_window(learner.compiled.rule_step, request.length, default_budget())
        choice = choice.with_options(window=window)
    if window is None or choice.name in STEP_BY_STEP:
        learner = learner.with_rule(rule, learner.window)
        return [_row(learner, request.length, choice, size, None) for size in request.sizes(choice.name)]
    size = min(window, request.length)
    return [_row(learner.with_rule(rule, window), request.length, choice, size, window)]


def _row(learner: Learner, length: int, choice: RuleChoice, size: int, window: int | None) -> PlanRow:
    """Estimate the cost of a learner by compiling its gradient over a sequence, for shapes."""
    function = learner.function

    def gradient(params: PyTree, carry: PyTree, xs: PyTree, traces: PyTree) -> PyTree:
        params, carry, xs = function.rebuild(params, carry, xs)
        return learner.grad(loss, params, carry, traces, xs, chunk_size=None if window else size)

    def loss(y: PyTree) -> Array:
        outs = [o for o in jax.tree.leaves(y) if jnp.issubdtype(o.dtype, jnp.inexact)]
        return sum((jnp.mean(jnp.square(jnp.abs(o))) for o in outs), start=jnp.zeros(()))

    with warnings.catch_warnings(action="ignore"):
        traces = learner.trace_shapes
        xs = [longer(a, length) for a in function.x.like]
        given = on_one_mesh((function.params.like, function.carry.like, xs, traces))
        traced = jax.jit(gradient).trace(*given)
        quickly = _QUICKLY if jax.default_backend() == "cpu" else None
        compiled: Any = traced.lower().compile(compiler_options=quickly)
        memory: Any = compiled.memory_analysis()
    several = any(s.num_devices > 1 for s in jax.tree.leaves(compiled.input_shardings))
    sent = bytes_sent(compiled.as_text()) if several else 0
    return PlanRow(
        rule=choice.name,
        title=choice.label,
        chunk_size=size,
        exact=learner.report.exactness.exact or (window or 0) >= length,
        trace_bytes=bytes_of(jax.tree.leaves(traces)),
        activation_bytes=int(memory.temp_size_in_bytes),
        flops_per_step=count_flops(traced.jaxpr) / length,
        sent_per_step=sent / length,
        sent_per_chunk=sent / math.ceil(length / size),
        window=window,
    )


Choice = tuple[PlanRow | None, str]  # and the reason
_ABOUT = 1.1  # more operations than this are not worth the memory that they save


def _recommend(rows: list[PlanRow], length: int, budget: int, always: int, devices: int) -> Choice:
    """Choose a row and explain why: exact before approximate, then least memory at about the fewest flops.

    `always` is the size of parameters and states in bytes, which every rule needs.
    """
    online = [r for r in rows if r.rule != "BPTT"]
    fits = [r for r in online if r.total_bytes + always <= budget]
    if not online:
        return None, "No online rule was asked for."
    if not fits:
        least = min(online, key=lambda r: r.total_bytes)
        return None, (
            f"Nothing fits in {show_bytes(budget)}{' of a device' if devices else ''}: the least is "
            f"{least.title} with {show_bytes(least.total_bytes)}, and {show_bytes(always)} of parameters "
            f"and states. Take {'more devices, ' if devices else ''}a smaller batch, or traces of less "
            "precision (`trace_dtype=jnp.bfloat16`)."
        )
    affordable = 8 * min(r.flops_per_step for r in rows)
    exact = [r for r in fits if r.exact and r.flops_per_step <= affordable]
    good = exact or [r for r in fits if r.rule == "D_RTRL"] or fits
    few = _ABOUT * min(r.flops_per_step for r in good)
    best = min((r for r in good if r.flops_per_step <= few), key=lambda r: r.total_bytes)
    how = "" if best.window else f", {_in_chunks(best, length)}"
    words = [
        f"{best.title}{how}: {show_bytes(best.total_bytes)}; its gradient on this model is "
        + ("exact." if best.exact else "an approximation (`report.exactness` lists the truncated paths).")
    ]
    bptt = next((r for r in rows if r.rule == "BPTT" and r.chunk_size == length), None)
    steady = [r for r in rows if r.title == best.title and r.chunk_size < length]
    if bptt is not None and steady:
        lean = min(steady, key=lambda r: r.total_bytes)
        longer = math.ceil(length * lean.total_bytes / max(bptt.total_bytes, 1))
        words.append(
            f"BPTT takes {show_bytes(bptt.total_bytes)} at this length and grows with it; {lean.title} "
            f"{_in_chunks(lean, length)} takes {show_bytes(lean.total_bytes)} at any length, less than BPTT "
            f"from about {longer} steps on."
        )
        if bptt.total_bytes <= best.total_bytes and bptt.flops_per_step <= best.flops_per_step:
            words.append(
                f"At {length} steps BPTT is exact and takes neither more memory nor more operations: take an "
                "online rule for a stream, updates at every step or longer sequences."
            )
    return best, " ".join(words)


def _in_chunks(row: PlanRow, length: int) -> str:
    known = {1: "step by step", length: "the whole sequence at once"}
    return known.get(row.chunk_size, f"in chunks of {row.chunk_size}")


def bytes_of(avals: Iterable[Aval]) -> int:
    """Return the bytes of arrays or shapes; of sharded ones, those on one device."""
    return int(sum(math.prod(part_of(a)) * jnp.dtype(a.dtype).itemsize for a in avals))
