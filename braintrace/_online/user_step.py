"""The user's step, `step_fn`, as a traced program in which the call of the learner is one equation.

The step is traced once. Each evaluation of the program chooses what the call does: it computes the new states
only, or in differentiable form, or as a step of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp

from .. import _compat, _meshes
from .._compiler.dataflow import Flow, solve
from .._compiler.evaluation import read
from .._compiler.program import Atom, Node, Program, Var, read_program
from .._compiler.slices import behind, dependents, needed
from .._rules.rule import Values
from .._types import Array, Leaves, PyTree
from .call import Call, call_p
from .rule_step import RuleStep

AtCall = Callable[[Call, Leaves], Leaves]


def as_it_is(call: Call, operands: Leaves) -> Leaves:
    """Bind the call unchanged: its derivative is the online gradient."""
    return call_p.bind(*operands, call=call)  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class UserStep:
    """A traced step: (slices of the sequences, leaves of states) -> (loss, other outputs, new leaves)."""

    program: Program
    num_slices: int
    names: tuple[str, ...]  # of the leaves
    traces: dict[str, int]  # the index of the leaf of each of the rule's arrays, by name
    # the index of each of the model's carried leaves; None if the step does not use it
    carried: tuple[int | None, ...]
    has_effects: bool
    closed: _compat.ClosedJaxpr  # the jaxpr of the step

    @staticmethod
    def read(
        closed: _compat.ClosedJaxpr,
        names: Sequence[str],
        traces: dict[str, int],
        carried: Sequence[int | None],
    ) -> UserStep:
        """The program of a jaxpr `(slices, leaves) -> (loss and other outputs, new leaves)`."""
        closed = _meshes.without_types(closed)
        program = read_program(closed, marks=False)
        num, effects = len(program.inputs) - len(names), bool(closed.effects)
        return UserStep(program, num, tuple(names), traces, tuple(carried), effects, closed)

    @property
    def slices(self) -> tuple[Var, ...]:
        return self.program.inputs[: self.num_slices]

    @property
    def leaves(self) -> tuple[Var, ...]:
        return self.program.inputs[self.num_slices :]

    @property
    def outs(self) -> tuple[Atom, ...]:
        """The loss, and the other outputs of the step."""
        return self.program.outputs[: len(self.program.outputs) - len(self.names)]

    @property
    def new(self) -> tuple[Atom, ...]:
        """The leaves after the step."""
        return self.program.outputs[len(self.program.outputs) - len(self.names) :]

    @cached_property
    def moving(self) -> list[int]:
        """The indices of the leaves that a step changes."""
        return [i for i, (old, new) in enumerate(zip(self.leaves, self.new, strict=True)) if old is not new]

    def traces_in(self, leaves: Leaves) -> Values:
        """The rule's arrays among all leaves, by name."""
        return {k: leaves[i] for k, i in self.traces.items()}

    def with_traces(self, leaves: Leaves, values: Values) -> Leaves:
        """All leaves, with new values of the rule's arrays."""
        by_leaf = {i: values[k] for k, i in self.traces.items()}
        return [by_leaf.get(i, a) for i, a in enumerate(leaves)]

    @cached_property
    def calls(self) -> list[Node]:
        """The calls of the learner, including those inside control flow."""
        return [node for node in self.program.walk() if node.primitive is call_p]

    @cached_property
    def node(self) -> Node | None:
        """The call of the learner, if it is the only one, of one step, and not in control flow or `vmap`."""
        if len(self.calls) != 1 or self.calls[0] not in self.program.nodes:
            return None
        call = self.calls[0].params["call"]
        return self.calls[0] if call.stepped is None and not call.maps else None

    @property
    def call(self) -> Call:
        assert self.node is not None
        return self.node.params["call"]  # type: ignore[no-any-return]

    @property
    def rule_step(self) -> RuleStep:
        return self.call.rule_step

    @cached_property
    def is_complex(self) -> bool:
        """Whether any value of the step is complex."""
        programs = [self.program, *(n.params["call"].rule_step.info.program for n in self.calls)]
        inputs = [v for p in programs for v in p.inputs]
        values = [*inputs, *(v for p in programs for n in p.walk() for v in n.outputs)]
        return any(jnp.issubdtype(v.aval.dtype, jnp.complexfloating) for v in values)

    @cached_property
    def operands(self) -> tuple[list[Atom], list[Atom], list[Atom], list[list[Atom]], dict[str, Atom]]:
        """The parameters, arguments, constants, carried states and traces that the call takes."""
        assert self.node is not None
        found: PyTree = self.call.operands(list(self.node.inputs))
        return found  # type: ignore[no-any-return]

    @cached_property
    def results(self) -> tuple[list[Atom], list[list[Atom]], dict[str, Atom]]:
        """The outputs, carried states and traces that the call returns."""
        assert self.node is not None
        found: PyTree = self.call.results(list(self.node.outputs))
        return found  # type: ignore[no-any-return]

    @cached_property
    def params(self) -> list[int] | None:
        """The leaf index of each parameter of the model; None if the step computes one of them."""
        number = {v: i for i, v in enumerate(self.leaves) if i not in self.moving}
        found = [number.get(a) if isinstance(a, Var) else None for a in self.operands[0]]
        return None if any(i is None for i in found) else [i for i in found if i is not None]

    @cached_property
    def _varying(self) -> set[Var]:
        """The variables that may differ from step to step."""
        return dependents(self.program, [*self.slices, *(self.leaves[i] for i in self.moving)])

    def why_step_by_step(self) -> str | None:
        """The reason why steps have to run one by one; None if they can run in chunks or windows."""
        if self.node is None:
            return "the learner is not called just once, outside of control flow and transformations"
        if self.has_effects:
            return "a step prints or calls back"
        if self.params is None:
            return "a step changes a parameter"
        _, _, consts, _, values = self.operands
        if any(values[k] is not self.leaves[i] for k, i in self.traces.items()):
            return "a step writes a trace"
        readers = [n for n in self.program.nodes if n is not self.node]
        mine = {self.leaves[i] for i in self.traces.values()}
        _, _, after = self.results
        mine.update(v for v in after.values() if isinstance(v, Var))
        if any(a in mine for a in variables([*(a for n in readers for a in n.inputs), *self.outs])):
            return "a step reads a trace"
        if any(self.new[i] is not after[k] for k, i in self.traces.items()):
            return "a step writes a trace"
        if any(a in self._varying for a in variables(self.rule_step.executor.consts_of_weights(consts))):
            return "a weight may change from step to step"
        return None

    @cached_property
    def hidden(self) -> list[int | None]:
        """The leaf index of each hidden state; None if the step does not use it."""
        at = dict(zip((v for e in self.rule_step.info.carried for v in e.invars), self.carried, strict=True))
        return [at.get(h.leaf) for h in self.rule_step.info.hidden]

    @cached_property
    def _behind_loss(self) -> dict[Var, bool]:
        """The variables that the loss depends on, without paths through the carried states of a call."""

        def transfer(node: Node, given: list[bool | None]) -> list[bool | None] | bool:
            if node.primitive is not call_p:
                return True
            *others, _, _ = node.params["call"].operands(range(len(node.inputs)))
            at = {*jax.tree.leaves(others)}
            return [i in at or None for i in range(len(node.inputs))]

        flow = Flow[bool](transfer, back=True, derivatives=True, enters=True)
        return solve(flow, self.program, [(self.outs[0], True)])[0]

    @cached_property
    def read_otherwise(self) -> set[int]:
        """Indices of the leaves that the loss depends on other than as carried states of a call."""
        return {i for i, v in enumerate(self.leaves) if v in self._behind_loss}

    @property
    def closed_over(self) -> Leaves:
        """The values that the step closes over and that the derivative of its loss depends on."""
        return [value for v, value in self.program.consts.items() if v in self._behind_loss]

    @cached_property
    def read_after(self) -> set[int | None]:
        """Indices of the carried leaves whose values after the call the loss depends on."""
        new = [a for leaves in self.results[1] for a in leaves]
        return {i for i, a in zip(self.carried, new, strict=True) if a in self._behind_loss}

    @cached_property
    def reads_old_states(self) -> bool:
        """Whether the loss depends on a hidden state before the call, on a path that avoids the call."""
        return not self.read_otherwise.isdisjoint(self.hidden)

    @cached_property
    def targets(self) -> list[bool]:
        """For each slice, whether it is a target: no new state depends on it."""
        read = behind(self.program, self.new)
        return [v not in read for v in self.slices]

    def run(
        self,
        consts: Leaves,
        slices: Leaves,
        leaves: Leaves,
        targets: Sequence[Atom],
        at_call: AtCall = as_it_is,
        for_call: Leaves | None = None,
    ) -> Leaves:
        """Evaluate `targets`, and only the equations that they depend on.

        `for_call` are the leaves that the call reads instead of `leaves`.
        """
        env: dict[Var, Array] = dict(zip(self.program.consts, consts, strict=True))
        env.update(zip(self.slices, slices, strict=True))
        seen = {**env, **dict(zip(self.leaves, leaves if for_call is None else for_call, strict=True))}
        env.update(zip(self.leaves, leaves, strict=True))
        # effects (prints, callbacks) run even if no target depends on them
        prints = [v for n in self.program.nodes if n.eqn.effects for v in (*n.inputs, *n.outputs)]
        wanted = {id(n) for n in needed(self.program, [*targets, *prints])}
        for node in self.program.nodes:
            if id(node) not in wanted and not node.eqn.effects:
                continue
            if node is self.node:
                outs = at_call(self.call, [read({**env, **seen}, a) for a in node.inputs])
            else:
                outs = _compat.bind(node.eqn, *(read(env, a) for a in node.inputs))
            env.update(zip(node.outputs, outs, strict=True))
        return [read(env, a) for a in targets]

    @cached_property
    def varying_consts(self) -> list[bool]:
        """For each constant that the model closes over, whether it may differ from step to step."""
        return [isinstance(a, Var) and a in self._varying for a in self.operands[2]]

    def fixed_consts(self, consts: Leaves, leaves: Leaves) -> Leaves:
        """The constants that the model closes over; zeros for those that may differ from step to step."""
        atoms, varies = self.operands[2], self.varying_consts
        kept = [a for a, v in zip(atoms, varies, strict=True) if not v]
        # the others do not depend on the slices, so that zeros will do
        nothing = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in self.slices]
        known = iter(self.run(consts, nothing, leaves, kept))
        pairs = zip(atoms, varies, strict=True)
        return [jnp.zeros(a.aval.shape, a.aval.dtype) if v else next(known) for a, v in pairs]


def variables(atoms: Iterable[Atom]) -> list[Var]:
    return [a for a in atoms if isinstance(a, Var)]
