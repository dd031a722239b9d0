"""A plain function `step(params, carry, x) -> (carry, y)` over any pytrees, as a `Step`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp

from .. import _meshes
from .._compiler.errors import CompilationError
from .._compiler.step import Path, Role, State, Step
from .._online.arguments import split_static
from .._types import Array, Aval, Leaves, PyTree
from .order import StepFunction, in_order, name_of

Leaf = TypeVar("Leaf")


@dataclass(frozen=True, eq=False)
class Tree:
    """The structure of a pytree: the paths of its arrays, and its static leaves."""

    name: str
    key: tuple[jax.tree_util.PyTreeDef, tuple[object, ...]]  # the structure, and the static leaves
    rebuild: Callable[[Leaves], PyTree]
    paths: list[Path]  # of its arrays
    like: list[Aval]  # the shapes of its arrays, and how they were sharded
    numbers: bool  # whether numbers of Python are arrays; else they are static

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [a.shape for a in self.like]

    @staticmethod
    def of(name: str, tree: PyTree, *, numbers: bool = True) -> Tree:
        data, rebuild, key = split_static((tree,), {}, numbers=numbers)
        whole = jax.tree_util.tree_flatten_with_path(tree)[0]
        kept = [p for (p, _), static in zip(whole, key[1], strict=True) if static is None]
        paths = [(name, *map(_key, _unboxed(p))) for p in kept]
        return Tree(
            name,
            key,
            lambda leaves: rebuild(leaves)[0][0],
            paths,
            list(map(_meshes.shape_of, data)),
            numbers,
        )

    def with_none(self, leaves: Sequence[Array | None]) -> PyTree:
        """A tree of this structure with other arrays, and None for static leaves."""
        items = iter(leaves)
        filled = [next(items) if static is None else None for static in self.key[1]]
        return jax.tree.unflatten(self.key[0], filled)[0][0]

    def leaves(self, tree: PyTree) -> Leaves:
        """The arrays of a tree, which must have this structure."""
        data, _, key = split_static((tree,), {}, numbers=self.numbers)
        if key != self.key:
            raise ValueError(
                f"`{self.name}` has another structure than when the learner was made: it was "
                f"{jax.tree.unflatten(self.key[0], self.key[1])[0][0]} and is "
                f"{jax.tree.unflatten(key[0], key[1])[0][0]} (arrays are shown as None)."
                + ("" if self.numbers else " A number of Python in it is no array, but static.")
            )
        return data

    def same(self, tree: PyTree) -> Leaves:
        """The arrays of a tree, which must have this structure and these shapes; others may broadcast."""
        data = self.leaves(tree)
        for path, a, shape in zip(self.paths, data, self.shapes, strict=True):
            if jnp.shape(a) != shape:
                raise ValueError(
                    f"`{'.'.join(path)}` has the shape {jnp.shape(a)}, and had {shape} when the learner was "
                    "made: make another one for these shapes by `braintrace.online`."
                )
        return data


def _unboxed(path: tuple[object, ...]) -> tuple[object, ...]:
    """The path without the `value` of a Flax variable, which has no other leaf."""
    return path[:-1] if path and getattr(path[-1], "name", None) == "value" else path


def _key(key: object) -> str:
    return str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key))))


@dataclass(frozen=True, eq=False)
class Function:
    """A traced step function, with the structures of its parameters, carry and input."""

    function: StepFunction
    step: Step
    params: Tree
    carry: Tree
    x: Tree
    untraced: tuple[bool, ...]  # of each leaf of the carry: no trace, and not reset with a sample
    param_at: tuple[int, ...]  # position of each leaf of `params` among the leaves of the step's states
    carry_at: tuple[int, ...]  # position of each leaf of `carry` there

    def leaves(self, params: PyTree, carry: PyTree) -> Leaves:
        """The leaves of parameters and carry, in the order of the step's states."""
        return self._in_order(self.params.same(params), self.carry.same(carry))

    def _in_order(self, params: list[Leaf], carry: list[Leaf]) -> list[Leaf]:
        found = dict(zip((*self.param_at, *self.carry_at), (*params, *carry), strict=True))
        return [found[i] for i in range(len(found))]

    def carry_of(self, leaves: Leaves) -> PyTree:
        """The carry among leaves in the order of the step's states."""
        return self.carry.rebuild([leaves[i] for i in self.carry_at])

    @property
    def like(self) -> list[Aval]:
        """The shapes of the leaves of the step's states, and how they were sharded."""
        return self._in_order(self.params.like, self.carry.like)

    def by_parameter(self, gradients: PyTree) -> dict[Path, PyTree]:
        """Gradients, a tree like `params`, as a tree for each parameter, by its path."""
        states = {st.path: st for st in self.step.states}
        paths = [st.path for st in self.step.owners]
        inexact = [i for i, a in zip(self.param_at, self.params.like, strict=True) if _is_inexact(a)]
        at = dict(zip(inexact, jax.tree.leaves(gradients), strict=True))
        found: dict[Path, list[Array | None]] = {}
        for i in self.param_at:
            found.setdefault(paths[i], []).append(at.get(i))
        trees = {path: jax.tree.unflatten(states[path].tree, leaves) for path, leaves in found.items()}
        return {path: tree for path, tree in trees.items() if jax.tree.leaves(tree)}

    @property
    def outputs(self) -> list[Aval]:
        """The shapes of the leaves of `y`."""
        avals = self.step.closed_jaxpr.out_avals[: self.step.out_tree.num_leaves]
        return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]

    def rebuild(self, params: Leaves, carry: Leaves, x: Leaves) -> tuple[PyTree, PyTree, PyTree]:
        return self.params.rebuild(params), self.carry.rebuild(carry), self.x.rebuild(x)


def read_function(
    function: StepFunction,
    params: PyTree,
    carry: PyTree,
    x: PyTree,
    untraced: Callable[[Path], bool] = lambda path: False,
    order: str | None = None,
) -> Function:
    """Trace `function(params, carry, x)`; arrays may be `jax.ShapeDtypeStruct`s.

    Leaves of the carry that are `untraced` are not those of a sample: running statistics, counts, keys.
    """
    ordered = in_order(function, order)
    # a number of Python among the parameters is an option, such as the rate of a dropout
    trees = Tree.of("params", params, numbers=False), Tree.of("carry", carry), Tree.of("x", x)
    given = [t.leaves(v) for t, v in zip(trees, (params, carry, x), strict=True)]
    out_trees: list[jax.tree_util.PyTreeDef] = []

    def flat(x: Leaves, params: Leaves, carry: Leaves) -> Leaves:
        result = ordered(trees[0].rebuild(params), trees[1].rebuild(carry), trees[2].rebuild(x))
        new = _new_carry(trees[1], carry, result[0], function)
        y, tree = jax.tree.flatten(result[1])
        out_trees.append(tree)
        return [*y, *params, *new]

    closed = _meshes.traced(jax.make_jaxpr(flat), given[2], given[0], given[1])
    specs = tuple(map(_meshes.spec_of, closed.out_avals))
    leaf = jax.tree.structure(0)
    states = [
        State(p, Role.PARAMETER if _is_inexact(a) else Role.OTHER, leaf, "parameter")
        for p, a in zip(trees[0].paths, given[0], strict=True)
    ]
    states += [
        State(p, Role.HIDDEN if _is_inexact(a) and not untraced(p) else Role.OTHER, leaf, "carry")
        for p, a in zip(trees[1].paths, given[1], strict=True)
    ]
    step = Step(
        closed_jaxpr=_meshes.without_types(closed),
        specs=specs,
        num_args=len(given[2]),
        out_tree=out_trees[-1],
        states=tuple(states),
        name=name_of(function),
        arg_names=tuple(".".join(p) for p in trees[2].paths),
        model=function if callable(function) and hasattr(function, "__weakref__") else None,
    )
    num, total = len(given[0]), len(states)
    at = tuple(range(num)), tuple(range(num, total))
    return Function(function, step, *trees, tuple(map(untraced, trees[1].paths)), *at)


def _is_inexact(a: Array) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(a), jnp.inexact))


def _new_carry(tree: Tree, old: Leaves, carry: PyTree, function: StepFunction) -> Leaves:
    """The leaves of the carry that a step returned, after a check of its structure, shapes and types."""
    try:
        new = [jnp.asarray(a) for a in tree.leaves(carry)]
    except ValueError as e:
        raise CompilationError(
            f"{name_of(function)} returns a carry of another structure than it is given. {e}"
        ) from None
    for path, a, b in zip(tree.paths, old, new, strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise CompilationError(
                f"`{'.'.join(path)}` is {a.dtype}{list(a.shape)} before a step and {b.dtype}{list(b.shape)} "
                "after it: there could be no second step. Begin with a carry of the shape (with samples in "
                "front, if `x` has them) and type that the step returns, or cast it there (`astype`)."
            )
    return new
