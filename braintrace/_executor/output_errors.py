"""Errors of a step's outputs, by sample, and the readings of groups that they are broadcast to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from .._compiler.errors import NotSupportedError
from .._compiler.groups import HiddenGroup
from .._compiler.leaky_readouts import find_readouts
from .._compiler.program import Atom, Var, zeros
from .._compiler.samples import Samples, find_samples
from .._compiler.slices import values_of
from .._types import Array, Aval, DTypeLike, Leaves, Shape
from .effective_weights import known_params
from .executor import ETraceGraphExecutor
from .group_readings import find_readings
from .pull_back import is_inexact
from .sharding import Spec

Matrix = Float[Array, "entries units"]


def check_readings(executor: ETraceGraphExecutor) -> None:
    if jax.tree.leaves([find_readings(executor.graph)]) and not any(find_readings(executor.graph).values()):
        raise NotSupportedError(
            "A signal cannot be broadcast: neither an output nor another state reads any hidden state. "
            "Return what is read of them from the model's `update`."
        )


def groups_of_errors(executor: ETraceGraphExecutor) -> list[HiddenGroup]:
    """The groups to which errors are broadcast: all but readouts with memory."""
    return [g for g in executor.graph.hidden_groups if g.index not in find_readouts(executor.graph)]


def places(executor: ETraceGraphExecutor) -> Iterator[tuple[int, int, int, int, int, DTypeLike]]:
    """For each matrix: group, reading, output, and the sizes of output and group per sample."""
    outs = [a.aval for a in executor.info.out_atoms if is_inexact(a.aval)]
    samples = find_samples(executor.info)
    for group in groups_of_errors(executor):
        for i, _ in enumerate(find_readings(executor.graph)[group.index]):
            for o, aval in enumerate(outs):
                size, width = width_of(aval.shape, samples), width_of(group.varshape, samples)
                yield group.index, i, o, size, width, group.dtype


def _has_samples(shape: Shape, samples: Samples) -> bool:
    axis = samples.axis
    return axis is not None and not samples.mixed and len(shape) > axis and shape[axis] == samples.count


def width_of(shape: Shape, samples: Samples) -> int:
    return int(np.prod(shape, dtype=int)) // (samples.count if _has_samples(shape, samples) else 1)


def flat_rows(array: Array, samples: Samples) -> Float[Array, "samples entries"]:
    """Flatten all but the batch axis; one row if there is none."""
    if _has_samples(array.shape, samples):
        array = jnp.moveaxis(array, samples.axis or 0, 0)
        return array.reshape(samples.count, -1)
    return array.reshape(1, -1)


def specs_of_matrices(executor: ETraceGraphExecutor, shapes: Mapping[str, Aval]) -> dict[str, Spec]:
    """Partition specs of matrices from outputs to units: columns as the units, if these are one axis."""
    at, samples = executor.sharding, find_samples(executor.info)
    assert at is not None
    found: dict[str, Spec] = {}
    for group in executor.graph.hidden_groups:
        axes = [a for a in range(len(group.varshape)) if a != samples.axis]
        column = at.of_group(group)[axes[0]] if len(axes) == 1 else None
        names = (f"->{group.index}.{i}" for i, _ in enumerate(find_readings(executor.graph)[group.index]))
        found |= {k: (None, column) for name in names for k in shapes if k.endswith(name) and ":" in k}
    return {k: spec for k, spec in found.items() if len(shapes[k].shape) == 2}


def at_units(rows: Float[Array, "samples units"], shape: Shape, samples: Samples) -> Array:
    """Reshape rows of units to the shape of a group."""
    if not _has_samples(shape, samples):
        return jnp.sum(rows, 0).reshape(shape) if rows.shape[0] > 1 else rows.reshape(shape)
    axis = samples.axis or 0
    rest = (*shape[:axis], *shape[axis + 1 :])
    rows = jnp.broadcast_to(rows, (samples.count, rows.shape[1]))
    return jnp.moveaxis(rows.reshape(samples.count, *rest), 0, axis)


def at_states(m: Array, shape: Shape, num: int, dtype: DTypeLike) -> Float[Array, "state ..."]:
    """Broadcast a modulator to the states of a group."""
    m = m.astype(dtype)
    full = (num, *shape)
    if m.shape == (*shape, num) and (m.shape != shape):
        return jnp.moveaxis(m, -1, 0)
    if m.shape == shape or m.ndim == 0:
        return jnp.broadcast_to(m.reshape(1, *m.shape) if m.ndim else m, full)
    if m.ndim == 1 and len(shape) > 1 and m.shape[0] == shape[0]:
        return jnp.broadcast_to(m.reshape(1, -1, *[1] * (len(shape) - 1)), full)
    raise ValueError(
        f"The modulator has the shape {m.shape}; the hidden states have {shape}: give one number, one for "
        "each sample, or an array of that shape."
    )


def readout_slopes(executor: ETraceGraphExecutor, params: Leaves, consts: Leaves) -> dict[str, Matrix]:
    """The derivative of each output in each reading, per sample, at zero inputs and states."""
    info, samples = executor.info, find_samples(executor.info)
    known = {v: zeros(v) for v in (*info.arg_invars, *info.carried_invars)}
    known.update(known_params(info, params, consts))
    atoms = [a for a in info.out_atoms if is_inexact(a.aval)]
    of_first = lambda array: flat_rows(array, samples)[0]
    found = {}
    for group in groups_of_errors(executor):
        for i, v in enumerate(find_readings(executor.graph)[group.index]):
            for o, atom in enumerate(atoms):

                def out(read: Array, v: Var = v, atom: Atom = atom) -> Array:
                    return of_first(values_of(info.program, [atom], {**known, v: read})[0])

                row, pull = jax.vjp(out, zeros(v))
                (pulled,) = jax.vmap(pull)(jnp.eye(row.size, dtype=row.dtype))
                found[f"{o}->{group.index}.{i}"] = jax.vmap(of_first)(pulled).astype(group.dtype)
    return found
