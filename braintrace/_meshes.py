"""Arrays on meshes of devices: where they lie, as they and their types say, and how they get elsewhere.

Axes of a mesh are of type Auto, where XLA knows alone, or Explicit, where types of arrays say it: what is
computed with these goes by Auto inside, and says again what it gives.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np

from ._compat import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
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


def mesh_of(*arrays: Any) -> Any:
    """The mesh of devices over which an array may be spread, as its type says; None: each is on one device.

    Axes along which a `shard_map` has taken the arrays apart already do not count.
    """
    for x in arrays:
        mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
        if mesh is not None and any(
            n > 1 and t != jax.sharding.AxisType.Manual
            for n, t in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
        ):
            return mesh
    return None


def sharding_of(x: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """The mesh of an array and, of each of its axes, the names of those of the mesh that it is spread over.

    None: it is on one device, or nobody knows before XLA does, or it is the part that a device has inside
    `shard_map`. Shapes may say it, too.
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


def shape_of(x: Any, first: int = 0) -> jax.ShapeDtypeStruct:
    """The shape and type of an array from its axis `first` on, and how it is spread over devices."""
    found = sharding_of(x)
    sharding = None if found is None else jax.sharding.NamedSharding(found[0], _partition(found[1][first:]))
    return jax.ShapeDtypeStruct(np.shape(x)[first:], jax.numpy.result_type(x), sharding=sharding)


def spread_shape(x: Any, mesh: Any, spec: Sequence[Any]) -> jax.ShapeDtypeStruct:
    """The shape of an array that is spread so."""
    sharding = jax.sharding.NamedSharding(mesh, _partition(spec))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def longer(x: Any, length: int) -> jax.ShapeDtypeStruct:
    """The shape of so many arrays like this one, along a new first axis."""
    found = sharding_of(x)
    sharding = None if found is None else jax.sharding.NamedSharding(found[0], _partition((None, *found[1])))
    return jax.ShapeDtypeStruct((length, *x.shape), x.dtype, sharding=sharding)


def on_one_mesh(shapes: Any) -> Any:
    """Shapes, all on the mesh that one of them is on, if any: those that do not say so, as a whole."""
    found = next(filter(None, map(sharding_of, jax.tree.leaves(shapes))), None)
    if found is None:
        return shapes
    return jax.tree.map(lambda a: a if sharding_of(a) else spread_shape(a, found[0], ()), shapes)


def part_of(x: Any) -> tuple[int, ...]:
    """The shape of what one device has of an array, or of a shape that says how it is spread."""
    found = x.sharding if isinstance(x, jax.ShapeDtypeStruct | jax.Array) else None
    spread = isinstance(found, jax.sharding.NamedSharding)
    return tuple(found.shard_shape(x.shape)) if spread else tuple(x.shape)  # type: ignore[union-attr]


def zeros(shape: tuple[int, ...], dtype: Any, mesh: Any, spec: Sequence[Any]) -> jax.Array:
    """Zeros that are spread over a mesh from the start."""
    return jax.numpy.zeros(shape, dtype, device=jax.sharding.NamedSharding(mesh, _partition(spec)))


def place(x: Any, mesh: Any, spec: Sequence[Any]) -> Any:
    """An array, spread over a mesh that it need not be on yet."""
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, _partition(spec)))


def zero_of(arrays: Sequence[Any]) -> jax.Array | None:
    """Zero; where `vmap` maps some of these arrays, one for each member, on the devices of that member.

    What depends on nothing that is mapped would be on one device, for all members. None: nothing is traced.
    """
    traced = [a for a in arrays if is_tracer(a) and jax.numpy.issubdtype(a.dtype, jax.numpy.floating)]
    # XLA lays out what it drops: a sum of nothing at all it drops before
    nothing = [jax.numpy.where(False, a, 0) for a in traced if explicit_mesh_of(a) is None]
    start = jax.numpy.zeros((), jax.numpy.float32)
    return sum((jax.numpy.sum(a).astype(start.dtype) for a in nothing), start) if nothing else None


def spread_as(x: jax.Array, mesh: Any, spec: Sequence[Any]) -> jax.Array:
    """The same array, spread so; as it is where it is on no mesh, or where XLA has no choice."""
    auto = mesh_of(x)
    names = [n for part in spec if part is not None for n in (part if isinstance(part, tuple) else (part,))]
    types = {} if auto is None else dict(zip(auto.axis_names, auto.axis_types, strict=True))
    if any(types.get(n) != jax.sharding.AxisType.Auto for n in names) or auto is None:
        return x
    now = _partition(spec)
    set_mesh = jax.sharding.get_abstract_mesh()
    if set_mesh.empty and mesh.axis_types != auto.axis_types:  # the mesh of another call
        return x
    where = now if not set_mesh.empty else jax.sharding.NamedSharding(mesh, now)
    result: jax.Array = jax.lax.with_sharding_constraint(x, where)
    return result


def all_on_mesh(arrays: Any) -> Any:
    """Arrays, all of types that say that they may be spread, if one is: so has what is made of them."""
    leaves = [a for a in jax.tree.leaves(arrays) if hasattr(a, "dtype")]
    mesh = mesh_of(*leaves)

    def one(x: Any) -> Any:
        if not is_tracer(x) or mesh_of(x) is not None or jax.numpy.issubdtype(x.dtype, jax.dtypes.extended):
            return x
        anyhow = _partition([jax.sharding.PartitionSpec.UNCONSTRAINED] * x.ndim)
        return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, anyhow))

    return arrays if mesh is None else jax.tree.map(one, arrays)


def per_device(function: Callable[..., Any], mesh: Any, specs: Any, out_specs: Any) -> Callable[..., Any]:
    """A function that each device runs on its parts of arrays, which are spread so."""
    a_mesh = {} if not jax.sharding.get_abstract_mesh().empty else {"mesh": mesh}
    parts = [tuple(map(_partition, s)) for s in (specs, out_specs)]
    mapped: Callable[..., Any] = jax.shard_map(
        function, in_specs=parts[0], out_specs=parts[1], check_vma=False, **a_mesh
    )
    return mapped


def _partition(spec: Sequence[Any]) -> Any:
    return jax.sharding.PartitionSpec(*spec)


def explicit_mesh(*arrays: Any) -> Any:
    """The mesh with axes of type Explicit that an array is on, or that is set; None: there is none."""
    meshes = [getattr(getattr(type_of(x), "sharding", None), "mesh", None) for x in arrays]
    for mesh in (*meshes, jax.sharding.get_abstract_mesh()):
        if mesh is not None and jax.sharding.AxisType.Explicit in mesh.axis_types:
            return getattr(mesh, "abstract_mesh", mesh)
    return None


@contextmanager
def no_types(*arrays: Any) -> Iterator[None]:
    """In here there is no mesh, if it has axes of type Explicit: jaxprs say nothing of it."""
    if explicit_mesh(*arrays) is None:
        yield
        return
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        yield


def traced(trace: Callable[..., Any], *args: Any) -> Any:
    """`trace(*args)` with types that say nothing of how arrays are spread, if it can be."""
    leaves = [a for a in jax.tree.leaves(args) if hasattr(a, "dtype")]
    if explicit_mesh(*leaves) is None:
        return trace(*args)
    try:
        with no_types(*leaves):
            return trace(*jax.tree.map(untyped, args))
    except Exception:
        return trace(*args)


def untyped(x: Any) -> Any:
    """An array whose type says how it is spread, as its shape; anything else as it is."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if _is_typed(x) else x


def example_of(x: Any) -> Any:
    """An array whose type says how it is spread, as zeros on one device; anything else as it is."""
    return np.zeros(x.shape, x.dtype) if _is_typed(x) else x


def _is_typed(x: Any) -> bool:
    return hasattr(x, "dtype") and explicit_mesh_of(x) is not None


def without_types(closed: Any) -> Any:
    """The same jaxpr with types that say nothing of how arrays are spread, nor anything that asks for it.

    Axes of type Explicit are XLA's to choose, then; what it must give back in which layout is known outside.
    """
    types = any(map(explicit_mesh_of, (*closed.in_avals, *closed.out_avals)))
    if not types and not _asks_for_layouts(parts(closed)[0]):
        return closed
    with no_types(*closed.in_avals, *closed.out_avals):
        return _untyped_jaxpr(closed)


def _asks_for_layouts(jaxpr: Any) -> bool:
    return any(
        _is_layout(eqn)
        or any(_is_explicit(eqn.params.get(k)) for k in ("sharding", "out_sharding"))
        or any(map(_asks_for_layouts, all_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def _is_layout(eqn: JaxprEqn) -> bool:
    """Whether an operation says how its operand is spread along axes of type Explicit, and nothing else."""
    constrains = eqn.primitive is primitives.sharding_constraint_p and _is_explicit(eqn.params["sharding"])
    return eqn.primitive is reshard_p or constrains


def _is_explicit(sharding: Any) -> bool:
    mesh = getattr(sharding, "mesh", None)
    return mesh is not None and jax.sharding.AxisType.Explicit in mesh.axis_types


def _evaluate_untyped(closed: Any, *args: Any) -> list[Any]:
    jaxpr, consts = parts(closed)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*map(_on_no_mesh, consts), *args], strict=True))

    def read(atom: Any) -> Any:
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


def _on_no_mesh(x: Any) -> Any:
    return x if is_tracer(x) or explicit_mesh_of(x) is None else np.asarray(x)


def _untyped_params(eqn: JaxprEqn) -> dict[str, Any]:
    def one(name: str, value: Any) -> Any:
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


def _untyped_jaxpr(closed: Any) -> Any:
    shapes = [jax.core.ShapedArray(a.shape, a.dtype, weak_type=a.weak_type) for a in closed.in_avals]
    return jax.make_jaxpr(partial(_evaluate_untyped, closed))(*shapes)


def typed(function: Callable[..., Any], *operands: Any) -> Any:
    """How the results of a function are spread, by their types; nothing says it where JAX refuses."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=typed_sharding(a)) for a in operands]
    try:
        with warnings.catch_warnings(action="ignore"):
            found = jax.eval_shape(function, *shapes)
    except Exception:  # types of its own: ambiguous, or a layout that it asks for by itself
        return None
    return [None if typed_sharding(a) is None else a.sharding.spec for a in found]


def in_auto(
    function: Callable[..., Any], operands: Sequence[Any], specs: Callable[[], Sequence[Any]]
) -> list[Any]:
    """`function(*operands)`, a list, with all axes of type Auto inside; `specs` are those of the results.

    As it is where no operand has a type that says how it is spread.
    """
    found = [getattr(m, "abstract_mesh", m) for m in map(explicit_mesh_of, operands) if m is not None]
    if not found:
        return list(function(*operands))
    mesh = found[0]
    others = [m for m in found if m.shape_tuple != mesh.shape_tuple]
    if others:
        raise ValueError(
            f"The arrays of one call lie on two meshes, {dict(mesh.shape)} and {dict(others[0].shape)}. Put "
            "them on one: `jax.device_put(array, NamedSharding(mesh, spec))`."
        )
    if jax.sharding.get_abstract_mesh().empty and not any(map(is_tracer, operands)):
        return list(jax.jit(lambda *operands: in_auto(function, operands, specs))(*operands))
    parts = [_partition(()) if s is None else _partition(s) for s in specs()]
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in types if kind == jax.sharding.AxisType.Explicit)
    with jax.sharding.use_abstract_mesh(mesh):
        # a cotangent of what is on no mesh would keep the type Auto
        operands = [x if explicit_mesh_of(x) else jax.sharding.reshard(x, _partition(())) for x in operands]
        return list(jax.sharding.auto_axes(function, axes=axes, out_sharding=parts)(*operands))


def in_auto_like(like: Any, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, a pytree like `like`, and spread so by types, with all axes of type Auto inside."""
    leaves, tree = jax.tree.flatten(args)

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))

    found = in_auto(flat, leaves, lambda: [spec_of(a) for a in jax.tree.leaves(like)])
    return jax.tree.unflatten(jax.tree.structure(like), found)


def spec_of(x: Any) -> Any:
    """Of each axis, the axes of the mesh that it is spread over, as an array's type says; None: nothing."""
    return None if explicit_mesh_of(x) is None else tuple(type_of(x).sharding.spec)


def spread_aval(aval: Any, mesh: Any, spec: Any) -> Any:
    """An abstract value whose type says that it is spread so; `spec` None: over nothing."""
    mesh = getattr(mesh, "abstract_mesh", mesh)
    parts = [*(spec or ()), *[None] * (len(aval.shape) - len(spec or ()))]
    return aval.update(sharding=jax.sharding.NamedSharding(mesh, _partition(parts)))


def slice_of(x: Any) -> jax.ShapeDtypeStruct:
    """The shape and type of what an array has along its first axis."""
    aval = without_axis(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=typed_sharding(aval))


def without_axis(x: Any) -> Any:
    """The type of an array without its first axis."""
    spec, aval = spec_of(x), jax.core.ShapedArray(x.shape[1:], x.dtype)
    return aval if spec is None else spread_aval(aval, explicit_mesh_of(x), spec[1:])
