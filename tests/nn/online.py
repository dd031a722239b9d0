"""What every cell and net is tested for: its graph, and its online gradients against the oracles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

import braintrace as bt
from tests import oracle
from tests.run import difference, online


@dataclass(frozen=True)
class Net:
    """A model and what is to be found in it.

    `relations` are the learned weights in program order, each with how its states are reached, as
    `"Wz: h, Wx: h mixed"`; `groups` are the groups of states, as `"c h | r"`.
    """

    build: Callable[[], Any]
    relations: str
    groups: str
    exact: bool
    x: tuple[int, ...] = (3,)
    batch: int | None = 2
    dt: Any = 1.0
    x_scale: float = 1.0

    def make(self) -> tuple[Any, list[Any]]:
        """The model with parameters and states drawn anew, and three inputs."""
        brainstate.random.seed(0)
        with jax.numpy_rank_promotion("allow"):  # brainstate's initialisers rely on it
            model = self.build()
        draw = np.random.RandomState(0)
        for state in model.states(brainstate.ParamState).values():
            state.value = jax.tree.map(lambda v: v + 0.2 * draw.randn(*v.shape), state.value)
        self.reset(model)
        shape = self.x if self.batch is None else (self.batch, *self.x)
        return model, [jnp.asarray(self.x_scale * draw.randn(*shape)) for _ in range(3)]

    def reset(self, model: Any) -> None:
        """States that are not zero, the same each time."""
        brainstate.nn.init_all_states(model, batch_size=self.batch)
        draw = np.random.RandomState(1)
        for state in model.states(brainstate.HiddenState).values():
            state.value = jax.tree.map(lambda v: v + 0.3 * draw.rand(*v.shape), state.value)


def check(net: Net) -> None:
    """The graph, and the gradients of D-RTRL."""
    with brainstate.environ.context(dt=net.dt):
        model, xs = net.make()
        learner = bt.D_RTRL(model)
        learner.compile_graph(xs[0])
        assert describe_relations(learner.graph) == [r.strip() for r in net.relations.split(",")]
        assert describe_groups(learner.graph) == [g.split() for g in net.groups.split("|")]
        bptt = oracle.bptt(model, xs)
        definition = None if net.exact else oracle.Brute(model, xs[0], learner.graph).d_rtrl(xs)
        found = online(learner, xs)
    if definition is None:
        assert distance(found, bptt) < 1e-11
    else:
        assert distance(found, bptt) > 1e-3
        assert distance(found, definition) < 1e-11


def check_factored(net: Net) -> None:
    """The gradients of ES-D-RTRL; and brute force gives those of D-RTRL too, where BPTT does."""
    with brainstate.environ.context(dt=net.dt):
        model, xs = net.make()
        learner = bt.ES_D_RTRL(model, 0.9)
        learner.compile_graph(xs[0])
        brute = oracle.Brute(model, xs[0], learner.graph)
        definition, other = brute.es_d_rtrl(xs, 0.9), brute.d_rtrl(xs)
        if net.exact:
            assert distance(other, oracle.bptt(model, xs)) < 1e-11
        found = online(learner, xs)
    assert distance(found, definition) < 1e-11
    assert distance(found, other) > 1e-3


def distance(a: dict[Any, Any], b: dict[Any, Any]) -> float:
    """The largest difference of two gradients, neither of which is zero anywhere."""
    assert a.keys() == b.keys()
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(a))
    return max(difference(a, b).values())


def describe_relations(graph: Any) -> list[str]:
    found = []
    for r in graph.hidden_param_op_relations:
        kinds = {str(kind) for kind in r.path_classification.values()} - {"all_direct"}
        names = ".".join(p for p in r.weight_path if p != "weight") or "weight"
        states = sorted(".".join(p) for p in r.connected_hidden_paths)
        found.append(" ".join([f"{names}:", *states, *sorted(kinds)]))
    return found


def describe_groups(graph: Any) -> list[list[str]]:
    return [sorted(".".join(p) for p in g.hidden_paths) for g in graph.hidden_groups]


def train(model: Any, loss: Callable[[Any, Any], Any], xs: Any, rate: float, epochs: int = 30) -> list[float]:
    """The loss of each epoch of gradient descent (of bounded steps) with D-RTRL over one sequence."""
    brainstate.nn.init_all_states(model, batch_size=xs.shape[1])
    learner = bt.D_RTRL(model)
    learner.compile_graph(xs[0])
    params = model.states(brainstate.ParamState)

    def step(x: Any) -> Any:
        return brainstate.transform.grad(lambda: loss(learner(x), x), params, return_value=True)()

    @brainstate.transform.jit
    def epoch() -> Any:
        learner.reset_state(batch_size=xs.shape[1])
        grads, losses = brainstate.transform.for_loop(step, xs)
        grads = jax.tree.map(lambda g: jnp.mean(g, 0), grads)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        for key, state in params.items():
            state.value = jax.tree.map(lambda v, g: v - rate * g / (1 + norm), state.value, grads[key])
        return jnp.mean(losses)

    return [float(epoch()) for _ in range(epochs)]
