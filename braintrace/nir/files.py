"""NIR files: HDF5, read without following any link and without running anything that a file contains.

A file is data from elsewhere. HDF5 can point to other files (external links, external and virtual datasets),
contain itself, and declare arrays much larger than the file; all of these are refused.
"""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import nir
import numpy as np

from .._types import ArrayLike, Options, Shape
from .errors import NIRError

NODES = frozenset(
    """Input Output NIRGraph Affine Linear Scale Conv1d Conv2d Delay Flatten I IF LI LIF CubaLI CubaLIF
    AvgPool2d SumPool2d Threshold""".split()
)
_DEEPEST = 32  # levels of nested groups
_COMPRESSION = 1100  # gzip makes an array at most about 1030 times smaller


def read(path: str | os.PathLike[str]) -> nir.NIRGraph:
    """Read a NIR graph from an HDF5 file.

    Args:
        path: The file.

    Returns:
        A `nir.NIRGraph`, with the shapes of its nodes unchecked; `load` checks them.

    Raises:
        NIRError: The file is no HDF5 file, is damaged, or has an unknown or incomplete node.
        FileNotFoundError: There is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        with h5py.File(path, "r") as file:
            # `nir` writes the graph to the group `node`
            link = file.get("node", getlink=True)
            if not isinstance(link, h5py.HardLink) or not isinstance(file["node"], h5py.Group):
                raise NIRError(f"{path} is an HDF5 file without a NIR graph.")
            data = _Reader(path).group(file["node"])
    except NIRError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        raise NIRError(f"{path} cannot be read as a NIR file (HDF5): {error}") from error
    return node_of(data, str(path))


class _Reader:
    """Reads groups and datasets to nested dictionaries, each object once."""

    def __init__(self, path: Path) -> None:
        self.path, self.seen = path, set[int]()
        self.left = path.stat().st_size * _COMPRESSION  # bytes that may still be read

    def group(self, group: h5py.Group, depth: int = 0) -> Options:
        address = h5py.h5o.get_info(group.id).addr
        if address in self.seen or depth > _DEEPEST:
            raise NIRError(f"{self.path}: `{group.name}` contains itself or is nested too deeply.")
        self.seen.add(address)
        found: Options = {}
        for name in group:
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                raise NIRError(f"{self.path}: `{group.name}/{name}` is a link, which is not followed.")
            item = group[name]
            is_group = isinstance(item, h5py.Group)
            found[name] = self.group(item, depth + 1) if is_group else self.dataset(item)
        return found

    def dataset(self, item: h5py.Dataset) -> str | np.ndarray | np.generic:
        if not isinstance(item, h5py.Dataset) or item.external or item.is_virtual:
            raise NIRError(f"{self.path}: `{item.name}` is not an array of this file.")
        text = h5py.check_string_dtype(item.dtype) is not None
        if not text and item.dtype.kind not in "biuf":
            kind = f"has the type {item.dtype}; numbers and text are read"
            raise NIRError(f"{self.path}: `{item.name}` {kind}.")
        self.left -= (item.size or 0) * item.dtype.itemsize
        if self.left < 0:
            raise NIRError(f"{self.path}: `{item.name}` declares more data than a file of this size has.")
        value = item[()]
        return value.decode() if isinstance(value, bytes) else value


def node_of(data: Options, name: str) -> nir.NIRNode:
    """The `nir` node of a dictionary, as `nir.NIRNode.to_dict` makes it."""
    kind = data.get("type")
    if not isinstance(kind, str) or kind not in NODES:
        raise NIRError(f"{name}: unknown node type {kind!r}; known are {', '.join(sorted(NODES))}.")
    try:
        if kind == "NIRGraph":
            children = data["nodes"].items()
            return nir.NIRGraph(
                nodes={child: node_of(value, f"{name}/{child}") for child, value in children},
                edges=[(_text(a), _text(b)) for a, b in data["edges"]],
                metadata=data.get("metadata", {}),
                type_check=False,
            )
        return getattr(nir, kind).from_dict(dict(data))
    except NIRError:
        raise
    except (TypeError, KeyError, ValueError, AssertionError, AttributeError, IndexError) as error:
        raise NIRError(f"{name}: not a valid {kind} node: {type(error).__name__}: {error}") from error


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def write(graph: nir.NIRGraph, path: str | os.PathLike[str]) -> None:
    """Write a graph; a file that is there already is replaced only once the new one is complete."""
    path = Path(path)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        nir.write(str(fresh), graph)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def numbers(node: nir.NIRNode, field: str, name: str) -> np.ndarray:
    """A field of a node as an array of finite numbers."""
    try:
        value = np.asarray(getattr(node, field), np.float64)
    except (TypeError, ValueError) as error:
        raise NIRError(f"`{name}`: `{field}` is not an array of numbers.") from error
    if not np.all(np.isfinite(value)):
        raise NIRError(f"`{name}`: `{field}` has entries that are not finite.")
    return value


def shape_of(value: ArrayLike, name: str) -> Shape:
    """A shape that a file states."""
    try:
        shape = tuple(int(n) for n in np.atleast_1d(np.asarray(value)))
    except (TypeError, ValueError) as error:
        raise NIRError(f"`{name}` has no shape: {value!r}.") from error
    if any(n < 1 for n in shape):
        raise NIRError(f"`{name}` has the shape {shape}.")
    return shape
