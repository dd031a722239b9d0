"""What happens to one batch: gradients, updates and metrics in one compiled function; and evaluation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np

from .._diagnostics.step_warnings import frozen_parameters
from .._learners.model_calls import called_with, calling_model
from .._learners.stateful import ETraceAlgorithm
from .._lines import warn_user
from .._online.drive import finite_targets
from .._online.request import split_loss
from .._online.sequence import Sequence, over_chunks
from .._report.check import about_zeros, by_name
from .data import Batch, size_of, steps_of, why_failed
from .layout import Layout
from .outside import warn_of_unlearned

Metric = Callable[[Any, Any, Any], Any]
Parameters = dict[str, Any]
ZERO_FOR = 3  # batches with a zero gradient until that is warned of: at the start it may be one of LoRA
_fitted: weakref.WeakSet[Any] = weakref.WeakSet()  # models whose states have been made for a batch of `fit`


@dataclass(eq=False)
class Engine:
    """A learner, its optimiser and the functions that train and evaluate on a batch."""

    learner: ETraceAlgorithm
    step_fn: Callable[..., Any]
    optimizer: Any
    update_every: int | None  # None: once a sequence
    chunk_size: int | None
    metrics: Mapping[str, Metric]
    reset: bool
    batched: bool
    layout: Layout | None = None  # over a mesh of devices
    opt_state: Any = field(init=False)
    _shapes: Any = None  # of the batch that the states are made for
    _known: dict[Any, Any] = field(default_factory=dict)  # by shapes: the learner's arguments and traces
    _looked_outside: bool = False  # for parameters that are not the model's

    def __post_init__(self) -> None:
        import optax

        self._optimizer = optax.with_extra_args_support(self.optimizer)
        if self.layout is not None:
            for state in self.named_parameters().values():
                state.value = self.layout.parameters(state.value)
            self.layout.warn_of_unused(self.parameters())
        opt_state = self.optimizer.init(self.parameters())
        if self.layout is not None:
            opt_state = self.layout.like(opt_state, self.parameters())
        self.opt_state = brainstate.ShortTermState(opt_state)
        self._kept: dict[int, Any] = {}  # of states, by identity
        self._shardings = _shardings((self.parameters(), opt_state))
        self._warned_of_whole = False
        self._batches = 0
        self._zero: Any = np.True_  # which gradients have been zero in all of these
        self._train = brainstate.transform.jit(self._train_batch)
        self._evaluate = brainstate.transform.jit(self._evaluate_batch)

    # -- parameters, as optax sees them ------------------------------------------------------------

    def parameters(self) -> Parameters:
        """The parameters by name, without units."""
        return {k: _mantissas(st.value) for k, st in self.named_parameters().items()}

    def named_parameters(self) -> dict[str, brainstate.State]:
        return {".".join(map(str, path)): st for path, st in self.learner.param_states.items()}

    # -- states that fit a batch -------------------------------------------------------------------

    def place(self, batch: Batch) -> Batch:
        """A batch where it is to be computed with."""
        return batch if self.layout is None else self.layout.batch(batch, self.batched)

    def _lay_out(self, xs: Any) -> None:
        """Spread the states of the model over the devices of the mesh."""
        if self.layout is not None:
            samples = size_of(xs) if self.batched else None
            for state in (*self.learner.model.states().values(), brainstate.random.DEFAULT):
                if not isinstance(state, brainstate.ParamState):
                    state.value = self.layout.states(state.value, samples)

    def prepare(self, batch: Batch) -> None:
        """Give the states the shapes that a batch needs, and compile the learner for it, where needed."""
        xs, ys, _ = batch
        shapes = tuple((jnp.shape(a)[1:], str(jnp.result_type(a))) for a in jax.tree.leaves((xs, ys)))
        if shapes == self._shapes:
            return
        if not self.reset and self._shapes is not None:
            raise ValueError(
                "With `reset=False` the states go on from batch to batch, so all batches must have the same "
                f"shapes; they changed from {self._shapes} to {shapes}."
            )
        model, learner = self.learner.model, self.learner
        if self.batched and model not in _fitted:
            _warn_of_batch_first(model, xs)
        _fitted.add(model)
        size = {"batch_size": size_of(xs)} if self.batched else {}
        known = shapes in self._known
        args, kwargs = self._known[shapes][0] if known else self._arguments(xs, ys)
        with brainstate.environ.context(fit=True):
            if not learner.is_compiled:
                brainstate.nn.init_all_states(model, **size)
                self._lay_out(xs)
                learner.compile_graph(*args, **kwargs)
            elif not learner.is_set_for(args, kwargs):
                with brainstate.random.seed_context(0):  # so that a resumed run draws the same numbers
                    learner.reset_model(**size)
                self._lay_out(xs)
                if known:
                    # with the states that this shape was compiled with
                    learner.set_for(args, kwargs, self._known[shapes][1])
                else:
                    learner.compile_graph(*args, **kwargs)
            elif self.layout is not None:  # compiled before the arrays were on the mesh
                self._lay_out(xs)
                learner.compile_graph(*args, **kwargs)
        if self.layout is not None:
            kept: list[brainstate.State] = [learner.steps, *learner.traces.values()]
            for state in kept:
                state.value = self.layout.states(state.value, None)
            self._kept = {id(st): _shardings(st.value) for st in self._carried()}
        self._known[shapes] = (args, kwargs), learner.traces
        self._shapes = shapes

    def _carried(self) -> list[brainstate.State]:
        """What a batch hands on to the next one."""
        learner = self.learner
        own = [learner.steps, self.opt_state, *learner.traces.values()]
        return [*own, *learner.hidden_states.values(), *learner.param_states.values()]

    def _arguments(self, xs: Any, ys: Any) -> tuple[Any, Any]:
        """What `step_fn` calls the learner with."""
        first = slice(0, self.chunk_size) if self.in_windows else 0
        slices = jax.tree.map(lambda a: jnp.asarray(a)[first], (xs, ys))
        return called_with(self.learner, self.step_fn, slices)

    @property
    def in_windows(self) -> bool:
        return self.learner.steps_at_once(self.chunk_size) is not None

    # -- training ----------------------------------------------------------------------------------

    def train(self, batch: Batch) -> dict[str, Any]:
        """Learn from a batch: its loss and metrics, and of each step the loss and which gradients are bad."""
        self.prepare(batch)
        if self.layout is not None and self.batched and not self._warned_of_whole:
            self._warned_of_whole = self.layout.warn_of_whole(batch)
        try:
            with brainstate.environ.context(fit=True):
                found: dict[str, Any] = jax.device_get(self._train(*batch))
        except (TypeError, ValueError, IndexError) as error:
            if self.batched and (why := why_failed(batch)):
                raise ValueError(f"{error} {why}") from error
            raise
        if not self._looked_outside:
            warn_of_unlearned(self.step_fn, self._train.stateful_fun.get_states(*batch), self.learner.model)
            self._looked_outside = True
        self._batches, self._zero = self._batches + 1, self._zero & found.pop("zero")
        if self._batches == ZERO_FOR and self._zero.any():
            frozen = {".".join(map(str, p)) for p in frozen_parameters(self.learner.graph.module_info)}
            pairs = zip(by_name(self.parameters()), self._zero, strict=True)
            if zeros := [k for k, zero in pairs if zero and k.split("[")[0] not in frozen]:
                warn_user(about_zeros(zeros))
        return found

    def _train_batch(self, xs: Any, ys: Any, mask: Any) -> dict[str, Any]:
        if self.reset:
            self.learner.reset_state(size_of(xs) if self.batched else None)
        sequence = sequence_of(xs, ys, mask)
        size = self.update_every or sequence.length
        update = lambda c, arrays, mask, _: (c, self._update(arrays, mask))
        _, (losses, aux, bad, zero) = over_chunks(update, (), sequence, size, brainstate.transform.scan)
        if self.layout is not None:  # XLA has its own mind about zeros and about what comes out of a loop
            for state in self._carried():
                state.value = self.layout.keep(state.value, self._kept[id(state)])
        each = jax.vmap(self._mean)(losses, sequence.mask)
        found = {**self._scores(losses, aux, sequence), "losses": each, "bad": bad, "zero": zero.all(0)}
        return self._everywhere(found)

    def _everywhere(self, found: dict[str, Any]) -> dict[str, Any]:
        """Scores that every process can read."""
        return found if self.layout is None else self.layout.everywhere(found)

    def _update(self, arrays: Any, mask: Any) -> tuple[Any, Any, Any, Any]:
        """One update from some steps: losses, what else `step_fn` returned, bad and zero gradients."""
        learner, params = self.learner, self.parameters()
        if self.update_every == 1 and not self.in_windows:
            grads, losses, aux = self._gradient_of_step(arrays, mask)
        else:
            grads, losses, aux = learner.etrace_grad(
                *arrays,
                step_fn=self._step,
                mask=mask,
                chunk_size=self.chunk_size,
                has_aux=True,
                return_value=True,
                keep_traces=not self.reset or self.update_every is not None,
            )
        grads = {".".join(map(str, k)): _descent(g) for k, g in grads.items()}
        losses = jnp.where(mask != 0, losses, jnp.zeros_like(losses))
        loss = self._mean(losses, mask)
        updates, opt_state = self._optimizer.update(grads, self.opt_state.value, params, value=loss)
        new = jax.tree.map(lambda p, d: (p + d).astype(p.dtype), params, updates)
        bad = jnp.stack([~_all_finite((grads[k], new[k])) for k in params])
        zero = jnp.stack([(g == 0).all() for g in jax.tree.leaves(grads)]) & (losses != 0).any()
        counts = ~bad.any() & jnp.isfinite(losses).all() & (mask != 0).any()
        choose = lambda a, b: jax.tree.map(lambda x, y: jnp.where(counts, x, y), a, b)
        new, opt_state = choose((new, opt_state), (params, self.opt_state.value))
        if self.layout is not None:
            new, opt_state = self.layout.keep((new, opt_state), self._shardings)
        for name, state in self.named_parameters().items():
            state.value = _with_units(new[name], state.value)
        self.opt_state.value = opt_state
        each = (jnp.broadcast_to(a, (len(losses), a.size)) for a in (bad, zero))
        return losses, aux, *each

    def _gradient_of_step(self, arrays: Any, mask: Any) -> tuple[Any, Any, Any]:
        """The gradient of a single step, in one pass over each trace."""
        slices = jax.tree.map(lambda a: a[0], arrays)

        def loss_of() -> Any:
            loss, aux = split_loss(self._step(*slices), has_aux=True, samples=mask.shape[1:])
            return self._mean(loss, mask[0]), (loss, aux)

        grads, kept = brainstate.transform.grad(loss_of, self.learner.param_states, has_aux=True)()
        return grads, *jax.tree.map(lambda a: jnp.asarray(a)[None], kept)

    def _step(self, *slices: Any) -> tuple[Any, Any]:
        return with_aux(self.step_fn(*slices))

    @staticmethod
    def _mean(values: Any, mask: Any) -> Any:
        weights = mask.astype(jnp.result_type(float))
        total = weights.sum()
        counted = jnp.where(weights != 0, values.astype(weights.dtype), jnp.zeros_like(weights))
        return (counted * weights).sum() / jnp.where(total == 0, 1, total)

    def _scores(self, losses: Any, aux: Any, sequence: Sequence) -> dict[str, Any]:
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

    def evaluate(self, batch: Batch) -> dict[str, Any]:
        """The loss and metrics of a batch; nothing is learned and no state changes."""
        with brainstate.environ.context(fit=False):
            return jax.device_get(self._evaluate(*batch))  # type: ignore[no-any-return]

    def _evaluate_batch(self, xs: Any, ys: Any, mask: Any) -> dict[str, Any]:
        model = self.learner.model
        kept = {id(st): (st, st.value) for st in (*model.states().values(), brainstate.random.DEFAULT)}
        sequence = sequence_of(xs, ys, mask)
        self.learner.reset_model(**({"batch_size": size_of(xs)} if self.batched else {}))

        checked = lambda out, *lead: split_loss(out, True, lead, sequence.mask.shape[1:])
        with calling_model(self.learner):
            if self.in_windows:
                run = lambda c, arrays, mask, _: (c, checked(self._step(*arrays), len(mask)))
                size, scan = self.chunk_size or 1, brainstate.transform.scan
                _, (losses, aux) = over_chunks(run, (), sequence, size, scan)
            else:
                run = lambda *slices: checked(self._step(*slices))
                losses, aux = brainstate.transform.for_loop(run, *sequence.arrays)
        for state, value in kept.values():
            state.value = value
        return self._everywhere(self._scores(losses, aux, sequence))


def with_aux(out: Any) -> tuple[Any, Any]:
    """A loss, or a pair of it and anything else, as a pair."""
    return out if isinstance(out, tuple) and len(out) == 2 else (out, {})


def sequence_of(xs: Any, ys: Any, mask: Any) -> Sequence:
    """A batch as a sequence, in which targets that do not count are finite: 0 * NaN is NaN."""
    sequence = Sequence.check((xs, ys), mask)
    xs, ys = sequence.arrays
    leaves, tree = jax.tree.flatten(ys)
    finite = finite_targets(leaves, sequence.mask, [True] * len(leaves))
    return replace(sequence, arrays=(xs, jax.tree.unflatten(tree, finite)))


def _warn_of_batch_first(model: brainstate.nn.Module, xs: Any) -> None:
    """Warn if the states of a model have as many rows as the sequences seem to have steps."""
    states = jax.tree.leaves([st.value for st in model.states(brainstate.HiddenState).values()])
    rows = {jnp.shape(a)[0] for a in states if jnp.ndim(a) > 1}
    if rows == {steps_of(xs)} and rows != {size_of(xs)}:
        warn_user(
            f"The model's states are made for batches of {steps_of(xs)}, and that is the first axis of `xs`, "
            "which is time. If it is the batch, swap the first two axes of `xs` and `ys`."
        )


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda a: getattr(a, "sharding", None), tree)


def _is_quantity(value: Any) -> bool:
    return isinstance(value, u.Quantity)


def _mantissas(tree: Any) -> Any:
    return jax.tree.map(lambda v: v.mantissa if _is_quantity(v) else v, tree, is_leaf=_is_quantity)


def _with_units(tree: Any, like: Any) -> Any:
    leaves = jax.tree.leaves(tree)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _descent(grads: Any) -> Any:
    """Gradients to descend along: JAX's are the conjugates where a parameter is complex."""
    return jax.tree.map(lambda g: jnp.conj(g) if jnp.iscomplexobj(g) else g, _mantissas(grads))


def _all_finite(tree: Any) -> Any:
    return jnp.stack([jnp.isfinite(a).all() for a in jax.tree.leaves(tree)]).all()
