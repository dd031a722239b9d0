"""What is measured: ways to the gradient of a whole sequence, as functions `run(xs, ys)`.

Each begins with states and traces reset, so that what one call costs does not depend on the last. This file
also runs with the yardstick's own package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import nets
from nets import Case

import braintrace

Run = Callable[[Any, Any], Any]
SGD = 1e-3
STREAM = 10  # steps of a window of a stream


def loss_of(out: Any, y: Any) -> Any:
    return jnp.mean((out - y) ** 2)


class Plain:
    """The network by itself: forwards, or back-propagation through time."""

    def __init__(self, case: Case, neuron: nets.Neuron) -> None:
        self.case, self.net = case, nets.make(case, neuron)
        self.params = self.net.states(brainstate.ParamState)

    def losses(self, xs: Any, ys: Any) -> Any:
        return brainstate.transform.for_loop(lambda x, y: loss_of(self.net(x), y), xs, ys).sum()

    def reset(self) -> None:
        brainstate.nn.reset_all_states(self.net, batch_size=self.case.batch)

    def forward(self, xs: Any, ys: Any) -> Any:
        self.reset()
        return self.losses(xs, ys)

    def bptt(self, xs: Any, ys: Any) -> Any:
        self.reset()
        return brainstate.transform.grad(lambda: self.losses(xs, ys), self.params)()

    def checkpointed(self, xs: Any, ys: Any) -> Any:
        """BPTT that keeps the states at about every square root of T steps and computes the rest again."""
        self.reset()
        inner = brainstate.transform.checkpoint(self.losses)
        size = max(k for k in range(1, math.isqrt(len(xs)) + 1) if len(xs) % k == 0)
        cut = jax.tree.map(lambda a: a.reshape(-1, size, *a.shape[1:]), (xs, ys))
        loss = lambda: brainstate.transform.for_loop(inner, *cut).sum()
        return brainstate.transform.grad(loss, self.params)()


class Online:
    """The network in a learner."""

    def __init__(self, case: Case, neuron: nets.Neuron, rule: Any, **options: Any) -> None:
        self.case, self.net = case, nets.make(case, neuron)
        self.params = self.net.states(brainstate.ParamState)
        self.learner = rule(self.net, **options)
        self.learner.compile_graph(jnp.zeros((case.batch, case.inputs)))

    @property
    def trace_bytes(self) -> int:
        values = [st.value for st in self.learner.states(braintrace.EligibilityTrace).values()]
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(values))

    def loss(self, x: Any, y: Any) -> Any:
        return loss_of(self.learner(x), y)

    def sequence(self, **options: Any) -> Run:
        """The summed gradient of the sequence, by `etrace_grad`."""

        def run(xs: Any, ys: Any) -> Any:
            before = []
            if not options.get("keep_traces", True):
                lasting = self.learner._lasting_values()  # averages, which are kept
                before = [(st, st.value) for k, st in self.learner.traces.items() if k not in lasting]
            self.learner.reset_state(self.case.batch)
            found = self.learner.etrace_grad(xs, ys, step_fn=self.loss, reduction="sum", **options)
            for state, value in before:  # as `fit` does: no zeros are written for traces that are not kept
                state.value = value
            return found

        return run

    def sgd(self, xs: Any, ys: Any) -> Any:
        """True online learning: an update of the weights after every step."""

        def step(x: Any, y: Any) -> Any:
            grads, loss = brainstate.transform.grad(self.loss, self.params, return_value=True)(x, y)
            for key, state in self.params.items():
                state.value = jax.tree.map(lambda w, g: w - SGD * g, state.value, grads[key])
            return loss

        self.learner.reset_state(self.case.batch)
        return brainstate.transform.for_loop(step, xs, ys).sum()

    def stream(self, xs: Any, ys: Any) -> Any:
        """An update of the weights after every window of `STREAM` steps."""

        def window(x: Any, y: Any) -> Any:
            grads = self.learner.etrace_grad(x, y, step_fn=self.loss, reduction="sum")
            for key, state in self.params.items():
                state.value = jax.tree.map(lambda w, g: w - SGD * g, state.value, grads[key])
            return x.sum()

        self.learner.reset_state(self.case.batch)
        cut = jax.tree.map(lambda a: a.reshape(-1, STREAM, *a.shape[1:]), (xs, ys))
        return brainstate.transform.for_loop(window, *cut).sum()

    def floor(self, every: int) -> Run:
        """Read and write all traces once in `every` steps, and nothing else."""

        def run(xs: Any, ys: Any) -> Any:
            # not the steps that wait to be written to traces (`_executor/pending_steps.py`)
            traces = [st.value for k, st in self.learner.traces.items() if "pending" not in k]
            once = lambda c, _: (jax.tree.map(lambda a: (a * 0.999).astype(a.dtype), c), None)
            return jax.lax.scan(once, traces, None, len(xs) // every)

        return run


# of the package that is being developed
BPTT, CHECKPOINT, FORWARD = "BPTT", "BPTT, checkpoint", "forward"
D_AUTO, D_DROP, D_CHUNK = "D_RTRL automatic", "D_RTRL automatic, traces dropped", "D_RTRL chunks"
D_STEP, D_SGD, D_BF16 = "D_RTRL steps", "D_RTRL online SGD", "D_RTRL steps, bfloat16"
D_SGD_BF16 = "D_RTRL online SGD, bfloat16"
ES_AUTO, ES_DROP, ES_CHUNK = "ES_D_RTRL automatic", "ES_D_RTRL automatic, traces dropped", "ES_D_RTRL chunks"
ES_STEP, ES_SGD = "ES_D_RTRL steps", "ES_D_RTRL online SGD"
ES_SAME = "ES_D_RTRL steps, only weights that 0.2.6 learns"
WINDOWS = {f"D_RTRL windows of {n}": n for n in (5, 10, 20)}
(D_FIVE, D_TEN, D_TWENTY), ES_WIN = WINDOWS, "ES_D_RTRL windows"
D_RANK, D_PUSHED = "D_RTRL windows of 10, rank 8", "D_RTRL windows of 10, rank 8, pushed"
D_RANK_SGD = "D_RTRL online SGD, rank 4"
STREAMS = {f"D_RTRL SGD every {STREAM} steps, rank {r}": r for r in (1, 7, 8, 9, 16, 17, 32)}
FLOOR, STREAM_FLOOR = "byte floor of D_RTRL steps", f"byte floor of SGD every {STREAM} steps, rank 8"
PLAIN = (FORWARD, BPTT, CHECKPOINT)
D = (D_AUTO, D_DROP, D_CHUNK, *WINDOWS, D_RANK, D_PUSHED, D_STEP, D_BF16, D_SGD, D_SGD_BF16, FLOOR)
ES = (ES_AUTO, ES_DROP, ES_CHUNK, ES_WIN, ES_STEP, ES_SGD, ES_SAME)
OURS = PLAIN + D + ES
ONE_PASS = (*WINDOWS, D_RANK, D_PUSHED)  # whole sequences in windows
PERIOD = {D_RANK: 4}  # sequences over which the cost of a method is averaged: a balanced reach is of one in 4
# of the yardstick, which goes step by step
YARD_D, YARD_ES = "0.2.6 D_RTRL steps", "0.2.6 ES_D_RTRL steps"
YARD = (YARD_D, YARD_ES)


def make(case: Case, method: str, neuron: nets.Neuron = nets.neuron) -> tuple[Run, int]:
    """The function of a method, and the bytes of the traces that it carries."""
    if method in PLAIN:
        plain = Plain(case, neuron)
        return {FORWARD: plain.forward, BPTT: plain.bptt, CHECKPOINT: plain.checkpointed}[method], 0
    kinds: dict[str, dict[str, Any]] = {
        **{name: {"trace_dtype": jnp.bfloat16} for name in (D_BF16, D_SGD_BF16)},
        **{name: {"window": n} for name, n in WINDOWS.items()},
        ES_WIN: {"window": case.chunk},
        D_RANK: {"window": 10, "rank": 8},
        D_PUSHED: {"window": 10, "rank": 8, "basis": "pushed"},
        D_RANK_SGD: {"window": 1, "rank": 4},
        **{name: {"window": STREAM, "rank": r} for name, r in (*STREAMS.items(), (STREAM_FLOOR, 8))},
    }
    kind = kinds.get(method, {})
    if "ES_D_RTRL" in method:
        online = Online(case, neuron, braintrace.ES_D_RTRL, decay_or_rank=0.9, **kind)
    else:
        online = Online(case, neuron, braintrace.D_RTRL, **kind)
    if method in (FLOOR, STREAM_FLOOR):
        return online.floor(1 if method == FLOOR else STREAM), online.trace_bytes
    if method in STREAMS:
        return online.stream, online.trace_bytes
    if method in (D_SGD, D_SGD_BF16, ES_SGD, D_RANK_SGD):
        return online.sgd, online.trace_bytes
    if method in YARD:
        return online.sequence(), online.trace_bytes
    options: dict[str, Any] = {}
    if method in (D_CHUNK, ES_CHUNK):
        options["chunk_size"] = case.chunk
    if method in (D_STEP, D_BF16, ES_STEP, ES_SAME):
        options["chunk_size"] = 1
    if method == ES_SAME:  # it gives weights without a trace (a readout, a reset gate) a gradient of zero
        traced = online.learner.report.etrace_weights
        options["weights"] = {k: v for k, v in online.params.items() if tuple(map(str, k)) in traced}
    if method in (D_DROP, ES_DROP, ES_WIN, *ONE_PASS):
        options["keep_traces"] = False
    return online.sequence(**options), online.trace_bytes
