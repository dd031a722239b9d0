"""Files and graphs that are damaged or hostile: an error that names the place, and nothing else happens."""

import contextlib
import os
import pickle
from pathlib import Path

import h5py
import nir
import numpy as np
import pytest

import braintrace
from braintrace.nir import NIRError

from ..run import every
from .graphs import affine, chain, neuron, recurrent


@pytest.fixture
def path(tmp_path):
    rng = np.random.RandomState(0)
    nir.write(tmp_path / "net.nir", chain((3,), affine(rng, 4, 3), neuron("LIF", rng), recurrent(rng, 4)))
    return tmp_path / "net.nir"


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_the_file_is_read_as_it_is(path):
    assert braintrace.nir.load(path).in_size == (3,)
    assert braintrace.nir.load(str(path)).out_size == (4,)


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_truncated(path, part):
    whole = path.read_bytes()
    path.write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(NIRError, match=r"net\.nir cannot be read as a NIR file"):
        braintrace.nir.load(path)


@pytest.mark.parametrize("seed", every(10, range(30)))
def test_random_bytes_changed(path, seed):
    """Whatever is damaged, either the file still says something valid or the error is one of ours."""
    rng = np.random.RandomState(seed)
    data = bytearray(path.read_bytes())
    for where in rng.randint(len(data), size=20):
        data[where] = rng.randint(256)
    path.write_bytes(bytes(data))
    with contextlib.suppress(NIRError):
        braintrace.nir.load(path)


def test_pickles_are_not_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.nir").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(NIRError, match="cannot be read"):
        braintrace.nir.load(tmp_path / "net.nir")
    with h5py.File(tmp_path / "inside.nir", "w") as file:
        node = file.create_group("node")
        node["type"] = "Scale"
        node["scale"] = np.void(pickle.dumps(Bomb()))
    with pytest.raises(NIRError, match="numbers and text are read"):
        braintrace.nir.load(tmp_path / "inside.nir")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(TypeError, match="takes a file or"):
        braintrace.nir.load(Bomb())
    with pytest.raises(FileNotFoundError):
        braintrace.nir.load(tmp_path / "none.nir")


def change(path, what):
    with h5py.File(path, "r+") as file:
        what(file["node"])


def put(node, name, value):
    del node[name]
    node[name] = value


CHANGES = {
    "unknown type": (lambda g: put(g["nodes/n0"], "type", "os.system"), "n0: unknown node type 'os.system'"),
    "no type": (lambda g: g["nodes/n0"].pop("type"), "n0: unknown node type None"),
    "a type of numbers": (lambda g: put(g["nodes/n0"], "type", 3), "n0: unknown node type .*3"),
    "an unknown field": (lambda g: g["nodes/n0"].create_dataset("extra", data=1), "n0: not a valid Affine"),
    "a missing field": (lambda g: g["nodes/n0"].pop("bias"), "n0: not a valid Affine"),
    "a weight of one axis": (lambda g: put(g["nodes/n0"], "weight", np.ones(3)), "n0: not a valid Affine"),
    "a weight of text": (lambda g: put(g["nodes/n0"], "weight", "text"), "n0: not a valid Affine"),
    "a wrong shape": (lambda g: put(g["nodes/n0"], "weight", np.ones((4, 2))), "`input` gives the shape"),
    "a wrong bias": (lambda g: put(g["nodes/n0"], "bias", np.ones(3)), "`n0`: the bias has the shape"),
    "unequal parameters": (lambda g: put(g["nodes/n1"], "tau", np.ones(3)), "n1: not a valid LIF"),
    "a time of zero": (lambda g: put(g["nodes/n1"], "tau", np.zeros(4)), "`n1`: `tau` is 0"),
    "not a number": (lambda g: put(g["nodes/n1"], "r", np.full(4, np.nan)), "`n1`: `r` has entries"),
    "a negative shape": (lambda g: put(g["nodes/input"], "shape", [-3]), r"`input` has the shape \(-3,\)"),
    "a node without an edge": (lambda g: put(g, "edges", [["input", "n0"]]), "no effect|no input"),
    "an edge to nowhere": (lambda g: put(g, "edges", [["input", "n9"]]), "'n9' names a node"),
    "edges of three": (lambda g: put(g, "edges", [["input", "n0", "n1"]]), "not a valid NIRGraph"),
    "no nodes": (lambda g: g.pop("nodes"), "not a valid NIRGraph"),
    "an unknown node inside": (
        lambda g: put(g["nodes/n2/nodes/lif"], "type", "ALIF"),
        "n2/lif: unknown node type",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_wrong_contents(path, name):
    what, words = CHANGES[name]
    change(path, what)
    with pytest.raises(NIRError, match=words):
        braintrace.nir.load(path)


def test_other_files_are_not_opened(path, tmp_path):
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["weight"] = np.ones((4, 3))
    (tmp_path / "secret.bin").write_bytes(np.ones((4, 3)).tobytes())
    weight = "nodes/n0/weight"

    def external(node):
        del node[weight]
        node[weight] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "weight")

    def soft(node):
        del node[weight]
        node[weight] = h5py.SoftLink("/node/nodes/n0/bias")

    def raw(node):
        del node[weight]
        node.create_dataset(weight, (4, 3), "f8", external=[(str(tmp_path / "secret.bin"), 0, 96)])

    def virtual(node):
        del node[weight]
        layout = h5py.VirtualLayout((4, 3), "f8")
        layout[:] = h5py.VirtualSource(str(tmp_path / "secret.h5"), "weight", (4, 3))
        node.create_virtual_dataset(weight, layout)

    whole = path.read_bytes()
    for what in (external, soft, raw, virtual):
        path.write_bytes(whole)
        change(path, what)
        with pytest.raises(NIRError, match=r"n0/weight` is (a link|not an array of this file)"):
            braintrace.nir.load(path)


def test_a_group_in_itself(path):
    def itself(node):
        node["nodes/n2/nodes/again"] = node["nodes/n2"]

    change(path, itself)
    with pytest.raises(NIRError, match="contains itself"):
        braintrace.nir.load(path)


def test_an_array_larger_than_the_file(path):
    def huge(node):
        del node["nodes/n0/weight"]
        node.create_dataset("nodes/n0/weight", (10**6, 10**6), "f8", chunks=(100, 100))

    change(path, huge)
    with pytest.raises(NIRError, match="declares more data"):
        braintrace.nir.load(path)


def test_graphs_that_make_no_sense():
    rng = np.random.RandomState(0)
    lif = neuron("LIF", rng)
    ends = {"input": nir.Input(np.array([4])), "output": nir.Output(np.array([4]))}

    def graph(edges, **nodes):
        return nir.NIRGraph({**ends, **nodes}, edges, type_check=False)

    through = [("input", "lif"), ("lif", "output")]
    for given, words in (
        (graph([*through, through[0]], lif=lif), "an edge twice"),
        (graph([*through, ("lif", "input")], lif=lif), "is an Input, but an edge leads to it"),
        (graph([*through, ("lif", "loose")], lif=lif, loose=lif), "`loose` has no effect"),
        (graph([*through, ("loose", "lif")], lif=lif, loose=lif), "`loose` has no input"),
        (nir.NIRGraph({}, [], type_check=False), "no Input node"),
        (graph([("input", "a/b"), ("a/b", "output")], **{"a/b": lif}), "has no slash"),
        (chain((5,), lif, output=(4,)), "gives the shape"),
        (chain((2, 4, 4), nir.Flatten(None, 2, 1), output=(4,)), "axes 2 to 1"),
        (
            chain((4,), nir.Conv1d(None, np.ones((1, 1, 3)), 1, 0, 1, 1, np.ones(1)), output=(4,)),
            "takes an input",
        ),
        (
            chain((1, 2), nir.Conv1d(None, np.ones((1, 1, 3)), 1, 0, 1, 1, np.ones(1)), output=(1,)),
            "larger than",
        ),
        (
            chain((4,), nir.AvgPool2d(np.ones(2, int), np.ones(2, int), np.zeros(2, int)), output=(4,)),
            "channels",
        ),
    ):
        with pytest.raises(NIRError, match=words):
            braintrace.nir.load(given)


def test_a_failed_save_leaves_the_file(path, monkeypatch):
    net, before = braintrace.nir.load(path), path.read_bytes()

    def fails(name, *_):
        Path(name).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(nir, "write", fails)
    with pytest.raises(OSError, match="disk full"):
        braintrace.nir.save(net, path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["net.nir"]
