"""Functions with a derivative rule of their own: what their derivative reaches, which the rule alone decides.

The pull-back of such a function is a program like any other, from the cotangents of its outputs to those of
its inputs. Where a cotangent of an input comes from in it is what the input reaches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp

from .. import _compat
from .program import Node, Program, Var, read_program


@dataclass(frozen=True, eq=False)
class PullBack:
    """The pull-back of one node."""

    program: Program
    cotangents: dict[int, Var]  # of outputs, by number: inputs of the program
    results: dict[int, Any]  # of inputs, by number: outputs of the program

    @staticmethod
    def of(node: Node) -> PullBack | None:
        """Traced once, with the node's shapes; None if it has no reverse mode."""
        if node not in _traced:
            _traced[node] = PullBack._trace(node)
        return _traced[node]

    @staticmethod
    def _trace(node: Node) -> PullBack | None:
        live = [i for i, a in enumerate(node.inputs) if _is_inexact(a)]
        outs = [j for j, v in enumerate(node.outputs) if _is_inexact(v)]

        def pull(given: list[Any], cotangents: list[Any]) -> Any:
            def function(*some: Any) -> list[Any]:
                now = dict(zip(live, some, strict=True))
                found = _compat.bind(node.eqn, *(now.get(i, x) for i, x in enumerate(given)))
                return [found[j] for j in outs]

            return jax.vjp(function, *(given[i] for i in live))[1](cotangents)

        structs = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in node.inputs]
        cotangents = [
            jax.ShapeDtypeStruct(node.outputs[j].aval.shape, node.outputs[j].aval.dtype) for j in outs
        ]
        try:
            program = read_program(jax.make_jaxpr(pull)(structs, cotangents))
        except Exception:  # whatever a user's rule raises that was not made for reverse mode
            return None
        given = program.inputs[len(structs) :]
        return PullBack(
            program,
            dict(zip(outs, given, strict=True)),
            dict(zip(live, program.outputs, strict=True)),
        )

    def sources(self) -> dict[int, set[int]]:
        """The outputs that each input reaches, by number."""
        env: dict[Var, set[int]] = {v: {j} for j, v in self.cotangents.items()}
        for node in self.program.nodes:
            found = set().union(*(env.get(a, set()) for a in node.inputs if isinstance(a, Var)))
            env.update((v, found) for v in node.outputs)
        return {i: env.get(a, set()) if isinstance(a, Var) else set() for i, a in self.results.items()}


def has_own_rule(node: Node) -> bool:
    """Whether it is a `custom_jvp` or `custom_vjp` function."""
    return _compat.called_jaxpr(node.eqn, custom=True) is not None


_traced: WeakKeyDictionary[Node, PullBack | None] = WeakKeyDictionary()


def _is_inexact(atom: Any) -> bool:
    return bool(jnp.issubdtype(atom.aval.dtype, jnp.inexact))
