"""Pickling of objects that hold `brainstate` states, which by themselves cannot be pickled."""

from __future__ import annotations

import io
import pickle
from typing import Any

import brainstate

# bookkeeping of the process that made the state
_LOCAL = ("_trace_state", "_source_info", "_hooks_manager", "_level", "_been_writen")


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        return (_state, _parts(obj)) if isinstance(obj, brainstate.State) else NotImplemented


def _parts(state: Any) -> tuple[type, dict[str, Any]]:
    return type(state), {k: v for k, v in vars(state).items() if k not in _LOCAL}


def _state(cls: type, attributes: dict[str, Any]) -> Any:
    state = cls.__new__(cls)
    brainstate.State.__init__(state, attributes["_value"])
    vars(state).update(attributes)
    return state


def copy_state(state: Any) -> Any:
    """Another state of the same kind and value."""
    return _state(*_parts(state))


def dumps(obj: Any) -> bytes:
    """`pickle.dumps`, states included."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(obj)
    return buffer.getvalue()


def restore(cls: type, data: bytes) -> Any:
    """An object of `cls` with the attributes that `dumps` stored."""
    obj = cls.__new__(cls)
    vars(obj).update(pickle.loads(data))
    return obj
