"""Scores: the dial from D_RTRL over windows and rank to BPTT, on every task; gradients beside exact ones.

    python benchmarks/scores.py [--task NAME ...] [--column NAME ...] [--seeds 5] [--jobs 2] [--fresh]
    python benchmarks/scores.py --estimate          how long a run takes, by task and column
    python benchmarks/scores.py --gather FOLDER     take over results of another machine (--into there)

Each task runs as a process of its own and leaves `benchmarks/results/scores/NAME.json`, with a score for each
column and seed, written as soon as there is one; what is there already, with the same settings, is not run
again. So a long run may be stopped, and done in parts. The tables and the plot are in README.md beside it.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from score_table import Column, write

RESULTS = Path(__file__).parent / "results" / "scores"
COLUMNS = {
    "BPTT": Column("BPTT"),
    "truncated 5": Column("BPTT", window=5),
    "truncated 10": Column("BPTT", window=10),
    "D_RTRL": Column("D_RTRL"),
    "windows of 1": Column("D_RTRL", window=1),
    "windows of 5": Column("D_RTRL", window=5),
    "windows of 10": Column("D_RTRL", window=10),
    "5, rank 4, pushed": Column("D_RTRL", window=5, rank=4, basis="pushed"),
    "5, rank 8, pushed": Column("D_RTRL", window=5, rank=8, basis="pushed"),
    "10, rank 8, pushed": Column("D_RTRL", window=10, rank=8, basis="pushed"),
    "10, rank 8": Column("D_RTRL", window=10, rank=8),
    "10, rank 16": Column("D_RTRL", window=10, rank=16),
    "ES_D_RTRL": Column("ES_D_RTRL"),
}
SPIKING = ("evidence", "randman", "spiking_digits_rows")
LEAK = math.exp(-1 / 20)  # of the neurons in a step
COLUMNS |= {  # as published, on tasks of the kind that each paper uses
    "EProp, symmetric": Column("EProp", tasks=SPIKING),
    "EProp, random": Column("EProp", options={"feedback": "random"}, tasks=SPIKING),
    "EProp, adaptive": Column("EProp", options={"feedback": "adaptive"}, tasks=SPIKING),
    "RFLO": Column("RFLO", tasks=("dms", "integrator")),
    "OSTLRecurrent": Column("OSTLRecurrent", tasks=("spoken_digits", "text")),
    "OSTLFeedforward": Column("OSTLFeedforward", tasks=("spoken_digits", "text")),
    "OTTT": Column("OTTT", options={"leak": LEAK}, tasks=SPIKING[1:]),
    "OTPE": Column("OTPE", options={"leak": LEAK}, tasks=SPIKING[1:]),
    "OTPE, approximate": Column("OTPE", options={"leak": LEAK, "mode": "approx"}, tasks=SPIKING[1:]),
    "S_TLLR": Column("S_TLLR", options={"lambda_post": LEAK, "lambda_pre": 0.8}, tasks=SPIKING[1:]),
    "SnAp(1)": Column("SnAp", options={"n": 1}, tasks=("copying", "text")),
    "UORO": Column("UORO", tasks=("anbn", "copying")),
    "KF_RTRL": Column("KF_RTRL", tasks=("copying", "text")),
}
SEVERAL = 10  # updates in one call
LONGER = 10  # how many times a task's length memory is measured at, too


@dataclass(frozen=True)
class Case:
    """How a task is learned: the same for every rule."""

    updates: int
    model: str = "gru"
    units: int = 64
    batch: int = 32
    rate: float = 5e-3
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "copying": Case(2500, options={"delay": 5, "symbols": 5}),
    "adding": Case(1500, options={"length": 30}),
    "anbn": Case(600, options={"length": 100, "longest": 8}),
    "dms": Case(3000, options={"delay": 5}),
    "evidence": Case(200, "alif", options={"cue": 20, "gap": 10, "delay": 50, "recall": 20}),
    "randman": Case(500, "alif", options={"classes": 5, "length": 50}),
    "integrator": Case(600, options={"length": 50}),
    "mackey_glass": Case(600),
    "lorenz": Case(600),
    "digits_rows": Case(800),
    "digits_pixels": Case(1000),
    "spiking_digits_rows": Case(600, "alif"),
    "spiking_digits_pixels": Case(600, "alif"),
    "spoken_digits": Case(800),
    "vowels": Case(300),
    "laser": Case(600),
    "text": Case(600, units=128),
}


def build(case: Case, task: Any) -> Any:
    """A recurrent layer and a readout."""
    import brainstate
    import brainunit as u
    import jax.numpy as jnp

    from braintrace import nn

    class Gru(brainstate.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(task.inputs, case.units)
            self.readout = nn.Linear(case.units, task.outputs)

        def update(self, x: Any) -> Any:
            return self.readout(self.cell(x))

    class Alif(brainstate.nn.Module):
        """Recurrent adaptive spiking neurons; a spike moves a voltage by its weight."""

        def __init__(self) -> None:
            super().__init__()
            # so many spikes of the inputs, and of neurons that fire in one step of fifty, fall into 20 ms
            inputs = 20 * float(task.batch(0, 0, case.batch)[0].mean()) * task.inputs
            spikes = jnp.repeat(
                jnp.array([inputs, 20 / 50 * case.units]), jnp.array([task.inputs, case.units])
            )
            start = brainstate.random.normal(size=(task.inputs + case.units, case.units)) / jnp.sqrt(
                spikes[:, None]
            )
            self.weights = nn.Linear(task.inputs + case.units, case.units, w_init=start)
            tau, tau_a = 20.0 * u.ms, float(task.length) * u.ms
            self.neurons = nn.ALIF(case.units, R=20.0, tau=tau, tau_a=tau_a, beta=0.2)
            self.filter = nn.Expon(case.units, tau=tau)
            self.readout = nn.Linear(case.units, task.outputs)

        def update(self, x: Any) -> Any:
            inputs = jnp.concatenate([x, self.neurons.get_spike()], -1)
            return self.readout(self.filter(self.neurons(self.weights(inputs))))

    return {"gru": Gru, "alif": Alif}[case.model]()


class Trainer:
    """A net that learns a task by one column, in compiled programs."""

    def __init__(self, case: Case, column: Column) -> None:
        import brainstate
        import jax.numpy as jnp
        import optax

        import braintrace

        self.case = case
        self.task = task = braintrace.tasks.get(case_name(case), **case.options)
        self.net = build(case, task)
        self.learner, self.chunk_size = make_learner(self.net, column)
        brainstate.nn.init_all_states(self.net, batch_size=case.batch)
        self.learner.compile_graph(jnp.zeros((case.batch, task.inputs)))
        self.params = self.net.states(brainstate.ParamState)
        rate = optax.cosine_decay_schedule(case.rate, case.updates)
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
        self.opt_state = brainstate.ShortTermState(self.optimizer.init(values(self.params)))
        xs, ys = self.draw(task.batches(0, case.batch))
        updates = lambda xs, ys: brainstate.transform.for_loop(self._update, xs, ys)
        self.states, self.learn = over_seeds(updates, xs, ys)
        self.test_states, self.test = over_seeds(self._test, xs[0], ys[0])

    def gradient(self, xs: Any, ys: Any, **options: Any) -> Any:
        self.learner.reset_state(self.case.batch)
        return self.learner.etrace_grad(
            xs, ys, step_fn=lambda x, y: self.task.loss(self.learner(x), y), return_value=True, **options
        )

    def _update(self, xs: Any, ys: Any) -> Any:
        import optax

        grads, loss = self.gradient(
            xs,
            ys,
            mask=self.task.mask,
            chunk_size=self.chunk_size,
            loss_output="scalar",
            keep_traces=False,
        )
        updates, self.opt_state.value = self.optimizer.update(grads, self.opt_state.value)
        for key, state in self.params.items():
            state.value = optax.apply_updates(state.value, updates[key])
        return loss

    def _test(self, xs: Any, ys: Any) -> Any:
        import brainstate

        brainstate.nn.reset_all_states(self.net, batch_size=self.case.batch)
        return self.task.metric(brainstate.transform.for_loop(self.net, xs), ys, self.task.mask)

    def begin(self, seed: int) -> None:
        """Weights as they are at first."""
        import brainstate

        brainstate.random.seed(seed)
        for key, state in build(self.case, self.task).states(brainstate.ParamState).items():
            self.params[key].value = state.value
        self.opt_state.value = self.optimizer.init(values(self.params))

    def draw(self, batches: Any) -> list[Any]:
        return side_by_side(next(batches)[:2] for _ in range(SEVERAL))

    def start(self, seeds: list[int]) -> Any:
        """The values of all states at first, a row for each seed."""
        import jax
        import jax.numpy as jnp

        rows = []
        for seed in seeds:
            self.begin(seed)
            rows.append([state.value for state in self.states])
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)

    def run(self, seeds: list[int]) -> dict[int, dict[str, Any]]:
        """Train from the weights of each seed: test scores, and how long one took, in seconds of one core."""
        import jax
        import numpy as np

        now = self.start(seeds)
        streams = [self.task.batches(seed, self.case.batch) for seed in seeds]
        start, first = time.process_time(), 0.0
        for i in range(self.case.updates // SEVERAL):
            now, loss = self.learn(now, *side_by_side(map(self.draw, streams)))
            if i == 0:
                jax.block_until_ready(loss)
                first = time.process_time() - start
        final = np.asarray(loss)[:, -1]
        seconds = time.process_time() - start
        learned = {id(state): value for state, value in zip(self.states, now, strict=True)}
        now = [learned[id(state)] for state in self.test_states]
        tests = zip(*(self.task.batches(s, self.case.batch, "test") for s in seeds), strict=True)
        batches = (side_by_side((xs, ys) for xs, ys, _ in batch) for batch in tests)
        scores = np.mean([np.asarray(self.test(now, xs, ys)[1]) for xs, ys in batches], 0, float)
        return {
            seed: {
                "score": float(scores[row]),
                "loss": float(final[row]),
                "seconds": seconds / len(seeds),
                "first": first / len(seeds),
                "device": jax.devices()[0].device_kind,
            }
            for row, seed in enumerate(seeds)
        }

    def estimate(self) -> float:
        """Seconds of one core that a run will take, compiling included."""
        import jax

        now = self.start([0])
        batches = self.task.batches(0, self.case.batch)
        times = []
        for _ in range(3):
            start = time.process_time()
            now, _ = jax.block_until_ready(self.learn(now, *side_by_side([self.draw(batches)])))
            times.append(time.process_time() - start)
        return times[0] + min(times[1:]) * (self.case.updates // SEVERAL - 1)

    def memory(self, longer: int = 1) -> int:
        """Bytes that the gradient of a sequence takes beside parameters and inputs, its traces included.

        Where steps may be taken together or one by one, one by one; traces are kept, as in a stream.
        """
        import brainstate
        import jax.numpy as jnp
        from measure import compile_run

        xs, ys = (
            jnp.concatenate([jnp.asarray(a)] * longer) for a in self.task.batch(0, 0, self.case.batch)[:2]
        )
        alone = getattr(self.learner, "vjp_method", None) == "single-step"
        size = self.chunk_size or (1 if alone else None)
        with brainstate.environ.context(fit=True):
            compiled = compile_run(lambda xs, ys: self.gradient(xs, ys, chunk_size=size), xs, ys)[0]
        found = compiled.memory_analysis()
        return int(found.temp_size_in_bytes + found.output_size_in_bytes)


def over_seeds(function: Callable[..., Any], *args: Any) -> tuple[list[Any], Callable[..., Any]]:
    """The states of a function, and the function of their values and its arguments, a row for each seed."""
    import brainstate
    import jax

    stateful = brainstate.transform.StatefulFunction(function)
    stateful.make_jaxpr(*args)
    return list(stateful.get_states(*args)), jax.jit(jax.vmap(stateful.jaxpr_call))


def side_by_side(rows: Iterable[Any]) -> list[Any]:
    import numpy as np

    return [np.stack(arrays) for arrays in zip(*rows, strict=True)]


def make_learner(net: Any, column: Column) -> tuple[Any, int | None]:
    """The learner of a column, and the `chunk_size` that it is driven with."""
    import braintrace

    if column.window is None:
        return getattr(braintrace, column.rule)(net, **column.options), None
    if column.rule == "BPTT":
        return braintrace.ETraceVjpAlgorithm(net, truncated_bptt()), column.window
    rank = {"rank": column.rank, "basis": column.basis} if column.rank else {}
    make = getattr(braintrace, column.rule)
    return make(net, vjp_method="multi-step", window=column.window, **rank), None


def truncated_bptt() -> Any:
    """A rule that keeps nothing: gradients go back to the start of a window, and no further."""
    from braintrace import rules

    class Truncated(rules.BPTT):
        back_through_time = False

    return Truncated()


def values(states: Any) -> dict[Any, Any]:
    return {key: state.value for key, state in states.items()}


def case_name(case: Case) -> str:
    return next(name for name, other in CASES.items() if other is case)


def run(name: str, columns: list[str], seeds: int, folder: Path, fresh: bool) -> None:
    """Fill in what is missing of one task's results."""
    if name == "cosines":
        import cosines

        if fresh or not (folder / "cosines.json").exists():
            change(folder, name, lambda _: {"cosines": cosines.measure(seeds), "about": about()})
        return
    settings = settings_of(name)
    change(folder, name, lambda found: begun(found, settings))
    for column in (c for c in columns if name in (COLUMNS[c].tasks or CASES)):
        now = load(folder, name)
        known = {} if fresh else now["rules"].get(column, {})
        missing = [seed for seed in range(seeds) if str(seed) not in known]
        if not missing and (column in now["memory"] or not on_cpu()):
            continue
        with time_step():
            trainer = Trainer(CASES[name], COLUMNS[column])
            if on_cpu() and (fresh or column not in now["memory"]):  # other compilers plan it otherwise
                sizes = [trainer.memory(), trainer.memory(LONGER)]
                change(folder, name, lambda found, c=column, n=sizes: put(found, ["memory"], c, n))
            # a small net leaves an accelerator idle: there, all seeds learn in one program
            together = [[seed] for seed in missing] if on_cpu() else [missing] if missing else []
            for seed, result in (pair for seeds in together for pair in trainer.run(seeds).items()):
                change(folder, name, lambda f, c=column, s=seed, r=result: put(f, ["rules", c], str(s), r))
                shown = f"{result['score']:.4f} in {result['seconds']:.1f} s"
                print(f"{name} | {column} | seed {seed}: {shown}", flush=True)


def on_cpu() -> bool:
    import jax

    return jax.default_backend() == "cpu"


def time_step() -> Any:
    import brainstate
    import brainunit as u

    return brainstate.environ.context(dt=1.0 * u.ms)


def settings_of(name: str) -> dict[str, Any]:
    import braintrace

    shown = ("description", "metric_name", "chance", "target", "higher_is_better", "length", "test_size")
    task = braintrace.tasks.get(name, **CASES[name].options)
    return {**asdict(CASES[name]), **{key: getattr(task, key) for key in shown}}


def begun(found: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Results with these settings: those that were found, or none yet."""
    kept = found if found.get("settings") == settings else {}
    return {"settings": settings, "rules": {}, "memory": {}, **kept, "about": about()}


def put(found: dict[str, Any], path: list[str], key: str, value: Any) -> dict[str, Any]:
    where = found
    for part in path:
        where = where.setdefault(part, {})
    where[key] = value
    return found


def estimate(name: str, columns: list[str]) -> None:
    """Print how long a run of each column will take."""
    for column in [c for c in columns if name in (COLUMNS[c].tasks or CASES)]:
        with time_step():
            seconds = Trainer(CASES[name], COLUMNS[column]).estimate()
        print(f"{name} | {column}: {seconds:.0f} s", flush=True)


def gather(other: Path, folder: Path) -> None:
    """Take over the results in another folder, where they are of the same settings."""
    for path in sorted(other.glob("*.json")):
        theirs = json.loads(path.read_text())
        found = load(folder, path.stem)
        if found and found.get("settings") != theirs.get("settings"):
            raise ValueError(f"{path} is of other settings than {folder / path.name}")
        change(folder, path.stem, partial(joined, theirs=theirs))


def joined(found: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Results, with others of the same settings."""
    if not found or "settings" not in theirs:
        return theirs
    for column, results in theirs["rules"].items():
        found["rules"].setdefault(column, {}).update(results)
    found.setdefault("memory", {}).update(theirs.get("memory", {}))
    return {**found, "about": theirs["about"]}


def about() -> dict[str, Any]:
    import brainstate
    import jax

    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "brainstate": brainstate.__version__,
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
    }


def load(folder: Path, name: str) -> dict[str, Any]:
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def change(folder: Path, name: str, to: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Write what a function makes of a task's results; another process may do so at the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fresh = folder / f"{name}.json.new"
        fresh.write_text(json.dumps(to(load(folder, name)), indent=1) + "\n")
        fresh.replace(folder / f"{name}.json")
    finally:
        os.close(lock)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*CASES, "cosines"]
    add = parser.add_argument
    add("--task", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    add(
        "--column", nargs="+", choices=[*COLUMNS], default=[*COLUMNS], metavar="NAME", help=", ".join(COLUMNS)
    )
    add("--seeds", type=int, default=5)
    add("--jobs", type=int, default=os.cpu_count(), help="how many tasks to run at once")
    add("--fresh", action="store_true", help="run again what is there already")
    add("--into", type=Path, default=RESULTS, metavar="FOLDER", help="where results go")
    add("--estimate", action="store_true", help="only say how long a run would take")
    add("--gather", type=Path, metavar="FOLDER", help="only take over the results in a folder")
    add("--part", action="store_true", help=argparse.SUPPRESS)  # of a run that will write the tables
    given = parser.parse_args()
    if given.gather:
        gather(given.gather, given.into)
    elif len(given.task) > 1:
        start_all(given)
    elif given.estimate:
        estimate(given.task[0], given.column)
    else:
        run(given.task[0], given.column, given.seeds, given.into, given.fresh)
    if not (given.estimate or given.part):
        print(write(given.into, [*CASES], COLUMNS, LONGER))


def start_all(given: argparse.Namespace) -> None:
    """Each task in a process of its own."""
    more = ["--part", "--seeds", str(given.seeds), "--into", str(given.into), "--column", *given.column]
    more += [*(["--fresh"] if given.fresh else []), *(["--estimate"] if given.estimate else [])]
    env = {**os.environ, "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}

    def start(name: str) -> int:
        return subprocess.run([sys.executable, __file__, "--task", name, *more], env=env).returncode

    with ThreadPoolExecutor(given.jobs) as pool:
        codes = dict(zip(given.task, pool.map(start, given.task), strict=True))
    if failed := [name for name, code in codes.items() if code]:
        print("failed:", ", ".join(failed))


if __name__ == "__main__":
    main()
