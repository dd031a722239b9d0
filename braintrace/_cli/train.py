"""`braintrace train`: learn a task, and write curves, a report and checkpoints."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import math
import re
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from . import devices
from .options import OPTIONS, SPEC, UsageError, add_command, add_options
from .rules import DIAL, has_windows, learner_of

if TYPE_CHECKING:
    import optax

    from .._learners.stateful import ETraceAlgorithm
    from .._train.result import FitResult
    from .._types import Function, Mesh, Options, PyTree
    from ..tasks.task import Task
    from .options import Commands

DEFAULTS: Options = {
    "task": None,
    "set": {},
    "rule": "d_rtrl",
    **DIAL,
    "window": 10,  # of rules that have windows; 0 for single steps
    "cell": None,
    "model": None,
    "hidden": 64,
    "batches": 1000,
    "batch_size": 32,
    "learning_rate": 5e-3,
    "optimizer": "adam",
    "clip": 1.0,
    "update_every": "sequence",
    "chunk_size": 0,  # 0: chosen by the memory that is there
    "eval_every": 50,
    "checkpoint_every": 100,
    "seed": 0,
    "to_target": False,
}
EPOCH = 100  # batches; a constant, so that a resumed run finds the batch at which it stopped
MAY_CHANGE = {"batches", "eval_every", "checkpoint_every", "to_target", "chunk_size"}  # in a resumed run

ABOUT = """\
Learn a task with an online rule, or with BPTT.

Writes metrics.jsonl, curves.svg and .png, report.html, config.json and checkpoints to --out (default:
runs/TASK-CELL-RULE-SEED). Ctrl-C saves; --resume continues a run, bit for bit. `braintrace tasks` lists the
tasks.

examples:
  braintrace train --task copying
  braintrace train --task copying --set delay=10 --set symbols=5 --cell lstm --hidden 128 --to-target
  braintrace train --task mackey_glass --window 5 --rank 4              closer to BPTT, in fixed memory
  braintrace train --task copying --window 0                            single steps
  braintrace train --task evidence --rule es_d_rtrl --cell alif --batches 200
  braintrace train --task evidence --rule 'ottt(leak=0.9)' --cell lif
  braintrace train --task mackey_glass --update-every 1 --lr 1e-3       an update at every time step
  braintrace train --task digits_rows --model my_mod:Net                your own model
  braintrace train --out runs/copying-gru-d_rtrl-0 --resume --batches 2000
  braintrace train --task copying --devices 8 --model-parallel 2        data parallel 4, model parallel 2
  braintrace train --task copying --coordinator node0:1234 --processes 2 --process 0    the first of two
  srun braintrace train --task copying --distributed                    all processes of a SLURM job
"""


def add_to(commands: Commands) -> None:
    short = "learn a task with an online rule, or with BPTT"
    # no defaults here, so that options that were typed are known
    parser = add_command(commands, "train", short, ABOUT, run, argument_default=argparse.SUPPRESS)
    names = [name for name in DEFAULTS if name in OPTIONS]
    add_options(parser, " ".join([*names, "out"]), **{**DEFAULTS, "chunk_size": None})
    add = parser.add_argument
    add("--model", metavar="MODULE:MODEL", help=f"your own model instead of a cell: {SPEC}")
    add("--to-target", action="store_true", help="stop when the task's target is reached")
    add("--resume", action="store_true", help="continue the run in --out")
    add("--trust", action="store_true", help="with --resume: import the model that the run folder names")
    devices.add_arguments(parser)


def run(given: Namespace) -> int:
    with devices.mesh_of(given) as mesh:
        return _run(given, mesh)


def _run(given: Namespace, mesh: Mesh | None) -> int:
    from .._train.checkpoint import locked
    from .models import find, time_step
    from .nets import make_net

    settings, out, resume = _settings(given)
    check_folder(out)
    if not resume and any((out / name).exists() for name in ("metrics.jsonl", "checkpoints")):
        raise UsageError(f"{out} holds an earlier run: continue it with --resume, or choose another --out.")
    if resume and not any((out / "checkpoints").glob("[0-9]*")):
        print(f"The run in {out} has no checkpoint yet: it starts from the beginning.")
    task = make_task(settings)
    own = settings["model"]
    if own and not hasattr(given, "model"):
        _check_trust(own, out, hasattr(given, "trust"))
    make = find(own) if own else lambda: make_net(settings["cell"], task, settings["hidden"])
    if mesh is not None:
        print(devices.describe(mesh))
    with time_step(), locked(out):
        result = train(settings, task, make, out, resume, mesh)
    if result.interrupted:
        again = f"braintrace train --out {out} --resume" + (f" --model {own!r}" if own else "")
        print(f"Interrupted after batch {result.batches}. Go on with: {again}")
        return 130
    return 0


def _check_trust(spec: str, out: Path, trusted: bool) -> None:
    """Refuse to import a model that only `config.json` names: without --trust, or from inside the folder."""
    where = spec.partition(":")[0]
    place = Path(where if where.endswith(".py") else where.replace(".", "/")).resolve()
    inside = place.is_relative_to(out.resolve())
    if inside or not trusted:
        where, add = (", inside of this folder", "") if inside else ("", ", or add --trust")
        raise UsageError(
            f"--resume: {out / 'config.json'} names the model {spec!r}{where}, whose code would be run. If "
            f"you trust it, name it yourself: --model {spec!r}{add}."
        )


def train(
    settings: Options, task: Task, make: Function, out: Path, resume: bool, mesh: Mesh | None = None
) -> FitResult:
    """Train with these settings, and write the results to `out`."""
    import brainstate
    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    import braintrace

    from .._train.batches import Batch
    from .._train.sharding import Layout

    size, seed = settings["batch_size"], settings["seed"]
    brainstate.random.seed(seed)
    rule, options = learner_of(settings["rule"], settings, num_targets=task.outputs)
    learner = rule(make(), **options)
    brainstate.nn.init_all_states(learner.model, batch_size=size)
    learner.compile_graph(jnp.zeros((size, task.inputs)))
    learner.show_graph()
    print(f"\n{task.name}: {task.description}. Target: {task.metric_name} {task.target:.3g}.\n")

    multihost_utils.sync_global_devices("every process has read the folder")
    if jax.process_index() == 0:
        out.mkdir(parents=True, exist_ok=True)
        fresh = out / "config.json.new"  # a killed run leaves a whole file
        fresh.write_text(json.dumps(settings, indent=1) + "\n")
        fresh.replace(out / "config.json")
    # every process draws whole batches, so that the data do not depend on the number of processes
    placed: Function = lambda batch: batch if mesh is None else Layout.of(mesh).whole_batch(Batch(*batch))
    every, name = settings["update_every"], task.metric_name.replace(" ", "_")
    result = braintrace.fit(
        learner,
        lambda epoch: (placed(task.batch(seed, epoch * EPOCH + i, size)) for i in range(EPOCH)),
        _step(learner, task),
        make_optimizer(settings),
        max_batches=settings["batches"],
        update_every=every if every == "sequence" else int(every),
        chunk_size=settings["chunk_size"] or None,
        metrics={name: task.metric},
        eval_batches=lambda _: map(placed, task.batches(seed, min(size, task.test_size), "test")),
        eval_every=settings["eval_every"],
        stop_when=(lambda row: task.reached(row[name])) if settings["to_target"] else None,
        checkpoint_dir=out / "checkpoints",
        checkpoint_every=settings["checkpoint_every"],
        metrics_file=out / "metrics.jsonl",
        resume=resume,
        mesh=mesh,
    )
    if jax.process_index() == 0:
        _write(result, learner, task, name, settings, out)
    return result


def _step(learner: ETraceAlgorithm, task: Task) -> Function:
    """Return the loss of a step, which gives the target to rules that take it."""
    import jax

    takes_target = "target" in learner.rule.signal.takes

    def step(x: PyTree, y: PyTree) -> PyTree:
        target = jax.nn.one_hot(y, task.outputs) if y.ndim == 1 else y
        signal = {"target": target} if takes_target else {}
        return task.step(lambda x: learner(x, **signal))(x, y)

    return step


def _write(
    result: FitResult, learner: ETraceAlgorithm, task: Task, name: str, settings: Options, out: Path
) -> None:
    """Write the curves and, for a finished run, the report; print the score."""
    from .._report.tables import title_of
    from .._train.curves import save_curves
    from .._train.report_page import write_report

    rule = title_of(type(learner).__name__, settings["window"], settings["rank"])
    runs, targets = {rule: result}, {name: task.target}
    save_curves(runs, out / "curves.svg", targets)
    if result.interrupted:
        return
    if importlib.util.find_spec("matplotlib"):
        save_curves(runs, out / "curves.png", targets)
    write_report(
        out / "report.html",
        runs,
        learner,
        title=f"{task.name}: {task.description}",
        subtitle=f"Learned with {rule}. {task.reference}",
        target=(name, task.target, task.higher_is_better),
        settings=settings,
    )
    score = result.metrics[name]
    found = "reached" if task.reached(score) else "not reached"
    print(f"{task.metric_name} {score:.4g} after {result.batches} batches; target {task.target:.3g} {found}")
    print(f"results are in {out}: open {out / 'report.html'}")


def _settings(given: Namespace) -> tuple[Options, Path, bool]:
    """Return the settings (typed, else of the resumed run, else default), the folder, whether to resume."""
    typed = {k: v for k, v in vars(given).items() if k in DEFAULTS}
    if "set" in typed:
        typed["set"] = dict(map(task_option, typed["set"]))
    resume = getattr(given, "resume", False)
    out: Path | None = getattr(given, "out", None)
    stored: Options = {}
    if resume and out is not None:
        stored = _stored(out)
        for name, value in typed.items():
            if name not in MAY_CHANGE and value != stored[name]:
                raise UsageError(
                    f"The run in {out} has {name} {stored[name]!r}; it cannot go on with {value!r}."
                )
    settings = {**DEFAULTS, **stored, **typed}
    if "window" not in {*stored, *typed} and not has_windows(settings["rule"]):
        settings["window"] = 0
    if settings["task"] is None:
        if resume:
            raise UsageError("--resume needs --out FOLDER, the folder of the run to continue.")
        raise UsageError("Choose what to learn, with --task; `braintrace tasks` lists the tasks.")
    _check(settings)
    if out is None:
        what = "own" if settings["model"] else settings["cell"]
        turned = [f"{name}{typed[name]}" for name in DIAL if name in typed]
        chosen = re.sub(r"\W+", "-", settings["rule"].replace("=", "")).strip("-")
        parts = [settings["task"], what, chosen, *turned, str(settings["seed"])]
        out = Path("runs") / "-".join(parts)
        if resume:
            given.out = out
            return _settings(given)
    return settings, out, resume


def _stored(out: Path) -> Options:
    """Return the settings that the run in a folder was started with."""
    check_folder(out)
    file = out / "config.json"
    if not file.exists():
        raise UsageError(f"--resume: there is no run in {out}. Without --resume, a new one starts there.")
    try:
        stored = {**DEFAULTS, "window": 0, **json.loads(file.read_text())}
        if unknown := stored.keys() - DEFAULTS.keys():
            raise ValueError(f"unknown setting {min(unknown)!r}")
        for name, usual in DEFAULTS.items():
            if not isinstance(stored[name], str | None if usual is None else type(usual)):
                raise TypeError(f"{name} is {stored[name]!r}")
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(
            f"--resume: {file} is damaged ({error}). Repair it, or start a new run with another --out."
        ) from error
    return stored


def check_folder(out: Path) -> None:
    found = next(p for p in (out, *out.absolute().parents) if p.exists())
    if not found.is_dir():
        raise UsageError(f"--out {out}: {found} is a file; give a folder, which may be new.")


def _check(settings: Options) -> None:
    from .tasks import check_name

    if not 0 < (rate := settings["learning_rate"]) < math.inf:
        usual = DEFAULTS["learning_rate"]
        raise UsageError(f"--lr is a learning rate above 0, such as {usual}, not {rate}.")
    if not 0 <= settings["clip"] < math.inf:
        raise UsageError(f"--clip is above 0, or 0 for no limit, not {settings['clip']}.")
    if settings["seed"] < 0:
        raise UsageError(f"--seed is 0 or more, not {settings['seed']}.")
    check_name(settings["task"])
    learner_of(settings["rule"], settings, num_targets=1)
    if settings["model"] and settings["cell"]:
        raise UsageError("Give a --cell or a --model, not both.")
    if settings["cell"] is None and not settings["model"]:
        settings["cell"] = "alif" if make_task(settings).spiking else "gru"
    every = settings["update_every"]
    if every != "sequence" and not (str(every).isdigit() and int(every) >= 1):
        raise UsageError(f"--update-every is `sequence` or a number of time steps, not {every!r}.")
    make_optimizer(settings)


def make_task(settings: Options) -> Task:
    from .. import tasks

    try:
        return tasks.get(settings["task"], **settings["set"])
    except ValueError as error:
        raise UsageError(f"--set: {error}") from error


def task_option(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set takes NAME=VALUE, such as delay=20, not {text!r}.")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def make_optimizer(settings: Options) -> optax.GradientTransformation:
    from .._train.optimizers import optimizer_by_name

    try:
        return optimizer_by_name(settings["optimizer"], settings["learning_rate"], settings["clip"])
    except ValueError as error:
        raise UsageError(f"--optimizer: {error}") from error
