"""Make and compile a learner in one call."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from functools import partial

import brainstate
import jax
import jax.numpy as jnp

from .. import _meshes
from .._executor.window import where_rows
from .._online.sequence import Sequence
from .._rules.rule import Rule
from .._types import Array, ArrayLike, Function, Option, PyTree, Value
from .config import ETraceConfig
from .dni import DNI
from .learners import D_RTRL, ES_D_RTRL, UORO
from .rule_choice import RuleChoice
from .stateful import ETraceAlgorithm


def compile(
    model: brainstate.nn.Module,
    algorithm: type[ETraceAlgorithm] | Rule | str | ETraceConfig,
    *example_inputs: PyTree,
    batch_size: int | None = None,
    seed: int | None = None,
    verbose: int = 0,
    vmap: bool = False,
    **options: Option,
) -> ETraceAlgorithm | ETraceVmap:
    """Initialise the model's states, build a learner and compile it for inputs like the given ones.

    Args:
        model: The model, with an `update` method.
        algorithm: A learner class, a name ('d_rtrl', 'es_d_rtrl', 'rtrl', 'bptt', 'eprop', ...), a value of
            `braintrace.rules` or an `ETraceConfig`.
        *example_inputs: Inputs of one step; only their shapes are used.
        batch_size: Number of samples, passed to `init_state`; by default the states have no batch axis.
        seed: Seed of the random numbers that `init_state` draws.
        verbose: 1 prints the report, 2 every finding of the compiler as well.
        vmap: The model is that of a single sample. States and traces are made for each of `batch_size`
            samples, and the learner is mapped over the first axis of its inputs.
        **options: Options of the learner, such as `window` and `rank`.

    Returns:
        The learner, ready to be called.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> cell = braintrace.nn.GRUCell(3, 4)
    >>> learner = braintrace.compile(cell, "d_rtrl", jnp.ones((2, 3)), batch_size=2)
    >>> learner(jnp.ones((2, 3))).shape
    (2, 4)
    """
    if isinstance(algorithm, ETraceConfig):
        options["config"] = algorithm
        kinds = {"per_param": D_RTRL, "io_factorized": ES_D_RTRL, "random_projection": UORO}
        bootstrapped = algorithm.learning_signal == "bootstrapped"
        algorithm = DNI if bootstrapped else kinds[algorithm.trace_factorization]
    learner = RuleChoice.of(algorithm, what="algorithm").make(model, **options)
    if not example_inputs:
        raise ValueError("Give an example of the model's input: an array with the shape of one step.")
    if vmap and batch_size is None:
        raise ValueError("With `vmap=True`, give `batch_size`, the number of samples.")

    def init(*inputs: PyTree) -> None:
        brainstate.nn.init_all_states(model, **({} if vmap else {"batch_size": batch_size}))
        learner.compile_graph(*inputs)

    with contextlib.nullcontext() if seed is None else brainstate.random.seed_context(seed):
        if vmap:
            init = brainstate.transform.vmap_new_states(init, state_tag="new", axis_size=batch_size)
            example_inputs = jax.tree.map(_meshes.example_of, example_inputs)
        init(*example_inputs)
    if verbose:
        learner.report.show(verbose)
    return ETraceVmap(learner, vmap_states="new", axis_size=batch_size) if vmap else learner


Filter = Hashable | Function | None  # of states, as `brainstate.nn.Module.states` takes them


class ETraceVmap(brainstate.nn.Vmap):
    """A learner of a single sample, called on many at once: each has its own states and traces.

    All else (`etrace_grad`, `report`, `param_states`, ...) is the learner's own.
    """

    def __init__(
        self,
        module: ETraceAlgorithm,
        in_axes: PyTree = 0,
        out_axes: PyTree = 0,
        vmap_states: Filter = None,
        vmap_out_states: Filter = None,
        axis_name: Hashable | None = None,
        axis_size: int | None = None,
    ) -> None:
        out_states = vmap_states if vmap_out_states is None else vmap_out_states
        super().__init__(module, in_axes, out_axes, vmap_states, out_states, axis_name, axis_size)
        self.vmap_states = vmap_states

    def update(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Advance states and traces of every sample by one call."""
        guards = self.module._guards
        # `vmap` hands tracers of one sample to the learner, so states are compared out here
        guards.before_call(self.module, keep=True)
        out = super().update(*args, **kwargs)
        guards.after_call()
        return out

    def etrace_evolve(self, *sequences: PyTree, step_fn: Function | None = None, **options: Option) -> PyTree:
        """Advance states and traces of every sample over a sequence; time first, then samples."""
        return self.module.etrace_evolve(*sequences, step_fn=step_fn or self, **options)

    def etrace_grad(
        self, *sequences: PyTree, step_fn: Function, reset: ArrayLike | None = None, **options: Option
    ) -> PyTree:
        """As the learner's own; `step_fn` calls this object."""
        if reset is None:
            return self.module.etrace_grad(*sequences, step_fn=step_fn, **options)
        flags = Sequence.check(sequences, None, reset).reset

        def with_reset(rows: Array, *slices: PyTree) -> PyTree:
            self.reset_state(rows=rows)
            return step_fn(*slices)

        return self.module.etrace_grad(flags, *sequences, step_fn=with_reset, **options)

    def reset_state(self, batch_size: int | None = None, *, rows: ArrayLike | None = None) -> None:
        """Reset the states, traces and step counter of every sample; or states and traces of some `rows`."""
        if batch_size is not None and self.axis_size not in (None, batch_size):
            raise ValueError(
                f"The learner is mapped over {self.axis_size} samples; call `braintrace.compile` for "
                f"{batch_size}."
            )
        states = self.module.states(self.vmap_states)
        before = {k: st.value for k, st in states.items()}, self.module.steps.value
        size, reset = self.axis_size or batch_size, self.module.reset_state
        brainstate.transform.vmap(reset, in_states=states, out_states=states, axis_size=size)()
        if rows is not None:
            choose = partial(where_rows, jnp.asarray(rows))
            for path, state in states.items():
                state.value = jax.tree.map(choose, state.value, before[0][path])
            self.module.steps.value = before[1]

    def __getattr__(self, name: str) -> Value:
        if name.startswith("_") or "module" not in vars(self):
            raise AttributeError(name)
        return getattr(self.module, name)
