"""Learners with a rule: their gradient is that of `online`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._compiler import ETraceGraph, compile_etrace_graph
from .._compiler.diagnostics import show_path, warn_user
from .._compiler.memory import remembering
from .._executor.own_ops import check_own_ops
from .._executor.traces import find_traces
from .base import ETraceAlgorithm
from .drive import Drive
from .forms import Compiled
from .online import Online
from .progress import unchanged_on_error
from .pure import Pure
from .recording import Recorder, Steps, TakeInTurnError
from .rule import Rule, Values
from .sequence import Sequence, add_trees, even_chunks, over_chunks

VjpMethod = Literal["single-step", "multi-step"]


def memory_budget() -> int:
    """Bytes for the records of a chunk: 1 GiB, or a 32nd of an accelerator's memory where that is more."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return max(2**30, int(stats.get("bytes_limit", 0)) // 32)


class ETraceVjpAlgorithm(ETraceAlgorithm):
    """A learner with a `Rule`, one step at a time or back-propagated through windows of steps."""

    def __init__(
        self,
        model: brainstate.nn.Module,
        rule: Rule,
        *,
        vjp_method: VjpMethod = "single-step",
        name: str | None = None,
    ) -> None:
        super().__init__(model, name=name)
        if vjp_method not in ("single-step", "multi-step"):
            raise ValueError(f"`vjp_method` is 'single-step' or 'multi-step', not {vjp_method!r}.")
        self.rule = rule
        self.vjp_method = vjp_method
        self.memory_budget = memory_budget()
        self._made_of: list[Any] | None = None  # constants in the weights that the traces are of
        self._masked_by: list[Any] | None = None  # the same of states, as far as they could be seen
        self._recorder: Recorder | None = None
        # its shape tells a recorded step from another: what is jitted inside `step_fn` must not mix them up
        self._level: Any = None
        self._recording = brainstate.State(jnp.zeros(1, jnp.int32))

    def _compile(self, args: Any, kwargs: Any) -> ETraceGraph:
        graph = compile_etrace_graph(self.model, *args, **kwargs)
        check_own_ops(find_traces(graph.hidden_param_op_relations))
        return graph

    def _reduced(self, graph: ETraceGraph) -> ETraceGraph:
        alike = getattr(self.rule, "follows_chains", False) and self.vjp_method == "single-step"
        return remembering(graph) if alike else graph

    def _online(self, compiled: Compiled) -> Online:
        return Online(compiled.executor, self.rule)

    def _initial_values(self, compiled: Compiled) -> Values:
        return self._online(compiled).initial_values()

    def _agree(self, old: Compiled, new: Compiled) -> bool:
        traces = [{t.key: t for t in c.executor.traces} for c in (old, new)]
        return (
            super()._agree(old, new)
            and traces[0].keys() == traces[1].keys()
            and all(t.means_the_same_as(traces[1][key]) for key, t in traces[0].items())
        )

    def init_etrace_state(self) -> None:
        super().init_etrace_state()
        self._made_of = self._masked_by = None

    def _compare_weights(self, online: Online, consts: list[Any]) -> None:
        """Warn if a weight is made with another constant than the traces so far, or may be."""
        now = online.consts_of_weights(consts)
        traced = any(map(_compat.is_tracer, now))
        before = now if self._made_of is None else self._made_of
        self._made_of = None if traced else now
        same = len(before) == len(now) and all(map(_is_same, before, now))
        if traced or not same:
            how = "may change" if traced else "has changed"
            _warn_of_change(
                "something that the model closes over", how, "as an argument of the model", self.model
            )

    def _masks(self) -> dict[str, brainstate.State]:
        found = self._by_path()
        return {show_path(e.path): found.get(e.path, e.state) for e in self.executor.masks}

    def _compare_masks(self) -> None:
        """Warn if a state that a weight is made of is not what it was for the traces so far."""
        masks = self._masks()
        now = [leaf for st in masks.values() for leaf in jax.tree.leaves(st.value)]
        if any(map(_compat.is_tracer, now)):
            return  # an input of a compiled function: nobody can see what it was before
        before, self._masked_by = self._masked_by or now, now
        if not (len(before) == len(now) and all(map(_is_same, before, now))):
            names = ", ".join(f"`{name}`" for name in masks)
            _warn_of_change(f"the state {names}", "has changed", "written by the step", self.model)

    def _step(self, compiled: Compiled, args: list[Any], consts: list[Any]) -> list[Any]:
        params, rest = self._read(compiled.graph.module_info)
        online = self._online(compiled)
        self._compare_weights(online, consts)
        self._compare_masks()
        level = self._recording.value
        if self._recorder is not None:
            if level is not self._level:  # of another trace
                raise TakeInTurnError("`step_fn` calls the learner inside a transformation")
            outs, new = self._recorder.record(online, params, args, consts, rest)
            self._write(compiled, new, {}, 1)
            return outs
        outs, new, values = online.step(params, args, consts, rest, self._values())
        self._write(compiled, new, values, 1)
        return outs

    def _window(
        self, compiled: Compiled, args: list[Any], stepped: list[bool], length: int, consts: list[Any]
    ) -> list[Any]:
        if self.vjp_method == "single-step":
            raise ValueError(
                "This learner takes one step at a time (`vjp_method='single-step'`): pass the array of one "
                "step. `MultiStepData` is for `vjp_method='multi-step'`."
            )
        params, rest = self._read(compiled.graph.module_info)
        online = self._online(compiled)
        outs, new, values = online.window(params, args, stepped, consts, rest, self._values())
        self._write(compiled, new, values, length)
        return outs

    # -- sequences ---------------------------------------------------------------------------------

    def _drive(self, drive: Drive) -> tuple[Any, Any]:
        self._refuse_inside()
        self._compare_masks()
        sequence, size, weights = drive.sequence, drive.chunk_size, drive.weights
        turns = getattr(self.rule, "turns", 1)
        if self.vjp_method == "multi-step":
            return drive.in_turn(turns) if size is None else drive.in_windows(size)
        if size == 1 and not (hasattr(self.rule, "fuses") and self.rule.fuses(self._values())):
            return drive.in_turn(turns)
        try:
            steps = self._record(sequence, drive.loss, weights)
        except TakeInTurnError:
            return drive.in_turn(turns)
        self._refuse_unused(steps, weights)
        size = int(min(size or self._best_chunk(sequence.length, sequence.pace), sequence.length))
        fresh = size == sequence.length and self._is_fresh()
        run = partial(self._chunk, steps, weights, fresh, drive.keep or size < sequence.length)
        params, _ = self._read(steps.online.info)
        none = steps.online.no_gradients(params, steps.consts)
        (total, traced), kept = over_chunks(run, (drive.zeros(), none), sequence, size)
        found = steps.online.by_path(steps.online.to_parameters(params, steps.consts, traced))
        paths = {id(e.state): e.path for e in steps.online.info.entries}  # those outside the model, too
        paths |= {id(st): path for path, st in self._by_path().items()}
        mine = {k: found.get(paths.get(id(st), ())) for k, st in weights.items()}
        return {k: v if mine[k] is None else add_trees(v, mine[k]) for k, v in total.items()}, kept

    def _refuse_unused(self, steps: Steps, weights: Any) -> None:
        """A weight that is neither the model's nor read by a step is a mistake, not a gradient of zero."""
        known = [
            *self.param_states.values(),
            *self._by_path().values(),
            *steps.advance.states,
            *steps.step.states,
        ]
        unused = [k for k, st in weights.items() if all(st is not other for other in known)]
        if unused:
            raise ValueError(
                f"`weights` has {', '.join(map(str, unused))}, which the model does not hold and `step_fn` "
                "does not use."
            )

    def _best_chunk(self, length: int, most: int) -> int:
        """As many steps as the memory budget holds records of, in chunks of about one size."""
        each = self._online(self._compiled_now()).record_bytes()
        return even_chunks(length, min(most, self.memory_budget // max(1, each)))

    def _record(self, sequence: Sequence, call: Any, weights: Any) -> Steps:
        """`call(slices)` as pure functions, with its call of the learner recorded.

        `TakeInTurnError` if the steps of a chunk cannot be taken together.
        """

        def run(recorder: Recorder, slices: Any) -> Recorder:
            self._recorder, self._level = recorder, self._recording.value
            try:
                recorder.out = call(slices)
            finally:
                self._recorder = self._level = None
            return recorder.check()

        first = jax.tree.map(lambda a: a[0], sequence.arrays)
        deltas, normal = self._online(self._compiled_now()).executor.zero_deltas(), self._recording.value
        try:
            with unchanged_on_error(list(self.states().values())):
                steps = Steps.trace(run, self._recording, deltas, first)
        finally:
            self._recording.value = normal
        fixed = [*weights.values(), *self.param_states.values(), *self._masks().values()]
        steps.check(fixed, list(self.traces.values()))
        return steps

    def _chunk(
        self, steps: Steps, weights: Any, fresh: bool, keep: bool, totals: Any, arrays: Any, mask: Any
    ) -> tuple[Any, Any]:
        """Record the steps of a chunk, then do all that concerns traces at once."""
        total, traced = totals
        online, consts = steps.online, steps.consts
        grads, deltas, (kept, local), after = steps.at_once(weights, arrays, mask)
        params, _ = self._read(online.info)
        signals = jax.vmap(online.as_signals)(*deltas)
        values, traced = online.chunk(
            params, consts, self._values(), traced, local, signals, fresh=fresh, keep=keep
        )
        steps.advance.assign(after)
        self._store(values)
        return (add_trees(total, grads), traced), kept

    def _refuse_inside(self) -> None:
        """A drive over a sequence inside a step that is being recorded is not one step."""
        if self._recorder is not None:
            raise TakeInTurnError("`step_fn` drives the learner over a sequence")

    def _evolve(self, sequence: Sequence, step: Any) -> Any:
        self._refuse_inside()
        self._compare_masks()

        def in_turn(*arrays: Any) -> Any:
            return ETraceAlgorithm._evolve(self, replace(sequence, arrays=arrays), step)

        def at_once(*arrays: Any) -> Any:
            return self._evolve_at_once(replace(sequence, arrays=arrays), step, fresh)

        if self.vjp_method == "multi-step":
            return in_turn(*sequence.arrays)
        fresh = self._is_fresh()
        try:
            fast = Pure.trace(at_once, *sequence.arrays)
        except TakeInTurnError:
            return in_turn(*sequence.arrays)
        exact = Pure.trace(in_turn, *sequence.arrays)

        def run(pure: Pure, values: Any, arrays: Any) -> Any:
            out, new = pure([values[id(st)] for st in pure.states], *arrays)
            return out, {**values, **dict(zip(map(id, pure.states), new, strict=True))}

        # its derivative, should anyone ask for it, is that of the steps
        evolve = jax.custom_vjp(partial(run, fast))
        evolve.defvjp(lambda *given: jax.vjp(partial(run, exact), *given), lambda pull, given: pull(given))
        values = {
            id(st): v for pure in (exact, fast) for st, v in zip(pure.states, pure.values(), strict=True)
        }
        out, new = evolve(values, sequence.arrays)
        fast.assign([new[id(st)] for st in fast.states])
        return out

    def _evolve_at_once(self, sequence: Sequence, step: Any, fresh: bool) -> Any:
        steps = self._record(sequence, lambda slices: step(*slices), {})
        online = steps.online
        size = self._best_chunk(sequence.length, sequence.length)
        params, _ = self._read(online.info)
        none = online.no_gradients(params, steps.consts)

        def run(carry: Any, arrays: Any, mask: Any) -> Any:
            (out, local), no_deltas, after = steps.without_loss(len(mask), arrays)
            signals = jax.vmap(online.as_signals)(*no_deltas)
            known = fresh and size == sequence.length
            values, _ = online.chunk(
                params, steps.consts, self._values(), none, local, signals, fresh=known, keep=True
            )
            steps.advance.assign(after)
            self._store(values)
            return carry, out

        return over_chunks(run, (), sequence, size)[1]


def _warn_of_change(what: str, how: str, instead: str, model: Any) -> None:
    warn_user(
        f"A weight is made of a parameter and of {what}, which {how} from step to step. A trace is of the "
        "weight as the op sees it and goes back to the parameter with the last value, so that the gradient "
        "is wrong if that changes. Apply it to the input or the output of the op instead of the weight, or "
        f"set the traces back when it changes (`learner.reset_state()`); {instead}, it leaves the weight "
        "without a trace.",
        about=model,
    )


def _is_same(a: Any, b: Any) -> bool:
    return a is b or np.array_equal(a, b)
