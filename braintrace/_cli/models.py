"""Models given by name: `my_pkg.my_mod:Model`, or with arguments, `my_mod:Model(3, hidden=32)`."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from .._lines import raising_line
from . import frameworks
from .options import SPEC, UsageError, add_options

if TYPE_CHECKING:
    from .._types import Aval, Function, Model, Options, PyTree


def add_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the options of a model and its input; both are optional unless `required`."""
    add = parser.add_argument
    many = None if required else "?"
    add("model", nargs=many, help=f"a class, a function that makes a model, or a model: {SPEC}")
    for name, what in (("params", "the parameters"), ("carry", "the carry at the start")):
        about = f"of a step function: {what}, or a function that returns it"
        add(f"--{name}", metavar="NAME", help=about)
    about = "the shape of one step's input without a batch axis, such as 1,28,28; again for another input"
    add("--input", action="append", metavar="SHAPE", help=f"{about}; a NIR file states its own")
    add("--dtype", action="append", default=[], help="of each input: float32 (default), int32, ...")
    add("--dt", type=float, help="time step in ms, for neurons (default: 1)")
    add_options(parser, "batch_size seed", seed=0)


@contextmanager
def build(given: Namespace, make: Function | None = None) -> Iterator[tuple[frameworks.Model, list[Aval]]]:
    """Yield the functional learner of a model, and the shape of each input with its batch axis.

    Args:
        given: All options.
        make: Returns the model; by default that which the options name.
    """
    import brainstate

    inputs = shapes(given)
    make = make or find(given.model, given)
    brainstate.random.seed(given.seed)
    with time_step(given.dt):
        params, carry = (_given(name, given) for name in ("params", "carry"))
        yield frameworks.read(make(), params, carry, inputs, given), inputs


def _given(name: str, given: Namespace) -> PyTree:
    """Return the value of `--params` or `--carry`: a name in the model's module, or `module:name`."""
    spec = getattr(given, name)
    if spec is None or given.model is None:
        return None
    where = given.model.partition(":")[0]
    found, args, kwargs = _look_up(spec if ":" in spec else f"{where}:{spec}")
    is_maker = inspect.isroutine(found) or isinstance(found, type)
    return frameworks.call(found, given, args, **kwargs) if is_maker else found


@contextmanager
def time_step(dt: float | None = None) -> Iterator[None]:
    """Set the time step in ms; by default the one that the user's module has set, or 1."""
    import brainstate
    import brainunit as u

    if dt is None and brainstate.environ.get("dt", None) is not None:
        yield
    else:
        with brainstate.environ.context(dt=(1.0 if dt is None else dt) * u.ms):
            yield


def shapes(given: Namespace) -> list[Aval]:
    import jax
    import jax.numpy as jnp

    if given.input is None:
        if not _is_nir(given.model):
            raise UsageError("The shape of one step's input is required: --input SHAPE, such as 1,28,28.")
        net = _load_nir(given.model)
        given.input = [",".join(map(str, net.parts[name].in_size)) for name in net.inputs]
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
            raise UsageError(f"Not a shape and a type: {text!r}, {dtypes}. A shape: 1,28,28.") from error
        found.append(jax.ShapeDtypeStruct((*batch, *shape), dtype))
    return found


def find(spec: str, given: Namespace | None = None) -> Function:
    """Import the module of a model, and return a function that makes the model.

    Args:
        spec: The name of the model.
        given: All options; without them, only modules of brainstate are accepted.
    """
    if _is_nir(spec):
        return lambda: _load_nir(spec)
    found, args, kwargs = _look_up(spec)
    is_model = frameworks.is_model if given else frameworks.is_brainstate
    is_step = given is not None and given.params is not None
    if not callable(found) and not is_model(found):
        raise UsageError(f"`{spec}` is neither a model nor something that makes one, but {type(found)}.")
    if given is not None and is_step and given.carry is None:
        raise UsageError("A step function needs both --params and --carry.")

    def make() -> Model:
        if is_model(found) or is_step:
            return found
        try:
            model = frameworks.call(found, given, args, **kwargs)
        except TypeError as error:
            if raising_line(error):  # raised by the user's code, not by the call
                raise
            takes = "takes --params NAME --carry NAME" if given else "is trained with `braintrace.online`"
            raise UsageError(
                f"`{spec}` cannot be called to make a model: {error}. Give arguments in the name: {SPEC}. A "
                f"plain step function {takes}."
            ) from error
        if not is_model(model):
            other = " or another that `--help` names" if given else ""
            raise UsageError(f"`{spec}` made {type(model)}, not a `brainstate.nn.Module`{other}.")
        return model

    return make


def _is_nir(spec: str) -> bool:
    return spec.partition("(")[0].endswith(".nir")


def _load_nir(spec: str) -> Model:
    """The network of a NIR file: `net.nir`, or with arguments of `load`, `net.nir(dt=1e-4)`."""
    from .. import nir

    path, bracket, arguments = spec.partition("(")
    _, args, kwargs = parse_call(f"load{bracket}{arguments}")
    try:
        return nir.load(path, *args, **kwargs)
    except (TypeError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error


def _look_up(spec: str) -> tuple[Model, list[object], Options]:
    """Import the object of a name; return it, and the arguments after the name."""
    where, colon, what = spec.partition(":")
    if not colon or not where or not what:
        raise UsageError(f"{spec!r} does not name a model: write {SPEC}.")
    module = _module(where)
    name, args, kwargs = parse_call(what)
    found: Model = module
    for part in name.split("."):
        if not hasattr(found, part):
            offered = _offered(module)
            hint = f" It has {', '.join(offered[:8])}." if offered else ""
            raise UsageError(f"`{where}` has no `{name}`.{hint}")
        found = getattr(found, part)
    return found, args, kwargs


def _offered(module: ModuleType) -> list[str]:
    """Return the public names of a module, its models first."""
    import brainstate

    own = {n: v for n, v in vars(module).items() if n[0] != "_" and not isinstance(v, ModuleType)}
    own = {n: v for n, v in own.items() if not callable(v) or inspect.getmodule(v) is module}
    models = {n for n, v in own.items() if isinstance(v, type) and issubclass(v, brainstate.nn.Module)}
    return sorted(own, key=lambda name: name not in models)


def _module(where: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # finds the user's modules, as `python -m` does
    try:
        if where.endswith(".py"):
            path = Path(where)
            if not path.exists():
                raise UsageError(f"There is no file {where}.")
            known = sys.modules.get(path.stem)
            if known is not None and getattr(known, "__file__", None) == os.path.abspath(path):
                return known  # a second import would make a second class of the same name
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


def parse_call(what: str) -> tuple[str, list[object], Options]:
    """Return a dotted name, and the arguments of a call, which are Python literals."""
    try:
        tree = ast.parse(what, mode="eval").body
        if not isinstance(tree, ast.Call):
            return ast.unparse(tree) if isinstance(tree, ast.Name | ast.Attribute) else "", [], {}
        args = [ast.literal_eval(a) for a in tree.args]
        kwargs = {k.arg: ast.literal_eval(k.value) for k in tree.keywords if k.arg}
        return ast.unparse(tree.func), args, kwargs
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{what!r} is not a name, or a name with literal arguments in brackets.") from error
