"""DNI: windows, and a small net that estimates the gradient of the losses after each."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

import brainstate
import jax
import jax.numpy as jnp

from .._compiler import CompilationError
from .._rules.signal import Bootstrapped
from .._rules.without_traces import BPTT
from .._rules.without_traces import DNI as DNIRule
from .._types import Array, Function, Leaves, PyTree
from .compiled_step import CompiledStep
from .config import ETraceConfig
from .model_states import leaves_of
from .options import Choice, OptionsLearner


class SyntheticGradient(brainstate.nn.Module):
    """An affine map for each group, from its states to the gradient of all later losses by them.

    `group_shapes` are those of `learner.group_signal_shapes()`: (*units, states). Weights start from zero, or
    with `scale` from random numbers. `hidden_width` is accepted and has no effect.
    """

    def __init__(
        self,
        group_shapes: dict[int, tuple[int, ...]],
        hidden_width: int | None = None,
        scale: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.group_shapes = {int(k): tuple(s) for k, s in group_shapes.items()}
        self.weights, self.biases = {}, {}
        for k, shape in self.group_shapes.items():
            key, width = jax.random.fold_in(jax.random.key(seed), k), math.prod(shape[-2:])  # units, states
            self.weights[str(k)] = brainstate.ParamState(scale * jax.random.normal(key, (width, width)))
            self.biases[str(k)] = brainstate.ParamState(jnp.zeros(width))

    def states_dict(self) -> dict[str, brainstate.State]:
        """The parameters, by name."""
        pairs = (("weight", self.weights), ("bias", self.biases))
        return {f"{what}{k}": st for what, states in pairs for k, st in states.items()}

    def param_values(self) -> dict[str, Array]:
        """The values of the parameters, as `apply` takes them."""
        return {k: st.value for k, st in self.states_dict().items()}

    def apply(self, values: dict[str, Array], hidden: dict[int, Array]) -> dict[int, Array]:
        """The estimates at some states; a pure function."""
        found = {}
        for k, h in hidden.items():
            w, b = values[f"weight{k}"].astype(h.dtype), values[f"bias{k}"].astype(h.dtype)
            rows = h.reshape(-1, w.shape[0])
            found[k] = (rows @ w + b[None]).reshape(h.shape)
        return found


class DNI(OptionsLearner):
    """Decoupled neural interfaces (Jaderberg et al. 2017): windows, and an estimate of later gradients.

        gradient = sum over windows of d(L in the window + <s(h[end]), h[end]>)/dw

    `synthesizer` makes `s` (`attach_synthesizer`: later), `train_synthetic_gradient` fits it; with the true
    one the gradient is that of BPTT. All parameters learn so. In 0.2.6 weights of marked ops learn by traces
    instead, and only the others by the estimate.
    """

    takes = (
        "synthesizer name vjp_method fast_solve trace_dtype chunked_trace control_flow "
        "snap_max_jacobian_elements * window mark config"
    )
    defaults: ClassVar = {"vjp_method": "multi-step"}
    ignores = ("trace_dtype",)

    @classmethod
    def choose(cls, options: SimpleNamespace) -> Choice:
        if options.vjp_method != "multi-step":
            raise ValueError("DNI estimates the losses after a window: `vjp_method` is 'multi-step'.")
        config = options.config or ETraceConfig(learning_signal="bootstrapped")
        net = options.synthesizer
        if net is None:
            return Choice(DNIRule(), config, {"synthesizer": None})
        standing = {"synthesizer": net.param_values}
        return Choice(DNIRule(Bootstrapped(net.apply)), config, {"synthesizer": net, "standing": standing})

    def attach_synthesizer(self, synthesizer: SyntheticGradient) -> None:
        """Use this one from now on: it has `param_values()` and `apply(values, states)`."""
        self.synthesizer = synthesizer
        self.standing["synthesizer"] = synthesizer.param_values
        self._change_rule(DNIRule(Bootstrapped(synthesizer.apply)), reset=False)

    def group_signal_shapes(self) -> dict[int, tuple[int, ...]]:
        """The shape of the states of each group, (*units, states)."""
        return {g.index: (*g.varshape, g.num_state) for g in self.graph.hidden_groups}


def train_synthetic_gradient(
    learner: DNI,
    inputs: PyTree,
    *,
    chunk_size: int = 1,
    loss_fn: Function | None = None,
    optimizer: brainstate.optim.Optimizer | None = None,
    lr: float = 1e-2,
    epochs: int = 1,
    reset: bool = True,
    batch_size: int | None = None,
) -> list[float]:
    """Fit the synthesizer of a learner to the gradients that it estimates; the model's parameters stay.

        s(h[start]) -> d(L in the window + <s(h[end]), h[end]>)/dh[start], and zero at the end of `inputs`

    Args:
        learner: The learner, compiled, with a synthesizer attached.
        inputs: Inputs of all steps; time is the first axis.
        chunk_size: Steps of a window, as in the training that follows; it divides the number of steps.
        loss_fn: Loss of a step, `loss_fn(output)`; by default the sum of squares.
        optimizer: Takes the gradients, registered for `learner.synthesizer.states_dict()`; by default
            gradient descent with step size `lr`.
        lr: Step size without an optimizer.
        epochs: Passes over `inputs`.
        reset: Whether to reset the learner before each pass.
        batch_size: Number of samples of that reset.

    Returns:
        The mean squared error of each pass.
    """
    net: SyntheticGradient | None = learner.synthesizer
    if net is None:
        raise RuntimeError("The learner has no synthesizer yet: `learner.attach_synthesizer(...)`.")
    steps = len(jax.tree.leaves(inputs)[0])
    if chunk_size < 1 or steps % chunk_size:
        raise ValueError(f"`chunk_size`, {chunk_size}, does not divide the {steps} steps.")
    if not learner.is_compiled:
        raise CompilationError("The learner's graph is not compiled yet: call `learner.compile_graph(x)`.")
    compiled = learner._cache.now
    window = _window(compiled, loss_fn or (lambda out: sum(jnp.sum(a**2) for a in jax.tree.leaves(out))))

    @jax.jit
    @jax.value_and_grad
    def error_of(values: PyTree, states: Grouped, targets: Grouped) -> Array:
        found = net.apply(values, states)
        total = sum((jnp.sum((found[k] - targets[k]) ** 2) for k in found), jnp.zeros(()))
        return total / sum(found[k].size for k in found)

    def improve(states: Grouped, targets: Grouped) -> float:
        error, grads = error_of(net.param_values(), states, targets)
        if optimizer is not None:
            optimizer.update(grads)
        else:
            for k, st in net.states_dict().items():
                st.value = st.value - lr * grads[k]
        return float(error)

    history = []
    for _ in range(epochs):
        if reset:
            learner.reset_model(**({} if batch_size is None else {"batch_size": batch_size}))
        leaves, errors = leaves_of(compiled), []
        for i in range(0, steps, chunk_size):
            xs = jax.tree.map(lambda a, i=i: a[i : i + chunk_size], inputs)
            states, targets, end, leaves = window(net.param_values(), leaves, xs)
            errors.append(improve(states, targets))
        errors.append(improve(end, jax.tree.map(jnp.zeros_like, end)))
        history.append(sum(errors) / len(errors))
    return history


Grouped = dict[int, Array]  # an array for each group of hidden states
# hidden states at the start of a window, their targets, hidden states at its end, and all states there
Window = tuple[Grouped, Grouped, Grouped, Leaves]


def _window(compiled: CompiledStep, loss: Function) -> Callable[..., Window]:
    """A function of the synthesizer's values, and of the states and inputs of a window."""
    plain, executor, info = compiled.with_rule(BPTT(), None), compiled.rule_step.executor, compiled.info
    variables = [v for e in info.entries for v in e.invars]
    at = [variables.index(h.leaf) for h in info.hidden]

    def grouped(leaves: Leaves | Grouped) -> Grouped:
        by_var = {h.outvar: h.of_leaf(leaves[i]) for h, i in zip(info.hidden, at, strict=True)}
        groups = executor.graph.hidden_groups
        return {g.index: g.concat_hidden([by_var[v] for v in g.hidden_outvars]) for g in groups}

    @jax.jit
    def window(values: PyTree, leaves: Leaves, xs: PyTree) -> Window:
        def body(leaves: Leaves, x: PyTree) -> tuple[Leaves, Array]:
            outs, leaves, _ = plain(leaves, {}, jax.tree.leaves(x), {})
            return leaves, loss(jax.tree.unflatten(info.out_tree, outs))

        def total(hidden: Grouped) -> tuple[Array, Leaves]:
            after, losses = jax.lax.scan(body, [hidden.get(i, a) for i, a in enumerate(leaves)], xs)
            end = [h.of_leaf(after[i]) for h, i in zip(info.hidden, at, strict=True)]
            found = compiled.rule.signal.at_end(executor, {"synthesizer": values}, end) or []
            estimate = sum(jnp.sum(h * s) for h, s in zip(end, found, strict=True))
            return jnp.sum(losses) + estimate, after

        start = {i: leaves[i] for i in at}
        target, after = jax.grad(total, has_aux=True)(start)
        return grouped(start), grouped(target), grouped(after), after

    return window
