"""The parser of `braintrace`, and its exit codes: 0 done, 1 failed, 2 invalid usage, 130 interrupted."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from .._lines import raising_line
from . import bench, compare, completion, devices, inspection, tasks, train
from .options import UsageError

if TYPE_CHECKING:
    from .._types import Value

ABOUT = """\
Train recurrent and spiking networks online, forward in time, with eligibility traces.

examples:
  braintrace tasks                                   list the tasks
  braintrace train --task copying --rule d_rtrl      learn one; results go to runs/
  braintrace graph my_pkg.my_mod:Model --input 28    how each parameter of your model is learned
  braintrace check my_pkg.my_mod:Model --input 28    compare its online gradient with BPTT
  braintrace compare my_pkg.my_mod:Model --input 28  compare rules by gradient, time and memory
  braintrace plan  my_pkg.my_mod:Model --input 28 --batch-size 32 --length 1000

`braintrace COMMAND --help` shows options and examples.
"""


class Parser(argparse.ArgumentParser):
    """A parser whose messages suggest the closest option or command."""

    def parse_known_args(self, args: Value = None, namespace: Value = None) -> Value:
        self._typed = [*(sys.argv[1:] if args is None else args)]
        found, rest = super().parse_known_args(self._typed, namespace)
        if rest:
            self.error(f"unknown arguments: {' '.join(rest)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        known = [o for a in self._actions for o in (a.option_strings or a.choices or ())]
        near = []
        for word in (typed.partition("=")[0] for typed in self._typed):
            if not any(k.startswith(word) for k in known):  # an option may be abbreviated
                alike = [k for k in known if k.startswith("-") == word.startswith("-")]
                near += difflib.get_close_matches(word, alike, 1)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        self.exit(2, f"{self.prog}: {message}{hint}\n`{self.prog} --help` has examples.\n")


def make_parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="braintrace", description=ABOUT, formatter_class=form)
    about = "print the versions of this package and its dependencies, and exit"
    parser.add_argument("--version", action="store_true", help=about)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for command in (train, inspection, compare, bench, tasks, completion):
        command.add_to(commands)
    for sub in commands.choices.values():
        sub.add_argument("--debug", action="store_true", default=False, help="show the traceback")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = make_parser()
    try:
        given = parser.parse_args(argv)
    except SystemExit as stop:  # of argparse: 0 after --help, 2 after a mistake
        return int(stop.code or 0)
    if given.version:
        print(_versions())
        return 0
    if given.command is None:
        parser.print_help()
        return 2
    try:
        if given.command not in ("tasks", "completion"):
            if "jax" not in sys.modules:  # which takes seconds to import
                print("braintrace: loading JAX ...", file=sys.stderr, flush=True)
            from .. import _precision as _precision
        code: int = given.run(given)
        return code
    except KeyboardInterrupt:
        print("braintrace: interrupted", file=sys.stderr)
        return _ended(130)
    except BrokenPipeError:  # the reader of a pipe has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if given.debug:
            _ended(1, error)
            raise
        return _ended(_report(error, given))


def _ended(code: int, error: Exception | None = None) -> int:
    """Return the exit code of a failed command; a process of several ends here."""
    if "jax" in sys.modules:  # else no process has joined
        devices.leave(code, error)
    return code


def _report(error: Exception, given: Namespace) -> int:
    command, message = given.command, str(error) or type(error).__name__
    if line := raising_line(error):  # raised by the user's code
        message = f"{type(error).__name__}: {message} ({line})"
    if getattr(given, "model", None) and not isinstance(error, UsageError):
        message = f"{given.model}: {message}"
    print(f"braintrace {command}: {message}", file=sys.stderr)
    if isinstance(error, UsageError):
        print(f"`braintrace {command} --help` has examples.", file=sys.stderr)
        return 2
    print("(`--debug` shows where this happened.)", file=sys.stderr)
    return 1


def _versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    def found(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    names = ("braintrace", "jax", "brainstate", "optax", "orbax-checkpoint", "matplotlib")
    return "\n".join(f"{name} {found(name)}" for name in names)
