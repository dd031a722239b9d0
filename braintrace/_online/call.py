"""The call of a learner as a JAX primitive, `call_p`, so that it can be found in the jaxpr of a user's step.

By default it computes the learner's step, and its derivative is the online gradient. The sequence driver
evaluates the jaxpr with another implementation of the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import jax

from .. import _compat, _meshes
from .._compiler.errors import NotSupportedError
from .._meshes import Spec
from .._rules.rule import Values
from .._types import Array, Aval, Leaves, PyTree
from .rule_step import RuleStep

Operands = tuple[Leaves, Leaves, Leaves, list[Leaves], Values]


@dataclass(frozen=True)
class Call:
    """The parameter of `call_p`: the functions of a rule on a model, and the structure of the operands."""

    rule_step: RuleStep
    stepped: tuple[bool, ...] | None  # for a window: which arguments have a leading time axis
    tree: jax.tree_util.PyTreeDef  # structure of (params, args, consts, carried, values)
    maps: tuple[tuple[bool, ...], ...] = ()  # operands that each `vmap` maps, outermost first

    def operands(self, leaves: Leaves) -> Operands:
        """Unflatten the operands: parameters, arguments, constants, carried states and the rule's arrays."""
        return jax.tree.unflatten(self.tree, leaves)  # type: ignore[no-any-return]

    def masked(self, leaves: Leaves, mask: Array) -> Leaves:
        """The operands, with the inputs of the learning signal weighted by the mask of the loss."""
        signal = self.rule_step.rule.signal
        if not signal.takes:
            return leaves
        *others, values = self.operands(leaves)
        return jax.tree.leaves((*others, signal.masked(values, mask)))

    def mapped(self, flags: Sequence[bool]) -> Call:
        """This call under one more `vmap`, over the first axis of the flagged operands."""
        return replace(self, maps=(tuple(flags), *self.maps))

    def __call__(self, *leaves: Array) -> Leaves:
        """Compute the call; for arrays with explicit sharding, the results have the specs of `specs`."""
        found: Leaves = _meshes.in_auto(self._compute, leaves, lambda: self.specs(leaves))
        return found

    def specs(self, leaves: Sequence[Aval]) -> list[Spec | None]:
        """The partition specs of the results, from operands or their types."""
        if self.maps:
            flags, inner = self.maps[0], replace(self, maps=self.maps[1:])
            one = [_meshes.slice_of(a) if f else a for a, f in zip(leaves, flags, strict=True)]
            return [None if s is None else (None, *s) for s in inner.specs(one)]
        params, args, consts, carried, values = self.operands(list(leaves))
        kept = {k: _meshes.spec_of(v) or self.rule_step.arrays.specs.get(k) for k, v in values.items()}
        lead: Spec = () if self.stepped is None else (None,)
        if self.stepped is not None:
            args = [_meshes.slice_of(a) if s else a for a, s in zip(args, self.stepped, strict=True)]

        def step(params: Leaves, args: Leaves, consts: Leaves, carried: list[Leaves]) -> Leaves:
            outs, new, *_ = self.rule_step.executor.forward(params, args, consts, carried)
            return [*outs, *jax.tree.leaves(new)]

        flat, tree = jax.tree.flatten((params, args, consts, carried))
        found = _meshes.typed(lambda *flat: step(*jax.tree.unflatten(tree, flat)), *flat)
        info, executor = self.rule_step.info, self.rule_step.executor
        num = len(info.out_atoms)
        if found is None:
            states = [executor.spec_of_state(v) for v in info.carried_invars]
            known = [*(info.step.specs or [None] * num)[:num], *states]
            new = jax.tree.leaves(carried)
            found = _meshes.by_samples(known, [*(a.aval for a in info.out_atoms), *new], [*args, *new])
        outs: list[Spec | None] = [s if s is None else (*lead, *s) for s in found[:num]]
        return [*outs, *found[num:], *(kept[k] for k in sorted(kept))]

    def _compute(self, *leaves: Array) -> Leaves:
        if self.maps:
            axes = tuple(0 if flag else None for flag in self.maps[0])
            return jax.vmap(replace(self, maps=self.maps[1:]), axes)(*leaves)
        params, args, consts, carried, values = self.operands(list(leaves))
        return jax.tree.leaves(self.rule_step.call(params, args, consts, carried, values, self.stepped))

    def results(self, leaves: Leaves) -> tuple[Leaves, list[Leaves], Values]:
        """Unflatten the results: outputs, carried states and the rule's arrays."""
        _, _, _, carried, values = self.operands([None] * self.tree.num_leaves)
        outs = [0] * len(self.rule_step.info.out_atoms)
        some = jax.tree.structure((outs, *jax.tree.map(lambda _: 0, (carried, values), is_leaf=_is_none)))
        return jax.tree.unflatten(some, leaves)  # type: ignore[no-any-return]


def _is_none(x: object) -> bool:
    return x is None


def refuse_varying(leaves: Leaves) -> None:
    """Raise in a `shard_map` that checks varying axes: the zeros that our loops start from do not vary."""
    if _compat.varies(*leaves):
        raise NotSupportedError(
            "A learner was called inside a `shard_map` whose types say along which axes values vary. Pass "
            "`check_vma=False` to `jax.shard_map`: gradients are then those of each device's own part, to be "
            "added up with `jax.lax.psum`. Or leave `shard_map` out: a learner shards its arrays as "
            "its parameters and inputs are sharded."
        )


def bind(
    rule_step: RuleStep,
    params: Leaves,
    args: Leaves,
    consts: Leaves,
    carried: list[Leaves],
    values: Values,
    stepped: tuple[bool, ...] | None = None,
) -> tuple[Leaves, list[Leaves], Values]:
    """Bind `call_p`; returns the outputs, the carried states and the rule's arrays."""
    leaves, tree = jax.tree.flatten((params, args, consts, carried, values))
    refuse_varying(leaves)
    call = Call(rule_step, stepped, tree)
    return call.results(call_p.bind(*leaves, call=call))


def _types(*avals: Aval, call: Call) -> list[Aval]:
    shapes, mesh = _shapes(*avals, call=call), next(filter(None, map(_compat.explicit_mesh_of, avals)), None)
    if mesh is None:
        return shapes
    return [_meshes.sharded_aval(a, mesh, s) for a, s in zip(shapes, call.specs(avals), strict=True)]


def _shapes(*avals: Aval, call: Call) -> list[Aval]:
    if call.maps:
        flags, inner = call.maps[0], replace(call, maps=call.maps[1:])
        size = next(a.shape[0] for a, flag in zip(avals, flags, strict=True) if flag)
        one = [
            jax.core.ShapedArray(a.shape[1:], a.dtype) if flag else a
            for a, flag in zip(avals, flags, strict=True)
        ]
        return [jax.core.ShapedArray((size, *a.shape), a.dtype) for a in _shapes(*one, call=inner)]
    _, args, _, carried, values = call.operands(list(avals))
    stepped = call.stepped
    lead = () if stepped is None else next(a.shape[:1] for a, s in zip(args, stepped, strict=True) if s)
    outs = [(*lead, *a.aval.shape) for a in call.rule_step.info.out_atoms]
    types = [a.aval.dtype for a in call.rule_step.info.out_atoms]
    shaped = [jax.core.ShapedArray(s, t) for s, t in zip(outs, types, strict=True)]
    return [*shaped, *(jax.core.ShapedArray(a.shape, a.dtype) for a in jax.tree.leaves((carried, values)))]


def _refuse_forward_mode(*args: PyTree, **kwargs: PyTree) -> NoReturn:
    raise NotSupportedError(
        "A learner's step has no forward-mode derivative (`jax.jvp`, `jax.jacfwd`, `jax.linearize`): its "
        "derivative is the online gradient, which is defined by its pull-back. Use `jax.grad` or `jax.vjp`; "
        "for a forward-mode derivative of one step, differentiate the step function itself."
    )


call_p = _compat.call_primitive("online_step", _types, _refuse_forward_mode)
