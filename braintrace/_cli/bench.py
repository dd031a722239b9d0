"""`braintrace bench`: how long the rules take beside BPTT, here and for one's own sizes."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import rules
from .common import UsageError, add_command
from .models import positive, time_step
from .train import CELLS, DEFAULTS

WINDOW = DEFAULTS["window"]  # that of `braintrace train`

ABOUT = """\
Time the rules beside BPTT on this machine, for a net of a given size.

--suite runs the whole suite of benchmarks instead, which is in a checkout of the sources; what follows `--`
goes to it.

examples:
  braintrace bench
  braintrace bench --cell lstm --hidden 256 --batch-size 64 --length 200
  braintrace bench --rules eprop 'snap(n=1)' 'ottt(leak=0.9)'
  braintrace bench --suite -- --quick
"""


def add_to(commands: Any) -> None:
    parser = add_command(commands, "bench", "time the rules beside BPTT on this machine", ABOUT, run)
    parser.add_argument("--cell", choices=CELLS, default="gru", help="default: gru")
    sizes = {"inputs": 32, "hidden": 128, "batch-size": 16, "length": 50, "repeats": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=positive, default=default, help=f"default: {default}")
    parser.add_argument(
        "--rules",
        nargs="+",
        metavar="RULE",
        help="time these, with options in brackets (default: D_RTRL and ES_D_RTRL)",
    )
    parser.add_argument("--suite", action="store_true", help="run the benchmarks of a checkout")
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)


def run(given: argparse.Namespace) -> int:
    if given.suite:
        script = Path(__file__).parents[2] / "benchmarks" / "bench.py"
        if not script.exists():
            raise UsageError(
                "The suite does not come with the package: it is `benchmarks/` in a checkout of the sources. "
                "Without --suite, `braintrace bench` compares rules for one size."
            )
        return subprocess.run([sys.executable, str(script), *given.rest], check=False).returncode
    if given.rest:
        raise UsageError(f"Unknown argument {given.rest[0]!r}.")
    with time_step():
        compare(given)
    return 0


def compare(given: argparse.Namespace) -> None:
    """Print a table of times for one sequence."""
    import brainstate
    import jax
    import jax.numpy as jnp
    import numpy as np

    import braintrace

    from .._report.tables import Table
    from ..tasks.task import squared_error
    from .nets import make_net

    rng = np.random.default_rng(0)
    shape = (given.length, given.batch_size, given.inputs)
    spiking = given.cell in ("lif", "alif")
    xs = jnp.asarray(rng.random(shape) < 0.1 if spiking else rng.normal(size=shape), jnp.float32)
    ys = jnp.zeros((given.length, given.batch_size, 8))
    like = argparse.Namespace(inputs=given.inputs, outputs=8, length=given.length)
    like.batch = lambda *_: (xs, ys)

    def case(rule: Any, chunk_size: int | None = None, **options: Any) -> Any:
        brainstate.random.seed(0)
        learner = rule(make_net(given.cell, like, given.hidden), **options)
        brainstate.nn.init_all_states(learner.model, batch_size=given.batch_size)
        learner.compile_graph(xs[0])

        def gradient() -> Any:
            learner.reset_state(given.batch_size)
            step = lambda x, y: squared_error(learner(x, **rules.told(learner, y)), y)
            return learner.etrace_grad(xs, ys, step_fn=step, chunk_size=chunk_size, keep_traces=False)

        def forward() -> Any:
            learner.reset_model(batch_size=given.batch_size)
            return brainstate.transform.for_loop(learner.model, xs)

        return gradient, forward

    bptt, forward = case(braintrace.BPTT)
    cases = {"forward only": forward, "BPTT": bptt}
    if not given.rules:
        cases |= {
            "D_RTRL, automatic": case(braintrace.D_RTRL)[0],
            "D_RTRL, step by step": case(braintrace.D_RTRL, 1)[0],
            f"D_RTRL, windows of {WINDOW}": case(braintrace.D_RTRL, window=WINDOW)[0],
            "ES_D_RTRL, automatic": case(braintrace.ES_D_RTRL)[0],
            "ES_D_RTRL, step by step": case(braintrace.ES_D_RTRL, 1)[0],
        }
    for text in given.rules or ():
        make, options = rules.learner_of(text, 0, 0, num_targets=8, modulator=1.0)
        cases[text] = case(make, **options)[0]
    found = {name: _time(brainstate.transform.jit(f), given.repeats) for name, f in cases.items()}
    sizes = f"{given.inputs} -> {given.hidden}, batch {given.batch_size}, {given.length} steps"
    title = f"{given.cell} {sizes}, {jax.devices()[0].device_kind}"
    rows = [
        (name, f"{1e3 * best:.2f}", f"{best / found['BPTT'][1]:.2f}", f"{first - best:.2f}")
        for name, (first, best) in found.items()
    ]
    Table(title, ("rule", "ms per sequence", "of BPTT", "compile s"), rows).show()


def _time(function: Any, repeats: int) -> tuple[float, float]:
    """The first call, and the best of the others."""
    import jax

    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - began)
    return times[0], min(times[1:])
