"""Steps and windows as pure functions whose derivative is the online gradient.

    step(params, args, consts, states, traces) -> outputs, new states, new traces

The pull-back takes the cotangents of the outputs and new states, gets the learning signals and the
within-step gradients from one `vjp`, and adds what the traces make of the signals. The incoming states and
traces get no gradient: the losses of several calls add up, and nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compat import Literal
from .._compiler.program import Var
from .._compiler.slices import needed
from .._executor.executor import ETraceGraphExecutor, Local, StepInputs, pull_back
from .._executor.traces import states
from .chunk import Record, over_time, step_by_step
from .rule import Gradients, Rule, Signals, Values, add_all, add_to

Leaves = list[Any]
Added = tuple[Leaves, Leaves]  # to the new states, and to the old ones


class Online:
    """The functions of one rule on one compiled graph."""

    def __init__(self, executor: ETraceGraphExecutor, rule: Rule) -> None:
        self.executor, self.rule = executor, rule
        self.info, self.traces = executor.graph.module_info, executor.traces

    def initial_values(self) -> Values:
        """The rule's arrays at the start."""

        def probe(inputs: Leaves) -> Values:
            _, _, env, operands = self.executor.forward(self._given_all(inputs))
            return self.rule.init(self.traces, self.executor.local(env, operands))

        shapes = next((found for rule, found in self.executor.initial if rule is self.rule), None)
        if shapes is None:
            shapes = jax.eval_shape(probe, self._structs())
            self.executor.initial.append((self.rule, shapes))
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)  # type: ignore[no-any-return]

    def _structs(self) -> Leaves:
        return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.info.program.inputs]

    def _given_all(self, inputs: Leaves) -> StepInputs:
        """What a step is given, from all inputs of the program."""
        known = dict(zip(self.info.program.inputs, inputs, strict=True))
        return StepInputs(
            args=[known[v] for v in self.info.arg_invars],
            consts=list(self.info.program.consts.values()),
            states=[[known[v] for v in e.invars] for e in self.info.entries],
        )

    def _given(self, params: Leaves, args: Leaves, consts: Leaves, rest: list[Leaves]) -> StepInputs:
        given, others = iter(params), iter(rest)
        states = [[next(given) for _ in e.invars] if e.is_fixed else next(others) for e in self.info.entries]
        return StepInputs(args, consts, states)

    def _carried(self, states: list[Leaves]) -> list[Leaves]:
        return [xs for e, xs in zip(self.info.entries, states, strict=True) if not e.is_fixed]

    def _advance(
        self, params: Leaves, args: Leaves, consts: Leaves, rest: list[Leaves], values: Values
    ) -> tuple[Leaves, list[Leaves], Values, Local]:
        outs, states, env, operands = self.executor.forward(self._given(params, args, consts, rest))
        local = self.executor.local(env, operands)
        return outs, self._carried(states), self.rule.update(self.traces, values, local), local

    def step(
        self, params: Leaves, args: Leaves, consts: Leaves, rest: list[Leaves], values: Values
    ) -> tuple[Leaves, list[Leaves], Values]:
        """One step, with the gradient of single-step mode."""

        @jax.custom_vjp
        def step(params: Any, args: Any, consts: Any, rest: Any, values: Any) -> Any:
            return self._advance(params, args, consts, rest, values)[:3]

        def forward(params: Any, args: Any, consts: Any, rest: Any, values: Any) -> Any:
            outs, new, after, local = self._advance(params, args, consts, rest, values)

            def differentiable(
                params: Leaves, args: Leaves, consts: Leaves, new: Leaves, old: Leaves
            ) -> Leaves:
                outs, states = self.executor.signals(self._given(params, args, consts, rest), (new, old))
                return [*outs, *_flat(self._carried(states))]

            _, pull = pull_back(differentiable, params, args, consts, *self.executor.zero_deltas())
            partial = not all(t.positions.complete for t in self.traces)
            kept = (local.inputs, local.weights, local.J if partial else {})
            before = values if self.executor.reads_old_states else None
            return (outs, new, after), (pull, before, after, kept, params, consts)

        def backward(residuals: Any, cotangents: Any) -> Any:
            pull, before, after, (inputs, weights, J), params, consts = residuals
            outs, new, _ = cotangents
            dparams, dargs, dconsts, deltas, old_deltas = pull([*outs, *_flat(new)])
            local = Local(inputs, weights, {}, J)
            signals = self.executor.group_signals(deltas)
            grads = self.rule.gradient(self.traces, after, signals, local)
            for key, value in self._counted_twice(signals, local).items():
                grads[key] = grads[key] - value
            if before is not None:
                old_signals = self.executor.group_signals(old_deltas)
                for key, value in self.rule.gradient(self.traces, before, old_signals, local).items():
                    grads[key] = grads[key] + value
            dparams = _add(dparams, self.to_parameters(params, consts, grads))
            return dparams, dargs, dconsts, None, None

        step.defvjp(forward, backward)
        return step(params, args, consts, rest, values)  # type: ignore[no-any-return]

    def window(
        self,
        params: Leaves,
        args: Leaves,
        stepped: Sequence[bool],
        consts: Leaves,
        rest: list[Leaves],
        values: Values,
    ) -> tuple[Leaves, list[Leaves], Values]:
        """Several steps, back-propagated through as one; traces stand for what came before.

        `stepped` tells which arguments have a leading axis of time; the outputs all do.
        """

        def scan(body: Callable[..., Any], carry: Any, args: Leaves) -> Any:
            moving = [a for a, s in zip(args, stepped, strict=True) if s]

            def one(carry: Any, slices: Leaves) -> Any:
                now = iter(slices)
                return body(carry, [next(now) if s else a for a, s in zip(args, stepped, strict=True)])

            return jax.lax.scan(one, carry, moving)

        def plain(params: Leaves, args: Leaves, consts: Leaves, flat: Leaves) -> tuple[Leaves, list[Leaves]]:
            def body(rest: list[Leaves], args: Leaves) -> Any:
                outs, states, _, _ = self.executor.forward(self._given(params, args, consts, rest))
                return self._carried(states), outs

            new, outs = scan(body, _like(flat, rest), args)
            return outs, new

        def roll(params: Leaves, args: Leaves, consts: Leaves, rest: Any, values: Any) -> Any:
            def body(carry: Any, args: Leaves) -> Any:
                rest, values = carry
                outs, new, values, _ = self._advance(params, args, consts, rest, values)
                return (new, values), outs

            (new, values), outs = scan(body, (rest, values), args)
            return outs, new, values

        @jax.custom_vjp
        def window(params: Any, args: Any, consts: Any, rest: Any, values: Any) -> Any:
            return roll(params, args, consts, rest, values)

        def forward(params: Any, args: Any, consts: Any, rest: Any, values: Any) -> Any:
            def differentiable(params: Leaves, args: Leaves, consts: Leaves, flat: Leaves) -> Leaves:
                outs, new = plain(params, args, consts, flat)
                return [*outs, *_flat(new)]

            outs, new, after = roll(params, args, consts, rest, values)
            _, pull = pull_back(differentiable, params, args, consts, _flat(rest))
            first = [a[0] if s else a for a, s in zip(args, stepped, strict=True)]
            local = self._advance(params, first, consts, rest, values)[3]
            kept = (local.inputs, local.weights)
            return (outs, new, after), (pull, values, kept, params, consts)

        def backward(residuals: Any, cotangents: Any) -> Any:
            pull, values, (inputs, weights), params, consts = residuals
            outs, new, _ = cotangents
            dparams, dargs, dconsts, flat = pull([*outs, *_flat(new)])
            carried = [e for e in self.info.entries if not e.is_fixed]
            by_var = dict(zip((v for e in carried for v in e.invars), flat, strict=True))
            signals = self.executor.group_signals([by_var[h.invar] for h in self.info.hidden])
            grads = self.rule.gradient(self.traces, values, signals, Local(inputs, weights, {}, {}))
            dparams = _add(dparams, self.to_parameters(params, consts, grads))
            return dparams, dargs, dconsts, None, None

        window.defvjp(forward, backward)
        return window(params, args, consts, rest, values)  # type: ignore[no-any-return]

    # -- chunks ------------------------------------------------------------------------------------

    def outputs(
        self, params: Leaves, args: Leaves, consts: Leaves, rest: list[Leaves]
    ) -> tuple[Leaves, list[Leaves], dict[int, Any]]:
        """One step forward, and the outputs of the sites that feed a state."""
        outs, states, ys = self.executor.outputs(self._given(params, args, consts, rest))
        return outs, self._carried(states), ys

    def differentiable(
        self,
        params: Leaves,
        args: Leaves,
        consts: Leaves,
        rest: list[Leaves],
        added: Added,
        ys: dict[int, Any],
    ) -> tuple[Leaves, list[Leaves], Local]:
        """One step in its differentiable form, deltas added to its states, and what traces need of it."""
        params_now, args_now, consts_now, rest = jax.lax.stop_gradient((params, args, consts, rest))
        given = self._given(params_now, args_now, consts_now, rest)
        _, _, env, operands = self.executor.forward(given, ys)
        local = self.executor.local(env, operands)
        given = self._given(params, args, consts, rest)
        outs, states = self.executor.signals(given, added, ys)
        return outs, self._carried(states), local

    def as_signals(self, deltas: Leaves, old_deltas: Leaves) -> tuple[Signals, Signals | None]:
        """Derivatives of what was added to the states, by group."""
        old = self.executor.group_signals(old_deltas) if self.executor.reads_old_states else None
        return self.executor.group_signals(deltas), old

    def chunk(
        self,
        params: Leaves,
        consts: Leaves,
        values: Values,
        total: Gradients,
        arrays: Any,
        signals: tuple[Signals, Signals | None],
        *,
        fresh: bool,
        keep: bool,
    ) -> tuple[Values, Gradients]:
        """The traces after recorded steps, and the gradients of effective weights, added to `total`."""
        inputs, D, J = arrays
        weights = self.executor.weights(self._known_params(params, consts))
        record = Record(Local(inputs, weights, D, J), *signals)
        if hasattr(self.rule, "chunk"):
            values, grads = self.rule.chunk(self.traces, values, record, total, fresh=fresh, keep=keep)
        else:
            values, grads = step_by_step(self.rule, self.traces, values, record)
            grads = add_all(total, grads)
        for trace in self.traces:
            if not trace.positions.complete:
                key = (trace.relation.site.index, trace.name)
                g = states(signals[0][trace.group.index], 1)
                twice = over_time(trace, record, weights[key[0]][key[1]], g)
                grads[key] = grads[key] - twice.astype(grads[key].dtype)
        return values, grads

    def no_gradients(self, params: Leaves, consts: Leaves) -> Gradients:
        """Zeros to add the gradients of effective weights to."""
        weights = self.executor.weights(self._known_params(params, consts))
        result = {}
        for t in self.traces:
            key = (t.relation.site.index, t.name)
            weight = weights[key[0]][key[1]]
            result[key] = jnp.zeros(t.layout.view_w(weight).shape, np.promote_types(weight.dtype, np.float32))
        return result

    def consts_of_weights(self, consts: Leaves) -> Leaves:
        """Those constants of the model, and numbers in it, that its effective weights are made of."""
        program = self.info.program
        weights = [w for t in self.traces for w in t.relation.site.weights.values()]
        atoms = [*weights, *(a for node in needed(program, weights) for a in node.inputs)]
        numbers = [a.val for a in atoms if isinstance(a, Literal)]
        made_of = self.executor.made_of
        return [*(c for v, c in zip(program.consts, consts, strict=True) if v in made_of), *numbers]

    def _known_params(self, params: Leaves, consts: Leaves) -> dict[Any, Any]:
        known = dict(zip((v for e in self.info.fixed for v in e.invars), params, strict=True))
        known.update(zip(self.info.program.consts, consts, strict=True))
        return known

    def by_path(self, leaves: Leaves) -> dict[Any, Any]:
        """The leaves of the parameters as the trees that users know, by path."""
        items = iter(leaves)
        trees = zip(self.info.entries, self.info.state_trees, strict=True)
        return {
            e.path: jax.tree.unflatten(tree, [next(items) for _ in e.invars])
            for e, tree in trees
            if e.is_fixed
        }

    def record_bytes(self) -> int:
        """About how many bytes a step of a chunk takes: what it computes, and what traces need of it."""
        program = self.info.program
        moving = {*self.info.arg_invars, *(v for e in self.info.entries if not e.is_fixed for v in e.invars)}
        for node in program.nodes:
            if any(a in moving for a in node.inputs if isinstance(a, Var)):
                moving.update(node.outputs)
        computed = sum(_bytes(v.aval) for v in moving if v not in program.inputs)
        needed = 0  # it is kept, propagated through time, and laid out for one product
        for local in self.executor.groups:
            each = local.group.num_state * _bytes(local.group.hidden_outvars[0].aval)
            needed += each * max(local.group.num_state, local.num_pulled)
        for relation in self.executor.graph.hidden_param_op_relations:
            site = relation.site
            needed += sum(_bytes(a.aval) for a in site.inputs[: site.num_inputs])
            for group, at in zip(relation.hidden_groups, relation.position_maps, strict=True):
                needed += group.num_state * at.map.size * site.output.aval.dtype.itemsize
        return int(computed + 3 * needed)

    def _counted_twice(self, signals: Signals, local: Local) -> Gradients:
        """What a trace that leaves paths out says of this step: there the weight is live as well."""
        grads: Gradients = {}
        for trace in self.traces:
            if not trace.positions.complete:
                site = trace.relation.site.index
                inputs, weight = local.inputs[site], local.weights[site][trace.name]
                g = states(signals[trace.group.index], 0)
                dy = trace.to_y(trace.pair(g, local.J[site, trace.group.index]))
                add_to(grads, trace, trace.from_cotangent(trace.factor(inputs), dy, inputs, weight))
        return grads

    def to_parameters(self, params: Leaves, consts: Leaves, grads: Gradients) -> Leaves:
        """Gradients of effective weights carried back to the parameters."""
        shown = {(t.relation.site.index, t.name): t for t in self.traces}

        def weights(params: Leaves) -> Leaves:
            effective = self.executor.weights(self._known_params(params, consts))
            return [effective[site][name] for site, name in shown]

        values, pull = pull_back(weights, params)
        cotangents = [t.unview(grads[k], v) for (k, t), v in zip(shown.items(), values, strict=True)]
        return pull(cotangents)[0]  # type: ignore[no-any-return]


def _flat(lists: list[Leaves]) -> Leaves:
    return [x for xs in lists for x in xs]


def _like(flat: Leaves, lists: list[Leaves]) -> list[Leaves]:
    items = iter(flat)
    return [[next(items) for _ in xs] for xs in lists]


def _add(a: Leaves, b: Leaves) -> Leaves:
    return [y if x is None else x if y is None else x + y for x, y in zip(a, b, strict=True)]


def _bytes(aval: Any) -> int:
    return int(aval.size * aval.dtype.itemsize)
