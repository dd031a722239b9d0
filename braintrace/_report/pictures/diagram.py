"""The boxes of a picture and the edges between them, read from the program.

For every value of the program, the set of boxes that it depends on is propagated. A site, a group or a plain
use of a parameter gets an edge from each of them, and replaces them in the set of its output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import jax.numpy as jnp

from ..._compat import Literal as JaxLiteral
from ..._compiler.findings import Use
from ..._compiler.groups import HiddenGroup
from ..._compiler.module_info import ModuleInfo
from ..._compiler.program import Atom, Node, Program, Site, Var
from ..._compiler.provenance import goals
from ..._compiler.relation import HiddenParamOpRelation
from ..._compiler.states_with_memory import remembered
from ..._compiler.step import Path, show_path
from ..._types import Aval
from .sizes import Sizes, trace_sizes

if TYPE_CHECKING:
    from ..report import CompilationReport

Kind = Literal["input", "site", "plain", "state", "group", "output"]


@dataclass(eq=False)
class Box:
    """A box of the picture: an input, an operation, a hidden group, a state or an output."""

    key: str
    kind: Kind
    order: int  # in the program
    label: str = ""
    shape: str = ""
    params: dict[Path, list[Aval]] = field(default_factory=dict)  # and the types of their leaves
    site: Site | None = None
    relation: HiddenParamOpRelation | None = None
    group: HiddenGroup | None = None
    sizes: Sizes | None = None
    remembered: HiddenGroup | None = None  # the part of the group that has traces
    online: bool = False  # whether its parameters are learned online
    how: str = ""  # how they are learned

    @property
    def op(self) -> str:
        return op_name(self.site) if self.site is not None else self.label


@dataclass(frozen=True)
class Edge:
    """A value that one box computes and another reads; `past` if it is the state of the previous step."""

    source: str
    target: str
    past: bool = False
    dropped: bool = False  # traces do not follow all of its influence


@dataclass(frozen=True, eq=False)
class Diagram:
    """The boxes, in program order, and the edges between them."""

    boxes: dict[str, Box]
    edges: list[Edge]

    def of(self, kind: Kind) -> list[Box]:
        return [b for b in self.boxes.values() if b.kind == kind]


def op_name(site: Site) -> str:
    """Return the name of a site's operation, as users call it."""
    return site.primitive.name.removeprefix("etp_")


def marked_by(site: Site) -> str:
    """Return whether an operation was found or marked by hand."""
    return "found" if site.found else "marked by hand"


def show_aval(aval: Aval) -> str:
    """Return a type as in a jaxpr: `f32[16,32]`."""
    return str(aval.str_short(short_dtypes=True))


def show_avals(avals: Iterable[Aval]) -> str:
    return ", ".join(map(show_aval, avals))


def read_diagram(report: CompilationReport) -> Diagram:
    """Read the diagram of one step from a compiled graph."""
    reader = _Reader(report)
    reader.read()
    for box in reader.boxes.values():
        ranked = any(p in report.ranked_weights for p in box.params)
        box.online = box.relation is not None or ranked
        box.how = "learned online" if box.online else f"gradient within the {report.span} only"
        if box.relation is None and ranked:
            box.how += f", {report.kept}"
    return Diagram(reader.boxes, reader.edges())


class _Reader:
    """Propagates dependencies through the program; `bits` is a set of boxes, old states and parameters."""

    def __init__(self, report: CompilationReport) -> None:
        self.report, self.graph, self.info = report, report.graph, report.graph.module_info
        graph = self.graph
        self.tokens: dict[tuple[str, str], int] = {}
        self.boxes: dict[str, Box] = {}
        self.into: dict[str, int] = {}
        self.env: dict[Var, int] = {}
        self.plain: dict[int, Box] = {}  # by the node that made it
        self.relations = {r.site.index: r for r in graph.hidden_param_op_relations}
        self.remembered, self.sizes = remembered(graph), trace_sizes(graph)
        self.param_bits = 0
        hidden = [h for g in graph.hidden_groups for h in g.hidden]
        number = {h.outvar: i for i, h in enumerate(hidden)}
        self.goals, _ = goals(
            self.info.program, number, [g.index for g in graph.hidden_groups for _ in g.hidden]
        )
        self.new_state = {h.outvar: g for g in graph.hidden_groups for h in g.hidden}

    def token(self, kind: str, key: str) -> int:
        return self.tokens.setdefault((kind, key), 1 << len(self.tokens))

    def add(self, box: Box, bits: int = 0) -> int:
        if box.key not in self.boxes:
            self.boxes[box.key] = box
        self.into[box.key] = self.into.get(box.key, 0) | bits
        return self.token("box", box.key)

    def read(self) -> None:
        info = self.info
        for i, (var, name) in enumerate(zip(info.arg_invars, _input_names(info), strict=True)):
            self.env[var] = self.add(Box(f"input:{i}", "input", i, name, show_aval(var.aval)))
        pairs = [
            (h, self.token("old", f"group:{g.index}")) for g in self.graph.hidden_groups for h in g.hidden
        ]
        self.old = {v: token for h, token in pairs for v in (h.leaf, h.invar)}
        self.entries = {show_path(e.path): e for e in info.entries}
        for entry in info.entries:
            name = show_path(entry.path)
            for var in entry.invars:
                if entry.is_param:
                    self.env[var] = self.token("param", name)
                    self.param_bits |= self.env[var]
                elif var in self.old:
                    self.env[var] = self.old[var]
                elif entry.written and jnp.issubdtype(var.aval.dtype, jnp.inexact):
                    self.env[var] = self.token("old", f"state:{name}")
        self.walk(info.program, None)
        for entry in info.entries:
            name = show_path(entry.path)
            if ("old", f"state:{name}") in self.tokens:
                bits = self.union(entry.outvars)
                box = Box(f"state:{name}", "state", 1 << 30, name, show_aval(entry.invars[0].aval))
                self.add(box, bits & ~self.param_bits)
        outs = [a for a in info.out_atoms if isinstance(a, Var)]
        for i, atom in enumerate(outs):
            label = "output" if len(outs) == 1 else f"output {i}"
            self.add(Box(f"output:{i}", "output", 1 << 30, label, show_aval(atom.aval)), self.data([atom]))

    def union(self, atoms: Iterable[Atom]) -> int:
        bits = 0
        for atom in atoms:
            bits |= 0 if isinstance(atom, JaxLiteral) else self.env.get(atom, 0)
        return bits

    def data(self, atoms: Iterable[Atom]) -> int:
        """Return the dependencies of atoms; a parameter that no operation has used becomes a box."""
        bits = self.union(atoms)
        for name in self.names(bits):
            box = Box(f"plain:{name}", "plain", len(self.boxes))
            bits |= self.add(self.with_param(box, name))
        return bits & ~self.param_bits

    def names(self, bits: int) -> list[str]:
        return [name for (kind, name), bit in self.tokens.items() if kind == "param" and bits & bit]

    def with_param(self, box: Box, name: str) -> Box:
        entry = self.entries[name]
        box.params[entry.path] = [v.aval for v in entry.invars]
        return box

    def walk(self, program: Program, outer: Node | None) -> None:
        for node in program.nodes:
            if node.site is not None:
                bits = self.at_site(node.site)
            elif node.sites:
                self.inside(node, outer or node)
                continue
            else:
                bits = self.at_plain(node, outer or node)
            for var in node.outputs:
                self.env[var] = self.old.get(var, bits)
                self.at_state(var)

    def at_state(self, var: Var) -> None:
        group = self.new_state.get(var)
        if group is None:
            return
        bits = self.env[var]
        key = f"group:{group.index}"
        box = self.boxes.get(key) or Box(
            key, "group", var.index, group=group, remembered=self.remembered[group.index]
        )
        self.env[var] = self.add(box, bits & ~self.param_bits)
        for name in self.names(bits):
            self.with_param(box, name)

    def at_site(self, site: Site) -> int:
        key = f"site:{site.index}"
        relation = self.relations.get(site.index)
        box = self.boxes.get(key) or Box(
            key,
            "site",
            site.output.index,
            shape=show_aval(site.output.aval),
            site=site,
            relation=relation,
            sizes=self.sizes.get(site.index),
        )
        bits = self.data(site.inputs[: site.num_inputs])
        weights = self.union(site.weights.values())
        for name in self.names(weights):
            self.with_param(box, name)
        return self.add(box, bits | (weights & ~self.param_bits))

    def at_plain(self, node: Node, outer: Node) -> int:
        """Return the dependencies of a node; a parameter that meets data and reaches no state is a box."""
        bits = self.union(node.inputs)
        names, data = self.names(bits), bits & ~self.param_bits
        reaches = any((goal := self.goals.get(v)) is not None and goal.direct for v in outer.outputs)
        if not names or not data or reaches:
            return bits
        box = self.plain.get(id(node))
        if box is None:
            alone = [b for b in self.plain.values() if data == self.token("box", b.key)]
            box = alone[0] if alone else Box(f"plain:{len(self.plain)}", "plain", node.outputs[0].index)
            self.plain[id(node)] = box
        for name in names:
            self.with_param(box, name)
        box.label = box.label or node.source
        return self.add(box, data)

    def inside(self, node: Node, outer: Node) -> None:
        """Propagate through control flow that contains sites."""
        ins = [self.union([a]) for a in node.inputs]
        outs = [0] * len(node.outputs)
        loop = node.loop
        if loop is None:
            for branch in node.inner:
                outs = [a | b for a, b in zip(outs, self.enter(branch, ins[1:], outer), strict=True)]
        else:
            first, last = loop.before + loop.consts, loop.before + loop.consts + loop.carry
            known = None
            while known != ins:
                known = list(ins)
                outs = self.enter(loop.body, ins[loop.before :], outer)
                ins[first:last] = [a | b for a, b in zip(ins[first:last], outs, strict=False)]
        for var, bits in zip(node.outputs, outs, strict=True):
            self.env[var] = bits
            self.at_state(var)

    def enter(self, program: Program, ins: Sequence[int], outer: Node) -> list[int]:
        self.env.update(zip(program.inputs, ins, strict=True))
        self.walk(program, outer)
        return [self.union([a]) for a in program.outputs]

    def edges(self) -> list[Edge]:
        for kind, key in list(self.tokens):
            if kind == "box" and self.boxes[key].kind == "state" and not self.is_read(key):
                del self.boxes[key], self.into[key]
        dropped = self.dropped()
        found = []
        for target, bits in self.into.items():
            for (kind, source), bit in self.tokens.items():
                if not bits & bit or kind == "param" or source == target or source not in self.boxes:
                    continue
                found.append(Edge(source, target, kind == "old", (source, target) in dropped))
        return found

    def dropped(self) -> set[tuple[str, str]]:
        """Return the edges whose influence traces do not follow completely."""
        found = {
            (f"site:{r.site.index}", f"group:{g.index}")
            for r in self.relations.values()
            for g, m in zip(r.hidden_groups, r.position_maps, strict=True)
            if not m.complete
        }
        for d in self.report.dropped:
            if isinstance(d.by, Use):
                key = f"site:{d.by.site.index}"
                groups = (self.graph.hid_path_to_group.get(p) for p in d.hidden_paths)
                found |= {(f"group:{g.index}", key) for g in groups if g is not None}
                users = (b for b in self.boxes.values() if b.kind == "site" and d.weight_path in b.params)
                found |= {(b.key, key) for b in users}
        return found

    def is_read(self, key: str) -> bool:
        bit = self.tokens["old", key]
        return any(bits & bit for target, bits in self.into.items() if target != key)


def _input_names(info: ModuleInfo) -> list[str]:
    count, names = len(info.arg_invars), list(info.step.arg_names)
    return names[:count] if count <= len(names) else [f"input {i}" for i in range(count)]
