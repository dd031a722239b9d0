"""Where the arrays of a run are on a mesh of devices: batches along its first axis, columns along 'model'."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._lines import warn_user
from .batches import Batch, size_of

MODEL = "model"  # the axis of a mesh that the columns of weights are spread along


@dataclass(frozen=True)
class Layout:
    """A mesh, and what is spread how over its devices.

    The processes of the mesh run the same program. Each feeds its rows of a batch, and the first one speaks.
    """

    mesh: Mesh

    @staticmethod
    def of(mesh: Any) -> Layout:
        if not isinstance(mesh, Mesh):
            raise TypeError(f"`mesh` is one of `jax.make_mesh`, not {type(mesh)}.")
        if mesh.axis_names[0] == MODEL:
            raise ValueError(
                f"The first axis of a mesh is that of batches, and this one is called {MODEL!r}: "
                f"{dict(mesh.shape)}. Put another before it, of length 1 if batches are not to be spread."
            )
        # XLA finds the layouts of what is between arrays whose layout is said here
        return Layout(Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim))

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        """In here, a mesh that the user has set has the types of axes that arrays here have."""
        if jax.sharding.get_abstract_mesh().empty:
            yield
            return
        with jax.set_mesh(self.mesh):
            yield

    @property
    def processes(self) -> int:
        return len({d.process_index for d in self.mesh.devices.flat})

    @property
    def speaks(self) -> bool:
        """Whether this process is the one that shows and logs how the run goes."""
        return self.processes == 1 or jax.process_index() == 0

    # -- arrays ------------------------------------------------------------------------------------

    def batch(self, batch: Batch, batched: bool) -> Batch:
        """A batch of which each process has its rows, over all devices; global arrays stay as they are."""
        return self._batch(batch, batched, self._from_parts)

    def own(self, batch: Batch) -> Batch:
        """Of a batch that every process has as a whole, what this one is to give `batch`: its rows.

        All of it, as global arrays, where the devices cannot have equal parts.
        """
        size, first = size_of(batch[0]), self.mesh.axis_names[0]
        if self.processes == 1:
            return batch
        if size % self.mesh.shape[first]:
            return self._batch(batch, True, self._put)
        parts = NamedSharding(self.mesh, P(first)).addressable_devices_indices_map((size,)).values()
        rows = sorted({part[0].indices(size)[:2] for part in parts if part is not None})
        pick = lambda a: np.concatenate([np.asarray(a)[:, i:j] for i, j in rows], 1)
        own: Batch = jax.tree.map(lambda a: pick(a) if np.ndim(a) > 1 else a, batch)
        return own

    def _batch(self, batch: Batch, batched: bool, put: Any) -> Batch:
        xs, ys, mask = batch
        rows = lambda a: P(None, self.mesh.axis_names[0]) if batched and np.ndim(a) > 1 else P()
        placed: Batch = jax.tree.map(lambda a: a if self._has(a) else put(a, rows(a)), (xs, ys, mask))
        return placed

    def parameters(self, tree: Any) -> Any:
        """Parameters with their columns along 'model', unless they lie on the mesh in a way of their own."""
        own = lambda a: self._put(a, a.sharding.spec if self._has(a) else self._columns(a))
        return jax.tree.map(own, tree)

    def states(self, tree: Any, samples: int | None) -> Any:
        """States of a batch of so many samples: these along the first axis, units along 'model'."""

        def one(a: Any) -> Any:
            shape = np.shape(a)
            if self._has(a) or samples is None or not shape or shape[0] != samples:
                return self.as_before(a, a)
            first = self.mesh.axis_names[0]
            return self._put(a, P(first, *self._columns(a)[1:]) if len(shape) > 1 else P(first))

        return jax.tree.map(one, tree)

    def like(self, tree: Any, parameters: Any) -> Any:
        """What an optimiser keeps: each array as the parameter that it is named after, if of its shape."""
        known = [(path, a) for path, a in jax.tree_util.tree_flatten_with_path(parameters)[0]]

        def one(path: Any, a: Any) -> Any:
            for name, p in known:
                if path[-len(name) :] == name and np.shape(a) == np.shape(p):
                    return self.as_before(a, p)
            return self._put(a, P())

        return jax.tree_util.tree_map_with_path(one, tree)

    def as_before(self, a: Any, before: Any) -> Any:
        """An array as another one is that lies on the mesh."""
        return self._put(a, before.sharding.spec if self._has(before) else P())

    def keep(self, tree: Any, like: Any) -> Any:
        """Inside of a compiled function: arrays in these layouts."""
        return jax.tree.map(jax.lax.with_sharding_constraint, tree, like)

    def everywhere(self, tree: Any) -> Any:
        """Inside of a compiled function: arrays that every device has as a whole."""
        return jax.lax.with_sharding_constraint(tree, NamedSharding(self.mesh, P()))

    def _columns(self, a: Any) -> P:
        shape = np.shape(a)
        ways = self.mesh.shape.get(MODEL, 1)
        return P(*[None] * (len(shape) - 1), MODEL) if ways > 1 and shape and shape[-1] % ways == 0 else P()

    def _has(self, a: Any) -> bool:
        """Whether an array lies on the mesh already."""
        found = getattr(a, "sharding", None)
        return isinstance(found, NamedSharding) and np.array_equal(found.mesh.devices, self.mesh.devices)

    def _fitting(self, spec: P, shape: tuple[int, ...]) -> NamedSharding:
        """Without what does not divide an axis evenly."""
        ways = lambda part: int(np.prod([self.mesh.shape[n] for n in np.atleast_1d(part)]))
        parts = [p if p is None or n % ways(p) == 0 else None for p, n in zip(spec, shape, strict=False)]
        return NamedSharding(self.mesh, P(*parts))

    def _put(self, a: Any, spec: P) -> Any:
        """An array that every process has, where it belongs."""
        where = self._fitting(spec, np.shape(a))
        if self.processes == 1 or self._has(a):
            return jax.device_put(a, where)
        if hasattr(a, "dtype") and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            raw = np.asarray(jax.random.key_data(a))
            return jax.random.wrap_key_data(self._put(raw, spec), impl=jax.random.key_impl(a))
        host = np.asarray(a)
        host = host.astype(jnp.result_type(host))
        return jax.make_array_from_callback(host.shape, where, lambda part: host[part])

    def _from_parts(self, a: Any, spec: P) -> Any:
        """An array of which every process has the part that lies on its devices."""
        if self.processes == 1:
            return self._put(a, spec)
        host = np.asarray(a)
        host = host.astype(jnp.result_type(host))
        try:
            return jax.make_array_from_process_local_data(NamedSharding(self.mesh, spec), host)
        except ValueError as error:
            raise ValueError(
                f"This process has {host.shape[1]} sequences of a batch, which cannot be spread evenly "
                f"over its {jax.local_device_count()} devices of the mesh "
                f"{dict(self.mesh.shape)}. Give every process the same number of sequences, a multiple of "
                f"that of its devices along {self.mesh.axis_names[0]!r}."
            ) from error

    def warn_of_unused(self, parameters: Any) -> None:
        """Say which axes of the mesh nothing is spread along, so that their devices all do the same."""
        specs = [a.sharding.spec for a in jax.tree.leaves(parameters) if self._has(a)]
        used = {n for spec in specs for part in spec if part is not None for n in np.atleast_1d(part)}
        used.add(self.mesh.axis_names[0])
        for name, size in self.mesh.shape.items():
            if size > 1 and name not in used:
                warn_user(
                    f"Nothing is spread along the axis {name!r} of the mesh {dict(self.mesh.shape)}, so that "
                    f"{size} devices each do the same. Batches go along the first axis, and along one called "
                    f"{MODEL!r} the columns of weights, where it divides them; or put parameters on the mesh "
                    "in a way of your own."
                )

    def warn_of_whole(self, batch: Batch) -> bool:
        """Whether a batch is one that every device works on as a whole; that is said."""
        ways, size = self.mesh.shape[self.mesh.axis_names[0]], size_of(batch[0])
        if size % ways == 0:
            return False
        warn_user(
            f"A batch of {size} sequences cannot be spread evenly over {ways} devices, so that each of them "
            f"computes all of it. Give batches of a multiple of {ways}, or leave the last one out."
        )
        return True

    # -- processes ---------------------------------------------------------------------------------

    def any_asks(self, asked: bool) -> bool:
        """Whether a process asks for something; all of them must come here."""
        if self.processes == 1:
            return asked
        return bool(np.any(multihost_utils.process_allgather(np.asarray(asked))))
