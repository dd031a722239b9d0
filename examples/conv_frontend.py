"""A convolution in front of leaky units learns, online, which way a bar moves.

A single frame does not show the direction. The state is a fading image of earlier frames, and the trace of
the convolution's kernel follows it. Units depend on themselves only, so the online gradient equals that of
BPTT.

    python examples/conv_frontend.py [--quick]
"""

import sys
from collections.abc import Iterator
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace

QUICK = "--quick" in sys.argv
SIZE, CHANNELS = 8, 8
WAYS = ("right", "left", "down", "up")


def batches(number: int) -> Iterator[tuple[Any, Any, Any]]:
    """Noisy films (time, batch, 8, 8, 1) of a bar that crosses the frame, and which of four ways it goes."""
    rng = np.random.default_rng(0)
    for _ in range(number):
        ways, starts = rng.integers(4, size=32), rng.integers(SIZE, size=32)
        films = 0.1 * rng.standard_normal((SIZE, 32, SIZE, SIZE, 1), np.float32)
        for t in range(SIZE):
            for film, way, start in zip(films[t], ways, starts, strict=True):
                place = (start + (t if way % 2 == 0 else -t)) % SIZE
                film[(slice(None), place) if way < 2 else place] += 1
        yield films, np.broadcast_to(ways.astype(np.int32), (SIZE, 32)), np.arange(SIZE) >= SIZE // 2


class Net(brainstate.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = braintrace.nn.Conv2d((SIZE, SIZE, 1), CHANNELS, kernel_size=3)
        self.readout = braintrace.nn.Linear(CHANNELS, len(WAYS))

    def init_state(self, batch_size: int | None = None, **_: Any) -> None:
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, SIZE, SIZE, CHANNELS)))

    def reset_state(self, batch_size: int | None = None, **_: Any) -> None:
        self.h.value = jnp.zeros((batch_size, SIZE, SIZE, CHANNELS))

    def update(self, x: Any) -> Any:
        self.h.value = 0.7 * self.h.value + self.conv(x)
        return self.readout(jax.nn.relu(self.h.value).mean((1, 2)))


def step(x: Any, way: Any) -> tuple[Any, Any]:
    out = learner(x)
    loss = optax.softmax_cross_entropy_with_integer_labels(out, way).mean()
    return loss, {"accuracy": (out.argmax(-1) == way).mean()}


brainstate.random.seed(0)
learner = braintrace.D_RTRL(Net())
result = braintrace.fit(learner, batches(20 if QUICK else 300), step, optax.adam(2e-2))
learner.show_graph()
accuracy = result.metrics["accuracy"]
print(f"accuracy {accuracy:.3f} (chance 0.25)")
assert result.metrics["loss"] < result.history[0]["loss"]
assert QUICK or accuracy > 0.9
