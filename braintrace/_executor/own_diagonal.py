"""The own diagonal of a group: how each unit acts on itself within a step, along all paths.

    O[s, r] at a position = dh_s[t]/dh_r[t-1] there, marked ops open = D[s, r] + what goes through the ops

Where an op reads each old state at one place, and its output reaches one position, what goes through it is

    J_s[y] dy/dx dx/dh_r[t-1]        (h <- tanh(W h): the slope times W[o, o])

with `dy/dx` found once for all samples: the op is given a one at another place in each of them. All else (an
op behind another one, ops inside control flow) is pulled back position by position, which small models can
afford.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler.dataflow import Flow, solve
from .._compiler.errors import NotSupportedError
from .._compiler.evaluation import View, evaluate
from .._compiler.links import Array
from .._compiler.positions import Positions
from .._compiler.program import Program, Site, Var
from .._compiler.reach import Reach
from .._compiler.relation import HiddenParamOpRelation, PositionMap
from .._compiler.samples import find_samples
from .._compiler.slices import behind, has_while, plain_site
from .._compiler.step import show_paths
from .executor import ETraceGraphExecutor
from .jacobian import Known, LocalGroup, states_of
from .slots import Jacobian, States, add_up, promoted

_MOST = 2**26  # numbers: of all that is pulled back, or of the outputs of an op for every place of its input


def own_diagonals(
    executor: ETraceGraphExecutor,
    env: Mapping[Var, Any],
    D: Mapping[int, Jacobian | None],
    J: Mapping[tuple[int, int], States],
) -> dict[int, Jacobian | None]:
    """Of each group, the own diagonal of a step whose values and local Jacobians are known.

    None where no unit acts on itself from step to step.
    """
    plans = executor.planned.setdefault("own diagonal", {})
    result: dict[int, Jacobian | None] = {}
    for local in executor.groups:
        k = local.group.index
        if k not in plans:
            plans[k] = OwnDiagonal(local)
        result[k] = plans[k].of(env, D[k], {i: j for (i, g), j in J.items() if g == k})
    return result


@dataclass(frozen=True, eq=False)
class Crossing:
    """An op on the way from a group's old states to its new ones, with what it joins there.

    Pairs of a place of `x` and of a place where `J` is, which belong to one position: rows are samples.
    """

    site: Site
    source: Array  # the position that each element of `x` comes from; -1: none
    ones: tuple[Array, Array]  # of each place in the `x` of a sample: which call of the op, and where in `x`
    y: Array  # of each pair: where the output for that one is
    call: Array  # and of which call
    x: Array  # of each pair (samples, pairs): the place of `x`
    j: Array  # the place of `J`
    position: Array  # and the position


class OwnDiagonal:
    """How to get the own diagonal of one group; planned once."""

    def __init__(self, local: LocalGroup) -> None:
        self.local, self.group = local, local.group
        self.info = local.graph.module_info

    @property
    def _program(self) -> Program:
        return self.info.program

    def of(self, env: Mapping[Var, Any], D: Jacobian | None, J: Mapping[int, States]) -> Jacobian | None:
        if not self._relevant:
            return D
        crossings = self.crossings
        if crossings is None:
            return self._pulled(env)
        num, shape = range(self.group.num_state), self.group.varshape
        size = int(np.prod(shape, dtype=int))
        parts = [_added(c, env, J[c.site.index], self._read_by(c, env), size) for c in crossings]
        if D is not None:
            parts.append(D)
        return [[add_up(promoted(*(p[s][r].reshape(shape) for p in parts))) for r in num] for s in num]

    # -- which ops are crossed ---------------------------------------------------------------------

    @cached_property
    def _after_old(self) -> set[Var]:
        """What depends on the old states, also across ops."""
        return set(solve(Flow[bool](), self._program, ((v, True) for v in self.group.hidden_invars))[0])

    @cached_property
    def _relevant(self) -> list[Site]:
        """The sites on paths from the old states to the new ones."""
        before_new = behind(self._program, self.group.hidden_outvars)
        nodes = [self._program.nodes[self._program.holder[s.index]] for s in self._program.sites]
        return [
            s
            for s, node in zip(self._program.sites, nodes, strict=True)
            if any(isinstance(a, Var) and a in self._after_old and a.inexact for a in node.inputs)
            and any(v in before_new for v in node.outputs)
        ]

    @cached_property
    def crossings(self) -> list[Crossing] | None:
        """The ops that are crossed, each alone; None: it is not so simple."""
        if self.local.forward_only or jnp.issubdtype(self.group.dtype, jnp.complexfloating):
            return None
        if any(h.split for h in self.group.hidden) or self._goes_by_another_group():
            return None
        fed = {r.site.index: (r, m) for r, m in self.local.fed_by}
        old = {h.invar: Reach.at(h.positions) for h in self.group.hidden}
        came = Positions(self._program).sources(old, {})
        outputs = solve(Flow[bool](), self._program, ((s.output, True) for s in self._relevant))[0]
        found = []
        for site in self._relevant:
            crossing = None
            behind_another = any(a in outputs for a in site.inputs)
            if site.index in fed and not site.context and site.primitive.is_known and not behind_another:
                crossing = self._crossing(*fed[site.index], came)
            if crossing is None:
                return None
            found.append(crossing)
        return found

    def _goes_by_another_group(self) -> bool:
        before = behind(self._program, self.group.hidden_outvars)
        others = [v for g in self.local.graph.hidden_groups if g is not self.group for v in g.hidden_outvars]
        return any(v in before and v in self._after_old for v in others)

    @cached_property
    def _sample_of(self) -> tuple[Array, int]:
        """The sample of each position, and how many there are."""
        size = int(np.prod(self.group.varshape, dtype=int))
        samples = find_samples(self.info)
        number = np.zeros(size, int)
        if samples.axis is None or samples.mixed:
            return number, 1
        for h in self.group.hidden:
            shape = tuple(h.invar.aval.shape)
            lane = np.arange(shape[samples.axis]).reshape(-1, *[1] * (len(shape) - samples.axis - 1))
            number[h.positions.ravel()] = np.broadcast_to(lane, shape).ravel()
        return number, samples.count

    def _crossing(
        self, relation: HiddenParamOpRelation, m: PositionMap, came: Mapping[Var, Reach]
    ) -> Crossing | None:
        site = relation.site
        x, *rest = site.inputs[: site.num_inputs]
        others = [*rest, *site.weights.values()]
        if any(a in self._after_old for a in others) or not m.complete:
            return None
        if not isinstance(x, Var) or x not in came:
            return None
        reach = came[x]
        if np.any((reach.highest >= 0) & (reach.lowest != reach.highest)):
            return None
        source = np.where(reach.highest >= 0, reach.lowest, -1).ravel()
        places = m.map.ravel()
        j = np.flatnonzero(places >= 0)
        y, position = (places[j], j) if m.on_hidden else (j, places[j])
        sample_of, count = self._sample_of
        xs = _by_sample(np.flatnonzero(source >= 0), sample_of[source[source >= 0]], count)
        rows = _by_sample(np.arange(len(j)), sample_of[position], count)
        if xs is None or rows is None:
            return None
        within = _by_sample(np.arange(len(sample_of)), sample_of, count)
        assert within is not None
        rank = np.empty(len(sample_of), int)
        rank[within] = np.arange(within.shape[1])
        from_, to = rank[source[xs]], rank[position[rows]]
        if np.any(from_ != from_[:1]) or np.any(to != to[:1]):  # samples do not look alike
            return None
        pairs = [(i, k) for k, p in enumerate(to[0]) for i in np.flatnonzero(from_[0] == p)]
        which = np.asarray(pairs, int).reshape(-1, 2)
        i, k = which[np.argsort(to[0][which[:, 1]], kind="stable")].T
        num = xs.shape[1]
        if -(-num // count) * int(np.prod(site.shape, dtype=int)) > _MOST:
            return None
        lane = np.arange(num) % count
        return Crossing(
            site=site,
            source=source,
            ones=(np.arange(num) // count, xs[lane, np.arange(num)]),
            y=y[rows[lane[i], k]],
            call=i // count,
            x=xs[:, i],
            j=j[rows[:, k]],
            position=position[rows[:, k]],
        )

    # -- what goes through them --------------------------------------------------------------------

    def _function(self, env: Mapping[Var, Any], targets: Sequence[Var]) -> Any:
        """Some variables as a function of the group's old states, along all paths."""

        def function(old: list[Any]) -> list[Any]:
            known = Known(env, self._after_old, dict(zip(self.group.hidden_invars, old, strict=True)))
            view = View(known=known, at_site=lambda site, world: plain_site)
            return evaluate(self._program, [(v, None) for v in targets], view)

        return function

    def _read_by(self, crossing: Crossing, env: Mapping[Var, Any]) -> States:
        """`dx/dh_r` at each element of `x`, for each state."""
        x = crossing.site.inputs[0]
        assert isinstance(x, Var)
        old = [env[v] for v in self.group.hidden_invars]
        _, pull = jax.vjp(lambda h: self._function(env, [x])(h)[0], old)
        colour = _turn(crossing.source)
        each = []
        for c in range(int(colour.max(initial=-1)) + 1):
            mask = jnp.asarray((colour == c).reshape(x.aval.shape))
            (dh,) = pull(mask.astype(x.aval.dtype))
            parts = [p for h, d in zip(self.group.hidden, dh, strict=True) for p in states_of(h, d)]
            each.append([p.ravel()[np.maximum(crossing.source, 0)] for p in parts])
        result = each[0]
        for c, parts in enumerate(each[1:], 1):
            mine = jnp.asarray(colour == c)
            result = [jnp.where(mine, b, a) for a, b in zip(result, parts, strict=True)]
        return result

    def _pulled(self, env: Mapping[Var, Any]) -> Jacobian:
        """Position by position, along all paths; samples go together."""
        self._refuse()
        number, count = self._sample_of
        within = _by_sample(np.arange(len(number)), number, count)
        assert within is not None
        old = [env[v] for v in self.group.hidden_invars]
        new, pull = jax.vjp(self._function(env, self.group.hidden_outvars), old)
        shape, num = self.group.varshape, within.shape[1]
        turn = np.empty(len(number), int)
        turn[within] = np.arange(num)
        rows = []
        for s in range(self.group.num_state):

            def one(i: Any, s: int = s) -> list[Any]:
                mask = (jnp.asarray(turn) == i).reshape(shape)
                (dh,) = pull(self.local.one_state(new, s, mask))
                return [p for h, d in zip(self.group.hidden, dh, strict=True) for p in states_of(h, d)]

            each = jax.vmap(one)(jnp.arange(num))
            rows.append([_pick(a.reshape(num, -1), turn).reshape(shape) for a in each])
        return rows

    def _refuse(self) -> None:
        site = self._relevant[0]
        where = (
            f"the own diagonal of {show_paths(self.group.hidden_paths)} (how each unit acts on itself "
            f"through marked ops, such as `{site.primitive.name.removeprefix('etp_')}` at {site.source})"
        )
        instead = "Take `decay='jacobian'` (`braintrace.D_RTRL`), which keeps marked ops closed."
        nodes = [n for n in self._program.walk() if has_while(n)]
        if jnp.issubdtype(self.group.dtype, jnp.complexfloating) or any(h.split for h in self.group.hidden):
            raise NotSupportedError(f"There is no {where[4:]} for complex states. {instead}")
        if nodes and self.local.forward_only:
            raise NotSupportedError(
                f"There is no {where[4:]}: a loop at {nodes[0].source} has no reverse mode. {instead}"
            )
        number, count = self._sample_of
        size = self.group.num_state**2 * len(number) * (len(number) // count)
        if size > _MOST:
            raise NotSupportedError(
                f"For {where}, an op is behind another one or in control flow, so that it is found position "
                f"by position: that takes {size:,} numbers a step, more than {_MOST:,}. {instead}"
            )


def _added(crossing: Crossing, env: Mapping[Var, Any], J: States, x: States, positions: int) -> Jacobian:
    """What goes through one op: `J_s dy/dx dx/dh_r`, summed at each of so many positions."""
    site, aval = crossing.site, crossing.site.inputs[0].aval
    operands = [a.val if not isinstance(a, Var) else env[a] for a in site.inputs]
    size = int(np.prod(aval.shape, dtype=int))
    calls = int(crossing.ones[0].max(initial=-1)) + 1
    ones = jnp.zeros((calls, size), aval.dtype).at[crossing.ones].set(1).reshape(calls, *aval.shape)

    def push(one: Any) -> Any:
        def op(x: Any) -> Any:
            return site.primitive.bind(x, *operands[1:], **site.params)

        return jax.jvp(op, [jnp.zeros(aval.shape, aval.dtype)], [one])[1]

    K = jax.vmap(push)(ones).reshape(calls, -1)[crossing.call, crossing.y][None]  # the same for all samples
    given = [a.ravel()[crossing.x] for a in x]
    through = [j.ravel()[crossing.j] for j in J]
    add = _summing(crossing.position, positions)
    return [[add(_times(j, K, b)) for b in given] for j in through]


def _times(*factors: Any) -> Any:
    result, *rest = promoted(*factors)
    for f in rest:
        result = result * f
    return result


def _summing(position: Array, size: int) -> Any:
    """The sum, at each position, of what belongs to it."""
    flat = position.ravel()
    order = np.argsort(flat, kind="stable")
    count = np.bincount(flat, minlength=size)
    if size and np.all(count == count[0]):  # XLA scatters slowly
        return lambda v: jnp.sum(v.ravel()[order].reshape(size, -1), axis=1)
    return lambda v: jnp.zeros(size, v.dtype).at[flat].add(v.ravel())


def _by_sample(items: Array, sample: Array, count: int) -> Array | None:
    """The items of each sample, a row for each; None where some have more than others."""
    rows = [items[sample == b] for b in range(count)]
    return None if len({len(r) for r in rows}) > 1 else np.stack(rows)


def _turn(source: Array) -> Array:
    """Of each element, how many before it have the same source; -1 where there is none."""
    seen: dict[int, int] = {}
    result = np.full(len(source), -1)
    for i, p in enumerate(source.tolist()):
        if p >= 0:
            result[i] = seen.get(p, 0)
            seen[p] = result[i] + 1
    return result


def _pick(rows: Any, which: Array) -> Any:
    """`rows[which[i], i]`."""
    return jnp.take_along_axis(rows, jnp.asarray(which)[None], axis=0)[0]
