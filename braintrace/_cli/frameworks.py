"""Functional learners of step functions, and of modules of brainstate, Equinox, Flax and Haiku."""

from __future__ import annotations

import inspect
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from .options import UsageError

if TYPE_CHECKING:
    from .._learners.learner import Learner
    from .._types import Function, PyTree
    from .._types import Model as UserModel

KINDS = """\
models:
  a brainstate module, its class, or a function that makes one
  step --params P --carry C: a function step(params, carry, x) -> (carry, y); P and C are names in its
    module, of the values or of functions that return them
  a function that returns (step, params, carry)
  a module of Flax (NNX or Linen) or Equinox, called as module(carry, x) -> (carry, y), or a cell of Equinox;
    of Haiku, hk.transform(f) of f(carry, x) -> (carry, y). With --carry C if it has no initialize_carry
Functions with an argument `key`, `rngs` or `batch_size` get it from --seed and --batch-size.
"""


@dataclass(frozen=True)
class Model:
    """A functional learner, with the parameters and carry of its model."""

    learner: Learner
    params: PyTree
    carry: PyTree


def call(make: Function, given: Namespace | None, args: Sequence[object] = (), **kwargs: PyTree) -> PyTree:
    """Call a function, with the key, random streams and batch size that its signature asks for."""
    import jax

    is_class = isinstance(make, type)  # the signature of a class may be that of its metaclass
    signature = inspect.signature(make.__init__ if is_class else make)
    offered: dict[str, Function] = {}
    if given is not None:
        offered = {"key": lambda: jax.random.key(given.seed), "batch_size": lambda: given.batch_size}
        if nnx := sys.modules.get("flax.nnx"):
            offered["rngs"] = lambda: nnx.Rngs(given.seed)
    open_ = [n for n, p in signature.parameters.items() if p.default in (p.empty, None)]
    kwargs = {name: value() for name, value in offered.items() if name in open_} | kwargs
    signature.bind(*([None] if is_class else []), *args, **kwargs)
    return make(*args, **kwargs)


def is_model(found: object) -> bool:
    """Return whether this is a model, not a function that makes one."""
    is_module = is_brainstate(found) or _of(found, "flax.nnx", "flax.linen", "equinox")
    return is_module or _is_triple(found) or _is_haiku(found)


def is_brainstate(found: object) -> bool:
    return _of(found, "brainstate.nn")


def read(model: UserModel, params: PyTree, carry: PyTree, inputs: list[PyTree], given: Namespace) -> Model:
    """Return the learner of a model (see `is_model`), or of a step function with its parameters and carry."""
    import brainstate
    import jax
    import jax.numpy as jnp

    from .._learners.models import learner_of
    from .._learners.online import online

    x = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), inputs[0] if len(inputs) == 1 else tuple(inputs))
    key = jax.random.key(given.seed)
    if is_brainstate(model):
        size = {"batch_size": given.batch_size} if given.batch_size else {}
        brainstate.nn.init_all_states(model, **size)
        with brainstate.environ.context(fit=True):  # as in training, with dropout
            return Model(*learner_of(model, inputs))
    if _is_triple(model):
        step, params, carry = model
    elif _of(model, "flax.nnx"):
        from ..nnx import Learner

        make = lambda: model.initialize_carry(x.shape, sys.modules["flax.nnx"].Rngs(given.seed))
        learner, params, carry, _ = Learner(model, _carry(carry, model, make), x).split()
        return Model(learner, params, carry)
    elif _of(model, "flax.linen"):
        carry = _carry(carry, model, lambda: model.initialize_carry(key, x.shape))
        step, params = model.apply, model.init(key, carry, x)
    elif _is_haiku(model):
        carry = _carry(carry, model)
        step, params = model.apply, model.init(key, carry, x)
        if "rng" in inspect.signature(model.apply).parameters:
            step = lambda params, carry, x: model.apply(params, None, carry, x)
    elif _of(model, "equinox"):
        step, params, carry = _equinox(model, carry, given.batch_size)
    else:
        step = model
    return Model(online(step, params, carry, x), params, carry)


def _of(found: object, *packages: str) -> bool:
    """Return whether this is a module of a framework, which then is imported already."""
    known = [sys.modules[name].Module for name in packages if name in sys.modules]
    return isinstance(found, tuple(known))


def _is_triple(found: object) -> bool:
    return isinstance(found, tuple) and len(found) == 3 and callable(found[0])


def _is_haiku(found: object) -> bool:
    return isinstance(found, tuple) and getattr(found, "_fields", None) == ("init", "apply")


def _carry(carry: PyTree, model: UserModel, make: Function | None = None) -> PyTree:
    if carry is not None:
        return carry
    if make is None or not hasattr(model, "initialize_carry"):
        raise UsageError(
            f"The carry of {type(model).__name__} is unknown. Name it, or a function that returns it, with "
            "--carry."
        )
    return make()


def _equinox(model: UserModel, carry: PyTree, batch_size: int | None) -> tuple[Function, PyTree, PyTree]:
    """Return step, params and carry; Equinox modules have no batch axis, its cells take the input first."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    is_cell = isinstance(model, eqx.nn.GRUCell | eqx.nn.LSTMCell)

    def one(model: UserModel, carry: PyTree, x: PyTree) -> PyTree:
        if not is_cell:
            return model(carry, x)
        carry = model(x, carry)
        return carry, carry[0] if isinstance(carry, tuple) else carry

    def step(model: UserModel, carry: PyTree, x: PyTree) -> PyTree:
        return one(model, carry, x) if batch_size is None else jax.vmap(partial(one, model))(carry, x)

    if carry is None and is_cell:
        zeros = jnp.zeros((*([batch_size] if batch_size else []), model.hidden_size))
        carry = (zeros, zeros) if isinstance(model, eqx.nn.LSTMCell) else zeros
    step.__name__ = type(model).__name__
    carry = _carry(carry, model)
    shapes = [jnp.shape(a) for a in jax.tree.leaves(carry)]
    if batch_size and any(shape[:1] != (batch_size,) for shape in shapes):
        raise UsageError(
            f"With --batch-size {batch_size} the carry has a first axis of {batch_size}, not the shapes "
            f"{shapes}. Name a function of `batch_size` that returns it, or give no --batch-size."
        )
    return step, model, carry
