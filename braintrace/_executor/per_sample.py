"""Per-sample state vectors, cotangents and weight gradients of a compiled step.

A gradient of a parameter is a sum over the batch; here it keeps the batch axis. At a site (a marked op),

    dL/dw of sample b = sum_t x[t, b] dy[t, b]

is one product over time, by the axis labels of the op. If the labels do not separate the samples at a use of
a parameter, its gradient is pulled back once per sample instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .._compiler.custom_derivatives import PullBack
from .._compiler.dataflow import Flow, solve, union
from .._compiler.errors import NotSupportedError
from .._compiler.program import Node, Site, Var
from .._compiler.samples import Samples, counting, find_samples
from .._compiler.step import show_paths
from .._meshes import MeshAxes, all_on_mesh, mesh_of
from .._types import NumPyArray, PyTree
from .effective_weights import OfWeights, Weighted
from .executor import ETraceGraphExecutor, Leaves
from .marked_step import MarkedStep
from .matrices import Matrix as Matrix
from .matrices import find_matrices
from .per_sample_traces import Pulled, Rows, Terms, TracesPerSample, add_terms
from .weight_gradients import (
    over_time,
    pull_weights,
    row_axis,
    with_rows,
)
from .window import Crossing, Window, each_step, where_rows

Vectors = Float[Array, "samples n"]
RowAxis = Callable[[int], int]  # the position of the row axis among so many axes of a parameter


class PerSample:
    """Per-sample linear maps of one compiled step: state vectors, pull-backs and weight gradients."""

    def __init__(self, linear: MarkedStep, samples: Samples) -> None:
        self.linear, self.samples = linear, samples
        self.executor, self.info = linear.traced, linear.info

    # -- state vectors -----------------------------------------------------------------------------

    @property
    def state_size(self) -> int:
        return self.samples.state_size

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The real type of state vectors, which holds all carried states."""
        types = [jnp.finfo(v.aval.dtype).dtype for v in self.samples.carried]
        return np.result_type(np.float32, *types) if types else np.dtype(np.float32)

    @cached_property
    def places(self) -> dict[int, NumPyArray]:
        """The indices in the state vector of each carried leaf that depends on parameters, by leaf index."""
        at, found, leaves = 0, {}, self.info.carried_invars
        for v in self.samples.carried:
            size = real_parts(v) * int(v.aval.size) // self.samples.count
            found[leaves.index(v)] = np.arange(at, at + size)
            at += size
        return found

    @property
    def lead(self) -> MeshAxes:
        """The mesh axes that samples are sharded over."""
        at = self.executor.sharding
        return None if at is None else at.samples(self.samples.axis, self.samples.count)

    @property
    def unit_rows(self) -> Float[Array, "samples n n"]:
        """The unit vectors of the state, as rows for each sample."""
        eye = jnp.eye(self.state_size, dtype=self.dtype)
        return jnp.broadcast_to(eye, (self.samples.count, *eye.shape))

    def shard_samples(self, array: Array) -> Array:
        """Shard an array along samples, its first axis, and along no other axis."""
        at = self.executor.sharding
        return array if at is None else at.put(array, (self.lead, *[None] * (array.ndim - 1)))

    def replicated(self, array: Array) -> Array:
        """Replicate an array on all devices."""
        at = self.executor.sharding
        return array if at is None else at.put(array, (None,) * array.ndim)

    def _shard_samples_at(self, site: Site, array: Array, lead: int) -> Array:
        """Shard a site's output, or an array with `lead` more axes in front, along samples only."""
        at, axis = self.executor.sharding, self.axis_at(site)
        spec = [self.lead if a == axis else None for a in range(-lead, array.ndim - lead)]
        return array if at is None else at.put(array, tuple(spec))

    def vectors(self, leaves: Leaves, *, dual: bool) -> Vectors:
        """Flatten tangents (`dual`: cotangents) of the carried leaves to state vectors.

        The state axis is gathered if units are sharded, because the result is small and used often.
        """
        by_var = dict(zip(self.info.carried_invars, leaves, strict=True))
        parts = [jnp.zeros((self.samples.count, 0), self.dtype)]  # parameters may act on nothing carried
        for v in self.samples.carried:
            one = self.shard_samples(_first(by_var[v], self.samples.axis))
            each = [one.real, -one.imag if dual else one.imag] if jnp.iscomplexobj(one) else [one]
            parts += [a.astype(self.dtype).reshape(self.samples.count, -1) for a in each]
        return jnp.concatenate(parts, axis=1)

    def leaves(self, vectors: Vectors, *, dual: bool) -> Leaves:
        """Unflatten state vectors to tangents (`dual`: cotangents) of the carried leaves.

        None for leaves that are not inexact, zeros for those that depend on no parameter.
        """
        at, found = 0, {}
        for v in self.samples.carried:
            rest = [n for a, n in enumerate(v.aval.shape) if a != self.samples.axis]
            size = v.aval.size // self.samples.count
            each = []
            for _ in range(real_parts(v)):
                part = vectors[:, at : at + size].reshape(self.samples.count, *rest)
                each.append(self.shard_samples(part))
                at += size
            one = each[0] if len(each) == 1 else jax.lax.complex(each[0], -each[1] if dual else each[1])
            found[v] = _back(one, self.samples.axis).astype(v.aval.dtype)
        return [
            found[v] if v in found else jnp.zeros(v.aval.shape, v.aval.dtype) if v.inexact else None
            for v in self.info.carried_invars
        ]

    def axis_at(self, site: Site) -> int | None:
        """The batch axis of the output of a site."""
        if self.samples.axis is None:
            return None
        numbers = self.samples.sites[site.index]
        axis = counting(numbers, tuple(range(numbers.ndim)), self.samples.count)  # type: ignore[arg-type]
        return None if axis is None else int(axis)

    def reset(self, values: dict[str, Array], rows: Bool[Array, " samples"]) -> dict[str, Array]:
        """Zero the per-sample arrays of the samples that `rows` flags."""
        if self.samples.axis != 0:
            raise NotSupportedError(
                "Samples cannot be reset one by one: the batch axis is not the first axis of the states. "
                "Reset all of them."
            )
        return {k: where_rows(rows, jnp.zeros_like(a), a) for k, a in values.items()}

    # -- sites -------------------------------------------------------------------------------------

    @cached_property
    def labels(self) -> dict[tuple[int, str], str | None]:
        """The label of the batch axis of each weight at each site; None if the labels have none."""
        return {
            (w.site.index, name): self.samples.label(w.site, layout)
            for w in self.linear.weighted
            if w.site.index in self.samples.sites
            for name, layout in w.layouts.items()
        }

    @cached_property
    def sites(self) -> list[Weighted]:
        """The sites that affect carried states, and whose labels separate the gradients of samples."""
        return [
            w
            for w in self.linear.weighted
            if w.site.index in self.samples.sites
            and (self.samples.axis is None or all(self.labels[w.site.index, name] for name in w.layouts))
        ]

    @cached_property
    def others(self) -> list[int]:
        """The leaves of `params` that affect carried states also on paths outside the weights of `sites`."""
        return self._acting({w.site.index for w in self.sites})

    @cached_property
    def acting(self) -> list[int]:
        """The leaves of `params` that affect carried states."""
        return self._acting(set())

    def _acting(self, excluded: set[int]) -> list[int]:
        """The leaves of `params` that affect carried states other than through the weights of some sites."""
        leaves = [(v, e.is_param) for e in self.info.fixed for v in e.invars]
        new = {a for e in self.info.carried for a in e.outvars}

        def transfer(node: Node, given: list[bool | None]) -> Any:
            if node.site is not None and node.site.index in excluded:
                return union(given[: node.site.num_inputs])
            return union(given)

        flow = Flow[bool](transfer, derivatives=True, enters=True, rule=PullBack.of)
        return [
            i
            for i, (v, is_param) in enumerate(leaves)
            if self.samples.carried
            and is_param
            and v.inexact
            and v.aval.size
            and new & set(solve(flow, self.info.program, [(v, True)])[0])
        ]

    @cached_property
    def matrices(self) -> dict[int, Matrix]:
        """The leaves of `params` whose only use is as the matrix of one dense op, with or without a trace."""
        return find_matrices(self)

    # -- pull-backs through a window ---------------------------------------------------------------

    def pull(
        self, window: Window, rows: Rows, axis: RowAxis = row_axis, *, samples_only: bool = False
    ) -> tuple[Rows, Terms]:
        """Pull rows of signals at the window's end back through it.

        Returns the signals at its start, and the per-sample gradients of the parameters within the window.
        `axis(ndim)` is the position of the row axis in these; `samples_only` shards them along samples only.
        """
        pulled = self.pull_rows(window, rows, axis)
        if samples_only:  # gather the factors, which are much smaller than their product
            dys = {
                w.site.index: self._shard_samples_at(w.site, pulled.dys[w.site.index], 2) for w in self.sites
            }
            pulled = replace(pulled, dys=dys)
        terms = self.weight_terms(window, pulled, axis)
        terms = {i: self.shard_samples(a) for i, a in terms.items()} if samples_only else terms
        return pulled.start, terms

    def pull_rows(
        self,
        window: Window,
        rows: Rows,
        axis: RowAxis = row_axis,
        crossing: Crossing | None = None,
    ) -> Pulled:
        """Pull rows of signals at the window's end back to its start and to the outputs of sites."""
        window = self.linear.window(window)
        count, each = self.samples.count, rows.shape[1]
        sites = [w.site for w in self.sites]
        if not self.others:
            start, left, dys, _ = self._pulled(window, rows, sites, (), crossing)
            return Pulled(start, left, dys, {})
        # The pull-back of a parameter sums over samples. So each sample has rows of its own, which are
        # zero for all other samples: row (b, r) gives the gradient of sample b alone.
        own = (jnp.eye(count, dtype=rows.dtype)[:, :, None, None] * rows[:, None]).reshape(
            count, count * each, -1
        )
        start, left, dys, dparams = self._pulled(window, own, sites, self.others, crossing)
        pick = lambda a: a.reshape(count, each, *a.shape[1:])
        start = jnp.sum(start.reshape(count, count, each, -1), 1)
        left, dys = jax.tree.map(lambda a: jnp.sum(pick(a), 0), (left, dys))
        terms = {i: jnp.moveaxis(pick(d), 1, 1 + axis(d.ndim - 1)) for i, d in dparams.items()}
        return Pulled(start, left, dys, terms)

    def weight_terms(self, window: Window, pulled: Pulled, axis: RowAxis = row_axis) -> Terms:
        """The per-sample gradients of the parameters within a window."""
        found = self._weight_terms(self.inputs(window), pulled.dys, axis)
        if not found:
            return pulled.terms
        by_leaf = self.of_weights(self.linear.window(window), self.sites, found, axis)
        return add_terms(pulled.terms, by_leaf)

    def push(self, window: Window, vectors: Vectors) -> Vectors:
        """Push tangents of the state from the window's start to its end."""
        return self.vectors(window.push(self.leaves(vectors, dual=False))[0], dual=False)

    def back(
        self, window: Window, rows: Rows, sites: Sequence[Weighted] = ()
    ) -> tuple[Rows, dict[int, Array]]:
        """Pull rows of signals from a window's end back to its start; also dL/dy of sites, (rows, time, *y).

        From unit rows, the first is the full Jacobian.
        """
        start, _, dys, _ = self._pulled(window, rows, [w.site for w in sites], ())
        return start, dys

    def _pulled(
        self,
        window: Window,
        rows: Rows,
        sites: Sequence[Site],
        others: Sequence[int],
        crossing: Crossing | None = None,
    ) -> tuple[Rows, Leaves, dict[int, Array], dict[int, Array]]:
        window = self.linear.window(window)
        if mesh_of(*window.params) is not None:
            # after this step's collectives: CPU devices may match those of concurrent loops wrongly
            rows, _ = jax.lax.optimization_barrier((all_on_mesh((rows, window.params))[0], window.before))
        rows = self.shard_samples(rows)
        cotangents = jax.vmap(lambda r: self.leaves(r, dual=True), 1)(rows)
        pulled, left, dys, dparams = window.pull(cotangents, sites, others, crossing)
        return jax.vmap(lambda c: self.vectors(c, dual=True), out_axes=1)(pulled), left, dys, dparams

    def inputs(self, window: Window) -> dict[int, list[Array]]:
        """The inputs of the sites at each step of a window."""
        window = self.linear.window(window)
        steps = (window.args, window.consts, window.before, window.ys)
        kept = {w.site.index: w.site.num_inputs for w in self.sites}

        def operands(step: tuple[PyTree, ...]) -> dict[int, list[Array]]:
            args, consts, before, ys = step
            found = window.executor.forward(window.params, args, window.consts_at(consts), before, ys)[3]
            return {i: found[i][:n] for i, n in kept.items()}

        found = {} if kept.keys() <= window.inputs.keys() else each_step(operands, steps)
        return {**found, **{i: window.inputs[i] for i in kept if i in window.inputs}}

    def _weight_terms(
        self, inputs: dict[int, list[Array]], dys: dict[int, Array], axis: RowAxis
    ) -> dict[tuple[int, str], Array]:
        """`sum_t x[t] dy[t]` of each weight at each site: samples first, then the weight's axes with rows."""
        found = {}
        for w in self.sites:
            i = w.site.index
            for name, layout in w.layouts.items():
                label = self.labels[i, name]
                want = (*(() if label is None else (label,)), *with_rows(layout.w, axis))
                term = over_time(layout, inputs[i], dys[i], want)
                found[i, name] = term[None] if label is None else term
        return found

    def to_parameters(self, window: Window, terms: dict[tuple[int, str], Array]) -> dict[int, Array]:
        """Pull gradients of effective weights, summed over samples, back to the parameters."""
        window = self.linear.window(window)
        pull = pull_weights(self.info, window.params, window.first_consts, self.sites, list(terms))
        found = pull(list(terms.values()))
        return {i: a for i, a in enumerate(found) if a is not None and self._is_param[i]}

    def of_weights(
        self,
        window: Window,
        of: Sequence[OfWeights],
        found: dict[tuple[int, str], Array],
        axis: RowAxis = row_axis,
    ) -> Terms:
        """Pull per-sample gradients of effective weights, with rows, back to the parameters.

        The first axis of a gradient without a batch axis has length one.
        """
        if not found:
            return {}
        params, count = window.params, max(map(len, found.values()))
        pull = pull_weights(window.executor.info, params, window.first_consts, of, list(found))
        arrays = [jnp.broadcast_to(a, (count, *a.shape[1:])) for a in found.values()]
        before, after = [axis(a.ndim - 2) for a in arrays], [axis(jnp.ndim(p)) for p in params]
        leaves = jax.vmap(jax.vmap(pull, (before,), after))(arrays)
        return {i: a for i, a in enumerate(leaves) if a is not None and self._is_param[i]}

    @cached_property
    def _is_param(self) -> list[bool]:
        return [e.is_param for e in self.info.fixed for _ in e.invars]

    # -- traces ------------------------------------------------------------------------------------

    @cached_property
    def traces(self) -> TracesPerSample:
        """The traces of the parameters, sample by sample."""
        return TracesPerSample(self)


def find_per_sample(
    executor: ETraceGraphExecutor, axis: int | str | None, *, traces: bool = True, mixed: bool = False
) -> PerSample:
    """The `PerSample` of a step, cached on its executor.

    With `traces`, all traces need a batch axis too. With `mixed`, a batch whose samples depend on each other
    is one sample; otherwise it is refused.
    """
    key = (PerSample, axis, traces, mixed)
    if key in executor.per_sample:
        return executor.per_sample[key]  # type: ignore[no-any-return]
    linear = MarkedStep(executor)
    samples = find_samples(linear.info, axis)
    if samples.mixed and not mixed:
        raise NotSupportedError(
            f"The rule stores arrays per sample, but the samples of {show_paths(samples.mixed)} along "
            f"axis {samples.axis} cannot be shown to be independent: an operation that combines entries "
            "along that axis (a norm over the batch, a linear solve with the batch in its columns) links "
            "them. Set `samples` to the axis of the states along which samples are independent "
            "(`samples=1`), or treat the batch as one sample (`samples=None`)."
        )
    if isinstance(axis, int) and not samples.have(axis):
        raise NotSupportedError(
            f"The states that parameters act on have no axis {axis} of one length in common: leave "
            "`samples` out, or take all as one (`samples=None`)."
        )
    found = PerSample(linear, samples)
    separate = not samples.mixed and (not traces or found.traces.have_samples)
    if not separate and not samples.mixed and axis != "auto":
        raise NotSupportedError(
            f"The traces of this model have no axis for the samples along axis {axis} of the states: "
            "leave `samples` out, or take all for one (`samples=None`)."
        )
    if not separate:  # such as the positions of an image without a batch
        found = PerSample(linear, find_samples(linear.info, None))
    executor.per_sample[key] = found
    return found


def real_parts(v: Var) -> int:
    """The number of real numbers per element: 2 for complex arrays."""
    return 2 if jnp.issubdtype(v.aval.dtype, jnp.complexfloating) else 1


def _first(a: Array, axis: int | None) -> Array:
    return a[None] if axis is None else jnp.moveaxis(a, axis, 0)


def _back(a: Array, axis: int | None) -> Array:
    return a[0] if axis is None else jnp.moveaxis(a, 0, axis)
