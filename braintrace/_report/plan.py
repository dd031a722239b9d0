"""Estimate the memory and operations of training, before anything is allocated.

The size of traces is that of `jax.eval_shape` of the rule's `init`. Activations are the memory that XLA
allocates for the gradient of the whole sequence, which is compiled for the device in use and never run. The
loss is the mean square of the outputs.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .. import _rules
from .._executor.memory import device_memory
from .._executor.sharding import names_of
from .._frontends.module_function import read_module
from .._learners import pickling
from .._learners.compiled_step import CompiledStep
from .._learners.learner import Learner
from .._learners.rule_choice import RuleChoice
from .._learners.stateful import ETraceAlgorithm
from .._meshes import longer, on_one_mesh, part_of, sharded_shape
from .._online.choose import auto_window
from .._online.choose import memory_budget as default_budget
from .._online.request import WindowSize
from .._online.sequence import even_chunks
from .._types import Array, Aval, Mesh, Model, Options, PyTree, RuleLike
from .collectives import bytes_sent
from .flops import count_flops
from .tables import Table, Tabled, show_bytes, show_count

RULES = ("D_RTRL", "ES_D_RTRL", "RTRL", "BPTT")
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
            notes.append(
                "Bytes stored and received are those of one device. Flops are those of all, per step."
            )
        parameters, states = show_bytes(self.parameter_bytes), show_bytes(self.state_bytes)
        title = f"{what}; parameters {parameters}, states {states}"
        if not all(map(self.fits, self.rows)):
            where = " of a device" if self.mesh else ""
            notes.append(f"! More than {show_bytes(self.memory_budget)}{where}, with parameters and states.")
        return Table(title, columns, rows, notes)


def plan(
    model: Model,
    x0: PyTree,
    batch_size: int | None = None,
    length: int = 100,
    *,
    rules: Iterable[RuleLike] = RULES,
    chunk_sizes: Iterable[int] | None = None,
    memory_budget: int | None = None,
    window: WindowSize | None = None,
    rank: int = 0,
    basis: str | None = None,
    across: str | None = None,
    mesh: Mesh | None = None,
) -> Plan:
    """Estimate the memory and operations of each rule on a sequence; the model is not changed.

    Args:
        model: A module of brainstate.
        x0: The input of one step, or a tuple of several: arrays or `jax.ShapeDtypeStruct`s.
        batch_size: Take the states as `init_all_states(model, batch_size=batch_size)` would make them.
            Default the states as they are.
        length: The number of steps of the sequence. Default 100.
        rules: Names, classes or values of `braintrace.rules`. Default D_RTRL, ES_D_RTRL, RTRL and BPTT.
        chunk_sizes: Steps per backward pass. Default 1, about the square root of the length, and all steps.
        memory_budget: The bytes that the recommendation may use on each device. Default the memory of the
            device, or half of the machine's, which the devices of a CPU share.
        window: Add a row for D_RTRL in windows of so many steps, or 'auto'.
        rank: The rank of the correction in that row. Default 0.
        basis: How the basis of that correction is found: 'balanced' or 'pushed'.
        across: 'layers' for the influence on the layers above a weight, in that row.
        mesh: A mesh of devices; all bytes are then those of one of them. The first axis of states and of `x0`
            is sharded over the first axis of the mesh; the last axis of states and parameters over 'model',
            or else the second axis. Parameters that are on a mesh stay as they are.

    Returns:
        A `Plan`: a row for each rule and chunk size, and a recommendation.

    >>> import braintrace, jax, jax.numpy as jnp
    >>> x0 = jax.ShapeDtypeStruct((16, 3), jnp.float32)
    >>> cell = braintrace.nn.GRUCell(3, 8)
    >>> costs = plan(cell, x0, batch_size=16, length=20, rules=["D_RTRL"], chunk_sizes=[20])
    >>> costs.row("D_RTRL").trace_bytes  # two products of 11 inputs and a bias, for each sample and unit
    12288
    """
    if isinstance(model, ETraceAlgorithm):
        raise TypeError("`plan` takes the model, not a learner of it: `plan(learner.model, ...)`.")
    args = jax.tree.map(_struct, x0 if isinstance(x0, tuple) else (x0,))
    twin = _abstract_copy(model, batch_size)
    layout = None if mesh is None else Layout.of(mesh)
    if layout is not None:
        args = jax.tree.map(layout.of_input, args)
        _shard(twin, model, layout)
    function = read_module(twin, args)
    learner = Learner(CompiledStep(function, _rules.D_RTRL(), "ops", None), function.carry.like)
    with warnings.catch_warnings(action="ignore"):
        _ = learner.graph
    request = PlanRequest(length, rules, chunk_sizes, memory_budget, window, rank, basis, across)
    return replace(plan_learner(learner, request, layout), batch_size=batch_size)


@dataclass(frozen=True)
class PlanRequest:
    """The rules and sizes that a plan is asked for; see `plan`."""

    length: int
    rules: Iterable[RuleLike] = RULES
    chunk_sizes: Iterable[int] | None = None
    memory_budget: int | None = None
    window: WindowSize | None = None
    rank: int = 0
    basis: str | None = None
    across: str | None = None

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"`length` must be at least 1, not {self.length}.")

    def choices(self) -> list[RuleChoice]:
        """Return the rules, with D_RTRL in windows behind them if that is asked for."""
        found = [RuleChoice.of(given) for given in self.rules]
        given = {"window": self.window, "rank": self.rank, "basis": self.basis, "across": self.across}
        options = {name: value for name, value in given.items() if value}
        if options and any(choice.name == "D_RTRL" for choice in found):
            found.append(RuleChoice.of(("D_RTRL", {"window": 1, **options})))
        return found

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
    rows = [row for choice in request.choices() for row in _rows(learner, request, choice)]
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

    def _put(self, a: Aval, names: Iterable[Any]) -> Aval:
        """Shard a shape over axes of the mesh; array axes that these do not divide are not sharded."""
        ways = lambda name: math.prod(self.mesh.shape[n] for n in names_of(name))
        spec = [n if size % ways(n) == 0 else None for n, size in zip(names, a.shape, strict=False)]
        return sharded_shape(a, self.mesh, spec)


def _shard(twin: Model, model: Model, layout: Layout) -> None:
    """Shard the states of an abstract copy; parameters keep the sharding that they have in the model."""
    given = model.states()
    for path, state in twin.states().items():
        if isinstance(state, brainstate.ParamState):
            state.value = jax.tree.map(layout.of_param, given[path].value)
        else:
            state.value = jax.tree.map(layout.of_state, state.value)


def _abstract_copy(model: Model, batch_size: int | None) -> Model:
    """Copy a model, with shapes in place of values."""
    memo: dict[int, Any] = {}
    for state in model.states().values():
        memo[id(state)] = pickling.copy_state(state)
        memo.update({id(leaf): leaf for leaf in jax.tree.leaves(state.value)})
    twin = copy.deepcopy(model, memo)
    key = brainstate.random.DEFAULT.value

    def init() -> PyTree:
        if batch_size is not None:
            brainstate.nn.init_all_states(twin, batch_size=batch_size)
        return {path: state.value for path, state in twin.states().items()}

    try:
        shapes = jax.eval_shape(init)
    finally:
        brainstate.random.DEFAULT.value = key
    for path, state in twin.states().items():
        state.value = shapes[path]
    return twin


def _rows(learner: Learner, request: PlanRequest, choice: RuleChoice) -> list[PlanRow]:
    """Estimate the cost of a rule in windows, or with each chunk size."""
    rule, window = choice.read()
    if window == "auto":
        window = auto_window(learner.compiled.online, request.length, default_budget())
        choice = RuleChoice.of((choice.source, {**choice.options, "window": window}))
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
        return learner.grad(_loss, params, carry, traces, xs, chunk_size=None if window else size)

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


def _loss(y: PyTree) -> Array:
    outs = [o for o in jax.tree.leaves(y) if jnp.issubdtype(o.dtype, jnp.inexact)]
    return sum((jnp.mean(jnp.square(jnp.abs(o))) for o in outs), start=jnp.zeros(()))


_ABOUT = 1.1  # more operations than this are not worth the memory that they save


def _recommend(
    rows: list[PlanRow], length: int, budget: int, always: int, devices: int
) -> tuple[PlanRow | None, str]:
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


def _struct(leaf: Aval) -> Aval:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
