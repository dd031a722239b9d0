"""Marked operations: one factory makes the JAX primitive of each operation from a plain function.

A weight that is used through a marked operation is learned online; the mark changes no value. Shapes,
derivatives, batching and lowering are derived from the implementation, and the trace from its axis labels.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import brainunit as u
import jax.numpy as jnp

from .. import _compat, _lines
from .._types import Array, Options, Value
from .axis_labels import Layout, Term, layout, over_levels

Terms = Mapping[str, Term] | Callable[..., Mapping[str, Term]]
Levels = tuple[tuple[bool, ...], ...]
WeightFn = Callable[[Array], Array]


class ETPPrimitive(_compat.Primitive):
    """The primitive of a marked operation (`ETP`: eligibility-trace primitive).

    The parameters of its equations are `names` (of the weights, which are the last operands), `levels`
    (which operands have an axis of each enclosing `vmap`), `found` (true if the compiler set the mark) and
    the options of the operation.
    """

    def __init__(
        self,
        name: str,
        impl: Callable[..., Array],
        terms: Terms,
        merge: Callable[..., dict[str, Array]] | None = None,
    ) -> None:
        super().__init__(name)
        self.implementation = impl
        self._terms = terms
        self._merge = merge
        # whether it is defined in this package
        self.is_known = str(getattr(impl, "__module__", None)).startswith(__package__)
        self.checked: set[Hashable] = set()  # cases for which its labels were verified
        vmapped = lambda flags, params: {**params, "levels": (tuple(flags), *params["levels"])}
        _compat.register_derived_rules(self, self.plain, vmapped)

    @property
    def merges(self) -> bool:
        """Whether traces are kept for a combination of the weights (a product, say), not for each of them."""
        return self._merge is not None

    def __call__(self, *inputs: Value, weights: Mapping[str, Value], **options: Any) -> Value:
        """Apply the operation to `inputs` and to `weights`, a mapping from names to arrays or None.

        Units are removed from the operands and the unit of the result is added: the product of the units of
        the inputs and of the weights. A weight named `bias` is converted to that unit.
        """
        given = {name: w for name, w in weights.items() if w is not None}
        unit = u.UNITLESS
        for v in (*inputs, *(w for name, w in given.items() if name != "bias")):
            unit = unit * u.get_unit(v)
        if "bias" in given and u.get_unit(given["bias"]) != unit:
            given["bias"] = u.Quantity(given["bias"]).to(unit)
        operands = [jnp.asarray(u.get_mantissa(v)) for v in (*inputs, *given.values())]
        apply = self.plain if _without_marks.get() else self.bind
        y = apply(*operands, names=tuple(given), levels=(), **options)
        return y if unit == u.UNITLESS else u.maybe_decimal(u.Quantity(y, unit=unit))

    def plain(
        self, *operands: Array, names: tuple[str, ...], levels: Levels, found: bool = False, **options: Any
    ) -> Array:
        """Compute the operation without a mark."""
        first = len(operands) - len(names)

        def impl(*args: Array) -> Array:
            return self.implementation(
                *args[:first], **dict(zip(names, args[first:], strict=True)), **options
            )

        return over_levels(impl, levels)(*operands)

    def effective(self, weights: Sequence[Array], params: Options) -> dict[str, Array]:
        """The weights that traces are kept for: the given ones, unless the operation merges them."""
        names = params["names"]
        if self._merge is None:
            return dict(zip(names, weights, strict=True))
        levels = [level[-len(names) :] for level in params["levels"]]
        merge, options = self._merge, _options(params)
        apply = lambda *w: merge(**dict(zip(names, w, strict=True)), **options)
        return over_levels(apply, levels)(*weights)

    def layouts(self, params: Options, effective: Sequence[str], y_ndim: int) -> dict[str, Layout]:
        """The layout of the trace of each effective weight, for an output of `y_ndim` axes."""
        names, levels = params["names"], params["levels"]
        terms = self._terms(**_options(params)) if callable(self._terms) else self._terms
        missing = [n for n in effective if n not in terms]
        if missing:
            raise ValueError(
                f"The marked op `{self.name}` has a weight {missing[0]!r}, but axis labels for "
                f"{list(terms)}. Give them by name: `register_primitive(name, impl, {{name: axis labels}})`."
            )
        inputs = tuple(level[: -len(names)] for level in levels)
        if self._merge is None:
            weights = {n: tuple(level[i - len(names)] for level in levels) for i, n in enumerate(names)}
        else:  # merged under `vmap`: if one weight has the axis, the merged ones have it
            weights = dict.fromkeys(effective, tuple(any(level[-len(names) :]) for level in levels))
        return {n: layout(terms[n], inputs, weights[n], y_ndim) for n in effective}


_without_marks = contextvars.ContextVar("without_marks", default=False)


@contextlib.contextmanager
def without_marks() -> Iterator[None]:
    """A context in which marked operations are ordinary ones, so that their weights get no trace."""
    token = _without_marks.set(True)
    try:
        yield
    finally:
        _without_marks.reset(token)


def _options(params: Options) -> Options:
    return {k: v for k, v in params.items() if k not in ("names", "levels", "found")}


def register_primitive(
    name: str,
    impl: Callable[..., Array],
    letters: str | Mapping[str, str | Term] | Callable[..., Mapping[str, Term]],
    *,
    merge: Callable[..., dict[str, Array]] | None = None,
) -> ETPPrimitive:
    """Define a marked operation: an implementation and the axis labels of its weights.

    Args:
        name: Name of the JAX primitive.
        impl: `impl(*inputs, weight=..., **options)` in ordinary JAX, linear in each weight.
        letters: Axis labels as in `jnp.einsum`, such as `'...i,io->...o'`; a mapping from weight names to
            labels if there are several weights. A `Term` also holds views, for operations that are a
            contraction of something derived from their inputs. A function of the options returns the mapping
            if the labels depend on them.
        merge: `merge(**weights)` returns the weights to keep traces for, if the given ones enter only
            through a product (as in LoRA).

    Returns:
        The primitive; call it as `primitive(*inputs, weights={name: array}, **options)`.

    >>> import jax.numpy as jnp
    >>> def gain(x, weight):
    ...     return x * weight
    >>> gain_p = register_primitive("gain", gain, "o,o->o")
    >>> print(gain_p(jnp.ones(3), weights={"weight": jnp.arange(3.0)}))
    [0. 1. 2.]
    """
    if callable(letters):
        return ETPPrimitive(name, impl, letters, merge)
    given = {"weight": letters} if isinstance(letters, str) else letters
    terms = {k: v if isinstance(v, Term) else Term(v) for k, v in given.items()}
    for term in terms.values():
        term.parse()
    return ETPPrimitive(name, impl, terms, merge)


def on_mantissa(fn: WeightFn | None, v: Value) -> Value:
    """Apply `fn` to an array, or to the mantissa of a quantity, which keeps its unit."""
    _refuse_state(v)
    if fn is None or v is None:
        return v
    result, unit = fn(jnp.asarray(u.get_mantissa(v))), u.get_unit(v)
    return result if unit == u.UNITLESS else u.Quantity(result, unit=unit)


class StateGivenError(TypeError):
    """Raised if an op is given a state object instead of the value of the state."""


def _refuse_state(v: object) -> None:
    if hasattr(v, "value") and not hasattr(v, "dtype"):
        op, line = _lines.calling_line("_ops")
        where = f"`{op}` at {line}" if line else f"`{op}`"
        raise StateGivenError(
            f"{where} takes arrays, but was given a `{type(v).__name__}`: pass its `.value`."
        )


def spikes_as(weight: Value, x: Value) -> Value:
    """Cast boolean or integer input (spikes, counts) to the type of the weight."""
    _refuse_state(x)
    if jnp.issubdtype(jnp.result_type(u.get_mantissa(x)), jnp.inexact):
        return x
    dtype = jnp.result_type(u.get_mantissa(weight))
    return on_mantissa(lambda array: array.astype(dtype), x)


def bias_of(shape: tuple[int, ...], bias: Value) -> Value:
    """Broadcast a bias (or None) to the features of an output."""
    have = shape if bias is None else shape_of(bias)
    if len(have) > len(shape) or any(h not in (1, s) for h, s in zip(have[::-1], shape[::-1], strict=False)):
        raise ValueError(
            f"A bias has the shape of the output's features, {shape}, not {have}. To learn another one, add "
            "`element_wise(bias)` to the output."
        )
    return on_mantissa(lambda b: jnp.broadcast_to(b, shape), bias)


def shape_of(v: Value) -> tuple[int, ...]:
    """The shape of an array, a quantity or a number."""
    return tuple(jnp.shape(u.get_mantissa(v)))
