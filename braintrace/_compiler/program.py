"""A flat program read from the jaxpr of a step, with its sites.

`jit`, `checkpoint` and plain calls are inlined; `cond`, `scan` and `while` keep their bodies as inner
programs. A *site* is one application of a marked operation.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._compat import Jaxpr, JaxprEqn, Literal, Primitive, primitives
from .._ops.axis_labels import Layout
from .._ops.primitive import ETPPrimitive
from .._types import Array, Aval, DTypeLike, Options
from .primitives import FLAT


class Var:
    """A variable of the program: shape and type, and its number in program order."""

    __slots__ = ("aval", "index", "inexact")

    def __init__(self, aval: Aval, index: int) -> None:
        self.aval = aval
        self.index = index
        self.inexact = is_inexact(self)

    def __repr__(self) -> str:
        return f"v{self.index}:{self.aval.str_short()}"


Atom = Var | Literal


def is_inexact(atom: Atom) -> bool:
    """Whether the type is floating or complex, so that a derivative exists."""
    return _is_inexact(getattr(atom.aval, "dtype", np.bool_))  # a token has no type


def is_complex(atom: Atom) -> bool:
    return bool(jnp.issubdtype(atom.aval.dtype, jnp.complexfloating))


def struct(atom: Atom) -> jax.ShapeDtypeStruct:
    """The shape and type of a value, as JAX's tracing functions take them."""
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def zeros(atom: Atom) -> jax.Array:
    """Zeros of the shape and type of a value."""
    return jnp.zeros(atom.aval.shape, atom.aval.dtype)


@cache
def _is_inexact(dtype: DTypeLike) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


@dataclass(frozen=True, eq=False)
class Loop:
    """The order of a loop's operands: `before` (read by the condition only), constants, carry, then slices.

    Each iteration takes one slice of the remaining operands. The outputs are the carry, then slices.
    """

    body: Program
    length: int | None  # None for a `while`
    before: int
    consts: int
    carry: int


@dataclass(eq=False)
class Node:
    """One equation, with the programs inside it if it is control flow."""

    eqn: JaxprEqn
    inputs: tuple[Atom, ...]
    outputs: tuple[Var, ...]
    loops: tuple[int, ...] = ()  # the length of each enclosing `scan`, outermost first
    inner: tuple[Program, ...] = ()
    site: Site | None = None
    callers: tuple[JaxprEqn, ...] = ()  # the enclosing calls and control flow, outermost first

    def __repr__(self) -> str:
        return f"<Node {self.primitive}: {[*self.inputs]} -> {[*self.outputs]}>"

    @property
    def primitive(self) -> Primitive:
        return self.eqn.primitive

    @property
    def params(self) -> Options:
        return self.eqn.params

    @property
    def reads(self) -> list[Var]:
        """The variables among its inputs."""
        return [a for a in self.inputs if isinstance(a, Var)]

    @property
    def zeros(self) -> list[Literal]:
        """The literal zeros that it multiplies by."""
        ins = self.inputs if self.primitive is primitives.mul_p else ()
        return [a for a in ins if isinstance(a, Literal) and np.ndim(a.val) == 0 and a.val == 0]

    @property
    def is_flat(self) -> bool:
        """Whether its derivative is zero or undefined."""
        return self.primitive in FLAT or bool(self.zeros)

    @property
    def sites(self) -> list[Site]:
        """The sites at or inside this node."""
        return [self.site] if self.site else [site for program in self.inner for site in program.sites]

    @property
    def loop(self) -> Loop | None:
        """The order of its operands, if it is a loop."""
        if self.primitive is primitives.scan_p:
            return Loop(self.inner[0], self.params["length"], 0, *_compat.scan_counts(self.eqn))
        if self.primitive is primitives.while_p:
            return Loop(self.inner[1], None, *_compat.while_counts(self.eqn), len(self.outputs))
        return None

    def walk(self) -> Iterator[Node]:
        """The node and all nodes inside it."""
        yield self
        for program in self.inner:
            yield from program.walk()

    @property
    def source(self) -> str:
        # an equation inside a JAX function has no user line, but the call of that function has
        eqns = (self.eqn, *reversed(self.callers))
        lines = (line(eqn) for line in (_compat.source_line, _compat.library_line) for eqn in eqns)
        return next(filter(None, lines), "")


@dataclass(eq=False)
class Site:
    """One application of a marked operation."""

    index: int
    primitive: ETPPrimitive
    params: Options
    inputs: tuple[Atom, ...]
    output: Var
    source: str
    loops: tuple[int, ...]  # the length of each enclosing `scan`, outermost first
    context: tuple[str, ...]  # the enclosing control flow, outermost first

    @property
    def weight_names(self) -> tuple[str, ...]:
        return self.params["names"]  # type: ignore[no-any-return]

    @property
    def found(self) -> bool:
        """Whether the compiler set the mark, not the model's author."""
        return bool(self.params.get("found"))

    @property
    def num_inputs(self) -> int:
        """The number of operands that are not weights; these come first."""
        return len(self.inputs) - len(self.weight_names)

    @property
    def weights(self) -> dict[str, Atom]:
        return dict(zip(self.weight_names, self.inputs[self.num_inputs :], strict=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `y`, with an axis in front for each enclosing loop."""
        return (*self.loops, *self.output.aval.shape)

    @property
    def no_inputs(self) -> list[jax.Array]:
        """Zeros in place of the operands that are not weights."""
        avals = [a.aval for a in self.inputs[: self.num_inputs]]
        return [jnp.zeros((*self.loops, *a.shape), a.dtype) for a in avals]

    def made_from(self, learned: Container[str]) -> tuple[str, ...]:
        """The weights that effective weights are made from: `learned` ones, or all if the op merges them."""
        return tuple(n for n in self.weight_names if self.primitive.merges or n in learned)

    def layouts(
        self, varying: Sequence[str] = (), learned: Container[str] | None = None
    ) -> dict[str, Layout]:
        """The trace layout of each effective weight computed from `learned` weights (by default, any weight).

        Each enclosing loop adds an axis to the output, and to the weights in `varying`.
        """
        n, names = self.num_inputs, self.weight_names
        loop = (*[True] * n, *[name in varying for name in names])
        params = {**self.params, "levels": (loop,) * len(self.loops) + self.params["levels"]}
        avals = [struct(a) for a in self.weights.values()]
        effective = jax.eval_shape(lambda *w: self.primitive.effective(w, self.params), *avals)
        kept = [n for n in effective if learned is None or self.primitive.merges or n in learned]
        return self.primitive.layouts(params, kept, len(self.shape))


@dataclass(eq=False)
class Program:
    """A flat list of nodes in an order in which they can be evaluated."""

    inputs: tuple[Var, ...]
    outputs: tuple[Atom, ...]
    nodes: list[Node]
    consts: dict[Var, Array]
    sites: list[Site] = field(default_factory=list)
    # custom_jvp/custom_vjp functions that hold a site: they are inlined, so that their rule is not used
    opened: list[Node] = field(default_factory=list)
    # constants and literals whose values an analysis has used (indices, sizes of shifts): the result holds
    # for these values only
    read: list[Atom] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<Program: {len(self.nodes)} operations, {len(self.sites)} marked>"

    def walk(self) -> Iterator[Node]:
        """All nodes, including those inside other nodes."""
        return (inner for node in self.nodes for inner in node.walk())

    @cached_property
    def producer(self) -> dict[Var, int]:
        """The index of the node that computes each variable."""
        return {v: i for i, node in enumerate(self.nodes) for v in node.outputs}

    def maker(self, atom: Atom) -> Node | None:
        """The node that computes a variable; None for inputs and constants."""
        number = self.producer.get(atom) if isinstance(atom, Var) else None
        return None if number is None else self.nodes[number]

    @cached_property
    def readers(self) -> dict[Var, list[int]]:
        """The indices of the nodes that read each variable."""
        found: dict[Var, list[int]] = {}
        for i, node in enumerate(self.nodes):
            for var in node.reads:
                found.setdefault(var, []).append(i)
        return found

    @cached_property
    def holder(self) -> dict[int, int]:
        """The index of the top-level node that is or contains each site."""
        return {s.index: i for i, node in enumerate(self.nodes) for s in node.sites}


_CONTROL_FLOW = {primitives.cond_p: "cond", primitives.scan_p: "scan", primitives.while_p: "while"}


class UnreadableSite(Exception):
    """Raised for a marked op inside a primitive that cannot be inlined or entered."""

    def __init__(self, program: Program, node: Node, op: Primitive) -> None:
        super().__init__(program, node, op)
        self.program, self.node, self.op = program, node, op


def read_program(closed: _compat.ClosedJaxpr, *, marks: bool = True) -> Program:
    """Read the program of a closed jaxpr; with `marks=False`, marked operations are ordinary nodes.

    Dead code is removed, because no gradient passes through it.
    """
    return _Reader(marks).program(*_compat.parts(closed))


class _Reader:
    """Reads jaxprs; numbers variables and sites anew for each call, because calls may share a jaxpr."""

    def __init__(self, marks: bool) -> None:
        self.marks = marks
        self.num_vars = 0
        self.sites: list[Site] = []
        self.holds: dict[Jaxpr, bool] = {}
        self.callers: tuple[JaxprEqn, ...] = ()
        self.loops: tuple[int, ...] = ()
        self.context: tuple[str, ...] = ()
        self.opened: list[Node] = []

    def is_site(self, eqn: JaxprEqn) -> bool:
        """Whether it is a marked op that has output elements (`associative_scan` makes ops without)."""
        shape = getattr(eqn.outvars[0].aval, "shape", ()) if eqn.outvars else ()
        return self.marks and isinstance(eqn.primitive, ETPPrimitive) and 0 not in shape

    def var(self, aval: Aval) -> Var:
        self.num_vars += 1
        return Var(aval, self.num_vars - 1)

    def program(self, jaxpr: Jaxpr, consts: Sequence[Array]) -> Program:
        first, first_opened = len(self.sites), len(self.opened)
        program = Program(tuple(self.var(v.aval) for v in jaxpr.invars), (), [], {})
        program.outputs = tuple(self.inline(program, jaxpr, consts, program.inputs))
        program.sites, program.opened = self.sites[first:], self.opened[first_opened:]
        return program

    def inline(
        self, program: Program, jaxpr: Jaxpr, consts: Sequence[Array], args: Sequence[Atom]
    ) -> list[Atom]:
        env: dict[object, Atom] = dict(zip(jaxpr.invars, args, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            env[var] = const = self.var(var.aval)
            program.consts[const] = value

        def read(atom: object) -> Atom:
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in _compat.live_equations(jaxpr):
            inputs = tuple(read(a) for a in eqn.invars)
            call = _compat.called_jaxpr(eqn)
            custom = _compat.called_jaxpr(eqn, custom=True)
            if call is None and custom is not None and self.holds_site(custom[0]):
                call = custom
                self.opened.append(Node(eqn, inputs, (), callers=self.callers))
            if call is None and eqn.primitive is primitives.scan_p and eqn.params["length"] == 1:
                call = self.applied_once(eqn)  # no loop
            if call is not None:
                with self.inside(eqn):
                    outs = self.inline(program, *call, inputs)
                env.update(zip(eqn.outvars, outs, strict=True))
                continue
            outputs = tuple(self.var(v.aval) for v in eqn.outvars)
            env.update(zip(eqn.outvars, outputs, strict=True))
            node = Node(eqn, inputs, outputs, self.loops, callers=self.callers)
            if self.is_site(eqn):
                assert isinstance(eqn.primitive, ETPPrimitive)
                node.site = Site(
                    index=len(self.sites),
                    primitive=eqn.primitive,
                    params=eqn.params,
                    inputs=inputs,
                    output=outputs[0],
                    source=node.source,
                    loops=self.loops,
                    context=self.context,
                )
                self.sites.append(node.site)
            elif custom is not None:
                with self.inside(eqn):
                    node.inner = (self.program(*custom),)
            elif eqn.primitive in _CONTROL_FLOW:
                with self.inside(eqn, control_flow=True):
                    node.inner = tuple(self.program(*inner) for inner in _compat.inner_jaxprs(eqn))
            else:
                self.refuse_sites(program, node)
            program.nodes.append(node)
            program.read += node.zeros
        return [read(a) for a in jaxpr.outvars]

    def applied_once(self, eqn: JaxprEqn) -> _compat.Body:
        """The body of a `scan` of length one, as a jaxpr of the operands of the `scan`."""
        num_consts, num_carry = _compat.scan_counts(eqn)

        def once(*args: Array) -> list[Array]:
            xs = [jax.lax.squeeze(x, [0]) for x in args[num_consts + num_carry :]]
            ((body, consts),) = _compat.inner_jaxprs(eqn)
            outs = jax.core.eval_jaxpr(body, consts, *args[: num_consts + num_carry], *xs)
            return [*outs[:num_carry], *(jax.lax.expand_dims(y, [0]) for y in outs[num_carry:])]

        return _compat.parts(jax.make_jaxpr(once)(*(a.aval for a in eqn.invars)))

    @contextmanager
    def inside(self, eqn: JaxprEqn, *, control_flow: bool = False) -> Iterator[None]:
        before = self.callers, self.loops, self.context
        self.callers = (*self.callers, eqn)
        if control_flow:
            self.context = (*self.context, _CONTROL_FLOW[eqn.primitive])
        if control_flow and eqn.primitive is primitives.scan_p:
            self.loops = (*self.loops, eqn.params["length"])
        yield
        self.callers, self.loops, self.context = before

    def refuse_sites(self, program: Program, node: Node) -> None:
        found = [eqn for jaxpr in _compat.all_jaxprs(node.eqn) for eqn in self.site_eqns(jaxpr)]
        if found:
            raise UnreadableSite(program, node, found[0].primitive)

    def site_eqns(self, jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
        for eqn in jaxpr.eqns:
            if self.is_site(eqn):
                yield eqn
            for inner in _compat.all_jaxprs(eqn):
                yield from self.site_eqns(inner)

    def holds_site(self, jaxpr: Jaxpr) -> bool:
        if jaxpr not in self.holds:
            self.holds[jaxpr] = any(
                self.is_site(eqn) or any(map(self.holds_site, _compat.all_jaxprs(eqn))) for eqn in jaxpr.eqns
            )
        return self.holds[jaxpr]
