"""Run the examples and draw a picture of each: `make gallery`, or `python docs/gallery.py NAME ...`."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

EXAMPLES = Path(__file__).parent.parent / "examples"
PICTURES = Path(__file__).parent / "static" / "gallery"
BLUE, RED = "#0072b2", "#d55e00"


def learning_curve(found: dict[str, Any], axes: Any) -> None:
    """Plot the loss of the batches, and its moving average."""
    result = found["result"]
    x, y = result.curve("loss")
    width = max(1, len(y) // 25)
    axes.plot(x, y, color=BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(x[width - 1 :], np.convolve(y, np.ones(width) / width, "valid"), color=BLUE)
    axes.set(title="loss", xlabel="batch", ylim=(0, None))


def run_model(found: dict[str, Any], xs: Any, read: Callable[[Any, Any], Any]) -> Any:
    """Drive the trained model over `xs` and stack `read(model, output)` of each step."""
    model = found["learner"].model
    batch = {"batch_size": xs.shape[1]} if xs.ndim > 2 else {}
    brainstate.nn.init_all_states(model, **batch)
    return np.asarray(brainstate.transform.for_loop(lambda x: read(model, model(x)), jnp.asarray(xs)))


def raster(found: dict[str, Any], axes: Any) -> None:
    xs, _, _ = found["task"].batch(seed=0, index=0, batch_size=2, split="test")
    spikes = run_model(found, xs, lambda model, _: model.neurons.get_spike())[:, 0]
    step, neuron = np.nonzero(spikes)
    axes.scatter(step, neuron, s=2, color="black", linewidths=0)
    axes.set(title="spikes of one trial", xlabel="step", ylabel="neuron")


def copied(found: dict[str, Any], axes: Any) -> None:
    outs = jax.nn.softmax(jnp.asarray(found["outs"][:, 0]), -1)
    axes.imshow(np.asarray(outs).T, aspect="auto", cmap="Blues", vmin=0, vmax=1)
    axes.set(title="predicted letters of one sequence", xlabel="step", ylabel="letter")


def predicted(found: dict[str, Any], axes: Any) -> None:
    series, ahead = found["series"], found["AHEAD"]
    outs = run_model(found, series[-1000:-ahead], lambda _, out: out)
    axes.plot(series[-300:], color="black", linewidth=0.8, label="series")
    axes.plot(outs[-300:], color=RED, linewidth=0.8, label=f"predicted {ahead} steps ahead")
    axes.set(title="the last 300 steps", xlabel="step")
    axes.legend(fontsize=7, loc="lower left")


def adaptation(found: dict[str, Any], axes: Any) -> None:
    axes.plot(found["errors"], color=BLUE)
    axes.axhline(found["trained"], color="gray", linestyle=":", label="before the drift")
    axes.set(title="error after the sensors drifted", xlabel="batch of the adapter", ylim=(0, None))
    axes.legend(fontsize=7)


def film(found: dict[str, Any], axes: Any) -> None:
    films, ways, _ = next(found["batches"](1))
    axes.imshow(np.concatenate([*films[::2, 0, ..., 0]], 1), cmap="gray")
    axes.set(title=f"every second frame: {found['WAYS'][int(ways[0, 0])]}", xticks=[], yticks=[])


def synapses(found: dict[str, Any], axes: Any) -> None:
    net, end = found["net"], found["end"]
    dense = np.zeros((found["UNITS"],) * 2)
    indices, starts = np.asarray(net.synapses.indices), np.asarray(net.synapses.indptr)
    for row in range(len(dense)):
        here = slice(starts[row], starts[row + 1])
        dense[row, indices[here]] = end[here]
    size = np.abs(dense).max() / 2
    axes.imshow(dense, cmap="RdBu_r", vmin=-size, vmax=size)
    axes.set(title="learned synapses", xlabel="to neuron", ylabel="from neuron")


def written(found: dict[str, Any], axes: Any) -> None:
    axes.text(0, 1, found["write"](420), family="monospace", fontsize=6, va="top", wrap=True)
    axes.set(title="written by the network")
    axes.axis("off")


def followed(found: dict[str, Any], axes: Any) -> None:
    """Plot the target of one sequence and the output for it."""
    if "task" in found:
        xs, ys, _ = found["task"].batch(seed=1, index=0, batch_size=2)
    else:
        xs, ys = next(found["batches"](1))
    outs = run_model(found, np.asarray(xs), lambda _, out: out)
    axes.plot(ys[:, 0, 0], color="black", linewidth=0.8, label="target")
    axes.plot(outs[:, 0, 0], color=RED, linewidth=0.8, label="output")
    axes.set(title="one sequence", xlabel="step")
    axes.legend(fontsize=7)


def turns(found: dict[str, Any], axes: Any) -> None:
    right = [int(part) for part in re.findall(r"the right turn in +(\d+)%", found["printed"])]
    axes.plot(
        np.linspace(0.1, 1, len(right)) * 4 * found["STEPS"], right, color=BLUE, marker="o", markersize=3
    )
    axes.set(title="right turns, in per cent", xlabel="step", ylim=(0, 105))


PANELS: dict[str, list[Callable[[dict[str, Any], Any], None]]] = {
    "gru_copying": [learning_curve, copied],
    "spiking_digits": [learning_curve, raster],
    "alif_evidence": [learning_curve, raster],
    "streaming_prediction": [learning_curve, predicted],
    "streaming_agent": [turns],
    "lora_drift": [adaptation],
    "conv_frontend": [learning_curve, film],
    "sparse_ei": [learning_curve, synapses],
    "char_lm": [learning_curve, written],
    "own_op": [learning_curve, followed],
    "own_rule": [learning_curve, followed],
}


def draw(name: str) -> None:
    """Run an example, and write its picture and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        found = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    plt.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
    panels = PANELS[name]
    size = (3.6 * len(panels), 2.4)
    figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for panel, ax in zip(panels, axes[0], strict=True):
        panel({**found, "printed": printed.getvalue()}, ax)
    PICTURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURES / f"{name}.png", dpi=120, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    if len(sys.argv) == 2:
        draw(sys.argv[1])
    else:  # each in a process of its own
        for name in sys.argv[1:] or PANELS:
            print(name, flush=True)
            subprocess.run([sys.executable, __file__, name], check=True)
