"""Flax NNX modules that learn online: `Learner` takes a module as it is and keeps carry and traces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

try:
    from flax import nnx
except ModuleNotFoundError as e:
    raise ModuleNotFoundError("`braintrace.nnx` needs Flax: `pip install braintrace[nnx]`.") from e

from ._frontends.functions import read_function
from ._frontends.modules import Mark
from ._frontends.order import in_order
from ._learners.learner import Learner as FunctionalLearner
from ._learners.online import make_learner
from ._online.arguments import as_shape
from ._online.request import WindowSize
from ._report.report import CompilationReport
from ._rules.rule import Values
from ._types import ArrayLike, Function, Option, PyTree, RuleLike


class Carry(nnx.Variable):
    """The carry of a learner's module."""


class Trace(nnx.Variable):
    """The traces of a learner's rule."""


class Learner(nnx.Module):
    """A module that is called as `module(carry, x) -> (carry, y)`, as Flax's cells are, learning online.

    `carry` is the carry before the first step, and `x` the input of one step, for its shape. Parameters are
    the module's `nnx.Param`s; its other variables (running statistics, counts and keys of random numbers) are
    carried along, without a trace. `rule`, `mark`, `window`, `order` and the options of a rule (`rank`, ...)
    are those of `braintrace.online`.

    >>> import braintrace.nnx, jax.numpy as jnp, optax
    >>> from flax import nnx
    >>> cell = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))
    >>> learner = braintrace.nnx.Learner(cell, jnp.zeros(4), jnp.ones(3))
    >>> optimizer = nnx.Optimizer(cell, optax.adam(1e-2), wrt=nnx.Param)
    >>> grads = learner.grad(lambda y: jnp.mean(y**2), jnp.ones((5, 3)))
    >>> _ = optimizer.update(cell, grads)
    """

    def __init__(
        self,
        module: nnx.Module,
        carry: PyTree,
        x: PyTree,
        *,
        rule: RuleLike = None,
        mark: Mark = "auto",
        window: WindowSize | None = None,
        order: str | None = None,
        **options: Option,
    ) -> None:
        self.module = module
        self.start = Carry(carry)
        self.carry = Carry(jax.tree.map(jnp.copy, carry))  # not the same buffers: jit may be given them both
        self.traces = Trace({})
        make = partial(make_learner, rule=rule, mark=mark, window=window, options=options)
        self._learners = _Learners(in_order(type(module).__call__, order), jax.tree.map(as_shape, x), make)
        _write(self.traces, self.split()[-1])

    def __call__(self, x: PyTree, **given: PyTree) -> PyTree:
        """One step; its derivative in the parameters is the online gradient.

        `given` are the inputs of the rule's learning signal: `modulator=`, `target=`.
        """
        net, params, carried, traces = self.split()
        carried, traces, y = net.step(params, carried, traces, x, **given)
        self._keep(carried, traces)
        return y

    def grad(
        self,
        loss: Function,
        xs: PyTree,
        *more: PyTree,
        has_aux: bool = False,
        return_value: bool = False,
        **options: Any,
    ) -> PyTree:
        """The gradients over a sequence, an `nnx.State` as `nnx.Optimizer.update(module, grads)` takes it.

        With `return_value` a tuple of them and the loss of each step; with `has_aux`, of them and the second
        value of `loss`; with both, of all three. Other options are those of `grad` of
        `braintrace.online`: `mask`, `reset`, `window`, `chunk_size`, `reduction`, `modulator`.
        """
        net, params, carried, traces = self.split()
        grads, (carried, traces), (losses, aux) = net.grad(
            loss, params, carried, traces, xs, *more, has_aux=has_aux, **options
        )
        self._keep(carried, traces)
        found = [grads, *([losses] if return_value else []), *([aux] if has_aux else [])]
        return found[0] if len(found) == 1 else tuple(found)

    def reset(self, rows: ArrayLike | None = None) -> None:
        """Reset to the first carry and traces of zero: all samples, or those flagged in `rows`."""
        net, _, carried, traces = self.split()
        carried, traces = net.reset(carried, traces, rows)
        self._keep(jax.tree.map(jnp.copy, carried), traces)

    @property
    def functions(self) -> FunctionalLearner:
        """The pure functions of `braintrace.online`: `check` and `plan`, among others."""
        return self.split()[0]

    @property
    def report(self) -> CompilationReport:
        """How each parameter is learned, and which paths through time the rule truncates."""
        return self.functions.report

    def split(self) -> tuple[FunctionalLearner, PyTree, PyTree, Values]:
        """The pure functions, and the current parameters, carry and traces, which they take.

        That carry is a pair: the module's own, and its variables that are no parameters.
        """
        graphdef, params, variables = nnx.split(self.module, nnx.Param, ...)
        carried, traces = (_read(self.carry), variables), _read(self.traces)
        net = self._learners.of(graphdef, type(self.module).__name__, params, carried)
        fresh = jax.eval_shape(net.init, params, carried)
        if jax.tree.map(as_shape, traces) != fresh:  # the module has changed, and with it the carry
            traces = net.init(params, carried)
        return net.with_start((_read(self.start), variables)), params, carried, traces

    def _keep(self, carried: PyTree, traces: PyTree) -> None:
        carry, variables = carried
        _write(self.carry, carry)
        _write(self.traces, traces)
        nnx.update(self.module, variables)


class _Learners:
    """The functional learner of each graph definition of the module: `module.eval()` makes another."""

    def __init__(self, call: Function, x: PyTree, make: Callable[..., FunctionalLearner]) -> None:
        self.call, self.x, self.make = call, x, make
        self.known: dict[nnx.GraphDef[nnx.Module], FunctionalLearner] = {}

    def of(
        self, graphdef: nnx.GraphDef[nnx.Module], name: str, params: PyTree, carried: PyTree
    ) -> FunctionalLearner:
        def step(params: PyTree, carried: PyTree, x: PyTree) -> PyTree:
            carry, variables = carried
            module = nnx.merge(graphdef, params, variables)
            carry, y = self.call(module, carry, x)
            nnx.pop(module, nnx.Intermediate)
            return (carry, nnx.split(module, nnx.Param, ...)[2]), y

        if graphdef not in self.known:
            step.__name__ = name
            params, carried = jax.tree.map(as_shape, (params, carried))
            function = read_function(step, params, carried, self.x, untraced=lambda path: path[1] == "1")
            self.known[graphdef] = self.make(function, carried)
        return self.known[graphdef]


def _read(variable: nnx.Variable[PyTree]) -> PyTree:
    return variable.get_value() if hasattr(variable, "get_value") else variable.value  # flax < 0.12.1


def _write(variable: nnx.Variable[PyTree], value: PyTree) -> None:
    if hasattr(variable, "set_value"):
        variable.set_value(value)
    else:  # flax < 0.12.1
        variable.value = value
