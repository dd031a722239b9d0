"""The learner: pure functions that train `step(params, carry, x) -> (carry, y)` online, over any pytrees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from .. import _meshes
from .._compiler.step import Path
from .._executor.pull_back import is_inexact
from .._frontends.functions import Function
from .._lines import warn_user
from .._online.choose import choose, memory_budget
from .._online.drive import Drive
from .._online.request import Request, WindowSize, check_chunk_size, check_window
from .._online.sequence import Sequence
from .._online.user_step import UserStep
from .._report.check import GradientCheck, compare_gradients
from .._report.plan import Layout, Plan, plan_learner
from .._report.report import CompilationReport, ETraceGraph
from .._rules.rule import Rule, Values
from .._rules.without_traces import BPTT
from .._types import ArrayLike, Aval, Key, Leaves, Mesh, Option, PyTree
from .compiled_step import CompiledStep
from .rule_choice import Rules, read_request, rules_to_compare

if TYPE_CHECKING:
    from .._train.compare_rules import Train
    from .._train.comparison import Comparison

Loss = Callable[..., PyTree]


@dataclass(frozen=True, eq=False)
class Learner:
    """A learning rule on a step function, as pure functions; made by `braintrace.online`.

    `init`, `step`, `grad`, `evolve` and `reset` take and return parameters, carry and traces, and store
    nothing. `report`, `check`, `plan` and `compare` say how each parameter is learned, how close the gradient
    is to that of BPTT, and at what cost.
    """

    compiled: CompiledStep = field(repr=False)
    start: Leaves = field(repr=False)  # the leaves of the carry that samples are reset to

    @property
    def function(self) -> Function:
        """The traced step function, with the structure of its parameters, carry and input."""
        return self.compiled.function

    @property
    def rule(self) -> Rule:
        """The learning rule, a value of `braintrace.rules`."""
        return self.compiled.rule

    @property
    def window(self) -> WindowSize | None:
        """Steps of a window; None for a rule of single steps."""
        return self.compiled.window

    @property
    def graph(self) -> ETraceGraph:
        """The compiled graph: groups of hidden states, and the operations that feed them."""
        return self.compiled.graph

    @property
    def report(self) -> CompilationReport:
        """How each parameter is learned, and which paths through time the rule truncates."""
        return self.compiled.report

    def with_rule(self, rule: Rule, window: WindowSize | None = None) -> Learner:
        """A learner of the same step function with another rule, in windows if `window` is set."""
        return replace(self, compiled=self.compiled.with_rule(rule, window))

    def with_start(self, carry: PyTree) -> Learner:
        """A copy that resets samples to another carry."""
        return replace(self, start=self.function.carry.leaves(carry))

    @property
    def trace_shapes(self) -> dict[str, Aval]:
        """Shape, type and sharding of each array that the rule stores from step to step."""
        return self.compiled.rule_step.arrays.sharded_shapes

    def check(
        self,
        loss: Loss,
        params: PyTree,
        carry: PyTree,
        xs: PyTree,
        *more: PyTree,
        tolerance: float | None = None,
        **options: Option,
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
        signal = self.rule.signal
        inputs = {k: v for k, v in options.items() if k in (*signal.takes, *signal.spellings)}
        options = {k: v for k, v in options.items() if k not in inputs}

        def gradient(learner: Learner, **inputs: PyTree) -> dict[Path, Leaves]:
            traces = learner.init(params, carry)
            grads = learner.grad(loss, params, carry, traces, xs, *more, **inputs, **options)[0]
            return self.function.by_parameter(grads)

        found, expected = gradient(self, **inputs), gradient(self.with_rule(BPTT()))
        length, exactness = Sequence.check((xs, *more), None).length, self.report.exactness
        return compare_gradients(found, expected, exactness, length, tolerance, self.trace_shapes)

    def plan(self, length: int = 100, *, mesh: Mesh | None = None, **options: Option) -> Plan:
        """Estimate the memory and operations of each rule on a sequence of `length` steps; nothing is run.

        The options are those of `braintrace.plan`: `rules`, `chunk_sizes`, `memory_budget`, `window`, `rank`,
        `basis`, `across` and `mesh`.
        """
        request = read_request(length, **options)
        if mesh is None:
            return plan_learner(self, request, None)
        layout = Layout.of(mesh)
        compiled = self.compiled.sharded(layout.of_param, layout.of_state, layout.of_input)
        return plan_learner(Learner(compiled, compiled.function.carry.like), request, layout)

    def compare(
        self,
        loss: Loss,
        params: PyTree,
        carry: PyTree,
        xs: PyTree,
        *more: PyTree,
        rules: Rules | None = None,
        train: Train = None,
        mask: ArrayLike | None = None,
        chunk_size: int | None = None,
        **options: Option,
    ) -> Comparison:
        """Compare rules on this function and data, as `braintrace.compare`; the learner is not changed."""
        from .._train.compare_rules import Problem, compare_rules  # which takes long to import

        check_chunk_size(chunk_size)
        if not callable(loss):
            raise TypeError(
                f"`loss(y, *slices)` is a function that returns the loss of a step, not {loss!r}."
            )
        sequence = Sequence.check((xs, *more), mask)
        arguments = lambda xs, ys: (xs,) if ys is None else (xs, ys)
        problem = Problem(self, loss, params, carry, sequence, chunk_size, arguments)
        return compare_rules(problem, partial(rules_to_compare, rules), train, **options)

    # -- the pure functions ------------------------------------------------------------------------

    def init(self, params: PyTree, carry: PyTree, *, key: Key | int | None = None) -> Values:
        """The traces before the first step, a pytree.

        Rules with random signs (`UORO`, `KF_RTRL`) draw them from `key`, an integer or a random key. The
        default gives the same signs at each call: to start each sequence by `init`, pass another `key` each
        time, or the errors do not average out. `reset` continues the stream of signs.
        """
        leaves = self.function.leaves(params, carry)
        values = self.compiled.initial_traces(leaves, self.function.x.like)
        return values if key is None else self.rule.seeded(values, key)

    def step(
        self, params: PyTree, carry: PyTree, traces: Values, x: PyTree, **given: PyTree
    ) -> tuple[PyTree, Values, PyTree]:
        """Take one step: the new carry, traces and output. Its derivative in `params` is the online gradient.

        `given` are the inputs of the rule's learning signal: `modulator=`, `target=`.
        """
        leaves, x = self.function.leaves(params, carry), self.function.x.same(x)
        self.compiled.shard_like(leaves, x)
        signal = jax.tree.map(jnp.asarray, self._signal_inputs(given))
        outs, after, traces = self.compiled(leaves, traces, x, signal)
        y = jax.tree.unflatten(self.function.step.out_tree, outs)
        return self.function.carry_of(after), traces, y

    @_meshes.no_types()
    def grad(
        self,
        loss: Loss,
        params: PyTree,
        carry: PyTree,
        traces: Values,
        xs: PyTree,
        *more: PyTree,
        mask: ArrayLike | None = None,
        reset: ArrayLike | None = None,
        window: WindowSize | None = None,
        chunk_size: int | None = None,
        reduction: str = "mean",
        has_aux: bool = False,
        **given: PyTree,
    ) -> tuple[PyTree, tuple[PyTree, Values], tuple[PyTree, PyTree]]:
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
            chunk_size: Steps taken at once, rounded up to whole windows; by default as many as memory allows.
                The gradient is the same up to rounding. With a balanced `rank`, the basis of later sequences
                depends on it, because its averages are taken per chunk.
            reduction: 'mean' divides by the sum of the mask, 'sum' does not.
            has_aux: Whether `loss` returns a pair.
            **given: Sequences of the inputs of the rule's learning signal (`modulator=`), weighted by `mask`.

        Returns:
            The gradients, in the structure of `params` with None for leaves that are not inexact arrays; the
            pair (carry, traces) after the sequence; the pair (losses, aux) of all steps. Losses are values:
            no derivative goes through them. They are of shape (time,), or (time, batch) with such a mask,
            before the mask and the reduction.
        """
        check_chunk_size(chunk_size)
        check_window(window)
        if window is not None and not self.compiled.uses_windows:
            raise ValueError(
                f"Windows of {window} steps need traces of all states: pass `window={window}` to "
                "`braintrace.online` as well."
            )
        signal_inputs = jax.tree.map(jnp.asarray, self._signal_inputs(given))
        by_step, fixed = (signal_inputs, {}) if self.rule.signal.moves else ({}, signal_inputs)
        sequence = Sequence.check((xs, *more, by_step), mask, reset)
        request = Request(sequence, has_aux, reduction)

        def loss_and_aux(y: PyTree, slices: tuple[PyTree, ...]) -> PyTree:
            return request.split(loss(y, *slices))

        step, out_tree, leaves = self._traced_step(loss_and_aux, params, carry, traces, sequence, fixed)
        self._warn_of_closures(step, leaves)
        wanted = [i for i in self.function.param_at if is_inexact(leaves[i])]
        drive = self._drive(step, sequence, chunk_size, window)
        rows = [] if sequence.reset is None else self._leaves_with_batch_axis(sequence.reset.shape[1:])
        at = tuple(self.function.carry_at[i] for i in rows)
        drive = replace(drive, wanted=tuple(wanted), reset_leaves=at)
        total, outs, after = self.compiled.run(drive, leaves, sequence, [self.start[i] for i in rows])
        by_leaf = dict(zip(wanted, total, strict=True))
        grads = self.function.params.with_none([by_leaf.get(i) for i in self.function.param_at])
        losses, aux = jax.tree.unflatten(out_tree, outs)
        return request.scaled(grads, losses), self._after(after), (losses, aux)

    @_meshes.no_types()
    def evolve(
        self, params: PyTree, carry: PyTree, traces: Values, xs: PyTree, *, chunk_size: int | None = None
    ) -> tuple[PyTree, Values, PyTree]:
        """Advance over a sequence without a loss: the new carry, the traces, and the outputs of all steps."""
        check_chunk_size(chunk_size)
        sequence = Sequence.check((xs, {}), None)
        step, out_tree, leaves = self._traced_step(lambda y, _: y, params, carry, traces, sequence, {})
        drive = self._drive(step, sequence, chunk_size)
        outs, after = self.compiled.run(drive, leaves, sequence, evolve=True)
        return *self._after(after), jax.tree.unflatten(out_tree, outs)

    def reset(self, carry: PyTree, traces: Values, rows: ArrayLike | None = None) -> tuple[PyTree, Values]:
        """Reset to the carry that the learner was made with, and to traces of zero.

        `rows`, a boolean for each sample of the batch, restricts the reset to the samples flagged.
        """
        if rows is None:
            lasting = self.compiled.rule_step.arrays.lasting
            zeros = {k: v if k in lasting else jnp.zeros_like(v) for k, v in traces.items()}
            return self.function.carry.rebuild(self.start), zeros
        rows = jnp.asarray(rows)
        now, at = self.function.carry.leaves(carry), self._leaves_with_batch_axis(rows.shape)
        old, start = ([some[i] for i in at] for some in (now, self.start))

        found, traces = self.compiled.reset_samples(rows, start, old, traces)
        for i, leaf in zip(at, found, strict=True):
            now[i] = leaf
        return self.function.carry.rebuild(now), traces

    # -- helpers -----------------------------------------------------------------------------------

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

    def _traced_step(
        self,
        loss_and_aux: Loss,
        params: PyTree,
        carry: PyTree,
        traces: Values,
        sequence: Sequence,
        fixed: Values,
    ) -> tuple[UserStep, jax.tree_util.PyTreeDef, Leaves]:
        """Trace one step and `loss_and_aux(y, slices)` of its output, the loss and aux.

        Returns the traced step, the structure of (loss, aux), and the leaves of params, carry and traces.
        """
        states = self.function.leaves(params, carry)
        leaves = [*states, *jax.tree.leaves(traces)]
        x = self.function.x.leaves(sequence.arrays[0])
        self.compiled.shard_like(states, [_meshes.shape_of(a, 1) for a in x])
        num = len(states)
        tree = jax.tree.structure(traces)
        out_trees: list[jax.tree_util.PyTreeDef] = []  # known while tracing only; the last trace counts

        def flat(slices: PyTree, leaves: Leaves) -> Leaves:
            x, *more, given = slices
            values = jax.tree.unflatten(tree, leaves[num:])
            x = self.function.x.same(x)
            outs, after, values = self.compiled(leaves[:num], values, x, {**given, **fixed})
            y = jax.tree.unflatten(self.function.step.out_tree, outs)
            found, out_tree = jax.tree.flatten(loss_and_aux(y, tuple(more)))
            out_trees.append(out_tree)
            return [*found, *after, *jax.tree.leaves(values)]

        slices = jax.tree.map(_meshes.slice_of, sequence.arrays)
        closed = _meshes.traced(jax.make_jaxpr(flat), slices, leaves)
        entries = [e for e in self.compiled.rule_step.info.entries for _ in e.invars]
        carried = [i for i, e in enumerate(entries) if not e.is_fixed]
        keys = sorted(self.compiled.rule_step.arrays.shapes)
        at = {k: num + n for n, k in enumerate(keys)}
        step = UserStep.read(closed, [*(".".join(e.path) for e in entries), *keys], at, carried)
        return step, out_trees[-1], leaves

    def _drive(
        self, step: UserStep, sequence: Sequence, chunk_size: int | None, window: WindowSize | None = None
    ) -> Drive:
        """Choose how to run a step over a sequence."""
        return choose(
            self.compiled.rule_step,
            step,
            sequence,
            chunk_size=chunk_size,
            window=window or self.window or 1,
            keep=True,
            fresh=False,
            budget=memory_budget(),
        )

    def _warn_of_closures(self, step: UserStep, leaves: Leaves) -> None:
        """Warn of parameters that the loss, or the step, reads by its closure: they get no gradient there."""
        known = set(map(id, step.closed_over))
        names = [f"`{step.names[i]}`" for i in self.function.param_at if id(leaves[i]) in known]
        if names:
            warn_user(
                f"The loss, or the step, closes over {', '.join(names)}: what it reads there is a constant, "
                "and this part of the gradient is missing. Return the values that the loss needs as part of "
                "the step's output `y`; wrap them in `jax.lax.stop_gradient` if constants are meant.",
                about=self.function,
            )

    def _after(self, leaves: Leaves) -> tuple[PyTree, Values]:
        """The carry and the traces among all leaves after a sequence."""
        keys = sorted(self.compiled.rule_step.arrays.shapes)
        values = dict(zip(keys, leaves[len(leaves) - len(keys) :], strict=True))
        return self.function.carry_of(leaves), values

    def _leaves_with_batch_axis(self, shape: tuple[int, ...]) -> list[int]:
        """The indices of the carry leaves with a batch axis in front; raises if a hidden state has none."""
        hidden = {h.leaf for h in self.compiled.rule_step.info.hidden}
        variables = [(e, v) for e in self.compiled.rule_step.info.entries for v in e.invars]
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
