"""Shardings of the arrays of a run: batches along the first axis of a mesh, columns along 'model'."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._lines import warn_user
from .._meshes import fitted, named
from .._types import Array, PyTree
from .batches import Batch, size_of

MODEL = "model"  # the mesh axis along which the columns of weights are sharded


@dataclass(frozen=True)
class Layout:
    """A mesh, and the shardings of arrays on it.

    All processes of the mesh run the same program. Each feeds its samples of a batch; the first one prints.
    """

    mesh: Mesh

    @staticmethod
    def of(mesh: Mesh) -> Layout:
        if not isinstance(mesh, Mesh):
            raise TypeError(f"`mesh` is one of `jax.make_mesh`, not {type(mesh)}.")
        if mesh.axis_names[0] == MODEL:
            raise ValueError(
                f"The first axis of a mesh is that of batches, and this one is called {MODEL!r}: "
                f"{dict(mesh.shape)}. Put another before it, of length 1 if batches are not to be sharded."
            )
        # with axes of type Auto, XLA infers the shardings of intermediate arrays
        return Layout(Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim))

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        """Give a mesh that the user has set the same axis types as ours."""
        if jax.sharding.get_abstract_mesh().empty:
            yield
            return
        with jax.set_mesh(self.mesh):
            yield

    @property
    def processes(self) -> int:
        return len({d.process_index for d in self.mesh.devices.flat})

    # -- arrays ------------------------------------------------------------------------------------

    def batch(self, batch: Batch, batched: bool) -> Batch:
        """Shard a batch, of which each process has its samples; global arrays stay as they are."""
        return self._batch(batch, batched, self._from_parts)

    def whole_batch(self, batch: Batch) -> Batch:
        """Shard a batch that every process has as a whole."""
        return self._batch(batch, True, self._put)

    def _batch(self, batch: Batch, batched: bool, put: Callable[[PyTree, P], Array]) -> Batch:
        spec = lambda a: P(None, self.mesh.axis_names[0]) if batched and np.ndim(a) > 1 else P()
        placed: Batch = jax.tree.map(lambda a: a if self._has(a) else put(a, spec(a)), batch)
        return placed

    def parameters(self, tree: PyTree) -> PyTree:
        """Shard the columns of parameters along 'model'; parameters on the mesh keep their sharding."""
        return jax.tree.map(lambda a: self._put(a, self._spec(a, self._columns(a))), tree)

    def states(self, tree: PyTree, samples: int | None) -> PyTree:
        """Shard states with a batch axis of this size along the first mesh axis, and units along 'model'."""

        def one(a: PyTree) -> PyTree:
            has_batch = samples is not None and np.shape(a)[:1] == (samples,)
            units = self._columns(a)[1:] if np.ndim(a) > 1 else ()
            return self._put(a, self._spec(a, P(self.mesh.axis_names[0], *units) if has_batch else P()))

        return jax.tree.map(one, tree)

    def like(self, tree: PyTree, parameters: PyTree) -> PyTree:
        """Shard an optimiser's state: arrays with the path and shape of a parameter get its sharding."""
        known = [(path, a) for path, a in jax.tree_util.tree_flatten_with_path(parameters)[0]]

        def one(path: tuple[object, ...], a: PyTree) -> PyTree:
            for name, p in known:
                if path[-len(name) :] == name and np.shape(a) == np.shape(p):
                    return self.as_before(a, p)
            return self._put(a, P())

        return jax.tree_util.tree_map_with_path(one, tree)

    def as_before(self, a: PyTree, before: PyTree) -> PyTree:
        """Give an array the sharding of another one, or replicate it if that is not on the mesh."""
        return self._put(a, self._spec(before, P()))

    def keep(self, tree: PyTree, like: PyTree) -> PyTree:
        """Constrain the shardings of arrays inside a compiled function."""
        return jax.tree.map(jax.lax.with_sharding_constraint, tree, like)

    def everywhere(self, tree: PyTree) -> PyTree:
        """Replicate arrays inside a compiled function."""
        return jax.lax.with_sharding_constraint(tree, NamedSharding(self.mesh, P()))

    def _columns(self, a: PyTree) -> P:
        shape = np.shape(a)
        ways = self.mesh.shape.get(MODEL, 1)
        return P(*[None] * (len(shape) - 1), MODEL) if ways > 1 and shape and shape[-1] % ways == 0 else P()

    def _has(self, a: PyTree) -> bool:
        """Return whether an array is on the mesh."""
        found = getattr(a, "sharding", None)
        return isinstance(found, NamedSharding) and np.array_equal(found.mesh.devices, self.mesh.devices)

    def _spec(self, a: PyTree, default: P) -> P:
        """Return the spec of an array on the mesh, and the default for others."""
        return a.sharding.spec if self._has(a) else default

    def _fitting(self, spec: P, shape: tuple[int, ...]) -> NamedSharding:
        """Return a sharding without mesh axes that do not divide an axis evenly."""
        return named(self.mesh, fitted(self.mesh, spec, shape))

    def _put(self, a: PyTree, spec: P) -> PyTree:
        """Shard an array that every process has as a whole."""
        where = self._fitting(spec, np.shape(a))
        if self.processes == 1 or self._has(a):
            return jax.device_put(a, where)
        if hasattr(a, "dtype") and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            raw = np.asarray(jax.random.key_data(a))
            return jax.random.wrap_key_data(self._put(raw, spec), impl=jax.random.key_impl(a))
        host = np.asarray(a)
        host = host.astype(jnp.result_type(host))
        return jax.make_array_from_callback(host.shape, where, lambda part: host[part])

    def _from_parts(self, a: PyTree, spec: P) -> PyTree:
        """Make a global array of the parts that the processes have."""
        if self.processes == 1:
            return self._put(a, spec)
        host = np.asarray(a)
        host = host.astype(jnp.result_type(host))
        try:
            return jax.make_array_from_process_local_data(NamedSharding(self.mesh, spec), host)
        except ValueError as error:
            raise ValueError(
                f"This process has {host.shape[1]} sequences of a batch, which cannot be sharded evenly "
                f"over its {jax.local_device_count()} devices of the mesh "
                f"{dict(self.mesh.shape)}. Give every process the same number of sequences, a multiple of "
                f"that of its devices along {self.mesh.axis_names[0]!r}."
            ) from error

    def warn_of_unused(self, parameters: PyTree) -> None:
        """Warn of mesh axes along which nothing is sharded: their devices all compute the same."""
        specs = [a.sharding.spec for a in jax.tree.leaves(parameters) if self._has(a)]
        used = {n for spec in specs for part in spec if part is not None for n in np.atleast_1d(part)}
        used.add(self.mesh.axis_names[0])
        for name, size in self.mesh.shape.items():
            if size > 1 and name not in used:
                warn_user(
                    f"Nothing is sharded along the axis {name!r} of the mesh {dict(self.mesh.shape)}: {size} "
                    "devices each compute the same. Batches are sharded along the first axis, columns of "
                    f"weights along one called {MODEL!r}, if it divides them; or shard the parameters "
                    "yourself."
                )

    def warn_of_whole(self, batch: Batch) -> bool:
        """Warn of a batch that cannot be sharded; return whether there was a warning."""
        ways, size = self.mesh.shape[self.mesh.axis_names[0]], size_of(batch[0])
        if size % ways == 0:
            return False
        warn_user(
            f"A batch of {size} sequences cannot be sharded evenly over {ways} devices: each computes all "
            f"of it. Give batches of a multiple of {ways}, or leave the last one out."
        )
        return True

    def any_asks(self, asked: bool) -> bool:
        """Return whether any process asks to stop; all of them must call this."""
        everywhere = asked if self.processes == 1 else multihost_utils.process_allgather(np.asarray(asked))
        return bool(np.any(everywhere))
