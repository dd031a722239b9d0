"""Consecutive steps, in the two forms that rules take.

A `Window` has the operands of each step, and computes Jacobians, pushes and pulls on demand. A `Record` has
the inputs, local Jacobians and signals of each step of a chunk, from which traces are updated.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from .._compat import Primitive, primitives
from .._compiler.errors import NotSupportedError
from .._compiler.primitives import COPIES, ELEMENT_WISE, LAYOUT, PARTS
from .._compiler.program import Site
from .._meshes import all_on_mesh
from .effective_weights import Effective
from .executor import ETraceGraphExecutor, Leaves, Local
from .pull_back import is_inexact
from .signals import KnownOutput
from .trace_math import finite

Signals = dict[int, Any]  # dL/dh of each group, (S, *varshape)


@dataclass(frozen=True)
class Crossing:
    """The part of a cotangent that crosses the start of a window, when several windows are pulled back."""

    starts: Sequence[int]  # the first steps of all windows but the first
    part: Callable[[Leaves, Any], Leaves]  # of the cotangents of the carried leaves, and a window's index


@dataclass(frozen=True, eq=False)
class Record:
    """Inputs, local Jacobians and signals of the steps of a chunk; all but the weights have leading time."""

    local: Local
    length: int
    signals: Signals | None = None  # dL/dh after each step; None without a loss
    old_signals: Signals | None = (
        None  # dL/dh before each step, of losses that read old states; None if none does
    )
    keep: Any = None  # (time, batch): False where a sample is reset before the step; None without resets
    # within-step dL/dy by site, (time, *y), if the rule adds the gradient of the weights through it
    dys: dict[int, Array] = field(default_factory=dict)

    @property
    def has_signals(self) -> bool:
        """Whether there is a loss."""
        return self.signals is not None or self.old_signals is not None

    @property
    def steps(self) -> Any:
        """The arrays with a time axis, for a scan."""
        return self.local.inputs, self.local.D, self.local.J, self.signals, self.old_signals, self.keep

    def one(self, step: Any) -> tuple[Local, Signals, Signals | None, Any]:
        """The local Jacobians, signals, old signals and `keep` of one slice of `steps`."""
        inputs, D, J, signals, old, keep = step
        return Local(inputs, self.local.weights, D, J, sharding=self.local.sharding), signals, old, keep

    def cut_at_resets(self) -> Record:
        """Encode resets as zeros: in `D` and `old_signals`, where `keep` is False."""
        if self.keep is None:
            return self

        def kept(array: Any, lead: int) -> Any:
            shape = (self.length, *[1] * lead, -1, *[1] * (array.ndim - lead - 2))
            return jnp.where(self.keep.reshape(shape), array, jnp.zeros_like(array))

        D = jax.tree.map(lambda d: kept(d, 0), self.local.D)
        old = jax.tree.map(lambda g: kept(g, 1), self.old_signals)
        return replace(self, local=replace(self.local, D=D), old_signals=old)


@dataclass(frozen=True, eq=False)
class Window:
    """Consecutive steps of a model; all arrays but the parameters have a leading time axis."""

    executor: ETraceGraphExecutor = field(repr=False)
    length: int
    params: Leaves
    args: Leaves
    consts: Leaves  # None for those in `fixed`
    before: list[Leaves]  # the carried states before each step
    ys: dict[int, KnownOutput]  # known outputs of the sites that new states depend on
    keep: Any = None  # (time, batch): False where a sample is reset before the step
    inputs: dict[int, Leaves] = field(default_factory=dict)  # inputs of sites, as far as they are known
    fixed: Leaves = field(default_factory=list)  # the constants that are the same at all steps, without time

    def _of_first(self, given: Any) -> Any:
        return jax.tree.map(lambda a: a[0], given)

    @property
    def without_first_reset(self) -> Window:
        """The window if no sample were reset at its first step."""
        return self if self.keep is None else replace(self, keep=self.keep.at[0].set(True))

    @property
    def first_consts(self) -> Leaves:
        """The constants that the model closes over, at the first step."""
        return self.consts_at(self._of_first(self.consts))

    def consts_at(self, consts: Leaves) -> Leaves:
        """All constants at one step, given its slice of `consts`."""
        return [f if c is None else c for c, f in zip(consts, self.fixed or consts, strict=True)]

    @cached_property
    def first(self) -> Local:
        """The local Jacobians of the first step."""
        args, before, ys = self._of_first((self.args, self.before, self.ys))
        local = self.executor.local(self.params, args, self.first_consts, before, ys)
        known = self._of_first(self.inputs)
        return replace(local, inputs={i: known.get(i, x) for i, x in local.inputs.items()})

    @property
    def inputs_of_first(self) -> Local:
        """The inputs and weights of the sites at the first step, without Jacobians."""
        return Local(self.first.inputs, self.weights, {}, {}, sharding=self.first.sharding)

    @cached_property
    def weights(self) -> Effective:
        """The effective weights, which are the same at all steps."""
        return self.executor.weights(self.params, self.first_consts)

    @cached_property
    def record(self) -> Record:
        """The local Jacobians of every step."""

        def one(step: Any) -> Any:
            args, consts, before, ys = step
            return self.executor.local(self.params, args, self.consts_at(consts), before, ys).arrays

        if self.length == 1:
            inputs, D, J = jax.tree.map(lambda a: jnp.asarray(a)[None], self.first.arrays)
        else:
            inputs, D, J = each_step(one, (self.args, self.consts, self.before, self.ys))
        inputs = {i: self.inputs.get(i, x) for i, x in inputs.items()}
        return Record(
            Local(inputs, self.weights, D, J, sharding=self.executor.sharding), self.length, keep=self.keep
        )

    # -- the window as a linear map ----------------------------------------------------------------

    def push(self, tangents: Leaves, changes: dict[int, Any] | None = None) -> tuple[Leaves, Leaves]:
        """Push tangents of the carried leaves from the start of the window to its end, along all paths.

        Leaves that have no derivative are None. `changes` are tangents of the parameters, by leaf, at every
        step. Non-finite tangents become zero.

        Returns the tangents at the end, and those before each step, (time, ...).
        """
        nodes = self.executor.info.program.walk()
        only_back = [n for n in nodes if n.primitive is primitives.custom_vjp_call_p]
        others = list(changes or {})
        some, moved = [self.params[i] for i in others], list((changes or {}).values())

        def body(tangents: Leaves, step: Any) -> Any:
            (keep, *now), _ = step
            tangents = [_cleared(keep, t) for t in tangents]
            function, before = self._live_step(now, (), others)
            if only_back:  # no forward mode: transpose the pull-back
                pull = jax.vjp(function, before, [], some)[1]
                try:
                    after = jax.linear_transpose(lambda c: pull(c)[::2], before)((tangents, moved))[0]
                # the error depends on the primitive; that of a `while` is the last
                except (AssertionError, NotImplementedError, RuntimeError, ValueError) as e:
                    raise NotSupportedError(
                        "The rule pushes directions through the derivatives of `custom_vjp` functions "
                        f"(at {', '.join(dict.fromkeys(n.source for n in only_back))}), and one of them is "
                        "not made of operations that JAX knows to be linear in the cotangent (a clip, a "
                        "`where` on the cotangent itself) or has a `while` loop in its backward pass (as "
                        "Equinox's and diffrax's checkpointed loops have). Write it with linear operations, "
                        "or leave `rank` out: windows go without it, and so do `RTRL`, `SnAp`, `KF_RTRL`."
                    ) from e
            else:
                at, along = (before, some), (tangents, moved)
                after = jax.jvp(lambda b, p: function(b, [], p), at, along)[1]
            return [finite(a) for a in after], tangents

        found = self._loop(body, [t for t in tangents if t is not None])
        each = map(iter, found)
        return tuple([None if t is None else next(a) for t in tangents] for a in each)  # type: ignore[return-value]

    def pull(
        self,
        cotangents: Leaves,
        sites: Sequence[Site] = (),
        others: Sequence[int] = (),
        crossing: Crossing | None = None,
    ) -> tuple[Leaves, Leaves, dict[int, Any], dict[int, Any]]:
        """Pull rows of cotangents of the carried leaves from the window's end to its start, along all paths.

        If it is several windows, `crossing` says which part of the cotangents goes on at the start of each.

        Returns the cotangents at the start; the parts that do not cross, by step (empty without `crossing`);
        the cotangents of the outputs of `sites` at every step; and those of the parameters in `others`, by
        leaf, except through the weights of these sites. All have rows first.
        """
        zeros = [jnp.zeros(s.shape, s.output.aval.dtype) for s in sites]
        zeros, _ = all_on_mesh((zeros, self.params))
        some = [self.params[i] for i in others]

        def body(carry: Any, step: Any) -> Any:
            cotangents, total = carry
            (keep, *now), (is_start, index) = step
            function, before = self._live_step(now, sites, others)
            pull = jax.vjp(function, before, zeros, some)[1]
            start, dys, found = jax.vmap(pull)([c for c in cotangents if c is not None])
            each = iter([jax.vmap(partial(_cleared, keep))(a) for a in start])
            start, left = [None if c is None else next(each) for c in cotangents], []
            if crossing is not None:
                part = jax.vmap(crossing.part, (0, None))(start, index)
                left = jax.tree.map(lambda c, u: jnp.where(is_start, c - u, 0), start, part)
                start = jax.tree.map(lambda c, u: jnp.where(is_start, u, c), start, part)
            return (start, jax.tree.map(jnp.add, total, found)), (left, dys)

        num = jax.tree.leaves(cotangents)[0].shape[0]
        none = [jnp.zeros((num, *p.shape), p.dtype) for p in some]
        is_start = np.isin(np.arange(self.length), () if crossing is None else crossing.starts)
        at = is_start, np.maximum(np.cumsum(is_start) - 1, 0)
        (start, total), (left, dys) = self._loop(body, (cotangents, none), at, reverse=True)
        left, dys = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (left, dys))
        dys_by_site = {s.index: d for s, d in zip(sites, dys, strict=True)}
        return start, left, dys_by_site, dict(zip(others, total, strict=True))

    def _live_step(
        self, step: Any, sites: Sequence[Site] = (), others: Sequence[int] = ()
    ) -> tuple[Callable[..., Leaves], Leaves]:
        """One step as a function `(inexact leaves, perturbations of sites, parameters)`, and those leaves."""
        args, consts, before, ys = step
        consts = self.consts_at(consts)
        leaves, tree = jax.tree.flatten(before)
        live = [i for i, a in enumerate(leaves) if is_inexact(a)]

        def function(now: Leaves, added: Leaves, some: Leaves) -> Leaves:
            rest, params = list(leaves), list(self.params)
            for i, a in zip(live, now, strict=True):
                rest[i] = a
            for i, p in zip(others, some, strict=bool(some)):
                params[i] = p
            at_sites = {s.index: p for s, p in zip(sites, added, strict=True)}
            carried = jax.tree.unflatten(tree, rest)
            after = jax.tree.leaves(self.executor.outputs(params, args, consts, carried, at_sites, ys)[1])
            return [after[i] for i in live]

        return function, [leaves[i] for i in live]

    def _loop(self, body: Any, carry: Any, more: Any = (), *, reverse: bool = False) -> Any:
        steps = (self.keep, self.args, self.consts, self.before, self.ys), more
        if self.length == 1:  # without a scan, XLA shares values with the step itself
            carry, found = body(carry, self._of_first(steps))
            return carry, jax.tree.map(lambda a: a[None], found)
        times = unroll_of_steps(self.executor)
        return jax.lax.scan(body, carry, steps, reverse=reverse, unroll=times)

    def scan_windows(self, size: int, body: Callable[[Any, Window], tuple[Any, Any]], carry: Any) -> Any:
        """Scan `carry, out = body(carry, window)` over windows of `size` steps; a shorter one comes first.

        Returns the carry and the stacked outputs, as `jax.lax.scan` does.
        """
        steps = (self.args, self.consts, self.before, self.ys, self.keep, self.inputs)
        head, count = self.length % size, self.length // size

        def one(carry: Any, some: Any, length: int) -> Any:
            return body(carry, replace(Window(self.executor, length, self.params, *some), fixed=self.fixed))

        outs = []
        if head:
            carry, out = one(carry, jax.tree.map(lambda a: a[:head], steps), head)
            outs.append(jax.tree.map(lambda a: a[None], out))
        if count == 1:
            carry, out = (
                body(carry, self) if not head else one(carry, jax.tree.map(lambda a: a[head:], steps), size)
            )
            outs.append(jax.tree.map(lambda a: a[None], out))
        elif count:
            rest = jax.tree.map(lambda a: a[head:].reshape(count, size, *a.shape[1:]), steps)
            carry, out = jax.lax.scan(lambda carry, some: one(carry, some, size), carry, rest)
            outs.append(out)
        return carry, outs[0] if len(outs) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *outs)


@dataclass(frozen=True, eq=False)
class BackwardPass:
    """One backward pass over consecutive windows, from which a rule makes gradients and its new arrays."""

    window: Window  # the steps of all windows
    size: int  # number of steps of each window but the first, which may be shorter
    # the parts of the cotangents of the carried leaves that do not cross the starts of windows, by step: zero
    # inside a window; None without a loss
    signals: Leaves | None = None
    read: Leaves | None = None  # all of the cotangents at the starts of windows, if there is a projection
    dys: dict[int, Array] = field(default_factory=dict)  # cotangents of the outputs of sites at every step
    pairs: Any = None  # the state of the projection after the windows, and its pairs at their starts
    fresh: bool = False  # whether the rule's traces are zero before
    keep: bool = True  # whether the rule's arrays are needed after it

    @property
    def starts(self) -> list[int]:
        """The first step of each window."""
        return starts_of(self.window.length, self.size)

    @property
    def is_single(self) -> bool:
        return len(self.starts) == 1

    @property
    def first(self) -> Leaves:
        """The signals at the start of the first window."""
        return [None if s is None else s[0] for s in self.signals or []]

    def within(self, excluded: Container[int] = ()) -> Leaves:
        """The gradients inside the windows, without those of some sites."""
        window, dys = self.window, {i: dy for i, dy in self.dys.items() if i not in excluded}
        return window.executor.of_cotangents(window.params, window.first_consts, window.inputs, dys)


def _cleared(keep: Bool[Array, " samples"] | None, derivative: Array) -> Array:
    """Zero the derivative at a leaf before a step for samples that are reset there."""
    if keep is None or derivative.shape[:1] != keep.shape:
        return derivative
    return where_rows(keep, derivative, jnp.zeros_like(derivative))


def starts_of(length: int, size: int) -> list[int]:
    """The first step of each window of `size` steps, of which the first may be shorter."""
    return [0, *range(length % size or size, length, size)]


def where_rows(rows: Bool[Array, " samples"], these: Any, others: Any) -> Array:
    """`jnp.where` with one flag for each sample, which is the first axis."""
    found: Array = jnp.where(rows.reshape(-1, *[1] * (jnp.ndim(these) - 1)), these, others)
    return found


def scan_once(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, unroll: int = 1, *, stores_all: bool
) -> tuple[Any, Any]:
    """`jax.lax.scan` that stores an array once which is several outputs of `body`.

    Without `stores_all`, its derivative stores no element-wise results, and computes them again.
    """
    places: list[Any] = []

    def distinct(carry: Any, x: Any) -> tuple[Any, list[Array]]:
        carry, outs = body(carry, x)
        leaves, tree = jax.tree.flatten(outs)
        found = {id(a): a for a in leaves}
        places[:] = [jax.tree.unflatten(tree, [list(found).index(id(a)) for a in leaves])]
        return carry, list(found.values())

    if not stores_all:
        distinct = jax.checkpoint(distinct, policy=_is_costly, prevent_cse=False)
    carry, found = jax.lax.scan(distinct, carry, xs, unroll=unroll)
    return carry, jax.tree.map(lambda i: found[i], places[0])


def _is_costly(primitive: Primitive, *_: object, **__: object) -> bool:
    return primitive not in ELEMENT_WISE | LAYOUT | COPIES | PARTS


def each_step(function: Callable[[Any], Any], args: Any) -> Any:
    """Map `function` over steps by `vmap`, or by `lax.map` if an operation in it has no batching rule."""
    if jax.tree.leaves(args)[0].shape[0] == 1:  # without `vmap`, XLA shares values with the forward pass
        return jax.tree.map(lambda a: jnp.asarray(a)[None], function(jax.tree.map(lambda a: a[0], args)))
    try:
        return jax.vmap(function)(args)
    except NotImplementedError:
        return jax.lax.map(function, args)


def unroll(times: int = 8) -> int:
    """The `unroll` of scans, by default of element-wise ones: a GPU launches two kernels for an iteration."""
    return 1 if jax.default_backend() == "cpu" else times


def unroll_of_steps(executor: ETraceGraphExecutor) -> int:
    """The `unroll` of scans over the steps of a model, whose outputs are then stored several at a time.

    On several devices it is 1: XLA moves a sum over them out of the loop only if it is a single one.
    """
    return unroll(5) if executor.sharding is None else 1
