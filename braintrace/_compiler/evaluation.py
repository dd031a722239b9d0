"""Evaluate a program with a given function at each site: `run` for all of it, `evaluate` for some targets.

    y, site_out = at_site(site, site_in, operands)

Site inputs and outputs are threaded through control flow: a site in a branch that is not taken returns
zeros, a site in a loop returns one entry per iteration, stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from .. import _compat
from .._compat import Literal, primitives
from .._types import Array, PyTree
from .program import Atom, Node, Program, Site, Var

# (site, its input, its operands) -> (the output `y`, what the site returns besides)
AtSite = Callable[[Site, PyTree, list[Array]], tuple[Array, PyTree]]
Outcome = tuple[list[Array], dict[int, PyTree]]  # outputs, and what each site returns, by index
Branch = Callable[[list[Array], Mapping[int, PyTree]], Outcome]


def run(
    program: Program,
    args: Sequence[Array],
    at_site: AtSite,
    site_ins: Mapping[int, PyTree] | None = None,
    consts: Mapping[Var, Array] | None = None,
) -> tuple[list[Array], dict[int, PyTree], dict[Var, Array]]:
    """Evaluate a program; returns its outputs, the site outputs and the value of every variable.

    `consts` replaces the constants that the program was read with.
    """
    env: dict[Var, Array] = {**program.consts, **(consts or {})}
    env.update(zip(program.inputs, args, strict=True))
    site_outs: dict[int, PyTree] = {}
    for node in program.nodes:
        outs, given = apply(node, [read(env, a) for a in node.inputs], at_site, site_ins or {})
        env.update(zip(node.outputs, outs, strict=True))
        site_outs.update(given)
    return [read(env, a) for a in program.outputs], site_outs, env


def read(env: Mapping[Var, Array], atom: Atom) -> Array:
    return atom.val if isinstance(atom, Literal) else env[atom]


def apply(node: Node, vals: list[Array], at_site: AtSite, site_ins: Mapping[int, PyTree]) -> Outcome:
    """Evaluate one node; returns its outputs and the outputs of the sites at or inside it."""
    if node.site is not None:
        y, given = at_site(node.site, site_ins.get(node.site.index), vals)
        return [y], {node.site.index: given}
    if not node.sites:
        return _compat.bind(node.eqn, *vals), {}
    ins = {s.index: site_ins[s.index] for s in node.sites if s.index in site_ins}
    if node.primitive is primitives.cond_p:
        return _apply_cond(node, vals, at_site, ins)
    if node.primitive is primitives.scan_p:
        return scan_with(node, vals, lambda ops, ins: run(node.inner[0], ops, at_site, ins)[:2], ins)
    raise AssertionError(f"`{node.primitive}` holds a site; the compiler refuses such a model")


def _apply_cond(node: Node, vals: list[Array], at_site: AtSite, ins: Mapping[int, PyTree]) -> Outcome:
    index, *operands = vals

    def taken(program: Program) -> Branch:
        return lambda operands, ins: run(program, operands, at_site, ins)[:2]

    shapes: dict[int, PyTree] = {}
    for program in node.inner:
        shapes.update(jax.eval_shape(taken(program), operands, ins)[1])

    def padded(program: Program) -> Branch:
        def branch(operands: list[Array], ins: Mapping[int, PyTree]) -> Outcome:
            outs, given = taken(program)(operands, ins)
            none = {i: shape for i, shape in shapes.items() if i not in given}
            return outs, {**given, **jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), none)}

        return branch

    outs, given = jax.lax.switch(index, [padded(p) for p in node.inner], operands, dict(ins))
    return outs, given


def scan_with(
    node: Node,
    vals: list[Array],
    body: Callable[[list[Array], PyTree], tuple[list[Array], PyTree]],
    more: PyTree = (),
) -> tuple[list[Array], PyTree]:
    """Apply a `scan` with another body: `(operands, slices of more) -> (outputs, further outputs)`."""
    num_consts, num_carry = _compat.scan_counts(node.eqn)
    consts, carry, xs = vals[:num_consts], vals[num_consts:][:num_carry], vals[num_consts + num_carry :]

    def one(carry: list[Array], slices: PyTree) -> tuple[list[Array], PyTree]:
        outs, further = body([*consts, *carry, *slices[0]], slices[1])
        return outs[:num_carry], (outs[num_carry:], further)

    options = {name: node.params[name] for name in ("length", "reverse", "unroll")}
    carry, (ys, further) = jax.lax.scan(one, carry, (xs, more), **options)
    return [*carry, *ys], further


World = Hashable


@dataclass(frozen=True)
class View:
    """How `evaluate` reads a program in which one variable has different values for different readers.

    A *world* names a set of readers; each variable is computed once in every world that needs it.
    """

    # Why worlds: the learning signal is dL/dh with the states of the same group held fixed, because their
    # coupling is in the traces already. So a new state has two values at once: unperturbed for readers in
    # its own group, with a perturbation added for all others. A single value for both would count the
    # coupling inside the group twice.

    known: Mapping[Var, Array]  # values that are the same in every world
    at_site: Callable[[Site, World], AtSite]  # how to evaluate a site in a world
    # the world in which a reader in `world` finds a variable, and what is added to its value (or None)
    reads: Callable[[Var, World], tuple[World, Array | None]] = lambda var, world: (world, None)
    # the world in which a site reads its operands
    operands: Callable[[Site, World], World] = lambda site, world: world
    site_ins: Mapping[int, PyTree] = field(default_factory=dict)
    # the output of a site if it is known, so that its operands are not evaluated
    leaf: Callable[[Site, World], Array | None] = lambda site, world: None
    # applied to the operands of a node before it is evaluated
    before: Callable[[Node, list[Array]], list[Array]] = lambda node, vals: vals


def evaluate(program: Program, targets: Sequence[tuple[Atom, World]], view: View) -> list[Array]:
    """Evaluate `targets`, each in its world, and nothing that they do not depend on."""
    producer = program.producer
    needed: list[dict[World, None]] = [{} for _ in program.nodes]

    def ask(atom: Atom, world: World) -> None:
        if isinstance(atom, Var) and atom not in view.known and atom in producer:
            needed[producer[atom]][view.reads(atom, world)[0]] = None

    for atom, world in targets:
        ask(atom, world)
    for i in reversed(range(len(program.nodes))):
        node = program.nodes[i]
        for world in needed[i]:
            if node.site is None or view.leaf(node.site, world) is None:
                inner = world if node.site is None else view.operands(node.site, world)
                for var in node.reads:
                    ask(var, inner)

    values: dict[tuple[Var, World], Array] = {}

    def get(atom: Atom, world: World) -> Array:
        if isinstance(atom, Literal):
            return atom.val
        home, offset = view.reads(atom, world)
        value = view.known[atom] if atom in view.known else values[atom, home]
        return value if offset is None else value + offset

    for node, worlds in zip(program.nodes, needed, strict=True):
        for world in worlds:
            if node.site is not None and (leaf := view.leaf(node.site, world)) is not None:
                values[node.outputs[0], world] = leaf
                continue
            inner = world if node.site is None else view.operands(node.site, world)
            vals = view.before(node, [get(a, inner) for a in node.inputs])
            at_site = lambda site, *given, world=world: view.at_site(site, world)(site, *given)
            outs, _ = apply(node, vals, at_site, view.site_ins)
            for var, out in zip(node.outputs, outs, strict=True):
                values[var, world] = out
    return [get(atom, world) for atom, world in targets]
