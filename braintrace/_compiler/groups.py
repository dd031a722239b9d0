"""Hidden groups: states of equal shape that are coupled unit by unit, without a marked op in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from .._compat import ClosedJaxpr
from .._types import Array, Handle, NumPyArray, Options
from .custom_derivatives import PullBack, has_own_rule
from .findings import Finding, Found
from .module_info import Hidden, ModuleInfo
from .positions import Positions, positions_of
from .primitives import ELEMENT_WISE, NOT_COMPLEX
from .program import Node, Var, is_complex
from .provenance import provenance
from .reach import Reach
from .slices import Slice, between, cut, has_while, uses_while
from .step import Path, show_path

_FEW_STATES = 4  # up to this number, all states count as coupled
_WIDEST_UNIT = 8  # states per unit: the trace grows with them


@dataclass(frozen=True, eq=False)
class HiddenGroup:
    """Hidden states of equal shape, coupled unit by unit: `num_state` states at each position.

    `within` holds, for each state array, the positions that its elements reach along paths without a marked
    op. `is_local` is true if each element reaches its own position only, so that the local Jacobian is block
    diagonal.
    """

    index: int
    hidden: tuple[Hidden, ...]
    info: ModuleInfo
    within: tuple[Reach, ...]
    mixers: tuple[Node, ...] = ()
    filtered: int = 0  # additional states that a rule keeps: filters of what other groups read

    snap = None  # an attribute of 0.2.6, where it was None for all rules but SnAp

    def __repr__(self) -> str:
        states = ", ".join(f"{show_path(h.path)} {h.invar.aval.str_short()}" for h in self.hidden)
        return f"<HiddenGroup {self.index}: {states}>"

    @property
    def hidden_paths(self) -> list[Path]:
        return [h.path for h in self.hidden]

    @property
    def hidden_states(self) -> list[Handle]:
        return [h.state for h in self.hidden]

    @property
    def hidden_invars(self) -> list[Var]:
        return [h.invar for h in self.hidden]

    @property
    def hidden_outvars(self) -> list[Var]:
        return [h.outvar for h in self.hidden]

    @property
    def varshape(self) -> tuple[int, ...]:
        return self.hidden[0].varshape

    @property
    def num_state(self) -> int:
        return sum(h.num_state for h in self.hidden) + self.filtered

    @property
    def dtype(self) -> np.dtype[np.generic]:
        each = [jnp.finfo(t).dtype if h.split else t for h in self.hidden for t in [h.invar.aval.dtype]]
        with jax.numpy_dtype_promotion("standard"):
            return jnp.result_type(*each)

    @cached_property
    def stays(self) -> dict[Var, bool]:
        """Whether each array, by the variable of its old value, reaches no other positions than its own."""
        pairs = zip(self.hidden, self.within, strict=True)
        return {h.invar: r.stays_at(h.positions) for h, r in pairs}

    @property
    def is_local(self) -> bool:
        return all(self.stays.values())

    @cached_property
    def coupled(self) -> NumPyArray:
        """Whether each new state (row) may depend on each old one (column); sparse for delay lines."""
        if self.num_state <= _FEW_STATES or self.filtered or any(h.split for h in self.hidden):
            return np.ones((self.num_state, self.num_state), bool)
        positions = positions_of(self.info.program)
        rows = []
        for h in self.hidden:
            whole = Reach.at(h.positions)
            for state in range(1 if h.axis is None else h.invar.aval.shape[h.axis]):
                one = (...,) if h.axis is None else (slice(None),) * (h.axis + 1) + (state,)
                start = Reach.empty(tuple(h.invar.aval.shape))
                start.low[one], start.high[one] = whole.low[one], whole.high[one]
                reached, _ = positions.reaches({h.outvar: start})
                rows.append(np.concatenate([_states_in(old, reached.get(old.invar)) for old in self.hidden]))
        return np.stack(rows)

    def concat_hidden(self, values: Sequence[Array]) -> Array:
        """The states of the group as one array, `varshape + (num_state,)`."""
        return self._joined(values, -1)

    def stack_hidden(self, values: Sequence[Array], *, dual: bool = False) -> Array:
        """The states of the group as one array, `(num_state,) + varshape`: a short last axis is slow.

        With `dual`, the values are cotangents of the states.
        """
        return self._joined(values, 0, dual)

    def _joined(self, values: Sequence[Array], axis: int, dual: bool = False) -> Array:
        pairs = zip(self.hidden, values, strict=True)
        parts = [p for h, v in pairs for p in _parts(h, h.states_at(v, axis), dual)]
        return jnp.concatenate([p.astype(self.dtype) for p in parts], axis)

    def split_hidden(self, array: Array) -> list[Array]:
        """The inverse of `concat_hidden`."""
        ends = np.cumsum([h.num_state for h in self.hidden])[:-1]
        found = []
        for h, p in zip(self.hidden, jnp.split(array, ends, axis=-1), strict=True):
            whole = jax.lax.complex(*jnp.split(p, 2, axis=-1)) if h.split else p
            whole = whole[..., 0] if h.axis is None else jnp.moveaxis(whole, -1, h.axis)
            found.append(whole.astype(h.invar.aval.dtype))
        return found

    @cached_property
    def _transition(self) -> Slice:
        return cut(self.info.program, self.hidden_invars, self.hidden_outvars)

    @property
    def transition_jaxpr(self) -> ClosedJaxpr:
        """`(old states, constants) -> new states`, along paths without a marked op."""
        return self._transition.jaxpr

    @property
    def transition_jaxpr_constvars(self) -> list[Var]:
        """The variables that `transition_jaxpr` takes after the old states."""
        return self._transition.constvars

    def diagonal_jacobian(self, hidden: Sequence[Array], consts: Sequence[Array]) -> Array:
        """`dh[t]/dh[t-1]` at each position, `varshape + (num_state, num_state)`: new, then old."""
        flat = self.concat_hidden(hidden)
        size, s = int(np.prod(self.varshape, dtype=int)), self.num_state

        def step(h: Array) -> Array:
            return self.concat_hidden(self._transition.call(self.split_hidden(h), consts))

        full = jax.jacrev(step)(flat).reshape(size, s, size, s)
        blocks = jnp.diagonal(full, axis1=0, axis2=2)
        return jnp.moveaxis(blocks, -1, 0).reshape(*self.varshape, s, s)

    def dict(self) -> Options:
        names = ("index", "hidden_paths", "hidden_states", "hidden_invars", "hidden_outvars", "varshape")
        return {name: getattr(self, name) for name in (*names, "num_state", "transition_jaxpr")}


def _states_in(hidden: Hidden, reach: Reach | None) -> NumPyArray:
    """Whether each state of an array reaches any position."""
    if reach is None:
        return np.zeros(hidden.num_state, bool)
    hit = reach.highest >= 0
    others = tuple(a for a in range(hit.ndim) if a != hidden.axis)
    return np.atleast_1d(np.any(hit, axis=others))


def _parts(hidden: Hidden, value: Array, dual: bool = False) -> list[Array]:
    """The real arrays of a split complex value, or the value; JAX's cotangent of `a + ib` is `da - i db`."""
    if not hidden.split:
        return [value]
    return [value.real, -value.imag if dual else value.imag]


def find_groups(info: ModuleInfo, positions: Positions) -> list[HiddenGroup]:
    """The connected components of hidden states under unit-by-unit dependence, in program order."""
    hidden = info.hidden
    members = [[i] for i in range(len(hidden))]  # of the group of each state, as far as it is known
    new = {h.outvar: i for i, h in enumerate(hidden)}
    number = {**{h.invar: i for i, h in enumerate(hidden)}, **new}
    for i, h in enumerate(hidden):
        start = {h.outvar: Reach.at(h.positions)}
        reached, _ = positions.reaches(start, stop=lambda v, own=h.outvar: v in new and v is not own)  # type: ignore[misc]
        for var, reach in reached.items():
            j = number.get(var, i)
            if j in members[i] or hidden[j].varshape != h.varshape:
                continue
            if np.any(reach.direct == hidden[j].positions):
                joined = sorted((*members[i], *members[j]))
                for k in joined:
                    members[k] = joined
    produced = info.program.producer
    groups = [tuple(hidden[k] for k in joined) for joined in dict.fromkeys(map(tuple, members))]
    groups.sort(key=lambda group: min(produced[h.outvar] for h in group))
    return [_group(index, group, info, positions) for index, group in enumerate(groups)]


def _group(index: int, hidden: tuple[Hidden, ...], info: ModuleInfo, positions: Positions) -> HiddenGroup:
    starts = {h.outvar: Reach.at(h.positions) for h in hidden}
    reached, _ = positions.reaches(starts)
    within = tuple(reached.get(h.invar) or Reach.empty(tuple(h.invar.aval.shape)) for h in hidden)
    if not _is_complex_linear(hidden, info):
        hidden = tuple(replace(h, split=is_complex(h.invar)) for h in hidden)
    group = HiddenGroup(index, hidden, info, within)
    if group.is_local:
        return group
    origin = {h.invar: Reach.at(h.positions) for h in hidden}
    nodes = mixing_nodes(info, positions.sources(origin, {}), reached)
    return HiddenGroup(index, hidden, info, within, tuple(nodes))


def mixing_nodes(info: ModuleInfo, sources: dict[Var, Reach], reached: dict[Var, Reach]) -> list[Node]:
    """The nodes at which positions mix: several positions enter, and several are reached.

    If there is none (`h + roll(h)`), the nodes that move elements.
    """
    mixed = {v for v, reach in sources.items() if reach.width > 1}
    spread = {v for v, reach in reached.items() if v in sources and reach.width > 1}
    return [
        node
        for node in info.program.nodes
        if not mixed.isdisjoint(node.outputs)
        and mixed.isdisjoint(node.reads)
        and not spread.isdisjoint(node.reads)
        and any(v in reached for v in node.outputs)
    ] or [
        node
        for node in info.program.nodes
        if node.primitive not in ELEMENT_WISE and any(v in sources and v in reached for v in node.outputs)
    ]


def _is_complex_linear(hidden: Sequence[Hidden], info: ModuleInfo) -> bool:
    """Whether complex states are complex differentiable in the old states and in the outputs of sites."""
    if not any(is_complex(h.invar) for h in hidden):
        return True
    sites = [n for n in info.program.nodes if n.sites]
    sources = [*(h.invar for h in hidden), *(v for n in sites for v in n.outputs)]
    nodes = [*between(info.program, sources, [h.outvar for h in hidden]), *(n for n in sites if n.inner)]
    return not any(map(_has_no_complex_derivative, nodes))


def _has_no_complex_derivative(node: Node) -> bool:
    if not any(map(is_complex, node.inputs)):
        return False
    real = [v for v in node.outputs if jnp.issubdtype(v.aval.dtype, jnp.floating)]
    if node.primitive in NOT_COMPLEX or real:
        return True
    programs = node.inner
    if (pull := PullBack.of(node) if has_own_rule(node) else None) is not None:
        programs = (pull.program,)
    return any(_has_no_complex_derivative(n) for program in programs for n in program.nodes)


def group_findings(groups: Sequence[HiddenGroup], info: ModuleInfo) -> list[Finding]:
    """The findings about the groups of a step."""
    found: list[Finding] = []
    loops = any(has_while(node) for node in info.program.nodes)
    for group in groups:
        states = tuple(group.hidden_paths)
        if len(group.hidden) > 1:
            found.append(Finding(Found.COUPLED, states=states))
        if not group.is_local:
            width = _width_of_units(group)
            kind = Found.MIXED_UNITS if width is None else Found.MIXED_PAIRS
            found.append(Finding(kind, states=states, nodes=group.mixers, detail=width))
        if loops and uses_while(info.program, group.hidden_invars, group.hidden_outvars):
            found.append(Finding(Found.THROUGH_WHILE, states=states))
    return found


def _width_of_units(group: HiddenGroup) -> int | None:
    """The length of a short last axis, if only elements along it mix (rotated pairs, say)."""
    made_of = provenance(group.info.program)
    params = set(group.info.invar_to_leaf)
    if any(not params.isdisjoint(made_of.of(a)[0]) for node in group.mixers for a in node.inputs):
        return None  # more likely a weight that lacks a mark
    width = group.varshape[-1] if len(group.varshape) > 1 and group.num_state == len(group.hidden) else 0
    if not 1 < width <= _WIDEST_UNIT:
        return None
    for h, r in zip(group.hidden, group.within, strict=True):
        row, used = h.positions // width, r.highest >= 0
        if np.any(used & ((r.lowest // width != row) | (r.highest // width != row))):
            return None
    return width
