"""Training and evaluation on one batch: gradients, updates and metrics in one compiled function.

An update does not wait for a check that its gradient is finite: sums of absolute gradients show it after the
batch. Only if they are not finite is the batch run again, from the same states, with a check before every
update, which finds the step and the parameters and leaves the weights as they were before the bad update.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np

from .._compiler.step import show_path
from .._diagnostics.step_warnings import frozen_parameters
from .._lines import warn_user
from .._online.parts import finite_targets
from .._online.request import split_loss
from .._online.sequence import Sequence, scan_parts
from .._report.check import about_zeros, by_name
from .._types import Array, ArrayLike, Function, Model, NumPyArray, Options, PyTree
from .batches import Batch, probable_cause, size_of, steps_of
from .sharding import Layout

if TYPE_CHECKING:
    import optax

    from .._learners.stateful import ETraceAlgorithm
    from .fit import FitOptions

Parameters = dict[str, PyTree]
Flags = Array | None  # of samples that are reset before a step
Scores = dict[str, PyTree]  # arrays by name
ZERO_FOR = 3  # batches with a zero gradient before a warning: that of LoRA is zero at the start
# models whose states were made for a batch of `fit`
_fitted: weakref.WeakSet[brainstate.nn.Module] = weakref.WeakSet()


class Engine:
    """A learner, its optimiser and the functions that train and evaluate on a batch."""

    def __init__(
        self,
        learner: ETraceAlgorithm,
        step_fn: Function,
        optimizer: optax.GradientTransformation,
        options: FitOptions,
        layout: Layout | None,  # of a device mesh
    ) -> None:
        import optax

        self.learner, self.step_fn, self.layout = learner, step_fn, layout
        every = options["update_every"]
        self.update_every = None if every == "sequence" else every
        self.chunk_size, self.metrics = options["chunk_size"], options["metrics"] or {}
        self.reset, self.batched = options["reset"], options["batched"]
        self._shapes: PyTree = None  # of the batch that the states fit
        self._arguments: dict[PyTree, tuple[PyTree, Options]] = {}  # by shapes
        self._optimizer = optax.with_extra_args_support(optimizer)
        if self.layout is not None:
            for state in self.named_parameters().values():
                state.value = self.layout.parameters(state.value)
            self.layout.warn_of_unused(self.parameters())
        opt_state = optimizer.init(self.parameters())
        if self.layout is not None:
            opt_state = self.layout.like(opt_state, self.parameters())
        self.opt_state = brainstate.ShortTermState(opt_state)
        self._kept: dict[int, PyTree] = {}  # shardings of states, by identity
        self._shardings = _shardings((self.parameters(), opt_state))
        self._warned_of_whole = False
        self._batches = 0
        self._zero: NumPyArray = np.array(True)  # the gradients that were zero in all batches
        self._train = brainstate.transform.jit(lambda *batch: self._train_batch(*batch, checked=False))
        self._train_checked = brainstate.transform.jit(lambda *batch: self._train_batch(*batch, checked=True))
        self._evaluate = brainstate.transform.jit(self._evaluate_batch)

    # -- parameters for Optax ----------------------------------------------------------------------

    def parameters(self) -> Parameters:
        """Return the parameters by name, without units."""
        return {k: _mantissas(st.value) for k, st in self.named_parameters().items()}

    def named_parameters(self) -> dict[str, brainstate.State]:
        return {".".join(map(str, path)): st for path, st in self.learner.param_states.items()}

    # -- states of the shapes of a batch -----------------------------------------------------------

    def place(self, batch: Batch) -> Batch:
        """Return a batch on its devices."""
        return batch if self.layout is None else self.layout.batch(batch, self.batched)

    def prepare(self, batch: Batch) -> None:
        """Give the states the shapes of a batch, and compile the learner for it, if they are new."""
        xs, ys = batch.xs, batch.ys
        shapes = tuple((jnp.shape(a)[1:], str(jnp.result_type(a))) for a in jax.tree.leaves((xs, ys)))
        if shapes == self._shapes:
            return
        if not self.reset and self._shapes is not None:
            raise ValueError(
                "With `reset=False` states are carried on from batch to batch, so that all batches must have "
                f"the same shapes; they changed from {self._shapes} to {shapes}."
            )
        model, learner = self.learner.model, self.learner
        if self.batched and model not in _fitted:
            _warn_of_batch_first(model, xs)
        _fitted.add(model)
        size = {"batch_size": size_of(xs)} if self.batched else {}
        if shapes not in self._arguments:  # those that `step_fn` calls the learner with
            first = slice(0, self.chunk_size) if self.uses_windows else 0
            slices = jax.tree.map(lambda a: jnp.asarray(a)[first], (xs, ys))
            self._arguments[shapes] = learner._called_with(self.step_fn, slices)
        args, kwargs = self._arguments[shapes]
        with brainstate.environ.context(fit=True):
            is_set = learner._cache.key(args, kwargs) == learner._cache.current
            if not learner.is_compiled:
                brainstate.nn.init_all_states(model, **size)
            elif not is_set:
                with brainstate.random.seed_context(0):  # a resumed run draws the same numbers
                    learner.reset_model(**size)
            if self.layout is not None:
                for state in (*model.states().values(), brainstate.random.DEFAULT):
                    if not isinstance(state, brainstate.ParamState):
                        state.value = self.layout.states(state.value, size.get("batch_size"))
            if not is_set or self.layout is not None:  # or compiled before the arrays were on the mesh
                learner.compile_graph(*args, **kwargs)
        if self.layout is not None:
            kept: list[brainstate.State] = [learner.steps, *learner.traces.values()]
            for state in kept:
                state.value = self.layout.states(state.value, None)
            self._kept = {id(st): _shardings(st.value) for st in self._carried()}
        self._shapes = shapes

    def _carried(self) -> list[brainstate.State]:
        """Return the states that a batch passes on to the next one."""
        learner = self.learner
        own = [learner.steps, self.opt_state, *learner.traces.values()]
        return [*own, *learner.hidden_states.values(), *learner.param_states.values()]

    @property
    def uses_windows(self) -> bool:
        return self.learner.steps_at_once(self.chunk_size) is not None

    # -- training ----------------------------------------------------------------------------------

    def train(self, batch: Batch) -> Scores:
        """Learn from a batch; return its scores and the loss of each step.

        After an update that is not finite also `bad`, the parameters concerned at each step.
        """
        self.prepare(batch)
        if self.layout is not None and self.batched and not self._warned_of_whole:
            self._warned_of_whole = self.layout.warn_of_whole(batch)
        try:
            with brainstate.environ.context(fit=True):
                states = self._train.stateful_fun.get_state_trace(*batch, compile_if_miss=True).states
                before = [state.value for state in states]
                found: Scores = jax.device_get(self._train(*batch))
                if found.pop("bad") or not np.isfinite(found["losses"]).all():
                    for state, value in zip(states, before, strict=True):
                        state.value = value
                    found = jax.device_get(self._train_checked(*batch))
        except (TypeError, ValueError, IndexError) as error:
            if self.batched and (cause := probable_cause(batch)):
                raise ValueError(f"{error} {cause}") from error
            raise
        if not self._batches:
            _warn_of_unlearned(self.step_fn, states, self.learner.model)
        self._batches, self._zero = self._batches + 1, self._zero & found.pop("zero")
        if self._batches == ZERO_FOR and self._zero.any():
            frozen = {".".join(map(str, p)) for p in frozen_parameters(self.learner.graph.module_info)}
            pairs = zip(by_name(self.parameters()), self._zero, strict=True)
            if zeros := [k for k, zero in pairs if zero and k.split("[")[0] not in frozen]:
                warn_user(about_zeros(zeros))
        return found

    def _train_batch(self, xs: PyTree, ys: PyTree, mask: Array, reset: Flags, *, checked: bool) -> Scores:
        unkept = []  # the traces that are zero before and after a batch
        if self.reset and self.update_every is None:
            lasting = self.learner._lasting_values()
            unkept = [(st, st.value) for name, st in self.learner.traces.items() if name not in lasting]
        if self.reset:
            self.learner.reset_state(size_of(xs) if self.batched else None)
        sequence = sequence_of(xs, ys, mask)
        if reset is not None:
            sequence = replace(sequence, reset=jnp.asarray(reset))
        size = self.update_every or sequence.length
        # absolute gradients are added up element by element: a sum over a gradient at every step is slow
        real = lambda p: np.promote_types(abs(p).dtype, np.float32)
        sums = jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), real(p)), self.parameters())
        update = partial(self._update, checked=checked)
        sums, (losses, aux, bad) = scan_parts(update, sums, sequence, size, brainstate.transform.scan)
        if self.layout is not None:  # XLA chooses a sharding for zeros and for the results of a loop
            for state in self._carried():
                state.value = self.layout.keep(state.value, self._kept[id(state)])
        for state, zeros in unkept:  # not the zeros of this call, which XLA would write for every batch
            state.value = zeros
        each = jax.vmap(self._mean)(losses, sequence.mask)
        found = {**self._scores(losses, aux, sequence), "losses": each, "weight": sequence.mask.sum()}
        found["bad"] = bad if checked else ~_all_finite((sums, self.parameters()))
        found["zero"] = jnp.stack([(a == 0).all() for a in jax.tree.leaves(sums)]) & (losses != 0).any()
        return found if self.layout is None else self.layout.everywhere(found)

    def _update(
        self, sums: PyTree, arrays: PyTree, mask: Array, reset: Array | None, *, checked: bool
    ) -> tuple[PyTree, tuple[Array, PyTree, Array]]:
        """Update the weights from some steps; return sums of gradients, losses, aux and bad parameters."""
        learner, params = self.learner, self.parameters()
        if self.update_every == 1 and not self.uses_windows:
            grads, losses, aux = self._gradient_of_step(arrays, mask, reset)
        else:
            grads, losses, aux = learner.etrace_grad(
                *arrays,
                step_fn=self._step,
                mask=mask,
                reset=reset,
                chunk_size=self.chunk_size,
                has_aux=True,
                return_value=True,
                keep_traces=not self.reset or self.update_every is not None,
            )
        # JAX's gradients of complex parameters are conjugates of directions of ascent
        ascent = lambda g: jnp.conj(g) if jnp.iscomplexobj(g) else g
        grads = {".".join(map(str, k)): jax.tree.map(ascent, _mantissas(g)) for k, g in grads.items()}
        losses = jnp.where(mask != 0, losses, jnp.zeros_like(losses))
        updates, opt_state = self._optimizer.update(
            grads, self.opt_state.value, params, value=self._mean(losses, mask)
        )
        new = jax.tree.map(lambda p, d: (p + d).astype(p.dtype), params, updates)
        counts = jnp.isfinite(losses).all() & (mask != 0).any()
        bad = jnp.zeros((), bool)
        if checked:
            bad = jnp.stack([~_all_finite((grads[k], new[k])) for k in params])
            counts &= ~bad.any()
        choose = lambda a, b: jax.tree.map(lambda x, y: jnp.where(counts, x, y), a, b)
        new, opt_state = choose((new, opt_state), (params, self.opt_state.value))
        if self.layout is not None:
            new, opt_state = self.layout.keep((new, opt_state), self._shardings)
        for name, state in self.named_parameters().items():
            units = jax.tree.structure(state.value)
            state.value = jax.tree.unflatten(units, jax.tree.leaves(new[name]))
        self.opt_state.value = opt_state
        sums = jax.tree.map(lambda s, g: s + abs(g).astype(s.dtype), sums, grads)
        return sums, (losses, aux, jnp.broadcast_to(bad, (len(losses), bad.size)))

    def _gradient_of_step(self, arrays: PyTree, mask: Array, reset: Flags) -> tuple[PyTree, PyTree, PyTree]:
        """Return the gradient of a single step, in one pass over each trace."""
        slices = jax.tree.map(lambda a: a[0], arrays)
        if reset is not None:
            rows = reset[0] if self.batched else None
            again = lambda: self.learner.reset_state(rows=rows)
            brainstate.transform.cond(reset.any(), again, lambda: None)

        def loss_of() -> PyTree:
            loss, aux = split_loss(self._step(*slices), has_aux=True, samples=mask.shape[1:])
            return self._mean(loss, mask[0]), (loss, aux)

        grads, kept = brainstate.transform.grad(loss_of, self.learner.param_states, has_aux=True)()
        return grads, *jax.tree.map(lambda a: jnp.asarray(a)[None], kept)

    def _step(self, *slices: PyTree) -> tuple[PyTree, PyTree]:
        return with_aux(self.step_fn(*slices))

    @staticmethod
    def _mean(values: PyTree, mask: Array) -> PyTree:
        weights = mask.astype(jnp.result_type(float))
        total = weights.sum()
        counted = jnp.where(weights != 0, values.astype(weights.dtype), jnp.zeros_like(weights))
        return (counted * weights).sum() / jnp.where(total == 0, 1, total)

    def _scores(self, losses: PyTree, aux: PyTree, sequence: Sequence) -> Scores:
        mask, (_, ys) = sequence.mask, sequence.arrays
        weights = {mask.shape[:1]: mask.sum(tuple(range(1, mask.ndim))), mask.shape: mask}
        scores = {"loss": self._mean(losses, mask)}
        if self.metrics:
            scores |= {name: metric(aux, ys, mask) for name, metric in self.metrics.items()}
        elif isinstance(aux, Mapping):
            shapes = {k: jnp.shape(v) for k, v in aux.items()}
            scores |= {k: self._mean(aux[k], weights[s]) for k, s in shapes.items() if s in weights}
        return scores

    # -- evaluation --------------------------------------------------------------------------------

    def evaluate(self, batch: Batch) -> Scores:
        """Return the loss and metrics of a batch; no state changes."""
        with brainstate.environ.context(fit=False):
            return jax.device_get(self._evaluate(*batch[:3]))  # type: ignore[no-any-return]

    def _evaluate_batch(self, xs: PyTree, ys: PyTree, mask: Array) -> Scores:
        model = self.learner.model
        kept = {id(st): (st, st.value) for st in (*model.states().values(), brainstate.random.DEFAULT)}
        sequence = sequence_of(xs, ys, mask)
        self.learner.reset_model(**({"batch_size": size_of(xs)} if self.batched else {}))

        checked = lambda out, *lead: split_loss(out, True, lead, sequence.mask.shape[1:])
        with self.learner._calling_model():
            if self.uses_windows:
                run = lambda c, arrays, mask, _: (c, checked(self._step(*arrays), len(mask)))
                size, scan = self.chunk_size or 1, brainstate.transform.scan
                _, (losses, aux) = scan_parts(run, (), sequence, size, scan)
            else:
                run = lambda *slices: checked(self._step(*slices))
                losses, aux = brainstate.transform.for_loop(run, *sequence.arrays)
        for state, value in kept.values():
            state.value = value
        found = self._scores(losses, aux, sequence)
        return found if self.layout is None else self.layout.everywhere(found)


def with_aux(out: PyTree) -> tuple[PyTree, PyTree]:
    """Return a loss, or a pair of a loss and auxiliary values, as a pair."""
    return out if isinstance(out, tuple) and len(out) == 2 else (out, {})


def sequence_of(xs: PyTree, ys: PyTree, mask: ArrayLike | None) -> Sequence:
    """Return a batch as a sequence; targets of weight zero are made finite, because 0 * NaN is NaN."""
    sequence = Sequence.check((xs, ys), mask)
    xs, ys = sequence.arrays
    leaves, tree = jax.tree.flatten(ys)
    finite = finite_targets(leaves, sequence.mask, [True] * len(leaves))
    return replace(sequence, arrays=(xs, jax.tree.unflatten(tree, finite)))


def _warn_of_batch_first(model: brainstate.nn.Module, xs: PyTree) -> None:
    """Warn if the batch size of a model's states is the number of steps of the sequences."""
    states = jax.tree.leaves([st.value for st in model.states(brainstate.HiddenState).values()])
    rows = {jnp.shape(a)[0] for a in states if jnp.ndim(a) > 1}
    if rows == {steps_of(xs)} and rows != {size_of(xs)}:
        warn_user(
            f"The model's states are made for batches of {steps_of(xs)}, and that is the first axis of `xs`, "
            "which is time. If it is the batch, swap the first two axes of `xs` and `ys`."
        )


def _warn_of_unlearned(step_fn: Function, used: Iterable[brainstate.State], model: Model) -> None:
    """Warn of parameters among the states in use that are not the model's."""
    own = {id(st) for st in model.states().values()}
    others = [st for st in used if isinstance(st, brainstate.ParamState) and id(st) not in own]
    if others:
        names = _names(step_fn)
        shapes = lambda st: ", ".join(str(jnp.shape(leaf)) for leaf in jax.tree.leaves(st.value))
        shown = ", ".join(names.get(id(st)) or f"a parameter {shapes(st)}" for st in others)
        warn_user(
            f"`step_fn` uses parameters that are no part of `learner.model`, so `fit` does not learn them: "
            f"{shown}. Call them in the model's `update`, or keep constants in plain arrays."
        )


def _names(step_fn: Function) -> dict[int, str]:
    """Return the names of parameters in the closure of a function, by identity."""
    if not inspect.isroutine(step_fn):
        return {}
    seen = inspect.getclosurevars(step_fn)
    found = {}
    for name, value in {**seen.globals, **seen.nonlocals}.items():
        if isinstance(value, brainstate.ParamState):
            found[id(value)] = f"`{name}`"
        elif isinstance(value, brainstate.nn.Module):
            for path, st in value.states(brainstate.ParamState).items():
                found[id(st)] = f"`{show_path((name, *path))}`"
    return found


def _shardings(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda a: getattr(a, "sharding", None), tree)


def _mantissas(tree: PyTree) -> PyTree:
    return jax.tree.map(u.get_mantissa, tree, is_leaf=lambda value: isinstance(value, u.Quantity))


def _all_finite(tree: PyTree) -> PyTree:
    return jnp.stack([jnp.isfinite(a).all() for a in jax.tree.leaves(tree)]).all()
