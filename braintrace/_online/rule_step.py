"""Steps and windows as pure functions whose derivative is the online gradient.

    step(params, args, consts, states, traces) -> outputs, new states, new traces

The pull-back takes the cotangents of the outputs and new states, gets the learning signals and the
within-step gradients from one `vjp`, and adds the contraction of traces and signals. The incoming states and
traces get no gradient: the losses of several calls add up, and nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from .._compiler.errors import NotSupportedError
from .._compiler.step import Path
from .._executor.executor import ETraceGraphExecutor, Local
from .._executor.partial_sums import full_sum, plus
from .._executor.pull_back import is_inexact, pull_back
from .._executor.signals import KnownOutput
from .._executor.slots import Slot
from .._executor.trace_math import States, states, stored
from .._executor.weight_gradients import TIME
from .._executor.window import Record, Signals, Window
from .._ops.axis_labels import Labels
from .._rules.deferred import deferred
from .._rules.rule import Gradients, Rule, TraceRule, Values, add_to
from .._rules.signal import PROPAGATED, learning_signals
from .._types import Array, Leaves, PyTree
from .guarded_derivatives import differentiated_once, watched
from .rule_arrays import RuleArrays

StateDeltas = tuple[Leaves, Leaves]  # perturbations of the new and of the old hidden states
StatesAndSites = tuple[
    list[Leaves], dict[int, KnownOutput]
]  # the carried states before each step, outputs of sites


class RuleStep:
    """Steps and windows of one rule on one compiled graph, whose derivative is the online gradient.

    With `windows`, a call is a window of steps, back-propagated through along all paths, and the signals at
    its start are contracted with the traces before it. Otherwise a call is one step, and its signals are
    contracted with the traces after it. `unseen` maps each hidden state that no output depends on to the
    parameters whose gradient is approximate if the loss reads that state.
    """

    def __init__(
        self,
        executor: ETraceGraphExecutor,
        rule: Rule,
        *,
        windows: bool,
        unseen: Mapping[Path, Sequence[Path]] | None = None,
    ) -> None:
        self.unseen = unseen or {}
        rule = rule if windows else deferred(rule, executor)
        with_slopes = rule.signal.is_broadcast
        if rule.recursion is not None or with_slopes:
            executor = ETraceGraphExecutor(executor.graph, rule.recursion, with_slopes=with_slopes)
        self.executor, self.rule, self.uses_windows = executor, rule, windows
        self.info, self.arrays = executor.info, RuleArrays(executor, rule)
        if windows and rule.recursion is not None and rule.recursion.kappa is not None:
            raise NotSupportedError(
                f"{self._called} has no windows: its traces are of what is read of the states at each step, "
                "filtered over steps, and a window asks what the states at its start do to its losses, "
                "which only traces of states answer. Take single steps (`vjp_method='single-step'`, no "
                "`window`), or a rule without a filter: `EProp` with `kappa_filter_decay=0`, `D_RTRL`."
            )
        if windows and not rule.signal.has_windows:
            raise NotSupportedError(
                f"{self._called} has no windows: inside of one, losses are back-propagated to the weights "
                f"themselves, so that {rule.signal.words} would be the signal of what came before only. "
                "Take single steps (`vjp_method='single-step'`, no `window`), or a back-propagated signal "
                "(`feedback='symmetric'`, `D_RTRL`)."
            )

    @property
    def _called(self) -> str:
        return self.rule.kind(self.uses_windows).name

    @property
    def slots(self) -> list[Slot]:
        return self.executor.slots

    @property
    def trace_rule(self) -> TraceRule:
        assert isinstance(self.rule, TraceRule)
        return self.rule

    def advance(self, values: Values, window: Window) -> Values:
        """The rule's arrays after a window of steps, given those of `begin`, `with_room`."""
        return self.arrays.constrained(self.rule.advance(self.executor, values, window))

    # -- calls -------------------------------------------------------------------------------------

    def call(
        self,
        params: Leaves,
        args: Leaves,
        consts: Leaves,
        carried: list[Leaves],
        values: Values,
        stepped: Sequence[bool] | None,
    ) -> tuple[Leaves, list[Leaves], Values]:
        """Take a step or, with `stepped` (which arguments have a leading time axis), a window of steps.

        The derivative is the online gradient.
        """
        if self.uses_windows or stepped is not None:
            outs, new, after = self._window(params, args, consts, carried, values, stepped)
        else:
            outs, new, after = self._step(params, args, consts, carried, values)
        new = watched(self.info, new, self.unseen, self._called)
        return outs, new, {**values, **after}  # a rule returns only the arrays that it changed

    def _step(
        self, params: Leaves, args: Leaves, consts: Leaves, carried: list[Leaves], values: Values
    ) -> tuple[Leaves, list[Leaves], Values]:
        rule = self.trace_rule

        def advance(
            params: Leaves, args: Leaves, consts: Leaves, carried: list[Leaves], values: Values
        ) -> tuple[Leaves, list[Leaves], Values, Local]:
            outs, new, env, operands = self.executor.forward(params, args, consts, carried)
            local = self.executor.jacobians(env, operands)
            values = rule.signal.prepared(self.executor, params, consts, values)
            after = self.arrays.constrained({**values, **rule.update(self.slots, values, local)})
            return outs, new, after, local

        @jax.custom_vjp
        def step(*operands: PyTree) -> tuple[Leaves, list[Leaves], Values]:
            return advance(*operands)[:3]

        def forward(*operands: PyTree) -> tuple[PyTree, PyTree]:
            params, args, consts, carried, values = differentiated_once(operands)
            outs, new, after, local = advance(params, args, consts, carried, values)

            def differentiable(
                params: Leaves, args: Leaves, consts: Leaves, new: Leaves, old: Leaves, read: Leaves
            ) -> Leaves:
                outs, after = self.executor.signals(params, args, consts, carried, (new, old), None, read)
                return [*outs, *_flat(after)]

            old = self.executor.zero_deltas() if self.executor.reads_old_states else []
            deltas = self.executor.zero_deltas(), old, self.zeros_at_readings()
            _, pull = pull_back(differentiable, params, args, consts, *deltas)
            # residuals: `J` is needed only for traces that do not cover every path (`_counted_twice`)
            partial = not all(t.positions.complete for t in self.slots)
            kept = (local.inputs, local.weights, local.J if partial else {}, local.slopes)
            before = values if self.executor.reads_old_states and self.has_signals_at_old_states else None
            return (outs, new, after), (pull, before, after, kept, params, consts)

        def backward(residuals: PyTree, cotangents: PyTree) -> tuple[PyTree, ...]:
            pull, before, after, (inputs, weights, J, slopes), params, consts = residuals
            outs, new, _ = cotangents
            dparams, dargs, dconsts, deltas, old_deltas, read = pull([*outs, *_flat(new)])
            local = Local(inputs, weights, {}, J)
            back = self.executor.group_signals(deltas)
            signals = self.signals_of_step(
                after, back, deltas, read, self.inexact_outs(outs), slopes, self.signal_inputs(after)
            )
            # traces are contracted last: otherwise XLA copies weights that the pull-back still has to read
            done = [] if self.executor.sharding else [a for a in (*dparams, *deltas) if a is not None]
            size = max((v.nbytes for v in after.values() if isinstance(v, jax.Array)), default=0)
            signals = {k: stored(g, size, done) for k, g in signals.items()}
            grads = rule.gradient(self.slots, after, signals, local)
            for key, value in self._counted_twice(self.executor.widened(back), local).items():
                grads[key] = grads[key] - value
            if before is not None:
                old_signals = self.executor.widened(self.executor.group_signals(old_deltas))
                for key, value in rule.gradient(self.slots, before, old_signals, local).items():
                    grads[key] = grads[key] + value
            dparams = _add(dparams, self.executor.to_parameters(params, consts, grads))
            return self.executor.like_params(dparams), dargs, dconsts, None, None

        step.defvjp(forward, backward)
        return step(params, args, consts, carried, values)

    def _window(
        self,
        params: Leaves,
        args: Leaves,
        consts: Leaves,
        carried: list[Leaves],
        values: Values,
        stepped: Sequence[bool] | None,
    ) -> tuple[Leaves, list[Leaves], Values]:
        """Run a window. Its derivative is back-propagation through it plus the rule's `past` at its start."""
        length = 1 if stepped is None else next(len(a) for a, s in zip(args, stepped, strict=True) if s)

        def run(
            params: Leaves, args: Leaves, consts: Leaves, carried: list[Leaves]
        ) -> tuple[Leaves, list[Leaves], StatesAndSites]:
            """The outputs, the new states, and the states before and the sites of every step."""
            if stepped is None:
                outs, new, ys, _ = self.executor.outputs(params, args, consts, carried)
                return outs, new, jax.tree.map(lambda a: a[None], (carried, ys))

            def body(carried: list[Leaves], slices: Leaves) -> tuple[list[Leaves], PyTree]:
                now = iter(slices)
                one = [next(now) if s else a for a, s in zip(args, stepped, strict=True)]
                outs, new, ys, _ = self.executor.outputs(params, one, consts, carried)
                return new, (outs, (carried, ys))

            by_step = [a for a, s in zip(args, stepped, strict=True) if s]
            new, (outs, visited) = jax.lax.scan(body, carried, by_step)
            return outs, new, visited

        def window(params: Leaves, args: Leaves, consts: Leaves, visited: StatesAndSites) -> Window:
            flags = stepped or [False] * len(args)
            args = [a if s else _repeated(a, length) for a, s in zip(args, flags, strict=True)]
            return Window(self.executor, length, params, args, [None] * len(consts), *visited, fixed=consts)

        @jax.custom_vjp
        def call(
            params: Leaves, args: Leaves, consts: Leaves, carried: list[Leaves], values: Values
        ) -> tuple[Leaves, list[Leaves], Values]:
            outs, new, visited = run(params, args, consts, carried)
            values = self._begun(values, length)
            return outs, new, {**values, **self.advance(values, window(params, args, consts, visited))}

        def forward(*operands: PyTree) -> tuple[PyTree, PyTree]:
            params, args, consts, carried, values = differentiated_once(operands)
            values = self._begun(values, length)

            def differentiable(params: Leaves, args: Leaves, consts: Leaves, flat: Leaves) -> PyTree:
                outs, new, visited = run(params, args, consts, _like(flat, carried))
                return [*outs, *_flat(new)], jax.lax.stop_gradient(visited)

            results, pull, visited = pull_back(
                differentiable, params, args, consts, _flat(carried), has_aux=True
            )
            steps = window(params, args, consts, visited)
            num = len(self.info.out_atoms)
            new = _like(results[num:], carried)
            # the backward pass needs the first step only
            first = jax.tree.map(lambda a: a[:1], (steps.args, steps.consts, steps.before, steps.ys))
            after = {**values, **self.advance(values, steps)}
            estimated = self.at_end(self.signal_inputs(values), _flat(new))
            return (results[:num], new, after), (pull, values, params, consts, first, estimated)

        def backward(residuals: PyTree, cotangents: PyTree) -> tuple[PyTree, ...]:
            pull, values, params, consts, first, estimated = residuals
            outs, new, _ = cotangents
            flat = _flat(new)
            if estimated is not None:
                flat = [a if e is None else a + e for a, e in zip(flat, estimated, strict=True)]
            dparams, dargs, dconsts, start = pull([*outs, *flat])
            before = replace(Window(self.executor, 1, params, *first), fixed=consts)
            past = self.rule.past(self.executor, values, start, before)
            return self.executor.like_params(_add(dparams, past)), dargs, dconsts, None, None

        call.defvjp(forward, backward)
        return call(params, args, consts, carried, values)

    def _begun(self, values: Values, length: int) -> Values:
        """The rule's arrays at the start of a window."""
        values = self.rule.begin(self.executor, values, fresh=False)
        return self.rule.with_room(self.executor, values, length)

    # -- signals -----------------------------------------------------------------------------------

    @property
    def has_signals_at_old_states(self) -> bool:
        """Whether traces give the gradient of a loss that reads a state before the step.

        They do for back-propagated signals only: no other signal has a value at those states.
        """
        return self.rule.signal == PROPAGATED

    def signal_inputs(self, values: Values) -> Values:
        """The inputs of the learning signal (targets, modulators), which come with the rule's arrays."""
        return {k: values[k] for k in self.rule.signal.takes if k in values}

    def at_end(self, signal_inputs: Values, new: Leaves) -> Leaves | None:
        """The signal's estimate of dL/dh of losses after a window, by carried leaf; None if it has none."""
        at = {v: i for i, v in enumerate(self.info.carried_invars)}
        now = [(h, at[h.leaf]) for h in self.info.hidden]
        if self.rule.signal == PROPAGATED or any(new[i] is None for _, i in now):
            return None
        hidden = [h.of_leaf(new[i]) for h, i in now]
        found = self.rule.signal.at_end(self.executor, signal_inputs, hidden)
        if found is None:
            return None
        by_leaf: dict[int, Array] = {}
        for (h, i), a in zip(now, found, strict=True):
            by_leaf[i] = h.in_leaf(a) + by_leaf[i] if i in by_leaf else h.in_leaf(a)
        return [by_leaf.get(i) for i in range(len(new))]

    def inexact_outs(self, outs: Leaves) -> Leaves:
        return [a for a, v in zip(outs, self.info.out_atoms, strict=True) if is_inexact(v.aval)]

    def zeros_at_readings(self) -> Leaves:
        """Zeros for the perturbations of readings of filtered groups."""
        return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in self.executor.filtered_readings]

    def zeros_at_outputs(self) -> Leaves:
        """Zeros for perturbations of the outputs, if the signal is computed from their cotangents."""
        atoms = self.inexact_outs(list(self.info.out_atoms)) if self.rule.signal.reads_outputs else []
        return [jnp.zeros(a.aval.shape, a.aval.dtype) for a in atoms]

    def signals_of_step(
        self,
        values: Values,
        back: Signals,
        deltas: Leaves,
        read: Leaves,
        d_outs: Leaves,
        slopes: Mapping[int, Sequence[States]],
        given: Values,
    ) -> Signals:
        """The learning signal of each group of a step, (S, *varshape), with filter states.

        `back` and `deltas` are dL/dh by group and by state, `read` and `d_outs` dL/d(readings, outputs).
        """
        signal, executor = self.rule.signal, self.executor
        if signal == PROPAGATED and not executor.filters:
            return back
        at_readings = executor.signals_at_readings(deltas, read)
        return learning_signals(signal, executor, values, back, at_readings, d_outs, slopes, given)

    # -- chunks ------------------------------------------------------------------------------------

    def differentiable(
        self,
        params: Leaves,
        args: Leaves,
        consts: Leaves,
        carried: list[Leaves],
        deltas: StateDeltas,
        ys: dict[int, KnownOutput],
        read: Leaves,
        at_sites: dict[int, Array],
    ) -> tuple[Leaves, list[Leaves], Local]:
        """One step with perturbations `deltas` to its states: outputs, new states, and local Jacobians."""
        carried = jax.lax.stop_gradient(carried)
        local = self.executor.local(*jax.lax.stop_gradient((params, args, consts)), carried, ys)
        outs, new = self.executor.signals(params, args, consts, carried, deltas, ys, read, at_sites)
        return outs, watched(self.info, new, self.unseen, self._called), local

    def chunk(
        self,
        params: Leaves,
        consts: Leaves,
        values: Values,
        total: Gradients,
        record: Record,
        *,
        fresh: bool,
        keep: bool,
        back: Signals,
    ) -> tuple[Values, Gradients]:
        """The traces after recorded steps, and the gradients of effective weights, added to `total`.

        `back` are the back-propagated signals of the steps.
        """
        weights = self.executor.weights(params, consts)
        local = replace(record.local, weights=weights, sharding=self.executor.sharding)
        record = replace(record, local=local)
        assert record.signals is not None
        values, grads = self.trace_rule.chunk(self.slots, values, record, total, fresh=fresh, keep=keep)
        for key, twice in self._counted_twice(back, local, (TIME,)).items():
            grads[key] = grads[key] - twice.astype(grads[key].dtype)
        return self.arrays.constrained(values), grads

    def _counted_twice(self, signals: Signals, local: Local, over: Labels = ()) -> Gradients:
        """The within-step gradients `g J x` that both traces and pull-back contain, to be subtracted once.

        Where a trace covers only some of the paths from its site to the group, the step is differentiated
        without holding the weight fixed. The pull-back then has the gradient along all paths of this step,
        and the contraction of signal and trace has that along the covered paths once more. All arrays but the
        weights have leading axes `over` (time), which are summed.
        """
        grads: Gradients = {}
        lead = len(over)
        for slot in self.slots:
            if not slot.positions.complete:
                site = slot.relation.site.index
                inputs, weight = local.inputs[site], local.weights[site][slot.name]
                g, J = states(signals[slot.group.index], lead), local.J[site, slot.group.index]
                dy = slot.to_y(slot.pair(g, J, lead), lead)
                dw = slot.from_cotangent(slot.factor(inputs, over), dy, inputs, weight, over)
                add_to(grads, slot, dw)
        return grads


def _flat(lists: list[Leaves]) -> Leaves:
    return [x for xs in lists for x in xs]


def _like(flat: Leaves, lists: list[Leaves]) -> list[Leaves]:
    items = iter(flat)
    return [[next(items) for _ in xs] for xs in lists]


def _add(a: Leaves, b: Leaves) -> Leaves:
    return [full_sum(plus(x, y)) for x, y in zip(a, b, strict=True)]


def _repeated(x: Array, length: int) -> Array:
    return jnp.broadcast_to(jnp.asarray(x)[None], (length, *jnp.shape(x)))
