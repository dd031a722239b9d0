"""Local Jacobians of one step: `D = dh[t]/dh[t-1]` at each position, and `J = dh/dy` of each site.

The step is evaluated with `y = op(x, w) + p` at each site, where only `p` and the old states vary.
If each element of `p` and of the old states reaches at most one hidden position, pulling back ones on one
state at a time gives a row of `D` and the `J` of all sites. If elements reach several positions, this is a
compressed Jacobian: positions are coloured so that no element reaches two of one colour, and colours are
pulled back separately, so that the blocks are true diagonals, never sums. Mixing through a few sums, as in a
norm, is handled by `necks`. Broadcasts, and loops without reverse mode, are pushed forward instead, coloured
by their sources.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._compat import primitives
from .._compiler.errors import NotSupportedError
from .._compiler.evaluation import View, World, evaluate
from .._compiler.graph import TraceGraph
from .._compiler.groups import HiddenGroup
from .._compiler.links import Array as NpArray
from .._compiler.links import numbered
from .._compiler.module_info import Hidden
from .._compiler.positions import positions_of
from .._compiler.program import Site, Var
from .._compiler.reach import Reach
from .._compiler.relation import HiddenParamOpRelation, PositionMap
from .._compiler.slices import between, dependents, has_while
from .._compiler.step import show_paths
from .._types import DTypeLike, Shape
from .necks import Necks, through
from .trace_math import Jacobian, states

T = TypeVar("T")
Push = Callable[[Array], Array]  # from an array of ones at some elements to the new states, stacked

_PLAIN = "old states only"  # the world of other groups' new states, in which sites are not perturbed


@dataclass(frozen=True, eq=False)
class LocalGroup:
    """Computes the Jacobians of one group, with a plan that depends on positions only."""

    graph: TraceGraph = field(repr=False)
    group: HiddenGroup

    @cached_property
    def fed_by(self) -> list[tuple[HiddenParamOpRelation, PositionMap]]:
        return [(r, m) for r in self.graph.hidden_param_op_relations for g, m in r.feeds if g is self.group]

    @cached_property
    def forward_only(self) -> bool:
        """Whether a loop without reverse mode is on a path to the new states."""
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
        """Whether the new states depend on the old ones without a marked op in between."""
        return not all(r.is_empty for r in self.group.within)

    @cached_property
    def colouring(self) -> tuple[NpArray, int]:
        """The colour of each hidden position, and the number of colours.

        No element reaches two positions of one colour. It reaches a range of positions, whose length depends
        on the axis along which positions are numbered: those that a batch norm mixes are far apart if the
        batch is the first axis.
        """
        numbers = numbered(self.group.varshape)
        widths = [r.width for r in self.group.within]
        widths += [m.reach.width for _, m in self.fed_by if not m.on_hidden]
        best, found = max([1, *widths]), numbers
        if best > 1:
            for axis in range(numbers.ndim - 1):
                moved = np.moveaxis(numbers, axis, -1).shape
                other = np.moveaxis(np.arange(numbers.size).reshape(moved), -1, axis)
                width = self._width(other.ravel())
                best, found = min((best, found), (width, other), key=itemgetter(0))
        return found.ravel() % best, best

    def _width(self, number: NpArray) -> int:
        """The longest range that an element reaches, for a given numbering of the hidden positions."""
        positions = positions_of(self.graph.module_info.program)
        starts = {h.outvar: Reach.at(number[h.positions]) for h in self.group.hidden}
        others = set(self.graph.other_outvars(self.group))
        old, _ = positions.reaches(starts)
        _, sites = positions.reaches(starts, lambda v: v in others)
        widths = [old[h.invar].width for h in self.group.hidden if h.invar in old]
        widths += [sites[r.site.index].width for r, m in self.fed_by if not m.on_hidden]
        return max([1, *widths])

    @cached_property
    def _forward_colours(self) -> tuple[list[int], dict[int, int]]:
        """The number of colours for pushing forward each old state, and each site."""
        sources = positions_of(self.graph.module_info.program).sources

        def width(came: dict[Var, Reach]) -> int:
            return max([1, *(came[v].width for v in self.group.hidden_outvars if v in came)])

        old = [
            [width(sources({h.invar: Reach.at(h.positions)}, {}))] * h.num_state for h in self.group.hidden
        ]
        sites = [r.site for r, _ in self.fed_by]
        at_sites = {s.index: width(sources({}, {s.index: Reach.identity(s.shape)})) for s in sites}
        return [n for each in old for n in each], at_sites

    @cached_property
    def necks(self) -> Necks | None:
        """The necks through which the step mixes, if they take fewer pull-backs than colours do."""
        if self.forward_only or self.colouring[1] < 4:
            return None
        found = Necks.find(self.graph, self.group, self.fed_by, self.varies)
        return found if found is not None and 1 + 2 * len(found.all) < self.colouring[1] else None

    @property
    def num_pulled(self) -> int:
        """The number of pull-backs for each state."""
        return self.colouring[1] if self.necks is None else 1 + 2 * len(self.necks.all)

    def step(self, env: Mapping[Var, Array], targets: Sequence[Var] = ()) -> Callable[..., list[Array]]:
        """The function from old states and perturbations of sites to the group's new states, or to `targets`.

        Its third argument are values at which necks are held fixed.
        """
        program = self.graph.module_info.program
        home = {v: g.index for g in self.graph.hidden_groups for v in g.hidden_outvars}
        world: World = self.group.index
        mine = {r.site.index for r, _ in self.fed_by}

        def reads(var: Var, reader: World) -> tuple[World, None]:
            other = reader == world and home.get(var, world) != world
            return (_PLAIN if other else reader), None

        def function(old: list[Array], added: dict[int, Array], held: Sequence[Array] = ()) -> list[Array]:
            def leaf(site: Site, at: World) -> Array:
                y = env[site.output]
                return y + added[site.index] if at == world and site.index in mine else y

            def at_site(site: Site, site_in: Array, vals: list[Array]) -> tuple[Array, None]:
                y = site.primitive.bind(*map(jax.lax.stop_gradient, vals), **site.params)
                return (y if site_in is None else y + site_in), None

            given = dict(zip(self.group.hidden_invars, old, strict=True))
            if held and self.necks is not None:
                given.update(zip((neck.var for neck in self.necks.all), held, strict=True))
            view = View(
                known=without(env, self.varies, given),
                at_site=lambda site, at: at_site,
                reads=reads,
                site_ins=added,
                leaf=leaf,
            )
            return evaluate(program, [(v, world) for v in targets or self.group.hidden_outvars], view)

        return function

    def jacobians(self, env: Mapping[Var, Array]) -> tuple[Jacobian | None, dict[int, list[Array]]]:
        """`D[new state][old state]`, arrays of `varshape` (None: no memory), and the `J` of each site.

        The arrays of `J` have the shape of `y` or, if the position map is `on_hidden`, that of `varshape`.
        """
        step, necks = self.step(env), self.necks
        old = [env[v] for v in self.group.hidden_invars]
        added = {r.site.index: jnp.zeros(r.site.shape, r.site.output.aval.dtype) for r, _ in self.fed_by}
        if self.forward_only:
            D, J = self._pushed(step, old, added)
            return D if self.has_memory else None, J
        held = [] if necks is None else [env[neck.var] for neck in necks.all]
        new, pull = jax.vjp(step, old, added, held)
        D, J = self._pulled(new, lambda cotangents: pull(cotangents)[:2])
        if necks is not None:
            _, back = jax.vjp(self.step(env, [neck.var for neck in necks.all]), old, added)
            forth = jax.linear_transpose(lambda cts: pull(cts)[2], new)
            D, J = through(necks, self.fed_by, D, J, held, back, lambda tangents: forth(tangents)[0])
        for r, m in self.fed_by:
            # a pull-back would add up the copies of a broadcast; pushed forward, they stay separate
            if m.on_hidden:
                push = self._transposed(new, pull, r.site)
                J[r.site.index] = self._push_colours(push, r.site.shape, m.source_width or 1, m)
        return D if self.has_memory else None, J

    # -- backwards ---------------------------------------------------------------------------------

    def pull_states(
        self, new: Sequence[Array], pull: Callable[[list[Array]], T], colour: NpArray, count: int
    ) -> list[T]:
        """Pull back ones on one state of the group, at the positions of one colour.

        For each state, the result of `pull` with an axis of `count` colours in front of every array.
        """
        shape = self.group.varshape
        # ones are created here, so that XLA can fold these constants
        masks = jnp.ones((1, *shape), bool)
        if count > 1:
            numbers = jnp.arange(count, dtype=colour.dtype).reshape(-1, *[1] * len(shape))
            masks = numbers == colour.reshape(1, *shape)

        def one(state: int, mask: Array) -> T:
            cotangents = self._at_state(new, state, mask, dual=True)
            back = pull(cotangents)
            if not jnp.issubdtype(self.group.dtype, jnp.complexfloating):
                return back
            # the cotangent of a real source is the real part; a cotangent of `-i` gives the imaginary part
            turned = pull(
                [
                    c * jnp.asarray(-1j, c.dtype) if jnp.iscomplexobj(c) else jnp.zeros_like(c)
                    for c in cotangents
                ]
            )
            joined = lambda a, b: a if jnp.iscomplexobj(a) else jax.lax.complex(a, b)
            return jax.tree.map(joined, back, turned)  # type: ignore[no-any-return]

        if count == 1:
            return [jax.tree.map(lambda a: a[None], one(s, masks[0])) for s in range(self.group.num_state)]
        return [jax.vmap(lambda mask, s=s: one(s, mask))(masks) for s in range(self.group.num_state)]

    def _pulled(
        self, new: list[Array], pull: Callable[[list[Array]], tuple[list[Array], dict[int, Array]]]
    ) -> tuple[list[list[Array]], dict[int, list[Array]]]:
        """`D` and the `J` of all sites that are no broadcasts; with necks, along paths that pass none."""
        hidden, (colour, count) = self.group.hidden, self.colouring
        maps = {r.site.index: m.map for r, m in self.fed_by if not m.on_hidden}
        if self.necks is None:
            old = [_holds(r, h.positions) for h, r in zip(hidden, self.group.within, strict=True)]
            sites = {i: places >= 0 for i, places in maps.items()}
        else:
            count, old, sites = 1, self.necks.old, self.necks.sites
        D: list[list[Array]] = []
        J: dict[int, list[Array]] = {i: [] for i in maps}
        for dh, dp in self.pull_states(new, pull, colour, count):
            row: list[Array] = []
            for h, d, kept in zip(hidden, dh, old, strict=True):
                row += states_of(h, select(d, colour[h.positions], kept))
            D.append(row)
            for i, places in maps.items():
                J[i].append(select(dp[i], colour[np.maximum(places, 0)], sites[i]))
        return D, J

    def _at_state(self, like: Sequence[Array], state: int, mask: Array, *, dual: bool = False) -> list[Array]:
        """Tangents (`dual`: cotangents) of the hidden arrays: ones at one state, where the mask is true."""
        found = []
        for h, value in zip(self.group.hidden, like, strict=True):
            inside = 0 <= state < h.num_state
            ones = _at_state(h, state, mask, value.dtype, dual=dual) if inside else jnp.zeros_like(value)
            found.append(ones)
            state -= h.num_state
        return found

    # -- forwards ----------------------------------------------------------------------------------

    def _transposed(self, new: list[Array], pull: Callable[..., Any], site: Site) -> Push:
        """Push forward a perturbation of one site's output, by transposing the pull-back."""
        back = jax.linear_transpose(lambda cts: pull(cts)[1][site.index], new)
        return self._from_site(site, lambda tangent: self.group.stack_hidden(back(tangent)[0]))

    def _from_site(self, site: Site, push: Push) -> Push:
        """`push` for boolean input; for real states and a complex `y`, with the result of a pull-back."""
        dtype = site.output.aval.dtype
        if not jnp.issubdtype(dtype, jnp.complexfloating) or not any(h.split for h in self.group.hidden):
            return lambda ones: push(ones.astype(dtype))
        i = jnp.asarray(1j, dtype)
        return lambda ones: jax.lax.complex(push(ones.astype(dtype)), -push(ones.astype(dtype) * i))

    def _push_colours(
        self, push: Push, shape: Shape, colours: int, positions: PositionMap | None = None
    ) -> list[Array]:
        """Push ones forward colour by colour: one array for each new state.

        The arrays have the shape of the position map, which by default takes each position to itself.
        """
        number = numbered(shape)
        places = number if positions is None else positions.map
        out = jnp.stack([push(jnp.asarray(number % colours == c)) for c in range(colours)])
        if positions is None or positions.on_hidden:
            colour = np.maximum(places, 0) % colours
            return [select(out[:, s], colour, places >= 0) for s in range(self.group.num_state)]
        flat = out.reshape(*out.shape[:2], -1)
        picked = flat[number.ravel() % colours, :, np.maximum(places, 0).ravel()]
        picked = jnp.where(jnp.asarray(places.ravel() >= 0)[:, None], picked, 0)
        return [one.reshape(shape) for one in states(picked, 1)]

    def _pushed(
        self, step: Callable[..., list[Array]], old: list[Array], added: dict[int, Array]
    ) -> tuple[list[list[Array]], dict[int, list[Array]]]:
        """`D` and `J` in forward mode."""

        def push(tangents: tuple[list[Array], dict[int, Array]]) -> Array:
            return self.group.stack_hidden(jax.jvp(step, (old, added), tangents)[1])

        no_old, none_added = jax.tree.map(jnp.zeros_like, (old, added))
        of_old, of_sites = self._forward_colours
        columns, J = [], {}
        for s, count in enumerate(of_old):
            from_old = lambda ones, s=s: push((self._at_state(old, s, ones), none_added))
            columns.append(self._push_colours(from_old, self.group.varshape, count))
        for r, m in self.fed_by:
            site = r.site
            from_site = self._from_site(site, lambda t, i=site.index: push((no_old, {**none_added, i: t})))  # type: ignore[misc]
            J[site.index] = self._push_colours(from_site, site.shape, of_sites[site.index], m)
        return list(map(list, zip(*columns, strict=True))), J


def without(env: Mapping[Var, Array], varies: Container[Var], given: Mapping[Var, Array]) -> dict[Var, Array]:
    """The known values that do not vary, and given ones for some that do."""
    return {**{v: a for v, a in env.items() if v not in varies}, **given}


def _holds(reach: Reach, positions: NpArray) -> NpArray:
    """Whether each element may reach its own position."""
    return (reach.lowest <= positions) & (positions <= reach.highest)


def select(array: Float[Array, "colour ..."], colour: NpArray, kept: NpArray) -> Array:
    """`array[colour[i], i]` at each element `i`, and zero where it is not kept."""
    if array.shape[0] == 1:
        chosen = array[0]
    else:
        chosen = jnp.take_along_axis(array, jnp.asarray(colour)[None], axis=0)[0]
    return chosen if np.all(kept) else jnp.where(jnp.asarray(kept), chosen, 0)


def earlier(keys: NpArray) -> NpArray:
    """For each element, the number of earlier ones with the same key."""
    order = np.argsort(keys, kind="stable")
    result = np.empty(len(keys), int)
    result[order] = np.arange(len(keys)) - np.searchsorted(keys[order], keys[order])
    return result


def states_of(hidden: Hidden, array: Array) -> list[Array]:
    """Split a cotangent of a hidden array into its states."""
    found = [array] if hidden.axis is None else states(array, hidden.axis)
    return [*(a.real for a in found), *(-a.imag for a in found)] if hidden.split else found


def _at_state(hidden: Hidden, state: int, ones: Array, dtype: DTypeLike, *, dual: bool) -> Array:
    """A tangent (`dual`: cotangent) of a hidden array: ones at one state, where a mask is true."""
    num = hidden.num_state // 2 if hidden.split else hidden.num_state
    if hidden.axis is not None:
        ones = jnp.expand_dims(ones, hidden.axis)
        shape = [num if a == hidden.axis else 1 for a in range(ones.ndim)]
        ones = ones & (np.arange(num) == state % num).reshape(shape)
    ones = ones.astype(dtype)
    return ones if state < num else ones * jnp.asarray(-1j if dual else 1j, dtype)
