"""The learner: pure functions that train `step(params, carry, x) -> (carry, y)` online, over any pytrees."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .. import _compat, _meshes
from .._compiler.exactness import RuleKind, find_unseen
from .._compiler.graph import ETraceGraph, graph_from_info
from .._compiler.marking import mark_found
from .._compiler.module_info import read_step
from .._executor.executor import ETraceGraphExecutor, is_inexact
from .._executor.own_ops import check_own_ops
from .._executor.slots import find_slots
from .._executor.window import where_rows
from .._frontends.functions import Function, read_function
from .._frontends.module_function import read_module, read_states
from .._frontends.modules import Mark, check_mark
from .._lines import warn_user
from .._online.call import bind
from .._online.choose import choose, memory_budget
from .._online.drive import Drive, Given
from .._online.online import Online
from .._online.programs import Programs
from .._online.request import Request, check_chunk_size, check_window
from .._online.sequence import Sequence
from .._online.user_step import UserStep
from .._report.beside import unused_parameters, warn_of_no_effect
from .._report.diagnostics import DiagnosticKind, kinds_of, warn_of, warn_of_options
from .._rules import D_RTRL
from .._rules.rule import Rule, TraceRule, Values
from .compile import as_rule

if TYPE_CHECKING:
    from .._report.check import GradientCheck
    from .._report.plan import Plan
    from .._report.report import CompilationReport
    from .._train.comparison import Comparison

Leaves = list[Any]
Loss = Callable[..., Any]
Shape = Callable[[Any], Any]


def online(
    step: Callable[..., Any],
    params: Any,
    carry: Any,
    x: Any,
    *,
    rule: Any = None,
    mark: Mark = "auto",
    window: int | None = None,
    order: str | None = None,
    untraced: Iterable[str] = (),
) -> Learner:
    """Make a learner that trains `step(params, carry, x) -> (carry, y)` online.

    Args:
        step: The function of one time step, over any pytrees, of any framework.
        params: The parameters. Leaves that are not arrays are static.
        carry: The state before the first step. Inexact arrays in it are hidden states.
        x: The input of one step; only its shapes are used.
        rule: A rule of `braintrace.rules`, its class or its name ('es_d_rtrl'); `D_RTRL()` by default. If
            its learning signal has inputs, these are passed to `step` by name (`modulator=`, `target=`), and
            as sequences to `grad`.
        mark: 'auto' finds the operations that use parameters; 'ops' uses those that are marked by hand.
        window: Back-propagate through windows of this many steps; traces summarise earlier steps.
        order: The arguments of `step` after `params`, and its results, if not 'carry x -> carry y': 'x carry
            -> y carry' for Haiku and spyx, 'x carry -> carry' for the cells of Equinox.
        untraced: Names of leaves or subtrees of the carry that have no trace and are not reset with a
            sample: running statistics ('stats', '1.mean').

    Returns:
        A `Learner`.

    Raises:
        CompilationError: `step` has another order, or returns a carry of other shapes or types.

    >>> import braintrace, jax, jax.numpy as jnp
    >>> def step(params, h, x):
    ...     h = 0.9 * h + jnp.tanh(x @ params["w"])
    ...     return h, h @ params["out"]
    >>> params = {"w": jnp.ones((3, 4)), "out": jnp.ones((4, 1))}
    >>> learner = braintrace.online(step, params, jnp.zeros(4), jnp.ones(3))
    >>> traces = learner.init(params, jnp.zeros(4))
    >>> loss = lambda y, target: jnp.mean((y - target) ** 2)
    >>> xs, ys = jnp.ones((5, 3)), jnp.ones((5, 1))
    >>> grads, (h, traces), (losses, _) = learner.grad(loss, params, jnp.zeros(4), traces, xs, ys)
    >>> grads["w"].shape, losses.shape
    ((3, 4), (5,))
    """
    names = [tuple(name.split(".")) for name in untraced]
    is_untraced = lambda path: any(path[1 : 1 + len(name)] == name for name in names)
    function = read_function(step, params, carry, x, is_untraced, order)
    known = [p[1:] for p in function.carry.paths]
    unknown = [name for name in names if not any(p[: len(name)] == name for p in known)]
    if unknown:
        leaves = ", ".join(map(repr, map(".".join, known)))
        raise ValueError(f"`untraced` has {'.'.join(unknown[0])!r}; the leaves of the carry are {leaves}.")
    return make_learner(function, carry, rule, mark, window)


def make_learner(
    function: Function, carry: Any, rule: Any = None, mark: Mark = "auto", window: int | None = None
) -> Learner:
    """Make a learner of a traced function; samples are reset to `carry`."""
    rule = D_RTRL() if rule is None else as_rule(rule)
    check_mark(mark)
    check_window(window)
    return Learner(function, rule, mark, window, start=function.carry.leaves(carry))


def learner_of(
    model: Any,
    args: Iterable[Any],
    rule: Any = None,
    *,
    mark: Mark = "ops",
    window: int | None = None,
    function: Callable[..., Any] | None = None,
) -> tuple[Learner, Any, Any]:
    """A `Learner` of a `brainstate` module, with its parameters and carry: dictionaries of values by path.

    `args` are the arguments of one step; the learner's `x` is the only one, or a tuple of several. Called in
    place of the model, `function` may add a loss to it. States are read, and none is changed;
    `write_states(learner.function, carry)` assigns them.
    """
    step = read_module(model, tuple(args), None, function)
    params, carry = read_states(step)
    return make_learner(step, carry, rule, mark, window), params, carry


@dataclass(frozen=True, eq=False)
class Learner:
    """A learning rule on a step function, as pure functions; made by `braintrace.online`.

    `init`, `step`, `grad`, `evolve` and `reset` take and return parameters, carry and traces, and store
    nothing. `report`, `check`, `plan` and `compare` say how each parameter is learned, how close the gradient
    is to that of BPTT, and at what cost.

    Attributes:
        rule: The learning rule, a value of `braintrace.rules`.
        mark: 'auto' or 'ops'.
        window: Steps of a window, or None for a rule of single steps.
    """

    function: Function = field(repr=False)
    rule: Rule
    mark: Mark
    window: int | None
    start: Leaves = field(repr=False)  # the leaves of the carry that samples are reset to
    _programs: Programs = field(default_factory=Programs, repr=False)

    @cached_property
    def graph(self) -> ETraceGraph:
        """The compiled graph: groups of hidden states, and the operations that feed them."""
        step = self.function.step
        with _meshes.no_types():
            graph = graph_from_info(read_step(mark_found(step) if self.mark == "auto" else step))
        traced = isinstance(self.rule, TraceRule)
        warn_of(graph, kinds_of(self.rule_kind) if traced else [DiagnosticKind.RULE_NOT_LINEAR])
        return graph

    @property
    def in_windows(self) -> bool:
        """Whether gradients are back-propagated through windows."""
        return self.rule.windows or self.window is not None

    @property
    def rule_kind(self) -> RuleKind:
        """The properties of the rule that decide whether its gradient is exact."""
        return self.rule.kind(self.in_windows)

    @cached_property
    def _online(self) -> Online:
        with _meshes.no_types():
            online = self.new_online()
        self._shard_like(online, self.function.like, self.function.x.like)
        return online

    def new_online(self) -> Online:
        """The rule's functions on the graph."""
        if isinstance(self.rule, TraceRule):
            check_own_ops(find_slots(self.graph.hidden_param_op_relations))
        warn_of_options(self.graph, self.rule_kind)
        executor = ETraceGraphExecutor(self.rule.seen(self.graph, self.in_windows))
        unseen = find_unseen(self.graph, self.rule_kind)
        return Online(executor, self.rule, windows=self.in_windows, unseen=unseen)

    @property
    def report(self) -> CompilationReport:
        """How each parameter is learned, and which paths through time the rule truncates."""
        from .._report.report import CompilationReport

        return CompilationReport(self.graph, self.rule_kind)

    def with_rule(self, rule: Rule, window: int | None = None) -> Learner:
        """A learner of the same step function with another rule, and another window if one is given."""
        return self._changed(rule=rule, window=window or self.window)

    def _changed(self, **changes: Any) -> Learner:
        """A copy with other fields and the same graph, which depends on the function alone."""
        other = replace(self, **changes, _programs=Programs())
        other.__dict__["graph"] = self.graph
        return other

    def with_start(self, carry: Any) -> Learner:
        """A copy that resets samples to another carry."""
        other = replace(self, start=self.function.carry.leaves(carry))
        other.__dict__.update(graph=self.graph, _online=self._online)
        return other

    def sharded(self, param: Shape, state: Shape, x: Shape) -> Learner:
        """A copy for arrays that are sharded as these functions of their shapes return."""
        f = self.function
        trees = [
            replace(t, like=list(map(g, t.like)))
            for t, g in zip((f.params, f.carry, f.x), (param, state, x), strict=True)
        ]
        function = replace(f, params=trees[0], carry=trees[1], x=trees[2])
        return self._changed(function=function, start=trees[1].like)

    @property
    def trace_shapes(self) -> Values:
        """Shape, type and sharding of each array that the rule stores from step to step."""
        return self._online.spread_shapes

    def check(
        self,
        loss: Loss,
        params: Any,
        carry: Any,
        xs: Any,
        *more: Any,
        tolerance: float | None = None,
        **options: Any,
    ) -> GradientCheck:
        """Compare `grad` with back-propagation through time, parameter by parameter, from traces of zero.

        Args:
            loss: The loss of a step, `loss(y, *slices)`.
            params: The parameters.
            carry: The carry before the first step.
            xs: The inputs of all steps; time is the first axis.
            *more: Further sequences, for the loss.
            tolerance: Relative error that counts as round-off; by default it depends on the type of the
                parameters.
            **options: Those of `grad`: `mask`, `chunk_size`, `reduction`, `has_aux`, `modulator`.
        """
        from .._report.check import check_learner

        return check_learner(self, loss, params, carry, xs, *more, tolerance=tolerance, **options)

    def plan(
        self,
        length: int = 100,
        *,
        rules: Iterable[str] = ("D_RTRL", "ES_D_RTRL", "RTRL", "BPTT"),
        chunk_sizes: Iterable[int] | None = None,
        memory_budget: int | None = None,
        window: int | None = None,
        rank: int = 0,
        across: str | None = None,
        mesh: Any = None,
    ) -> Plan:
        """The cost of each rule on a sequence of `length` steps, as `braintrace.plan`; nothing is run."""
        from .._report.plan import Layout, Request, plan_learner

        request = Request(tuple(rules), length, chunk_sizes, memory_budget, window, rank, across)
        if mesh is None:
            return plan_learner(self, request, None)
        layout = Layout.of(mesh)
        learner = self.sharded(layout.of_param, layout.of_state, layout.of_input)
        return plan_learner(learner, request, layout)

    def compare(self, loss: Loss, params: Any, carry: Any, xs: Any, *more: Any, **options: Any) -> Comparison:
        """Compare rules on this function and data, as `braintrace.compare`; the learner is not changed.

        `options` are `rules`, `train`, `mask`, `chunk_size`, `memory_budget` and `progress`.
        """
        from .._train.compare_rules import compare_learner

        return compare_learner(self, loss, params, carry, xs, *more, **options)

    # -- the pure functions ------------------------------------------------------------------------

    def init(self, params: Any, carry: Any, *, key: Any = None) -> Values:
        """The traces before the first step, a pytree.

        Rules with random signs (`UORO`, `KF_RTRL`) draw them from `key`, an integer or a random key. The
        default gives the same signs at each call: to start each sequence by `init`, pass another `key` each
        time, or the errors do not average out. `reset` continues the stream of signs.
        """
        warn_of_no_effect(unused_parameters(self.graph.module_info), self.function.step.model)
        leaves = self.function.leaves(params, carry)
        self._shard_like(self._online, leaves, self.function.x.like)
        values = self._online.initial_values(leaves)
        return values if key is None else self.rule.seeded(values, key)

    def step(self, params: Any, carry: Any, traces: Values, x: Any, **given: Any) -> tuple[Any, Values, Any]:
        """Take one step: the new carry, traces and output. Its derivative in `params` is the online gradient.

        `given` are the inputs of the rule's learning signal: `modulator=`, `target=`.
        """
        leaves, x = self.function.leaves(params, carry), self.function.x.same(x)
        self._shard_like(self._online, leaves, x)
        signal = jax.tree.map(jnp.asarray, self._signal_inputs(given))
        outs, after, traces = self._call(leaves, traces, x, signal)
        y = jax.tree.unflatten(self.function.step.out_tree, outs)
        return self.function.carry_of(after), traces, y

    @_meshes.no_types()
    def grad(
        self,
        loss: Loss,
        params: Any,
        carry: Any,
        traces: Values,
        xs: Any,
        *more: Any,
        mask: Any = None,
        reset: Any = None,
        window: int | None = None,
        chunk_size: int | None = None,
        reduction: str = "mean",
        has_aux: bool = False,
        **given: Any,
    ) -> tuple[Any, tuple[Any, Values], tuple[Any, Any]]:
        """The online gradient over a sequence.

        Args:
            loss: The loss of a step, `loss(y, *slices)`; with `has_aux` a pair of it and anything else.
            params: The parameters.
            carry: The carry before the first step.
            traces: The traces before the first step, of `init` or of an earlier call.
            xs: The inputs of all steps; time is the first axis.
            *more: Further sequences, whose slices are passed to `loss`.
            mask: Weights of the losses, of shape (time,), or (time, batch) if `loss` returns one loss for
                each sample.
            reset: Flags of shape (time, batch). A sample whose flag is set is reset before that step, to the
                carry that the learner was made with.
            window: Steps of a window, if another than the learner's.
            chunk_size: Steps that are taken at once; by default as many as memory allows. Changes speed and
                memory, not the numbers.
            reduction: 'mean' divides by the sum of the mask, 'sum' does not.
            has_aux: Whether `loss` returns a pair.
            **given: Sequences of the inputs of the rule's learning signal (`modulator=`), weighted by `mask`.

        Returns:
            The gradients, in the structure of `params` with None for leaves that are not inexact arrays; the
            pair (carry, traces) after the sequence; the pair (losses, aux) of all steps. Losses are values:
            no derivative goes through them.
        """
        check_chunk_size(chunk_size)
        check_window(window)
        found = jax.tree.map(jnp.asarray, self._signal_inputs(given))
        moving, fixed = (found, {}) if self.rule.signal.moves else ({}, found)
        sequence = Sequence.check((xs, *more, moving), mask, reset)
        request = Request(sequence, has_aux, reduction, return_value=True)

        def returned(y: Any, slices: tuple[Any, ...]) -> Any:
            return request.split(loss(y, *slices))

        step, out_tree, leaves = self._trace(returned, params, carry, traces, sequence, fixed)
        self._warn_of_closures(step, leaves)
        wanted = [i for i in self.function.param_at if is_inexact(leaves[i])]
        drive = self._drive(step, sequence, traces, chunk_size, window)
        begins, initial = self._begins(sequence)
        drive = replace(drive, wanted=tuple(wanted), begins=begins, forget=self.reset_traces)
        begin = Given(list(step.program.consts.values()), leaves, initial)
        total, outs, after = self._programs.run(Drive.__call__, drive, begin, sequence)
        found = dict(zip(wanted, total, strict=True))
        grads = self.function.params.with_none([found.get(i) for i in self.function.param_at])
        losses, aux = jax.tree.unflatten(out_tree, outs)
        grads = request.result(grads, losses, None)[0]
        return grads, self._after(after), (losses, aux)

    @_meshes.no_types()
    def evolve(
        self, params: Any, carry: Any, traces: Values, xs: Any, *, chunk_size: int | None = None
    ) -> tuple[Any, Values, Any]:
        """Advance over a sequence without a loss: the new carry, the traces, and the outputs of all steps."""
        check_chunk_size(chunk_size)
        sequence = Sequence.check((xs, {}), None)
        step, out_tree, leaves = self._trace(lambda y, _: y, params, carry, traces, sequence, {})
        drive = self._drive(step, sequence, traces, chunk_size, None)
        given = Given(list(step.program.consts.values()), leaves, [])
        outs, after = self._programs.run(Drive.evolve, drive, given, sequence)
        return *self._after(after), jax.tree.unflatten(out_tree, outs)

    def reset(self, carry: Any, traces: Values, rows: Any = None) -> tuple[Any, Values]:
        """Reset to the carry that the learner was made with, and to traces of zero.

        `rows`, a boolean for each sample of the batch, restricts the reset to the samples flagged.
        """
        if rows is None:
            lasting = self._online.lasting
            zeros = {k: v if k in lasting else jnp.zeros_like(v) for k, v in traces.items()}
            return self.function.carry.rebuild(self.start), zeros
        rows = jnp.asarray(rows)
        now, at = self.function.carry.leaves(carry), self._sampled(rows.shape)
        old, start = ([some[i] for i in at] for some in (now, self.start))

        def begun(rows: Any, start: Leaves, old: Leaves, traces: Values) -> tuple[Leaves, Values]:
            return list(map(partial(where_rows, rows), start, old)), self.reset_traces(traces, rows)

        found, traces = _meshes.in_auto_like((old, traces), begun, rows, start, old, traces)
        for i, leaf in zip(at, found, strict=True):
            now[i] = leaf
        return self.function.carry.rebuild(now), traces

    def reset_traces(self, traces: Values, rows: Any) -> Values:
        """The traces with those of the samples flagged in `rows` set to zero."""
        return {**traces, **self.rule.forget(self._online.executor, traces, rows)}

    # -- one step ----------------------------------------------------------------------------------

    def _split(self, leaves: Leaves) -> tuple[Leaves, list[Leaves]]:
        """The leaves that a step does not change, and those of each state that it does."""
        items = iter(leaves)
        fixed: Leaves = []
        rest: list[Leaves] = []
        for entry in self.graph.module_info.entries:
            some = [next(items) for _ in entry.invars]
            fixed.extend(some) if entry.is_fixed else rest.append(some)
        return fixed, rest

    def _signal_inputs(self, given: Values) -> Values:
        """The inputs of the rule's learning signal, by its own names."""
        signal = self.rule.signal
        found = signal.named(given)
        unknown = [k for k in found if k not in signal.takes]
        if unknown:
            known = ", ".join(f"`{k}`" for k in signal.takes) or "nothing"
            raise TypeError(f"There is no `{unknown[0]}`: the signal of the rule is made of {known}.")
        missing = [k for k in signal.takes if k not in found]
        if missing:
            raise ValueError(
                f"The rule takes its signal, {signal.words}, from the call: `step(..., {missing[0]}=...)`, "
                f"and as a sequence `grad(..., {missing[0]}=...)`."
            )
        return found

    def _call(
        self, leaves: Leaves, values: Values, x: Leaves, signal: Values
    ) -> tuple[Leaves, Leaves, Values]:
        """Take one step: the leaves of its output, all leaves after it, and the traces."""
        if self.rule.back_through_time:
            return *self._evaluate(leaves, x), values
        info = self._online.info
        fixed, rest = self._split(leaves)
        consts = list(info.program.consts.values())
        outs, new, after_call = bind(self._online, fixed, x, consts, rest, {**values, **signal})
        values = {k: after_call[k] for k in values}
        unchanged, moved = iter(fixed), (a for some in new for a in some)
        after = [next(unchanged if e.is_fixed else moved) for e in info.entries for _ in e.invars]
        return outs, after, values

    def _evaluate(self, leaves: Leaves, x: Leaves) -> tuple[Leaves, Leaves]:
        """Take one step of the function itself, without traces."""
        step = self.function.step
        outs = _meshes.in_auto(
            _compat.jaxpr_as_fun(step.closed_jaxpr), [*x, *leaves], lambda: step.specs or ()
        )
        num = len(outs) - len(leaves)
        return list(outs[:num]), list(outs[num:])

    def _shard_like(self, online: Online, leaves: Leaves, x: Leaves) -> None:
        """Shard the rule's arrays as the leaves of states and inputs are."""
        fixed, rest = self._split(leaves)
        online.executor.spread_like(fixed, x, rest)

    # -- sequences ---------------------------------------------------------------------------------

    def _trace(
        self, returned: Loss, params: Any, carry: Any, traces: Values, sequence: Sequence, fixed: Values
    ) -> tuple[UserStep, Any, Leaves]:
        """Trace a step and `returned` of its output: the step, the structure of its result, all leaves."""
        states = self.function.leaves(params, carry)
        leaves = [*states, *jax.tree.leaves(traces)]
        x = self.function.x.leaves(sequence.arrays[0])
        self._shard_like(self._online, states, [_meshes.shape_of(a, 1) for a in x])
        num = len(states)
        tree = jax.tree.structure(traces)
        out_trees: list[Any] = []

        def flat(slices: Any, leaves: Leaves) -> Leaves:
            x, *more, given = slices
            values = jax.tree.unflatten(tree, leaves[num:])
            outs, after, values = self._call(
                leaves[:num], values, self.function.x.same(x), {**given, **fixed}
            )
            y = jax.tree.unflatten(self.function.step.out_tree, outs)
            found, out_tree = jax.tree.flatten(returned(y, tuple(more)))
            out_trees.append(out_tree)
            return [*found, *after, *jax.tree.leaves(values)]

        slices = jax.tree.map(_meshes.slice_of, sequence.arrays)
        closed = _meshes.traced(jax.make_jaxpr(flat), slices, leaves)
        return self._user_step(closed), out_trees[-1], leaves

    def _warn_of_closures(self, step: UserStep, leaves: Leaves) -> None:
        """Warn of parameters that the loss, or the step, reads by its closure: they get no gradient there."""
        known = set(map(id, step.closed_over))
        names = [f"`{step.names[i]}`" for i in self.function.param_at if id(leaves[i]) in known]
        if names:
            warn_user(
                f"The loss, or the step, closes over {', '.join(names)}: what it reads there is a constant, "
                "and this part of the gradient is missing. Return what the loss needs of the parameters as "
                "part of the step's output `y`; wrap it in `jax.lax.stop_gradient` if a constant is meant.",
                about=self.function,
            )

    def _user_step(self, closed: Any) -> UserStep:
        entries = [e for e in self._online.info.entries for _ in e.invars]
        carried = [i for i, e in enumerate(entries) if not e.is_fixed]
        keys = sorted(self._online.initial_names)
        traces = {k: len(entries) + n for n, k in enumerate(keys)}
        return UserStep.read(closed, [*(".".join(e.path) for e in entries), *keys], traces, carried)

    def _drive(
        self, step: UserStep, sequence: Sequence, traces: Values, chunk_size: int | None, window: int | None
    ) -> Drive:
        if window is not None and not self.in_windows:
            raise ValueError(
                f"Windows of {window} steps need traces of all states: pass `window={window}` to "
                "`braintrace.online` as well."
            )
        return choose(
            self._online,
            step,
            sequence,
            values=traces,
            chunk_size=chunk_size,
            window=window or self.window or 1,
            keep=True,
            fresh=False,
            budget=memory_budget(),
        )

    def _after(self, leaves: Leaves) -> tuple[Any, Values]:
        """The carry and the traces among all leaves after a sequence."""
        keys = sorted(self._online.initial_names)
        values = dict(zip(keys, leaves[len(leaves) - len(keys) :], strict=True))
        return self.function.carry_of(leaves), values

    def _sampled(self, shape: tuple[int, ...]) -> list[int]:
        """Which leaves of the carry have a batch axis of this shape; all hidden states must."""
        hidden = {h.leaf for h in self._online.info.hidden}
        variables = [(e, v) for e in self._online.info.entries for v in e.invars]
        odd = [
            ".".join(variables[at][0].path)
            for at, a in zip(self.function.carry_at, self.start, strict=True)
            if variables[at][1] in hidden and jnp.shape(a)[:1] != shape
        ]
        if odd or any(isinstance(a, jax.ShapeDtypeStruct) for a in self.start):
            names = ", ".join(f"`{name}`" for name in odd)
            raise ValueError(
                f"Samples cannot be reset one by one: {names or 'the carry'} has no batch axis in front, or "
                "the learner was made with shapes instead of arrays that a sample is reset to."
            )
        pairs = enumerate(zip(self.start, self.function.untraced, strict=True))
        return [i for i, (a, untraced) in pairs if not untraced and jnp.shape(a)[:1] == shape]

    def _begins(self, sequence: Sequence) -> tuple[tuple[int, ...], Leaves]:
        """The leaves that `reset` of a sequence sets, and the values that it sets them to."""
        if sequence.reset is None:
            return (), []
        at = self._sampled(sequence.reset.shape[1:])
        return tuple(self.function.carry_at[i] for i in at), [self.start[i] for i in at]
