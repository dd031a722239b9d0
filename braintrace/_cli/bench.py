"""`braintrace bench`: time the rules and BPTT on this machine, for a network of a given size."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from . import frameworks
from .models import time_step
from .options import add_command, add_options
from .rules import learner_of, parse_rule

if TYPE_CHECKING:
    from .options import Commands

OUTPUTS = 8

ABOUT = """\
Time the rules and BPTT on this machine, for a network of a given size and random data.

examples:
  braintrace bench
  braintrace bench --cell lstm --hidden 256 --batch-size 64 --length 200
  braintrace bench --rules eprop 'snap(n=1)' 'ottt(leak=0.9)'
"""


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "bench", "time the rules and BPTT on this machine", ABOUT, run)
    parser.set_defaults(seed=0)
    sizes = {"inputs": 32, "hidden": 128, "batch_size": 16, "length": 50}
    add_options(parser, "cell inputs hidden batch_size length rules", cell="gru", **sizes)


def run(given: Namespace) -> int:
    with time_step():
        _compare(given)
    return 0


def _compare(given: Namespace) -> None:
    """Print a table of gradients, times and memory for one sequence of random data."""
    import brainstate
    import jax
    import numpy as np

    from ..tasks.task import squared_error
    from .nets import make_net

    rng = np.random.default_rng(given.seed)
    shape = (given.length, given.batch_size, given.inputs)
    spiking = given.cell in ("lif", "alif")
    xs = (rng.random(shape) < 0.1 if spiking else rng.normal(size=shape)).astype(np.float32)
    ys = rng.normal(size=(*shape[:2], OUTPUTS)).astype(np.float32)
    sizes = Namespace(inputs=given.inputs, outputs=OUTPUTS, length=given.length)
    sizes.batch = lambda *_: (xs, ys)
    rules = None
    if given.rules:
        options = {"num_targets": OUTPUTS, "modulator": 1.0}
        rules = [(parse_rule(text, "--rules")[0], learner_of(text, {}, **options)[1]) for text in given.rules]
    brainstate.random.seed(given.seed)
    net, x = make_net(given.cell, sizes, given.hidden), jax.ShapeDtypeStruct(shape[1:], xs.dtype)
    model = frameworks.read(net, None, None, [x], given)
    found = model.learner.compare(squared_error, model.params, model.carry, xs, ys, rules=rules)
    print(f"{given.cell} {given.inputs} -> {given.hidden}, batches of {given.batch_size}")
    found.table.show()
