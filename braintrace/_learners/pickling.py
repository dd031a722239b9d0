"""Pickling of objects that hold `brainstate` states, which by themselves cannot be pickled."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
import sys
from typing import TypeVar

import brainstate

from .._types import Options, Value

# bookkeeping of the process that made the state
_LOCAL = ("_trace_state", "_source_info", "_hooks_manager", "_level", "_been_writen")


M = TypeVar("M", bound=brainstate.nn.Module)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: object) -> Value:
        if isinstance(obj, brainstate.State):
            return _state, _parts(obj)
        known = lambda cls: getattr(sys.modules.get(cls.__module__), cls.__qualname__, None)
        return (_class, _home(obj)) if isinstance(obj, type) and known(obj) is not obj else NotImplemented


def _home(cls: type) -> tuple[str, str]:
    """The module that has a class which gives another as its own (`brainstate.nn.ZeroInit` does)."""
    for name, module in list(sys.modules.items()):
        if vars(module).get(cls.__qualname__) is cls:
            return name, cls.__qualname__
    raise pickle.PicklingError(f"{cls} is not at the top level of a module, so it cannot be pickled.")


def _class(module: str, name: str) -> object:
    return getattr(importlib.import_module(module), name)


def _parts(state: brainstate.State) -> tuple[type[brainstate.State], Options]:
    return type(state), {k: v for k, v in vars(state).items() if k not in _LOCAL}


def _state(cls: type[brainstate.State], attributes: Options) -> brainstate.State:
    state: brainstate.State = object.__new__(cls)
    brainstate.State.__init__(state, attributes["_value"])
    vars(state).update(attributes)
    return state


def copy_state(state: brainstate.State) -> brainstate.State:
    """Another state of the same kind and value."""
    return _state(*_parts(state))


def copy_of(obj: M, attributes: Options, memo: dict[int, object]) -> M:
    """A deep copy of a module with these attributes, with copies of its states."""
    new: M = object.__new__(type(obj))
    memo[id(obj)] = new
    for state in obj.states().values():
        memo[id(state)] = copy_state(state)
    for name, value in copy.deepcopy(attributes, memo).items():
        object.__setattr__(new, name, value)
    return new


def dumps(obj: object) -> bytes:
    """`pickle.dumps`, states included."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(obj)
    return buffer.getvalue()


def restore(cls: type[M], data: bytes) -> M:
    """An object of `cls` with the attributes that `dumps` stored."""
    obj: M = object.__new__(cls)
    vars(obj).update(pickle.loads(data))
    return obj
