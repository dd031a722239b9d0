"""Learners beside back-propagation through time, in one process: time, compile time, and RTRL in windows.

python benchmarks/learners.py [inputs units batch steps]
"""

from __future__ import annotations

import sys
import time
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

import braintrace


class Net(brainstate.nn.Module):
    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.cell = braintrace.nn.GRUCell(inputs, units)
        self.readout = brainstate.nn.Linear(units, 10)

    def update(self, x: Any) -> Any:
        return self.readout(self.cell(x))


def measure(functions: dict[str, Any], *args: Any, repeats: int = 5) -> dict[str, tuple[float, float]]:
    """Of each function, the time of the first call and the best time of the others, taken in turns."""
    first, best = {}, dict.fromkeys(functions, float("inf"))
    compiled = {name: brainstate.transform.jit(f) for name, f in functions.items()}
    for name, f in compiled.items():
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        first[name] = time.perf_counter() - start
    for _ in range(repeats):
        for name, f in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(f(*args))
            best[name] = min(best[name], time.perf_counter() - start)
    return {name: (first[name], best[name]) for name in functions}


def show(title: str, found: dict[str, tuple[float, float]]) -> None:
    print(f"\n{title}\n{'':34s}{'time':>12s}{'ratio':>8s}{'compile':>10s}{'ratio':>8s}")
    first0, best0 = next(iter(found.values()))
    for name, (first, best) in found.items():
        print(f"{name:34s}{1e3 * best:9.2f} ms{best / best0:8.2f}{first - best:8.2f} s{first / first0:8.2f}")


def sequences(inputs: int, units: int, batch: int, steps: int) -> None:
    """A GRU over a sequence: BPTT, and the online rules in chunks and step by step."""
    rng = np.random.RandomState(0)
    xs = jnp.asarray(rng.randn(steps, batch, inputs), jnp.float32)
    ys = jnp.asarray(rng.randn(steps, batch, 10), jnp.float32)
    net = Net(inputs, units)
    brainstate.nn.init_all_states(net, batch_size=batch)
    params = net.states(brainstate.ParamState)

    def bptt(xs: Any, ys: Any) -> Any:
        brainstate.nn.reset_all_states(net, batch_size=batch)
        step = lambda x, y: jnp.mean((net(x) - y) ** 2)
        return brainstate.transform.grad(lambda: brainstate.transform.for_loop(step, xs, ys).sum(), params)()

    def online(rule: Any, **options: Any) -> Any:
        learner = rule(net)
        learner.compile_graph(xs[0])
        step = lambda x, y: jnp.mean((learner(x) - y) ** 2)

        def run(xs: Any, ys: Any) -> Any:
            learner.reset_state(batch)
            return learner.etrace_grad(xs, ys, step_fn=step, reduction="sum", **options)

        return run

    def step_by_step(rule: Any) -> Any:
        learner = rule(net)
        learner.compile_graph(xs[0])

        def run(xs: Any, ys: Any) -> Any:
            def one(total: Any, data: Any) -> Any:
                x, y = data
                grads = brainstate.transform.grad(lambda: jnp.mean((learner(x) - y) ** 2), params)()
                return jax.tree.map(jnp.add, total, grads), None

            learner.reset_state(batch)
            zeros = {k: jax.tree.map(jnp.zeros_like, v.value) for k, v in params.items()}
            return brainstate.transform.scan(one, zeros, (xs, ys))[0]

        return run

    found = measure(
        {
            "BPTT": bptt,
            "D_RTRL automatic": online(braintrace.D_RTRL),
            "D_RTRL automatic, traces dropped": online(braintrace.D_RTRL, keep_traces=False),
            "D_RTRL chunks of 25": online(braintrace.D_RTRL, chunk_size=25),
            "D_RTRL step by step": step_by_step(braintrace.D_RTRL),
            "ES_D_RTRL automatic": online(braintrace.ES_D_RTRL),
            "ES_D_RTRL step by step": step_by_step(braintrace.ES_D_RTRL),
        },
        xs,
        ys,
    )
    show(f"GRU {inputs}->{units}, batch {batch}, {steps} steps, {jax.default_backend()}", found)


def one_step(units: int = 256, batch: int = 16) -> None:
    """Compiling the gradient of one step: the plain model, and the learner."""
    x, y = jnp.ones((batch, 128)), jnp.ones((batch, 10))
    net = Net(128, units)
    brainstate.nn.init_all_states(net, batch_size=batch)
    params = net.states(brainstate.ParamState)
    learner = braintrace.D_RTRL(net)
    learner.compile_graph(x)

    def gradient(call: Any) -> Any:
        return lambda x, y: brainstate.transform.grad(lambda: jnp.mean((call(x) - y) ** 2), params)()

    show(
        f"one step of a GRU with {units} units",
        measure({"plain": gradient(net), "D_RTRL": gradient(learner)}, x, y),
    )


def rtrl(units: int = 64, steps: int = 64, chunk: int = 32) -> None:
    """Exact RTRL: one step at a time, and in windows."""
    xs = jnp.asarray(np.random.RandomState(0).randn(steps, 16), jnp.float32)
    net = braintrace.nn.ValinaRNNCell(16, units)
    brainstate.nn.init_all_states(net)
    params = net.states(brainstate.ParamState)
    learner = braintrace.RTRL(net)
    learner.compile_graph(xs[0])

    def over(parts: Any, wrap: Any) -> Any:
        def one(total: Any, x: Any) -> Any:
            grads = brainstate.transform.grad(lambda: jnp.sum(learner(wrap(x)) ** 2), params)()
            return jax.tree.map(jnp.add, total, grads), None

        learner.reset_state()
        zeros = {k: jax.tree.map(jnp.zeros_like, v.value) for k, v in params.items()}
        return brainstate.transform.scan(one, zeros, parts)[0]

    found = measure(
        {
            f"windows of {chunk}": lambda xs: over(xs.reshape(-1, chunk, 16), braintrace.MultiStepData),
            "step by step": lambda xs: over(xs, lambda x: x),
        },
        xs,
    )
    show(f"RTRL, {units} units, {steps} steps", found)


if __name__ == "__main__":
    sizes = [int(a) for a in sys.argv[1:]] or [128, 256, 16, 50]
    sequences(*sizes)
    one_step()
    rtrl()
