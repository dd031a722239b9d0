"""Streams: tasks with an update at every step, next to published numbers.

    python benchmarks/streams.py [--task NAME ...] [--seeds 5] [--quick] [--out FOLDER] [--list]

Each variant of a task and each seed is one row of `NAME.json`: its settings, its score and the time that it
took, written as soon as it is there; a row that is there already is not run again. `README.md` has the table.
Settings follow the published ones where these are given, except for the number of steps.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace
from braintrace import nn
from braintrace.agents import QRC, ActorCritic, Agent, environments, from_module
from braintrace.tasks.series import lorenz_series, mackey_glass_series

RESULTS = Path(__file__).parent / "results" / "streams"
Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A task: a function of settings and seed to a score, and the settings of each variant."""

    run: Callable[..., Row]
    variants: dict[str, Row]
    score: str
    published: str = "none"
    quick: Row = field(default_factory=dict)


# -- cells as step functions --------------------------------------------------------------------------------


class Net(brainstate.nn.Module):
    """A cell and linear readouts of given sizes; a size of None is the cell's output itself."""

    def __init__(self, cell: Any, *sizes: int | None) -> None:
        super().__init__()
        self.cell = cell
        self.readouts = [nn.Linear(*cell.out_size, size) for size in sizes if size is not None]
        self.sizes = sizes

    def update(self, x: Any) -> Any:
        h, readouts = self.cell(x), iter(self.readouts)
        outs = [h if size is None else next(readouts)(h) for size in self.sizes]
        return outs[0] if len(outs) == 1 else tuple(outs)


def make_cell(name: str, num_in: int, units: int, longest: float) -> Any:
    """Return a cell whose memory is up to about `longest` steps at the start."""
    if name == "RTU":
        return nn.RTUCell(num_in, units, r_min=0.9, r_max=float(np.exp(-1 / longest)), max_phase=0.3)
    if name == "LRU":
        return nn.LRUCell(num_in, units, r_min=0.9, r_max=float(np.exp(-1 / longest)), max_phase=0.3)
    return getattr(nn, name)(num_in, units)


def functional(model: Any, x: Any, seed: int, **options: Any) -> tuple[Any, Any, Any]:
    """Return the learner, parameters and hidden states of a model, with or without a batch axis in `x`."""
    brainstate.nn.init_all_states(model, batch_size=len(x) if x.ndim > 1 else None)
    step, params, carry = from_module(model, x)
    return braintrace.online(step, params, carry, x, **options), params, carry


# -- reinforcement learning ---------------------------------------------------------------------------------


def memory_chain(
    seed: int, length: int, algorithm: str, steps: int, units: int = 32, rate: float = 1e-3, envs: int = 1
) -> Row:
    """Return the mean return of the last tenth of the run, and the best of its tenths."""
    brainstate.random.seed(seed)
    env, x = environments.MemoryChain(length), jnp.zeros(3, jnp.float32)
    critic = algorithm == "AC"
    model = Net(make_cell("RTU", 3, units, 10 * length), 2, 1 if critic else None)
    net, params, carry = functional(model, x, seed)
    if critic:
        net, params, carry = _scalar_value(model, x)
        rule: Any = ActorCritic(0.99, 0.99, entropy_weight=0.01)
    else:
        rule = QRC(0.99, 0.95, epsilon=optax.linear_schedule(1.0, 0.02, steps // 2))
    agent = Agent(net, rule, optax.adam(rate), env, num_envs=envs)
    state = agent.init(params, carry, jax.random.key(seed))
    tenths = []
    for _ in range(10):
        state, found = agent.run(state, steps // 10)
        tenths.append(float(found.episode_returns().mean()))
    return {"score": max(tenths), "last": tenths[-1], "curve": tenths}


def _scalar_value(model: Any, x: Any) -> tuple[Any, Any, Any]:
    step, params, carry = from_module(model, x)

    def scalar(params: Any, carry: Any, x: Any) -> Any:
        carry, (logits, value) = step(params, carry, x)
        return carry, (logits, value[0])

    return braintrace.online(scalar, params, carry, x), params, carry


def conditioning(
    seed: int,
    env: str,
    isi: tuple[int, int],
    steps: int,
    cell: str = "RTU",
    units: int = 16,
    rate: float = 1e-3,
) -> Row:
    """Return the squared error of predicted returns over the last fifth of the stream, against the mean's."""
    brainstate.random.seed(seed)
    task = getattr(environments, env)(isi=tuple(isi))
    x, gamma = jnp.zeros(task.observation_size, jnp.float32), 0.9
    model = Net(make_cell(cell, task.observation_size, units, 50), 1, 1)
    functional(model, x, seed)
    net, params, carry = _scalar_value(model, x)
    agent = Agent(net, ActorCritic(gamma, 0.9), optax.adam(rate), task)
    state = agent.init(params, carry, jax.random.key(seed))
    _, found = agent.run(state, steps)
    rewards, values = (np.asarray(a)[:, 0] for a in (found.reward, found.value))
    returns = np.zeros(steps)
    for t in reversed(range(steps - 1)):
        returns[t] = rewards[t] + gamma * returns[t + 1]
    late = slice(-steps // 5, -100)
    variance = np.mean((returns[late] - returns[late].mean()) ** 2)
    error = np.mean((values[late] - returns[late]) ** 2)
    return {"score": float(error / variance), "squared error": float(error), "variance": float(variance)}


# -- prediction and copying ---------------------------------------------------------------------------------


def henon_series(number: int, x: float, y: float) -> np.ndarray:
    found = []
    for _ in range(number + 100):
        x, y = 1 - 1.4 * x * x + y, 0.3 * x
        found.append(x)
    return np.array(found[100:])


def series(seed: int, name: str, rank: int | None, steps: int, units: int = 64, batch: int = 8) -> Row:
    """Return the NMSE of the prediction of the next value over the last fifth; no rank is exact RTRL."""
    rng = np.random.RandomState(seed)
    if name == "henon":
        columns = [henon_series(steps + 1, *rng.uniform(-0.1, 0.1, 2)) for _ in range(batch)]
        data = np.stack(columns, 1)
    else:
        whole = mackey_glass_series(steps + 1 + 100 * batch, 17.0)
        if name == "lorenz":
            whole = lorenz_series(steps + 1 + 100 * batch).reshape(steps + 1 + 100 * batch, -1)[:, 0]
        starts = 100 * rng.permutation(batch)
        data = np.stack([whole[start : start + steps + 1] for start in starts], 1)
    data = jnp.asarray((data - data.mean()) / data.std(), jnp.float32)[..., None]
    keys = jax.random.split(jax.random.key(seed), 3)
    draw = lambda key, i, o: jax.random.normal(key, (i, o)) / i**0.5
    params = {"w": draw(keys[0], 1, units), "r": draw(keys[1], units, units), "b": jnp.zeros(units)}
    params |= {"out": draw(keys[2], units, 1), "c": jnp.zeros(1)}

    def step(params: Any, h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ params["w"] + h @ params["r"] + params["b"])
        return h, h @ params["out"] + params["c"]

    h = jnp.zeros((batch, units))
    rule = braintrace.rules.RTRL() if rank is None else braintrace.rules.D_RTRL(rank=rank)
    net = braintrace.online(step, params, h, data[0], rule=rule, window=1)
    loss = lambda y, target: jnp.mean((y - target) ** 2)
    return _learn(net, params, h, loss, data[:-1], data[1:], optax.adam(1e-3), 1)


def copying(
    seed: int, delay: int, cell: str, steps: int, window: int, rank: int = 0, truncated: bool = False,
    units: int = 64, letters: int = 3, alphabet: int = 4, batch: int = 8, rate: float = 3e-3,
) -> Row:  # fmt: skip
    """Return the accuracy of repeated letters over the last fifth of an endless sequence of trials."""
    rng, length = np.random.RandomState(seed), 2 * letters + delay + 1
    trials = -(-steps // length)
    shown = np.full((trials, length, batch), alphabet)
    shown[:, :letters] = rng.randint(alphabet, size=(trials, letters, batch))
    shown[:, letters + delay] = alphabet + 1
    answers = np.zeros((trials, length, batch), np.int32)
    answers[:, -letters:] = shown[:, :letters]
    asked = np.zeros((trials, length), np.float32)
    asked[:, -letters:] = 1
    flat = lambda a: a.reshape(-1, *a.shape[2:])[: steps - steps % window]
    xs = jax.nn.one_hot(flat(shown), alphabet + 2)
    brainstate.random.seed(seed)
    model = Net(make_cell(cell, alphabet + 2, units, 3 * delay), alphabet)
    rule = braintrace.rules.BPTT() if truncated else braintrace.rules.D_RTRL(rank=rank)
    options = {"window": window} if rank else {}
    net, params, carry = functional(model, xs[0], seed, rule=rule, **options)

    def loss(y: Any, answer: Any, asked: Any) -> Any:
        each = optax.softmax_cross_entropy_with_integer_labels(y, answer)
        return asked * jnp.mean(each), asked * jnp.mean(jnp.argmax(y, -1) == answer)

    data = (xs, jnp.asarray(flat(answers)), jnp.asarray(flat(asked)))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    found = _learn(net, params, carry, loss, *data, optimizer, window, has_aux=True)
    asked_late = flat(asked)[-steps // 5 :].sum()
    return {**found, "score": found["score"] * (steps // 5) / float(asked_late), "chance": 1 / alphabet}


def _learn(net: Any, params: Any, carry: Any, loss: Any, *data: Any, has_aux: bool = False) -> Row:
    """Learn from sequences, with an update after every window; return the mean over the last fifth."""
    *sequences, optimizer, window = data
    count = len(sequences[0]) // window
    parts = [a[: count * window].reshape(count, window, *a.shape[1:]) for a in sequences]

    def update(state: Any, part: Any) -> Any:
        params, opt_state, carry, traces = state
        grads, (carry, traces), (losses, aux) = net.grad(
            loss, params, carry, traces, *part, reduction="sum", has_aux=has_aux
        )
        changes, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, changes)
        return (params, opt_state, carry, traces), jnp.mean(aux if has_aux else losses)

    run = jax.jit(lambda state, parts: jax.lax.scan(update, state, parts))
    state = (params, optimizer.init(params), carry, net.init(params, carry))
    compiled = run.lower(state, parts).compile()
    began, cpu = time.monotonic(), time.process_time()
    _, scores = jax.block_until_ready(compiled(state, parts))
    per_step = [1e6 * (now - then) / (count * window) for now, then in
                ((time.monotonic(), began), (time.process_time(), cpu))]  # fmt: skip
    return {
        "score": float(jnp.mean(scores[-(count // 5) :])),
        "us per step": per_step[0],
        "us per step, CPU time": per_step[1],
    }


# -- speed --------------------------------------------------------------------------------------------------


def speed(seed: int, cell: str, units: int, inputs: int, steps: int, agent: bool = False) -> Row:
    """Return steps per second of CPU time of a jitted loop with an update at every step, batch 1."""
    brainstate.random.seed(seed)
    if agent:
        env = environments.MemoryChain(10)
        model, x = Net(make_cell(cell, 3, units, 100), 2, 1), jnp.zeros(3, jnp.float32)
        functional(model, x, seed)
        net, params, carry = _scalar_value(model, x)
        made = Agent(net, ActorCritic(), optax.sgd(1e-4), env)
        state = made.init(params, carry, jax.random.key(seed))
        run = jax.jit(lambda state: jax.lax.scan(lambda s, _: made.step(s), state, length=steps)[0])
    else:
        xs = jnp.asarray(np.random.RandomState(seed).randn(steps, inputs), jnp.float32)
        net, params, carry = functional(Net(make_cell(cell, inputs, units, 100), 1), xs[0], seed)

        def update(state: Any, x: Any) -> Any:
            params, carry, traces = state

            def loss(params: Any) -> Any:
                new_carry, new_traces, y = net.step(params, carry, traces, x)
                return jnp.sum((y - x[:1]) ** 2), (new_carry, new_traces)

            grads, after = jax.grad(loss, has_aux=True)(params)
            return (jax.tree.map(lambda p, g: p - 1e-4 * g, params, grads), *after), None

        state = (params, carry, net.init(params, carry))
        run = jax.jit(lambda state: jax.lax.scan(update, state, xs)[0])
    compiled, times, cpu = run.lower(state).compile(), [], []
    for _ in range(5):
        began, then = time.monotonic(), time.process_time()
        jax.block_until_ready(compiled(state))
        times.append(time.monotonic() - began)
        cpu.append(time.process_time() - then)
    return {"score": steps / min(cpu), "per second of wall time": steps / min(times)}


# -- the table ----------------------------------------------------------------------------------------------

CHAIN = {"envs": 1, "units": 32, "rate": 1e-3, "steps": 1_000_000}
WINDOWS = {"truncated BPTT 20": 20, "truncated BPTT 100": 100}
TASKS = {
    "memory_chain_q": Task(
        memory_chain,
        {f"length {n}": {**CHAIN, "length": n, "algorithm": "QRC"} for n in (32, 48, 64, 128)},
        "best mean return of a tenth of the run",
        "QRC(lambda), RTU with exact RTRL: .99 / .85 / .15 / .12 at 32 / 48 / 64 / 128",
        {"steps": 300, "length": 2, "units": 4},
    ),
    "memory_chain_ac": Task(
        memory_chain,
        {f"length {n}": {**CHAIN, "length": n, "algorithm": "AC"} for n in (4, 8, 16, 32, 64)},
        "best mean return of a tenth of the run",
        "AC(lambda), CTRNN with RTRL: 1 / .90 / .61 / .56 / .61 at 4 / 8 / 16 / 32 / 64, up to 50 M steps",
        {"steps": 300, "length": 2, "units": 4},
    ),
    "series": Task(
        series,
        {
            f"{name}, {kind}": {"name": name, "rank": rank, "steps": 50_000}
            for name in ("mackey_glass", "lorenz", "henon")
            for kind, rank in (("rank 4", 4), ("diagonal", 0), ("exact", None))
        },
        "NMSE of the next value, last fifth (how far ahead the published ones predict is not known)",
        "exact .0180 / .0051 / .0052, SnAp-1 .0050 / .0024 / .0052, truncated BPTT(25) .0080 / .0054 / .0311",
        {"steps": 100, "units": 4, "batch": 2},
    ),
    "copying": Task(
        copying,
        {
            f"delay {delay}, {name}": {"delay": delay, "steps": 1000 * delay, **settings}
            for delay in (200, 1000)
            for name, settings in {
                "RTU": {"cell": "RTU", "window": 10},
                "LRU": {"cell": "LRU", "window": 10},
                "GRU rank 8": {"cell": "GRUCell", "window": 10, "rank": 8},
                **{
                    f"{cell}, {kind}": {"cell": name, "window": window, "truncated": True}
                    for kind, window in WINDOWS.items()
                    for cell, name in (("RTU", "RTU"), ("GRU", "GRUCell"))
                },
            }.items()
        },
        "accuracy, last fifth (chance .25)",
        quick={"delay": 4, "steps": 220, "units": 4, "window": 5, "batch": 2},
    ),
    "conditioning": Task(
        conditioning,
        {
            f"{env}, ISI {isi[0]}-{isi[1]}, {cell}": {"env": env, "isi": isi, "cell": cell, "steps": 10**6}
            for env in ("TraceConditioning", "TracePatterning")
            for isi in ((7, 13), (14, 26))
            for cell in ("RTU", "GRUCell")
        },
        "squared error of the return over its variance, last fifth",
        "figures only",
        {"steps": 2000, "units": 4},
    ),
    "speed": Task(
        speed,
        {
            "RTU 256, 4 inputs": {"cell": "RTU", "units": 256, "inputs": 4, "steps": 100_000},
            "GRU 64, 4 inputs": {"cell": "GRUCell", "units": 64, "inputs": 4, "steps": 100_000},
            "RTU 256, actor-critic on MemoryChain": {
                "cell": "RTU", "units": 256, "inputs": 3, "steps": 100_000, "agent": True,
            },
        },
        "steps per second of CPU time, best of 5 runs of the loop",
        quick={"steps": 200, "units": 4},
    ),
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--variant", nargs="+", help="only variants whose names contain one of these")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="number of steps, instead of that of each variant")
    parser.add_argument("--quick", action="store_true", help="toy sizes, one seed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--list", action="store_true", help="list tasks and variants")
    given = parser.parse_args(arguments)
    if given.list:
        for name in given.task:
            print(name, *TASKS[name].variants, sep="\n    ")
        return
    for name in given.task:
        run_task(name, given)
    write_table(given.out)


def run_task(name: str, given: Any) -> None:
    """Run all rows of a task that are not there yet."""
    task, path = TASKS[name], given.out / f"{name}.json"
    rows: list[Row] = json.loads(path.read_text()) if path.exists() else []
    chosen = [v for v in task.variants if not given.variant or any(part in v for part in given.variant)]
    for variant in chosen[: 1 if given.quick else None]:
        settings = {**task.variants[variant], **({"steps": given.steps} if given.steps else {})}
        settings |= task.quick if given.quick else {}
        for seed in range(1 if given.quick else given.seeds):
            key = {"variant": variant, "seed": seed, "settings": json.loads(json.dumps(settings))}
            if any(key.items() <= row.items() for row in rows):
                continue
            began, cpu = time.monotonic(), time.process_time()
            found = task.run(seed, **settings)
            spent = {"seconds": time.monotonic() - began, "CPU seconds": time.process_time() - cpu}
            rows.append({**key, **found, **spent, "machine": machine()})
            print(
                f"{name}: {variant}, seed {seed}: {found['score']:.4g}, {spent['seconds']:.0f} s", flush=True
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(rows, indent=1) + "\n")


def machine() -> str:
    return (
        f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores, {platform.machine()}, JAX {jax.__version__}"
    )


def write_table(out: Path) -> None:
    """Write the rows of all tasks as tables: the median over seeds, their range, and what they took."""
    lines = [
        "# Streams",
        "",
        "Written by `benchmarks/streams.py` (`make streams`); settings are in the JSON files.",
    ]
    for name, task in TASKS.items():
        path = out / f"{name}.json"
        if not path.exists():
            continue
        lines += ["", f"## {name}", "", f"Score: {task.score}. Published: {task.published}.", ""]
        lines += [
            "| variant | steps | seeds | score (median) | range | seconds of CPU time |",
            "|---|---|---|---|---|---|",
        ]
        groups: dict[tuple[str, int], list[Row]] = {}
        for row in json.loads(path.read_text()):
            groups.setdefault((row["variant"], row["settings"]["steps"]), []).append(row)
        for (variant, steps), rows in groups.items():
            scores, spent = [r["score"] for r in rows], sum(r["CPU seconds"] for r in rows) / len(rows)
            show = "{:,.0f}".format if min(scores) > 100 else "{:.4g}".format
            between = f"{show(min(scores))} to {show(max(scores))}"
            cells = (
                variant,
                f"{steps:,}",
                len(rows),
                show(float(np.median(scores))),
                between,
                f"{spent:.0f}",
            )
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    out.mkdir(parents=True, exist_ok=True)
    (out / "README.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
