"""Compile a function, say what it takes, and time several in turns.

Memory is what XLA's buffer assignment needs beside the arguments (parameters and the input sequence):
temporary buffers plus outputs. It is known before anything runs, and is defined alike on every device.
"""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import methods
import nets
from nets import Case


@dataclass
class Cost:
    """What a compiled function takes; times in seconds, of the whole sequence."""

    compile_wall: float
    compile_process: float
    temp_bytes: int
    output_bytes: int
    argument_bytes: int
    trace_bytes: int

    @property
    def peak_bytes(self) -> int:
        return self.temp_bytes + self.output_bytes

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "peak_bytes": self.peak_bytes}


def build(
    case: Case, method: str, neuron: nets.Neuron = nets.neuron
) -> tuple[Callable[[], float], dict[str, Any]]:
    """A function that runs once and returns its seconds, and what it costs."""
    run, trace_bytes = methods.make(case, method, neuron)
    xs, ys = nets.data(case)
    compiled, values, wall, process = compile_run(run, xs, ys)
    values = HeldValues(values)
    memory = compiled.memory_analysis()
    cost = Cost(
        compile_wall=wall,
        compile_process=process,
        temp_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        trace_bytes=trace_bytes,
    )

    def once() -> float:
        """The mean over as many sequences as the method's cost varies over."""
        total, repeats = 0.0, methods.PERIOD.get(method, 1)
        for _ in range(repeats):
            given = jax.block_until_ready(values.get())
            start = time.perf_counter()
            counters = jax.block_until_ready(compiled(given, xs, ys))[1]
            total += time.perf_counter() - start
            values.go_on(counters)
        return total / repeats

    return once, cost.as_dict()


class HeldValues:
    """Initial values of states. Large zeros (traces) are allocated per run: several methods fit in memory."""

    def __init__(self, values: list[Any]) -> None:
        large = lambda a: getattr(a, "nbytes", 0) > _LARGE and not bool(a.any())
        shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
        self.leaves, self.tree = jax.tree.flatten(values)
        self.leaves = [shape(a) if large(a) else a for a in self.leaves]
        self.counters: dict[int, Any] = {}

    def go_on(self, counters: dict[int, Any]) -> None:
        """Replace the values of states, by index."""
        self.counters.update(counters)

    def get(self) -> list[Any]:
        made = [jnp.zeros_like(a) if isinstance(a, jax.ShapeDtypeStruct) else a for a in self.leaves]
        values = jax.tree.unflatten(self.tree, made)
        return [self.counters.get(n, value) for n, value in enumerate(values)]


_LARGE = 2**28  # bytes


def compile_run(run: methods.Run, xs: Any, ys: Any) -> tuple[Any, Any, float, float]:
    """Trace and compile, as a pure function of states and data; its states; wall and process time."""
    wall, process = time.perf_counter(), time.process_time()
    function = brainstate.transform.StatefulFunction(run, return_only_write=True).make_jaxpr(xs, ys)
    values = [st.value for st in function.get_states(xs, ys)]

    def pure(values: Any, xs: Any, ys: Any) -> Any:
        given = {id(a) for a in jax.tree.leaves(values)}
        after, out = function.jaxpr_call(values, xs, ys)
        is_counter = lambda a: isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jnp.integer)
        counters = {n: a for n, a in enumerate(after) if is_counter(a)}
        others = [a for n, a in enumerate(after) if n not in counters]
        # states that stay as they are (traces that are not kept) would only be copied
        return [a for a in jax.tree.leaves((others, out)) if id(a) not in given], counters

    compiled = jax.jit(pure).lower(values, xs, ys).compile()
    return compiled, values, time.perf_counter() - wall, time.process_time() - process


def interleave(
    runs: dict[str, Callable[[], float]], seconds: float, slow: float
) -> dict[str, list[float | None]]:
    """The times of each by round, in turns for about so many seconds; None: not in this round.

    What takes much longer than most is run in fewer rounds, and only once if it takes over `slow` seconds.
    """
    first = {name: run() for name, run in runs.items()}  # warms up
    usual = 3 * statistics.median(first.values()) if first else 0.0
    every = {name: max(1, round(t / usual)) for name, t in first.items()}
    round_time = sum(t / every[name] for name, t in first.items() if t <= slow)
    rounds = min(60, max(5, int(seconds / max(1e-6, round_time))))
    times: dict[str, list[float | None]] = {name: [t] if t > slow else [] for name, t in first.items()}
    for i in range(rounds):
        for name, run in runs.items():
            if first[name] <= slow:
                times[name].append(run() if i % min(every[name], rounds // 5) == 0 else None)
    return times


def compile_times(case: Case, names: list[str], repeats: int) -> dict[str, float]:
    """The best process time of compiling each, taken in turns, with JAX's caches cleared."""
    xs, ys = nets.data(case)
    best = dict.fromkeys(names, float("inf"))
    for _ in range(repeats):
        for name in names:
            run, _ = methods.make(case, name)
            jax.clear_caches()
            best[name] = min(best[name], compile_run(run, xs, ys)[3])
            gc.collect()
    return best


def ratio(times: dict[str, list[float | None]], a: str, b: str) -> float | None:
    """The median of a's time by b's, over the rounds that have both."""
    pairs = [(x, y) for x, y in zip(times.get(a, []), times.get(b, []), strict=False) if x and y]
    return statistics.median(x / y for x, y in pairs) if pairs else None


def about() -> dict[str, Any]:
    """The machine and the versions in use."""
    device = jax.devices()[0]
    packages = "jax jaxlib brainstate brainunit brainevent braintrace numpy".split()
    return {
        "device": _processor() if device.platform == "cpu" else device.device_kind,
        "platform": device.platform,
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # used from a folder
        return str(getattr(__import__(name), "__version__", "not installed"))


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()
