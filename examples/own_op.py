"""An operation of your own: neurons with dendrites, each with synapses that no other neuron has.

An operation is an ordinary JAX function and its axis labels. In `bnk,nk->bn`, the weight (n, k) is multiplied
by the input (batch, n, k) and summed over k. Shape and arithmetic of the trace follow from these labels.

    python examples/own_op.py [--quick]
"""

import sys
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace

QUICK = "--quick" in sys.argv
NEURONS, SYNAPSES, INPUTS = 32, 4, 10


def dendrites(x: Any, weight: Any) -> Any:
    """y[b, n] = sum_k x[b, n, k] weight[n, k]"""
    return jnp.einsum("bnk,nk->bn", x, weight)


dendrites_p = braintrace.register_primitive("dendrites", dendrites, "bnk,nk->bn")


class Net(brainstate.nn.Module):
    """Each neuron listens to four of the inputs and leaks; the readout sees all neurons."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        self.inputs_of = jnp.asarray(rng.integers(INPUTS, size=(NEURONS, SYNAPSES)))
        self.weight = brainstate.ParamState(
            jnp.asarray(rng.standard_normal((NEURONS, SYNAPSES)), jnp.float32)
        )
        self.readout = brainstate.nn.Linear(NEURONS, 1)

    def init_state(self, batch_size: int | None = None, **_: Any) -> None:
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, NEURONS)))

    def reset_state(self, batch_size: int | None = None, **_: Any) -> None:
        self.h.value = jnp.zeros((batch_size, NEURONS))

    def update(self, x: Any) -> Any:
        drive = dendrites_p(x[:, self.inputs_of], weights={"weight": self.weight.value})
        self.h.value = 0.9 * self.h.value + 0.1 * jnp.tanh(drive)
        return self.readout(self.h.value)


rng = np.random.default_rng(1)
xs = jnp.asarray(rng.standard_normal((20, 16, INPUTS)), jnp.float32)
gradients = []
for algorithm in (braintrace.BPTT, braintrace.D_RTRL):
    brainstate.random.seed(0)
    learner = braintrace.compile(Net(), algorithm, xs[0], batch_size=16)
    loss = lambda x, f=learner: jnp.mean((f(x) - 1) ** 2)
    gradient = brainstate.transform.jit(lambda f=learner, loss=loss: f.etrace_grad(xs, step_fn=loss))
    gradients.append(gradient())
errors = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), *gradients)
print("distance to the gradient of BPTT:", {".".join(map(str, k)): v for k, v in errors.items()})
assert max(jax.tree.leaves(errors)) < 1e-5


def batches(number: int) -> Any:
    """To learn: the running average of a function of two inputs."""
    for _ in range(number):
        xs = rng.standard_normal((20, 16, INPUTS)).astype(np.float32)
        target, h = [], np.zeros(16, np.float32)
        for x in xs:
            h = 0.9 * h + 0.1 * np.tanh(x[:, 0] + x[:, 1])
            target.append(h[:, None])
        yield xs, np.stack(target)


loss = lambda x, y: jnp.mean((learner(x) - y) ** 2)
result = braintrace.fit(learner, batches(20 if QUICK else 500), loss, optax.adam(1e-2))
first, final = result.history[0]["loss"], result.metrics["loss"]
print(f"loss {first:.4f} -> {final:.4f}")
assert final < (0.8 if QUICK else 0.3) * first
