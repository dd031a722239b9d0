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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

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
from .._compiler.positions import Positions, positions_of
from .._compiler.program import Site, Var
from .._compiler.reach import Reach
from .._compiler.relation import HiddenParamOpRelation, PositionMap
from .._compiler.slices import between, dependents, has_while
from .._compiler.step import show_paths
from .necks import Necks, through
from .trace_math import Jacobian, States, states

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
        shape = self.group.varshape
        numbers = numbered(shape)
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

    def _width(self, positions: Positions, number: NpArray) -> int:
        """The longest range that an element reaches, for a given numbering of the hidden positions."""
        starts = {h.outvar: Reach.at(number[h.positions]) for h in self.group.hidden}
        others = set(self.graph.other_outvars(self.group))
        old, _ = positions.reaches(starts)
        _, sites = positions.reaches(starts, lambda v: v in others)
        widths = [old[h.invar].width for h in self.group.hidden if h.invar in old]
        widths += [sites[r.site.index].width for r, m in self.fed_by if not m.on_hidden]
        return max(1, *widths) if widths else 1

    @cached_property
    def forward_colours(self) -> list[int]:
        """The number of colours for pushing forward each old state, then each site."""
        positions = positions_of(self.graph.module_info.program)
        widths = []
        for h in self.group.hidden:
            came = positions.sources({h.invar: Reach.at(h.positions)}, {})
            widths.append(self._width_at_states(came))
        for r, _ in self.fed_by:
            came = positions.sources({}, {r.site.index: Reach.identity(r.site.shape)})
            widths.append(self._width_at_states(came))
        return widths

    def _width_at_states(self, came: dict[Var, Reach]) -> int:
        return max(1, *(came[v].width if v in came else 1 for v in self.group.hidden_outvars))

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

    def jacobians(self, env: Mapping[Var, Array]) -> tuple[Jacobian | None, dict[int, States]]:
        """`D[new state][old state]`, arrays of `varshape` (None: no memory), and the `J` of each site.

        The arrays of `J` have the shape of `y` or, if the position map is `on_hidden`, that of `varshape`.
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
            # a pull-back would add up the copies of a broadcast; pushed forward, they stay separate
            if m.on_hidden:
                push = self._transposed(new, pull, r.site.index)
                J[r.site.index] = self._push_colours(
                    push, r.site.shape, m.source_width or 1, m.map, on_hidden=True
                )
        return D, J

    def _through(
        self, necks: Necks, env: Mapping[Var, Array], old: list[Array], added: dict[int, Array]
    ) -> tuple[Jacobian | None, dict[int, States]]:
        """`D` and `J` if all mixing goes through necks."""
        held = [env[neck.var] for neck in necks.all]
        new, pull = jax.vjp(self.step(env), old, added, held)
        _, back = jax.vjp(self.step(env, [neck.var for neck in necks.all]), old, added)
        forth = jax.linear_transpose(lambda cts: pull(cts)[2], new)
        D: list[list[Array]] = []
        J: dict[int, list[Array]] = {i: [] for i in added}
        own = numbered(self.group.varshape)
        for dh, dp, _ in self.pull_states(new, pull, own, 1):
            D.append([select(d, None, kept) for d, kept in zip(dh, necks.old, strict=True)])
            for i in J:
                J[i].append(select(dp[i], None, necks.sites[i]))
        D, J = through(necks, self.fed_by, D, J, held, back, lambda tangents: forth(tangents)[0])
        return D if self.has_memory else None, dict(J)

    # -- backwards ---------------------------------------------------------------------------------

    def pull_states(
        self, new: Sequence[Array], pull: Callable[[list[Array]], Any], colour: NpArray, count: int
    ) -> list[Any]:
        """Pull back ones on one state of the group, at the positions of one colour.

        For each state, the result of `pull` with an axis of `count` colours in front of every array.
        """
        shape = self.group.varshape
        # ones are created here, so that XLA can fold these constants
        masks = jnp.ones((1, *shape), bool)
        if count > 1:
            masks = jnp.arange(count, dtype=colour.dtype).reshape(-1, *[1] * len(shape)) == colour.reshape(
                1, *shape
            )

        def one(state: int, mask: Array) -> Any:
            cotangents = self._one_state(new, state, mask)
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
            return jax.tree.map(
                lambda a, b: a if jnp.iscomplexobj(a) else jax.lax.complex(a, b), back, turned
            )

        if count == 1:
            return [jax.tree.map(lambda a: a[None], one(s, masks[0])) for s in range(self.group.num_state)]
        return [jax.vmap(lambda mask, s=s: one(s, mask))(masks) for s in range(self.group.num_state)]

    def _pulled(
        self, new: list[Array], pull: Callable[..., Any]
    ) -> tuple[Jacobian | None, dict[int, States]]:
        colour, count = self.colouring
        rows: list[list[Array]] = []
        J: dict[int, list[Array]] = {r.site.index: [] for r, m in self.fed_by if not m.on_hidden}
        for dh, dp in self.pull_states(new, pull, colour, count):
            rows.append(
                [
                    part
                    for h, r, d in zip(self.group.hidden, self.group.within, dh, strict=True)
                    for part in states_of(h, select(d, colour[h.positions], _holds(r, h.positions)))
                ]
            )
            for relation, m in self.fed_by:
                if not m.on_hidden:
                    i = relation.site.index
                    J[i].append(select(dp[i], colour[np.maximum(m.map, 0)], m.map >= 0))
        return rows if self.has_memory else None, dict(J)

    def _one_state(self, new: Sequence[Array], state: int, mask: Array) -> list[Array]:
        """Cotangents of the new states: ones at one state, where the mask is true."""
        cotangents = []
        for h, value in zip(self.group.hidden, new, strict=True):
            inside = 0 <= state < h.num_state
            ones = _at_state(h, state, mask, value.dtype, dual=True) if inside else jnp.zeros_like(value)
            cotangents.append(ones)
            state -= h.num_state
        return cotangents

    # -- forwards ----------------------------------------------------------------------------------

    def _transposed(self, new: list[Array], pull: Callable[..., Any], index: int) -> Callable[[Array], Array]:
        """Push forward a perturbation of one site's output, by transposing the pull-back."""
        back = jax.linear_transpose(lambda cts: pull(cts)[1][index], new)
        return self._from_site(index, lambda tangent: self.group.stack_hidden(back(tangent)[0]))

    def _from_site(self, index: int, push: Callable[[Array], Array]) -> Callable[[Array], Array]:
        """`push` for boolean input; for real states and a complex `y`, with the result of a pull-back."""
        dtype = next(r.site.output.aval.dtype for r, _ in self.fed_by if r.site.index == index)
        if not jnp.issubdtype(dtype, jnp.complexfloating) or not any(h.split for h in self.group.hidden):
            return lambda ones: push(ones.astype(dtype))
        i = jnp.asarray(1j, dtype)
        return lambda ones: jax.lax.complex(push(ones.astype(dtype)), -push(ones.astype(dtype) * i))

    def _push_colours(
        self,
        push: Callable[[Array], Array],
        shape: tuple[int, ...],
        colours: int,
        places: NpArray,
        on_hidden: bool,
    ) -> States:
        """Push ones forward colour by colour: one array for each new state.

        `places` is a position map (see `PositionMap`); the arrays have its shape.
        """
        number = numbered(shape)
        out = jnp.stack([push(jnp.asarray(number % colours == c)) for c in range(colours)])
        if on_hidden:
            colour = np.maximum(places, 0) % colours
            return [select(out[:, s], colour, places >= 0) for s in range(self.group.num_state)]
        flat = out.reshape(*out.shape[:2], -1)
        picked = flat[number.ravel() % colours, :, np.maximum(places, 0).ravel()]
        picked = jnp.where(jnp.asarray(places.ravel() >= 0)[:, None], picked, 0)
        return [one.reshape(shape) for one in states(picked, 1)]

    def _pushed(
        self, step: Callable[..., list[Array]], old: list[Array], added: dict[int, Array]
    ) -> tuple[Jacobian | None, dict[int, States]]:
        def push(tangents: tuple[list[Array], dict[int, Array]]) -> Array:
            return self.group.stack_hidden(jax.jvp(step, (old, added), tangents)[1])

        no_old, none_added = jax.tree.map(jnp.zeros_like, (old, added))
        own = numbered(self.group.varshape)
        columns: list[States] = []
        widths = self.forward_colours
        for k, h in enumerate(self.group.hidden):
            for state in range(h.num_state):

                def from_old(ones: Array, k: int = k, h: Hidden = h, state: int = state) -> Array:
                    tangent = _at_state(h, state, ones, old[k].dtype)
                    return push(([*no_old[:k], tangent, *no_old[k + 1 :]], none_added))

                columns.append(self._push_colours(from_old, own.shape, widths[k], own, on_hidden=True))
        J = {}
        for (r, m), count in zip(self.fed_by, widths[len(self.group.hidden) :], strict=True):
            i = r.site.index
            from_site = self._from_site(i, lambda t, i=i: push((no_old, {**none_added, i: t})))  # type: ignore[misc]
            J[i] = self._push_colours(from_site, r.site.shape, count, m.map, m.on_hidden)
        return list(zip(*columns, strict=True)) if self.has_memory else None, J


class Known(Mapping[Var, Array]):
    """A mapping of known values: those that do not vary, and given ones for some that do."""

    def __init__(self, env: Mapping[Var, Array], varies: set[Var], given: Mapping[Var, Array]) -> None:
        self.env, self.varies, self.given = env, varies, given

    def __contains__(self, var: object) -> bool:
        return var in self.given or (var in self.env and var not in self.varies)

    def __getitem__(self, var: Var) -> Array:
        return self.given[var] if var in self.given else self.env[var]

    def __iter__(self) -> Iterator[Var]:
        return (v for v in {**self.env, **self.given} if v in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _holds(reach: Reach, positions: NpArray) -> NpArray:
    """Whether each element may reach its own position."""
    return (reach.lowest <= positions) & (positions <= reach.highest)


def select(array: Float[Array, "colour ..."], colour: NpArray | None, kept: NpArray) -> Array:
    """`array[colour[i], i]` at each element `i`, and zero where it is not kept."""
    if array.shape[0] == 1:
        chosen = array[0]
    else:
        chosen = jnp.take_along_axis(array, jnp.asarray(colour)[None], axis=0)[0]
    return chosen if np.all(kept) else jnp.where(jnp.asarray(kept), chosen, 0)


def states_of(hidden: Hidden, array: Array) -> list[Array]:
    """Split a cotangent of a hidden array into its states."""
    found = [array] if hidden.axis is None else states(array, hidden.axis)
    return [*(a.real for a in found), *(-a.imag for a in found)] if hidden.split else found


def _at_state(hidden: Hidden, state: int, ones: Array, dtype: Any, *, dual: bool = False) -> Array:
    """A tangent (`dual`: cotangent) of a hidden array: ones at one state, where a mask is true."""
    num = hidden.num_state // 2 if hidden.split else hidden.num_state
    if hidden.axis is not None:
        ones = jnp.expand_dims(ones, hidden.axis)
        shape = [num if a == hidden.axis else 1 for a in range(ones.ndim)]
        ones = ones & (np.arange(num) == state % num).reshape(shape)
    ones = ones.astype(dtype)
    return ones if state < num else ones * jnp.asarray(-1j if dual else 1j, dtype)
