"""One graph for each node type, random graphs, and their comparison."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import nir
import numpy as np

NEURONS = {
    "I": ("r",),
    "IF": ("r", "v_threshold", "v_reset"),
    "LI": ("tau", "r", "v_leak"),
    "LIF": ("tau", "r", "v_leak", "v_threshold", "v_reset"),
    "CubaLI": ("tau_syn", "tau_mem", "r", "v_leak", "w_in"),
    "CubaLIF": ("tau_syn", "tau_mem", "r", "v_leak", "v_threshold", "v_reset", "w_in"),
}
RANGES = {
    "r": (20.0, 40.0),
    "tau": (0.005, 0.02),
    "tau_syn": (0.002, 0.02),
    "tau_mem": (0.005, 0.02),
    "v_leak": (-0.2, 0.2),
    "v_threshold": (0.5, 1.0),
    "v_reset": (-0.2, 0.1),
    "w_in": (0.5, 1.5),
}


def neuron(kind: str, rng: np.random.RandomState, shape: tuple[int, ...] = (4,)) -> Any:
    """A neuron of random parameters, which fires at a time step of 1 ms."""
    ranges = {**RANGES, "r": (300.0, 600.0)} if kind in ("I", "IF") else RANGES
    return getattr(nir, kind)(**{name: rng.uniform(*ranges[name], shape) for name in NEURONS[kind]})


def affine(rng: np.random.RandomState, outputs: int, inputs: int) -> Any:
    return nir.Affine(rng.randn(outputs, inputs) / inputs**0.5, 0.1 * rng.randn(outputs))


def chain(shape: tuple[int, ...], *nodes: Any, output: Any = None) -> Any:
    """Nodes one after the other; `output` is the shape at the end, which `nir` infers otherwise."""
    names = ["input", *(f"n{i}" for i in range(len(nodes))), "output"]
    ends = nir.Input(np.array(shape)), nir.Output(None if output is None else np.array(output))
    return nir.NIRGraph(
        dict(zip(names, [ends[0], *nodes, ends[1]], strict=True)),
        list(pairwise(names)),
        {},
        type_check=output is None,
    )


def every_node(rng: np.random.RandomState) -> dict[str, Any]:
    """For each node type, a graph with one."""
    image = (2, 6, 5)
    kernel = {"weight": rng.randn(4, 2, 3, 2), "bias": rng.randn(4)}
    line = {"weight": rng.randn(4, 1, 3), "bias": rng.randn(4)}
    pool = {"kernel_size": np.array([2, 3]), "stride": np.array([2, 1]), "padding": np.array([1, 0])}
    conv2d = nir.Conv2d(None, stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=1, **kernel)
    same = nir.Conv2d(None, stride=1, padding="same", dilation=1, groups=1, **kernel)
    conv1d = nir.Conv1d(None, stride=2, padding=1, dilation=1, groups=2, **line)
    return {
        "Input": chain((3,), nir.Scale(np.ones(3))),
        "Affine": chain((3,), affine(rng, 4, 3)),
        "Affine of groups": chain((2, 3), nir.Affine(rng.randn(2, 4, 3), rng.randn(2, 4))),
        "Linear": chain((3,), nir.Linear(rng.randn(4, 3))),
        "Scale": chain((2, 3), nir.Scale(rng.randn(2, 3))),
        "Conv1d": chain((2, 9), conv1d, output=(4, 5)),
        "Conv2d": chain(image, conv2d, output=(4, 3, 3)),
        "Conv2d same": chain(image, same, output=(4, 6, 5)),
        "AvgPool2d": chain(image, nir.AvgPool2d(**pool), output=(2, 4, 3)),
        "SumPool2d": chain(image, nir.SumPool2d(**pool), output=(2, 4, 3)),
        "Flatten": chain(image, nir.Flatten(None, 0, 1), output=(12, 5)),
        "Threshold": chain((3,), nir.Threshold(rng.randn(3))),
        "Delay": chain((3,), nir.Delay(np.array([0.0, 0.002, 0.005]))),
        **{kind: chain((4,), neuron(kind, rng)) for kind in NEURONS},
        "NIRGraph": chain((3,), affine(rng, 4, 3), recurrent(rng, 4)),
    }


def recurrent(rng: np.random.RandomState, units: int, kind: str = "LIF") -> Any:
    """Neurons that feed themselves, as snnTorch writes them."""
    return nir.NIRGraph(
        {
            "input": nir.Input(np.array([units])),
            "lif": neuron(kind, rng, (units,)),
            "w_rec": nir.Linear(rng.randn(units, units)),
            "output": nir.Output(np.array([units])),
        },
        [("input", "lif"), ("lif", "w_rec"), ("w_rec", "lif"), ("lif", "output")],
    )


def random_graph(seed: int) -> Any:
    """Layers with skipping and backward edges, nested graphs and delays."""
    rng = np.random.RandomState(seed)
    units = rng.randint(2, 5)
    nodes: dict[str, Any] = {"in": nir.Input(np.array([3])), "first": affine(rng, units, 3)}
    edges = [("in", "first")]
    before = ["first"]
    for i in range(rng.randint(2, 5)):
        name = f"n{i}"
        choice = rng.choice(["neuron", "nested", "delay", "scale", "linear"])
        if choice == "neuron":
            nodes[name] = neuron(rng.choice(list(NEURONS)), rng, (units,))
        elif choice == "nested":
            nodes[name] = recurrent(rng, units, rng.choice(["LIF", "CubaLIF"]))
        elif choice == "delay":
            nodes[name] = nir.Delay(0.001 * rng.randint(1, 4, units))
        elif choice == "scale":
            nodes[name] = nir.Scale(rng.randn(units))
        else:
            nodes[name] = nir.Linear(rng.randn(units, units) / units)
        edges.append((before[-1], name))
        if len(before) > 1 and rng.rand() < 0.4:
            edges.append((before[rng.randint(len(before) - 1)], name))
        before.append(name)
    nodes |= {"lif": neuron("LIF", rng, (units,)), "out": nir.Output(np.array([units]))}
    edges += [(before[-1], "lif"), ("lif", "out")]
    if rng.rand() < 0.7:  # a cycle through some of the layers
        nodes["back"] = nir.Linear(rng.randn(units, units) / units)
        edges += [("lif", "back"), ("back", before[rng.randint(1, len(before))])]
    return nir.NIRGraph(nodes, edges, {}, type_check=False)


def assert_same(a: Any, b: Any, tolerance: float = 1e-6) -> None:
    """Two graphs are equal, whatever the order of their nodes."""
    assert set(a.nodes) == set(b.nodes)
    assert set(map(tuple, a.edges)) == set(map(tuple, b.edges))
    for name, node in a.nodes.items():
        other = b.nodes[name]
        assert type(other) is type(node)
        if isinstance(node, nir.NIRGraph):
            assert_same(node, other, tolerance)
            continue
        mine, theirs = node.to_dict(), other.to_dict()
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            open_in_one = value is None or (key in ("shape", "input_shape") and theirs[key] is None)
            if open_in_one or key == "metadata" or isinstance(value, str):
                assert value is None or theirs[key] is None or value == theirs[key]
            else:
                expected = np.broadcast_to(np.asarray(value), np.shape(theirs[key]))
                np.testing.assert_allclose(theirs[key], expected, rtol=tolerance, atol=tolerance)
