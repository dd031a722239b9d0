"""Every difference between JAX versions (0.8 to 0.11), and nothing else.

The rest of the package reads jaxprs through these names only.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr as ClosedJaxpr
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import JaxprEqn as JaxprEqn
from jax.extend.core import Primitive as Primitive
from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun
from jax.extend.core import primitives as primitives
from jax.interpreters import ad as ad
from jax.interpreters import batching as batching
from jax.interpreters import mlir as mlir

if TYPE_CHECKING:

    class Literal:  # JAX's own says of `aval` less than it is
        aval: Any
        val: Any

else:
    from jax.extend.core import Literal

__all__ = [
    "ClosedJaxpr",
    "Jaxpr",
    "JaxprEqn",
    "Literal",
    "Primitive",
    "ad",
    "batching",
    "bind",
    "called_jaxpr",
    "hide_from_tracebacks",
    "jaxpr_as_fun",
    "mlir",
    "primitives",
    "scan_counts",
    "source_line",
]


def _primitive_of(example: Callable[[Any], Any]) -> Any:
    """The primitive of a function that is a single one; None if this version of JAX does not have it."""
    try:
        made = jax.make_jaxpr(example)(jax.ShapeDtypeStruct((1,), np.float32))
    except AttributeError:  # not even the function
        return None
    found = [eqn.primitive for eqn in made.jaxpr.eqns]
    return found[0] if len(found) == 1 and found[0] not in vars(primitives).values() else None


def _an_explicit_reshard(x: Any) -> Any:
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    return jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))


def _a_shard_map(x: Any) -> Any:
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    return jax.shard_map(lambda x: x, mesh=mesh, in_specs=spec, out_specs=spec)(x)


# those for which `jax.extend` has no name
optimization_barrier_p = _primitive_of(jax.lax.optimization_barrier)
split_p = _primitive_of(lambda x: jax.lax.split(x, [1]))
stack_p = _primitive_of(lambda x: jax.lax.stack([x]))  # from 0.10 on, as the next two
tile_p = _primitive_of(lambda x: jax.lax.tile(x, [2]))
unstack_p = _primitive_of(lambda x: jax.lax.unstack(x))
reshard_p = _primitive_of(_an_explicit_reshard)
scatter_sub_p = _primitive_of(
    lambda x: jax.lax.scatter_sub(
        x, np.zeros((1, 1), np.int32), x, jax.lax.ScatterDimensionNumbers((), (0,), (0,))
    )
)
shard_map_p = _primitive_of(_a_shard_map)
# before 0.9 it has none for these either
name_p = getattr(primitives, "name_p", None) or _primitive_of(lambda x: checkpoint_name(x, ""))
remat_p = getattr(primitives, "remat_p", None) or _primitive_of(jax.checkpoint(lambda x: x))

# `jax.checkpoint`, `jit` and plain calls: one jaxpr, applied once to all operands.
_CALLS = {
    primitives.jit_p: "jaxpr",
    remat_p: "jaxpr",
    primitives.closed_call_p: "call_jaxpr",
    primitives.call_p: "call_jaxpr",
}
# custom derivatives: also one jaxpr applied once, with a rule of its own for the derivative
_CUSTOM = {
    primitives.custom_jvp_call_p: "call_jaxpr",
    primitives.custom_vjp_call_p: "call_jaxpr",
}


def parts(jaxpr: Any) -> tuple[Any, list[Any]]:
    """A jaxpr's body and the constants that come with it."""
    if hasattr(jaxpr, "jaxpr"):  # a ClosedJaxpr, or the one type that it became in 0.11
        return jaxpr.jaxpr, list(jaxpr.consts)
    return jaxpr, list(getattr(jaxpr, "consts", ()))


def called_jaxpr(eqn: JaxprEqn, *, custom: bool = False) -> tuple[Any, list[Any]] | None:
    """The (jaxpr, constants) that a call applies; None if the equation is not a call.

    With `custom`, that of a `custom_jvp` or `custom_vjp` function instead.
    """
    name = (_CUSTOM if custom else _CALLS).get(eqn.primitive)
    return None if name is None else parts(eqn.params[name])


def inner_jaxprs(eqn: JaxprEqn) -> list[tuple[Any, list[Any]]]:
    """The jaxprs of control flow: a `cond`'s branches, a `scan`'s body, a `while`'s condition and body."""
    if eqn.primitive is primitives.cond_p:
        return [parts(b) for b in eqn.params["branches"]]
    if eqn.primitive is primitives.scan_p:
        return [parts(eqn.params["jaxpr"])]
    if eqn.primitive is primitives.while_p:
        return [parts(eqn.params["cond_jaxpr"]), parts(eqn.params["body_jaxpr"])]
    return []


def all_jaxprs(eqn: JaxprEqn) -> list[Any]:
    """Every jaxpr among the parameters of an equation, whatever it is for."""
    found = [v for p in eqn.params.values() for v in (p if isinstance(p, tuple | list) else (p,))]
    return [parts(v)[0] for v in found if isinstance(v, ClosedJaxpr | Jaxpr)]


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many operands of a `scan` are constants, and how many are carried."""
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # from 0.11 on: a tree of (consts, carry, xs)
    return len(list(consts)), len(list(carry))


def while_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many operands of a `while` are constants of its condition, and of its body."""
    return eqn.params["cond_nconsts"], eqn.params["body_nconsts"]


def bind(eqn: JaxprEqn, *vals: Any) -> list[Any]:
    """Apply one equation to values; always a list of results."""
    params = eqn.primitive.get_bind_params(eqn.params)
    if isinstance(params, tuple):  # before 0.9.2: (callables, params)
        callables, params = params
        vals = (*callables, *vals)
    outs = eqn.primitive.bind(*vals, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def source_line(eqn: JaxprEqn) -> str:
    """`file:line (function)` of the user's code that made the equation."""
    return str(source_info_util.summarize(eqn.source_info))


def library_line(eqn: JaxprEqn) -> str:
    """The same in a library's code (ours or another's), for what no line of the user's made."""
    hidden = (os.path.dirname(jax.__file__), os.path.join(os.path.dirname(__file__), "_"))
    for frame in getattr(eqn.source_info.traceback, "frames", ()):
        units = f"{os.sep}saiunit{os.sep}" in frame.file_name  # its wrappers of `jax.numpy` say nothing
        if not frame.file_name.startswith(hidden) and not units:
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return ""


def at_line_of(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """Equations traced in here have the source line of this one."""
    info = eqn.source_info
    manager: AbstractContextManager[Any] = source_info_util.user_context(
        info.traceback, name_stack=info.name_stack
    )
    return manager


def hide_from_tracebacks(*paths: str) -> None:
    """Leave these files out of the source lines that JAX reports."""
    for path in paths:
        source_info_util.register_exclusion(path)


def row_major(x: jax.Array) -> jax.Array:
    """The same array, laid out in memory with its last axis innermost."""
    result: jax.Array = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    return result


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
    meshes = [getattr(getattr(_type_of(x), "sharding", None), "mesh", None) for x in arrays]
    for mesh in (*meshes, jax.sharding.get_abstract_mesh()):
        if mesh is not None and jax.sharding.AxisType.Explicit in mesh.axis_types:
            return getattr(mesh, "abstract_mesh", mesh)
    return None


def _type_of(x: Any) -> Any:
    return x if isinstance(x, jax.core.ShapedArray | jax.ShapeDtypeStruct) else jax.typeof(x)


def explicit_mesh_of(x: Any) -> Any:
    """The mesh with axes of type Explicit that an array is on."""
    mesh = getattr(getattr(_type_of(x), "sharding", None), "mesh", None)
    return mesh if mesh is not None and jax.sharding.AxisType.Explicit in mesh.axis_types else None


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
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=_typed_sharding(a)) for a in operands]
    try:
        with warnings.catch_warnings(action="ignore"):
            found = jax.eval_shape(function, *shapes)
    except Exception:  # types of its own: ambiguous, or a layout that it asks for by itself
        return None
    return [None if _typed_sharding(a) is None else a.sharding.spec for a in found]


def _typed_sharding(x: Any) -> Any:
    return None if explicit_mesh_of(x) is None else _type_of(x).sharding


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
    return None if explicit_mesh_of(x) is None else tuple(_type_of(x).sharding.spec)


def is_tracer(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def trace_of(x: Any) -> Any:
    """The trace that a value belongs to; None: it is an array."""
    return x._trace if is_tracer(x) else None


def is_zero(tangent: Any) -> bool:
    """Whether a tangent or cotangent inside a derivative rule is a symbolic zero."""
    return type(tangent) is ad.Zero


def register_derived_rules(
    prim: Primitive,
    plain: Callable[..., Any],
    vmapped: Callable[[Sequence[bool], dict[str, Any]], dict[str, Any]],
) -> None:
    """Give `prim` every rule JAX asks for, all derived from `plain(*operands, **params)`.

    `vmapped(flags, params)` returns the parameters of the primitive under one more `vmap`, with a
    leading axis on the operands that are flagged.
    """

    def abstract(*avals: Any, **params: Any) -> Any:
        # as types say all there is: how the result is spread, and along which axes of a `shard_map` it varies
        made, out = jax.make_jaxpr(lambda *a: plain(*a, **params), return_shape=True)(*avals)
        if not isinstance(out, jax.ShapeDtypeStruct):
            raise TypeError(f"The implementation of `{prim.name}` must return one array, got {out}.")
        return made.out_avals[0]

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        live = [i for i, t in enumerate(tangents) if not is_zero(t)]

        def at(*vals: Any) -> Any:
            operands = list(primals)
            for i, v in zip(live, vals, strict=True):
                operands[i] = v
            return plain(*operands, **params)

        # The value stays a marked op (a model may differentiate itself); only the tangent is plain.
        out = prim.bind(*primals, **params)
        _, dout = jax.jvp(at, [primals[i] for i in live], [tangents[i] for i in live])
        return out, dout

    def transpose(ct: Any, *operands: Any, **params: Any) -> list[Any]:
        linear = [i for i, v in enumerate(operands) if ad.is_undefined_primal(v)]

        def at(*vals: Any) -> Any:
            args = list(operands)
            for i, v in zip(linear, vals, strict=True):
                args[i] = v
            return plain(*args, **params)

        avals = [operands[i].aval for i in linear]
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, **_also(a)) for a in avals]
        result: list[Any] = [None] * len(operands)
        if is_zero(ct):
            cts: Any = [ad.Zero(a) for a in avals]
        else:
            cts = jax.linear_transpose(at, *shapes)(ct)
        for i, c in zip(linear, cts, strict=True):
            result[i] = c
        return result

    def batch(args: Any, dims: Any, **params: Any) -> Any:
        flags = [d is not None for d in dims]
        moved = [jax.numpy.moveaxis(a, d, 0) if f else a for a, d, f in zip(args, dims, flags, strict=True)]
        return prim.bind(*moved, **vmapped(flags, params)), 0

    prim.def_impl(plain)
    prim.def_abstract_eval(abstract)
    ad.primitive_jvps[prim] = jvp
    ad.primitive_transposes[prim] = transpose
    batching.primitive_batchers[prim] = batch
    mlir.register_lowering(prim, mlir.lower_fun(plain, multiple_results=False))


def _also(aval: Any) -> dict[str, Any]:
    """What else a type says: how an array is spread, and along which axes of a `shard_map` it varies."""
    found = {"sharding": _typed_sharding(aval)}
    if hasattr(aval, "vma"):  # before 0.10
        return {**found, "vma": aval.vma}
    return (
        {**found, "manual_axis_type": aval.manual_axis_type} if hasattr(aval, "manual_axis_type") else found
    )


def varies(*arrays: Any) -> bool:
    """Whether types say along which axes of a `shard_map` an array varies."""
    for x in arrays:
        found = getattr(_type_of(x), "vma", None)
        found = getattr(getattr(_type_of(x), "manual_axis_type", None), "varying", found)
        if found:
            return True
    return False


def spread_aval(aval: Any, mesh: Any, spec: Any) -> Any:
    """An abstract value whose type says that it is spread so; `spec` None: over nothing."""
    mesh = getattr(mesh, "abstract_mesh", mesh)
    parts = [*(spec or ()), *[None] * (len(aval.shape) - len(spec or ()))]
    return aval.update(sharding=jax.sharding.NamedSharding(mesh, _partition(parts)))


def slice_of(x: Any) -> jax.ShapeDtypeStruct:
    """The shape and type of what an array has along its first axis."""
    aval = without_axis(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=_typed_sharding(aval))


def without_axis(x: Any) -> Any:
    """The type of an array without its first axis."""
    spec, aval = spec_of(x), jax.core.ShapedArray(x.shape[1:], x.dtype)
    return aval if spec is None else spread_aval(aval, explicit_mesh_of(x), spec[1:])


def _aval(x: Any) -> Any:
    return jax.core.ShapedArray(x.shape, x.dtype)


def call_primitive(name: str, shapes: Callable[..., list[Any]]) -> Primitive:
    """A primitive that applies its parameter `call` to its operands, with the derivative that `call` has.

    `shapes(*avals, call)` are the shapes and types of what it gives; `call.mapped(flags)` is `call` under one
    more `vmap`.
    """
    prim = Primitive(name)
    prim.multiple_results = True

    def apply(*operands: Any, call: Callable[..., Any]) -> Any:
        return call(*operands)

    def jvp(primals: Any, tangents: Any, call: Callable[..., Any]) -> Any:
        live = [i for i, t in enumerate(tangents) if not is_zero(t)]

        def at(*vals: Any) -> Any:
            operands = list(primals)
            for i, v in zip(live, vals, strict=True):
                operands[i] = v
            return call(*operands)

        outs, douts = jax.jvp(at, [primals[i] for i in live], [tangents[i] for i in live])
        # `jax.jvp` gives integers a tangent of type float0, where a rule gives none
        none = [ad.Zero(_aval(t)) if t.dtype == jax.dtypes.float0 else t for t in douts]
        return outs, none

    def batch(args: Any, dims: Any, call: Any) -> Any:
        flags = [d is not None for d in dims]
        moved = [jax.numpy.moveaxis(a, d, 0) if f else a for a, d, f in zip(args, dims, flags, strict=True)]
        outs = prim.bind(*moved, call=call.mapped(flags))
        return outs, [0] * len(outs)

    prim.def_impl(apply)
    prim.def_abstract_eval(shapes)
    ad.primitive_jvps[prim] = jvp
    batching.primitive_batchers[prim] = batch
    mlir.register_lowering(prim, mlir.lower_fun(apply, multiple_results=True))
    return prim


def register_bilinear_rules(
    prim: Primitive,
    plain: Callable[..., Any],
    on_cpu: Callable[..., Any],
    transposes: tuple[Callable[..., Any], Callable[..., Any]],
) -> None:
    """Give `prim` the rules of an operation that is linear in each of its two operands.

    It computes `plain(a, b, **params)`, also under `vmap`; on a CPU `on_cpu`, another way to the same
    numbers. `transposes(ct, a, b, **params)` are those with respect to `a` and to `b`.
    """

    def abstract(*avals: Any, **params: Any) -> Any:
        out = jax.eval_shape(lambda *a: plain(*a, **params), *avals)
        return jax.core.ShapedArray(out.shape, out.dtype)

    def batch(args: Any, dims: Any, **params: Any) -> Any:
        return jax.vmap(lambda a, b: plain(a, b, **params), dims)(*args), 0

    prim.def_impl(plain)
    prim.def_abstract_eval(abstract)
    ad.defbilinear(prim, *transposes)
    batching.primitive_batchers[prim] = batch
    mlir.register_lowering(prim, mlir.lower_fun(plain, multiple_results=False))
    mlir.register_lowering(prim, mlir.lower_fun(on_cpu, multiple_results=False), platform="cpu")
