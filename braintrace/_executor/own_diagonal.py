"""The diagonal of the full Jacobian of a group (the *own diagonal*): dh[t]/dh[t-1] of each unit, all paths.

    O[s, r] at a position = dh_s[t]/dh_r[t-1] there = D[s, r] + the paths through marked ops

If each element that an op reads depends on one old position, and its output reaches one position, the path
through it contributes

    J_s[y] dy/dx dx/dh_r[t-1]        (h <- tanh(W h): the slope times W[o, o])

where `dy/dx` is computed once for all samples: each sample evaluates the op for a different unit vector. For
an op behind another one, as the candidate of a GRU behind its reset gate, the sum over all units in between
is a matrix product. In all other cases (a third op, ops inside control flow) each position is pulled back
separately, which is 15 (GRU) to 85 (plain RNN) times slower for 256 units and compiles no faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._compiler.errors import NotSupportedError
from .._compiler.evaluation import View, evaluate
from .._compiler.links import Array as NpArray
from .._compiler.positions import Positions, positions_of
from .._compiler.program import Site, Var
from .._compiler.reach import Reach
from .._compiler.relation import PositionMap
from .._compiler.samples import find_samples
from .._compiler.slices import behind, computed_from, dependents, has_while, plain_site, values_of
from .._compiler.step import show_paths
from .executor import ETraceGraphExecutor
from .jacobian import LocalGroup, earlier, select, states_of, without
from .trace_math import Jacobian, States, add_up, promoted

_MOST = 2**26  # elements: of all pull-backs together, or of the outputs of an op for all unit vectors


def own_diagonals(
    executor: ETraceGraphExecutor,
    env: Mapping[Var, Array],
    D: Mapping[int, Jacobian | None],
    J: Mapping[tuple[int, int], States],
) -> dict[int, Jacobian | None]:
    """The own diagonal of each group, from the values and local Jacobians of a step.

    None if no unit depends on its own old state.
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
class Read:
    """The elements of an op's input `x` that depend on one earlier element each; rows are samples."""

    site: Site
    source: NpArray  # the element that each element of `x` depends on; -1 if none
    xs: NpArray  # (samples, n): elements of `x`
    rank: NpArray  # (n,): their source, numbered within its sample

    @property
    def calls(self) -> int:
        return -(-int(self.xs.shape[1]) // len(self.xs))

    def at(self, i: NpArray) -> tuple[NpArray, NpArray]:
        """The call of the op and the sample in which the i-th unit vector is evaluated."""
        return i // len(self.xs), i % len(self.xs)


@dataclass(frozen=True, eq=False)
class Written:
    """The elements of `J` of an op, each for one hidden position; rows are samples."""

    site: Site
    j: NpArray  # (samples, n): elements of `J`
    y: NpArray  # elements of the output
    position: NpArray
    rank: NpArray  # (n,): the position, numbered within its sample


@dataclass(frozen=True, eq=False)
class Crossing:
    """An op, or two in sequence, on a path from a group's old states to its new ones."""

    first: Read  # of the old states
    last: Written
    pairs: tuple[NpArray, NpArray]  # (index into `first`, index into `last`) of equal position
    between: Read | None = None  # how the last op reads the first one; None if there is one op


class OwnDiagonal:
    """Computes the own diagonal of one group, with a plan that is made once."""

    def __init__(self, local: LocalGroup) -> None:
        self.local, self.group = local, local.group
        self.info = local.graph.module_info
        self._program = self.info.program

    def of(self, env: Mapping[Var, Array], D: Jacobian | None, J: Mapping[int, States]) -> Jacobian | None:
        if not self._relevant:
            return D
        crossings = self.crossings
        if crossings is None:
            return self._pulled(env)
        num, shape = range(self.group.num_state), self.group.varshape
        size = int(np.prod(shape, dtype=int))
        parts = [self._added(c, env, J[c.last.site.index], size) for c in crossings]
        if D is not None:
            parts.append(D)
        return [[add_up(promoted(*(p[s][r].reshape(shape) for p in parts))) for r in num] for s in num]

    # -- which ops are crossed ---------------------------------------------------------------------

    @cached_property
    def _after_old(self) -> set[Var]:
        """The variables that depend on the old states, also through ops."""
        return computed_from(self._program, self.group.hidden_invars)

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
        """The paths through one or two ops; None if there are others."""
        if self.local.forward_only or jnp.issubdtype(self.group.dtype, jnp.complexfloating):
            return None
        if any(h.split for h in self.group.hidden) or self._goes_by_another_group():
            return None
        if any(s.context or not s.primitive.is_known or s.num_inputs < 1 for s in self._relevant):
            return None
        fed = {r.site.index: m for r, m in self.local.fed_by}
        positions = positions_of(self._program)
        came = positions.sources({h.invar: Reach.at(h.positions) for h in self.group.hidden}, {})
        after = {s.index: dependents(self._program, [s.output]) for s in self._relevant}
        found = []
        for site in self._relevant:
            if site.index not in fed:
                if not after[site.index].isdisjoint(self.group.hidden_outvars):
                    return None
                continue
            last = self._written(site, fed[site.index])
            behind_it = [s for s in self._relevant if any(a in after[s.index] for a in site.inputs)]
            if last is None or self._varies_otherwise(site):
                return None
            if site.inputs[0] in came:
                found.append(self._joined(self._reads(site, came), last))
            for first in behind_it:
                further = any(a in after[s.index] for s in self._relevant for a in first.inputs)
                if further or self._varies_otherwise(first):
                    return None
                between = self._reads_output(site, first, positions)
                found.append(self._joined(self._reads(first, came), last, between, is_behind=True))
        return None if None in found else [c for c in found if c is not None]

    def _varies_otherwise(self, site: Site) -> bool:
        """Whether an operand other than the first depends on the old states."""
        return any(a in self._after_old for a in site.inputs[1:])

    def _goes_by_another_group(self) -> bool:
        before = behind(self._program, self.group.hidden_outvars)
        others = self.local.graph.other_outvars(self.group)
        return any(v in before and v in self._after_old for v in others)

    @cached_property
    def _sample_of(self) -> tuple[NpArray, int]:
        """The sample of each position, and the number of samples."""
        number = np.zeros(int(np.prod(self.group.varshape, dtype=int)), int)
        samples = find_samples(self.info)
        if samples.axis is None or samples.mixed:
            return number, 1
        for h in self.group.hidden:
            number[h.positions.ravel()] = np.indices(h.invar.aval.shape)[samples.axis].ravel()
        return number, samples.count

    @cached_property
    def _rank(self) -> NpArray:
        """The number of each position within its sample."""
        return earlier(self._sample_of[0])

    def _reads(self, site: Site, came: Mapping[Var, Reach]) -> Read | None:
        """How an op reads the old states."""
        reach = came.get(site.inputs[0])  # type: ignore[arg-type]
        return None if reach is None else self._read(site, reach, self._sample_of[0], self._rank)

    def _reads_output(self, site: Site, first: Site, positions: Positions) -> Read | None:
        """How an op reads the output of another one."""
        size = int(np.prod(first.shape, dtype=int))
        came = positions.sources({}, {first.index: Reach.identity(first.shape)})
        reach, (_, count) = came.get(site.inputs[0]), self._sample_of  # type: ignore[arg-type]
        sample = np.zeros(size, int) if count == 1 else find_samples(self.info).sites.get(first.index)
        if reach is None or sample is None or np.any(sample < 0):
            return None
        return self._read(site, reach, sample.ravel(), earlier(sample.ravel()))

    def _read(self, site: Site, reach: Reach, sample_of: NpArray, rank: NpArray) -> Read | None:
        if np.any((reach.highest >= 0) & (reach.lowest != reach.highest)):
            return None
        source = np.where(reach.highest >= 0, reach.lowest, -1).ravel()
        count = self._sample_of[1]
        xs = _by_sample(np.flatnonzero(source >= 0), sample_of[source[source >= 0]], count)
        if xs is None or np.any(rank[source[xs]] != rank[source[xs]][:1]):  # samples differ in structure
            return None
        read = Read(site, source, xs, rank[source[xs[0]]])
        return None if read.calls * int(np.prod(site.shape, dtype=int)) > _MOST else read

    def _written(self, site: Site, m: PositionMap) -> Written | None:
        places = m.map.ravel()
        j = np.flatnonzero(places >= 0)
        y, position = (places[j], j) if m.on_hidden else (j, places[j])
        number, count = self._sample_of
        rows = _by_sample(np.arange(len(j)), number[position], count)
        if (
            not m.complete
            or rows is None
            or np.any(self._rank[position[rows]] != self._rank[position[rows[0]]])
        ):
            return None
        return Written(site, j[rows], y[rows], position[rows], self._rank[position[rows[0]]])

    def _joined(
        self, first: Read | None, last: Written, between: Read | None = None, *, is_behind: bool = False
    ) -> Crossing | None:
        if first is None or (is_behind and between is None):
            return None
        k, i = np.nonzero(last.rank[:, None] == first.rank)
        order = np.argsort(last.rank[k], kind="stable")
        return Crossing(first, last, (i[order], k[order]), between)

    # -- what goes through them --------------------------------------------------------------------

    def _added(self, crossing: Crossing, env: Mapping[Var, Array], J: States, size: int) -> Jacobian:
        """The contribution `J_s dy/dx dx/dh_r` of one path, summed at each of `size` positions."""
        first, last, (i, k) = crossing.first, crossing.last, crossing.pairs
        outputs = _outputs(first, env)
        if crossing.between is None:
            call, lane = first.at(i)
            K = outputs[call, last.y[lane, k]][None]  # the same for all samples
        else:
            K = self._between(crossing.between, crossing, env, outputs)
        x = [a[first.xs[:, i]] for a in self._slopes(first, env)]
        through = [j.ravel()[last.j[:, k]] for j in J]
        add = _summing(last.position[:, k], size)
        return [[add(_times(j, K, a)) for a in x] for j in through]

    def _between(self, read: Read, crossing: Crossing, env: Mapping[Var, Array], outputs: Array) -> Array:
        """`sum_n dy/dx_n dx_n/dy' dy'/dx'`, `n` over elements between two ops: (samples, pairs)."""
        first, last, (i, k) = crossing.first, crossing.last, crossing.pairs
        n = np.arange(read.xs.shape[1])
        call, lane = first.at(i)
        into = outputs[call[None], read.source[read.xs[lane[None], n[:, None]]]]  # (places, pairs)
        call, lane = read.at(n)
        onward = _outputs(read, env)[call[:, None], last.y[lane[:, None], k[None]]]
        y = first.site.output
        (slope,) = self._by_places(read, env, dependents(self._program, [y]), [y], lambda d: [d[0]])
        slope, matrix = promoted(slope[read.xs], _times(onward, into))
        return jnp.matmul(slope, matrix, precision="highest")

    def _slopes(self, read: Read, env: Mapping[Var, Array]) -> States:
        """`dx/dh_r` at each element of `x`, for each state."""

        def by_state(dh: list[Array]) -> list[Array]:
            return [p for h, d in zip(self.group.hidden, dh, strict=True) for p in states_of(h, d)]

        return self._by_places(read, env, self._after_old, self.group.hidden_invars, by_state)

    def _by_places(
        self,
        read: Read,
        env: Mapping[Var, Array],
        varies: set[Var],
        of: Sequence[Var],
        parts: Callable[[list[Array]], list[Array]],
    ) -> States:
        """The derivative of each element of `x` in its source, without paths through marked ops, by part."""
        x = read.site.inputs[0]
        assert isinstance(x, Var)

        def closed(site: Site, site_in: Array, operands: list[Array]) -> tuple[Array, None]:
            return plain_site(site, site_in, list(map(jax.lax.stop_gradient, operands)))

        def function(given: list[Array]) -> Array:
            known = without(env, varies, dict(zip(of, given, strict=True)))
            return evaluate(self._program, [(x, None)], View(known=known, at_site=lambda s, w: closed))[0]

        _, pull = jax.vjp(function, [env[v] for v in of])
        # elements with the same source are pulled back one after the other
        turn = np.where(read.source >= 0, earlier(read.source), -1)
        result: list[Array] = []
        for c in range(int(turn.max(initial=0)) + 1):
            mask = jnp.asarray((turn == c).reshape(x.aval.shape))
            each = [p.ravel()[np.maximum(read.source, 0)] for p in parts(pull(mask.astype(x.aval.dtype))[0])]
            mine = jnp.asarray(turn == c)
            result = [jnp.where(mine, b, a) for a, b in zip(result, each, strict=True)] if result else each
        return result

    def _pulled(self, env: Mapping[Var, Array]) -> Jacobian:
        """Pull back each position separately, along all paths; all samples at once."""
        self._refuse()
        count = len(self._rank) // self._sample_of[1]
        old = [env[v] for v in self.group.hidden_invars]

        def function(old: list[Array]) -> list[Array]:
            known = without(env, self._after_old, dict(zip(self.group.hidden_invars, old, strict=True)))
            return values_of(self._program, self.group.hidden_outvars, known)

        new, pull = jax.vjp(function, old)
        everywhere = np.ones((), bool)
        return [
            [
                part
                for h, d in zip(self.group.hidden, dh, strict=True)
                for part in states_of(h, select(d, self._rank[h.positions], everywhere))
            ]
            for (dh,) in self.local.pull_states(new, pull, self._rank, count)
        ]

    def _refuse(self) -> None:
        site = self._relevant[0]
        op = f"`{site.primitive.name.removeprefix('etp_')}` at {site.source}"
        where = (
            f"the own diagonal of {show_paths(self.group.hidden_paths)} (the derivative of each unit in its "
            f"own old state, through marked ops such as {op})"
        )
        instead = "Use `braintrace.D_RTRL`, which leaves out paths through marked ops."
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
                f"For {where}, ops are in control flow, or more than two follow each other, so that each "
                f"position is pulled back separately: {size:,} elements per step, more than {_MOST:,}. "
                f"{instead}"
            )


def _outputs(read: Read, env: Mapping[Var, Array]) -> Array:
    """The outputs of an op for unit vectors, a different one in each sample: (calls, elements of `y`)."""
    site, aval = read.site, read.site.inputs[0].aval
    operands = [a.val if not isinstance(a, Var) else env[a] for a in site.inputs]
    n = np.arange(read.xs.shape[1])
    call, lane = read.at(n)
    ones = jnp.zeros((read.calls, int(aval.size)), aval.dtype).at[call, read.xs[lane, n]].set(1)

    def push(one: Array) -> Array:
        def op(x: Array) -> Array:
            return site.primitive.bind(x, *operands[1:], **site.params)  # type: ignore[no-any-return]

        return jax.jvp(op, [jnp.zeros(aval.shape, aval.dtype)], [one])[1]  # type: ignore[no-any-return]

    return jax.vmap(push)(ones.reshape(read.calls, *aval.shape)).reshape(read.calls, -1)


def _times(*factors: Array) -> Array:
    result, *rest = promoted(*factors)
    for f in rest:
        result = result * f
    return result  # type: ignore[no-any-return]


def _summing(position: NpArray, size: int) -> Callable[[Array], Array]:
    """A function that sums the entries of each position."""
    flat = position.ravel()
    order = np.argsort(flat, kind="stable")
    count = np.bincount(flat, minlength=size)
    if size and np.all(count == count[0]):  # faster than a scatter
        return lambda v: jnp.sum(v.ravel()[order].reshape(size, -1), axis=1)
    return lambda v: jnp.zeros(size, v.dtype).at[flat].add(v.ravel())


def _by_sample(items: NpArray, sample: NpArray, count: int) -> NpArray | None:
    """The items of each sample as a row; None if samples differ in number."""
    if len(set(np.bincount(sample, minlength=count))) > 1:
        return None
    return items[np.argsort(sample, kind="stable")].reshape(count, -1)
