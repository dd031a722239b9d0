"""Scores: D_RTRL and ES_D_RTRL beside BPTT on every task; gradients beside exact ones.

    python benchmarks/scores.py [--task NAME ...] [--seeds 3] [--jobs 2] [--fresh]

Each task runs as a process of its own and leaves `benchmarks/results/scores/NAME.json`; what is there
already, with the same settings, is not run again. The tables are in README.md beside the results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "scores"
RULES = ("BPTT", "D_RTRL", "ES_D_RTRL")


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


def train(case: Case, rule: str, seeds: list[int], report: Callable[[int, dict[str, float]], None]) -> None:
    """Train a net for each seed, in one compiled program, and report its test score and its time."""
    import brainstate
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import braintrace

    task = braintrace.tasks.get(case_name(case), **case.options)
    net = build(case, task)
    learner = braintrace.compile(
        net, getattr(braintrace, rule), jnp.zeros((case.batch, task.inputs)), batch_size=case.batch
    )
    params = net.states(brainstate.ParamState)
    rate = optax.cosine_decay_schedule(case.rate, case.updates)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    opt_state = brainstate.ShortTermState(optimizer.init(values(params)))

    def update(xs: Any, ys: Any) -> Any:
        learner.reset_state(case.batch)
        grads, loss = learner.etrace_grad(
            xs,
            ys,
            step_fn=lambda x, y: task.loss(learner(x), y),
            mask=task.mask,
            return_value=True,
            loss_output="scalar",
            keep_traces=False,
        )
        updates, opt_state.value = optimizer.update(grads, opt_state.value)
        for key, state in params.items():
            state.value = optax.apply_updates(state.value, updates[key])
        return loss

    @brainstate.transform.jit
    def test(xs: Any, ys: Any) -> Any:
        brainstate.nn.reset_all_states(net, batch_size=case.batch)
        return task.metric(brainstate.transform.for_loop(net, xs), ys, task.mask)

    several = 10  # updates in one call
    learn = brainstate.transform.jit(lambda xs, ys: brainstate.transform.for_loop(update, xs, ys))
    for seed in seeds:
        brainstate.random.seed(seed)
        for key, state in build(case, task).states(brainstate.ParamState).items():
            params[key].value = state.value
        opt_state.value = optimizer.init(values(params))
        batches = task.batches(seed, case.batch)
        start, first = time.perf_counter(), 0.0
        for i in range(case.updates // several):
            drawn = [next(batches)[:2] for _ in range(several)]
            loss = learn(*(np.stack(a) for a in zip(*drawn, strict=True)))
            if i == 0:
                jax.block_until_ready(loss)
                first = time.perf_counter() - start
        final = float(loss[-1])
        seconds = time.perf_counter() - start
        scores = [float(test(xs, ys)) for xs, ys, _ in task.batches(seed, case.batch, "test")]
        report(seed, {"score": float(np.mean(scores)), "loss": final, "seconds": seconds, "first": first})


def values(states: Any) -> dict[Any, Any]:
    return {key: state.value for key, state in states.items()}


def case_name(case: Case) -> str:
    return next(name for name, other in CASES.items() if other is case)


def run(name: str, seeds: int, fresh: bool) -> None:
    """Fill in what is missing of one task's results."""
    if name == "cosines":
        import cosines

        return save(name, {"cosines": cosines.measure(seeds), "about": about()})
    import brainstate
    import brainunit as u

    import braintrace

    case = CASES[name]
    task = braintrace.tasks.get(name, **case.options)
    shown = ("description", "metric_name", "chance", "target", "higher_is_better", "length", "test_size")
    found = {} if fresh else load(name)
    settings = {**asdict(case), **{key: getattr(task, key) for key in shown}}
    if found.get("settings") != settings:
        found = {"settings": settings, "rules": {}}
    found["about"] = about()
    with brainstate.environ.context(dt=1.0 * u.ms):
        for rule in RULES:
            results = found["rules"].setdefault(rule, {})
            missing = [seed for seed in range(seeds) if str(seed) not in results]

            def report(seed: int, result: dict[str, float], rule: str = rule, results: Any = results) -> None:
                results[str(seed)] = result
                save(name, found)
                print(
                    f"{name} {rule} seed {seed}: {result['score']:.4f} in {result['seconds']:.1f} s",
                    flush=True,
                )

            if missing:
                train(case, rule, missing, report)
    return None


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


def load(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def save(name: str, found: dict[str, Any]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    fresh = RESULTS / f"{name}.json.new"
    fresh.write_text(json.dumps(found, indent=1) + "\n")
    fresh.replace(RESULTS / f"{name}.json")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*CASES, "cosines"]
    parser.add_argument(
        "--task", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many tasks to run at once")
    parser.add_argument("--fresh", action="store_true", help="run again what is there already")
    options = parser.parse_args()
    if len(options.task) == 1:
        run(options.task[0], options.seeds, options.fresh)
    else:
        more = ["--seeds", str(options.seeds), *(["--fresh"] if options.fresh else [])]
        env = {**os.environ, "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}

        def start(name: str) -> int:
            return subprocess.run([sys.executable, __file__, "--task", name, *more], env=env).returncode

        with ThreadPoolExecutor(options.jobs) as pool:
            codes = dict(zip(options.task, pool.map(start, options.task), strict=True))
        if failed := [name for name, code in codes.items() if code]:
            print("failed:", ", ".join(failed))
    from score_table import write

    write(RESULTS, CASES, RULES)


if __name__ == "__main__":
    main()
