"""`braintrace graph`, `check` and `plan`: inspect a model before training it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import devices, frameworks, models
from .options import add_command, add_options
from .options import path as path_of
from .rules import DIAL, learner_of, parse_rules

if TYPE_CHECKING:
    from .._types import Array, Aval, PyTree
    from .options import Commands

GRAPH = """\
Show how each parameter is learned: groups of hidden states, the weights that feed them, and excluded weights.

examples:
  braintrace graph my_pkg.my_mod:Model --input 1,28,28
  braintrace graph my_file.py:Net --input 3 --batch-size 16 --html graph.html
  braintrace graph 'braintrace.nn:GRUCell(3, 32)' --input 3 --dot graph.dot
  braintrace graph my_mod:step --params params --carry carry --input 3
  braintrace graph 'flax.nnx:GRUCell(3, 32)' --input 3 --batch-size 16
"""

CHECK = """\
Compare the online gradient with that of back-propagation through time, parameter by parameter.

The inputs and targets are random; the loss is the mean squared distance of the outputs from the targets.
The exit code is 1 if the gradients differ for another reason than the rule or, with --exact, if they differ.

examples:
  braintrace check 'braintrace.nn:LRUCell(3, 8)' --input 3
  braintrace check my_pkg.my_mod:Model --input 28 --batch-size 4 --length 20 --rule es_d_rtrl
  braintrace check my_pkg.my_mod:Model --input 28 --length 20 --window 5 --rank 4
  braintrace check my_pkg.my_mod:Model --input 28 --rule 'eprop(kappa_filter_decay=0.9)'
  braintrace check my_pkg.my_mod:Model --input 28 --exact && echo exact
"""

PLAN = """\
Estimate the memory and operations of each rule and of BPTT, before anything is allocated.

examples:
  braintrace plan my_pkg.my_mod:Model --input 28 --batch-size 32 --length 1000
  braintrace plan my_pkg.my_mod:Model --input 28 --batch-size 32 --length 1000 --window 10
  braintrace plan my_pkg.my_mod:Model --input 28 --rules d_rtrl 'd_rtrl(window=5, rank=4)' snap bptt
  braintrace plan my_pkg.my_mod:Model --input 28 --batch-size 32 --length 1000 --devices 8 --model-parallel 2
"""


def add_to(commands: Commands) -> None:
    parsers = {}
    for name, about, run, short in (
        ("graph", GRAPH, graph, "show how each parameter of a model is learned"),
        ("check", CHECK, check, "compare a model's online gradient with that of BPTT"),
        ("plan", PLAN, show_plan, "estimate the memory and operations of each rule"),
    ):
        parser = parsers[name] = add_command(commands, name, short, about, run, epilog=frameworks.KINDS)
        models.add_arguments(parser)
        add_options(parser, " ".join(DIAL), **DIAL)
    for name in ("graph", "check"):
        add_options(parsers[name], "rule", rule="d_rtrl")
    for kind, content in {"html": "an interactive page", "svg": "a drawing", "dot": "for graphviz"}.items():
        parsers["graph"].add_argument(f"--{kind}", type=path_of, metavar="FILE", help=f"write {content}")
    add_options(parsers["check"], "length chunk_size", length=10)
    parsers["check"].add_argument("--exact", action="store_true", help="fail unless the gradients are equal")
    add_options(parsers["plan"], "length rules", length=100)
    devices.add_counts(parsers["plan"])


def graph(given: Namespace) -> int:
    from .._report.markup import write

    with _with_rule(given) as (model, _):
        report = model.learner.report
        report.show()
        for kind in ("html", "svg", "dot"):
            path: Path | None = getattr(given, kind)
            if path is not None:
                print(f"wrote {write(path, getattr(report, f'to_{kind}')())}")
    return 0


def check(given: Namespace) -> int:
    with _with_rule(given) as (model, inputs):
        xs, ys = random_data(given, model, inputs)
        found = model.learner.check(distance, model.params, model.carry, xs, *ys, chunk_size=given.chunk_size)
    found.show()
    return 0 if (found.equal if given.exact else found.ok) else 1


def show_plan(given: Namespace) -> int:
    more = {name: getattr(given, name) for name in DIAL}
    if rules := parse_rules(given.rules):
        more["rules"] = rules
    with devices.mesh_of(given) as mesh, models.build(given) as (model, _):
        model.learner.plan(given.length, mesh=mesh, **more).show()
    return 0


@contextmanager
def _with_rule(given: Namespace) -> Iterator[tuple[frameworks.Model, list[Aval]]]:
    """Yield the model under the rule of the options, and the shapes of its inputs."""
    from .._learners.rule_choice import RuleChoice

    choice = RuleChoice(given.rule, *learner_of(given.rule, vars(given)))
    with models.build(given) as (model, inputs):
        yield replace(model, learner=choice.on(model.learner)), inputs


def random_data(given: Namespace, model: frameworks.Model, inputs: list[Aval]) -> tuple[PyTree, PyTree]:
    """Draw sequences of inputs, an array or a tuple of several, and of targets for each output."""
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(given.seed)

    def draw(like: Aval) -> Array:
        shape = (given.length, *like.shape)
        if jnp.issubdtype(like.dtype, jnp.integer):
            return jnp.asarray(rng.integers(2, size=shape), like.dtype)
        return jnp.asarray(rng.normal(size=shape), like.dtype)

    xs = tuple(map(draw, inputs))
    return xs[0] if len(xs) == 1 else xs, list(map(draw, float_outputs(model.learner.function.outputs)))


def distance(outputs: PyTree, *targets: Array) -> Array:
    """Return the mean squared distance of outputs from targets."""
    import jax.numpy as jnp

    found = float_outputs(outputs)
    return jnp.stack([jnp.mean(jnp.abs(a - b) ** 2) for a, b in zip(found, targets, strict=True)]).mean()


def float_outputs(outputs: PyTree) -> list[Array]:
    """Return the inexact outputs, without units, from which a loss can be computed."""
    import jax
    import jax.numpy as jnp

    return [a for a in jax.tree.leaves(outputs) if jnp.issubdtype(a.dtype, jnp.inexact)]
