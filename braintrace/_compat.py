"""Differences between JAX versions (0.8 to 0.11), and everything that touches JAX's jaxprs or primitives.

The rest of the package reads jaxprs through these names only.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeAlias, TypeVar

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
from jax.interpreters import partial_eval

from ._types import Array, ArrayLike, Aval, Function, Options

if TYPE_CHECKING:

    class Literal:  # JAX's own says of `aval` less than it is
        aval: Aval
        val: Array  # or a number of NumPy

else:
    from jax.extend.core import Literal as Literal

Body: TypeAlias = tuple[Jaxpr, list[Array]]  # a jaxpr and its constants
AnyMesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh
Tangent: TypeAlias = Array | ad.Zero
Result = TypeVar("Result")


class Call(Protocol):
    """A function of arrays that returns arrays, and knows itself under one more `vmap`."""

    def __call__(self, *operands: Array) -> list[Array]: ...

    def mapped(self, flags: Sequence[bool]) -> Call: ...


def _primitive_of(example: Callable[[Array], object]) -> Primitive | None:
    """The primitive that a function consists of; None if this version of JAX does not have it."""
    try:
        made = jax.make_jaxpr(example)(jax.ShapeDtypeStruct((1,), np.float32))
    except AttributeError:  # not even the function
        return None
    found = [eqn.primitive for eqn in made.jaxpr.eqns]
    return found[0] if len(found) == 1 and found[0] not in vars(primitives).values() else None


def _an_explicit_reshard(x: Array) -> object:
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    return jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))


def _a_shard_map(x: Array) -> object:
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    return jax.shard_map(lambda x: x, mesh=mesh, in_specs=spec, out_specs=spec)(x)


# primitives that `jax.extend` does not export
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
# exported from 0.9 on
name_p = getattr(primitives, "name_p", None) or _primitive_of(lambda x: checkpoint_name(x, ""))
remat_p = getattr(primitives, "remat_p", None) or _primitive_of(jax.checkpoint(lambda x: x))

# `jax.checkpoint`, `jit` and plain calls: one jaxpr, applied once to all operands.
_CALLS = {
    primitives.jit_p: "jaxpr",
    remat_p: "jaxpr",
    primitives.closed_call_p: "call_jaxpr",
    primitives.call_p: "call_jaxpr",
}
# custom derivatives: also one jaxpr applied once, with a custom derivative rule
_CUSTOM = {
    primitives.custom_jvp_call_p: "call_jaxpr",
    primitives.custom_vjp_call_p: "call_jaxpr",
}


def parts(jaxpr: ClosedJaxpr | Jaxpr) -> Body:
    """The body and the constants of a jaxpr."""
    consts = list(getattr(jaxpr, "consts", ()))
    if hasattr(jaxpr, "jaxpr"):  # a ClosedJaxpr, or the one type that it became in 0.11
        return jaxpr.jaxpr, consts
    return jaxpr, consts


def live_equations(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The equations whose results are used or that have effects, with dead code inside them removed."""
    used = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        wanted = [v in used for v in eqn.outvars]
        if not any(wanted) and not eqn.effects:
            continue
        if eqn.primitive in partial_eval.dce_rules:
            rule: Function = partial_eval.dce_rules[eqn.primitive]
            # since 0.12 a rule also takes which inputs are read later: of use for mutable arrays
            takes_live = len(inspect.signature(rule).parameters) == 3
            live_inputs = [[True] * len(eqn.invars)] if takes_live else []
            _, eqn = rule(wanted, *live_inputs, eqn)
        if eqn is not None:
            live.append(eqn)
            used.update(v for v in eqn.invars if not isinstance(v, Literal))
    return live[::-1]


def called_jaxpr(eqn: JaxprEqn, *, custom: bool = False) -> Body | None:
    """The jaxpr that a call applies; None if the equation is not a call.

    With `custom`, that of a `custom_jvp` or `custom_vjp` function instead.
    """
    name = (_CUSTOM if custom else _CALLS).get(eqn.primitive)
    return None if name is None else parts(eqn.params[name])


def inner_jaxprs(eqn: JaxprEqn) -> list[Body]:
    """The jaxprs of control flow: a `cond`'s branches, a `scan`'s body, a `while`'s condition and body."""
    if eqn.primitive is primitives.cond_p:
        return [parts(b) for b in eqn.params["branches"]]
    if eqn.primitive is primitives.scan_p:
        return [parts(eqn.params["jaxpr"])]
    if eqn.primitive is primitives.while_p:
        return [parts(eqn.params["cond_jaxpr"]), parts(eqn.params["body_jaxpr"])]
    return []


def all_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Every jaxpr among the parameters of an equation."""
    found = [v for p in eqn.params.values() for v in (p if isinstance(p, tuple | list) else (p,))]
    return [parts(v)[0] for v in found if isinstance(v, ClosedJaxpr | Jaxpr)]


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """The number of constant and of carried operands of a `scan`."""
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # from 0.11 on: a tree of (consts, carry, xs)
    return len(list(consts)), len(list(carry))


def while_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """The number of constant operands of the condition and of the body of a `while`."""
    return eqn.params["cond_nconsts"], eqn.params["body_nconsts"]


def bind(eqn: JaxprEqn, *vals: ArrayLike) -> list[Array]:
    """Apply one equation to values; returns a list of results."""
    params = eqn.primitive.get_bind_params(eqn.params)
    if isinstance(params, tuple):  # before 0.9.2: (callables, params)
        callables, params = params
        vals = (*callables, *vals)
    outs = eqn.primitive.bind(*vals, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def pull_back_of(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The jaxpr of `(operands, cotangents) -> cotangents of operands`, over inexact values only.

    None if the equation has no reverse mode.
    """
    inputs, outputs = ([v.aval for v in ends] for ends in (eqn.invars, eqn.outvars))
    live, outs = ([i for i, a in enumerate(avals) if _is_inexact(a)] for avals in (inputs, outputs))

    def pull(operands: list[Array], cotangents: list[Array]) -> tuple[Array, ...]:
        def inexact_outputs(*vals: Array) -> list[Array]:
            results = bind(eqn, *vals)
            return [results[j] for j in outs]

        function = with_live(inexact_outputs, operands, live)
        found: tuple[Array, ...] = jax.vjp(function, *(operands[i] for i in live))[1](cotangents)
        return found

    def struct(aval: Aval) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    try:
        return jax.make_jaxpr(pull)([*map(struct, inputs)], [struct(outputs[j]) for j in outs])
    except Exception:  # a user's rule without reverse mode may raise anything
        return None


def _is_inexact(aval: Aval) -> bool:
    return bool(jax.numpy.issubdtype(getattr(aval, "dtype", np.bool_), np.inexact))  # a token has no type


def source_line(eqn: JaxprEqn) -> str:
    """`file:line (function)` of the user's code that made the equation."""
    return str(source_info_util.summarize(eqn.source_info))


def library_line(eqn: JaxprEqn) -> str:
    """`file:line (function)` of library code, for an equation that no user line made."""
    hidden = (os.path.dirname(jax.__file__), os.path.join(os.path.dirname(__file__), "_"))
    for frame in getattr(eqn.source_info.traceback, "frames", ()):
        units = f"{os.sep}saiunit{os.sep}" in frame.file_name  # skip its wrappers of `jax.numpy`
        if not frame.file_name.startswith(hidden) and not units:
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return ""


def at_line_of(eqn: JaxprEqn) -> AbstractContextManager[object]:
    """A context in which traced equations get the source line of this one."""
    info = eqn.source_info
    return source_info_util.user_context(info.traceback, name_stack=info.name_stack)


def hide_from_tracebacks(*paths: str) -> None:
    """Exclude files from the source lines that JAX reports."""
    for path in paths:
        source_info_util.register_exclusion(path)


def row_major(x: jax.Array) -> jax.Array:
    """Constrain the memory layout of an array to row-major."""
    result: jax.Array = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    return result


def abstract(mesh: AnyMesh) -> jax.sharding.AbstractMesh:
    """The mesh without its devices."""
    return mesh if isinstance(mesh, jax.sharding.AbstractMesh) else mesh.abstract_mesh


def type_of(x: Array | Aval) -> Aval:
    return x if isinstance(x, jax.core.ShapedArray | jax.ShapeDtypeStruct) else jax.typeof(x)


def explicit_mesh_of(x: Array | Aval) -> jax.sharding.AbstractMesh | None:
    """The mesh of an array, if it has axes of type Explicit."""
    mesh: AnyMesh | None = getattr(getattr(type_of(x), "sharding", None), "mesh", None)
    if mesh is None or jax.sharding.AxisType.Explicit not in mesh.axis_types:
        return None
    return abstract(mesh)


def typed_sharding(x: Array | Aval) -> jax.sharding.NamedSharding | None:
    return None if explicit_mesh_of(x) is None else type_of(x).sharding


def is_tracer(x: object) -> bool:
    return isinstance(x, jax.core.Tracer)


def trace_of(x: object) -> object:
    """The JAX trace that a tracer belongs to; None for an array."""
    return x._trace if isinstance(x, jax.core.Tracer) else None


def is_zero(tangent: Tangent) -> bool:
    """Whether a tangent or cotangent inside a derivative rule is a symbolic zero."""
    return type(tangent) is ad.Zero


def with_live(
    function: Callable[..., Result], operands: Sequence[Array], live: Sequence[int]
) -> Callable[..., Result]:
    """`function` of the operands with indices in `live`; all others are fixed."""

    def at(*vals: Array) -> Result:
        now = dict(zip(live, vals, strict=True))
        return function(*(now.get(i, x) for i, x in enumerate(operands)))

    return at


def register_derived_rules(
    prim: Primitive,
    plain: Callable[..., Array],
    vmapped: Callable[[Sequence[bool], Options], Options],
) -> None:
    """Register all JAX rules of `prim`, derived from `plain(*operands, **params)`.

    `vmapped(flags, params)` returns the parameters of the primitive under one more `vmap`, with a
    leading axis on the operands that are flagged.
    """

    def abstract(*avals: Aval, **params: object) -> Aval:
        # from tracing, because the type includes the sharding, and the `shard_map` axes along which it varies
        made, out = jax.make_jaxpr(lambda *a: plain(*a, **params), return_shape=True)(*avals)
        if not isinstance(out, jax.ShapeDtypeStruct):
            raise TypeError(f"The implementation of `{prim.name}` must return one array, got {out}.")
        return made.out_avals[0]

    def jvp(primals: Sequence[Array], tangents: Sequence[Tangent], **params: object) -> tuple[Array, Array]:
        live = [i for i, t in enumerate(tangents) if not is_zero(t)]
        at = with_live(lambda *operands: plain(*operands, **params), primals, live)
        # the value stays a marked op, because a model may differentiate itself; only the tangent is plain
        out = prim.bind(*primals, **params)
        _, dout = jax.jvp(at, [primals[i] for i in live], [tangents[i] for i in live])
        return out, dout

    def transpose(ct: Tangent, *operands: Array, **params: object) -> list[Tangent | None]:
        linear = [i for i, v in enumerate(operands) if ad.is_undefined_primal(v)]
        at = with_live(lambda *args: plain(*args, **params), operands, linear)
        avals = [operands[i].aval for i in linear]
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, **_also(a)) for a in avals]
        cts = map(ad.Zero, avals) if is_zero(ct) else jax.linear_transpose(at, *shapes)(ct)
        by_operand = dict(zip(linear, cts, strict=True))
        return [by_operand.get(i) for i in range(len(operands))]

    def batch(args: Sequence[Array], dims: Sequence[int | None], **params: object) -> tuple[Array, int]:
        return prim.bind(*_in_front(args, dims), **vmapped([d is not None for d in dims], params)), 0

    _define(prim, plain, abstract, batch, jvp)
    ad.primitive_transposes[prim] = transpose


def _define(
    prim: Primitive, impl: Function, shapes: Function, batch: Function, jvp: Function | None = None
) -> Primitive:
    """Register the implementation of a primitive, with the types, batching and tangents of its results."""
    prim.def_impl(impl)
    prim.def_abstract_eval(shapes)
    batching.primitive_batchers[prim] = batch
    mlir.register_lowering(prim, mlir.lower_fun(impl, multiple_results=prim.multiple_results))
    if jvp is not None:
        ad.primitive_jvps[prim] = jvp
    return prim


def _in_front(args: Sequence[Array], dims: Sequence[int | None]) -> list[Array]:
    """Operands with the axis of a `vmap` moved to the front."""
    return [a if d is None else jax.numpy.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True)]


def _also(aval: Aval) -> Options:
    """The sharding of a type, and the axes of a `shard_map` along which it varies, as keywords."""
    found = {"sharding": typed_sharding(aval)}
    name = "vma" if hasattr(aval, "vma") else "manual_axis_type"  # from 0.10 on
    return {**found, name: getattr(aval, name)} if hasattr(aval, name) else found


def varies(*arrays: Array | Aval) -> bool:
    """Whether an array varies along an axis of a `shard_map`, by its type."""
    types = [type_of(x) for x in arrays]
    return any(
        getattr(getattr(t, "manual_axis_type", None), "varying", getattr(t, "vma", None)) for t in types
    )


def call_primitive(
    name: str, shapes: Callable[..., list[Aval]], refuse_forward_mode: Callable[..., NoReturn]
) -> Primitive:
    """A primitive that applies its parameter `call` to its operands, with the derivative that `call` has.

    `shapes(*avals, call)` are the types of its results; `call.mapped(flags)` is `call` under one more `vmap`.
    Its tangents are transposed but never computed: `refuse_forward_mode` raises an error.
    """
    refuse = refuse_forward_mode
    tangent_p = _define(Primitive(f"{name}_tangent"), refuse, lambda t: t, refuse)
    ad.deflinear2(tangent_p, lambda ct, _: [ct])
    prim = Primitive(name)
    prim.multiple_results = True

    def apply(*operands: Array, call: Call) -> list[Array]:
        return call(*operands)

    def jvp(
        primals: Sequence[Array], tangents: Sequence[Tangent], call: Call
    ) -> tuple[list[Array], list[Tangent]]:
        live = [i for i, t in enumerate(tangents) if not is_zero(t)]
        at = with_live(call, primals, live)
        outs, douts = jax.jvp(at, [primals[i] for i in live], [tangent_p.bind(tangents[i]) for i in live])
        # `jax.jvp` returns float0 tangents for integers, a rule must return symbolic zeros
        zero = lambda t: ad.Zero(jax.core.ShapedArray(t.shape, t.dtype))
        return outs, [zero(t) if t.dtype == jax.dtypes.float0 else t for t in douts]

    def batch(args: Sequence[Array], dims: Sequence[int | None], call: Call) -> tuple[list[Array], list[int]]:
        outs = prim.bind(*_in_front(args, dims), call=call.mapped([d is not None for d in dims]))
        return outs, [0] * len(outs)

    return _define(prim, apply, shapes, batch, jvp)


def identity_primitive(name: str, differentiate: Function) -> Primitive:
    """An operation that returns its operand, with `differentiate(primals, tangents)` as its derivative."""
    prim = Primitive(name)  # a `jax.custom_jvp` loses its rule where JAX splits off the linear part
    batch = lambda args, dims: (prim.bind(*args), dims[0])
    return _define(prim, lambda a: a, lambda a: a, batch, differentiate)
