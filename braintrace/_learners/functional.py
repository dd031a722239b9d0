"""Online learning of any JAX function `step(params, carry, x) -> (carry, y)`: pure functions over pytrees."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .. import _compat, _meshes
from .._compiler.exactness import find_unseen
from .._compiler.graph import ETraceGraph, graph_from_info
from .._compiler.marking import mark_found
from .._compiler.module_info import read_step
from .._executor.executor import ETraceGraphExecutor, is_inexact
from .._executor.own_ops import check_own_ops
from .._executor.slots import find_slots
from .._executor.window import where_rows
from .._frontends.functions import Function, read_function
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
from .._report.diagnostics import kinds_of, warn_of, warn_of_options
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
) -> OnlineFunctions:
    """Pure functions that train `step(params, carry, x) -> (carry, y)` online.

    Args:
        step: A function of one time step, over any pytrees, of any framework.
        params: Leaves that are not arrays are static.
        carry: Inexact arrays are hidden states.
        x: The input of one step, for its shapes.
        rule: A rule of `braintrace.rules`, its class or name ('es_d_rtrl'); `D_RTRL()` by default. What its
            signal is made of goes to `step` and, as a sequence, to `grad` by name: `modulator=`, `target=`.
        mark: 'auto' finds operations that use parameters; 'ops' counts those that are marked by hand.
        window: Back-propagate through windows of so many steps; the rule answers for earlier ones.
        order: What `step` takes after `params` and returns, if not 'carry x -> carry y': 'x carry -> y carry'
            for Haiku and spyx, 'x carry -> carry' for the cells of Equinox.
        untraced: Names of leaves or subtrees of the carry that have no trace, and are not reset with a
            sample: running statistics ('stats', '1.mean').

    Raises:
        CompilationError: `step` has another order, or returns a carry of other shapes or types.

    >>> import braintrace, jax, jax.numpy as jnp
    >>> def step(params, h, x):
    ...     h = 0.9 * h + jnp.tanh(x @ params["w"])
    ...     return h, h @ params["out"]
    >>> params = {"w": jnp.ones((3, 4)), "out": jnp.ones((4, 1))}
    >>> net = braintrace.online(step, params, jnp.zeros(4), jnp.ones(3))
    >>> traces = net.init(params, jnp.zeros(4))
    >>> loss = lambda y, target: jnp.mean((y - target) ** 2)
    >>> xs, ys = jnp.ones((5, 3)), jnp.ones((5, 1))
    >>> grads, (h, traces), (losses, _) = net.grad(loss, params, jnp.zeros(4), traces, xs, ys)
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
    return make_functions(function, carry, rule, mark, window)


def make_functions(
    function: Function, carry: Any, rule: Any, mark: Mark, window: int | None
) -> OnlineFunctions:
    rule = D_RTRL() if rule is None else as_rule(rule)
    check_mark(mark)
    check_window(window)
    return OnlineFunctions(function, rule, mark, window, start=function.carry.leaves(carry))


@dataclass(frozen=True, eq=False)
class OnlineFunctions:
    """`init`, `step`, `grad` and `evolve` of one rule on one step function; they keep nothing."""

    function: Function = field(repr=False)
    rule: Rule
    mark: Mark
    window: int | None
    start: Leaves = field(repr=False)  # the carry that samples begin anew with
    _programs: Programs = field(default_factory=Programs, repr=False)

    @cached_property
    def graph(self) -> ETraceGraph:
        """What the compiler found: groups of hidden states, and the operations that feed them."""
        step = self.function.step
        with _meshes.no_types():
            graph = graph_from_info(read_step(mark_found(step) if self.mark == "auto" else step))
        warn_of_no_effect(unused_parameters(graph.module_info))
        if isinstance(self.rule, TraceRule):
            check_own_ops(find_slots(graph.hidden_param_op_relations))
            warn_of(graph, kinds_of(self.rule.kind(self.rule.windows or self.window is not None)))
        return graph

    @cached_property
    def _online(self) -> Online:
        with _meshes.no_types():
            online = self._new_online()
        function, info = self.function, online.info
        pairs = list(zip(info.entries, [*function.params.like, *function.carry.like], strict=True))
        fixed, rest = ([a for e, a in pairs if e.is_fixed is kept] for kept in (True, False))
        online.executor.spread_like(fixed, function.x.like, rest)
        return online

    def _new_online(self) -> Online:
        windows = self.rule.windows or self.window is not None
        warn_of_options(self.graph, self.rule.kind(windows))
        executor = ETraceGraphExecutor(self.rule.seen(self.graph, windows))
        unseen = find_unseen(self.graph, self.rule.kind(windows))
        return Online(executor, self.rule, windows=windows, unseen=unseen)

    @property
    def report(self) -> CompilationReport:
        """What is learned how, and what is left out."""
        from .._report.report import CompilationReport

        return CompilationReport(self.graph, self.rule.kind(self._online.windows))

    def with_rule(self, rule: Rule, window: int | None = None) -> OnlineFunctions:
        """The same step function under another rule, in windows of so many steps (None: as before)."""
        return self._changed(rule=rule, window=window or self.window)

    def _changed(self, **changes: Any) -> OnlineFunctions:
        """A copy with other fields and the same graph, which goes by the function alone."""
        other = replace(self, **changes, _programs=Programs())
        other.__dict__["graph"] = self.graph
        return other

    def with_start(self, carry: Any) -> OnlineFunctions:
        """The same functions, with another carry that samples begin anew with."""
        other = replace(self, start=self.function.carry.leaves(carry))
        other.__dict__.update(graph=self.graph, _online=self._online)
        return other

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
        """How close `grad` is to back-propagation through time, parameter by parameter, from traces of zero.

        `tolerance` is the relative error that counts as round-off; by default it goes by the type of the
        parameters. `options` are those of `grad`: `mask`, `chunk_size`, `reduction`, `has_aux`, `modulator`.
        """
        from .._report.check import check_functions

        return check_functions(self, loss, params, carry, xs, *more, tolerance=tolerance, **options)

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
        """What each rule would cost on a sequence of `length` steps, as `braintrace.plan`; nothing is run."""
        from .._report.plan import plan_functions

        asked = {"rules": rules, "chunk_sizes": chunk_sizes, "memory_budget": memory_budget}
        dial = {"window": window, "rank": rank, "across": across}
        return plan_functions(self, length, dial, mesh, **asked)

    def laid_out(self, param: Shape, state: Shape, x: Shape) -> OnlineFunctions:
        """The same for arrays that are spread over devices as these functions of shapes say."""
        f = self.function
        trees = [
            replace(t, like=list(map(g, t.like)))
            for t, g in zip((f.params, f.carry, f.x), (param, state, x), strict=True)
        ]
        function = replace(f, params=trees[0], carry=trees[1], x=trees[2])
        return self._changed(function=function, start=trees[1].like)

    @property
    def initial_shapes(self) -> Values:
        """The shapes of what the rule keeps, and how it is spread over devices."""
        return self._online.spread_shapes

    def compare(self, loss: Loss, params: Any, carry: Any, xs: Any, *more: Any, **options: Any) -> Comparison:
        """Rules side by side on this function and data, as `braintrace.compare`; none is kept.

        `options` are `rules`, `train`, `mask`, `chunk_size`, `memory_budget` and `progress`.
        """
        from .._train.compare_rules import compare_functions

        return compare_functions(self, loss, params, carry, xs, *more, **options)

    # -- pytrees and leaves ------------------------------------------------------------------------

    def _leaves(self, params: Any, carry: Any) -> Leaves:
        return [*self.function.params.same(params), *self.function.carry.same(carry)]

    @property
    def _num_params(self) -> int:
        return len(self.function.params.paths)

    def _split(self, leaves: Leaves) -> tuple[Leaves, list[Leaves]]:
        """The leaves that a step leaves as they are, and those that it hands on."""
        info = self._online.info
        pairs = list(zip(info.entries, leaves, strict=True))
        return [a for e, a in pairs if e.is_fixed], [[a] for e, a in pairs if not e.is_fixed]

    def _given(self, given: Values) -> Values:
        """What the rule's signal is made of, by its own names."""
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
        self, leaves: Leaves, values: Values, x: Leaves, given: Values
    ) -> tuple[Leaves, Leaves, Values]:
        """One step: its outputs, all leaves after it, and what the rule keeps."""
        if self.rule.back_through_time:
            return *self._plainly(leaves, x), values
        info = self._online.info
        fixed, rest = self._split(leaves)
        consts = list(info.program.consts.values())
        outs, new, after_call = bind(self._online, fixed, x, consts, rest, {**values, **given})
        values = {k: after_call[k] for k in values}
        moved = iter(new)
        after = [a if e.is_fixed else next(moved)[0] for e, a in zip(info.entries, leaves, strict=True)]
        return outs, after, values

    def _plainly(self, leaves: Leaves, x: Leaves) -> tuple[Leaves, Leaves]:
        """One step of the function as it is."""
        step = self.function.step
        outs = _meshes.in_auto(
            _compat.jaxpr_as_fun(step.closed_jaxpr), [*x, *leaves], lambda: step.specs or ()
        )
        num = len(outs) - len(leaves)
        return list(outs[:num]), list(outs[num:])

    def _spread_like(self, leaves: Leaves, x: Leaves) -> None:
        fixed, rest = self._split(leaves)
        self._online.executor.spread_like(fixed, x, rest)

    # -- what users call ---------------------------------------------------------------------------

    def init(self, params: Any, carry: Any, *, key: Any = None) -> Values:
        """The rule's arrays at the start, a pytree.

        Rules with random signs (`UORO`, `KF_RTRL`) draw those of `key`, a whole number or a random key; by
        default the signs are the same at each call. To start every sequence by `init`, pass another `key`
        each time, or their errors do not average out. `reset` goes on with the signs where they are.
        """
        leaves = self._leaves(params, carry)
        self._spread_like(leaves, self.function.x.like)
        values = self._online.initial_values(leaves)
        return values if key is None else self.rule.seeded(values, key)

    def step(self, params: Any, carry: Any, traces: Values, x: Any, **given: Any) -> tuple[Any, Values, Any]:
        """One step: the new carry, traces and output. Its derivative in `params` is the online gradient.

        `given` is what the rule's signal is made of: `modulator=`, `target=`.
        """
        leaves = self._leaves(params, carry)
        self._spread_like(leaves, self.function.x.same(x))
        now = jax.tree.map(jnp.asarray, self._given(given))
        outs, after, traces = self._call(leaves, traces, self.function.x.same(x), now)
        y = jax.tree.unflatten(self.function.step.out_tree, outs)
        return self.function.carry.rebuild(after[self._num_params :]), traces, y

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
        """Gradients over a whole sequence, (carry, traces) after it, and (losses, aux) of each step.

        `loss(y, *slices)` is the loss of a step, or a pair of it and anything else with `has_aux`; `xs` goes
        to the step, the sequences after it to the loss; time is first. `mask` weighs the losses: one number a
        step, or one for each step and sample, where `loss` returns one for each sample. A sample whose flag
        in `reset`, (time, batch), is set begins anew before that step, with the carry that the functions were
        made with. `chunk_size` steps are taken at once (None: as many as memory allows), which changes no
        number. Gradients have the structure of `params`, with None for what is not an inexact array.
        `given` is what the rule's signal is made of, such as `modulator=`: a sequence, weighed by `mask`.
        Losses are values: no derivative goes through what this returns; that of `step` does.
        """
        check_chunk_size(chunk_size)
        check_window(window)
        found = jax.tree.map(jnp.asarray, self._given(given))
        moving, fixed = (found, {}) if self.rule.signal.moves else ({}, found)
        sequence = Sequence.check((xs, *more, moving), mask, reset)
        request = Request(sequence, has_aux, reduction, return_value=True)

        def returned(y: Any, slices: tuple[Any, ...]) -> Any:
            return request.split(loss(y, *slices))

        step, out_tree, leaves = self._trace(returned, params, carry, traces, sequence, fixed)
        self._warn_of_closures(step, leaves)
        kept = {i for i, a in enumerate(leaves[: self._num_params]) if is_inexact(a)}
        drive = self._drive(step, sequence, traces, chunk_size, window)
        begins, initial = self._begins(sequence)
        drive = replace(drive, wanted=tuple(sorted(kept)), begins=begins, forget=self._forget)
        begin = Given(list(step.program.consts.values()), leaves, initial)
        total, outs, after = self._programs.run(Drive.__call__, drive, begin, sequence)
        found = dict(zip(drive.wanted, total, strict=True))
        grads = self.function.params.with_none([found.get(i) for i in range(self._num_params)])
        losses, aux = jax.tree.unflatten(out_tree, outs)
        grads = request.result(grads, losses, None)[0]
        return grads, self._after(after), (losses, aux)

    @_meshes.no_types()
    def evolve(
        self, params: Any, carry: Any, traces: Values, xs: Any, *, chunk_size: int | None = None
    ) -> tuple[Any, Values, Any]:
        """Advance over a sequence without a loss: the carry, traces and outputs of every step."""
        check_chunk_size(chunk_size)
        sequence = Sequence.check((xs, {}), None)
        step, out_tree, leaves = self._trace(lambda y, _: y, params, carry, traces, sequence, {})
        drive = self._drive(step, sequence, traces, chunk_size, None)
        given = Given(list(step.program.consts.values()), leaves, [])
        outs, after = self._programs.run(Drive.evolve, drive, given, sequence)
        return *self._after(after), jax.tree.unflatten(out_tree, outs)

    def reset(self, carry: Any, traces: Values, rows: Any = None) -> tuple[Any, Values]:
        """The carry that the functions were made with, and traces of zero; or that for the samples `rows`."""
        if rows is None:
            lasting = self._online.lasting
            zeros = {k: v if k in lasting else jnp.zeros_like(v) for k, v in traces.items()}
            return self.function.carry.rebuild(self.start), zeros
        rows = jnp.asarray(rows)
        now, at = self.function.carry.leaves(carry), self._sampled(rows.shape)
        old, start = ([some[i] for i in at] for some in (now, self.start))

        def begun(rows: Any, start: Leaves, old: Leaves, traces: Values) -> tuple[Leaves, Values]:
            return list(map(partial(where_rows, rows), start, old)), self._forget(traces, rows)

        found, traces = _meshes.in_auto_like((old, traces), begun, rows, start, old, traces)
        for i, leaf in zip(at, found, strict=True):
            now[i] = leaf
        return self.function.carry.rebuild(now), traces

    # -- sequences ---------------------------------------------------------------------------------

    def _trace(
        self, returned: Loss, params: Any, carry: Any, traces: Values, sequence: Sequence, fixed: Values
    ) -> tuple[UserStep, Any, Leaves]:
        """A step with `returned` of its output, the structure of that, and all leaves."""
        leaves = [*self._leaves(params, carry), *jax.tree.leaves(traces)]
        x = self.function.x.leaves(sequence.arrays[0])
        self._spread_like(self._leaves(params, carry), [_meshes.shape_of(a, 1) for a in x])
        num = len(leaves) - len(jax.tree.leaves(traces))
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
        known, paths = set(map(id, step.closed_over)), self.function.params.paths
        names = [f"`{'.'.join(p)}`" for p, a in zip(paths, leaves, strict=False) if id(a) in known]
        if names:
            warn_user(
                f"The loss, or the step, closes over {', '.join(names)}: what it reads there is a constant, "
                "and this part of the gradient is missing. Return what the loss needs of the parameters as "
                "part of the step's output `y`; wrap it in `jax.lax.stop_gradient` if a constant is meant.",
                about=self.function,
            )

    def _user_step(self, closed: Any) -> UserStep:
        paths = [*self.function.params.paths, *self.function.carry.paths]
        carried = [i for i, e in enumerate(self._online.info.entries) if not e.is_fixed]
        keys = sorted(self._online.initial_names)
        traces = {k: len(paths) + n for n, k in enumerate(keys)}
        names = [*(".".join(p) for p in paths), *keys]
        return UserStep.read(closed, names, traces, carried)

    def _drive(
        self, step: UserStep, sequence: Sequence, traces: Values, chunk_size: int | None, window: int | None
    ) -> Drive:
        if window is not None and not self._online.windows:
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
        paths = self._num_params + len(self.function.carry.paths)
        keys = sorted(self._online.initial_names)
        values = dict(zip(keys, leaves[paths:], strict=True))
        return self.function.carry.rebuild(leaves[self._num_params : paths]), values

    def _forget(self, values: Values, rows: Any) -> Values:
        return {**values, **self.rule.forget(self._online.executor, values, rows)}

    def _sampled(self, shape: tuple[int, ...]) -> list[int]:
        """Which leaves of the carry have so many samples in front; all that are hidden must."""
        hidden = {h.leaf for h in self._online.info.hidden}
        entries = self._online.info.entries[self._num_params :]
        odd = [
            ".".join(e.path)
            for e, a in zip(entries, self.start, strict=True)
            if not hidden.isdisjoint(e.invars) and jnp.shape(a)[:1] != shape
        ]
        if odd or any(isinstance(a, jax.ShapeDtypeStruct) for a in self.start):
            names = ", ".join(f"`{name}`" for name in odd)
            raise ValueError(
                f"Samples cannot begin anew one by one: {names or 'the carry'} has no axis of samples in "
                "front, or the functions were made with shapes instead of arrays that a sample begins with."
            )
        pairs = enumerate(zip(self.start, self.function.aside, strict=True))
        return [i for i, (a, aside) in pairs if not aside and jnp.shape(a)[:1] == shape]

    def _begins(self, sequence: Sequence) -> tuple[tuple[int, ...], Leaves]:
        if sequence.reset is None:
            return (), []
        at = self._sampled(sequence.reset.shape[1:])
        return tuple(self._num_params + i for i in at), [self.start[i] for i in at]
