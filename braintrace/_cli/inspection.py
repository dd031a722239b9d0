"""`braintrace graph`, `check` and `plan`: inspect a model before training it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import devices, frameworks, models
from .common import add_command
from .rule_options import DIAL, add_dial, add_rule, learner_of

# the rules that `braintrace.plan` knows, the default ones first
PLANNED = {n.lower(): n for n in ("D_RTRL", "ES_D_RTRL", "RTRL", "BPTT", "SnAp", "UORO", "KF_RTRL")}

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
  braintrace plan my_pkg.my_mod:Model --input 28 --batch-size 32 --length 1000 --devices 8 --model-parallel 2
"""


def add_to(commands: Any) -> None:
    parsers = {}
    for name, about, run, short in (
        ("graph", GRAPH, graph, "show how each parameter of a model is learned"),
        ("check", CHECK, check, "compare a model's online gradient with that of BPTT"),
        ("plan", PLAN, show_plan, "estimate the memory and operations of each rule"),
    ):
        parser = parsers[name] = add_command(commands, name, short, about, run, epilog=frameworks.KINDS)
        models.add_arguments(parser)
        add_dial(parser)
        parser.set_defaults(**DIAL)
    for name in ("graph", "check"):
        add_rule(parsers[name], "d_rtrl")
        parsers[name].set_defaults(rule="d_rtrl")
    for kind, content in {"html": "an interactive page", "svg": "a drawing", "dot": "for graphviz"}.items():
        parsers["graph"].add_argument(f"--{kind}", type=models.path, metavar="FILE", help=f"write {content}")
    for name, length in (("check", 10), ("plan", 100)):
        about = f"steps of a sequence (default: {length})"
        parsers[name].add_argument("--length", type=models.positive, default=length, help=about)
    add = parsers["check"].add_argument
    add("--chunk-size", type=models.positive, metavar="K", help="steps per backward pass; changes speed only")
    add("--exact", action="store_true", help="fail unless the gradients are equal")
    devices.add_counts(parsers["plan"])
    parsers["plan"].add_argument(
        "--rules",
        nargs="+",
        choices=[*PLANNED],
        metavar="RULE",
        help=f"some of {', '.join(PLANNED)} (default: {' '.join([*PLANNED][:4])})",
    )


def graph(given: argparse.Namespace) -> int:
    with _learner(given) as (learner, _):
        report = learner.net.report if isinstance(learner, frameworks.Functions) else learner.report
        report.show()
        for kind in ("html", "svg", "dot"):
            path: Path | None = getattr(given, kind)
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(getattr(report, f"to_{kind}")(), encoding="utf-8")
                print(f"wrote {path}")
    return 0


def check(given: argparse.Namespace) -> int:
    from .._report.check import check_gradients

    draw = random_sequences(given)
    with _learner(given) as (learner, inputs):
        xs = [draw(i) for i in inputs]
        if isinstance(learner, frameworks.Functions):
            ys = [draw(o) for o in float_outputs(learner.net.function.outputs)]
            x = xs[0] if len(xs) == 1 else tuple(xs)
            found = learner.net.check(
                distance, learner.params, learner.carry, x, *ys, chunk_size=given.chunk_size
            )
        else:
            ys = [draw(o) for o in float_outputs(outputs_of(learner.model, inputs))]
            step = lambda *slices: distance(learner(*slices[: len(xs)]), *slices[len(xs) :])
            found = check_gradients(learner, *xs, *ys, step_fn=step, chunk_size=given.chunk_size)
    found.show()
    return 0 if (found.equal if given.exact else found.ok) else 1


def show_plan(given: argparse.Namespace) -> int:
    from .._report.plan import plan

    more: dict[str, Any] = {"window": given.window or None, "rank": given.rank, "across": given.across}
    more |= {"basis": given.basis} if given.basis else {}
    more |= {"rules": [PLANNED[name] for name in given.rules]} if given.rules else {}
    with devices.mesh_of(given) as mesh, models.build(given) as (model, inputs):
        if isinstance(model, frameworks.Functions):
            model.net.plan(given.length, mesh=mesh, **more).show()
        else:
            plan(model, tuple(inputs), given.batch_size, given.length, mesh=mesh, **more).show()
    return 0


@contextmanager
def _learner(given: argparse.Namespace) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a compiled learner of the model, or its `Functions`, and the shapes of its inputs."""
    import jax.numpy as jnp

    from .._train.candidates import Candidate

    make, options = learner_of(given.rule, vars(given))
    with models.build(given) as (model, inputs):
        if isinstance(model, frameworks.Functions):
            rule, window = Candidate(given.rule, make, options).value()
            yield replace(model, net=model.net.with_rule(rule, window)), inputs
        else:
            learner = make(model, **options)
            learner.compile_graph(*[jnp.zeros(i.shape, i.dtype) for i in inputs])
            yield learner, inputs


def random_sequences(given: argparse.Namespace) -> Callable[[Any], Any]:
    """Return a function that draws a sequence for the shape of one step."""
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(given.seed)

    def draw(like: Any) -> Any:
        shape = (given.length, *like.shape)
        if jnp.issubdtype(like.dtype, jnp.integer):
            return jnp.asarray(rng.integers(2, size=shape), like.dtype)
        return jnp.asarray(rng.normal(size=shape), like.dtype)

    return draw


def distance(outputs: Any, *targets: Any) -> Any:
    """Return the mean squared distance of outputs from targets."""
    import jax.numpy as jnp

    found = float_outputs(outputs)
    return sum(jnp.mean(jnp.abs(a - b) ** 2) for a, b in zip(found, targets, strict=True)) / len(found)


def outputs_of(model: Any, inputs: list[Any]) -> Any:
    """Return the shapes of a model's outputs."""
    import jax

    from .._frontends.modules import step_of

    step = step_of(model, tuple(inputs), {})
    return jax.tree.unflatten(step.out_tree, step.closed_jaxpr.out_avals[: step.out_tree.num_leaves])


def float_outputs(outputs: Any) -> list[Any]:
    """Return the inexact outputs, without units, from which a loss can be computed."""
    import jax
    import jax.numpy as jnp

    return [a for a in jax.tree.leaves(outputs) if jnp.issubdtype(a.dtype, jnp.inexact)]
