"""Local Jacobians of one step: `D = dh[t]/dh[t-1]` at each position, and `J = dh/dy` of each site.

The step is evaluated with `y = op(x, w) + p` at each site, where only `p` and the old states vary.
Where each element of `p` and of the old states reaches at most one hidden position, pulling back ones on
one state at a time gives a row of `D` and the `J` of all sites. Where elements reach several positions,
positions are coloured so that no element reaches two of one colour, and each colour is pulled back
alone: the blocks are true diagonals, never sums. What mixes through a few sums only, such as a norm, goes
through these (`necks`). Broadcasts, and loops without a reverse mode, are pushed
forwards instead, coloured by their sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compat import primitives
from .._compiler.errors import NotSupportedError
from .._compiler.evaluation import View, World, evaluate
from .._compiler.graph import ETraceGraph
from .._compiler.groups import HiddenGroup
from .._compiler.links import Array
from .._compiler.module_info import Hidden
from .._compiler.positions import Positions, positions_of
from .._compiler.program import Site, Var
from .._compiler.reach import Reach
from .._compiler.relation import HiddenParamOpRelation, PositionMap
from .._compiler.slices import between, dependents, has_while
from .._compiler.step import show_paths
from .necks import Necks, through
from .slots import Jacobian, States, states

_PLAIN = "old states only"  # the world of other groups' new states: no site varies there


@dataclass(frozen=True, eq=False)
class LocalGroup:
    """How to get the Jacobians of one group; planned once, from positions alone."""

    graph: ETraceGraph = field(repr=False)
    group: HiddenGroup

    @cached_property
    def fed_by(self) -> list[tuple[HiddenParamOpRelation, PositionMap]]:
        return [
            (r, m)
            for r in self.graph.hidden_param_op_relations
            for g, m in zip(r.hidden_groups, r.position_maps, strict=True)
            if g is self.group
        ]

    @cached_property
    def forward_only(self) -> bool:
        """Whether a loop without reverse mode is on the way to the new states."""
        sources = [*self.group.hidden_invars, *self._site_vars]
        nodes = between(self.graph.module_info.program, sources, self.group.hidden_outvars)
        loops = [n for n in nodes if has_while(n)]
        back = [n for node in nodes for n in node.walk() if n.primitive is primitives.custom_vjp_call_p]
        if loops and back:
            raise NotSupportedError(
                f"On the way to {show_paths(self.group.hidden_paths)}, a `while` loop at "
                f"{loops[0].source} has no reverse mode and a `custom_vjp` function at {back[0].source} has "
                "no forward mode: no derivative goes through both. Take a loop of known length (`lax.scan`), "
                "or a `custom_jvp`."
            )
        return bool(loops)

    @cached_property
    def _site_vars(self) -> list[Var]:
        program = self.graph.module_info.program
        holders = dict.fromkeys(program.holder[r.site.index] for r, _ in self.fed_by)
        return [v for i in holders for v in program.nodes[i].outputs]

    @cached_property
    def varies(self) -> set[Var]:
        """The variables that depend on the old states or on a site's perturbation."""
        program = self.graph.module_info.program
        return dependents(program, [*self.group.hidden_invars, *self._site_vars])

    @cached_property
    def has_memory(self) -> bool:
        """Whether the new states depend on the old ones at all, without a marked op in between."""
        return not all(r.is_empty for r in self.group.within)

    @cached_property
    def colouring(self) -> tuple[Array, int]:
        """The colour of each hidden position, and how many there are: no element reaches two of one colour.

        An element reaches a range of positions. Along which axis they are numbered decides how long that is:
        what a norm mixes over the batch lies far apart where the batch is the first axis.
        """
        shape = self.group.varshape
        numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        widths = [r.width for r in self.group.within]
        widths += [m.reach.width for _, m in self.fed_by if not m.on_hidden]
        best = max(1, *widths) if widths else 1
        found = numbers.ravel() % best
        if best > 1:
            positions = positions_of(self.graph.module_info.program)
            for axis in range(len(shape) - 1):
                moved = np.moveaxis(numbers, axis, -1).shape
                other = np.moveaxis(np.arange(numbers.size).reshape(moved), -1, axis).ravel()
                width = self._width(positions, other)
                if width < best:
                    found, best = other % width, width
        return found, best

    def _width(self, positions: Positions, number: Array) -> int:
        """The longest range that an element reaches, with the hidden positions numbered so."""
        starts = {h.outvar: Reach.at(number[h.positions]) for h in self.group.hidden}
        others = {v for g in self.graph.hidden_groups if g is not self.group for v in g.hidden_outvars}
        old, _ = positions.reaches(starts)
        _, sites = positions.reaches(starts, lambda v: v in others)
        widths = [old[h.invar].width for h in self.group.hidden if h.invar in old]
        widths += [sites[r.site.index].width for r, m in self.fed_by if not m.on_hidden]
        return max(1, *widths) if widths else 1

    @cached_property
    def forward_colours(self) -> list[int]:
        """How many colours pushing forward each old state, then each site, takes."""
        positions = positions_of(self.graph.module_info.program)
        widths = []
        for h in self.group.hidden:
            came = positions.sources({h.invar: Reach.at(h.positions)}, {})
            widths.append(self._width_at_states(came))
        for r, _ in self.fed_by:
            numbers = np.arange(np.prod(r.site.shape, dtype=int)).reshape(r.site.shape)
            came = positions.sources({}, {r.site.index: Reach.at(numbers)})
            widths.append(self._width_at_states(came))
        return widths

    def _width_at_states(self, came: dict[Var, Reach]) -> int:
        return max(1, *(came[v].width if v in came else 1 for v in self.group.hidden_outvars))

    @cached_property
    def necks(self) -> Necks | None:
        """The necks through which the step mixes, where that takes fewer pull-backs than colours do."""
        if self.forward_only or self.colouring[1] < 4:
            return None
        found = Necks.find(self.graph, self.group, self.fed_by, self.varies)
        return found if found is not None and 1 + 2 * len(found.all) < self.colouring[1] else None

    @property
    def num_pulled(self) -> int:
        """How many arrays of each state and site it takes to get the Jacobians."""
        return self.colouring[1] if self.necks is None else 1 + 2 * len(self.necks.all)

    def step(self, env: Mapping[Var, Any], targets: Sequence[Var] = ()) -> Callable[..., list[Any]]:
        """The group's new states, or `targets`, from its old ones and from what is added at its sites.

        It takes the values of necks, too, if they are to be held.
        """
        program = self.graph.module_info.program
        home = {v: g.index for g in self.graph.hidden_groups for v in g.hidden_outvars}
        world: World = self.group.index
        mine = {r.site.index for r, _ in self.fed_by}

        def reads(var: Var, reader: World) -> tuple[World, None]:
            other = reader == world and home.get(var, world) != world
            return (_PLAIN if other else reader), None

        def function(old: list[Any], added: dict[int, Any], held: Sequence[Any] = ()) -> list[Any]:
            def leaf(site: Site, at: World) -> Any:
                y = env[site.output]
                return y + added[site.index] if at == world and site.index in mine else y

            def at_site(site: Site, site_in: Any, vals: list[Any]) -> tuple[Any, None]:
                y = site.primitive.bind(*map(jax.lax.stop_gradient, vals), **site.params)
                return (y if site_in is None else y + site_in), None

            given = dict(zip(self.group.hidden_invars, old, strict=True))
            if held and self.necks is not None:
                given.update(zip((neck.var for neck in self.necks.all), held, strict=True))
            known = Known(env, self.varies, given)
            view = View(
                known=known,
                at_site=lambda site, at: at_site,
                reads=reads,
                site_ins=added,
                leaf=leaf,
            )
            return evaluate(program, [(v, world) for v in targets or self.group.hidden_outvars], view)

        return function

    def jacobians(self, env: Mapping[Var, Any]) -> tuple[Jacobian | None, dict[int, States]]:
        """`D` as arrays of `varshape`, new state first (None: no memory), and the `J` of each site.

        An array of `J` is shaped as `y` for a trace that lives on the positions of `y`, else as `varshape`.
        """
        step = self.step(env)
        old = [env[v] for v in self.group.hidden_invars]
        added = {r.site.index: jnp.zeros(r.site.shape, r.site.output.aval.dtype) for r, _ in self.fed_by}
        if self.forward_only:
            return self._pushed(step, old, added)
        if self.necks is not None:
            return self._through(self.necks, env, old, added)
        new, pull = jax.vjp(step, old, added)
        D, J = self._pulled(new, pull)
        for r, m in self.fed_by:
            # ones pulled back would add up what a broadcast spreads; pushed forward, each stays apart
            if m.on_hidden:
                push = self._transposed(new, pull, r.site.index)
                J[r.site.index] = self._pick(push, r.site.shape, m.source_width or 1, m)
        return D, J

    def _through(
        self, necks: Necks, env: Mapping[Var, Any], old: list[Any], added: dict[int, Any]
    ) -> tuple[Jacobian | None, dict[int, States]]:
        """The same, where all that mixes goes through necks."""
        held = [env[neck.var] for neck in necks.all]
        new, pull = jax.vjp(self.step(env), old, added, held)
        _, back = jax.vjp(self.step(env, [neck.var for neck in necks.all]), old, added)
        forth = jax.linear_transpose(lambda cts: pull(cts)[2], new)
        D: list[list[Any]] = []
        J: dict[int, list[Any]] = {i: [] for i in added}
        for state in range(self.group.num_state):
            dh, dp, _ = pull(self.one_state(new, state, jnp.ones(self.group.varshape, bool)))
            D.append([_select(d[None], None, kept) for d, kept in zip(dh, necks.old, strict=True)])
            for i in J:
                J[i].append(_select(dp[i][None], None, necks.sites[i]))
        D, J = through(necks, self.fed_by, D, J, held, back, lambda tangents: forth(tangents)[0])
        return D if self.has_memory else None, dict(J)

    # -- backwards ---------------------------------------------------------------------------------

    def _pulled(self, new: list[Any], pull: Callable[..., Any]) -> tuple[Jacobian | None, dict[int, States]]:
        colour, n = self.colouring
        # all ones are made where they are needed: given from outside, XLA knows nothing of them
        same = jnp.ones((1, *self.group.varshape), bool)
        shape = self.group.varshape
        each = jnp.arange(n).reshape(-1, *[1] * len(shape))
        masks = same if n == 1 else each == colour.reshape(1, *shape)

        def one(state: int, mask: Any) -> Any:
            back = pull(self.one_state(new, state, mask))
            if not jnp.issubdtype(self.group.dtype, jnp.complexfloating):
                return back
            # a real source gives the real part of what is pulled back: `-i` brings out the other one
            turned = pull(
                [
                    c * jnp.asarray(-1j, c.dtype) if jnp.iscomplexobj(c) else jnp.zeros_like(c)
                    for c in self.one_state(new, state, mask)
                ]
            )
            return jax.tree.map(
                lambda a, b: a if jnp.iscomplexobj(a) else jax.lax.complex(a, b), back, turned
            )

        rows: list[list[Any]] = []
        J: dict[int, list[Any]] = {r.site.index: [] for r, m in self.fed_by if not m.on_hidden}
        for state in range(self.group.num_state):
            if n == 1:
                dh, dp = one(state, masks[0])
                dh, dp = jax.tree.map(lambda a: a[None], (dh, dp))
            else:
                dh, dp = jax.vmap(lambda mask, s=state: one(s, mask))(masks)
            rows.append(
                [
                    part
                    for h, r, d in zip(self.group.hidden, self.group.within, dh, strict=True)
                    for part in states_of(h, _select(d, colour[h.positions], _holds(r, h.positions)))
                ]
            )
            for relation, m in self.fed_by:
                if not m.on_hidden:
                    i = relation.site.index
                    J[i].append(_select(dp[i], colour[np.maximum(m.map, 0)], m.map >= 0))
        return rows if self.has_memory else None, dict(J)

    def one_state(self, new: Sequence[Any], state: int, mask: Any) -> list[Any]:
        cotangents = []
        for h, value in zip(self.group.hidden, new, strict=True):
            if 0 <= state < h.num_state:
                ones = mask if h.axis is None else jnp.expand_dims(mask, h.axis)
                cotangents.append(_at_state(h, state, ones, value.dtype, dual=True))
            else:
                cotangents.append(jnp.zeros_like(value))
            state -= h.num_state
        return cotangents

    # -- forwards ----------------------------------------------------------------------------------

    def _transposed(self, new: list[Any], pull: Callable[..., Any], index: int) -> Callable[[Any], Any]:
        """Pushing forward what is added at one site, by transposing the pull-back."""
        back = jax.linear_transpose(lambda cts: pull(cts)[1][index], new)
        return self._from_site(index, lambda tangent: self.group.stack_hidden(back(tangent)[0]))

    def _from_site(self, index: int, push: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`push`, from booleans; of real states and a complex `y` it makes what pulling back gives."""
        dtype = next(r.site.output.aval.dtype for r, _ in self.fed_by if r.site.index == index)
        if not jnp.issubdtype(dtype, jnp.complexfloating) or not any(h.split for h in self.group.hidden):
            return lambda ones: push(ones.astype(dtype))
        i = jnp.asarray(1j, dtype)
        return lambda ones: jax.lax.complex(push(ones.astype(dtype)), -push(ones.astype(dtype) * i))

    def _pick(
        self, push: Callable[[Any], Any], shape: tuple[int, ...], colours: int, m: PositionMap
    ) -> States:
        """The `J` of a site, with what is added at its output pushed forward colour by colour."""
        number = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        out = jnp.stack([push(jnp.asarray(number % colours == c)) for c in range(colours)])
        if m.on_hidden:
            colour, kept = np.maximum(m.map, 0) % colours, m.map >= 0
            return [_select(out[:, s], colour, kept) for s in range(self.group.num_state)]
        flat = out.reshape(*out.shape[:2], -1)
        picked = flat[number.ravel() % colours, :, np.maximum(m.map, 0).ravel()]
        picked = jnp.where(jnp.asarray(m.map.ravel() >= 0)[:, None], picked, 0)
        return [one.reshape(shape) for one in states(picked, 1)]

    def _pushed(
        self, step: Callable[..., Any], old: list[Any], added: dict[int, Any]
    ) -> tuple[Jacobian | None, dict[int, States]]:
        zeros = jax.tree.map(jnp.zeros_like, (old, added))

        def pushing(which: Any) -> Callable[[Any], Any]:
            def push(tangent: Any) -> Any:
                tangents = jax.tree.map(lambda z: z, zeros)
                where = tangents[0] if which[0] == "old" else tangents[1]
                where[which[1]] = tangent
                return self.group.stack_hidden(jax.jvp(step, (old, added), tangents)[1])

            return push

        columns: list[Any] = []
        widths = self.forward_colours
        for k, h in enumerate(self.group.hidden):
            n, dtype = widths[k], old[k].dtype
            for state in range(h.num_state):
                out = []
                for c in range(n):
                    ones = _at_state(h, state, jnp.asarray(h.positions % n == c), dtype)
                    out.append(pushing(("old", k))(ones))
                number = np.arange(np.prod(self.group.varshape, dtype=int)).reshape(self.group.varshape)
                stacked = jnp.stack(out)
                columns.append(
                    [
                        _select(stacked[:, s], number % n, np.ones(number.shape, bool))
                        for s in range(self.group.num_state)
                    ]
                )
        J = {}
        for (r, m), n in zip(self.fed_by, widths[len(self.group.hidden) :], strict=True):
            i = r.site.index
            J[i] = self._pick(self._from_site(i, pushing(("added", i))), r.site.shape, n, m)
        return list(zip(*columns, strict=True)) if self.has_memory else None, J


class Known(Mapping[Var, Any]):
    """Values that do not vary, and those given instead of ones that do."""

    def __init__(self, env: Mapping[Var, Any], varies: set[Var], given: Mapping[Var, Any]) -> None:
        self.env, self.varies, self.given = env, varies, given

    def __contains__(self, var: object) -> bool:
        return var in self.given or (var in self.env and var not in self.varies)

    def __getitem__(self, var: Var) -> Any:
        return self.given[var] if var in self.given else self.env[var]

    def __iter__(self) -> Iterator[Var]:
        return (v for v in {**self.env, **self.given} if v in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _holds(reach: Reach, positions: Any) -> Any:
    """Where an element may reach its own position."""
    return (reach.lowest <= positions) & (positions <= reach.highest)


def _select(array: Any, colour: Any, kept: Any) -> Any:
    """`array[colour[i], i]` at each element `i`, and zero where it is not kept."""
    if array.shape[0] == 1:
        chosen = array[0]
    else:
        chosen = jnp.take_along_axis(array, jnp.asarray(colour)[None], axis=0)[0]
    return chosen if np.all(kept) else jnp.where(jnp.asarray(kept), chosen, 0)


def states_of(hidden: Hidden, array: Any) -> list[Any]:
    """A cotangent of a hidden array, state by state."""
    found = [array] if hidden.axis is None else states(array, hidden.axis)
    return [*(a.real for a in found), *(-a.imag for a in found)] if hidden.split else found


def _at_state(hidden: Hidden, state: int, ones: Any, dtype: Any, *, dual: bool = False) -> Any:
    """Ones, given as booleans, at one state of a hidden array: a tangent of it or, `dual`, a cotangent."""
    num = hidden.num_state // 2 if hidden.split else hidden.num_state
    if hidden.axis is not None:
        shape = [num if a == hidden.axis else 1 for a in range(ones.ndim)]
        ones = ones & (np.arange(num) == state % num).reshape(shape)
    ones = ones.astype(dtype)
    return ones if state < num else ones * jnp.asarray(-1j if dual else 1j, dtype)
