"""`braintrace compare`: compare learning rules on a model and data, and recommend one."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from . import frameworks, models
from .inspection import distance, random_data
from .options import UsageError, add_command, add_options, count
from .rules import DIAL, parse_rules
from .train import DEFAULTS, check_folder, make_optimizer, make_task, task_option

if TYPE_CHECKING:
    from .._types import Function, PyTree
    from .options import Commands

ABOUT = """\
Compare learning rules on a model: how close their gradients are to the exact one, time, memory and, with
--train, how well they learn. Recommends one.

The data are those of a --task, arrays `xs` and `ys` (time, batch, ...) in a file of numpy (--data; integers
are classes), or random, with the mean squared distance of the outputs from random targets as the loss.

Writes comparison.html, comparison.json and frontier.svg and .png to --out.

examples:
  braintrace compare my_pkg.my_mod:Model --input 28 --batch-size 4 --length 20
  braintrace compare my_pkg.my_mod:Model --task digits_rows --train 100 --out runs/rules
  braintrace compare my_pkg.my_mod:Model --data mine.npz --rules d_rtrl 'd_rtrl(window=5, rank=4)' rtrl
  braintrace compare --task copying --cell lstm --hidden 32
"""


def add_to(commands: Commands) -> None:
    short = "compare rules by gradient, time, memory and learning, and recommend one"
    parser = add_command(commands, "compare", short, ABOUT, run, epilog=frameworks.KINDS)
    models.add_arguments(parser, required=False)
    usual = {name: DEFAULTS[name] for name in ("learning_rate", "optimizer")}
    names = "rules task set data cell hidden length chunk_size learning_rate optimizer out"
    add_options(parser, names, set=[], hidden=32, length=50, **usual)
    add_options(parser, " ".join(DIAL), **DIAL)
    parser.add_argument("--train", type=count, default=0, metavar="N", help="train each rule for N updates")


@dataclass(frozen=True)
class Data:
    """Sequences, and the loss of outputs."""

    xs: PyTree
    ys: list[PyTree]
    mask: PyTree
    loss: Function  # of outputs and targets
    batches: Function | None = None  # to train on; the sequences themselves by default
    random: bool = False


def run(given: Namespace) -> int:
    if given.out is not None:
        check_folder(given.out)
    rules = parse_rules(given.rules)
    if given.task and given.data:
        raise UsageError("Give a --task or --data, not both.")
    with _opened(given) as (model, data):
        train = None
        if given.train:
            chosen = {**DEFAULTS, "learning_rate": given.learning_rate, "optimizer": given.optimizer}
            train = {"updates": given.train, "optimizer": make_optimizer(chosen), "batches": data.batches}
        more = {"rules": rules, "train": train, "mask": data.mask, "chunk_size": given.chunk_size}
        more |= {name: getattr(given, name) for name in DIAL}
        found = model.learner.compare(data.loss, model.params, model.carry, data.xs, *data.ys, **more)
    found = replace(found, random=data.random)
    found.show()
    if given.out is not None:
        names = ["comparison.html", "comparison.json", "frontier.svg"]
        names += ["frontier.png"] if importlib.util.find_spec("matplotlib") else []
        for name in names:
            found.save(given.out / name)
        print(f"results are in {given.out}: open {given.out / 'comparison.html'}")
    return 0


@contextmanager
def _opened(given: Namespace) -> Iterator[tuple[frameworks.Model, Data]]:
    """Yield the model and the data."""
    make, data = None, None
    if given.task:
        make, data = _of_task(given)
    elif given.data:
        data = _of_file(given)
    elif not (given.model and given.input):
        raise UsageError("There are no data: give a model with --input, --task or --data; or a --task alone.")
    if data and given.model and given.cell:
        raise UsageError("Give a --cell or a model, not both.")
    if not given.model and make is None:
        raise UsageError("--data needs a model: braintrace compare my_mod:Model --data FILE.")
    with models.build(given, None if given.model else make) as (model, inputs):
        yield model, data or Data(*random_data(given, model, inputs), None, distance, random=True)


def _of_task(given: Namespace) -> tuple[Function, Data]:
    """Return a function that makes a net for a task, and data of the task."""
    from .nets import make_net
    from .tasks import check_name

    check_name(given.task)
    task = make_task({"task": given.task, "set": dict(map(task_option, given.set))})
    cell = given.cell or ("alif" if task.spiking else "gru")
    given.batch_size = given.batch_size or DEFAULTS["batch_size"]
    given.input = [str(task.inputs)]
    batch = lambda number: task.batch(given.seed, number, given.batch_size)
    xs, ys, mask = batch(0)
    make = lambda: make_net(cell, task, given.hidden)
    return make, Data(xs, [ys], mask, task.loss, lambda epoch: [batch(epoch)])


def _of_file(given: Namespace) -> Data:
    import jax.numpy as jnp
    import numpy as np

    from ..tasks.task import cross_entropy, squared_error

    try:
        with np.load(given.data) as found:
            xs, ys, mask = (found.get(k) for k in ("xs", "ys", "mask"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--data {given.data}: {error}") from error
    if xs is None or ys is None or xs.ndim < 2 or xs.shape[:2] != ys.shape[:2]:
        raise UsageError(f"--data {given.data}: it needs arrays `xs` and `ys`, both (time, batch, ...).")
    given.batch_size = xs.shape[1]
    given.input, given.dtype = [",".join(map(str, xs.shape[2:]))], [str(jnp.asarray(xs[:1]).dtype)]
    return Data(xs, [ys], mask, cross_entropy if np.issubdtype(ys.dtype, np.integer) else squared_error)
