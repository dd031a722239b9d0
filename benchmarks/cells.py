"""Our GRU and LSTM against `brainstate.nn`'s: the time of a step, forwards and in BPTT, and the ratio.

    python benchmarks/cells.py [--quick]        (benchmarks/results/cpu/cells.txt)

A step is one of a hundred in a scan; BPTT is the gradient of a loss over it. The two packages are timed in
turns, and the best of many repeats counts, so that whatever else runs on the machine hits both alike; pin
it to one core (`taskset -c 0`) if much does. `noise` is the ratio of two copies of the same cell of
`brainstate.nn`, measured in the same way.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from braintrace import nn


def step_of(cell: Any, x: Any) -> tuple[Callable[..., Any], Any, Any]:
    """A cell as `(params, h, x) -> (h, output)`, its parameters and its hidden state."""
    brainstate.nn.init_all_states(cell, batch_size=x.shape[0])
    function = brainstate.transform.StatefulFunction(cell.update, return_only_write=False).make_jaxpr(x)
    states = function.get_states(x)
    is_param = [isinstance(s, brainstate.ParamState) for s in states]

    def step(p: Any, h: Any, x: Any) -> Any:
        params, hidden = iter(p), iter(h)
        new, out = function.jaxpr_call([next(params if i else hidden) for i in is_param], x)
        return [v for v, i in zip(new, is_param, strict=True) if not i], out

    values = [
        [s.value for s, i in zip(states, is_param, strict=True) if i == which] for which in (True, False)
    ]
    return step, *values


def forward_of(step: Callable[..., Any]) -> Callable[..., Any]:
    return lambda p, h, xs: jax.lax.scan(lambda h, x: step(p, h, x), h, xs)


def bptt_of(step: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda p, h, xs: jnp.mean(forward_of(step)(p, h, xs)[1] ** 2))


def best_of(runs: list[Callable[[], Any]], seconds: float) -> list[float]:
    """The best time of each, taken in turns for so many seconds."""
    best, many = [float("inf")] * len(runs), []
    for run in runs:
        jax.block_until_ready(run())
        start = time.perf_counter()
        jax.block_until_ready(run())
        many.append(max(1, int(2e-3 / (time.perf_counter() - start))))  # clocks are coarse
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, run in enumerate(runs):
            start = time.perf_counter()
            for _ in range(many[i]):
                out = run()
            jax.block_until_ready(out)
            best[i] = min(best[i], (time.perf_counter() - start) / many[i])
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two sizes, one second each")
    quick = parser.parse_args().quick
    seconds = 1.0 if quick else 4.0
    titles = f"{'cell':6}{'units':>6}{'batch':>6}{'':>9}{'ours us':>10}{'theirs us':>10}"
    print(f"{titles}{'ratio':>7}{'noise':>7}")
    for name in ("GRUCell", "LSTMCell"):
        for units in (64, 256) if quick else (64, 128, 256, 512, 1024):
            for batch in (1, 32):
                xs = jax.random.normal(jax.random.key(0), (100, batch, units))
                makers = (getattr(m, name) for m in (nn, brainstate.nn, brainstate.nn))
                steps = [step_of(make(units, units), xs[0]) for make in makers]
                for what, function_of in (("forward", forward_of), ("bptt", bptt_of)):
                    runs = [partial(jax.jit(function_of(step)), p, h, xs) for step, p, h in steps]
                    ours, theirs, again = (t * 1e6 / len(xs) for t in best_of(runs, seconds))
                    row = f"{name[:-4]:6}{units:6}{batch:6}{what:>9}{ours:10.1f}{theirs:10.1f}"
                    print(f"{row}{ours / theirs:7.2f}{again / theirs:7.2f}", flush=True)


if __name__ == "__main__":
    main()
