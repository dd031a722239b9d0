"""Sharded arrays: their mesh and PartitionSpec, and how to change them.

Mesh axes of type Auto leave shardings to XLA; with axes of type Explicit they are part of the types of
arrays. Computations switch Explicit axes to Auto, and give the types back to their results.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias, TypeVar

import jax
import numpy as np

from ._compat import (
    AnyMesh,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    abstract,
    all_jaxprs,
    at_line_of,
    bind,
    explicit_mesh_of,
    is_tracer,
    parts,
    primitives,
    reshard_p,
    shard_map_p,
    type_of,
    typed_sharding,
)
from ._types import Array, Aval, Function, Options, PyTree, Shape

# a PartitionSpec: for each array axis a mesh axis, several, None, or `UNCONSTRAINED`
Spec: TypeAlias = Sequence[object]
MeshAxes: TypeAlias = str | tuple[str, ...] | None  # that shard one array axis
Result = TypeVar("Result")


def mesh_of(*arrays: Aval) -> AnyMesh | None:
    """Return the mesh in the type of one of the arrays, or None if each is on one device.

    A mesh whose axes are all manual, inside `shard_map`, does not count.
    """
    for x in arrays:
        mesh: AnyMesh | None = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
        if mesh is not None and any(
            n > 1 and t != jax.sharding.AxisType.Manual
            for n, t in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
        ):
            return mesh
    return None


def sharding_of(x: Aval) -> tuple[AnyMesh, tuple[object, ...]] | None:
    """Return the mesh and the PartitionSpec of an array or of a `ShapeDtypeStruct`.

    None if it is on one device, if XLA will choose, or inside `shard_map`.
    """
    found = x.sharding if isinstance(x, jax.Array) and not is_tracer(x) else None
    if isinstance(x, jax.ShapeDtypeStruct):
        found = x.sharding
    if found is None and hasattr(x, "dtype") and is_tracer(x):
        found = getattr(jax.typeof(x), "sharding", None)
        types = () if found is None else found.mesh.axis_types
        if jax.sharding.AxisType.Explicit not in types or jax.sharding.AxisType.Manual in types:
            return None
    if not isinstance(found, jax.sharding.NamedSharding) or found.mesh.size == 1:
        return None
    return found.mesh, (*found.spec, *[None] * (len(x.shape) - len(found.spec)))


def shape_of(x: Aval, first: int = 0) -> jax.ShapeDtypeStruct:
    """Return shape, type and sharding of an array from its axis `first` on."""
    found = sharding_of(x)
    sharding = None if found is None else named(found[0], found[1][first:])
    return jax.ShapeDtypeStruct(np.shape(x)[first:], jax.numpy.result_type(x), sharding=sharding)


def sharded_shape(x: Aval, mesh: AnyMesh, spec: Spec) -> jax.ShapeDtypeStruct:
    """Return the shape and type of an array with another sharding."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=named(mesh, spec))


def longer(x: Aval, length: int) -> jax.ShapeDtypeStruct:
    """Return the shape of `length` such arrays, stacked along a new first axis."""
    found = sharding_of(x)
    sharding = None if found is None else named(found[0], (None, *found[1]))
    return jax.ShapeDtypeStruct((length, *x.shape), x.dtype, sharding=sharding)


def on_one_mesh(shapes: PyTree) -> PyTree:
    """Return shapes on the mesh of one of them, if any; those without a sharding are replicated."""
    found = next(filter(None, map(sharding_of, jax.tree.leaves(shapes))), None)
    if found is None:
        return shapes
    return jax.tree.map(lambda a: a if sharding_of(a) else sharded_shape(a, found[0], ()), shapes)


def part_of(x: Aval) -> Shape:
    """Return the shape of the shard of one device."""
    found = x.sharding if isinstance(x, jax.ShapeDtypeStruct | jax.Array) else None
    sharded = isinstance(found, jax.sharding.NamedSharding)
    return tuple(found.shard_shape(x.shape)) if sharded else tuple(x.shape)  # type: ignore[union-attr]


def names_of(part: MeshAxes) -> tuple[str, ...]:
    """Return the mesh axes of one entry of a PartitionSpec, as a tuple."""
    return () if part is None else part if isinstance(part, tuple) else (part,)


def ways(mesh: AnyMesh, part: MeshAxes) -> int:
    """Return the number of shards of an array axis with this entry of a PartitionSpec."""
    return math.prod(mesh.shape[n] for n in names_of(part))


def fitted(mesh: AnyMesh, spec: Iterable[MeshAxes], shape: Shape) -> tuple[MeshAxes, ...]:
    """Return a PartitionSpec without mesh axes that do not divide an array axis evenly, or occur twice."""
    result: list[MeshAxes] = []
    for part, size in zip(spec, shape, strict=False):
        used = {n for p in result for n in names_of(p)}
        result.append(part if size % ways(mesh, part) == 0 and used.isdisjoint(names_of(part)) else None)
    return tuple(result)


def zero_of(arrays: Sequence[Aval]) -> jax.Array | None:
    """Return a zero that depends on the arrays, or None if none of them is traced.

    Under `vmap` it is batched, and is on the devices of each member, as a constant would not be.
    """
    traced = [a for a in arrays if is_tracer(a) and jax.numpy.issubdtype(a.dtype, jax.numpy.floating)]
    # `where(False, ...)` is dropped by XLA before it chooses shardings, a plain sum times zero after it
    nothing = [jax.numpy.where(False, a, 0) for a in traced if explicit_mesh_of(a) is None]
    start = jax.numpy.zeros((), jax.numpy.float32)
    return sum((jax.numpy.sum(a).astype(start.dtype) for a in nothing), start) if nothing else None


def constrain(x: jax.Array, mesh: AnyMesh, spec: Iterable[MeshAxes]) -> jax.Array:
    """Constrain the sharding of an array; without effect off a mesh and along axes that are not Auto."""
    auto = mesh_of(x)
    names = [n for part in spec for n in names_of(part)]
    types = {} if auto is None else dict(zip(auto.axis_names, auto.axis_types, strict=True))
    if any(types.get(n) != jax.sharding.AxisType.Auto for n in names) or auto is None:
        return x
    set_mesh = jax.sharding.get_abstract_mesh()
    if set_mesh.empty and mesh.axis_types != auto.axis_types:  # the mesh of another call
        return x
    where = named(mesh, spec) if set_mesh.empty else _partition(spec)
    result: jax.Array = jax.lax.with_sharding_constraint(x, where)
    return result


def all_on_mesh(arrays: PyTree) -> PyTree:
    """Put the types of all arrays on the mesh if one is on it, so that results are on it too."""
    leaves = [a for a in jax.tree.leaves(arrays) if hasattr(a, "dtype")]
    mesh = mesh_of(*leaves)
    if mesh is None:
        return arrays

    def one(x: Aval) -> Aval:
        if not is_tracer(x) or mesh_of(x) is not None or jax.numpy.issubdtype(x.dtype, jax.dtypes.extended):
            return x
        anyhow = [jax.sharding.PartitionSpec.UNCONSTRAINED] * x.ndim
        return jax.lax.with_sharding_constraint(x, named(mesh, anyhow))

    return jax.tree.map(one, arrays)


def per_device(
    function: Function, mesh: AnyMesh, specs: Sequence[Spec], out_specs: Sequence[Spec]
) -> Function:
    """Return a function that each device runs on its shards, with these PartitionSpecs."""
    given = mesh if jax.sharding.get_abstract_mesh().empty else None
    ins, outs = (tuple(map(_partition, s)) for s in (specs, out_specs))
    return jax.shard_map(function, mesh=given, in_specs=ins, out_specs=outs, check_vma=False)


def named(mesh: AnyMesh, spec: Iterable[object]) -> jax.sharding.NamedSharding:
    """Return the sharding of a PartitionSpec."""
    return jax.sharding.NamedSharding(mesh, _partition(spec))


def _partition(spec: Iterable[object]) -> jax.sharding.PartitionSpec:
    return jax.sharding.PartitionSpec(*spec)


def explicit_mesh(*arrays: Aval) -> AnyMesh | None:
    """Return the mesh with Explicit axes of an array, or that is set, or None."""
    set_mesh = jax.sharding.get_abstract_mesh()
    explicit = set_mesh if jax.sharding.AxisType.Explicit in set_mesh.axis_types else None
    return next((m for m in map(explicit_mesh_of, arrays) if m is not None), explicit)


@contextmanager
def no_types(*arrays: Aval) -> Iterator[None]:
    """Unset a mesh with Explicit axes, so that jaxprs have types without shardings."""
    if explicit_mesh(*arrays) is None:
        yield
        return
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        yield


def traced(trace: Callable[..., Result], *args: PyTree) -> Result:
    """Return `trace(*args)`, with types without shardings if tracing works so."""
    leaves = [a for a in jax.tree.leaves(args) if hasattr(a, "dtype")]
    if explicit_mesh(*leaves) is None:
        return trace(*args)
    try:
        with no_types(*leaves):
            return trace(*jax.tree.map(untyped, args))
    except Exception:
        return trace(*args)


def untyped(x: Aval) -> Aval:
    """Return the shape and type of an array with an Explicit sharding; anything else as it is."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if _is_typed(x) else x


def example_of(x: Aval) -> Aval:
    """Return zeros on one device for an array with an Explicit sharding; anything else as it is."""
    return np.zeros(x.shape, x.dtype) if _is_typed(x) else x


def _is_typed(x: Aval) -> bool:
    return hasattr(x, "dtype") and explicit_mesh_of(x) is not None


def without_types(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a jaxpr without Explicit shardings in types, and without operations that set them.

    XLA then chooses shardings; the caller restores those of the results.
    """
    types = any(map(explicit_mesh_of, (*closed.in_avals, *closed.out_avals)))
    if not types and not _asks_for_layouts(parts(closed)[0]):
        return closed
    with no_types(*closed.in_avals, *closed.out_avals):
        return _untyped_jaxpr(closed)


def _asks_for_layouts(jaxpr: Jaxpr) -> bool:
    return any(
        any(map(_is_explicit, eqn.params.values())) or any(map(_asks_for_layouts, all_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def _is_layout(eqn: JaxprEqn) -> bool:
    """Return whether an operation only sets the sharding along Explicit axes."""
    constrains = eqn.primitive is primitives.sharding_constraint_p and _is_explicit(eqn.params["sharding"])
    return eqn.primitive is reshard_p or constrains


def _is_explicit(sharding: object) -> bool:
    mesh = getattr(sharding, "mesh", None)
    return mesh is not None and jax.sharding.AxisType.Explicit in mesh.axis_types


def _evaluate_untyped(closed: ClosedJaxpr, *args: Array) -> list[Array]:
    jaxpr, consts = parts(closed)
    env: dict[object, Array] = {}
    env.update(zip([*jaxpr.constvars, *jaxpr.invars], [*map(_on_no_mesh, consts), *args], strict=True))

    def read(atom: object) -> Array:
        return _on_no_mesh(atom.val) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        vals = list(map(read, eqn.invars))
        if eqn.primitive is primitives.jit_p:
            outs = _evaluate_untyped(eqn.params["jaxpr"], *vals)
        elif _is_layout(eqn):
            outs = vals
        else:
            with at_line_of(eqn):
                outs = bind(eqn.replace(params=_untyped_params(eqn)), *vals)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _on_no_mesh(x: Array) -> Array:
    return x if is_tracer(x) or explicit_mesh_of(x) is None else np.asarray(x)  # type: ignore[return-value]


def _untyped_params(eqn: JaxprEqn) -> Options:
    def one(name: str, value: object) -> object:
        if name in ("sharding", "out_sharding") and _is_explicit(value):
            return None
        if eqn.primitive is shard_map_p:  # types inside are its own
            return value
        if isinstance(value, tuple) and value and isinstance(value[0], ClosedJaxpr):
            return tuple(map(_untyped_jaxpr, value))
        if isinstance(value, ClosedJaxpr):
            return _untyped_jaxpr(value)
        return _untyped_jaxpr(ClosedJaxpr(value, ())).jaxpr if isinstance(value, Jaxpr) else value

    return {k: one(k, v) for k, v in eqn.params.items()}


def _untyped_jaxpr(closed: ClosedJaxpr) -> ClosedJaxpr:
    shapes = [jax.core.ShapedArray(a.shape, a.dtype, weak_type=a.weak_type) for a in closed.in_avals]
    return jax.make_jaxpr(partial(_evaluate_untyped, closed))(*shapes)


def typed(function: Function, *operands: Aval) -> list[Spec | None] | None:
    """Return the PartitionSpecs of a function's results by their types, or None if JAX cannot infer them."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=typed_sharding(a)) for a in operands]
    try:
        with warnings.catch_warnings(action="ignore"):
            found = jax.eval_shape(function, *shapes)
    except Exception:  # an ambiguous sharding, or one that the function sets itself
        return None
    return [None if typed_sharding(a) is None else a.sharding.spec for a in found]


def by_samples(
    specs: Sequence[Spec | None], results: Sequence[Aval], inputs: Sequence[Aval]
) -> list[Spec | None]:
    """Return the PartitionSpecs of results, with unsharded ones sharded along the batch, their first axis.

    Its mesh axes are those of the first sharded input whose first axis has the same length.
    """
    known = [(a.shape[0], spec[0]) for a in inputs if (spec := spec_of(a)) and spec[0] is not None]

    def one(spec: Spec | None, shape: Shape) -> Spec | None:
        lead = next((part for size, part in known if shape and size == shape[0]), None)
        return spec if lead is None or any(spec or ()) else (lead, *[None] * (len(shape) - 1))

    return [one(spec, a.shape) for spec, a in zip(specs, results, strict=True)]


def in_auto(
    function: Function, args: tuple[PyTree, ...], specs: Callable[[], Sequence[Spec | None]]
) -> PyTree:
    """Call `function(*args)`, with all mesh axes of type Auto inside.

    `specs` returns the PartitionSpecs of the leaves of the result. Without Explicit shardings this is a plain
    call.
    """
    operands, tree = jax.tree.flatten(args)
    found = [m for m in map(explicit_mesh_of, operands) if m is not None]
    if not found:
        return function(*args)
    mesh = found[0]
    others = [m for m in found if m.shape_tuple != mesh.shape_tuple]
    if others:
        raise ValueError(
            f"The arrays of one call lie on two meshes, {dict(mesh.shape)} and {dict(others[0].shape)}. Put "
            "them on one: `jax.device_put(array, NamedSharding(mesh, spec))`."
        )
    if jax.sharding.get_abstract_mesh().empty and not any(map(is_tracer, operands)):
        return jax.jit(lambda *args: in_auto(function, args, specs))(*args)
    out_trees: list[jax.tree_util.PyTreeDef] = []  # known while tracing only; the last trace counts

    def flat(*operands: Array) -> list[Array]:
        results, out_tree = jax.tree.flatten(function(*jax.tree.unflatten(tree, operands)))
        out_trees.append(out_tree)
        return results

    parts = [_partition(s or ()) for s in specs()]
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in types if kind == jax.sharding.AxisType.Explicit)
    with jax.sharding.use_abstract_mesh(mesh):
        # without a sharding in its type, the cotangent of an operand would keep the type Auto
        operands = [x if explicit_mesh_of(x) else jax.sharding.reshard(x, _partition(())) for x in operands]
        results = jax.sharding.auto_axes(flat, axes=axes, out_sharding=parts)(*operands)
    return jax.tree.unflatten(out_trees[-1], results)


def spec_of(x: Aval) -> Spec | None:
    """Return the PartitionSpec in the type of an array, or None."""
    return None if explicit_mesh_of(x) is None else tuple(type_of(x).sharding.spec)


def sharded_aval(aval: Aval, mesh: AnyMesh, spec: Spec | None) -> Aval:
    """Return an abstract value with a sharding; it is replicated if `spec` is None."""
    parts = [*(spec or ()), *[None] * (len(aval.shape) - len(spec or ()))]
    return aval.update(sharding=named(abstract(mesh), parts))


def slice_of(x: Aval) -> jax.ShapeDtypeStruct:
    """Return shape, type and Explicit sharding of an entry along the first axis."""
    mesh, spec = explicit_mesh_of(x), spec_of(x) or ()
    sharding = None if mesh is None else named(mesh, spec[1:])
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)
