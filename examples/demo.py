"""Train a small GRU online to remember: a flag is shown once, and asked for many steps later.

The gradient of every step is there at once, from eligibility traces carried along with the state; nothing
is stored for later, whatever the length of the sequence. The same net trained by back-propagation through
time is shown beside it.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import optax

import braintrace

LENGTH, BATCH, UNITS = 20, 32, 32


class Net(brainstate.nn.Module):
    """A GRU and a plain readout: two logits."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = braintrace.nn.GRUCell(3, UNITS)
        self.readout = brainstate.nn.Linear(UNITS, 2)

    def update(self, x: Any) -> Any:
        return self.readout(self.cell(x))


def batch(key: Any) -> tuple[Any, Any]:
    """Inputs (time, batch, 3): the flag (first steps only), noise, and a cue at the end; and the flags."""
    flag_key, noise_key = jax.random.split(key)
    flags = jax.random.bernoulli(flag_key, 0.5, (BATCH,)).astype(int)
    time_axis = jnp.arange(LENGTH)[:, None]
    shown = jnp.where(time_axis < 3, 2.0 * flags[None] - 1.0, 0.0)
    noise = 0.3 * jax.random.normal(noise_key, (LENGTH, BATCH))
    cue = jnp.broadcast_to(jnp.where(time_axis >= LENGTH - 5, 1.0, 0.0), (LENGTH, BATCH))
    return jnp.stack([shown, noise, cue], -1), flags


def step_loss(logits: Any, flags: Any, x: Any) -> tuple[Any, Any]:
    """The loss where the cue asks, and whether the answers are right there."""
    asked = x[:, 2] > 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, flags)
    right = (logits.argmax(-1) == flags) & asked
    return jnp.mean(losses * asked), right.sum() / BATCH


def trainer(learns_online: bool) -> Any:
    """A function that trains on one batch and returns the loss and the share of right answers."""
    brainstate.random.seed(0)
    net = Net()
    brainstate.nn.init_all_states(net, batch_size=BATCH)
    params = net.states(brainstate.ParamState)
    optimizer = optax.adam(1e-2)
    opt_state = brainstate.ShortTermState(optimizer.init({k: v.value for k, v in params.items()}))
    learner = braintrace.D_RTRL(net)
    learner.compile_graph(jnp.zeros((BATCH, 3)))

    def online(xs: Any, flags: Any) -> Any:
        def step(x: Any) -> Any:
            loss = lambda: step_loss(learner(x), flags, x)
            grads, value, right = brainstate.transform.grad(loss, params, has_aux=True, return_value=True)()
            return grads, value, right

        learner.reset_state(BATCH)
        grads, losses, rights = brainstate.transform.for_loop(step, xs)
        return jax.tree.map(lambda g: g.sum(0), grads), losses.sum(), rights.sum()

    def through_time(xs: Any, flags: Any) -> Any:
        def total() -> Any:
            losses, rights = brainstate.transform.for_loop(lambda x: step_loss(net(x), flags, x), xs)
            return losses.sum(), rights.sum()

        brainstate.nn.reset_all_states(net, batch_size=BATCH)
        return brainstate.transform.grad(total, params, has_aux=True, return_value=True)()

    @brainstate.transform.jit
    def train(xs: Any, flags: Any) -> Any:
        grads, loss, right = (online if learns_online else through_time)(xs, flags)
        updates, opt_state.value = optimizer.update(grads, opt_state.value)
        for key, state in params.items():
            state.value = optax.apply_updates(state.value, updates[key])
        return loss, right / 5

    return train, learner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=300)
    options = parser.parse_args()
    names = ("online (D_RTRL)", "through time (BPTT)")
    trainers = [trainer(True), trainer(False)]
    print("What is learned how:\n")
    trainers[0][1].show_graph()
    print(f"\nTraining on {options.batches} batches of {BATCH} sequences of {LENGTH} steps.\n")
    for name, (train, _) in zip(names, trainers, strict=True):
        start = time.time()
        first = None
        for i in range(options.batches):
            loss, right = train(*batch(jax.random.PRNGKey(i)))
            first = loss if first is None else first
            if i in (0, 9, 24, 49) or i % 100 == 99:
                line = (
                    f"{name:20s} batch {i + 1:4d}  loss {float(loss):7.4f}  right {100 * float(right):5.1f} %"
                )
                end = "\r" if sys.stdout.isatty() else "\n"
                print(line, end=end, flush=True)
        print(
            f"{name:20s} loss {float(first):.3f} -> {float(loss):.3f} in {time.time() - start:.0f} s"
            + " " * 20
        )


if __name__ == "__main__":
    main()
