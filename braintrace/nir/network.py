"""A NIR graph as one module: `load` and `save`."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import NamedTuple

import brainstate
import brainunit as u
import jax.numpy as jnp
import nir

from .._types import Array, Options, Shape, Value
from ..nn import surrogate
from ..nn.neurons import Spike
from . import files, layers
from .errors import NIRError
from .neurons import METHODS, RESETS, Delay, Neuron
from .nodes import Conv, Dense, Flatten, Node, Pool, Port, Scale, Settings, Threshold
from .schedule import schedule

_WEIGHTS = frozenset({"weight", "bias", "scale"})
_MODULES: dict[str, type[Node]] = {
    **dict.fromkeys(("Input", "Output"), Port),
    **dict.fromkeys(("Affine", "Linear"), Dense),
    **dict.fromkeys(("Conv1d", "Conv2d"), Conv),
    **dict.fromkeys(("AvgPool2d", "SumPool2d"), Pool),
    **dict.fromkeys(Neuron.names, Neuron),
    "Scale": Scale,
    "Delay": Delay,
    "Flatten": Flatten,
    "Threshold": Threshold,
}

Nodes = dict[str, nir.NIRNode]
Edges = list[tuple[str, str]]


class Level(NamedTuple):
    """A graph without its parameters: for each node, the name of its module or the level below."""

    nodes: dict[str, str | Level]
    edges: Edges
    metadata: Options


class Network(brainstate.nn.Module):
    """A NIR graph that takes steps; `load` makes it.

    `parts` has a module for each node, by its name; a node in a nested graph is called `graph/node`. A call
    takes one array for each Input and returns that of the Output, or a tuple of several, in the order of
    names. Arrays have the shape of their node, or a batch axis before it.
    """

    def __init__(self, parts: dict[str, Node], sources: dict[str, list[str]], level: Level) -> None:
        super().__init__()
        self.parts, self.sources, self.level = parts, sources, level
        self.order = schedule(
            sources,
            {name for name, part in parts.items() if part.remembers},
            {name for name, part in parts.items() if part.foresees},
        )
        runs = enumerate(self.order)
        self.read_early = {s for k, name in runs for s in sources[name] if s not in self.order[:k]}
        # a file has no order of nodes, so that only names can give one
        self.inputs, self.outputs = (
            sorted(n for n in level.nodes if n in parts and parts[n].kind == kind)
            for kind in ("Input", "Output")
        )
        for kind, found in (("Input", self.inputs), ("Output", self.outputs)):
            if not found:
                raise NIRError(f"The graph has no {kind} node.")
        self.in_size = parts[self.inputs[0]].in_size
        self.out_size = parts[self.outputs[0]].out_size

    def update(self, *xs: Array) -> Array | tuple[Array, ...]:
        values = {name: self.parts[name].last() for name in sorted(self.read_early)}
        if len(xs) != len(self.inputs):
            raise TypeError(f"The network takes {len(self.inputs)} inputs ({self.inputs}), not {len(xs)}.")
        given = dict(zip(self.inputs, xs, strict=True))
        for name in self.order:
            part = self.parts[name]
            if name in given:
                x = _as_input(given[name], part.in_size, name)
            else:
                first, *rest = (values[source] for source in self.sources[name])
                x = sum(rest, first)
            values[name] = part(x)
        found = tuple(values[name] for name in self.outputs)
        return found[0] if len(found) == 1 else found


def _as_input(x: Array, shape: Shape, name: str) -> Array:
    x = jnp.asarray(x)
    if x.shape[-len(shape) :] != shape or x.ndim > len(shape) + 1:
        raise ValueError(f"`{name}` takes {shape}, with or without a batch axis before it, not {x.shape}.")
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(brainstate.environ.dftype())


def load(
    graph: str | os.PathLike[str] | nir.NIRGraph,
    *,
    dt: Value = None,
    method: str = "exponential",
    reset: str = "hard",
    learn: bool | Collection[str] = True,
    spk_fun: Spike = surrogate.sigmoid(),
) -> Network:
    """Read a NIR graph as a `brainstate` module, for any learner.

    NIR is continuous in time. With the input held for a step, the method "exponential" is exact, "euler" is
    forward Euler, and "semi-implicit" is Euler with the new synaptic current in the equation of the voltage,
    as in snnTorch and Norse.

    A spike is where `v > v_threshold`. The reset "hard" sets the voltage to `v_reset`, as NIR defines it;
    "soft" lowers it by `v_threshold - v_reset`; "soft-delayed" does so after the decay of the next step, as
    snnTorch does by default. NIR cannot express the latter two: such a module cannot be saved.

    Voltages start at `v_leak` or 0, and currents at 0. In a cycle, the neuron closest to an Input runs
    first (of several, the first by name) and reads the outputs that others had in the step before.

    Args:
        graph: A file, or a `nir.NIRGraph`.
        dt: Time step, in the file's unit of time or with a unit. Default: of `brainstate.environ`, or 0.001.
        method: "exponential" (default), "euler" or "semi-implicit".
        reset: "hard" (default), "soft" or "soft-delayed".
        learn: True (default) for weights, biases and scales; False; or names such as "fc" and "lif.tau".
        spk_fun: Spikes and their derivative, of `braintrace.nn.surrogate`. Default: `sigmoid()`.

    Returns:
        A module with one part for each node.

    Raises:
        NIRError: The file or graph is damaged, or cannot be run with these settings; the node is named.

    >>> import braintrace, jax.numpy as jnp, nir, numpy as np
    >>> one = np.ones(2)
    >>> lif = nir.LIF(tau=0.01 * one, r=10 * one, v_leak=0 * one, v_threshold=one)
    >>> net = load(nir.NIRGraph.from_list(nir.Linear(np.ones((2, 3))), lif), dt=1e-3)
    >>> _ = brainstate.nn.init_all_states(net)
    >>> net(jnp.ones(3)).tolist()
    [1.0, 1.0]
    """
    if isinstance(graph, str | os.PathLike):
        graph = files.read(graph)
    elif not isinstance(graph, nir.NIRGraph):
        raise TypeError(f"`load` takes a file or a `nir.NIRGraph`, not {type(graph)}.")
    for what, value, known in (("method", method, METHODS), ("reset", reset, RESETS)):
        if value not in known:
            raise ValueError(f"`{what}` is one of {known}, not {value!r}.")
    nodes, edges, level = _flat(graph, "")
    settings = Settings(time_step(dt), method, reset, spk_fun, _learned(learn, nodes))
    sources = _sources(nodes, edges)
    return Network(_modules(nodes, sources, settings), sources, level)


def save(model: brainstate.nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model as a NIR file.

    Args:
        model: A module of `load`, or layers of `braintrace.nn` in a `brainstate.nn.Sequential`.
        path: The file; one that is there is replaced.

    Raises:
        NIRError: NIR cannot express a part of the model, such as an adaptive threshold; the part is named.

    >>> import braintrace, pathlib, tempfile
    >>> net = brainstate.nn.Sequential(braintrace.nn.Linear(3, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(net, pathlib.Path(folder) / "net.nir")
    ...     [part.kind for part in load(pathlib.Path(folder) / "net.nir").parts.values()]
    ['Affine', 'Input', 'Output']
    """
    files.write(to_graph(model), path)


def to_graph(model: brainstate.nn.Module) -> nir.NIRGraph:
    """Make the `nir.NIRGraph` that `save` writes.

    Args:
        model: As for `save`.

    Returns:
        The graph, with the present values of all parameters.

    Raises:
        NIRError: NIR cannot express a part of the model.

    >>> import braintrace
    >>> list(to_graph(brainstate.nn.Sequential(braintrace.nn.Linear(3, 2))).nodes)
    ['input', '0', 'output']
    """
    if not isinstance(model, Network):
        model = load(layers.to_graph(model, time_step))
    for name, part in model.parts.items():
        if getattr(part, "reset", "hard") != "hard" and "v_threshold" in part.parameters:
            raise NIRError(
                f"`{name}` has a {part.reset} reset, which NIR's {part.kind} cannot express: there, a spike "
                'sets the voltage to `v_reset`. Load the graph with reset="hard" to save it.'
            )
    return _nested(model.level, model.parts)


def _nested(level: Level, parts: dict[str, Node]) -> nir.NIRGraph:
    nodes = {
        name: _nested(inner, parts) if isinstance(inner, Level) else parts[inner].to_nir()
        for name, inner in level.nodes.items()
    }
    # `nir` computes the shapes of grouped convolutions and of oblong windows wrongly, and refuses them
    return nir.NIRGraph(nodes, list(level.edges), dict(level.metadata), type_check=False)


def time_step(dt: Value = None) -> float:
    """A time step as a number; one with a unit in seconds."""
    dt = brainstate.environ.get("dt", 1e-3) if dt is None else dt
    value = float(dt / u.second if isinstance(dt, u.Quantity) else dt)
    if not 0 < value < float("inf"):
        raise ValueError(f"`dt` is a time above 0, not {dt}.")
    return value


def _flat(graph: nir.NIRGraph, prefix: str) -> tuple[Nodes, Edges, Level]:
    """The nodes and edges of a graph and of the graphs inside it, and its levels."""
    nodes: Nodes = {}
    edges: Edges = []
    inside: dict[str, str | Level] = {}
    ends: dict[str, tuple[str, str]] = {}  # where an edge to a node ends, and one from it starts
    for name, node in graph.nodes.items():
        path = f"{prefix}{name}"
        if "/" in name:
            raise NIRError(f"`{path}`: the name of a node has no slash.")
        if isinstance(node, nir.NIRGraph):
            inner_nodes, inner_edges, inside[name] = _flat(node, f"{path}/")
            found = [[n for n, v in node.nodes.items() if isinstance(v, t)] for t in (nir.Input, nir.Output)]
            if [len(names) for names in found] != [1, 1]:
                raise NIRError(f"`{path}`: a graph inside of another has one Input and one Output node.")
            ends[name] = f"{path}/{found[0][0]}", f"{path}/{found[1][0]}"
            nodes, edges = nodes | inner_nodes, edges + inner_edges
        elif type(node).__name__ in _MODULES:
            nodes[path], inside[name], ends[name] = node, path, (path, path)
        else:
            raise NIRError(f"`{path}`: unknown node type {type(node).__name__!r}.")
    given = [(str(a), str(b)) for a, b in graph.edges]
    for a, b in given:
        if a not in ends or b not in ends:
            raise NIRError(f"The edge {a!r} -> {b!r} names a node that is not in the graph.")
        edges.append((ends[a][1], ends[b][0]))
    return nodes, edges, Level(inside, given, dict(graph.metadata or {}))


def _sources(nodes: Nodes, edges: Edges) -> dict[str, list[str]]:
    """For each node, the nodes that feed it, in the order of their names."""
    if len(set(edges)) != len(edges):
        raise NIRError("The graph has an edge twice.")
    into: dict[str, set[str]] = {name: set() for name in nodes}
    for a, b in edges:
        into[b].add(a)
    for name, node in nodes.items():
        outer = "/" not in name
        if not into[name] and not (outer and isinstance(node, nir.Input)):
            raise NIRError(f"`{name}` has no input: no edge leads to it.")
        if into[name] and outer and isinstance(node, nir.Input):
            raise NIRError(f"`{name}` is an Input, but an edge leads to it.")
        if not any(name in found for found in into.values()) and not isinstance(node, nir.Output):
            raise NIRError(f"`{name}` has no effect: no edge leads away from it.")
    return {name: sorted(into[name]) for name in nodes}


def _modules(nodes: Nodes, sources: dict[str, list[str]], settings: Settings) -> dict[str, Node]:
    """The module of each node; shapes go along the edges from nodes that know theirs."""
    made: dict[str, Node] = {}
    # neurons and weights know their shapes, so that these pass through cycles, too
    sizes = {name: size for name, node in nodes.items() if (size := _own_size(node, name)) is not None}
    while len(made) < len(nodes):
        before = len(made)
        for name, node in nodes.items():
            shapes = {s: made[s].out_size for s in sources[name] if s in made}
            size = sizes.get(name, next(iter(shapes.values()), None))
            if name not in made and size is not None:
                made[name] = _MODULES[type(node).__name__](node, name, settings, size)
        if len(made) == before:
            raise NIRError(f"No shape is known for {', '.join(n for n in nodes if n not in made)}.")
    for name, part in made.items():
        for source in sources[name]:
            if made[source].out_size != part.in_size:
                raise NIRError(
                    f"`{source}` gives the shape {made[source].out_size}, but `{name}` takes {part.in_size}."
                )
    return {name: made[name] for name in nodes}


def _own_size(node: nir.NIRNode, name: str) -> Shape | None:
    """The shape of a node's input, if it depends on the node alone."""
    if isinstance(node, nir.Input | nir.Output):
        shape = node.input_type["input"]
        return None if shape is None else files.shape_of(shape, name)
    if isinstance(node, nir.Affine | nir.Linear):
        shape = files.numbers(node, "weight", name).shape
        return (*shape[:-2], shape[-1])
    field = _MODULES[type(node).__name__].sized_by
    return files.numbers(node, field, name).shape if field else None


def _learned(learn: bool | Collection[str], nodes: Nodes) -> Callable[[str, str], bool]:
    if isinstance(learn, bool):
        return lambda name, field: learn and field in _WEIGHTS
    names = {learn} if isinstance(learn, str) else set(learn)
    for name in names:
        node, _, field = name.rpartition(".")
        if name not in nodes and not hasattr(nodes.get(node), field):
            raise ValueError(f"`learn` names {name!r}, which is neither a node nor a parameter of one.")
    return lambda name, field: name in names or f"{name}.{field}" in names
