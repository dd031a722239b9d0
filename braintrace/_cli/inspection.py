"""`braintrace graph`, `check` and `plan`: look at a model before spending a night on it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import devices, functions, models, rules
from .common import add_command

# what `braintrace.plan` knows, the usual ones first
PLANNED = {n.lower(): n for n in ("D_RTRL", "ES_D_RTRL", "RTRL", "BPTT", "SnAp", "UORO", "KF_RTRL")}

GRAPH = """\
Show what is learned how: groups of hidden states, the weights that feed them, and what is left out.

examples:
  braintrace graph my_pkg.my_mod:Model --input 1,28,28
  braintrace graph my_file.py:Net --input 3 --batch-size 16 --html graph.html
  braintrace graph 'braintrace.nn:GRUCell(3, 32)' --input 3 --dot graph.dot
  braintrace graph my_mod:step --params params --carry carry --input 3
  braintrace graph 'flax.nnx:GRUCell(3, 32)' --input 3 --batch-size 16
"""

CHECK = """\
Compare the online gradient with that of back-propagation through time, parameter by parameter.

The inputs and targets are random; the loss is the squared distance of the outputs from the targets.
Exit code 1 where the two differ for another reason than the rule's, or, with --exact, where they differ.

examples:
  braintrace check 'braintrace.nn:LRUCell(3, 8)' --input 3
  braintrace check my_pkg.my_mod:Model --input 28 --batch-size 4 --length 20 --rule es_d_rtrl
  braintrace check my_pkg.my_mod:Model --input 28 --length 20 --window 5 --rank 4
  braintrace check my_pkg.my_mod:Model --input 28 --rule 'eprop(kappa_filter_decay=0.9)'
  braintrace check my_pkg.my_mod:Model --input 28 --exact && echo exact
"""

PLAN = """\
What each rule and BPTT would need in memory and operations, before anything is allocated.

examples:
  braintrace plan my_pkg.my_mod:Model --input 28 --batch-size 32 --length 1000
  braintrace plan my_pkg.my_mod:Model --input 28 --batch-size 32 --length 1000 --window 10
  braintrace plan my_pkg.my_mod:Model --input 28 --batch-size 32 --length 1000 --devices 8 --model-parallel 2
"""


def add_to(commands: Any) -> None:
    for name, about, run, short in (
        ("graph", GRAPH, graph, "show what is learned how in a model"),
        ("check", CHECK, check, "compare a model's online gradient with that of BPTT"),
        ("plan", PLAN, show_plan, "what each rule would need in memory and operations"),
    ):
        parser = add_command(commands, name, short, about, run, epilog=functions.KINDS)
        models.add_arguments(parser)
        models.add_windows(parser)
        parser.set_defaults(window=0, rank=0)
        if name == "plan":
            devices.add_counts(parser)
            parser.add_argument(
                "--rules",
                nargs="+",
                choices=[*PLANNED],
                metavar="RULE",
                help=f"which of {', '.join(PLANNED)} (default: {' '.join([*PLANNED][:4])})",
            )
        if name != "plan":
            rules.add_argument(parser, "d_rtrl", "whose gradient")
            parser.set_defaults(rule="d_rtrl")
        if name == "graph":
            files = {"html": "an interactive page", "svg": "a drawing", "dot": "for graphviz"}
            for kind, what in files.items():
                parser.add_argument(f"--{kind}", type=models.path, metavar="FILE", help=f"write {what}")
        if name != "graph":
            length = 10 if name == "check" else 100
            about = f"steps of a sequence (default: {length})"
            parser.add_argument("--length", type=models.positive, default=length, help=about)
        if name == "check":
            parser.add_argument("--exact", action="store_true", help="fail unless the gradients are equal")


def graph(given: argparse.Namespace) -> int:
    with _learner(given) as (learner, _):
        report = learner.net.report if isinstance(learner, functions.Functions) else learner.report
        report.show()
        for kind in ("html", "svg", "dot"):
            path: Path | None = getattr(given, kind)
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(getattr(report, f"to_{kind}")(), encoding="utf-8")
                print(f"wrote {path}")
    return 0


def check(given: argparse.Namespace) -> int:
    from .._learners.gradient_check import check_gradients

    draw = drawing(given)
    with _learner(given) as (learner, inputs):
        xs = [draw(i) for i in inputs]
        if isinstance(learner, functions.Functions):
            ys = [draw(o) for o in floating(learner.net.function.outputs)]
            x = xs[0] if len(xs) == 1 else tuple(xs)
            found = learner.net.check(distance, learner.params, learner.carry, x, *ys)
        else:
            ys = [draw(o) for o in floating(outputs_of(learner.model, inputs))]
            step = lambda *slices: distance(learner(*slices[: len(xs)]), *slices[len(xs) :])
            found = check_gradients(learner, *xs, *ys, step_fn=step)
    found.show()
    return 0 if (found.equal if given.exact else found.ok) else 1


def show_plan(given: argparse.Namespace) -> int:
    from .._report.plan import plan

    more: dict[str, Any] = {"window": given.window or None, "rank": given.rank}
    more |= {"rules": [PLANNED[name] for name in given.rules]} if given.rules else {}
    with devices.mesh_of(given) as mesh, models.build(given) as (model, inputs):
        if isinstance(model, functions.Functions):
            model.net.plan(given.length, mesh=mesh, **more).show()
        else:
            plan(model, tuple(inputs), given.batch_size, given.length, mesh=mesh, **more).show()
    return 0


@contextmanager
def _learner(given: argparse.Namespace) -> Iterator[tuple[Any, list[Any]]]:
    """A compiled learner of the model that was asked for, or its functions."""
    import jax.numpy as jnp

    from .._train.candidates import Candidate

    make, options = rules.learner_of(given.rule, given.window, given.rank)
    with models.build(given) as (model, inputs):
        if isinstance(model, functions.Functions):
            rule, window = Candidate(given.rule, make, options).value()
            yield replace(model, net=model.net.with_rule(rule, window)), inputs
        else:
            learner = make(model, **options)
            learner.compile_graph(*[jnp.zeros(i.shape, i.dtype) for i in inputs])
            yield learner, inputs


def drawing(given: argparse.Namespace) -> Callable[[Any], Any]:
    """Random sequences for the shape of one step."""
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
    """The mean squared distance of outputs from targets."""
    import jax.numpy as jnp

    found = floating(outputs)
    return sum(jnp.mean(jnp.abs(a - b) ** 2) for a, b in zip(found, targets, strict=True)) / len(found)


def outputs_of(model: Any, inputs: list[Any]) -> Any:
    """The shapes of a model's outputs."""
    import jax

    from .._frontends.modules import step_of

    step = step_of(model, tuple(inputs), {})
    return jax.tree.unflatten(step.out_tree, step.closed_jaxpr.out_avals[: step.out_tree.num_leaves])


def floating(outputs: Any) -> list[Any]:
    """The outputs that a loss can be made of, without units."""
    import jax
    import jax.numpy as jnp

    return [a for a in jax.tree.leaves(outputs) if jnp.issubdtype(a.dtype, jnp.inexact)]
