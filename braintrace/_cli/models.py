"""A user's model, by its name: `my_pkg.my_mod:Model`, or with arguments, `my_mod:Model(3, hidden=32)`."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from .._lines import raising_line
from .errors import UsageError

SPEC = "module:Model, file.py:Model or, with arguments, 'module:Model(3, hidden=32)'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How a model and its input are given."""
    parser.add_argument("model", help=f"a class, a function that makes a model, or a model: {SPEC}")
    parser.add_argument(
        "--input",
        action="append",
        required=True,
        metavar="SHAPE",
        help="the shape of one step's input without a batch axis, such as 1,28,28; again for another input",
    )
    parser.add_argument(
        "--dtype", action="append", default=[], help="of each input: float32 (default), int32, ..."
    )
    parser.add_argument(
        "--batch-size", type=positive, help="how many sequences at once (default: no batch axis)"
    )
    parser.add_argument("--dt", type=float, help="time step in ms, for neurons (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the parameters (default: 0)")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


@contextmanager
def build(given: argparse.Namespace) -> Iterator[tuple[Any, list[Any]]]:
    """The model, its states made, and the shape and type of each input, batch axis included."""
    import brainstate

    inputs = shapes(given)
    make = find(given.model)
    brainstate.random.seed(given.seed)
    with time_step(given.dt):
        model = make()
        size = {"batch_size": given.batch_size} if given.batch_size else {}
        brainstate.nn.init_all_states(model, **size)
        yield model, inputs


@contextmanager
def time_step(dt: float | None = None) -> Iterator[None]:
    """With a time step in ms: that, or what the user's own module has set, or 1."""
    import brainstate
    import brainunit as u

    if dt is None and brainstate.environ.get("dt", None) is not None:
        yield
    else:
        with brainstate.environ.context(dt=(1.0 if dt is None else dt) * u.ms):
            yield


def shapes(given: argparse.Namespace) -> list[Any]:
    import jax
    import jax.numpy as jnp

    dtypes = given.dtype or ["float32"]
    if len(dtypes) not in (1, len(given.input)):
        raise UsageError(
            f"There are {len(given.input)} inputs, but {len(dtypes)} types; give one, or one each."
        )
    batch = (given.batch_size,) if given.batch_size else ()
    found = []
    for i, text in enumerate(given.input):
        try:
            shape = tuple(int(n) for n in text.split(",") if n.strip())
            dtype = jnp.dtype(dtypes[i if len(dtypes) > 1 else 0])
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"Not a shape and a type: {text!r}, {dtypes}. A shape is like 1,28,28."
            ) from error
        found.append(jax.ShapeDtypeStruct((*batch, *shape), dtype))
    return found


def find(spec: str) -> Callable[[], Any]:
    """What makes the model that a name stands for; the module is imported now."""
    import brainstate

    where, colon, what = spec.partition(":")
    if not colon or not where or not what:
        raise UsageError(f"{spec!r} does not name a model: write {SPEC}.")
    module = _module(where)
    name, args, kwargs = _parse(what)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            offered = [n for n, v in vars(module).items() if _is_model(v, module)]
            hint = f" It has {', '.join(offered[:8])}." if offered else ""
            raise UsageError(f"`{where}` has no `{name}`.{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"`{spec}` is neither a model nor something that makes one, but {type(found)}.")

    def make() -> Any:
        if isinstance(found, brainstate.nn.Module):
            return found
        try:
            if isinstance(found, type):  # the signature of the class itself is that of its metaclass
                inspect.signature(found.__init__).bind(None, *args, **kwargs)  # type: ignore[misc]
            else:
                inspect.signature(found).bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(
                f"`{what}` cannot be made: {error}. Give arguments in the name: {SPEC}."
            ) from error
        model = found(*args, **kwargs)
        if not isinstance(model, brainstate.nn.Module):
            raise UsageError(f"`{spec}` made {type(model)}, not a `brainstate.nn.Module`.")
        return model

    return make


def _is_model(value: Any, module: ModuleType) -> bool:
    import brainstate

    is_class = isinstance(value, type) and issubclass(value, brainstate.nn.Module)
    return (is_class and value.__module__ == module.__name__) or isinstance(value, brainstate.nn.Module)


def _module(where: str) -> ModuleType:
    try:
        if where.endswith(".py"):
            path = Path(where)
            if not path.exists():
                raise UsageError(f"There is no file {where}.")
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = module
            spec.loader.exec_module(module)
            return module
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name and (where == error.name or where.startswith(error.name + ".")):
            raise UsageError(
                f"There is no module `{error.name}`, neither in this folder nor installed. A file works too: "
                "my_model.py:Model."
            ) from error
        raise
    except UsageError:
        raise
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        line = raising_line(error) or f"{at.filename}:{at.lineno}"
        raise RuntimeError(
            f"`{where}` cannot be imported: {type(error).__name__}: {error} ({line})"
        ) from error


def _parse(what: str) -> tuple[str, list[Any], dict[str, Any]]:
    """A dotted name, and the arguments of a call, which are Python literals."""
    try:
        tree = ast.parse(what, mode="eval").body
        if not isinstance(tree, ast.Call):
            return ast.unparse(tree) if isinstance(tree, ast.Name | ast.Attribute) else "", [], {}
        args = [ast.literal_eval(a) for a in tree.args]
        kwargs = {k.arg: ast.literal_eval(k.value) for k in tree.keywords if k.arg}
        return ast.unparse(tree.func), args, kwargs
    except (SyntaxError, ValueError) as error:
        raise UsageError(
            f"{what!r} is not a name, or a name with plain numbers and words in brackets."
        ) from error
