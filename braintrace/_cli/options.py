"""Commands, their options and errors of usage: an option has the same name and meaning in every command."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .._types import Option, Options

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


SPEC = "module:Model, file.py:Model, net.nir or, with arguments, 'module:Model(3, hidden=32)'"
# the names of `braintrace.compile` and the cells of nets.py, which take long to import
RULES = (
    "d_rtrl es_d_rtrl esd_rtrl pp_prop rtrl eprop e_prop rflo ostl_recurrent ostl_feedforward ottt otpe "
    "osttp s_tllr three_factor dni bptt snap uoro kf_rtrl"
).split()
CELLS = "gru lstm urlstm mgu rnn minimal cfn minigru minilstm lru lif alif".split()


class UsageError(Exception):
    """Invalid usage, reported without a traceback; exit code 2."""


def hint(name: str, known: Sequence[str]) -> str:
    """Suggest the known name that is closest to an unknown one, or list all of them."""
    near = difflib.get_close_matches(name.lower(), known, 1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."


def count(text: str, least: int = 0) -> int:
    if (value := int(text)) < least:
        raise argparse.ArgumentTypeError(f"{text} is not at least {least}")
    return value


def positive(text: str) -> int:
    return count(text, 1)


def window_size(text: str) -> int | str:
    """Parse a number of steps, or 'auto'."""
    return text if text == "auto" else count(text)


def path(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty")
    return Path(text)


OPTIONS: dict[str, Options] = {
    "rule": {
        "metavar": "RULE",
        "help": f"the learning rule, with options in brackets: 'rflo(leak=0.9)'; one of {', '.join(RULES)}",
    },
    "rules": {"nargs": "+", "metavar": "RULE", "help": "names, with options: 'd_rtrl(window=5, rank=4)'"},
    "window": {
        "type": window_size,
        "metavar": "K",
        "help": "back-propagate through windows of K steps, with traces for earlier ones; 0: single steps; "
        "'auto': the longest that fit into memory",
    },
    "rank": {"type": count, "metavar": "R", "help": "rank of a correction to the diagonal traces"},
    "basis": {"choices": ("balanced", "pushed"), "help": "how the basis of that correction is found"},
    "across": {"choices": ("layers",), "help": "keep the influence on the layers above a weight"},
    "chunk_size": {"type": positive, "metavar": "K", "help": "steps per backward pass; changes speed only"},
    "update_every": {"metavar": "K", "help": "time steps between updates, or 'sequence'"},
    "learning_rate": {"short": "--lr", "type": float, "help": "learning rate"},
    "optimizer": {"help": "one of Optax that takes a learning rate, or obgd"},
    "clip": {"type": float, "help": "largest global norm of a gradient; 0 for no limit"},
    "task": {"help": "the task to learn; `braintrace tasks` lists them"},
    "set": {"action": "append", "metavar": "NAME=VALUE", "help": "an option of the task, such as delay=20"},
    "data": {"type": path, "metavar": "FILE", "help": "a file of numpy (.npz): xs, ys and optionally mask"},
    "cell": {"choices": CELLS, "help": "the recurrent layer (default: gru, or alif where inputs are spikes)"},
    "hidden": {"type": positive, "help": "units"},
    "inputs": {"type": positive, "help": "inputs"},
    "length": {"type": positive, "help": "steps of a sequence"},
    "batches": {"type": positive, "help": "batches to train on"},
    "batch_size": {"type": positive, "help": "sequences in a batch"},
    "seed": {"type": int, "help": "seed of parameters and data"},
    "eval_every": {"type": positive, "metavar": "N", "help": "batches between evaluations"},
    "checkpoint_every": {"type": positive, "metavar": "N", "help": "batches between checkpoints"},
    "out": {"type": path, "metavar": "FOLDER", "help": "folder of the results"},
}


def add_command(
    commands: Commands, name: str, short: str, about: str, run: Callable[..., int], **options: Option
) -> argparse.ArgumentParser:
    """Add the parser of a command, which calls `run`."""
    form = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=short, description=about, formatter_class=form, **options
    )
    parser.set_defaults(run=run)
    return parser


def add_options(parser: argparse.ArgumentParser, names: str, **defaults: Option) -> None:
    """Add options of the table, with their defaults; a parser that suppresses defaults only states them."""
    for name in names.split():
        option = dict(OPTIONS[name])
        flags = [f"--{name.replace('_', '-')}", *filter(None, [option.pop("short", None)])]
        default = defaults.get(name)
        if default not in (None, [], {}):
            option["help"] += f" (default: {default})"
        if parser.argument_default is not argparse.SUPPRESS:
            option["default"] = default
        parser.add_argument(*flags, **option)
